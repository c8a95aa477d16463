"""The records of one partition that a share group has not finished (KIP-932): a state machine without I/O.

Every offset below ``ShareProgress.end`` is finished, available or acquired. A member acquires an available record under
a lock, and then accepts, rejects or releases it. A record whose lock expires becomes available again.

* At most one member holds the lock of a record at a time.
* The delivery count of a record is the number of times that it was acquired. It is stored before a member receives the
  record, so it is exact after a crash.
* Locks are not stored. After a restart all unfinished records are available, except those that were released with a
  delay. Their
  locks belong to no member, and expire when they are due.
* Finished records need no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Final, NamedTuple

from polywire.errors import Conflict, ErrorCode
from polywire.types import Outcome

FINISHED: Final = -1  # stands for the delivery count of a finished record
NO_MEMBER: Final = ""  # holds the lock of a record that was released with a delay, or that is copied elsewhere
NO_DELAYS: Final[Mapping[int, int]] = MappingProxyType({})
_STEPS_MIN: Final = 64  # offsets that are checked one by one to find the first unfinished record


class Run(NamedTuple):
    """Consecutive offsets with the same delivery count, or FINISHED. ``last`` is included."""

    first: int
    last: int
    deliveries: int


def runs_of(counts: Iterable[tuple[int, int]]) -> list[Run]:
    """Join pairs of (offset, delivery count), in order of the offsets, to runs."""
    found: list[Run] = []
    first = last = count = FINISHED
    for offset, delivery_count in counts:
        if offset == last + 1 and delivery_count == count and found:
            last = offset
            found[-1] = Run(first, last, count)
        else:
            first, last, count = offset, offset, delivery_count
            found.append(Run(first, last, count))
    return found


class ShareProgress:
    """The stored part of the state: which records of a partition are unfinished, and how often they were delivered.

    Attributes:
        end: no record at or above this offset was delivered yet.
        counts: delivery count by offset of each unfinished record below ``end``.
        due_ms: system time at which a record that was released with a delay is available again, by offset.
    """

    __slots__ = ("_start", "counts", "due_ms", "end")

    def __init__(self, start: int, end: int, runs: Iterable[Run] = (), due_ms: Mapping[int, int] = NO_DELAYS) -> None:
        self._start = start
        self.end = end
        self.counts: dict[int, int] = {}
        for run in runs:
            self._set(run)
        self.due_ms: dict[int, int] = dict(due_ms)

    @property
    def start(self) -> int:
        """The lowest offset of an unfinished record, or ``end``. All records below it are finished."""
        counts, start = self.counts, self._start
        if not counts:
            start = self.end
        else:
            steps = len(counts) + _STEPS_MIN  # a search is no slower than reading the table once
            while start not in counts and steps:
                start += 1
                steps -= 1
            if not steps:
                start = min(counts)
        self._start = start
        return start

    def apply(self, runs: Iterable[Run], due_ms: Mapping[int, int] = NO_DELAYS) -> None:
        """Store new delivery counts, that records are finished, and delays.

        A record loses its delay with a new delivery count. Offsets below the first new one are finished.
        """
        for run in runs:
            self._set(run)
            if run.last >= self.end:
                self.end = run.last + 1
            if self.due_ms:
                for offset in [offset for offset in self.due_ms if run.first <= offset <= run.last]:
                    del self.due_ms[offset]
        self.due_ms.update(due_ms)

    def _set(self, run: Run) -> None:
        counts = self.counts
        if run.deliveries != FINISHED:
            for offset in range(run.first, run.last + 1):
                counts[offset] = run.deliveries
        elif run.last - run.first < len(counts):
            for offset in range(run.first, run.last + 1):
                counts.pop(offset, None)
        else:
            for offset in [offset for offset in counts if run.first <= offset <= run.last]:
                del counts[offset]

    def runs(self) -> list[Run]:
        """Return all unfinished records, in order."""
        return runs_of(sorted(self.counts.items()))


class Lock:
    """The lock under which a member acquired records together, or renewed them."""

    __slots__ = ("deadline", "first", "last", "member")

    def __lt__(self, other: Lock) -> bool:
        return self.deadline < other.deadline

    def __init__(self, member: str, deadline: float, first: int, last: int) -> None:
        self.member: Final = member
        self.deadline: Final = deadline
        self.first: Final = first
        self.last: Final = last


class Batch(NamedTuple):
    """Acknowledgements of consecutive records.

    Attributes:
        outcomes: one for all offsets, or one for each.
        delay_s: how long released records stay unavailable.
        reason: why the member could not process the records. It becomes a header of dead letters.
    """

    first: int
    last: int
    outcomes: Sequence[int]
    delay_s: float = 0.0
    reason: str = ""


class Settled(NamedTuple):
    """The effect of acknowledgements, or of locks that end. ``SharePartition.settle`` applies it.

    Attributes:
        finished: records that are finished. The caller must store this first.
        unlocked: offsets whose locks end.
        released: those of them that are available again.
        rejected: (offset, delivery count, reason or empty) of records that a member rejected, or that were delivered too
            often.
        renewed: offsets that get a new lock, which is that of NO_MEMBER for records that were released with a delay.
        accepted: number of accepted records.
        expired: number of records whose member was slower than its lock.
    """

    finished: Sequence[Run] = ()
    unlocked: Sequence[int] = ()
    released: Sequence[int] = ()
    rejected: Sequence[tuple[int, int, str]] = ()
    renewed: Sequence[tuple[int, Lock]] = ()
    accepted: int = 0
    expired: int = 0


class SharePartition:
    """The records of one partition for one share group, with the locks of its members.

    Methods that return runs do not change ``progress``: the caller stores the runs, which applies them.
    """

    __slots__ = ("_by_deadline", "_locks", "_released", "progress")

    def __init__(self, progress: ShareProgress, *, now: float = 0.0, now_ms: int = 0) -> None:
        """Continue from stored progress.

        Args:
            now: the time that deadlines refer to, in seconds.
            now_ms: the system time.
        """
        self.progress: Final = progress
        self._locks: dict[int, Lock] = {}
        # a heap of all locks, and of some that no longer lock a record
        self._by_deadline: list[Lock] = []
        # a heap with all available offsets below ``end``, and some that are no longer available
        self._released: list[int] = sorted(progress.counts.keys() - progress.due_ms.keys())
        for offset, due_ms in progress.due_ms.items():
            self._locks[offset] = lock = Lock(NO_MEMBER, now + max(due_ms - now_ms, 0) / 1000, offset, offset)
            heappush(self._by_deadline, lock)

    def holders(self) -> dict[str, int]:
        """Return the number of acquired records by member. NO_MEMBER has those that wait for their delay."""
        found: dict[str, int] = {}
        for lock in self._locks.values():
            found[lock.member] = found.get(lock.member, 0) + 1
        return found

    def unfinished(self) -> Iterator[tuple[int, int, Lock | None]]:
        """Yield (offset, delivery count, lock) of all unfinished records below ``end``, in order."""
        for offset, count in sorted(self.progress.counts.items()):
            yield offset, count, self._locks.get(offset)

    def next_offset(self, unfinished_max: int) -> int | None:
        """Return the lowest available offset, which may be ``end``. None if the group has too many unfinished records."""
        released = self._released
        while released:
            if self._is_available(released[0]):
                return released[0]
            heappop(released)
        return self.progress.end if len(self.progress.counts) < unfinished_max else None

    def _is_available(self, offset: int) -> bool:
        return offset in self.progress.counts and offset not in self._locks

    def acquire(
        self, member: str, first: int, end: int, *, count_max: int, unfinished_max: int, deadline: float
    ) -> list[Run]:
        """Acquire available records of [first, end) for a member. Return them with their new delivery counts.

        The records from ``first`` on must be readable up to ``end``. The caller must store the result.
        """
        counts, locks, released = self.progress.counts, self._locks, self._released
        taken: list[tuple[int, int]] = []
        skipped: list[int] = []
        while released and released[0] < end and len(taken) < count_max:
            offset = heappop(released)
            if not self._is_available(offset):
                continue
            if offset < first:
                skipped.append(offset)
            elif not taken or taken[-1][0] != offset:
                taken.append((offset, counts[offset] + 1))
        for offset in skipped:
            heappush(released, offset)
        new_first = self.progress.end
        if first <= new_first < end:
            space = min(count_max - len(taken), unfinished_max - len(counts))
            taken += [(offset, 1) for offset in range(new_first, min(end, new_first + max(space, 0)))]
        runs = runs_of(taken)
        if runs:
            lock = Lock(member, deadline, runs[0].first, runs[-1].last)
            locks.update(dict.fromkeys([offset for offset, _ in taken], lock))
            heappush(self._by_deadline, lock)
        return runs

    def undo(self, runs: Iterable[Run]) -> None:
        """Undo ``acquire``, because its result could not be stored."""
        for run in runs:
            self._unlock(range(run.first, run.last + 1))

    def _unlock(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self._locks.pop(offset, None)
            if offset in self.progress.counts:
                heappush(self._released, offset)

    def acknowledge(
        self,
        member: str,
        batches: Sequence[Batch],
        *,
        deliveries_max: int,
        now: float,
        lock_s: float,
    ) -> Settled:
        """Check acknowledgements of records that the member has acquired, and return their effect.

        Raises Conflict(RECORD_NOT_ACQUIRED) if the member does not hold the lock of a record.

        Args:
            batches: the acknowledgements, without overlap.
            deliveries_max: a record that was delivered this often is finished when it is released.
            lock_s: duration of renewed locks.
        """
        locks, counts = self._locks, self.progress.counts
        finished: list[Run] = []
        unlocked: list[int] = []
        released: list[int] = []
        rejected: list[tuple[int, int, str]] = []
        renewed: list[tuple[int, Lock]] = []
        accepted = 0
        for first, last, outcomes, delay_s, reason in batches:
            for offset in range(first, last + 1):
                lock = locks.get(offset)
                if lock is None or lock.member != member:
                    raise _not_acquired(member, offset)
            if len(outcomes) == 1 and outcomes[0] in (Outcome.ACCEPT, Outcome.GAP):
                unlocked += range(first, last + 1)
                finished.append(Run(first, last, FINISHED))
                accepted += (last - first + 1) * (outcomes[0] == Outcome.ACCEPT)
                continue
            again = Lock(member, now + lock_s, first, last)
            later = Lock(NO_MEMBER, now + delay_s, first, last)
            for index in range(last - first + 1):
                offset = first + index
                outcome = outcomes[index if len(outcomes) > 1 else 0]
                if outcome == Outcome.RENEW:
                    renewed.append((offset, again))
                    continue
                if outcome == Outcome.RELEASE and counts[offset] < deliveries_max and delay_s > 0:
                    renewed.append((offset, later))
                    continue
                unlocked.append(offset)
                if outcome == Outcome.RELEASE and counts[offset] < deliveries_max:
                    released.append(offset)
                    continue
                if outcome in (Outcome.RELEASE, Outcome.REJECT):
                    rejected.append((offset, counts[offset], reason))
                accepted += outcome == Outcome.ACCEPT
                finished.append(Run(offset, offset, FINISHED))
        return Settled(_joined(finished), unlocked, released, rejected, renewed, accepted)

    def settle(self, effect: Settled) -> None:
        """Apply an effect whose ``finished`` the caller has stored."""
        locks = self._locks
        for offset in effect.unlocked:
            locks.pop(offset, None)
        for offset in effect.released:
            heappush(self._released, offset)
        added: dict[Lock, None] = {}
        for offset, lock in effect.renewed:
            locks[offset] = lock
            added[lock] = None
        for lock in added:
            heappush(self._by_deadline, lock)

    def hold(self, effect: Settled) -> Settled:
        """Return the effect without its rejected records, which no member can acquire until ``finish`` is called."""
        offsets = {offset for offset, *_ in effect.rejected}
        held = Lock(NO_MEMBER, math.inf, 0, 0)
        self._locks.update(dict.fromkeys(offsets, held))
        finished = runs_of(
            (offset, FINISHED)
            for run in effect.finished
            for offset in range(run.first, run.last + 1)
            if offset not in offsets
        )
        unlocked = [offset for offset in effect.unlocked if offset not in offsets]
        return effect._replace(finished=finished, unlocked=unlocked, rejected=())

    def finish(self, offset: int) -> Settled:
        """Return the effect of storing a rejected record elsewhere."""
        return Settled([Run(offset, offset, FINISHED)], [offset])

    def exhausted(self, deliveries_max: int) -> Settled | None:
        """Return the effect of rejecting available records that were delivered too often, or None if there are none."""
        counts = self.progress.counts
        offsets = sorted(at for at, count in counts.items() if count >= deliveries_max and at not in self._locks)
        return self._releasing(offsets, deliveries_max) if offsets else None

    def release_member(self, member: str, *, deliveries_max: int) -> Settled:
        """Return the effect of releasing all records that a member has acquired."""
        return self._releasing(
            sorted(offset for offset, lock in self._locks.items() if lock.member == member), deliveries_max
        )

    def _releasing(self, offsets: Sequence[int], deliveries_max: int) -> Settled:
        counts = self.progress.counts
        rejected = [(offset, counts[offset], "") for offset in offsets if counts[offset] >= deliveries_max]
        released = [offset for offset in offsets if counts[offset] < deliveries_max]
        finished = runs_of((offset, FINISHED) for offset, *_ in rejected)
        return Settled(finished, offsets, released, rejected)

    @property
    def deadline(self) -> float | None:
        """When the first lock expires. None if there are no locks."""
        by_deadline = self._by_deadline
        if not self._locks:
            by_deadline.clear()
        while by_deadline and not self._offsets(by_deadline[0]):
            heappop(by_deadline)
        return by_deadline[0].deadline if by_deadline else None

    def _offsets(self, lock: Lock) -> list[int]:
        """Return the offsets that a lock still locks."""
        span = range(lock.first, lock.last + 1)
        offsets = span if len(span) <= len(self._locks) else sorted(self._locks)
        return [offset for offset in offsets if self._locks.get(offset) is lock]

    def expired(self, now: float, *, deliveries_max: int) -> tuple[Settled, list[Lock]]:
        """Return the effect of the locks that have expired, and these locks. If it cannot be stored, call ``retry``."""
        found: list[int] = []
        locks: list[Lock] = []
        expired = 0
        while self._by_deadline and self._by_deadline[0].deadline <= now:
            lock = heappop(self._by_deadline)
            if offsets := self._offsets(lock):
                locks.append(lock)
                found += offsets
                expired += len(offsets) if lock.member != NO_MEMBER else 0
        return self._releasing(found, deliveries_max)._replace(expired=expired), locks

    def retry(self, locks: Iterable[Lock]) -> None:
        """Return these locks in a later call of ``expired`` again."""
        for lock in locks:
            heappush(self._by_deadline, lock)

    def trimmed(self, first_offset: int) -> list[Run]:
        """Return the records below the partition's first offset, which no longer exist, as finished."""
        start = self.progress.start
        return [Run(start, first_offset - 1, FINISHED)] if start < first_offset else []

    def drop_below(self, first_offset: int) -> None:
        """End the locks of records below the partition's first offset."""
        for offset in [offset for offset in self._locks if offset < first_offset]:
            del self._locks[offset]


def _not_acquired(member: str, offset: int) -> Conflict:
    return Conflict(
        ErrorCode.RECORD_NOT_ACQUIRED,
        f"the member has not acquired this record, or its lock has expired member={member!r} offset={offset}",
    )


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Join adjacent runs of the same delivery count."""
    found: list[Run] = []
    for run in sorted(runs):
        if found and found[-1].last + 1 == run.first and found[-1].deliveries == run.deliveries:
            found[-1] = Run(found[-1].first, run.last, run.deliveries)
        else:
            found.append(run)
    return found
