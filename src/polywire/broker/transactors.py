"""Transactors: who may hold transactions, each with an epoch that fences its predecessors, and what its latest transaction holds.

Promises: follows from the changes alone, also what is forgotten when. Must not know: the log, staged bytes, wires.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polywire.broker import changes
from polywire.broker.changes import TransactionState
from polywire.broker.settings import BrokerSettings
from polywire.errors import Busy, ErrorCode


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose positions a transaction moves: the member that owns the partitions it has read."""

    topic: str = ""
    group: str = ""
    member: str = ""
    generation: int = -1


@dataclass(slots=True)
class Transactor:
    """One holder and its latest transaction.

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
    offsets: Mapping[int, int] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether its transaction is under way."""
        return self.state is TransactionState.OPEN


class Transactors:
    """All transactors, longest idle first.

    Invariant: one is forgotten only when it has been idle for ``transactor_expiry_us``: its epoch keeps older ones out.
    """

    __slots__ = ("_by_id", "_settings")

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._by_id: dict[str, Transactor] = {}

    def find(self, id_: str) -> Transactor | None:
        """One transactor."""
        return self._by_id.get(id_)

    def check_room(self, id_: str, now_us: int) -> None:
        """Refuse a new one while all are too young to forget. Raises Busy(BUSY)."""
        if id_ in self._by_id or len(self._by_id) < self._settings.transactors_max:
            return
        oldest = next(iter(self._by_id.values()))
        if now_us - oldest.at_us <= self._settings.transactor_expiry_us:
            raise Busy(ErrorCode.BUSY, f"too many transactional ids limit={self._settings.transactors_max}")

    def apply_stored(self, change: changes.TransactorStored) -> None:
        """A transactor is as the change says; those idle for too long are forgotten."""
        self._by_id.pop(change.id, None)
        self._by_id[change.id] = Transactor(change.id, change.epoch, change.state, change.token, change.at_us)
        while len(self._by_id) > self._settings.transactors_max:
            oldest = next(iter(self._by_id.values()))
            if change.at_us - oldest.at_us <= self._settings.transactor_expiry_us:
                return
            del self._by_id[oldest.id]

    def apply_staged(self, change: changes.TransactionStaged) -> None:
        """One more record is staged."""
        found = self._touch(change.id, change.at_us)
        found.messages = change.messages
        found.sequences[change.incarnation] = change.sequence

    def apply_offsets(self, change: changes.TransactionOffsets) -> None:
        """Positions are to be moved with it."""
        found = self._by_id[change.id]
        found.scope = Scope(change.topic, change.group, change.member, change.generation)
        found.offsets = dict(change.offsets)

    def apply_committed(self, change: changes.TransactionCommitted) -> None:
        """Its transaction was published."""
        found = self._touch(change.id, change.at_us)
        found.state = TransactionState.COMMITTED
        found.sequences = {}

    def _touch(self, id_: str, at_us: int) -> Transactor:
        found = self._by_id.pop(id_)
        self._by_id[id_] = found
        found.at_us = at_us
        return found

    def snapshot(self) -> tuple[changes.TransactorState, ...]:
        """All transactors as they are, longest idle first."""
        return tuple(
            changes.TransactorState(
                id=known.id,
                epoch=known.epoch,
                state=known.state,
                token=known.token,
                at_us=known.at_us,
                messages=known.messages,
                sequences=dict(known.sequences),
                scope=(known.scope.topic, known.scope.group, known.scope.member, known.scope.generation),
                offsets=dict(known.offsets),
            )
            for known in self._by_id.values()
        )

    def restore(self, states: tuple[changes.TransactorState, ...]) -> None:
        """Take over transactors as they were."""
        for state in states:
            self._by_id[state.id] = Transactor(
                id=state.id,
                epoch=state.epoch,
                state=state.state,
                token=state.token,
                at_us=state.at_us,
                messages=state.messages,
                sequences=dict(state.sequences),
                scope=Scope(*state.scope),
                offsets=dict(state.offsets),
            )
