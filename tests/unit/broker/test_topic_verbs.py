"""Topics of thousands of partitions are changed in slices; what clients see in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import SLICE_S
from polywire.broker.topic_verbs import AT_ONCE_MAX
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Busy, ErrorCode, Missing
from polywire.testing.loop import ManualLoop, SimulatedClock
from polywire.testing.memory_broker import MemoryBroker
from polywire.testing.memory_log import MemoryLog
from polywire.types import Level, TopicName
from tests.unit.broker.answers import Answers, batch_of

WIDE = TopicName("default", "wide")
COUNT = AT_ONCE_MAX + 300
PER_SLICE = 50  # partitions that one slice has time for
TOUCHES = ("open_partition", "drop_partition", "trim")


class Counted:
    """A broker in memory that counts the log partitions each pass of the loop touches; each takes part of a slice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: BrokerSettings | None = None) -> None:
        self.memory = MemoryBroker(settings)
        self.touched: Counter[str] = Counter()
        for verb in TOUCHES:
            self._count(monkeypatch, verb)

    def _count(self, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
        real: Callable[..., Any] = getattr(MemoryLog, verb)

        def counted(*args: Any) -> Any:
            self.touched[verb] += 1
            assert isinstance(self.memory.clock, SimulatedClock)
            self.memory.clock.advance(SLICE_S / PER_SLICE)
            return real(*args)

        monkeypatch.setattr(MemoryLog, verb, counted)

    def run_pass(self) -> int:
        """Run one pass; return how many partitions it touched."""
        assert isinstance(self.memory.loop, ManualLoop)
        before = self.touched.total()
        self.memory.loop.run_pass()
        return self.touched.total() - before

    def run(self, done: Answers) -> list[int]:
        """Run passes until the work is done; return the number of partitions each touched."""
        passes = []
        while not done.reported:
            passes.append(self.run_pass())
        return passes

    def make(self, count: int = COUNT) -> Topic:
        """Create the wide topic."""
        done = Answers()
        self.memory.broker.make_topic(WIDE, count, then=lambda _: None, done=done)
        self.run(done)
        done.check()
        self.touched.clear()
        return self.memory.broker.topic("wide")

    def fill(self, topic: Topic) -> None:
        """Write a record to every partition."""
        for partition in topic.partitions:
            self.memory.broker.produce(partition, batch_of(b"v"), level=Level.MEMORY, done=None)
        self.memory.broker.commit()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def open_in_log(memory: MemoryBroker) -> int:
    return len(memory.log.incarnations())


# Slices


def test_a_wide_topic_is_created_in_slices_and_visible_when_complete(counted: Counted) -> None:
    broker, done = counted.memory.broker, Answers()
    seen: list[int] = []
    assert not broker.make_topic(WIDE, COUNT, then=lambda topic: seen.append(len(topic.partitions)), done=done)
    assert counted.touched.total() == 0
    passes = []
    while not done.reported:
        assert broker.find_topic("wide") is None or len(broker.topic("wide").partitions) == COUNT
        passes.append(counted.run_pass())
    done.check()
    assert max(passes) <= PER_SLICE + 1
    assert sum(passes) == COUNT == counted.touched["open_partition"]
    assert seen == [COUNT]


def test_a_narrow_topic_is_created_at_once(counted: Counted) -> None:
    done = Answers()
    seen: list[Topic] = []
    assert counted.memory.broker.make_topic(WIDE, AT_ONCE_MAX, then=seen.append, done=done)
    assert seen == [counted.memory.broker.topic("wide")]
    assert not done.reported


def test_a_topic_grows_in_slices(counted: Counted) -> None:
    topic, done = counted.make(1), Answers()
    assert not counted.memory.broker.grow_topic(topic, 1 + COUNT, done=done)
    assert max(counted.run(done)) <= PER_SLICE + 1
    done.check()
    assert len(topic.partitions) == 1 + COUNT
    assert [partition.number for partition in topic.partitions] == list(range(1 + COUNT))


def test_a_wide_topic_disappears_at_once_and_the_log_drops_it_in_slices(counted: Counted) -> None:
    topic, done = counted.make(), Answers()
    counted.memory.broker.delete_topic(topic, done=done)
    assert counted.memory.broker.find_topic("wide") is None
    assert all(partition.ended for partition in topic.partitions)
    passes = counted.run(done)
    done.check()
    assert max(passes) <= PER_SLICE + 1
    assert counted.touched["drop_partition"] == COUNT
    assert open_in_log(counted.memory) == 0


def test_a_topic_shrinks_at_once_and_the_log_drops_the_rest_in_slices(counted: Counted) -> None:
    topic, done = counted.make(), Answers()
    counted.memory.broker.shrink_topic(topic, 2, done=done)
    assert len(topic.partitions) == 2
    assert max(counted.run(done)) <= PER_SLICE + 1
    done.check()
    assert open_in_log(counted.memory) == 2


def test_a_sliced_purge_of_a_wide_topic_drops_only_older_records(counted: Counted) -> None:
    topic, done = counted.make(), Answers()
    counted.fill(topic)
    assert not counted.memory.broker.purge_topic(topic, done=done)
    counted.run_pass()
    counted.fill(topic)
    assert max(counted.run(done)) <= PER_SLICE + 1
    done.check()
    assert {(partition.log.first_offset, partition.log.next_offset) for partition in topic.partitions} == {(1, 2)}


def test_drops_that_the_log_refuses_are_retried(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, done = counted.make(), Answers()
    counted.memory.broker.delete_topic(topic, done=done)
    counted.run_pass()
    drop, has_room = MemoryLog.drop_partition, False

    def drop_with_room(log: MemoryLog, incarnation: int) -> None:
        if not has_room:
            raise Busy(ErrorCode.BUSY, "no room now")
        drop(log, incarnation)

    monkeypatch.setattr(MemoryLog, "drop_partition", drop_with_room)
    counted.memory.run()
    assert not done.reported
    has_room = True
    counted.memory.advance(1)
    done.check()
    assert open_in_log(counted.memory) == 0


# Many topics


def several(counted: Counted) -> list[Topic]:
    """Create two topics of many partitions and some of one, with a record in each partition."""
    broker = counted.memory.broker
    made = [broker.create_topic(TopicName("s", f"t{number}"), 1 if number > 1 else COUNT) for number in range(20)]
    for topic in made:
        counted.fill(topic)
    counted.memory.run()
    counted.touched.clear()
    return made


def test_many_topics_are_deleted_one_after_the_other_in_slices(counted: Counted) -> None:
    topics, done = several(counted), Answers()
    gone: list[Topic | None] = []
    counted.memory.broker.delete_topics(topics, ended=gone.append, then=lambda: gone.append(None), done=done)
    assert not gone
    counted.memory.broker.delete_topic(topics[5])  # another client deletes it meanwhile
    assert max(counted.run(done)) <= PER_SLICE + 2
    done.check()
    assert gone == [*topics, None]
    assert counted.memory.broker.topics() == []
    assert open_in_log(counted.memory) == 0
    assert counted.memory.broker._catalog.leaving == 0


def test_few_topics_are_deleted_at_once(counted: Counted) -> None:
    topics, done = several(counted)[2:], Answers()
    gone: list[Topic | None] = []
    counted.memory.broker.delete_topics(topics, ended=gone.append, then=lambda: gone.append(None), done=done)
    assert gone == [*topics, None]
    assert not done.reported
    counted.memory.run()
    done.check()


def test_an_error_in_the_last_step_reaches_the_caller(counted: Counted) -> None:
    def refuse() -> None:
        raise Busy(ErrorCode.BUSY, "not now")

    done = Answers()
    counted.memory.broker.delete_topics(several(counted), ended=lambda _: None, then=refuse, done=done)
    counted.run(done)
    assert done.code is ErrorCode.BUSY


def test_many_topics_are_purged_one_after_the_other_in_slices(counted: Counted) -> None:
    topics, done = several(counted), Answers()
    counted.memory.broker.purge_topics(topics, done=done)
    assert counted.touched.total() == 0
    counted.memory.broker.delete_topic(topics[1])
    assert max(counted.run(done)) <= PER_SLICE + 1
    done.check()
    del topics[1]
    assert {p.log.first_offset for topic in topics for p in topic.partitions} == {1}
    assert counted.memory.restart().topic("s.t0").partitions[0].log.first_offset == 1


def test_few_topics_are_purged_at_once(counted: Counted) -> None:
    topics, done = several(counted)[2:], Answers()
    counted.memory.broker.purge_topics(topics, done=done)
    counted.memory.run()
    done.check()
    assert {p.log.first_offset for topic in topics for p in topic.partitions} == {1}


def test_a_stop_keeps_topics_whose_deletion_had_not_started(counted: Counted) -> None:
    topics = several(counted)[::-1]
    counted.memory.broker.delete_topics(topics, ended=lambda _: None, then=lambda: None, done=Answers())
    stopped_after(counted, 2)
    left = [topic.name.full for topic in counted.memory.broker.topics()]
    assert set(left) < {topic.name.full for topic in topics}
    assert "s.t0" in left
    counted.memory.run()
    counted.memory.broker.delete_topics(
        counted.memory.broker.topics(), ended=lambda _: None, then=lambda: None, done=Answers()
    )
    counted.memory.run()
    assert open_in_log(counted.memory) == 0


# Concurrent changes


def test_a_concurrent_creation_of_the_same_topic_wins(counted: Counted) -> None:
    broker, done = counted.memory.broker, Answers()
    broker.make_topic(WIDE, COUNT, then=lambda _: None, done=done)
    counted.run_pass()
    broker.create_topic(WIDE, 1)
    counted.run(done)
    assert done.code is ErrorCode.TOPIC_EXISTS
    counted.memory.run()
    assert open_in_log(counted.memory) == 1


def test_two_wide_creations_of_one_topic_run_one_after_the_other(counted: Counted) -> None:
    first, second = Answers(), Answers()
    for done in (first, second):
        counted.memory.broker.make_topic(WIDE, COUNT, then=lambda _: None, done=done)
    counted.memory.run()
    first.check()
    assert second.code is ErrorCode.TOPIC_EXISTS
    assert open_in_log(counted.memory) == COUNT


@pytest.mark.parametrize("count", [1, 3])
def test_growth_is_refused_when_the_topic_was_changed_meanwhile(counted: Counted, count: int) -> None:
    topic, done = counted.make(2), Answers()
    counted.memory.broker.grow_topic(topic, COUNT + 2, done=done)
    counted.run_pass()
    if count > 2:
        counted.memory.broker.grow_topic(topic, count)
    else:
        counted.memory.broker.shrink_topic(topic, count)
    counted.run(done)
    assert done.code is ErrorCode.BUSY
    counted.memory.run()
    assert len(topic.partitions) == count == open_in_log(counted.memory)


def test_growth_is_refused_when_the_topic_was_deleted_meanwhile(counted: Counted) -> None:
    topic, done = counted.make(2), Answers()
    counted.memory.broker.grow_topic(topic, COUNT + 2, done=done)
    counted.run_pass()
    counted.memory.broker.delete_topic(topic)
    counted.run(done)
    assert done.code is ErrorCode.TOPIC_MISSING
    counted.memory.run()
    assert open_in_log(counted.memory) == 0


def test_a_purge_is_refused_when_the_topic_was_deleted_meanwhile(counted: Counted) -> None:
    topic, done = counted.make(), Answers()
    counted.fill(topic)
    counted.memory.broker.purge_topic(topic, done=done)
    counted.run_pass()
    counted.memory.broker.delete_topic(topic)
    counted.run(done)
    assert done.code is ErrorCode.TOPIC_MISSING
    counted.memory.run()
    assert open_in_log(counted.memory) == 0


def test_partitions_being_dropped_count_for_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, BrokerSettings(partitions_max=COUNT + 10, bulk_share=1.0))
    topic, done = counted.make(), Answers()
    counted.memory.broker.delete_topic(topic, done=done)
    with pytest.raises(Busy, match="too many partitions"):
        counted.memory.broker.create_topic(WIDE, 11)
    counted.run(done)
    counted.memory.broker.create_topic(WIDE, 11)


# A stop in between


def stopped_after(counted: Counted, passes: int) -> None:
    for _ in range(passes):
        counted.run_pass()
    counted.memory.restart()


@pytest.mark.parametrize("passes", [1, 3, 10])
def test_a_stop_leaves_no_topic_that_was_being_created(counted: Counted, passes: int) -> None:
    counted.memory.broker.make_topic(WIDE, COUNT, then=lambda _: None, done=Answers())
    stopped_after(counted, passes)
    broker = counted.memory.broker
    assert broker.find_topic("wide") is None
    taken = counted.memory.log.incarnations()
    again = broker.create_topic(TopicName("default", "again"), 3)
    assert not {partition.incarnation for partition in again.partitions} & set(taken)
    counted.memory.run()
    assert open_in_log(counted.memory) == 3
    assert len(counted.memory.restart().topic("again").partitions) == 3


@pytest.mark.parametrize("passes", [1, 3, 10])
def test_a_stop_leaves_nothing_of_a_deleted_topic(counted: Counted, passes: int) -> None:
    topic = counted.make()
    counted.fill(topic)
    counted.memory.broker.delete_topic(topic, done=Answers())
    stopped_after(counted, passes)
    assert counted.memory.broker.find_topic("wide") is None
    assert open_in_log(counted.memory) > 0
    counted.memory.run()
    assert open_in_log(counted.memory) == 0


def test_a_stop_leaves_a_topic_as_it_was_before_it_grew(counted: Counted) -> None:
    topic = counted.make(2)
    counted.memory.broker.grow_topic(topic, COUNT, done=Answers())
    stopped_after(counted, 3)
    counted.memory.run()
    assert len(counted.memory.broker.topic("wide").partitions) == 2 == open_in_log(counted.memory)


def test_a_purge_stopped_halfway_can_be_repeated(counted: Counted) -> None:
    topic, done = counted.make(), Answers()
    counted.fill(topic)
    counted.memory.broker.purge_topic(topic, done=Answers())
    stopped_after(counted, 3)
    topic = counted.memory.broker.topic("wide")
    assert {partition.log.first_offset for partition in topic.partitions} == {0, 1}
    counted.memory.broker.purge_topic(topic, done=done)
    counted.memory.run()
    done.check()
    assert {partition.log.first_offset for partition in topic.partitions} == {1}


def test_a_failing_log_is_reported(counted: Counted) -> None:
    done = Answers()
    counted.memory.broker.make_topic(WIDE, COUNT, then=lambda _: None, done=done)
    counted.run_pass()
    counted.memory.log.fail()
    counted.memory.run()
    assert done.code is ErrorCode.STORAGE_FAILED
    with pytest.raises(BrokerError):
        counted.memory.broker.create_topic(TopicName("default", "after"))
    with pytest.raises(Missing):
        counted.memory.broker.topic("wide")
