"""The records of one partition that a share group has not finished (KIP-932): a state machine without I/O.

Every offset below ``ShareProgress.end`` is finished, available, acquired, or waits until it is due. A member acquires an
available record under a lock, and then accepts, rejects or releases it. A record whose lock expires becomes available
again.

* At most one member holds the lock of a record at a time.
* The delivery count of a record is the number of times that it was acquired. It is stored before a member receives the
  record, so it is exact after a crash.
* Locks are not stored. After a restart all unfinished records are available, except those that were released with a
  delay. Their locks belong to no member, and expire when they are due. They are checked now and then until then, because
  the system clock may have been wrong at the start.
* Finished records need no memory. Neither do records that were sent with a delay and are not due yet: ``DueCursor`` says
  which ones these are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Final, NamedTuple

import cython
import msgspec
from msgspec.structs import replace

from polywire.broker.groups.key_order import Key, KeyOrder
from polywire.errors import Conflict, ErrorCode
from polywire.types import Outcome

FINISHED: Final = -1  # stands for the delivery count of a finished record
NO_MEMBER: Final = ""  # holds the lock of a record that was released with a delay, or that is copied elsewhere
NO_KEYS: Final[Mapping[int, Key]] = MappingProxyType({})
NO_DELAYS: Final[Mapping[int, int]] = MappingProxyType({})
# plain integers, because they are compared for every record
_ACCEPT: Final = int(Outcome.ACCEPT)
_RELEASE: Final = int(Outcome.RELEASE)
_REJECT: Final = int(Outcome.REJECT)
_RENEW: Final = int(Outcome.RENEW)
_ENDS: Final = (_ACCEPT, int(Outcome.GAP))
STORED_DELAY_S_MAX: Final = 60.0  # longest interval between checks of a delay that began before a restart
_STEPS_MIN: Final = 64  # offsets that are checked one by one to find the first unfinished record


class Run(NamedTuple):
    """Consecutive offsets with the same delivery count, or FINISHED. ``last`` is included."""

    first: int
    last: int
    deliveries: int


class DueCursor(NamedTuple):
    """Which of the records that were sent with a delay wait until they are due.

    Such a record below ``ShareProgress.end`` waits if (due time, offset) is above (``due_ms``, ``offset``). All others
    were made available, and are like any other record. So each is made available exactly once.

    Attributes:
        due_ms, offset: the cursor, which does not move back while records wait. The time is a system time in
            milliseconds.
        first: the lowest offset of a waiting record, or one below it. -1 if there are none.
        waiting: number of waiting records. Records that retention removed count until they are due.
    """

    due_ms: int = 0
    offset: int = -1
    first: int = -1
    waiting: int = 0

    def is_passed(self, due_ms: int, offset: int) -> bool:
        """Return whether a delayed record does not wait, or would not if it were below ``end``."""
        return (due_ms, offset) <= self[:2]


NO_CURSOR: Final = DueCursor()


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


@cython.cclass
class ShareProgress:
    """The stored part of the state: which records of a partition are unfinished, and how often they were delivered.

    Attributes:
        end: no record at or above this offset was delivered yet.
        counts: delivery count by offset of each unfinished record below ``end``.
        due_ms: system time at which a record that was released with a delay is available again, by offset.
        cursor: which records that were sent with a delay wait until they are due.
        is_dropped: whether the stored progress was deleted or replaced.
    """

    if not cython.compiled:  # when compiled, share.pxd declares the fields
        __slots__ = ("_start", "counts", "cursor", "due_ms", "end", "is_dropped")

    def __init__(
        self,
        start: int,
        end: int,
        runs: Iterable[Run] = (),
        due_ms: Mapping[int, int] = NO_DELAYS,
        cursor: DueCursor = NO_CURSOR,
    ) -> None:
        self._start = start
        self.end = end
        self.cursor = cursor
        self.is_dropped = False
        self.counts: dict[int, int] = {}
        for first, last, deliveries in runs:
            self._set(first, last, deliveries)
        self.due_ms: dict[int, int] = dict(due_ms)

    @property
    def start(self) -> int:
        """The lowest offset of an unfinished record, or ``end``. All records below it are finished, or not due yet."""
        counts = self.counts
        start: cython.longlong = self._start
        if not counts:
            start = self.end
        else:
            steps: cython.Py_ssize_t = len(counts) + _STEPS_MIN  # a search is no slower than reading the table once
            while start not in counts and steps:
                start += 1
                steps -= 1
            if not steps:
                start = min(counts)
        self._start = start
        return start

    @cython.ccall
    def begins_below(self, offset: cython.longlong) -> cython.bint:
        """Return whether ``start`` is below an offset."""
        return self._start < offset and self.start < offset

    @cython.ccall
    def apply(
        self,
        runs: Iterable[tuple[int, int, int]],
        due_ms: Mapping[int, int] = NO_DELAYS,
        cursor: DueCursor | None = None,
    ) -> None:
        """Apply stored changes: new delivery counts, finished records, delays, and a new cursor.

        A record loses its delay with a new delivery count. Offsets below the first new one are finished.
        """
        if cursor is not None:
            self.cursor = cursor
        for first, last, deliveries in runs:
            self._set(first, last, deliveries)
            if last >= self.end:
                self.end = last + 1
            if self.due_ms:
                for offset in [offset for offset in self.due_ms if first <= offset <= last]:
                    del self.due_ms[offset]
        if due_ms:
            self.due_ms.update(due_ms)

    @cython.cfunc
    def _set(self, first: cython.longlong, last: cython.longlong, deliveries: cython.longlong) -> None:
        counts = self.counts
        if deliveries != FINISHED:
            if first < self._start:  # a delayed record may be far below the others
                self._start = first
            if first == last:
                counts[first] = deliveries
            else:
                counts.update(dict.fromkeys(range(first, last + 1), deliveries))
        elif last - first < len(counts):
            for offset in range(first, last + 1):
                counts.pop(offset, None)
        else:
            for offset in [offset for offset in counts if first <= offset <= last]:
                del counts[offset]

    def runs(self) -> list[Run]:
        """Return all unfinished records, in order."""
        return runs_of(sorted(self.counts.items()))


@cython.cclass
class Lock:
    """The lock under which a member acquired records together, or renewed them.

    Attributes:
        count: number of records that it still locks.
    """

    if not cython.compiled:
        __slots__ = ("count", "deadline", "first", "last", "member")

    def __lt__(self, other: Lock) -> bool:
        return self.deadline < other.deadline

    def __init__(self, member: str, deadline: float, first: int, last: int) -> None:
        self.member: Final = member
        self.deadline: Final = deadline
        self.first: Final = first
        self.last: Final = last
        self.count = 0


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


def batches_of(entries: Iterable[tuple[int, int, Sequence[int], float, str]]) -> list[Batch]:
    """Return acknowledgements, given as the fields of batches. Batches that continue each other are joined."""
    found: list[Batch] = []
    start = end = FINISHED
    outcomes: Sequence[int] = ()
    delay_s, reason = 0.0, ""
    for entry in entries:
        first, last = entry[0], entry[1]
        if first == end and entry[2] == outcomes and len(outcomes) == 1 and entry[3:] == (delay_s, reason):
            end = last + 1
            continue
        if outcomes:
            found.append(Batch(start, end - 1, outcomes, delay_s, reason))
        start, end = first, last + 1
        _, _, outcomes, delay_s, reason = entry
    if outcomes:
        found.append(Batch(start, end - 1, outcomes, delay_s, reason))
    return found


class Settled(msgspec.Struct, frozen=True):  # made in a third of the time of a named tuple
    """The effect of acknowledgements, or of locks that end. ``SharePartition.settle`` applies it.

    Attributes:
        finished: records that are finished. The caller must store this first.
        unlocked: offsets whose locks end.
        released: the unlocked offsets that are available again.
        rejected: (offset, delivery count, reason or empty) of records that a member rejected, or that were delivered too
            often.
        renewed: offsets that get a new lock. Records that were released with a delay are locked by NO_MEMBER.
        accepted: number of accepted records.
        expired: number of records whose member was slower than its lock.
        lapsed: number of rejected records whose time was over before they were delivered.
    """

    finished: Sequence[Run] = ()
    unlocked: Sequence[int] = ()
    released: Sequence[int] = ()
    rejected: Sequence[tuple[int, int, str]] = ()
    renewed: Sequence[tuple[int, Lock]] = ()
    accepted: int = 0
    expired: int = 0
    lapsed: int = 0


class _New(msgspec.Struct, frozen=True):
    """Lists to which ``acquire`` adds records that were never delivered, as in ``Acquired``."""

    taken: list[tuple[int, int]]
    lapsed: list[tuple[int, int]]
    passed: list[tuple[int, int]]
    keys: list[tuple[int, Key]]


class Acquired(msgspec.Struct, frozen=True):
    """The result of ``SharePartition.acquire``.

    Attributes:
        runs: the records that the member has acquired, with their new delivery counts.
        passed: other records below the new ``end``. The caller must store them, too.
        lapsed: (offset, delivery count) of records whose time is over. The caller must reject them.
        keys: (offset, key) of new records, for ``learn``.
    """

    runs: Sequence[Run]
    passed: Sequence[Run] = ()
    lapsed: Sequence[tuple[int, int]] = ()
    keys: Sequence[tuple[int, Key]] = ()


@cython.cclass
class SharePartition:
    """The records of one partition for one share group, with the locks of its members.

    Methods that return runs do not change ``progress``: the caller stores the runs, which applies them.
    """

    if not cython.compiled:
        __slots__ = ("_by_deadline", "_locks", "_order", "_released", "_stored_delays", "progress")

    def __init__(self, progress: ShareProgress, *, now: float = 0.0, now_ms: int = 0) -> None:
        """Continue from stored progress.

        Args:
            now: the time that deadlines refer to, in seconds.
            now_ms: the system time.
        """
        self.progress: Final = progress
        self._order: KeyOrder | None = None
        self._locks: dict[int, Lock] = {}
        # a heap of all locks, and of some that no longer lock a record
        self._by_deadline: list[Lock] = []
        # a heap with all available offsets below ``end``, and some that are no longer available
        self._stored_delays = {offset: due_ms for offset, due_ms in progress.due_ms.items() if due_ms > now_ms}
        self._released: list[int] = sorted(progress.counts.keys() - self._stored_delays.keys())
        for offset in self._stored_delays:
            self._delay(offset, now, now_ms)

    def _delay(self, offset: int, now: float, now_ms: int) -> None:
        """Lock a record that was released with a delay before a restart, until it is due or is checked again."""
        delay_s = min((self._stored_delays[offset] - now_ms) / 1000, STORED_DELAY_S_MAX)
        lock = Lock(NO_MEMBER, now + delay_s, offset, offset)
        self._lock([offset], lock)
        heappush(self._by_deadline, lock)

    def _end_delays(self, offsets: Iterable[int], now: float, now_ms: int) -> list[int]:
        """Return the records of expired locks without those that are not due yet, whose delays continue."""
        ended = []
        for offset in offsets:
            if self._stored_delays.get(offset, 0) > now_ms:
                self._delay(offset, now, now_ms)
            else:
                self._stored_delays.pop(offset, None)
                ended.append(offset)
        return ended

    # Order per key

    def set_order(self, *, by_key: bool) -> None:
        """Begin or end to deliver records with the same key one at a time."""
        if by_key == (self._order is not None):
            return
        if by_key:
            self._order = KeyOrder(self.progress.counts, self._locks)
        else:
            self._order = None
            self._released = sorted(self.progress.counts.keys() - self._locks.keys())

    @property
    def unknown(self) -> Collection[int]:
        """Offsets whose keys must be read from the log and passed to ``learn``, before anything can be acquired."""
        return () if self._order is None else self._order.unknown

    def learn(self, keys: Sequence[tuple[int, Key]]) -> None:
        """Note the keys of unfinished records."""
        if self._order is not None and keys:
            were_unknown = [offset for offset, _ in keys if offset in self._order.unknown]
            self._order.learn(keys)
            self.offer(were_unknown)

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
        while released and not self.unknown:
            if self._is_available(released[0]):
                return released[0]
            heappop(released)
        has_space = len(self.progress.counts) < unfinished_max and not self.unknown
        return self.progress.end if has_space else None

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _is_available(self, offset: cython.longlong) -> cython.bint:
        is_unlocked = offset in self.progress.counts and offset not in self._locks
        return is_unlocked and (self._order is None or self._order.is_free(offset))

    def acquire(
        self,
        member: str,
        first: int,
        end: int,
        *,
        count_max: int,
        unfinished_max: int,
        deadline: float,
        waiting: Collection[int] = (),
        lapsed: Collection[int] = (),
        keys: Mapping[int, Key] = NO_KEYS,
    ) -> Acquired:
        """Acquire available records of [first, end) for a member. The caller must store the result.

        The records from ``first`` on must be readable up to ``end``.

        Args:
            waiting: offsets of the records of [``progress.end``, end) that are not due yet. They are passed.
            lapsed: offsets of records of [first, end) whose time is over. They are not acquired.
            keys: of the records of [``progress.end``, end), if the group has an order per key.
        """
        if self.unknown:
            return Acquired(())
        new = _New([], [], [], [])
        if self._released:
            self._take_released(new, first, end, count_max, lapsed)
        new_first, runs = self.progress.end, runs_of(new.taken)
        count_left, space = count_max - len(new.taken), unfinished_max - len(self.progress.counts)
        if waiting or lapsed or self._order is not None:
            if first <= new_first:
                offsets = range(new_first, end)
                self._pass(offsets, new, waiting, lapsed, keys, count_left=count_left, space=space)
                runs = runs_of(new.taken)
        elif first <= new_first and (count := min(count_left, space, end - new_first)) > 0:
            runs = joined([*runs, Run(new_first, new_first + count - 1, 1)])
        if runs:
            lock = Lock(member, deadline, runs[0].first, runs[-1].last)
            for run in runs:
                self._lock(range(run.first, run.last + 1), lock)
            heappush(self._by_deadline, lock)
        return Acquired(runs, runs_of(new.passed), new.lapsed, new.keys)

    @cython.cfunc
    def _take_released(
        self,
        new: _New,
        first: cython.longlong,
        end: cython.longlong,
        count_max: cython.longlong,
        lapsed: Collection[int],
    ) -> None:
        """Acquire records of [first, end) that were delivered before and are available again."""
        counts, released = self.progress.counts, self._released
        taken, over = new.taken, new.lapsed
        skipped: list[int] = []
        while released and released[0] < end and len(taken) < count_max:
            offset = heappop(released)
            if not self._is_available(offset):
                continue
            if offset < first:
                skipped.append(offset)
            elif offset in lapsed:
                if not over or over[-1][0] != offset:
                    over.append((offset, counts[offset]))
            elif not taken or taken[-1][0] != offset:
                taken.append((offset, counts[offset] + 1))
        for offset in skipped:
            heappush(released, offset)

    def _pass(
        self,
        offsets: Iterable[int],
        new: _New,
        waiting: Collection[int],
        lapsed: Collection[int],
        keys: Mapping[int, Key],
        *,
        count_left: int,
        space: int,
    ) -> None:
        """Acquire new records. Skip those that are not due, have expired, or must wait for a record of their key."""
        in_use: set[Key] = set()
        for offset in offsets:
            if space <= 0 or count_left <= 0:
                return
            if offset in waiting:
                new.passed.append((offset, FINISHED))
                continue
            space -= 1
            if offset in lapsed:
                new.passed.append((offset, 0))
                new.lapsed.append((offset, 0))
                continue
            key = keys.get(offset)
            is_blocked = (
                self._order is not None and key is not None and (key in in_use or self._order.head(key) is not None)
            )
            if key is not None:
                new.keys.append((offset, key))
                in_use.add(key)
            if is_blocked:
                new.passed.append((offset, 0))
            else:
                new.taken.append((offset, 1))
                count_left -= 1

    def offer(self, offsets: Iterable[int]) -> None:
        """Make unfinished records available, for example those that ``acquire`` has returned as lapsed."""
        for offset in offsets:
            heappush(self._released, offset)

    def offer_due(self, offsets: Collection[int]) -> None:
        """Make records available that are due now. If the group has an order per key, their keys must be learned first."""
        if self._order is not None:
            self._order.unknown.update(offsets)
        else:
            self.offer(offsets)

    def _free(self, offsets: Iterable[int]) -> None:
        """Make records available that waited for the given records, which are now finished or unlocked."""
        if self._order is not None:
            self.offer(self._order.freed(offsets))

    def undo(self, runs: Iterable[Run]) -> None:
        """Undo ``acquire``, because its result could not be stored."""
        for run in runs:
            offsets = range(run.first, run.last + 1)
            self._unlock(offsets)
            self.offer([offset for offset in offsets if offset in self.progress.counts])
            self._free(offsets)

    @cython.cfunc
    def _lock(self, offsets: Collection[int], lock: Lock) -> None:
        """Lock records, whose other locks end."""
        locks = self._locks
        if not locks.keys().isdisjoint(offsets):
            self._unlock(offsets)
        locks.update(dict.fromkeys(offsets, lock))
        lock.count += len(offsets)
        if self._order is not None:
            for offset in offsets:
                self._order.lock(offset)

    @cython.cfunc
    def _unlock(self, offsets: Iterable[int]) -> None:
        pop = self._locks.pop
        for offset in offsets:
            lock = pop(offset, None)
            if lock is not None:
                lock.count -= 1

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
            if len(outcomes) == 1 and outcomes[0] in _ENDS:
                unlocked += range(first, last + 1)
                finished.append(Run(first, last, FINISHED))
                accepted += (last - first + 1) * (outcomes[0] == _ACCEPT)
                continue
            again = Lock(member, now + lock_s, first, last)
            later = Lock(NO_MEMBER, now + delay_s, first, last)
            for index in range(last - first + 1):
                offset = first + index
                outcome = outcomes[index if len(outcomes) > 1 else 0]
                if outcome == _RENEW:
                    renewed.append((offset, again))
                    continue
                if outcome == _RELEASE and counts[offset] < deliveries_max and delay_s > 0:
                    renewed.append((offset, later))
                    continue
                unlocked.append(offset)
                if outcome == _RELEASE and counts[offset] < deliveries_max:
                    released.append(offset)
                    continue
                if outcome in (_RELEASE, _REJECT):
                    rejected.append((offset, counts[offset], reason))
                accepted += outcome == _ACCEPT
                finished.append(Run(offset, offset, FINISHED))
        return Settled(joined(finished), unlocked, released, rejected, renewed, accepted)

    @cython.ccall
    def settle(self, effect: Settled) -> None:
        """Apply an effect whose ``finished`` the caller has stored."""
        self._unlock(effect.unlocked)
        for offset in effect.released:
            heappush(self._released, offset)
        for offset, lock in effect.renewed:
            if not lock.count:
                heappush(self._by_deadline, lock)
            self._lock((offset,), lock)
        if self._order is not None:
            self._free(effect.unlocked)

    def hold(self, offsets: Collection[int]) -> None:
        """Lock rejected records, so that no member can acquire them until ``finish`` is called."""
        self._lock(offsets, Lock(NO_MEMBER, math.inf, 0, 0))

    @staticmethod
    def without_rejected(effect: Settled) -> Settled:
        """Return the effect without its rejected records."""
        offsets = {offset for offset, *_ in effect.rejected}
        finished = runs_of(
            (offset, FINISHED)
            for run in effect.finished
            for offset in range(run.first, run.last + 1)
            if offset not in offsets
        )
        unlocked = [offset for offset in effect.unlocked if offset not in offsets]
        return replace(effect, finished=finished, unlocked=unlocked, rejected=())

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
        while by_deadline and not by_deadline[0].count:
            heappop(by_deadline)
        return by_deadline[0].deadline if by_deadline else None

    def _offsets(self, lock: Lock) -> list[int]:
        """Return the offsets that a lock still locks."""
        span = range(lock.first, lock.last + 1)
        offsets = span if len(span) <= len(self._locks) else sorted(self._locks)
        return [offset for offset in offsets if self._locks.get(offset) is lock]

    def expired(self, now: float, *, deliveries_max: int, now_ms: int) -> tuple[Settled, list[Lock]]:
        """Return the effect of the locks that have expired, and these locks. If it cannot be stored, call ``retry``.

        Args:
            now_ms: the system time.
        """
        found: list[int] = []
        locks: list[Lock] = []
        expired = 0
        while self._by_deadline and self._by_deadline[0].deadline <= now:
            lock = heappop(self._by_deadline)
            if lock.count:
                offsets = self._offsets(lock)
                if lock.member == NO_MEMBER and self._stored_delays:
                    offsets = self._end_delays(offsets, now, now_ms)
                locks.append(lock)
                found += offsets
                expired += len(offsets) if lock.member != NO_MEMBER else 0
        return replace(self._releasing(found, deliveries_max), expired=expired), locks

    def retry(self, locks: Iterable[Lock]) -> None:
        """Return these locks in a later call of ``expired`` again."""
        for lock in locks:
            heappush(self._by_deadline, lock)

    @cython.ccall
    def trimmed(self, first_offset: cython.longlong) -> list[Run]:
        """Return the records below the partition's first offset, which no longer exist, as finished."""
        progress = self.progress
        return [Run(progress.start, first_offset - 1, FINISHED)] if progress.begins_below(first_offset) else []

    def drop_below(self, first_offset: int) -> None:
        """End the locks of records below the partition's first offset."""
        self._unlock([offset for offset in self._locks if offset < first_offset])
        for offset in [offset for offset in self._stored_delays if offset < first_offset]:
            del self._stored_delays[offset]
        if self._order is not None:
            self._free([*self._order.below(first_offset), *(at for at in self.unknown if at < first_offset)])


def _not_acquired(member: str, offset: int) -> Conflict:
    return Conflict(
        ErrorCode.RECORD_NOT_ACQUIRED,
        f"the member has not acquired this record, or its lock has expired member={member!r} offset={offset}",
    )


def joined(runs: Sequence[Run]) -> list[Run]:
    """Join adjacent runs of the same delivery count."""
    if len(runs) < 2:
        return list(runs)
    found: list[Run] = []
    for run in sorted(runs):
        if found and found[-1].last + 1 == run.first and found[-1].deliveries == run.deliveries:
            found[-1] = Run(found[-1].first, run.last, run.deliveries)
        else:
            found.append(run)
    return found
