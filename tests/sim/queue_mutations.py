"""The mechanisms behind each promise of share groups, with a switch that disables one in the simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pytest
from msgspec.structs import replace

from polywire.broker.broker import Broker
from polywire.broker.groups import delay_index, share, share_groups, share_members
from polywire.broker.groups.dead_letters import DeadLetters, _Copier
from polywire.broker.groups.delay_index import DelayIndex, Due
from polywire.broker.groups.delivery_marks import read_marks
from polywire.broker.groups.key_order import KeyOrder
from polywire.broker.groups.share import NO_DELAYS, Acquired, SharePartition
from polywire.broker.groups.share_delays import Delayed, DueWatch
from polywire.broker.groups.share_groups import ShareGroups
from polywire.broker.groups.share_members import ShareBeat, ShareMembers
from polywire.broker.groups.share_table import ShareTable
from polywire.errors import ErrorCode
from polywire.protocols.runtime.acquiring import Acquiring
from tests.sim.broker.world import WITH_QUEUES
from tests.sim.mutation import Mutation, nothing, prepared, put, replaced, wrapped
from tests.sim.wires.world import SHARING, SHARING_SINCE
from tests.unit.broker import test_delay_index, test_share_delays, test_share_groups, test_share_order
from tests.unit.protocols.polywire import test_queues

QueueMutation: Final = partial(Mutation, world="broker", rests=WITH_QUEUES)


def delivered_at_once(old: Callable[..., Any], self: ShareGroups, *args: Any, done: Any, **named: Any) -> Any:
    """Send records to a worker before their delivery is stored."""
    runs = old(self, *args, done=None, **named)
    if runs and done is not None:
        done(0)
    return runs


def _counts_forgotten(old: Callable[..., Any], self: ShareTable, key: Any) -> Any:
    """Store delivery counts of zero in snapshots."""
    return tuple(
        replace(stored, runs=tuple(0 if at % 3 == 2 else number for at, number in enumerate(stored.runs)))
        for stored in old(self, key)
    )


def _without_field(name: str, value: object) -> Callable[..., Any]:
    """Store the progress of a group in snapshots without a field."""

    def around(old: Callable[..., Any], *args: Any) -> Any:
        return tuple(replace(stored, **{name: value}) for stored in old(*args))

    return around


def _retried_at_once(old: Callable[..., Any], self: SharePartition, member: str, batches: Any, **named: Any) -> Any:
    return old(self, member, [batch._replace(delay_s=0.0) for batch in batches], **named)


def _any_member(old: Callable[..., Any], self: SharePartition, member: str, batches: Any, **named: Any) -> Any:
    """Accept acknowledgements of another worker's records."""
    lock = self._locks.get(batches[0].first) if batches else None
    return old(self, member if lock is None or not lock.member else lock.member, batches, **named)


def _closed(self: ShareGroups, name: str, member: str) -> None:
    """Release the records of a worker when any of its connections closes."""
    self._connections[name, member] -= 1
    self.release_member(name, member)


def _kept_open(self: ShareGroups, name: str, member: str) -> None:
    """Release nothing when the last connection of a worker closes."""
    self._connections[name, member] -= 1


def _passed_unstored(old: Callable[..., Any], *args: Any, **named: Any) -> Any:
    found: Acquired = old(*args, **named)
    return replace(found, passed=())


def _past_unaccepted(old: Callable[..., Any], self: SharePartition, *args: Any, **named: Any) -> Any:
    """Finish the first of the acknowledged records with those before it."""
    effect = old(self, *args, **named)
    start = self.progress.start
    finished = [share.Run(min(start, run.first), run.last, run.deliveries) for run in effect.finished[:1]]
    return replace(effect, finished=[*finished, *effect.finished[1:]])


def _no_times(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def take_out(patch: pytest.MonkeyPatch) -> None:
        def read(*args: Any, **named: Any) -> Any:
            found = read_marks(*args, **named)
            return replace(found, **{name: {}})

        patch.setattr(share_groups, "read_marks", read)

    return take_out


def gaps_known(old: Callable[..., Due], incarnation: int, span: Any, *rest: Any) -> Due:
    """Answer a query although the index lacks some offsets."""
    return old(incarnation, (span[1], span[1]), *rest)


def _unsynced(old: Callable[..., None], self: DelayIndex, *args: Any) -> None:
    """Write to the index before the log is synced."""
    self._sync = lambda done: done(0)  # type: ignore[misc]
    old(self, *args)


def _cursor_follows(self: DueWatch) -> Any:
    """Move the cursor to the clock although records wait before it."""
    return self._share.progress.cursor._replace(due_ms=self._now_ms(), offset=2**63 - 1)


def _cursor_at(old: Callable[..., Any], self: Delayed, end: int) -> Any:
    return old(self, end)._replace(waiting=0)


def _first_forgotten(old: Callable[..., Any], self: Delayed, end: int) -> Any:
    """Note the last of the waiting records as the first."""
    waiting = [offset for offset in self.waiting if offset < end]
    return old(self, end)._replace(first=max(waiting, default=self.cursor.first))


def never_copied(self: DeadLetters, letter: Any) -> None:
    letter.stored()


def _in_two_writes(old: Callable[..., None], self: _Copier, letter: Any, read: Any) -> None:
    """Write a copy before the end of its record."""
    stored = letter.stored

    def apart() -> None:
        self._broker.commit()  # type: ignore[attr-defined]
        stored()

    old(self, letter._replace(stored=apart), read)


def _read_from(old: Callable[..., None], self: Any, ticket: int, place: Any, partition: Any, _: int, read: Any) -> None:
    old(self, ticket, place, partition, 0, read)


def answered_early(
    old: Callable[..., bool], self: ShareGroups, reading: Any, effect: Any, settings: Any, done: Any
) -> bool:
    """Answer an acknowledgement before it is stored."""
    has_letters = old(self, reading, effect, settings, None)
    if done is not None:
        self._loop.call_soon(done, 0)
    return has_letters


def _never_checked_again(patch: pytest.MonkeyPatch) -> None:
    begin = SharePartition.__init__

    def begun(self: SharePartition, *args: Any, **named: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(share, "STORED_DELAY_S_MAX", math.inf)
            begin(self, *args, **named)

    put(patch, SharePartition, "__init__", begun)


def _no_floors(patch: pytest.MonkeyPatch) -> None:
    """Delete entries of the index without noting it."""
    patch.setattr(
        delay_index,
        "_forget",
        lambda at, due_ms, database: database.execute(
            "DELETE FROM delayed WHERE incarnation = ? AND due_ms < ?", (at, due_ms)
        ),
    )


def _only_by_timer(patch: pytest.MonkeyPatch) -> None:
    find = ShareGroups._next_offset

    def found(self: ShareGroups, reading: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(DueWatch, "check", nothing)
            return find(self, reading)

    put(patch, ShareGroups, "_next_offset", found)


def _unanswered_letters(patch: pytest.MonkeyPatch) -> None:
    def is_gone(self: _Copier, letter: Any, error: Any) -> bool:
        if letter.partition.ended or error.code is ErrorCode.OFFSET_OUT_OF_RANGE:
            self._waiting.popleft()
            return True
        self._loop.call_later(1.0, self._copy_next)
        return False

    patch.setattr(_Copier, "_is_gone", is_gone)


def _never_forgotten(patch: pytest.MonkeyPatch) -> None:
    def is_current(self: ShareGroups, reading: Any) -> bool:
        return self._readings.get((reading.group, reading.partition.incarnation)) is reading

    put(patch, ShareGroups, "_is_current", is_current)


QUEUE_MUTATIONS: Final[Sequence[Mutation]] = (
    # Locks and deliveries
    QueueMutation(
        "delivery-stored", "a delivery is stored before it is sent", wrapped(ShareGroups, "acquire", delivered_at_once)
    ),
    QueueMutation(
        "delivery-snapshot", "delivery counts are in snapshots", wrapped(ShareTable, "_stored", _counts_forgotten)
    ),
    QueueMutation(
        "lock-expiry",
        "a lock ends at its deadline",
        replaced(SharePartition, "expired", lambda *_, **__: (share.Settled(), [])),
    ),
    QueueMutation(
        "lock-owner", "only the worker of a record ends it", wrapped(SharePartition, "acknowledge", _any_member)
    ),
    QueueMutation(
        "old-connection",
        "only the last connection of a worker releases",
        replaced(ShareGroups, "member_disconnected", _closed),
    ),
    QueueMutation(
        "gone-worker",
        "the last connection of a worker releases",
        replaced(ShareGroups, "member_disconnected", _kept_open),
    ),
    QueueMutation(
        "exhausted",
        "a start finishes what was delivered too often",
        replaced(SharePartition, "exhausted", lambda *_: None),
    ),
    QueueMutation(
        "unread-records",
        "a late read acquires only what it has read",
        wrapped(Acquiring, "_arrived", _read_from),
        test=prepared(
            test_queues.test_a_record_that_is_released_during_a_read_is_not_acquired_unread, peer=test_queues.make_peer
        ),
    ),
    QueueMutation(
        "passed-records", "records that are passed are stored", wrapped(SharePartition, "acquire", _passed_unstored)
    ),
    QueueMutation(
        "start-offset",
        "a record ends by its own acknowledgement",
        wrapped(SharePartition, "acknowledge", _past_unaccepted),
    ),
    QueueMutation(
        "acknowledged",
        "an acknowledgement is answered when it is stored",
        wrapped(ShareGroups, "_settle", answered_early),
    ),
    # Delays
    QueueMutation(
        "retry-delay", "a retry waits for its delay", wrapped(SharePartition, "acknowledge", _retried_at_once)
    ),
    QueueMutation("retry-stored", "retry delays are stored", replaced(ShareGroups, "_delays", lambda *_: NO_DELAYS)),
    QueueMutation(
        "retry-snapshot", "retry delays are in snapshots", wrapped(ShareTable, "_stored", _without_field("due_ms", {}))
    ),
    QueueMutation("retry-clock", "stored delays end when the clock is corrected", _never_checked_again),
    QueueMutation("deliver-at", "delayed records wait", _no_times("due_ms")),
    QueueMutation(
        "cursor-snapshot",
        "cursors are in snapshots",
        wrapped(ShareTable, "_stored", _without_field("cursor", ())),
    ),
    QueueMutation(
        "cursor-clock",
        "the cursor passes no waiting record",
        replaced(DueWatch, "cursor", property(_cursor_follows)),
        test=test_share_delays.test_the_cursor_does_not_pass_records_that_are_due_and_have_no_space,
    ),
    QueueMutation("cursor-waiting", "waiting records are counted", wrapped(Delayed, "cursor_at", _cursor_at)),
    QueueMutation("cursor-first", "the first waiting record is noted", wrapped(Delayed, "cursor_at", _first_forgotten)),
    QueueMutation(
        "index-gaps", "what the index lacks is read from the log", wrapped(delay_index, "_query", gaps_known)
    ),
    QueueMutation(
        "index-synced",
        "the index has only synced records",
        wrapped(DelayIndex, "_flush", _unsynced),
        reason="takes waiting records on both sides of the end that a power loss leaves",
    ),
    QueueMutation(
        "index-floor",
        "a clock that is set back finds deleted entries again",
        _no_floors,
        test=test_delay_index.test_what_was_forgotten_is_read_again_only_if_the_clock_was_set_back,
    ),
    QueueMutation(
        "due-space",
        "delayed records that are due are looked for while they hold up others",
        _only_by_timer,
    ),
    QueueMutation("expires-at", "expired records are not delivered", _no_times("expires_ms")),
    # Order per key
    QueueMutation(
        "key-lock",
        "a key has one worker",
        replaced(KeyOrder, "_is_locked", lambda *_: False),
        test=test_share_order.test_a_delayed_record_takes_its_place_when_it_is_due,
    ),
    QueueMutation(
        "key-order",
        "a key is delivered in order",
        replaced(KeyOrder, "is_free", lambda self, offset: offset not in self.unknown),
    ),
    QueueMutation("key-freed", "the next record of a key is available", replaced(KeyOrder, "freed", lambda *_: ())),
    QueueMutation(
        "keys-read", "keys are read again after a start", replaced(SharePartition, "unknown", property(lambda _: ()))
    ),
    # Dead letters
    QueueMutation("letter-first", "a record is copied before it ends", replaced(DeadLetters, "put", never_copied)),
    QueueMutation(
        "letter-write", "a copy and the end of its record are one write", wrapped(_Copier, "_copy", _in_two_writes)
    ),
    QueueMutation(
        "letter-reserve",
        "the write has space for both",
        replaced(Broker, "reserve", nothing),
        test=test_share_groups.test_a_copy_and_the_end_of_its_record_are_one_write,
    ),
    QueueMutation(
        "letter-held", "a rejected record is held until it is copied", replaced(SharePartition, "hold", nothing)
    ),
    QueueMutation(
        "letter-answer",
        "a rejection of a removed record is answered",
        _unanswered_letters,
        test=prepared(test_share_groups.test_a_rejection_of_a_record_that_is_deleted_is_answered, is_deleted=bool),
    ),
    # Administration
    QueueMutation("reset-readings", "a reset forgets earlier locks and copies", _never_forgotten),
    QueueMutation("trimmed-locks", "locks of removed records end", replaced(SharePartition, "drop_below", nothing)),
)


def _any_epoch(old: Callable[..., Any], members: ShareMembers, name: str, beat: ShareBeat) -> Any:
    """Accept any epoch of a member."""
    group = members._groups.get(name)
    member = None if group is None else group.members.get(beat.member_id)
    return old(members, name, beat if member is None else beat._replace(epoch=member.epoch))


def _heard_never(old: Callable[..., Any], members: ShareMembers, name: str, beat: ShareBeat, **named: Any) -> Any:
    """Note only the first heartbeat of a member."""
    group = members._groups.get(name)
    member = None if group is None else group.members.get(beat.member_id)
    heard_at = None if member is None else member.heard_at
    found = old(members, name, beat, **named)
    if member is not None and heard_at is not None:
        member.heard_at = heard_at
    return found


def _locked_briefly(old: Callable[..., Acquired], *args: Any, **named: Any) -> Acquired:
    return old(*args, **{**named, "deadline": 0.0})


ShareMemberMutation: Final = partial(Mutation, world="wires", rests=(SHARING,), first=SHARING_SINCE)
SHARE_MEMBER_MUTATIONS: Final[Sequence[Mutation]] = (
    ShareMemberMutation(
        "share-epochs", "an old epoch of a member is refused", wrapped(ShareMembers, "_member", _any_epoch)
    ),
    ShareMemberMutation("share-silent", "silent members are removed", replaced(ShareMembers, "_sweep", nothing)),
    ShareMemberMutation(
        "share-heard", "a heartbeat prolongs a membership", wrapped(ShareMembers, "beat", _heard_never)
    ),
    ShareMemberMutation(
        "share-all", "every partition has a member", replaced(share_members, "assigned", lambda *_: [0])
    ),
    ShareMemberMutation(
        "share-lock", "a lock lasts for its duration", wrapped(SharePartition, "acquire", _locked_briefly)
    ),
)
