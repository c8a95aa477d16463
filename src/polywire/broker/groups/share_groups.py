"""Share groups: several consumers read one partition and acknowledge its records one by one (KIP-932).

* A record is delivered again until a member accepts or rejects it, or it was delivered too often.
* Progress is written to the journal. Members and locks are not: after a restart members rejoin, and unfinished records
  are available to all of them.
* A new group has no progress in a partition until a member first reads it. It then begins where
  ``share.auto.offset.reset`` says.
* Members that wait for records are notified one after another, in the order in which they began to wait.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

import cython

from polywire.broker import changes
from polywire.broker.groups.dead_letters import EXHAUSTED, LAPSED, REJECTED, DeadLetters, Letter, LetterBroker
from polywire.broker.groups.delay_index import DelayIndex
from polywire.broker.groups.delivery_marks import read_marks
from polywire.broker.groups.share import (
    FINISHED,
    NO_DELAYS,
    NO_KEYS,
    NO_MEMBER,
    Batch,
    Settled,
    runs_of,
)
from polywire.broker.groups.share_delays import DueWatch, moved_change
from polywire.broker.groups.share_directory import DirectoryBroker, ShareDirectory
from polywire.broker.groups.share_keys import KeyReader, read_keys
from polywire.broker.groups.share_members import ShareMembers
from polywire.broker.groups.share_reading import NO_COUNTS, Countdown, ShareCounts, ShareOffsets
from polywire.broker.groups.share_table import ShareTable, progressed
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.quotas import READER_BYTES, Kind
from polywire.broker.settings import BrokerSettings
from polywire.broker.state import State
from polywire.broker.topics import Partition, Topic
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Missing
from polywire.log.base import Completion, Handle, Loop
from polywire.share_settings import DEAD_LETTERS, ShareSettings
from polywire.types import Level, Outcome

if cython.compiled:
    from cython.cimports.polywire.broker.groups.share import SharePartition
    from cython.cimports.polywire.broker.groups.share_reading import Reading, Waiting
else:
    from polywire.broker.groups.share import SharePartition
    from polywire.broker.groups.share_reading import Reading, Waiting

RETRY_S: Final = 1.0  # seconds until expired locks are checked again if the disk was full
PRUNE_MIN: Final = 1_000  # partitions of groups below which the state of deleted ones is not searched
_WRITTEN: Final = Level.WRITTEN  # read for every request; a module constant is ten times as fast as an attribute
BEGUN_MAX: Final = 1_000  # partitions that ``configure`` begins to read, some 5 us each


class ShareBroker(DirectoryBroker, LetterBroker, Protocol):
    """The methods of the broker that share groups call."""


@cython.cclass
class ShareGroups:
    """All share groups of one broker.

    Attributes:
        directory: their names, owners and settings.
        members: their members that send heartbeats.
    """

    if not cython.compiled:  # when compiled, share_groups.pxd declares the fields
        __slots__ = (
            "_broker",
            "_clock",
            "_connections",
            "_counts",
            "_dead_letters",
            "_delay_index",
            "_loop",
            "_prune_above",
            "_readings",
            "_state",
            "_table",
            "directory",
            "members",
        )

    def __init__(
        self,
        broker: ShareBroker,
        state: State,
        *,
        settings: BrokerSettings,
        loop: Loop,
        clock: Clock,
        delays: DelayIndex,
    ) -> None:
        self._broker = broker
        self._state = state
        self._table: Final[ShareTable] = state.shares
        self._loop = loop
        self._clock = clock
        self.directory: Final = ShareDirectory(broker, state, settings)
        self.members: Final = ShareMembers(
            broker, state, self.directory, settings=settings, loop=loop, clock=clock, gone=self.release_member
        )
        self._connections: dict[tuple[str, str], int] = {}  # open ones that use a member, by group and member
        self._readings: dict[tuple[str, int], Reading] = {}
        self._counts: dict[tuple[str, str], ShareCounts] = {}  # by names of the group and the topic
        self._prune_above = PRUNE_MIN
        self._dead_letters: Final = DeadLetters(broker, loop)
        self._delay_index: Final = delays

    # Records

    @cython.cfunc
    def _reading(self, name: Any, partition: Any) -> Reading | None:
        """Return the group's state in a partition, or None if it has no progress there yet. Raises Busy(DISK_FULL)."""
        key = name, partition.incarnation
        reading: Reading | None = self._readings.get(key)
        if reading is not None:
            if not reading.share.progress.is_dropped:
                return reading
            self._forget(key)
        progress = self._table.find(*key)
        if progress is None:
            return None
        self._prune()
        share = SharePartition(progress, now=self._clock.monotonic(), now_ms=self._clock.now_us() // 1000)
        counts = self._counts.setdefault((name, partition.topic.name.full), ShareCounts())
        due, keys = self._watches(key, partition, share)
        reading = self._readings[key] = Reading(name, partition, share, due, keys, counts)
        self._watch_locks(reading)
        reading.due.check()
        settings = self.directory.settings(name)
        if exhausted := reading.share.exhausted(settings.deliveries_max):
            try:
                self._settle(reading, exhausted, settings, None)
            except BrokerError:  # the next request must find it exhausted again, and not deliver it
                self._forget(key)
                raise
        return reading

    def _watches(self, key: tuple[str, int], partition: Partition, share: SharePartition) -> tuple[DueWatch, KeyReader]:
        def offered() -> None:
            reading = self._readings.get(key)
            if reading is not None:
                self._wake_soon(reading)

        due = DueWatch(
            key[0],
            partition,
            share,
            broker=self._broker,
            table=self._table,
            index=self._delay_index,
            loop=self._loop,
            clock=self._clock,
            space=lambda: self.directory.settings(key[0]).unfinished_max - len(share.progress.counts),
            offered=offered,
        )
        return due, KeyReader(partition, share, broker=self._broker, loop=self._loop, read_all=offered)

    def _prune(self) -> None:
        """Forget the state of deleted groups and partitions, now and then."""
        if len(self._readings) + len(self._counts) >= self._prune_above:
            for key in [key for key, reading in self._readings.items() if reading.share.progress.is_dropped]:
                self._forget(key)
            self._prune_counts()
            self._prune_above = 2 * (len(self._readings) + len(self._counts)) + PRUNE_MIN

    def _prune_counts(self) -> None:
        used = {(reading.group, reading.partition.topic.name.full) for reading in self._readings.values()}
        for pair in self._counts.keys() - used:
            del self._counts[pair]

    def _forget(self, key: tuple[str, int]) -> None:
        reading = self._readings.pop(key)
        reading.due.stop()
        reading.keys.stop()
        for handle in (reading.timer, reading.log_wait):
            if handle is not None:
                handle.cancel()
        waiting, reading.waiting = reading.waiting, {}
        for waiter in waiting:
            self._loop.call_soon(waiter.wake)

    def _is_current(self, reading: Reading) -> bool:
        """Return False if the partition or the group was deleted, or the group was set to other offsets."""
        return not reading.share.progress.is_dropped and not reading.partition.ended

    def begin(self, name: str, partition: Partition, then: Completion[int], *, by: Caller) -> Handle | None:
        """Begin to read a partition, where the group's settings say, unless it already does.

        Return None if the partition can be read now. Otherwise ``then`` is called when it can, unless the returned
        handle is cancelled. Raises Missing(PARTITION_MISSING), Denied(DENIED), Busy(BUSY, DISK_FULL).
        """
        self.directory.check_owner(name, by)
        if self._reading(name, partition) is not None:
            return None
        age_us = self.directory.settings(name).start_age_us
        log = partition.log
        if age_us == 0 or age_us is None:
            self._begin_at(name, partition, log.first_offset if age_us is None else log.next_offset, by)
            return None

        def found(offset: int | BrokerError) -> None:
            try:
                if (
                    not isinstance(offset, BrokerError)
                    and not partition.ended
                    and self._reading(name, partition) is None
                ):
                    self._begin_at(name, partition, offset, by)
            except BrokerError as error:
                offset = error
            then(offset)

        offset = log.offset_at(max(int(self._clock.now_us()) - age_us, 0), found)
        if not isinstance(offset, int):
            return offset
        self._begin_at(name, partition, offset, by)
        return None

    def _begin_at(self, name: str, partition: Partition, offset: int, by: Caller) -> None:
        if partition.ended:
            raise Missing(ErrorCode.PARTITION_MISSING, f"partition was deleted partition={partition.number}")
        self.directory.create(name, by)
        self._state.quotas.admit(Kind.READERS, by, READER_BYTES + len(name), owner=self.directory.owner(name))
        made = changes.ShareStored(name, partition.incarnation, offset, offset)
        self._broker.change_all([made], level=_WRITTEN, done=None)

    def next_offset(self, name: str, partition: Partition) -> int | None:
        """Return the offset from which to read available records, or None if there are none.

        Call ``begin`` first. Raises Busy(DISK_FULL).
        """
        reading: Reading | None = self._reading(name, partition)
        return None if reading is None else self._next_offset(reading)

    @cython.cfunc
    def _next_offset(self, reading: Reading) -> Any:
        log, share = reading.partition.log, reading.share
        if gone := share.trimmed(log.first_offset):
            made = progressed(reading.group, reading.partition.incarnation, gone)
            self._broker.change_all([made], level=_WRITTEN, done=None)
            share.drop_below(log.first_offset)
        settings = self._table.settings(reading.group)
        share.set_order(by_key=settings.by_key)
        if share.unknown:
            reading.keys.read()
        unfinished_max = self._new_max(reading, settings)
        if not unfinished_max:  # there may be space now, or the system clock was set ahead
            reading.due.check()
            unfinished_max = self._new_max(reading, settings)
        offset = share.next_offset(unfinished_max)
        return offset if offset is not None and offset < log.readable_offset else None

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _new_max(self, reading: Reading, settings: Any) -> cython.longlong:
        """Return the number of unfinished records below which the group may acquire further ones."""
        return 0 if reading.due.holds_scan else settings.unfinished_max

    def acquire(
        self,
        name: str,
        partition: Partition,
        member: str,
        first: int,
        end: int,
        *,
        count_max: int,
        done: Completion[int] | None,
        chunks: Sequence[memoryview] = (),
    ) -> Sequence[tuple[int, int, int]]:
        """Acquire available records of [first, end), at most ``count_max``, for a member.

        Return (first offset, last offset, delivery count) of each run. If there is any, ``done`` is called once it is
        stored: a member may receive its records only then. Raises Busy(DISK_FULL).

        Args:
            chunks: batches with these records. Their headers say when records are due, and when their time is over.
        """
        reading: Reading | None = self._reading(name, partition)
        if reading is None:
            return ()
        share, settings = reading.share, self._table.settings(name)
        new_first, new_max = share.progress.end, self._new_max(reading, settings)
        marks = read_marks(chunks, first, end, due_from=new_first)
        delayed = reading.due.delayed(marks.due_ms)
        keys_end = new_first + new_max + len(delayed.waiting)  # no later record can be acquired
        lapsed: Collection[int] = ()
        if marks.expires_ms:
            now_ms = self._clock.now_us() // 1000
            lapsed = {at for at, expires_ms in marks.expires_ms.items() if expires_ms <= now_ms}
        found = share.acquire(
            member,
            first,
            marks.end,
            count_max=count_max,
            unfinished_max=new_max,
            deadline=self._clock.monotonic() + settings.lock_s,
            waiting=delayed.waiting,
            lapsed=lapsed,
            keys=read_keys(chunks, new_first, min(marks.end, keys_end)) if settings.by_key else NO_KEYS,
        )
        if found.runs or found.passed or found.lapsed:
            self._store_acquired(reading, found, delayed, settings, done)
        return found.runs

    @cython.cfunc
    def _store_acquired(self, reading: Reading, found: Any, delayed: Any, settings: Any, done: Any) -> Any:
        """Store what ``acquire`` has found. ``delayed`` has those of the new records that are. Raises Busy(DISK_FULL)."""
        share, partition, runs = reading.share, reading.partition, [*found.runs, *found.passed]
        new_first = share.progress.end
        made: list[changes.Change] = [progressed(reading.group, partition.incarnation, runs)] if runs else []
        if delayed.due_ms:
            new_end = max([run.last + 1 for run in runs] + [new_first])
            made = [moved_change(reading.group, partition, runs, delayed.cursor_at(new_end))]
        try:
            self._broker.change_all(made, level=_WRITTEN, done=done if found.runs else None)
        except BrokerError:
            share.undo([*found.runs, *runs_of(found.lapsed)])
            raise
        share.learn(found.keys)
        reading.due.scanned(new_first, share.progress.end, delayed)
        if found.lapsed:
            self._reject_lapsed(reading, found.lapsed, settings)
        self._watch_locks(reading)

    def _reject_lapsed(self, reading: Reading, lapsed: Sequence[tuple[int, int]], settings: ShareSettings) -> None:
        offsets = [offset for offset, _ in lapsed]
        finished = runs_of((offset, FINISHED) for offset in offsets)
        rejected = [(offset, count, LAPSED) for offset, count in lapsed]
        try:
            self._settle(reading, Settled(finished, offsets, rejected=rejected, lapsed=len(offsets)), settings, None)
        except BrokerError:  # the disk is full: they are found again
            reading.share.offer(offsets)

    def acknowledge(
        self,
        name: str,
        partition: Partition,
        member: str,
        batches: Sequence[Batch],
        *,
        by: Caller = NO_CALLER,
        done: Completion[int],
    ) -> bool:
        """Process a member's acknowledgements of records, all or none. ``done`` is called once they are stored.

        Return whether this takes longer, because dead letters must be stored first.

        Raises Conflict(RECORD_NOT_ACQUIRED), Invalid(INVALID_REQUEST), Denied(DENIED), Busy(DISK_FULL).

        Args:
            batches: the acknowledgements, without overlap.
        """
        self.directory.check_owner(name, by)
        reading: Reading | None = self._reading(name, partition)
        if reading is None:
            raise Conflict(ErrorCode.RECORD_NOT_ACQUIRED, f"the group does not read this partition group={name!r}")
        settings = self._table.settings(name)
        if not settings.renews and any(Outcome.RENEW in batch.outcomes for batch in batches):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"the group does not renew locks group={name!r}")
        effect = reading.share.acknowledge(
            member,
            batches,
            deliveries_max=settings.deliveries_max,
            now=self._clock.monotonic(),
            lock_s=settings.lock_s,
        )
        has_letters = self._settle(reading, effect, settings, done)
        if effect.renewed or effect.released:
            delayed = sum(lock.member == NO_MEMBER for _, lock in effect.renewed)
            reading.counts.released += len(effect.released) + delayed
        return has_letters

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _settle(self, reading: Reading, effect: Any, settings: Any, done: Any) -> cython.bint:
        """Store and apply an effect, and notify members that wait for records. Raises Busy(DISK_FULL).

        Rejected records are first copied to the group's dead-letter topic, if it has one. Return whether there are any.
        """
        topic = settings.dead_letters
        rejected_count = len(effect.rejected) - effect.lapsed
        # a queue is not its own dead-letter topic: its records would come back for ever
        rejected = effect.rejected if topic and topic != reading.partition.topic.name.full else ()
        if rejected:
            effect = reading.share.without_rejected(effect)
            done = Countdown(len(rejected) + 1, done) if done is not None else None
        delays = self._delays(effect) if effect.renewed else NO_DELAYS
        made = []
        if delays or effect.finished:
            made.append(progressed(reading.group, reading.partition.incarnation, effect.finished, delays))
        self._broker.change_all(made, level=_WRITTEN, done=done)
        if rejected:
            reading.share.hold({offset for offset, *_ in rejected})
        reading.share.settle(effect)
        counts = reading.counts
        counts.accepted += effect.accepted
        counts.rejected += rejected_count
        counts.expired += effect.expired
        counts.lapsed += effect.lapsed
        if effect.renewed:  # otherwise no lock expires earlier than before
            self._watch_locks(reading)
        reading.due.check()
        self._wake_soon(reading)
        for offset, deliveries, reason in rejected:
            reason = reason or (REJECTED if deliveries < settings.deliveries_max else EXHAUSTED)
            end = partial(self._end_letter, reading, offset, done)
            is_wanted = partial(self._is_current, reading)
            letter = Letter(reading.partition, offset, deliveries, reason, reading.group, topic, is_wanted, end)
            self._dead_letters.put(letter)
        return bool(rejected)

    @cython.cfunc
    def _delays(self, effect: Any) -> Any:
        """Return when records that are released with a delay are due, by offset, as system times in milliseconds."""
        delayed = [(offset, lock) for offset, lock in effect.renewed if lock.member == NO_MEMBER]
        if not delayed:
            return NO_DELAYS
        now, now_ms = self._clock.monotonic(), self._clock.now_us() // 1000
        return {offset: now_ms + int((lock.deadline - now) * 1000) for offset, lock in delayed}

    def _end_letter(self, reading: Reading, offset: int, done: Completion[int] | None) -> None:
        """End a record that was copied to a dead-letter topic. Raises Busy(DISK_FULL)."""
        if self._is_current(reading):
            self._settle(reading, reading.share.finish(offset), self.directory.settings(reading.group), done)
        elif done is not None:  # the group was deleted meanwhile, or set to other offsets
            self._broker.change_all([], level=_WRITTEN, done=done)

    def member_connected(self, name: str, member: str) -> None:
        """Note that a connection uses a member. Call ``member_disconnected`` when it closes."""
        key = name, member
        self._connections[key] = self._connections.get(key, 0) + 1

    def member_disconnected(self, name: str, member: str) -> None:
        """Release the records of a member whose last connection has closed.

        A worker that reconnects may have acquired records before the broker notices that its old connection is lost.
        """
        key = name, member
        self._connections[key] -= 1
        if not self._connections[key]:
            del self._connections[key]
            self.release_member(name, member)

    def release_member(self, name: str, member: str) -> None:
        """Release all records of this broker that a member has acquired, because it is gone."""
        settings = self.directory.settings(name)
        for incarnation in list(self._table.incarnations(name)):
            reading = self._readings.get((name, incarnation))
            if reading is not None and self._is_current(reading):
                effect = reading.share.release_member(member, deliveries_max=settings.deliveries_max)
                try:
                    self._settle(reading, effect, settings, None)
                except BrokerError:  # the disk is full: the locks expire
                    continue
                reading.counts.released += len(effect.released)

    @cython.cfunc
    def _watch_locks(self, reading: Reading) -> Any:
        """Set the timer for the lock that expires first. It may fire although no lock expires, if the lock ended before."""
        deadline = reading.share.deadline
        if deadline is not None and deadline < reading.timer_at:
            if reading.timer is not None:
                reading.timer.cancel()
            reading.timer_at = deadline
            delay = max(deadline - self._clock.monotonic(), 0.0)
            reading.timer = self._loop.call_later(delay, self._on_deadline, reading)

    def _on_deadline(self, reading: Reading) -> None:
        reading.timer, reading.timer_at = None, math.inf
        if not self._is_current(reading):
            return
        settings = self.directory.settings(reading.group)
        now, now_ms = self._clock.monotonic(), self._clock.now_us() // 1000
        effect, locks = reading.share.expired(now, deliveries_max=settings.deliveries_max, now_ms=now_ms)
        try:
            self._settle(reading, effect, settings, None)
        except Busy:  # the disk is full
            reading.share.retry(locks)
            reading.timer = self._loop.call_later(RETRY_S, self._on_deadline, reading)
            reading.timer_at = self._clock.monotonic() + RETRY_S
            return
        except BrokerError:  # storage has failed, and the broker is about to stop
            return
        self._watch_locks(reading)

    # Delayed

    def wait(self, name: str, partition: Partition, member: str, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once, when a member may acquire a record of the partition, or the group no longer reads it.

        Call ``begin`` first. The returned handle cancels this. Raises Missing(PARTITION_MISSING), Busy(DISK_FULL).
        """
        reading: Reading | None = self._reading(name, partition)
        if reading is None or partition.ended:
            raise Missing(ErrorCode.PARTITION_MISSING, f"the group does not read this partition group={name!r}")
        waiting = Waiting(reading, member, wake)
        reading.waiting[waiting] = None
        self._wake_soon(reading)
        return waiting

    @cython.cfunc
    def _wake_soon(self, reading: Reading) -> Any:
        if reading.waiting and not reading.is_waking:
            reading.is_waking = True
            self._loop.call_soon(self._wake_next, reading)

    def _wake_next(self, reading: Reading) -> None:
        """Notify the member that has waited longest, if there is an available record."""
        reading.is_waking = False
        if not reading.waiting:
            return
        if not self._is_current(reading):
            waiting, reading.waiting = reading.waiting, {}
            for waiter in waiting:
                waiter.wake()
            return
        try:
            is_available = self._next_offset(reading) is not None
        except BrokerError:
            is_available = False
        if is_available:
            waiter = next(iter(reading.waiting))
            del reading.waiting[waiter]
            self._wake_soon(reading)
            waiter.wake()
        elif reading.log_wait is None:
            try:
                offset = max(reading.share.progress.end, reading.partition.log.readable_offset)
                reading.log_wait = self._broker.wait(reading.partition, offset, lambda: self._on_record(reading))
            except BrokerError:  # the partition was deleted
                self._on_record(reading)

    def _on_record(self, reading: Reading) -> None:
        reading.log_wait = None
        self._wake_soon(reading)

    # Administration

    def topics(self, name: str) -> list[str]:
        """Return the full names of the topics that a group's members subscribe to, or that it has progress in."""
        found = self.members.topics(name)
        return sorted(found | {partition.topic.name.full for partition, _ in self._partitions(name)})

    def _partitions(self, name: str) -> Iterator[tuple[Partition, int]]:
        for incarnation in self._table.incarnations(name):
            partition = self._state.catalog.find_partition(incarnation)
            if partition is not None:
                yield partition, incarnation

    def offsets(self, name: str, partition: Partition) -> ShareOffsets | None:
        """Return a group's progress in a partition, or None if it has none."""
        progress = self._table.find(name, partition.incarnation)
        if progress is None:
            return None
        reading = self._readings.get((name, partition.incarnation))
        if reading is None or reading.share.progress is not progress:  # no member has read it since the start
            now_ms = self._clock.now_us() // 1000
            delayed = {offset for offset, due_ms in progress.due_ms.items() if due_ms > now_ms}
            available = min(progress.counts.keys() - delayed, default=progress.end)
            unfinished, scheduled = len(progress.counts), progress.cursor.waiting
            return ShareOffsets(progress.start, progress.end, unfinished, {}, len(delayed), available, scheduled)
        holders = reading.share.holders()
        count = holders.pop(NO_MEMBER, 0)
        for waiting in reading.waiting:
            holders.setdefault(waiting.member, 0)
        first = reading.share.next_offset(sys.maxsize)
        available = progress.end if first is None else first
        return ShareOffsets(
            progress.start,
            progress.end,
            len(progress.counts),
            holders,
            count,
            available,
            progress.cursor.waiting,
            reading.due.next_due_ms,
        )

    def counts(self, name: str, topic: str) -> ShareCounts:
        """Return the outcomes of the records of a group in a topic."""
        return self._counts.get((name, topic), NO_COUNTS)

    def partitions(self, name: str) -> list[Partition]:
        """Return the partitions in which a group has progress."""
        return [partition for partition, _ in self._partitions(name)]

    def _check_empty(self, name: str, by: Caller) -> None:
        self.directory.check_owner(name, by)
        if not self.directory.exists(name):
            raise Missing(ErrorCode.GROUP_MISSING, f"no such share group group={name!r}")
        if self.members.has_any(name) or self._is_in_use(name):
            raise Conflict(ErrorCode.GROUP_NOT_EMPTY, f"the group has members (stop them first) group={name!r}")

    def _is_in_use(self, name: str) -> bool:
        """Return whether a member without heartbeats waits for records or holds some."""
        found = [self._readings.get((name, incarnation)) for incarnation in self._table.incarnations(name)]
        return any(
            reading is not None and (reading.waiting or reading.share.holders().keys() - {NO_MEMBER})
            for reading in found
        )

    def delete(self, name: str, *, by: Caller = NO_CALLER) -> None:
        """Delete a group without members, its settings and its progress.

        Raises Missing(GROUP_MISSING), Conflict(GROUP_NOT_EMPTY), Denied(DENIED), Busy(DISK_FULL).
        """
        self._check_empty(name, by)
        self._broker.change_all([changes.ShareGroupDeleted(name)], level=_WRITTEN, done=None)
        self._forget_all(name)

    def _forget_all(self, name: str) -> None:
        self._forget_old(name)
        self._prune_counts()

    def _forget_old(self, name: str) -> None:
        """Forget what does not belong to the stored progress of a group any more."""
        for key in [key for key in self._readings if key[0] == name and not self._is_current(self._readings[key])]:
            self._forget(key)

    def configure(
        self,
        name: str,
        topic: Topic,
        settings: Mapping[str, str | None],
        *,
        by: Caller = NO_CALLER,
        done: Completion[int],
    ) -> None:
        """Change some settings of a group, and let it read the topic. None resets a setting to its default.

        Raises the same errors as ``ShareDirectory.configure``.
        """
        changed = {**self.directory.stored_settings(name), **settings}
        kept = {key: value for key, value in changed.items() if value is not None}
        if kept.get(DEAD_LETTERS) == topic.name.full:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"a queue cannot be its own dead-letter topic (use another) topic={topic.name.full!r}",
            )
        self.directory.configure(name, kept, by=by)
        for partition in topic.partitions[:BEGUN_MAX]:  # it begins to read further ones when a member acquires records
            self.begin(name, partition, _ignore, by=by)
        self._broker.change_all([], level=_WRITTEN, done=done)

    def alter_offsets(
        self, name: str, offsets: Mapping[Partition, int], *, by: Caller = NO_CALLER, done: Completion[int]
    ) -> None:
        """Set where a group without members continues to read. Creates the group.

        Raises Conflict(GROUP_NOT_EMPTY, GROUP_PROTOCOL_MISMATCH), Denied(DENIED), Busy(BUSY, DISK_FULL).
        """
        self.directory.create(name, by)
        self._check_empty(name, by)
        made = [
            changes.ShareStored(name, partition.incarnation, at, at)
            for partition, offset in offsets.items()
            for at in [min(max(offset, partition.log.first_offset), partition.log.next_offset)]
        ]
        self._state.quotas.admit(
            Kind.READERS, by, (READER_BYTES + len(name)) * len(made), count=len(made), owner=self.directory.owner(name)
        )
        self._broker.change_all(made, level=_WRITTEN, done=done)
        self._forget_old(name)

    def delete_offsets(
        self, name: str, partitions: Iterable[Partition], *, by: Caller = NO_CALLER, done: Completion[int]
    ) -> None:
        """Delete a group's progress in some partitions.

        Raises Missing(GROUP_MISSING), Conflict(GROUP_NOT_EMPTY), Denied(DENIED), Busy(DISK_FULL).
        """
        self._check_empty(name, by)
        incarnations = tuple(partition.incarnation for partition in partitions)
        self._broker.change_all([changes.ShareDeleted(name, incarnations)], level=_WRITTEN, done=done)
        self._forget_old(name)

    def delete_topic(self, name: str, topic: Topic, *, by: Caller = NO_CALLER, done: Completion[int]) -> None:
        """Delete a group's progress in a topic, and the group if it has none in another topic.

        Raises Missing(GROUP_MISSING), Conflict(GROUP_NOT_EMPTY), Denied(DENIED), Busy(DISK_FULL).
        """
        self._check_empty(name, by)
        made: changes.ShareGroupDeleted | changes.ShareDeleted = changes.ShareGroupDeleted(name)
        if any(partition.topic is not topic for partition in self.partitions(name)):
            made = changes.ShareDeleted(name, tuple(partition.incarnation for partition in topic.partitions))
        self._broker.change_all([made], level=_WRITTEN, done=done)
        self._forget_all(name)


def _ignore(result: int | BrokerError) -> None:
    pass
