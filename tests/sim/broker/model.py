"""The model of a broker's clients: their requests, the responses, and the expected state.

The model outlives every process. After a stop it removes what the stop was allowed to lose.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from polywire.errors import ErrorCode
from tests.sim.broker.history import History
from tests.sim.broker.members import Members
from tests.sim.broker.queue_model import Queues
from tests.sim.log.model import Content, KeptPartition

OFFSET_FORGOTTEN: Final = -1
NO_EPOCH: Final = -1
OLD_MAX: Final = 6  # acknowledged batches that a producer may send again


@dataclass(slots=True)
class Sent:
    """One batch of a producer. ``taken``: a running process has it."""

    incarnation: int
    epoch: int
    base: int
    contents: list[Content]
    taken: bool = False

    @property
    def last(self) -> int:
        """The sequence of its last record."""
        return self.base + len(self.contents) - 1


@dataclass(slots=True)
class Producer:
    """An idempotent producer, which repeats unacknowledged batches. ``next``: sequences by partition."""

    id: bytes
    epoch: int = 0
    next: dict[int, int] = field(default_factory=dict)
    unanswered: dict[int, list[Sent]] = field(default_factory=dict)
    old: deque[Sent] = field(default_factory=lambda: deque(maxlen=OLD_MAX))

    def due(self, incarnation: int) -> Sent | None:
        """Return the batch to send before any new one."""
        return next((sent for sent in self.unanswered.get(incarnation, []) if not sent.taken), None)

    def answered(self, sent: Sent) -> None:
        """Note that a batch need not be repeated."""
        waiting = self.unanswered.get(sent.incarnation, [])
        if any(one is sent for one in waiting):
            waiting[:] = [one for one in waiting if one is not sent]
            self.old.append(sent)

    def begin_epoch(self, epoch: int) -> None:
        """Restart the sequences; unacknowledged batches are given up."""
        for waiting in self.unanswered.values():
            self.old.extend(waiting)
        self.epoch = epoch
        self.next.clear()
        self.unanswered.clear()


class Stored(NamedTuple):
    """One batch of a producer in a partition, since a moment."""

    moment: int
    epoch: int
    base: int
    last: int
    offset: int


@dataclass(slots=True)
class Known:
    """The state that a partition must have of a producer."""

    epoch: int
    first: int
    last: int
    window: deque[Stored]


class Repeat(NamedTuple):
    """A batch that is already stored: the moment of its request, and the offset to return."""

    moment: int
    offset: int


@dataclass(slots=True)
class HeldId:
    """A transactional id. unsynced: epochs whose holders have no synced data. begun: moments from which a transaction
    was open, with their times.
    """

    id: str
    unsynced: set[int] = field(default_factory=set)
    begun: list[tuple[int, float]] = field(default_factory=list)

    @property
    def began_at(self) -> float:
        """The time at which the last transaction began."""
        return self.begun[-1][1] if self.begun else -math.inf

    def settle(self, epoch: int, moment: int) -> None:
        """Account for a start with this epoch: later epochs were lost."""
        self.begun = [(0, began_at) for begun, began_at in self.begun if begun <= moment]
        if epoch in self.unsynced:
            self.begun.clear()  # unsynced data ends with the process


@dataclass(slots=True)
class Holder:
    """A current or former holder of a transactional id. numbered: its protocol numbers producers."""

    held: HeldId
    numbered: bool
    epoch: int = NO_EPOCH

    @property
    def id(self) -> str:
        return self.held.id

    @property
    def synced(self) -> bool:
        """Whether its staged data is synced."""
        return self.epoch not in self.held.unsynced

    def begin_epoch(self, epoch: int, *, synced: bool) -> None:
        """Begin an epoch; a start may recover the one before if this one was lost."""
        self.epoch = epoch
        self.held.unsynced.discard(epoch)
        if not synced:
            self.held.unsynced.add(epoch)


@dataclass(slots=True)
class StagedRecords:
    """Staged records of a transaction under a token, since a moment. is_answered: whether staging was acknowledged."""

    moment: int
    id: str
    epoch: int
    token: bytes
    incarnation: int
    first: int
    last: int
    contents: list[Content]
    is_answered: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """Positions that a transaction commits, since a moment."""

    moment: int
    token: bytes
    topic: str
    group: str
    offsets: dict[int, int]


@dataclass(slots=True)
class Token:
    """Staged batches of a writer for a number. is_gone: it was published or dropped, or its partition was deleted."""

    writer: str
    number: int
    incarnation: int
    contents: list[Content]
    is_gone: bool = False


class Model:
    """Guards: ``partitions`` have all requests up to the last recovered state and since."""

    def __init__(self, window: int) -> None:
        """window: batches per producer whose offsets are remembered."""
        self.history: Final = History()
        self.partitions: Final[dict[int, KeptPartition]] = {}
        self.producers: Final = [Producer(b"producer-%d" % number) for number in range(3)]
        self._stored: Final[dict[tuple[int, bytes], list[Stored]]] = {}
        self.members: Final = Members()
        self.queues: Final = Queues()
        self.ids: Final = {id_: HeldId(id_) for id_ in ("t0", "t1")}
        self.holders: Final = [Holder(self.ids[id_], id_ == "t1") for id_ in ("t0", "t0", "t1", "t1")]
        self.staged: list[StagedRecords] = []
        self.held: list[Held] = []
        self.torn: set[bytes] = set()
        """Tokens of transactions that lost acknowledged staged data."""
        self.tokens: Final[dict[bytes, Token]] = {}
        self._window = window
        self._count = 0

    def number(self) -> int:
        """Return a unique number."""
        self._count += 1
        return self._count

    # Producers

    def known(self, incarnation: int, producer: bytes) -> Known | None:
        """Return the state that a partition must have of a producer, from its batches."""
        known: Known | None = None
        for stored in self._stored.get((incarnation, producer), []):
            if known is None or (stored.epoch, stored.base) != (known.epoch, known.last + 1):
                known = Known(stored.epoch, stored.base, stored.last, deque(maxlen=self._window))
            known.last = stored.last
            known.window.append(stored)
        return known

    def outcome(self, producer: Producer, sent: Sent) -> Repeat | ErrorCode | None:
        """Return the expected result of a batch: a repeat, an error, or None if it will be stored."""
        known = self.known(sent.incarnation, producer.id)
        if known is None or (sent.epoch, sent.base) == (known.epoch, known.last + 1):
            return None
        if sent.epoch > known.epoch:
            return None if sent.base <= 1 else ErrorCode.SEQUENCE_GAP
        if sent.epoch < known.epoch:
            return ErrorCode.PRODUCER_FENCED
        if sent.base < known.first or sent.last > known.last:
            return ErrorCode.SEQUENCE_GAP
        for stored in known.window:
            if stored.base == sent.base:
                return Repeat(stored.moment, stored.offset)
        return Repeat(self.history.moment, OFFSET_FORGOTTEN)

    def store(self, producer: Producer, sent: Sent, offset: int) -> None:
        """Note that a partition has this batch from this offset."""
        stored = Stored(self.history.moment + 1, sent.epoch, sent.base, sent.last, offset)
        self._stored.setdefault((sent.incarnation, producer.id), []).append(stored)

    # Transactions

    def staged_by(self, holder: Holder, token: bytes, incarnation: int) -> list[StagedRecords]:
        """Return the batches that determine the next sequence in a partition: those of the transaction, or of the epoch
        if sequences continue.
        """
        own = [
            one for one in self.staged if (one.id, one.epoch, one.incarnation) == (holder.id, holder.epoch, incarnation)
        ]
        return own if holder.numbered else [one for one in own if one.token == token]

    # Starts

    def settle(self, moment: int, ends: dict[int, int], *, now: float) -> None:
        """Account for a start with the state of a moment: drop everything later. ends: next offsets of partitions."""
        self.members.settle(self.history.latest, moment, now)
        self.queues.settle(moment, ends)
        self.torn |= {one.token for one in self.staged if one.moment > moment and one.is_answered}
        self.staged = [replace(one, moment=0) for one in self.staged if one.moment <= moment]
        self.held = [replace(one, moment=0) for one in self.held if one.moment <= moment]
        for token, known in self.tokens.items():
            known.is_gone = ("staged", "", token.hex()) not in self.history.latest
        for holder in self.holders:
            state = self.history.latest.get(("transaction", "", holder.id))
            epoch = state[0] if isinstance(state, tuple) else NO_EPOCH
            holder.held.settle(epoch, moment)
            if epoch < holder.epoch:
                holder.epoch = NO_EPOCH  # its epoch was lost
        for incarnation in [number for number in self.partitions if number not in ends]:
            del self.partitions[incarnation]
        for incarnation, kept in self.partitions.items():
            end = ends[incarnation]
            del kept.records[end:]
            kept.gone = {offset for offset in kept.gone if offset < end}
            kept.shown = min(kept.shown, end)
        for (incarnation, producer), batches in list(self._stored.items()):
            kept_batches = [stored._replace(moment=0) for stored in batches if stored.moment <= moment]
            if incarnation in ends and kept_batches:
                self._stored[incarnation, producer] = kept_batches
            else:
                del self._stored[incarnation, producer]
        for one in self.producers:
            for waiting in one.unanswered.values():
                for sent in waiting:
                    sent.taken = False
