"""The records of one partition in a share group against a model with one entry for each offset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polywire.broker.groups.share import (
    FINISHED,
    NO_MEMBER,
    Batch,
    Run,
    Settled,
    SharePartition,
    ShareProgress,
    runs_of,
)
from polywire.broker.groups.share_table import flat, unflat
from polywire.errors import Conflict
from polywire.types import Outcome

MEMBERS = st.sampled_from(["a", "b", "c"])
LOCK_S = 10.0
LATER = "later"
DELIVERIES_MAX = 3
UNFINISHED_MAX = 12


@dataclass
class Entry:
    """An unfinished record of the model."""

    deliveries: int
    holder: str = ""
    deadline: float = 0.0


class ShareMachine(RuleBasedStateMachine):
    """Every operation, in any order, with restarts in between."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.changes: list[tuple[tuple[int, ...], dict[int, int]]] = []
        self.finished: set[int] = set()

    @initialize(start=st.integers(0, 3), readable=st.integers(3, 12))
    def begin(self, start: int, readable: int) -> None:
        self.first, self.readable, self.start = 0, readable, start
        self.entries: dict[int, Entry] = {}
        self.end = start
        self.share = SharePartition(ShareProgress(start, start))

    def store(self, runs: Sequence[Run], due_ms: dict[int, int] | None = None) -> None:
        if runs or due_ms:
            self.changes.append((flat(runs), due_ms or {}))
            self.share.progress.apply(unflat(flat(runs)), due_ms or {})

    def settle(self, effect: Settled, due_ms: dict[int, int] | None = None) -> None:
        self.store(list(effect.finished), due_ms)
        self.share.settle(effect)

    @rule(count=st.integers(1, 8))
    def produce(self, count: int) -> None:
        self.readable += count

    @rule(member=MEMBERS, skip=st.integers(0, 3), size=st.integers(1, 9), count_max=st.integers(1, 6))
    def acquire(self, member: str, skip: int, size: int, count_max: int) -> None:
        offset = self.share.next_offset(UNFINISHED_MAX)
        free = [at for at, entry in sorted(self.entries.items()) if not entry.holder]
        expected = free[0] if free else (self.end if len(self.entries) < UNFINISHED_MAX else None)
        assert offset == expected
        if offset is None or offset >= self.readable:
            return
        first = max(offset - skip, self.first)
        end = min(first + size, self.readable)
        deadline = self.now + LOCK_S
        runs = self.share.acquire(
            member, first, end, count_max=count_max, unfinished_max=UNFINISHED_MAX, deadline=deadline
        ).runs
        self.store(runs)
        taken = [at for at in free if first <= at < end][:count_max]
        if first <= self.end:
            space = min(count_max - len(taken), UNFINISHED_MAX - len(self.entries))
            taken += range(self.end, min(end, self.end + max(space, 0)))
        for at in taken:
            entry = self.entries.setdefault(at, Entry(0))
            entry.deliveries, entry.holder, entry.deadline = entry.deliveries + 1, member, deadline
            self.end = max(self.end, at + 1)
        assert runs == runs_of((at, self.entries[at].deliveries) for at in taken)

    @precondition(lambda self: any(entry.holder not in ("", LATER) for entry in self.entries.values()))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        held = sorted(at for at, entry in self.entries.items() if entry.holder not in ("", LATER))
        first = data.draw(st.sampled_from(held))
        member = data.draw(st.sampled_from([self.entries[first].holder, "a"]))
        last = first
        while last + 1 in held and data.draw(st.booleans()):
            last += 1
        types = data.draw(
            st.one_of(
                st.lists(st.sampled_from(Outcome), min_size=1, max_size=1),
                st.lists(st.sampled_from(Outcome), min_size=last - first + 1, max_size=last - first + 1),
            )
        )
        span = range(first, last + 1)
        delay_s = data.draw(st.sampled_from([0.0, 0.0, 4.0, 20.0]))
        try:
            effect = self.share.acknowledge(
                member, [Batch(first, last, types, delay_s)], deliveries_max=DELIVERIES_MAX, now=self.now, lock_s=LOCK_S
            )
        except Conflict:
            assert any(self.entries[at].holder != member for at in span)
            return
        assert all(self.entries[at].holder == member for at in span)
        due_ms = {at: int(lock.deadline * 1000) for at, lock in effect.renewed if lock.member == NO_MEMBER}
        self.settle(effect, due_ms)
        for index, at in enumerate(span):
            outcome = types[index if len(types) > 1 else 0]
            entry = self.entries[at]
            if outcome == Outcome.RENEW:
                entry.deadline = self.now + LOCK_S
            elif outcome == Outcome.RELEASE and entry.deliveries < DELIVERIES_MAX:
                entry.holder, entry.deadline = (LATER, self.now + delay_s) if delay_s else ("", 0.0)
            else:
                self.finish(at)

    def finish(self, offset: int) -> None:
        del self.entries[offset]
        assert offset not in self.finished
        self.finished.add(offset)

    def release(self, offsets: list[int]) -> None:
        for at in offsets:
            if self.entries[at].deliveries < DELIVERIES_MAX:
                self.entries[at].holder = ""
            else:
                self.finish(at)

    @rule(member=MEMBERS)
    def member_leaves(self, member: str) -> None:
        self.settle(self.share.release_member(member, deliveries_max=DELIVERIES_MAX))
        self.release([at for at, entry in self.entries.items() if entry.holder == member])

    @rule(data=st.data(), seconds=st.integers(0, 15))
    def time_passes(self, data: st.DataObject, seconds: int) -> None:
        self.now += seconds
        effect, locks = self.share.expired(self.now, deliveries_max=DELIVERIES_MAX, now_ms=int(self.now * 1000))
        if data.draw(st.booleans()):
            self.share.retry(locks)
            effect, _ = self.share.expired(self.now, deliveries_max=DELIVERIES_MAX, now_ms=int(self.now * 1000))
        self.settle(effect)
        self.release([at for at, entry in self.entries.items() if entry.holder and entry.deadline <= self.now])

    @rule(count=st.integers(0, 6))
    def trim(self, count: int) -> None:
        self.first = min(self.first + count, self.readable)
        self.store(self.share.trimmed(self.first))
        self.share.drop_below(self.first)
        for at in [at for at in self.entries if at < self.first]:
            self.finish(at)
        self.end = max(self.end, self.first)

    @rule(compacted=st.booleans())
    def restart(self, *, compacted: bool) -> None:
        """Load the state from its changes, or from a snapshot and no changes."""
        if compacted:
            was = self.share.progress
            progress = ShareProgress(was.start, was.end, unflat(flat(was.runs())), was.due_ms)
        else:
            progress = ShareProgress(self.start, self.start)
            for runs, due_ms in self.changes:
                progress.apply(unflat(runs), due_ms)
        assert (progress.counts, progress.end) == (self.share.progress.counts, self.share.progress.end)
        assert progress.due_ms == self.share.progress.due_ms
        self.share = SharePartition(progress, now=self.now, now_ms=int(self.now * 1000))
        for entry in self.entries.values():
            entry.holder = LATER if entry.holder == LATER else ""

    @invariant()
    def agrees(self) -> None:
        progress = self.share.progress
        assert progress.counts == {at: entry.deliveries for at, entry in self.entries.items()}
        assert progress.end == self.end
        assert progress.start == min(self.entries, default=self.end)
        holders = Counter(entry.holder for entry in self.entries.values() if entry.holder)
        assert self.share.holders() == {NO_MEMBER if holder == LATER else holder: n for holder, n in holders.items()}
        held = [entry.deadline for entry in self.entries.values() if entry.holder]
        assert (self.share.deadline is None) == (not held)
        if held:
            assert self.share.deadline == min(held)
        assert FINISHED not in progress.counts.values()


ShareMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestShare = ShareMachine.TestCase
