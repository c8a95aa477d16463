"""Share groups that deliver records with the same key one at a time."""

from __future__ import annotations

import sys

from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.share_settings import DEAD_LETTERS, DELIVERIES, ORDER, UNFINISHED
from polywire.types import Level, Outcome
from tests.unit.broker.test_share_delays import DelayedQueue, header

BY_KEY = {ORDER: "key"}


class OrderedQueue(DelayedQueue):
    """A queue of one partition whose records have keys."""

    def put(self, keys: str, *, delay_s: float | None = None) -> None:
        """Send one record for each letter. "-" stands for a record without a key."""
        headers = () if delay_s is None else (header("deliver.at", str(self.now_ms + round(delay_s * 1000))),)
        records = [Record(b"v", None if key == "-" else key.encode(), headers=headers) for key in keys]
        self.memory.broker.produce(self.partition, from_records(records), level=Level.WRITTEN, done=None)
        self.memory.run()


def test_records_with_the_same_key_come_one_at_a_time() -> None:
    queue = OrderedQueue(BY_KEY)
    queue.put("aab-a-b")
    assert queue.take("one") == [0, 2, 3, 5]
    assert queue.take("two") == []
    assert queue.acknowledge(0, member="one") is None
    assert queue.take("two") == [1]
    queue.put("ac")
    assert queue.take("two") == [8]
    assert queue.acknowledge(1, member="two") is None
    assert queue.acknowledge(2, member="one") is None
    assert queue.take("two") == [4, 6]
    assert queue.acknowledge(4, member="two") is None
    assert queue.take("two") == [7]


def test_a_record_that_is_retried_holds_those_behind_it() -> None:
    queue = OrderedQueue(BY_KEY)
    queue.put("aab")
    assert queue.take() == [0, 2]
    assert queue.acknowledge(0, outcome=Outcome.RELEASE) is None
    assert queue.take() == [0]
    assert queue.acknowledge(0, outcome=Outcome.RELEASE, delay_s=10) is None
    assert queue.take() == []
    queue.memory.advance(11)
    assert queue.take() == [0]
    queue.memory.advance(31)
    assert queue.take("other") == [0, 2], "the locks have expired"
    assert queue.acknowledge(0, member="other") is None
    assert queue.take() == [1]


def test_the_order_is_kept_after_a_restart() -> None:
    queue = OrderedQueue(BY_KEY)
    queue.put("aabba-")
    assert queue.take() == [0, 2, 5]
    assert queue.acknowledge(2, outcome=Outcome.RELEASE, delay_s=20) is None
    queue.memory.restart()
    queue.memory.run()
    assert queue.take() == [0, 5]
    queue.accept([0])
    assert queue.take() == [1]
    queue.memory.advance(21)
    assert queue.take() == [2]
    queue.accept([2, 1])
    assert queue.take() == [3, 4]


def test_the_order_can_be_switched_on_and_off() -> None:
    queue = OrderedQueue()
    queue.put("aaa")
    assert queue.take(count_max=2) == [0, 1]
    queue.shares.directory.configure("g", BY_KEY)
    assert queue.acknowledge(1, outcome=Outcome.RELEASE) is None
    assert queue.take() == []
    queue.accept([0])
    assert queue.take() == [1]
    queue.shares.directory.configure("g", {})
    assert queue.take() == [2]


def test_a_rejected_record_makes_way_for_the_next_one() -> None:
    queue = OrderedQueue(BY_KEY | {DEAD_LETTERS: "dead", DELIVERIES: "1"})
    queue.put("aaa")
    assert queue.take() == [0]
    assert queue.acknowledge(0, outcome=Outcome.REJECT) is None
    queue.memory.run()
    assert queue.take() == [1]
    queue.memory.advance(31)
    assert queue.take() == [2]
    assert len(queue.values("dead")) == 2


def test_a_delayed_record_takes_its_place_when_it_is_due() -> None:
    queue = OrderedQueue(BY_KEY)
    queue.put("a", delay_s=10)
    queue.put("aa")
    assert queue.take() == [1]
    queue.memory.advance(11)
    assert queue.take() == [], "another record with the key is locked"
    queue.accept([1])
    assert queue.take() == [0]
    queue.accept([0])
    assert queue.take() == [2]


def test_retention_makes_way_for_the_next_record() -> None:
    queue = OrderedQueue(BY_KEY)
    queue.put("a")
    queue.put("a")
    assert queue.take() == [0]
    queue.memory.broker._log.trim(queue.partition.incarnation, 1)
    queue.memory.run()
    assert queue.take() == [1]


def test_records_of_one_key_are_limited_like_others() -> None:
    queue = OrderedQueue(BY_KEY | {UNFINISHED: "100"})
    queue.put("a" * 150 + "b")
    assert queue.take() == [0]
    queue.accept([0])
    assert queue.take() == [1]
    for offset in range(1, 150):
        queue.accept([offset])
        queue.take(count_max=1)
    assert queue.shares.offsets("g", queue.partition)[:3] == (150, 151, 1)


def test_a_delay_that_ends_before_the_keys_are_read() -> None:
    queue = OrderedQueue(BY_KEY)
    queue.put("aa")
    assert queue.take() == [0]
    assert queue.acknowledge(0, outcome=Outcome.RELEASE, delay_s=5) is None
    queue.memory.restart()
    assert queue.shares.next_offset("g", queue.partition) is None, "the keys are unknown"
    [reading] = queue.shares._readings.values()
    effect, _ = reading.share.expired(queue.memory.clock.monotonic() + 6, deliveries_max=5, now_ms=sys.maxsize)
    reading.share.settle(effect)
    assert set(reading.share.unknown) == {0, 1}
    assert queue.take() == [0]
    queue.accept([0])
    assert queue.take() == [1]


def test_many_delayed_records_do_not_hide_the_keys_of_those_behind_them() -> None:
    queue = OrderedQueue({**BY_KEY, UNFINISHED: "100"})
    later = header("deliver.at", str(queue.now_ms + 10_000))
    records = [*[Record(b"v", headers=(later,))] * 150, Record(b"v", b"k"), Record(b"v", b"k")]
    queue.memory.broker.produce(queue.partition, from_records(records), level=Level.WRITTEN, done=None)
    queue.memory.run()
    assert queue.take() == [150]
    queue.accept([150])
    assert queue.take() == [151]
