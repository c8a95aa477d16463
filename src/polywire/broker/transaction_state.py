"""Transactional ids, each with the epoch that fences whoever held it before, and what its latest transaction holds.

Promises: follows from the changes alone, also what is forgotten when. Must not know: the log, staged bytes, wires.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from polywire.broker import changes
from polywire.broker.changes import TransactionState
from polywire.broker.owners import UNOWNED
from polywire.broker.quotas import NUMBER_BYTES, TRANSACTIONAL_ID_BYTES, Kind, Usage
from polywire.broker.settings import BrokerSettings
from polywire.broker.view import Views, encoded


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose positions a transaction moves: the member that owns the partitions it has read."""

    topic: str = ""
    group: str = ""
    member: str = ""
    generation: int = -1


@dataclass(slots=True)
class Transaction:
    """A transactional id and its latest transaction.

    at_us: when it last began, staged a record or ended. token: what its records are staged under. messages: how many.
    sequences: the last one by partition incarnation. offsets: next offsets that are committed with it, by partition number of the
    scope's topic.
    """

    id: str
    epoch: int
    state: TransactionState
    token: bytes
    at_us: int
    messages: int = 0
    sequences: dict[int, int] = field(default_factory=dict)
    scope: Scope = Scope()
    offsets: dict[int, int] = field(default_factory=dict)
    owner: int = UNOWNED

    @property
    def size(self) -> int:
        """Bytes that it counts for."""
        names = len(self.id) + sum(map(len, (self.scope.topic, self.scope.group, self.scope.member)))
        return TRANSACTIONAL_ID_BYTES + names + NUMBER_BYTES * (len(self.sequences) + len(self.offsets))

    @property
    def is_open(self) -> bool:
        """Whether its transaction is under way."""
        return self.state is TransactionState.OPEN


class TransactionTable:
    """All transactional ids, longest idle first.

    Invariant: one is forgotten only when it has been idle for ``transactional_id_expiry_us``: its epoch keeps older ones out.
    """

    __slots__ = ("_by_id", "_settings", "_usage", "_views")

    def __init__(self, settings: BrokerSettings, usage: Usage) -> None:
        self._settings = settings
        self._usage = usage
        self._by_id: dict[str, Transaction] = {}
        self._views: Final = Views(self._stored)

    def find(self, id_: str) -> Transaction | None:
        """The latest transaction of a transactional id."""
        return self._by_id.get(id_)

    def __iter__(self) -> Iterator[Transaction]:
        return iter(self._by_id.values())

    def apply_stored(self, change: changes.TransactionalIdStored) -> None:
        """A transactional id is as the change says; those idle for too long are forgotten."""
        self.forget(change.id)
        self._put(Transaction(change.id, change.epoch, change.state, change.token, change.at_us, owner=change.owner))
        self.forget_idle(change.at_us)

    def forget_idle(self, now_us: int) -> None:
        """Forget those that have been idle for too long: what they staged has expired long ago."""
        while self._by_id:
            oldest = next(iter(self._by_id.values()))
            if now_us - oldest.at_us <= self._settings.transactional_id_expiry_us:
                return
            self.forget(oldest.id)

    def forget(self, id_: str) -> None:
        """Forget one, and its epoch with it."""
        self._views.changing(id_)
        known = self._by_id.pop(id_, None)
        if known is not None:
            self._usage.charge(Kind.TRANSACTIONAL_IDS, known.owner, -1, -known.size)

    def _put(self, transaction: Transaction) -> None:
        self._by_id[transaction.id] = transaction
        self._usage.charge(Kind.TRANSACTIONAL_IDS, transaction.owner, 1, transaction.size)

    def apply_staged(self, change: changes.TransactionStaged) -> None:
        """One more record is staged."""
        found = self._touch(change.id, change.at_us)
        was = found.size
        found.messages = change.messages
        found.sequences[change.incarnation] = change.sequence
        self._resized(found, was)

    def apply_offsets(self, change: changes.TransactionOffsets) -> None:
        """Positions are to be moved with it."""
        self._views.changing(change.id)
        found = self._by_id[change.id]
        was = found.size
        found.scope = Scope(change.topic, change.group, change.member, change.generation)
        found.offsets.update(change.offsets)
        self._resized(found, was)

    def apply_committed(self, change: changes.TransactionCommitted) -> None:
        """Its transaction was published."""
        found = self._touch(change.id, change.at_us)
        was = found.size
        found.state = TransactionState.COMMITTED
        found.sequences = {}
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
        """When any of them was used last, 0 when none was."""
        return max((known.at_us for known in self._by_id.values()), default=0)

    def encoded(self) -> Iterator[bytes]:
        """All transactional ids as they are now, longest idle first, encoded in pieces."""
        found = self._views.open(list(self._by_id))
        return encoded(len(self._by_id), found, lambda known: (len(known.sequences) + len(known.offsets)) // 8)

    def _stored(self, id_: str) -> Sequence[changes.TransactionalIdState]:
        known = self._by_id.get(id_)
        if known is None:
            return ()
        return (
            changes.TransactionalIdState(
                id=known.id,
                epoch=known.epoch,
                state=known.state,
                token=known.token,
                at_us=known.at_us,
                messages=known.messages,
                sequences=dict(known.sequences),
                scope=(known.scope.topic, known.scope.group, known.scope.member, known.scope.generation),
                offsets=dict(known.offsets),
                owner=known.owner,
            ),
        )

    def restore(self, states: tuple[changes.TransactionalIdState, ...]) -> None:
        """Take over transactional ids as they were."""
        for state in states:
            transaction = Transaction(
                id=state.id,
                epoch=state.epoch,
                state=state.state,
                token=state.token,
                at_us=state.at_us,
                messages=state.messages,
                sequences=dict(state.sequences),
                scope=Scope(*state.scope),
                offsets=dict(state.offsets),
                owner=state.owner,
            )
            self._put(transaction)
