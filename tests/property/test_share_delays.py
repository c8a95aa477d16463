"""Two share groups of one partition whose records have delays, time limits and keys, against what was sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from polywire.broker.groups import delay_index, delivery_marks, share_delays
from polywire.broker.groups.share import Batch
from polywire.delivery_times import DELIVER_AT, EXPIRES_AT
from polywire.errors import BrokerError, Conflict
from polywire.log.base import Completion, Read
from polywire.log.worker import Job, attempt
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.share_settings import AUTO_OFFSET_RESET, DELIVERIES, NUMBERS, ORDER, UNFINISHED, Number
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level, Outcome, TopicName
from tests.unit.broker.test_share_delays import header
from tests.unit.broker.test_share_groups import ANYBODY

GROUPS = st.sampled_from(["plain", "ordered"])
MEMBERS = st.sampled_from(["a", "b"])
LOCK_S = 30.0


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        set_small_limits(patch)
        yield


def set_small_limits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(share_delays, "DUE_MAX", 2)
    patch.setattr(delivery_marks, "MARKS_MAX", 3)
    patch.setattr(delay_index, "BACKLOG_MAX", 4)
    patch.setitem(NUMBERS, UNFINISHED, Number(2_000, 3, 10_000))


@dataclass
class Sent:
    """A record as it was sent."""

    due_ms: int | None
    expires_ms: int | None
    key: str | None


@dataclass
class Seen:
    """The state of one group, as its members know it.

    Attributes:
        held: member and end of the lock of each acquired record.
        later: end of the delay of each record that was released with one.
        counts: deliveries of each record, None if they may have been lost.
        unsynced: records whose acknowledgement is not synced.
        either: records whose acknowledgement may have been lost.
        begin: where the group began, or was set to.
    """

    accepted: set[int] = field(default_factory=set)
    unsynced: set[int] = field(default_factory=set)
    either: set[int] = field(default_factory=set)
    begin: int = 0
    held: dict[int, tuple[str, float]] = field(default_factory=dict)
    later: dict[int, int] = field(default_factory=dict)
    counts: dict[int, int | None] = field(default_factory=dict)


class HeldWorker:
    """Jobs of the index that run later."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Job, Completion[Any]]] = deque()

    def run(self, job: Job, completed: Completion[Any]) -> None:
        self.jobs.append((job, completed))

    def stop(self) -> None:
        pass


class DelayMachine(RuleBasedStateMachine):
    """Every operation, in any order, with restarts in between."""

    def __init__(self) -> None:
        super().__init__()
        self.place = TemporaryDirectory()
        self.sent: list[Sent] = []
        self.first = 0
        self.is_early = False  # whether the clock was set back, so that records may be delivered early
        self.seen = {name: Seen() for name in ("plain", "ordered")}

    @initialize(on_disk=st.booleans())
    def begin(self, on_disk: bool) -> None:
        self.memory = MemoryBroker(delays=Path(self.place.name) / "delayed.db" if on_disk else None)
        self.memory.broker.create_topic(TopicName.parse("t"), 1)
        for name, order in (("plain", "none"), ("ordered", "key")):
            options = {AUTO_OFFSET_RESET: "earliest", DELIVERIES: "1000", UNFINISHED: "5", ORDER: order}
            self.memory.broker.shares.directory.configure(name, options)
        self.sync()
        self.hold()

    def hold(self) -> None:
        """Let the index work only in ``settle``, so that all else can happen while it works."""
        self.worker = HeldWorker()
        self.memory.broker._delays._worker = self.worker  # type: ignore[misc]

    def settle(self) -> None:
        self.memory.run()
        while self.worker.jobs:
            job, completed = self.worker.jobs.popleft()
            completed(attempt(job))
            self.memory.run()

    @property
    def partition(self):  # type: ignore[no-untyped-def]
        return self.memory.broker.topic("t").partitions[0]

    @property
    def now_ms(self) -> int:
        return self.memory.clock.now_us() // 1000

    @rule(
        kinds=st.lists(
            st.tuples(
                st.sampled_from([None, -3, 2, 5, 5, 20, 60, 400]),
                st.sampled_from([None, None, None, None, 1, 30, 300]),
                st.sampled_from([None, "x", "y"]),
            ),
            min_size=1,
            max_size=8,
        )
    )
    def send(self, kinds: list[tuple[int | None, int | None, str | None]]) -> None:
        records = []
        for delay_s, ttl_s, key in kinds:
            due_ms = None if delay_s is None else self.now_ms + delay_s * 1000
            expires_ms = None if ttl_s is None else self.now_ms + ttl_s * 1000
            self.sent.append(Sent(due_ms, expires_ms, key))
            headers = [
                header(name, str(time_ms))
                for name, time_ms in ((DELIVER_AT, due_ms), (EXPIRES_AT, expires_ms))
                if time_ms is not None
            ]
            records.append(Record(b"v", None if key is None else key.encode(), headers=tuple(headers)))
        self.memory.broker.produce(self.partition, from_records(records), level=Level.WRITTEN, done=None)
        self.memory.run()

    @rule(group=GROUPS, member=MEMBERS, count_max=st.integers(1, 6), settled=st.booleans(), accepts=st.booleans())
    def take(self, group: str, member: str, count_max: int, *, settled: bool, accepts: bool) -> None:
        found = self.acquire(group, member, count_max, settled=settled)
        for at in found if accepts else ():
            self.end(group, at, member, outcome="accept")

    def acquire(self, group: str, member: str, count_max: int, *, settled: bool) -> list[int]:
        shares = self.memory.broker.shares
        assert shares.begin(group, self.partition, lambda _: None, by=ANYBODY) is None
        if settled:
            self.settle()
        offset = shares.next_offset(group, self.partition)
        if offset is None:
            return []
        read = self.memory.broker.fetch(self.partition, offset, bytes_max=500, then=lambda _: None)
        assert isinstance(read, Read)
        runs = shares.acquire(
            group,
            self.partition,
            member,
            offset,
            read.next_offset,
            count_max=count_max,
            done=lambda _: None,
            chunks=read.chunks,
        )
        if settled:
            self.settle()
        found = [(at, count) for first, last, count in runs for at in range(first, last + 1)]
        for at, count in found:
            self.delivered(group, member, at, count)
        return [at for at, _ in found]

    def delivered(self, group: str, member: str, at: int, count: int) -> None:
        seen, sent, now = self.seen[group], self.sent[at], self.memory.clock.monotonic()
        assert at >= max(self.first, seen.begin)
        assert at not in seen.accepted
        assert at not in seen.held or seen.held[at][1] <= now
        assert sent.expires_ms is None or sent.expires_ms > self.now_ms
        assert self.is_early or (sent.due_ms or 0) <= self.now_ms
        assert self.is_early or seen.later.get(at, 0) <= self.now_ms
        known = seen.counts.get(at, 0)
        assert known is None or count == known + 1
        seen.counts[at] = count
        seen.held[at] = member, now + LOCK_S
        if group == "ordered" and sent.key is not None:
            begin = max(self.first, seen.begin)
            same = [n for n in range(begin, len(self.sent)) if self.sent[n].key == sent.key and n != at]
            assert not [n for n in same if n in seen.held and seen.held[n][1] > now], (
                "two records of one key are locked"
            )
            ended = seen.accepted | seen.either
            before = [n for n in same if n < at and n not in ended and self.sent[n].due_ms is None]
            assert all(self.is_over(n) for n in before), "an earlier record of the key is not finished"

    def is_over(self, offset: int) -> bool:
        expires_ms = self.sent[offset].expires_ms
        return expires_ms is not None and expires_ms <= self.now_ms

    def of(self, seen: Seen, data: st.DataObject) -> tuple[int, str] | None:
        now = self.memory.clock.monotonic()
        held = [(at, member) for at, (member, until) in seen.held.items() if until > now and at >= self.first]
        return data.draw(st.sampled_from(sorted(held))) if held else None

    @rule(group=GROUPS, data=st.data(), outcome=st.sampled_from(["accept", "accept", "release", "later"]))
    def acknowledge(self, group: str, data: st.DataObject, outcome: str) -> None:
        seen = self.seen[group]
        chosen = self.of(seen, data)
        if chosen is not None:
            self.end(group, *chosen, outcome=outcome)

    def end(self, group: str, at: int, member: str, *, outcome: str) -> None:
        seen = self.seen[group]
        kind, delay_s = (Outcome.ACCEPT, 0.0) if outcome == "accept" else (Outcome.RELEASE, 5.0 * (outcome == "later"))
        done: list[int | BrokerError] = []
        batch = Batch(at, at, [kind], delay_s)
        self.memory.broker.shares.acknowledge(group, self.partition, member, [batch], done=done.append)
        self.memory.run()
        assert done == [done[0]]
        assert not isinstance(done[0], BrokerError)
        del seen.held[at]
        if outcome == "accept":
            seen.accepted.add(at)
            seen.unsynced.add(at)
        elif outcome == "later":
            seen.later[at] = self.now_ms + 4_999

    @rule(seconds=st.sampled_from([0.001, 1, 3, 10, 31, 100]))
    def time_passes(self, seconds: float) -> None:
        self.memory.advance(seconds)

    @rule()
    def index_works(self) -> None:
        self.settle()

    @rule(seconds=st.sampled_from([-40, -3, 15, 1000]))
    def clock_is_set(self, seconds: int) -> None:
        self.is_early = True
        self.memory.clock.step(seconds)  # type: ignore[attr-defined]

    @precondition(lambda self: self.sent)
    @rule(group=GROUPS, data=st.data())
    def reset(self, group: str, data: st.DataObject) -> None:
        """Set a group to another offset, after its members have released their records."""
        at = data.draw(st.integers(self.first, len(self.sent)))
        self.memory.run()
        for member in ("a", "b"):
            self.memory.broker.shares.release_member(group, member)
        try:
            self.memory.broker.shares.alter_offsets(group, {self.partition: at}, done=lambda _: None)
        except Conflict:
            return
        self.seen[group] = Seen(begin=at)
        self.sync()

    @rule()
    def sync(self) -> None:
        self.memory.broker.settle(Level.SYNCED, lambda _: None)
        self.memory.run()
        for seen in self.seen.values():
            seen.unsynced.clear()

    @rule()
    def restart(self) -> None:
        self.memory.run()
        self.memory.restart()
        self.hold()
        for seen in self.seen.values():
            seen.held.clear()

    @rule()
    def power_fails(self) -> None:
        """Lose what was not synced: records, acknowledgements and deliveries."""
        self.memory.run()
        self.memory.restart(synced_only=True)
        self.hold()
        del self.sent[self.partition.log.next_offset :]
        self.first = min(self.first, self.partition.log.first_offset)
        for seen in self.seen.values():
            seen.held.clear()
            seen.later.clear()
            seen.either |= seen.unsynced
            seen.accepted -= seen.unsynced
            seen.unsynced.clear()
            seen.counts = dict.fromkeys(range(len(self.sent)))
            kept = {at for at in seen.accepted if at < len(self.sent)}
            seen.begin = min(seen.begin, len(self.sent))
            seen.accepted, seen.either = kept, {at for at in seen.either if at < len(self.sent)}

    @precondition(lambda self: self.first < len(self.sent))
    @rule(count=st.integers(1, 4))
    def trim(self, count: int) -> None:
        self.first = min(self.first + count, len(self.sent))
        self.memory.broker._log.trim(self.partition.incarnation, self.first)
        self.memory.run()
        self.first = self.partition.log.first_offset

    def teardown(self) -> None:
        try:
            if hasattr(self, "memory"):
                for group, seen in self.seen.items():
                    self.drain(group, seen)
        finally:
            self.memory.broker.close()
            self.settle()
            self.place.cleanup()

    def drain(self, group: str, seen: Seen) -> None:
        """Work until nothing is left. All records must have been accepted, expired or removed."""
        for _ in range(4):
            self.memory.advance(700)
            idle = 0
            while idle < 6:
                found = self.acquire(group, "a", 6, settled=True)
                idle = 0 if found else idle + 1
                for at in found:
                    self.end(group, at, "a", outcome="accept")
                self.settle()
        ended = seen.accepted | seen.either
        begin = max(self.first, seen.begin)
        lost = [at for at in range(begin, len(self.sent)) if at not in ended and not self.is_over(at)]
        assert not lost
        offsets = self.memory.broker.shares.offsets(group, self.partition)
        assert offsets is not None
        assert (offsets.unfinished, offsets.scheduled) == (0, 0)
        assert offsets.end == len(self.sent)


DelayMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestDelays = DelayMachine.TestCase
