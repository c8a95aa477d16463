"""Unmodified Kafka clients as newer-protocol group members over several processes or shards, each of which is killed.

Every record is read, and committed offsets survive. The clients are not part of this project; see ``test_kafka``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from polywire.client.sync import connect
from polywire.records.columns import Record
from tests.broker_process import BrokerProcess
from tests.crash.test_processes import has_another, pid_of
from tests.crash.test_shards import SHARDS, TOPICS, leader_pid, leaders, url_of
from tests.crash.test_standby import _cluster
from tests.interop.kafka_peer import NEXT, PEERS, SECONDS_MAX, Member, Peer, Toolbox, until
from tests.interop.test_cursus_leaders import first_port

PARTITIONS = 2
EACH = 5  # records of a round, to each partition
OF_PROCESSES = [f"made-{number}" for number in range(4)]  # they are created in the processes in turn
MEMBERS = [*NEXT, *(peer for peer in PEERS if peer.name in ("confluent-kafka", "java"))]

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="several processes share addresses on Linux only")
Place = tuple[str, int, int]


@pytest.fixture(scope="module")
def toolbox(tmp_path_factory: pytest.TempPathFactory) -> Toolbox:
    return Toolbox(tmp_path_factory.mktemp("drivers"))


class Together:
    """Processes that clients see as one cluster, with topics in each of them."""

    def __init__(self, broker: BrokerProcess, topics: list[str], folder: Path, *, is_bucket: bool) -> None:
        self.broker = broker
        self.topics = topics
        self._folder = folder
        self._is_bucket = is_bucket
        self._produced: dict[tuple[str, int], int] = {}
        with connect(broker.url("polywire")) as client:
            for topic in topics:
                client.create_topic(topic, PARTITIONS)

    @property
    def address(self) -> str:
        host, port = self.broker.addresses["kafka"]
        return f"{host}:{port}"

    def kill(self, shard: int) -> None:
        """End the process of a shard, and wait until it is replaced."""
        if self._is_bucket:
            pid = leader_pid(self._folder, "one", shard)
            os.kill(pid, signal.SIGKILL)
            until(lambda: self._leads(shard, pid), lambda: "no leader")
            return
        pid = pid_of(self.broker.data_dir, shard)
        os.kill(pid, signal.SIGKILL)
        until(lambda: has_another(self.broker.data_dir, shard, pid), lambda: "not started again")

    def _leads(self, shard: int, was: int) -> bool:
        try:
            return leader_pid(self._folder, "one", shard) != was
        except (OSError, IndexError):
            return False

    def produce(self) -> set[Place]:
        """Write to every partition; return everything written by now."""
        end = time.monotonic() + SECONDS_MAX
        for topic in self.topics:
            for partition in range(PARTITIONS):
                self._write(topic, partition, end)
        return {
            (topic, partition, offset)
            for (topic, partition), count in self._produced.items()
            for offset in range(count)
        }

    def _write(self, topic: str, partition: int, end: float) -> None:
        """Write until it succeeds: a process may be restarting."""
        while True:
            try:
                with connect(self.broker.url("polywire")) as client:
                    stored = client.produce(topic, [Record(b"%d" % at) for at in range(EACH)], partition=partition)
                break
            except Exception:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
        self._produced[topic, partition] = stored[-1].offset + 1

    def committed(self, group: str) -> dict[tuple[str, int], int | None]:
        """Return the offsets of a group."""
        with connect(self.broker.url("polywire")) as client:
            return {place: client.position(group, *place) for place in self._produced}

    @property
    def produced(self) -> dict[tuple[str, int], int]:
        return dict(self._produced)


@pytest.fixture(scope="module", params=["processes", "bucket"])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    folder = tmp_path_factory.mktemp(request.param)
    wires = ["kafka", "polywire"]
    if request.param == "processes":
        with BrokerProcess(folder / "data", "--processes", str(SHARDS), wires=wires) as broker:
            yield Together(broker, OF_PROCESSES, folder, is_bucket=False)
            assert broker.stop() == 0, broker.log_text()
        return
    url = url_of(folder)
    _cluster("init", url, "--shards", str(SHARDS))
    options = (
        "--bucket",
        url,
        "--node",
        "one",
        "--shard-port",
        str(first_port()),
    )  # librdkafka looks for brokers at their former addresses
    with BrokerProcess(folder / "one", *options, wires=wires) as broker:
        until(lambda: None not in leaders(url), lambda: leaders(url))
        yield Together(broker, [name for names in TOPICS.values() for name in names], folder, is_bucket=True)
        assert broker.stop() == 0, broker.log_text()


@pytest.mark.parametrize("peer", MEMBERS, ids=lambda peer: peer.name)
def test_members_read_topics_of_all_while_each_process_is_killed(
    toolbox: Toolbox, together: Together, peer: Peer
) -> None:
    toolbox.command(peer)
    group, named = f"all-{peer.name}", ",".join(together.topics)
    members: list[Member] = []

    def all_read(wanted: set[Place]) -> None:
        until(
            lambda: {place for member in members for place in member.places} >= wanted,
            lambda: sorted(wanted - {place for member in members for place in member.places}),
        )

    with ExitStack() as stack:

        def join() -> Member:
            members.append(stack.enter_context(Member(toolbox, peer, together.address, named, group)))
            return members[-1]

        first, second = join(), join()
        all_read(together.produce())
        before = [len(member.places) for member in members]
        until(lambda: _both_read(together, members, before), lambda: [member.places for member in members])
        for shard in range(SHARDS):
            together.kill(shard)
            all_read(together.produce())
        first.stop()
        all_read(together.produce())
        second.kill()  # its partitions move when its session expires
        third = join()
        all_read(together.produce())
        third.stop()
    assert together.committed(group) == together.produced
    count = len(members)
    with Member(toolbox, peer, together.address, named, group) as last:
        wanted = together.produce()
        until(lambda: len(set(last.places)) >= len(together.topics) * PARTITIONS * EACH, lambda: (count, last.places))
        assert set(last.places) <= wanted
        assert len(last.places) == len(together.topics) * PARTITIONS * EACH, "nothing committed is read again"


def _both_read(together: Together, members: list[Member], before: list[int]) -> bool:
    """Return whether both members read new records."""
    if all(len(member.places) > was for member, was in zip(members, before, strict=True)):
        return True
    together.produce()
    time.sleep(0.5)
    return False


def test_a_pattern_matches_topics_of_all_processes(toolbox: Toolbox, together: Together) -> None:
    """Including topics created later in any process."""
    (peer, *_) = NEXT
    toolbox.command(peer)
    wanted: set[Place] = set()

    def make(name: str) -> None:
        with connect(together.broker.url("polywire")) as client:
            for topic in (f"{name}-{number}" for number in range(4)):
                client.create_topic(topic, 1)
                client.produce(topic, [Record(b"1")], partition=0)
                wanted.add((topic, 0, 0))

    make("pattern")
    with Member(toolbox, peer, together.address, "^pattern-.*", "by-pattern") as member:
        until(lambda: set(member.places) >= wanted, lambda: wanted - set(member.places))
        make("pattern-later")
        until(lambda: set(member.places) >= wanted, lambda: wanted - set(member.places))
        member.stop()
