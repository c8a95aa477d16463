"""``kill -9`` between two slices of a change of a topic with thousands of partitions: a start resumes from any state.

A killed process leaves what its files hold at that moment, so a copy of them replaces it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import SLICE_S
from polywire.broker.topic_verbs import AT_ONCE_MAX
from polywire.clock import SystemClock
from polywire.log.settings import LogSettings
from polywire.types import Level, TopicName
from tests.unit.broker.answers import Answers, batch_of
from tests.unit.log.rig import RigLoop

WIDE = TopicName("default", "wide")
COUNT = AT_ONCE_MAX + 100
SIZES = LogSettings(slot_bytes=256 * 1024, slot_count_max=4, sync_interval_ms=2, disk_reserve_bytes=0)
PER_SLICE = 100


class CountingClock(SystemClock):
    """A clock by which a slice has time for that many steps, however fast the machine is."""

    def __init__(self) -> None:
        self._calls = count()

    def monotonic(self) -> float:
        return next(self._calls) * SLICE_S / PER_SLICE


class Started:
    """A broker on files, and its loop."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.loop = RigLoop()
        self.broker = Broker.open(directory, BrokerSettings(), self.loop, CountingClock(), log_settings=SIZES)

    def until(self, done: Answers) -> None:
        self.loop.run_until(lambda: done.reported)
        done.check()

    def make(self, partitions: int = COUNT) -> None:
        done = Answers()
        self.broker.make_topic(WIDE, partitions, then=lambda _: None, done=done)
        self.until(done)

    def fill(self) -> None:
        for partition in self.broker.topic("wide").partitions:
            self.broker.produce(partition, batch_of(b"v"), level=Level.MEMORY, done=None)
        done = Answers()
        self.broker.settle(Level.SYNCED, done)
        self.until(done)

    def states(self) -> tuple[int, int]:
        """Return the partitions of the topic, and those of the log."""
        topic = self.broker.find_topic("wide")
        return (0 if topic is None else len(topic.partitions)), len(self.broker._log.incarnations())

    def check_use(self) -> None:
        """Assert that the broker drops partitions without a topic, and can be used."""
        named = len(list(self.broker._catalog.incarnations()))
        self.loop.run_until(lambda: self.states()[1] == named)
        topic = self.broker.create_topic(TopicName("default", "after"), 2)
        done = Answers()
        self.broker.produce(topic.partitions[0], batch_of(b"v"), level=Level.SYNCED, done=done)
        self.until(done)


def killed_everywhere(
    tmp_path: Path, prepare: Callable[[Started], None], ask: Callable[[Broker, Answers], object]
) -> list[tuple[int, int]]:
    """Kill after each pass of the loop; return the partitions of the topic and of the log that starts find."""
    living = Started(tmp_path / "living")
    prepare(living)
    done = Answers()
    found: list[tuple[int, int]] = []
    ask(living.broker, done)
    while not done.reported:
        living.loop.run_pass(0.001)
        copy = tmp_path / f"killed-{len(found)}"
        shutil.copytree(living.directory, copy)
        again = Started(copy)
        found.append(again.states())
        again.check_use()
        again.broker.close()
        shutil.rmtree(copy)
    done.check()
    living.broker.close()
    return found


def test_a_topic_exists_with_all_its_partitions_or_not_at_all(tmp_path: Path) -> None:
    found = killed_everywhere(
        tmp_path,
        lambda _: None,
        lambda broker, done: broker.make_topic(WIDE, COUNT, then=lambda _: None, done=done),
    )
    assert {partitions for partitions, _ in found} == {0, COUNT}
    assert any(not partitions and in_log for partitions, in_log in found), "a kill happened between two slices"
    assert found[-1] == (COUNT, COUNT)


def test_a_growing_topic_has_its_old_partitions_or_all(tmp_path: Path) -> None:
    found = killed_everywhere(
        tmp_path,
        lambda started: started.make(2),
        lambda broker, done: broker.grow_topic(broker.topic("wide"), COUNT + 2, done=done),
    )
    assert {partitions for partitions, _ in found} == {2, COUNT + 2}
    assert any(partitions == 2 < in_log for partitions, in_log in found), "a kill happened between two slices"


def test_a_deleted_topic_is_gone_once_acknowledged(tmp_path: Path) -> None:
    def prepare(started: Started) -> None:
        started.make()
        started.fill()

    found = killed_everywhere(
        tmp_path, prepare, lambda broker, done: broker.delete_topic(broker.topic("wide"), done=done)
    )
    assert {partitions for partitions, _ in found} <= {0, COUNT}
    assert any(not partitions and in_log for partitions, in_log in found), "a kill happened between two slices"
    assert found[-1] == (0, 0)
