"""Transactional ids: epoch, latest transaction, and the outcome that other shards still have to apply (decision 0129).

Recovery computes this state from the changes in the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

import msgspec

from polywire.broker import changes
from polywire.broker.changes import NO_SHARD, TransactionalProducer, TransactionDecided, TransactionState
from polywire.broker.owners import UNOWNED
from polywire.broker.producers import WRAP
from polywire.broker.quotas import NUMBER_BYTES, TRANSACTIONAL_ID_BYTES, Kind, Usage
from polywire.broker.settings import BrokerSettings
from polywire.broker.view import Views, encoded, one_by_one
from polywire.errors import ErrorCode, Invalid
from polywire.types import Level

# Epochs of one producer id: the Kafka protocol has 15 bits for the epoch, and its last value is not used.
PRODUCER_EPOCHS: Final = 32_767


TransactionChange = (
    changes.TransactionalIdStored
    | changes.TransactionalIdDeleted
    | changes.TransactionPartitions
    | changes.TransactionStaged
    | changes.TransactionOffsets
    | changes.TransactionCommitted
    | changes.TransactionJoined
    | changes.TransactionSettled
)

PARTICIPANT: Final = "\0"
"""Prefix of the names of participants. Clients cannot use transactional ids with this prefix."""
INTERNAL: Final = "__polywire-"
"""Prefix of the broker's own transactional ids, which clients cannot use."""
OPEN: Final = frozenset({TransactionState.OPEN, TransactionState.SHARED})
"""States of an open transaction."""


class Scope(msgspec.Struct, frozen=True):
    """The group and member for which a transaction commits offsets."""

    topic: str = ""
    group: str = ""
    member: str = ""
    generation: int = -1


class HeldOffsets(msgspec.Struct, frozen=True):
    """Next offsets, by partition number, that a transaction will commit.

    Attributes:
        notes: leader epoch and metadata of some of these offsets, by partition number.
    """

    offsets: dict[int, int] = msgspec.field(default_factory=dict)
    notes: dict[int, tuple[int, str]] = msgspec.field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes that these offsets count against their owner's quota."""
        return NUMBER_BYTES * len(self.offsets) + sum([len(metadata) for _, metadata in self.notes.values()])


@dataclass(slots=True)
class Transaction:
    """A transactional id and its latest transaction.

    Attributes:
        at_us: when the transaction last began, stored records or ended.
        token: identifies its uncommitted records.
        messages: number of its uncommitted records.
        batches: number of its uncommitted batches.
        sequences: last sequence number by incarnation of the partition. With a producer id, the numbers continue from
            one transaction of an epoch to the next.
        firsts: with a producer id, the first sequence number in this transaction by incarnation of the partition.
        positions: offsets that it commits.
        producer: the Kafka producer that uses the id, None for other protocols.
        partitions: with a producer id, the partitions that were added to the transaction.
        shards: other shards that may participate in it.
        coordinator: shard of the coordinator if this shard only participates, otherwise NO_SHARD.
    """

    id: str
    epoch: int
    state: TransactionState
    token: bytes
    at_us: int
    messages: int = 0
    sequences: dict[int, int] = field(default_factory=dict)
    firsts: dict[int, int] = field(default_factory=dict)
    positions: dict[Scope, HeldOffsets] = field(default_factory=dict)
    owner: int = UNOWNED
    producer: TransactionalProducer | None = None
    batches: int = 0
    began_at_us: int = 0
    partitions: dict[int, None] = field(default_factory=dict)
    shards: dict[int, None] = field(default_factory=dict)
    coordinator: int = NO_SHARD

    @property
    def size(self) -> int:
        """The bytes that the transactional id and its latest transaction count against their owner's quota."""
        size = TRANSACTIONAL_ID_BYTES + len(self.id) + NUMBER_BYTES * (len(self.sequences) + len(self.partitions))
        for scope, held in self.positions.items():
            size += sum(map(len, (scope.topic, scope.group, scope.member))) + held.size
        return size

    @property
    def is_open(self) -> bool:
        """Whether the transaction is in progress."""
        return self.state in OPEN

    @property
    def phase(self) -> TransactionState:
        """State of the transaction, where OPEN stands for both OPEN and SHARED (with participants in other shards)."""
        return TransactionState.OPEN if self.is_open else self.state

    @property
    def has_producer(self) -> bool:
        """Whether the transactional id belongs to a producer with a producer id."""
        return self.producer is not None

    @property
    def is_participant(self) -> bool:
        """Whether another shard coordinates the transaction, and this shard only participates."""
        return self.coordinator != NO_SHARD

    @property
    def position_count(self) -> int:
        return sum([len(held.offsets) for held in self.positions.values()])

    @property
    def producer_epoch(self) -> int:
        """The epoch of the producer id, as sent to the client."""
        return self.epoch - (0 if self.producer is None else self.producer.first_epoch)

    def repeats(self, incarnation: int, *, first: int, last: int) -> bool:
        """Return whether a batch with these sequence numbers was stored before.

        Without a producer id, sequence numbers only increase. With one, they are consecutive from 0 in each epoch and
        wrap at ``WRAP``; only a batch of this transaction can be repeated. After an abort, librdkafka gives the numbers
        of batches that it did not know to be stored to new records, which must not be taken for a repetition.

        Raises Invalid(SEQUENCE_GAP).
        """
        if self.producer is None:
            return first <= self.sequences.get(incarnation, 0)
        expected = self.expected(incarnation)
        if first == expected:
            return False
        begun = self.firsts.get(incarnation, expected)
        if (first - begun) % WRAP <= (last - begun) % WRAP < (expected - begun) % WRAP:
            return True
        raise Invalid(
            ErrorCode.SEQUENCE_GAP, f"sequence is out of order id={self.id!r} expected={expected} got={first}"
        )

    def expected(self, incarnation: int) -> int:
        """Return the sequence number of the next record in a partition, for an id with a producer id."""
        known = self.sequences.get(incarnation)
        return 0 if known is None else (known + 1) % WRAP


def is_participant(name: str) -> bool:
    """Return whether a name stands for this shard's part of a transaction that another shard coordinates."""
    return name.startswith(PARTICIPANT)


def level_of(transaction: Transaction, level: Level) -> Level:
    """Return the durability level for changes of a transaction: ``level``, or synced if other shards participate."""
    return Level.SYNCED if transaction.state is TransactionState.SHARED else level


class TransactionTable:
    """All transactional ids, least recently used first.

    An id is dropped only after it was unused for ``transactional_id_expiry_us``, because its epoch fences earlier
    producers.

    Attributes:
        decisions: by token, the decisions that some shards have not applied yet, even if the id was deleted.
        open: ids whose transaction is open, oldest first.
    """

    __slots__ = ("_by_id", "_deciding", "_moving", "_settings", "_usage", "_views", "decisions", "open")

    def __init__(self, settings: BrokerSettings, usage: Usage) -> None:
        self._settings = settings
        self._usage = usage
        self._by_id: dict[str, Transaction] = {}
        # by group, the ids of open transactions that commit its offsets
        self._moving: dict[str, dict[str, None]] = {}
        self.decisions: Final[dict[bytes, TransactionDecided]] = {}
        self._deciding: dict[str, int] = {}  # number of unsettled decisions by id
        self.open: Final[dict[str, None]] = {}  # ids whose transaction is open, oldest first
        self._views: Final = Views(self._stored)

    def check_reserved(self, id_: str, *, is_internal: bool) -> None:
        """Raise Invalid(INVALID_NAME) if clients must not use this id.

        Reserved are the names of other shards' transactions and, unless ``is_internal``, the broker's own ids.
        """
        if is_participant(id_) or id_.startswith(INTERNAL) is not is_internal:
            raise Invalid(ErrorCode.INVALID_NAME, f"transactional id is reserved: {id_!r} (use another prefix)")

    def find(self, id_: str) -> Transaction | None:
        return self._by_id.get(id_)

    def __iter__(self) -> Iterator[Transaction]:
        return iter(self._by_id.values())

    def moving(self, group: str) -> list[Transaction]:
        return [self._by_id[id_] for id_ in self._moving.get(group, ())]

    def apply(self, change: TransactionChange) -> None:
        match change:
            case changes.TransactionalIdStored():
                self.apply_stored(change)
            case changes.TransactionStaged():
                self.apply_staged(change)
            case changes.TransactionOffsets():
                self.apply_offsets(change)
            case changes.TransactionPartitions():
                self.apply_partitions(change)
            case changes.TransactionCommitted():
                self.apply_committed(change)
            case changes.TransactionalIdDeleted():
                self.forget(change.id)
            case changes.TransactionJoined():
                self.apply_joined(change)
            case changes.TransactionSettled():
                self._remove_decision(change.token)
            case _:
                assert_never(change)

    def apply_stored(self, change: changes.TransactionalIdStored) -> None:
        """Apply a change of a transactional id, and drop ids that were unused for too long."""
        was = self._by_id.get(change.id)
        if was is not None:
            self._views.changing(change.id)
            self._decide(was, commits=False)
        made = Transaction(
            change.id,
            change.epoch,
            change.state,
            change.token,
            change.at_us,
            owner=change.owner,
            producer=change.producer,
            began_at_us=change.at_us,
            coordinator=change.home,
        )
        if was is not None and change.producer is not None and was.epoch == change.epoch and _keeps_holder(was, change):
            made.sequences = was.sequences
        self.forget(change.id)
        self._put(made)
        self.forget_idle(change.at_us)

    def forget_idle(self, now_us: int) -> None:
        """Drop ids that were unused for too long. Uncommitted records expire long before."""
        while self._by_id:
            oldest = next(iter(self._by_id.values()))
            if oldest.state is TransactionState.SHARED:  # its coordinator must end it first
                return
            if now_us - oldest.at_us <= self._settings.transactional_id_expiry_us:
                return
            self.forget(oldest.id)

    def forget(self, id_: str) -> None:
        self._views.changing(id_)
        known = self._by_id.pop(id_, None)
        if known is not None:
            self._ended(known)
            self._usage.charge(Kind.TRANSACTIONAL_IDS, known.owner, -1, -known.size)

    def _put(self, transaction: Transaction) -> None:
        self._by_id[transaction.id] = transaction
        self._usage.charge(Kind.TRANSACTIONAL_IDS, transaction.owner, 1, transaction.size)
        if transaction.is_open:
            self.open[transaction.id] = None
            for scope in transaction.positions:
                self._moving.setdefault(scope.group, {})[transaction.id] = None

    def _ended(self, transaction: Transaction) -> None:
        self.open.pop(transaction.id, None)
        for scope in transaction.positions:
            moving = self._moving.get(scope.group, {})
            moving.pop(transaction.id, None)
            if not moving:
                self._moving.pop(scope.group, None)

    def apply_joined(self, change: changes.TransactionJoined) -> None:
        self._views.changing(change.id)
        found = self._by_id[change.id]
        found.state = TransactionState.SHARED
        found.shards.update(dict.fromkeys(change.shards))

    def _decide(self, transaction: Transaction, *, commits: bool) -> None:
        if transaction.shards:
            shards, transaction.shards = tuple(transaction.shards), {}
            self._put_decision(TransactionDecided(transaction.token, transaction.id, commits, shards))

    def _put_decision(self, decided: TransactionDecided) -> None:
        self.decisions[decided.token] = decided
        self._deciding[decided.id] = self._deciding.get(decided.id, 0) + 1

    def _remove_decision(self, token: bytes) -> None:
        """Remove a decision that all shards have applied."""
        decided = self.decisions.pop(token, None)
        if decided is not None:
            self._deciding[decided.id] -= 1
            if not self._deciding[decided.id]:
                del self._deciding[decided.id]

    def is_deciding(self, id_: str) -> bool:
        """Return whether some shards have not applied the last decision on this id's transaction."""
        return id_ in self._deciding

    def apply_partitions(self, change: changes.TransactionPartitions) -> None:
        self._views.changing(change.id)
        found = self._by_id[change.id]
        was = found.size
        found.partitions.update(dict.fromkeys(change.incarnations))
        self._resized(found, was)

    def apply_staged(self, change: changes.TransactionStaged) -> None:
        found = self._touch(change.id, change.at_us)
        had = len(found.sequences) + len(found.partitions)
        found.messages = change.messages
        found.batches += 1
        if found.producer is not None:
            found.firsts.setdefault(change.incarnation, found.expected(change.incarnation))
            found.partitions[change.incarnation] = None
        found.sequences[change.incarnation] = change.sequence
        added = len(found.sequences) + len(found.partitions) - had
        self._usage.charge(Kind.TRANSACTIONAL_IDS, found.owner, 0, NUMBER_BYTES * added)

    def apply_offsets(self, change: changes.TransactionOffsets) -> None:
        self._views.changing(change.id)
        found = self._by_id[change.id]
        was = found.size
        _hold(found, change)
        self._moving.setdefault(change.group, {})[change.id] = None
        self._resized(found, was)

    def apply_committed(self, change: changes.TransactionCommitted) -> None:
        self._views.changing(change.id)
        self._decide(self._by_id[change.id], commits=True)
        if change.raised is not None:
            self.apply_stored(change.raised)
            return
        found = self._touch(change.id, change.at_us)
        was = found.size
        self._ended(found)
        found.state = TransactionState.COMMITTED
        if found.producer is None:
            found.sequences = {}
        else:
            found.positions, found.partitions, found.firsts = {}, {}, {}
        self._resized(found, was)

    def _resized(self, transaction: Transaction, was: int) -> None:
        self._usage.charge(Kind.TRANSACTIONAL_IDS, transaction.owner, 0, transaction.size - was)

    def _touch(self, id_: str, at_us: int) -> Transaction:
        self._views.changing(id_)
        found = self._by_id.pop(id_)
        self._by_id[id_] = found
        found.at_us = at_us
        return found

    @property
    def latest_us(self) -> int:
        """Time of the last use of any id, 0 if there is none."""
        return max((known.at_us for known in self._by_id.values()), default=0)

    def encoded(self) -> Iterator[bytes]:
        """Yield all transactional ids as they are at the time of the call, least recently used first, encoded in
        pieces.
        """
        found = self._views.open(list(self._by_id))
        return encoded(len(self._by_id), found, _weight)

    def encoded_decisions(self) -> Iterator[bytes]:
        """Yield the remaining decisions as they are at the time of the call."""
        return one_by_one(list(self.decisions.values()))

    def _stored(self, id_: str) -> Sequence[changes.TransactionalIdState]:
        known = self._by_id.get(id_)
        if known is None:
            return ()
        others = list(known.positions.items())
        first = others.pop(0) if others and known.producer is None else (Scope(), HeldOffsets())
        return (
            changes.TransactionalIdState(
                id=known.id,
                epoch=known.epoch,
                state=known.state,
                token=known.token,
                at_us=known.at_us,
                messages=known.messages,
                sequences=dict(known.sequences),
                scope=(first[0].topic, first[0].group, first[0].member, first[0].generation),
                offsets=dict(first[1].offsets),
                owner=known.owner,
                producer=known.producer,
                batches=known.batches,
                began_at_us=known.began_at_us,
                partitions=tuple(known.partitions),
                held=tuple(
                    [
                        changes.TransactionOffsets(
                            known.id,
                            scope.topic,
                            scope.group,
                            scope.member,
                            scope.generation,
                            dict(held.offsets),
                            dict(held.notes),
                        )
                        for scope, held in others
                    ]
                ),
                home=known.coordinator,
                shards=tuple(known.shards),
                firsts=dict(known.firsts),
            ),
        )

    def restore(
        self, states: Iterable[changes.TransactionalIdState], decisions: Iterable[TransactionDecided] = ()
    ) -> None:
        for decided in decisions:
            self._put_decision(decided)
        for state in states:
            transaction = Transaction(
                id=state.id,
                epoch=state.epoch,
                state=state.state,
                token=state.token,
                at_us=state.at_us,
                messages=state.messages,
                sequences=dict(state.sequences),
                owner=state.owner,
                producer=state.producer,
                batches=state.batches or state.messages,
                began_at_us=state.at_us if state.began_at_us < 0 else state.began_at_us,
                partitions=dict.fromkeys(state.partitions),
                shards=dict.fromkeys(state.shards),
                coordinator=state.home,
                firsts=dict.fromkeys(state.sequences, 0) if state.firsts is None else dict(state.firsts),
            )
            for held in state.held:
                _hold(transaction, held)
            if state.offsets:
                transaction.positions[Scope(*state.scope)] = HeldOffsets(dict(state.offsets))
            self._put(transaction)


def _hold(transaction: Transaction, change: changes.TransactionOffsets) -> None:
    """Add offsets to a transaction, replacing earlier ones of the same partitions."""
    own = Scope(change.topic, change.group, change.member, change.generation)
    for scope, held in transaction.positions.items():
        if (scope.topic, scope.group) == (own.topic, own.group):
            for number in change.offsets.keys() & held.offsets.keys():
                del held.offsets[number]
                held.notes.pop(number, None)
    held = transaction.positions.setdefault(own, HeldOffsets())
    held.offsets.update(change.offsets)
    held.notes.update(change.notes)


def _keeps_holder(was: Transaction, change: changes.TransactionalIdStored) -> bool:
    """Return whether the id keeps its producer id and coordinator. Only then can its epochs be compared."""
    return not was.is_participant or (was.producer, change.home) == (change.producer, was.coordinator)


def _weight(known: changes.TransactionalIdState) -> int:
    """Return the cost of encoding an id, which grows with its partitions and offsets."""
    held = sum([len(offsets.offsets) for offsets in known.held])
    return (len(known.sequences) + len(known.firsts or ()) + len(known.partitions) + held) // 8
