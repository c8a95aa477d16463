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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from polywire.broker import changes
from polywire.broker.groups.coordinator import GroupBroker
from polywire.broker.groups.dead_letters import EXHAUSTED, REJECTED, DeadLetters, Letter, LetterBroker
from polywire.broker.groups.share import NO_DELAYS, NOBODY, Batch, Settled, SharePartition
from polywire.broker.groups.share_table import ShareTable, progressed, share_group_size
from polywire.broker.owners import NO_CALLER, UNOWNED, Caller, next_owner
from polywire.broker.quotas import MEMBER_BYTES, READER_BYTES, Kind
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.state import State
from polywire.broker.topics import Partition, Topic
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, Conflict, Denied, ErrorCode, Invalid, Missing
from polywire.log.base import Completion, Handle, Loop
from polywire.share_settings import ShareSettings, check, decoded
from polywire.types import Level

JOINING: Final = 0  # epoch of a member that joins
LEAVING: Final = -1  # epoch of a member that leaves
TOPICS_MAX: Final = 1_000  # topics of one member
# Partitions of a topic that one member reads. Up to this number, all members read all partitions, so a slow member
# delays nobody else.
READ_MAX: Final = 32
RETRY_S: Final = 1.0  # seconds until expired locks are checked again if the disk was full
PRUNE_MIN: Final = 1_000  # partitions of groups below which the state of deleted ones is not searched
SWEEP_S: Final = 5.0  # longest interval between checks for members without heartbeats


class ShareBroker(GroupBroker, LetterBroker, Protocol):
    """The methods of the broker that share groups call."""

    def wait(self, partition: Partition, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once, when the partition may have a record at ``offset`` or has been deleted."""


class ShareBeat(NamedTuple):
    """A ShareGroupHeartbeat request.

    Attributes:
        epoch: epoch that the member received last, or JOINING or LEAVING.
        topics: full names of its topics, None if unchanged.
    """

    member_id: str
    epoch: int
    topics: frozenset[str] | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""

    @property
    def size(self) -> int:
        """Bytes that the member counts against quotas, without the objects."""
        return len(self.member_id) + len(self.client_id) + len(self.client_host) + sum(map(len, self.topics or ()))


class ShareBeatResponse(NamedTuple):
    """The response to a heartbeat. The assignment has partitions by topic id, None if unchanged."""

    epoch: int
    assignment: Mapping[bytes, Sequence[int]] | None
    heartbeat_interval_ms: int


@dataclass(slots=True)
class ShareMember:
    """A member of a share group.

    Attributes:
        epoch: epoch of the group when the member last received its assignment.
        previous_epoch: the one before, with which a member repeats a heartbeat whose response was lost.
        assigned: partitions by topic id that the member received last.
    """

    id: str
    topics: frozenset[str]
    heard_at: float
    rack_id: str | None
    client_id: str
    client_host: str
    size: int
    epoch: int = 0
    previous_epoch: int = 0
    assigned: dict[bytes, Sequence[int]] = field(default_factory=dict)


class ShareGroupView(NamedTuple):
    """A share group with its members."""

    name: str
    epoch: int
    members: Sequence[ShareMember]


class ShareOffsets(NamedTuple):
    """Progress of a share group in one partition.

    Attributes:
        start: all records below this offset are finished.
        end: no record from this offset on was delivered.
        unfinished: records below ``end`` that are not finished.
        acquired: number of those of them that members hold now, by member.
        delayed: number of those of them that were released with a delay, or are copied to a dead-letter topic.
    """

    start: int
    end: int
    unfinished: int
    acquired: Mapping[str, int]
    delayed: int


class _Group:
    """The members of one share group."""

    __slots__ = ("_numbers", "bytes", "epoch", "members", "name", "timer")

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.epoch = 0
        self.bytes = 0
        self.members: dict[str, ShareMember] = {}
        self.timer: Handle | None = None
        # number of each member among those of a topic, by topic, as of an epoch
        self._numbers: tuple[int, dict[str, dict[str, int]]] = -1, {}

    def numbers(self, topic: str) -> dict[str, int]:
        """Return the members of a topic, numbered in the order of their ids."""
        epoch, by_topic = self._numbers
        if epoch != self.epoch:
            by_topic = {}
            self._numbers = self.epoch, by_topic
        found = by_topic.get(topic)
        if found is None:
            ids = sorted(member.id for member in self.members.values() if topic in member.topics)
            found = by_topic[topic] = {id_: number for number, id_ in enumerate(ids)}
        return found


def assigned(number: int, members: int, partition_count: int) -> list[int]:
    """Return the partitions of one member of a topic. Every partition has a member, and every member has partitions.

    Args:
        number: number of the member, below ``members``.
    """
    size = min(max(READ_MAX, math.ceil(partition_count / members)), partition_count)
    first = number * partition_count // members
    return sorted((first + step) % partition_count for step in range(size))


class _Waiting:
    """A member that waits for records of a partition. A handle."""

    __slots__ = ("_reading", "wake")

    def __init__(self, reading: _Reading, wake: Callable[[], None]) -> None:
        self._reading: Final = reading
        self.wake: Final = wake

    def cancel(self) -> None:
        self._reading.waiting.pop(self, None)


@dataclass(slots=True, eq=False)
class _Reading:
    """A group that reads a partition.

    Attributes:
        timer: fires when the first lock may have expired.
        waiting: members that wait for records, longest first.
        log_wait: registration for the next record of the log.
        is_waking: whether a check of ``waiting`` is scheduled.
    """

    group: str
    partition: Partition
    share: SharePartition
    timer: Any = None
    timer_at: float = math.inf
    waiting: dict[_Waiting, None] = field(default_factory=dict)
    log_wait: Handle | None = None
    is_waking: bool = False


class _Countdown:
    """A completion that calls another one when it was called a number of times, with the first error if there is one."""

    __slots__ = ("_done", "_left", "_result")

    def __init__(self, count: int, done: Completion[int]) -> None:
        self._left = count
        self._done: Final = done
        self._result: int | BrokerError = 0

    def __call__(self, result: int | BrokerError) -> None:
        self._left -= 1
        if isinstance(result, BrokerError):
            self._result = result
        if not self._left:
            self._done(self._result)


class ShareGroups:
    """All share groups of one broker."""

    __slots__ = (
        "_broker",
        "_clock",
        "_dead_letters",
        "_groups",
        "_loop",
        "_prune_above",
        "_readings",
        "_settings",
        "_state",
        "_table",
    )

    def __init__(
        self, broker: ShareBroker, state: State, *, settings: BrokerSettings, loop: Loop, clock: Clock
    ) -> None:
        self._broker = broker
        self._state = state
        self._table: Final[ShareTable] = state.shares
        self._settings = settings
        self._loop = loop
        self._clock = clock
        self._groups: dict[str, _Group] = {}
        self._readings: dict[tuple[str, int], _Reading] = {}
        self._prune_above = PRUNE_MIN
        self._dead_letters: Final = DeadLetters(broker, loop)

    # Members

    def beat(self, name: str, beat: ShareBeat, *, by: Caller = NO_CALLER) -> ShareBeatResponse:
        """Handle a ShareGroupHeartbeat request, with which a member joins, stays or leaves.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED) for another user's group, Missing(MEMBER_MISSING),
        Conflict(GENERATION_STALE), Busy(BUSY, DISK_FULL), and Conflict(GROUP_PROTOCOL_MISMATCH) if a group of another
        kind has this name.
        """
        check_name(name, self._settings.name_bytes_max)
        check_name(beat.member_id, self._settings.name_bytes_max)
        self._broker.check_owner(by, self._table.owner(name), "group", name)
        if beat.epoch == JOINING:
            member = self._join(name, beat, by)
        else:
            member = self._member(name, beat)
        group = self._groups[name]
        settings = self.settings(name)
        if beat.epoch == LEAVING:
            self._remove(group, member)
            return ShareBeatResponse(LEAVING, None, settings.heartbeat_interval_ms)
        member.heard_at = self._clock.monotonic()
        if beat.topics is not None and beat.topics != member.topics:
            self._subscribe(group, member, beat)
        partitions = self._assigned(group, member)
        is_new = partitions != member.assigned or beat.epoch != member.epoch
        if partitions != member.assigned or member.epoch == JOINING:
            member.previous_epoch, member.epoch = member.epoch, group.epoch
            member.assigned = partitions
        return ShareBeatResponse(member.epoch, partitions if is_new else None, settings.heartbeat_interval_ms)

    def _member(self, name: str, beat: ShareBeat) -> ShareMember:
        group = self._groups.get(name)
        member = None if group is None else group.members.get(beat.member_id)
        if member is None:
            raise Missing(ErrorCode.MEMBER_MISSING, f"no such member group={name!r} member={beat.member_id!r}")
        if beat.epoch not in (LEAVING, member.epoch, member.previous_epoch):
            raise Conflict(
                ErrorCode.GENERATION_STALE,
                f"member epoch is stale group={name!r} member={member.id!r} current={member.epoch} got={beat.epoch}",
            )
        return member

    def _join(self, name: str, beat: ShareBeat, by: Caller) -> ShareMember:
        if beat.topics is None:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"topics are required to join group={name!r}")
        self._check_topics(name, beat)
        self._check_kind(name)
        self._create(name, by, has_members=True)
        group = self._groups.get(name) or _Group(name)
        member = group.members.get(beat.member_id)
        if member is None:
            if len(group.members) >= self._settings.members_max:
                raise Busy(ErrorCode.BUSY, f"too many members group={name!r} limit={self._settings.members_max}")
            owner = self._table.owner(name)
            self._state.quotas.admit(Kind.MEMBERS, by, MEMBER_BYTES + beat.size, owner=owner)
            member = ShareMember(beat.member_id, frozenset(), 0.0, beat.rack_id, beat.client_id, beat.client_host, 0)
            group.members[member.id] = member
            self._charge(group, member, 1)
        member.epoch = JOINING
        self._groups[name] = group
        self._subscribe(group, member, beat)
        if group.timer is None:
            self._watch(group)
        return member

    def _check_topics(self, name: str, beat: ShareBeat) -> None:
        if len(beat.topics or ()) > TOPICS_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"too many topics group={name!r} limit={TOPICS_MAX}")

    def _check_kind(self, name: str) -> None:
        """Raise Conflict(GROUP_PROTOCOL_MISMATCH) if a group of another kind has this name."""
        if name in self._state.group_topics or name in self._state.classic_groups:
            raise Conflict(
                ErrorCode.GROUP_PROTOCOL_MISMATCH, f"a consumer group has this name (use another one) group={name!r}"
            )

    def _create(self, name: str, by: Caller, *, has_members: bool) -> None:
        stored = self._table.groups.get(name)
        if stored is not None and (stored.has_members or not has_members) and stored.owner > UNOWNED:
            return
        made = changes.ShareGroupStored(
            name,
            {} if stored is None else stored.settings,
            next_owner(self._table.owner(name), by),
            has_members or (stored is not None and stored.has_members),
        )
        if made == stored:
            return
        if stored is None:
            self._state.quotas.admit(Kind.GROUPS, by, share_group_size(made))
        self._broker.change_all([made], level=Level.WRITTEN, done=None)

    def _subscribe(self, group: _Group, member: ShareMember, beat: ShareBeat) -> None:
        self._check_topics(group.name, beat)
        self._charge(group, member, -1)
        member.topics = beat.topics or frozenset()
        member.size = beat.size
        self._charge(group, member, 1)
        group.epoch += 1

    def _charge(self, group: _Group, member: ShareMember, sign: int) -> None:
        size = sign * (MEMBER_BYTES + member.size)
        group.bytes += size
        self._state.usage.charge(Kind.MEMBERS, self._table.owner(group.name), sign, size)

    def _assigned(self, group: _Group, member: ShareMember) -> dict[bytes, Sequence[int]]:
        found: dict[bytes, Sequence[int]] = {}
        for name in sorted(member.topics):
            topic = self._broker.group_topic(name)
            count = 0 if topic is None else self._broker.group_partition_count(name)
            if topic is not None and count:
                numbers = group.numbers(name)
                found[topic.id] = assigned(numbers[member.id], len(numbers), count)
        return found

    def _remove(self, group: _Group, member: ShareMember) -> None:
        del group.members[member.id]
        self._charge(group, member, -1)
        group.epoch += 1
        self.release_member(group.name, member.id)
        if not group.members:
            del self._groups[group.name]
            if group.timer is not None:
                group.timer.cancel()

    def _watch(self, group: _Group) -> None:
        delay = min(self.settings(group.name).session_timeout_s / 4, SWEEP_S)
        group.timer = self._loop.call_later(delay, self._sweep, group)

    def _sweep(self, group: _Group) -> None:
        """Remove members whose session timeout has passed."""
        if self._groups.get(group.name) is not group:
            return
        latest = self._clock.monotonic() - self.settings(group.name).session_timeout_s
        for member in [member for member in group.members.values() if member.heard_at < latest]:
            self._remove(group, member)
        if group.members:
            self._watch(group)

    # Records

    def settings(self, name: str) -> ShareSettings:
        stored = self._table.groups.get(name)
        return decoded({} if stored is None else stored.settings)

    def _reading(self, name: str, partition: Partition) -> _Reading | None:
        """Return the group's state in a partition, or None if it has no progress there yet."""
        key = name, partition.incarnation
        progress = self._table.find(*key)
        reading = self._readings.get(key)
        if reading is not None and reading.share.progress is progress:
            return reading
        if reading is not None:  # deleted, or set to other offsets
            self._forget(key)
        if progress is None:
            return None
        self._prune()
        reading = self._readings[key] = _Reading(
            name, partition, SharePartition(progress, now=self._clock.monotonic(), now_ms=self._clock.now_us() // 1000)
        )
        self._watch_locks(reading)
        if exhausted := reading.share.exhausted(self.settings(name).deliveries_max):
            self._settle(reading, exhausted, None)
        return reading

    def _prune(self) -> None:
        """Forget the state of deleted groups and partitions, now and then."""
        if len(self._readings) >= self._prune_above:
            for key in [
                key for key, reading in self._readings.items() if self._table.find(*key) is not reading.share.progress
            ]:
                self._forget(key)
            self._prune_above = 2 * len(self._readings) + PRUNE_MIN

    def _forget(self, key: tuple[str, int]) -> None:
        reading = self._readings.pop(key)
        for handle in (reading.timer, reading.log_wait):
            if handle is not None:
                handle.cancel()
        waiting, reading.waiting = reading.waiting, {}
        for waiter in waiting:
            self._loop.call_soon(waiter.wake)

    def begin(self, name: str, partition: Partition, then: Completion[int], *, by: Caller) -> Handle | None:
        """Begin to read a partition, where the group's settings say, unless it already does.

        Return None if the partition can be read now. Otherwise ``then`` is called when it can, unless the returned
        handle is cancelled. Raises Missing(PARTITION_MISSING), Denied(DENIED), Busy(BUSY, DISK_FULL).
        """
        self._broker.check_owner(by, self._table.owner(name), "group", name)
        if self._reading(name, partition) is not None:
            return None
        age_us = self.settings(name).start_age_us
        log = partition.log
        if age_us == 0 or age_us is None:
            self._begin_at(name, partition, log.first_offset if age_us is None else log.next_offset, by)
            return None

        def found(offset: int | BrokerError) -> None:
            if not isinstance(offset, BrokerError) and self._reading(name, partition) is None and not partition.ended:
                try:
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
        check_name(name, self._settings.name_bytes_max)
        if partition.ended:
            raise Missing(ErrorCode.PARTITION_MISSING, f"partition was deleted partition={partition.number}")
        self._create(name, by, has_members=True)
        self._state.quotas.admit(Kind.READERS, by, READER_BYTES + len(name), owner=self._table.owner(name))
        made = changes.ShareStored(name, partition.incarnation, offset, offset)
        self._broker.change_all([made], level=Level.WRITTEN, done=None)

    def next_offset(self, name: str, partition: Partition) -> int | None:
        """Return the offset from which to read available records, or None if there are none.

        Call ``begin`` first. Raises Busy(DISK_FULL).
        """
        reading = self._reading(name, partition)
        return None if reading is None else self._next_offset(reading)

    def _next_offset(self, reading: _Reading) -> int | None:
        log, share = reading.partition.log, reading.share
        if share.progress.start < log.first_offset and (gone := share.trimmed(log.first_offset)):
            made = progressed(reading.group, reading.partition.incarnation, gone)
            self._broker.change_all([made], level=Level.WRITTEN, done=None)
            share.drop_below(log.first_offset)
        offset = share.next_offset(self.settings(reading.group).unfinished_max)
        return offset if offset is not None and offset < log.readable_offset else None

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
    ) -> Sequence[tuple[int, int, int]]:
        """Acquire available records of [first, end), at most ``count_max``, for a member.

        Return (first offset, last offset, delivery count) of each run. If there is any, ``done`` is called once it is
        stored: a member may receive its records only then. Raises Busy(DISK_FULL).
        """
        reading = self._reading(name, partition)
        if reading is None:
            return ()
        share, settings = reading.share, self.settings(name)
        deadline = self._clock.monotonic() + settings.lock_s
        runs = share.acquire(
            member, first, end, count_max=count_max, unfinished_max=settings.unfinished_max, deadline=deadline
        )
        if not runs:
            return ()
        try:
            made = progressed(name, partition.incarnation, runs)
            self._broker.change_all([made], level=Level.WRITTEN, done=done)
        except BrokerError:
            share.undo(runs)
            raise
        self._watch_locks(reading)
        return runs

    def acknowledge(
        self,
        name: str,
        partition: Partition,
        member: str,
        batches: Sequence[Batch],
        *,
        by: Caller = NO_CALLER,
        done: Completion[int],
    ) -> None:
        """Process a member's acknowledgements of records, all or none. ``done`` is called once they are stored.

        Raises Conflict(RECORD_NOT_ACQUIRED), Denied(DENIED), Busy(DISK_FULL).

        Args:
            batches: the acknowledgements, without overlap.
        """
        self._broker.check_owner(by, self._table.owner(name), "group", name)
        reading = self._reading(name, partition)
        if reading is None:
            raise Conflict(ErrorCode.RECORD_NOT_ACQUIRED, f"the group does not read this partition group={name!r}")
        settings = self.settings(name)
        effect = reading.share.acknowledge(
            member,
            batches,
            deliveries_max=settings.deliveries_max,
            now=self._clock.monotonic(),
            lock_s=settings.lock_s,
        )
        self._settle(reading, effect, done)

    def _settle(self, reading: _Reading, effect: Settled, done: Completion[int] | None) -> None:
        """Store and apply an effect, and notify members that wait for records. Raises Busy(DISK_FULL).

        Rejected records are first copied to the group's dead-letter topic, if it has one.
        """
        topic = self.settings(reading.group).dead_letters if effect.rejected else ""
        rejected = effect.rejected if topic else ()
        if rejected:
            effect = reading.share.hold(effect)
            done = _Countdown(len(rejected) + 1, done) if done is not None else None
        made = []
        if (delays := self._delays(effect)) or effect.finished:
            made.append(progressed(reading.group, reading.partition.incarnation, effect.finished, delays))
        self._broker.change_all(made, level=Level.WRITTEN, done=done)
        reading.share.settle(effect)
        self._watch_locks(reading)
        self._wake_soon(reading)
        deliveries_max = self.settings(reading.group).deliveries_max
        for offset, deliveries in rejected:
            reason = REJECTED if deliveries < deliveries_max else EXHAUSTED
            end = partial(self._end_letter, reading, offset, done)
            letter = Letter(reading.partition, offset, deliveries, reason, reading.group, topic, end)
            self._dead_letters.put(letter)

    def _delays(self, effect: Settled) -> Mapping[int, int]:
        """Return when records that are released with a delay are due, by offset, as system times in milliseconds."""
        delayed = [(offset, lock) for offset, lock in effect.renewed if lock.member == NOBODY]
        if not delayed:
            return NO_DELAYS
        now, now_ms = self._clock.monotonic(), self._clock.now_us() // 1000
        return {offset: now_ms + int((lock.deadline - now) * 1000) for offset, lock in delayed}

    def _end_letter(self, reading: _Reading, offset: int, done: Completion[int] | None) -> None:
        """End a record that was copied to a dead-letter topic. Raises Busy(DISK_FULL)."""
        if self._readings.get((reading.group, reading.partition.incarnation)) is reading:
            self._settle(reading, reading.share.finish(offset), done)
        elif done is not None:  # the group was deleted meanwhile
            self._broker.change_all([], level=Level.WRITTEN, done=done)

    def release_member(self, name: str, member: str) -> None:
        """Release all records of this broker that a member has acquired, because it is gone."""
        deliveries_max = self.settings(name).deliveries_max
        for incarnation in list(self._table.incarnations(name)):
            reading = self._readings.get((name, incarnation))
            if reading is not None:
                effect = reading.share.release_member(member, deliveries_max=deliveries_max)
                try:
                    self._settle(reading, effect, None)
                except BrokerError:  # the disk is full: the locks expire
                    continue

    def _watch_locks(self, reading: _Reading) -> None:
        """Set the timer for the lock that expires first. It may fire too early, after a lock has ended."""
        deadline = reading.share.deadline
        if deadline is not None and deadline < reading.timer_at:
            if reading.timer is not None:
                reading.timer.cancel()
            reading.timer_at = deadline
            delay = max(deadline - self._clock.monotonic(), 0.0)
            reading.timer = self._loop.call_later(delay, self._on_deadline, reading)

    def _on_deadline(self, reading: _Reading) -> None:
        reading.timer, reading.timer_at = None, math.inf
        if self._readings.get((reading.group, reading.partition.incarnation)) is not reading or reading.partition.ended:
            return
        effect, locks = reading.share.expired(
            self._clock.monotonic(), deliveries_max=self.settings(reading.group).deliveries_max
        )
        try:
            self._settle(reading, effect, None)
        except Busy:  # the disk is full
            reading.share.retry(locks)
            reading.timer = self._loop.call_later(RETRY_S, self._on_deadline, reading)
            reading.timer_at = self._clock.monotonic() + RETRY_S
            return
        except BrokerError:  # storage has failed, and the broker is about to stop
            return

    # Waiting

    def wait(self, name: str, partition: Partition, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once, when the group may have an available record in the partition, or no longer reads it.

        Call ``begin`` first. The returned handle cancels this. Raises Missing(PARTITION_MISSING).
        """
        reading = self._reading(name, partition)
        if reading is None or partition.ended:
            raise Missing(ErrorCode.PARTITION_MISSING, f"the group does not read this partition group={name!r}")
        waiting = _Waiting(reading, wake)
        reading.waiting[waiting] = None
        self._wake_soon(reading)
        return waiting

    def _wake_soon(self, reading: _Reading) -> None:
        if reading.waiting and not reading.is_waking:
            reading.is_waking = True
            self._loop.call_soon(self._wake_next, reading)

    def _wake_next(self, reading: _Reading) -> None:
        """Notify the member that has waited longest, if there is an available record."""
        reading.is_waking = False
        if not reading.waiting:
            return
        if self._readings.get((reading.group, reading.partition.incarnation)) is not reading or reading.partition.ended:
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

    def _on_record(self, reading: _Reading) -> None:
        reading.log_wait = None
        self._wake_soon(reading)

    # Administration

    def names(self, *, by: Caller = NO_CALLER) -> list[str]:
        """Return the names of all share groups that the caller may use and that have or had members."""
        return sorted(name for name, group in self._table.groups.items() if group.has_members and self._may(by, name))

    def _may(self, by: Caller, name: str) -> bool:
        try:
            self._broker.check_owner(by, self._table.owner(name), "group", name)
        except Denied:
            return False
        return True

    def exists(self, name: str, *, by: Caller = NO_CALLER) -> bool:
        """Return whether a share group exists that the caller may use."""
        stored = self._table.groups.get(name)
        return stored is not None and stored.has_members and self._may(by, name)

    def view(self, name: str) -> ShareGroupView | None:
        """Return a share group with its members, or None."""
        if not self.exists(name):
            return None
        group = self._groups.get(name)
        return (
            ShareGroupView(name, 0, ())
            if group is None
            else ShareGroupView(name, group.epoch, list(group.members.values()))
        )

    def topics(self, name: str) -> list[str]:
        """Return the full names of the topics that a group's members subscribe to, or that it has progress in."""
        group = self._groups.get(name)
        found = set() if group is None else {topic for member in group.members.values() for topic in member.topics}
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
        holders = {} if reading is None else reading.share.holders()
        delayed = holders.pop(NOBODY, 0)
        return ShareOffsets(progress.start, progress.end, len(progress.counts), holders, delayed)

    def partitions(self, name: str) -> list[Partition]:
        """Return the partitions in which a group has progress."""
        return [partition for partition, _ in self._partitions(name)]

    def _check_empty(self, name: str, by: Caller) -> None:
        self._broker.check_owner(by, self._table.owner(name), "group", name)
        if not self.exists(name):
            raise Missing(ErrorCode.GROUP_MISSING, f"no such share group group={name!r}")
        if name in self._groups or self._is_in_use(name):
            raise Conflict(ErrorCode.GROUP_NOT_EMPTY, f"the group has members (stop them first) group={name!r}")

    def _is_in_use(self, name: str) -> bool:
        """Return whether a member without heartbeats waits for records or holds some."""
        found = [self._readings.get((name, incarnation)) for incarnation in self._table.incarnations(name)]
        return any(
            reading is not None and (reading.waiting or reading.share.holders().keys() - {NOBODY}) for reading in found
        )

    def delete(self, name: str, *, by: Caller = NO_CALLER) -> None:
        """Delete a group without members, its settings and its progress.

        Raises Missing(GROUP_MISSING), Conflict(GROUP_NOT_EMPTY), Denied(DENIED), Busy(DISK_FULL).
        """
        self._check_empty(name, by)
        self._broker.change_all([changes.ShareGroupDeleted(name)], level=Level.WRITTEN, done=None)
        self._forget_all(name)

    def _forget_all(self, name: str) -> None:
        for key in [key for key in self._readings if key[0] == name and self._table.find(*key) is None]:
            self._forget(key)

    def alter_offsets(
        self, name: str, offsets: Mapping[Partition, int], *, by: Caller = NO_CALLER, done: Completion[int]
    ) -> None:
        """Set where a group without members continues to read. Creates the group.

        Raises Conflict(GROUP_NOT_EMPTY, GROUP_PROTOCOL_MISMATCH), Denied(DENIED), Busy(BUSY, DISK_FULL).
        """
        self._check_kind(name)
        self._create(name, by, has_members=True)
        self._check_empty(name, by)
        made = [
            changes.ShareStored(name, partition.incarnation, at, at)
            for partition, offset in offsets.items()
            for at in [min(max(offset, partition.log.first_offset), partition.log.next_offset)]
        ]
        self._state.quotas.admit(
            Kind.READERS, by, (READER_BYTES + len(name)) * len(made), count=len(made), owner=self._table.owner(name)
        )
        self._broker.change_all(made, level=Level.WRITTEN, done=done)

    def delete_offsets(
        self, name: str, partitions: Iterable[Partition], *, by: Caller = NO_CALLER, done: Completion[int]
    ) -> None:
        """Delete a group's progress in some partitions.

        Raises Missing(GROUP_MISSING), Conflict(GROUP_NOT_EMPTY), Denied(DENIED), Busy(DISK_FULL).
        """
        self._check_empty(name, by)
        incarnations = tuple(partition.incarnation for partition in partitions)
        self._broker.change_all([changes.ShareDeleted(name, incarnations)], level=Level.WRITTEN, done=done)

    def delete_topic(self, name: str, topic: Topic, *, by: Caller = NO_CALLER, done: Completion[int]) -> None:
        """Delete a group's progress in a topic, and the group if it has none in another topic.

        Raises Missing(GROUP_MISSING), Conflict(GROUP_NOT_EMPTY), Denied(DENIED), Busy(DISK_FULL).
        """
        self._check_empty(name, by)
        made: changes.ShareGroupDeleted | changes.ShareDeleted = changes.ShareGroupDeleted(name)
        if any(partition.topic is not topic for partition in self.partitions(name)):
            made = changes.ShareDeleted(name, tuple(partition.incarnation for partition in topic.partitions))
        self._broker.change_all([made], level=Level.WRITTEN, done=done)
        self._forget_all(name)

    def owner(self, name: str) -> int:
        return self._table.owner(name)

    def stored_settings(self, name: str) -> Mapping[str, str]:
        """Return the settings of a group that differ from the defaults."""
        stored = self._table.groups.get(name)
        return {} if stored is None else stored.settings

    def configured(self, *, by: Caller = NO_CALLER) -> list[str]:
        """Return the names of all groups with settings of their own that the caller may use."""
        return sorted(name for name, group in self._table.groups.items() if group.settings and self._may(by, name))

    def check_configuration(self, name: str, settings: Mapping[str, str], *, by: Caller = NO_CALLER) -> None:
        """Check all settings of a group. Raises as ``configure``."""
        check_name(name, self._settings.name_bytes_max)
        self._broker.check_owner(by, self._table.owner(name), "group", name)
        for key, value in settings.items():
            check(key, value)

    def configure(
        self, name: str, settings: Mapping[str, str], *, by: Caller = NO_CALLER, done: Completion[int] | None = None
    ) -> None:
        """Replace the settings of a group, which need not exist yet.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Denied(DENIED), Busy(BUSY, DISK_FULL).
        """
        self.check_configuration(name, settings, by=by)
        stored = self._table.groups.get(name)
        owner, has_members = (UNOWNED, False) if stored is None else (stored.owner, stored.has_members)
        made = changes.ShareGroupStored(name, dict(settings), next_owner(owner, by), has_members)
        if not settings and not has_members:
            if stored is not None:
                self._broker.change_all([changes.ShareGroupDeleted(name)], level=Level.WRITTEN, done=done)
            elif done is not None:
                self._broker.change_all([], level=Level.WRITTEN, done=done)
            return
        grown = share_group_size(made) - (0 if stored is None else share_group_size(stored))
        self._state.quotas.admit(Kind.GROUPS, by, grown, count=int(stored is None), owner=owner)
        self._broker.change_all([made], level=Level.WRITTEN, done=done)
