"""The clients' view of partitions and positions: sent values, answers and reads.

Every answer and every start is checked. Anything that requests, answers and permitted losses do not explain is a
``Violation``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from polywire.types import Level, PositionKind
from tests.sim.promises import require

TOPICS: Final = {"a": 2, "b": 1}
"""Partitions of each topic."""

Place = tuple[str, int]
"""A topic's name and a partition's number."""

PLACES: Final[Sequence[Place]] = tuple((name, number) for name, count in TOPICS.items() for number in range(count))

NOWHERE: Final[Place] = ("", 0)

Owner = tuple[PositionKind, str]
"""The owner of a position."""


COPIERS: Final[Owner] = PositionKind.GROUP, "copiers"
"""Owners of positions that transactions commit."""


@dataclass(slots=True, eq=False)
class Transaction:
    """Values that are visible together or not at all. staged: those certainly staged. is_asked: whether the commit was
    requested. moved: the position that it commits, if any; owner: its owner.
    """

    staged: list[Sending] = field(default_factory=list)
    is_asked: bool = False
    moved: int | None = None
    owner: Owner = COPIERS


@dataclass(slots=True, eq=False)
class Sending:
    """Values sent together: the client, and their number in its sequence. offset: by the answer. sequence: of a
    producer that repeats them until they are answered. tries: how often they were sent. is_stored: whether they were
    acknowledged without an offset.
    """

    place: Place
    values: Sequence[bytes]
    line: str
    number: int
    level: Level
    sequence: tuple[int, int] | None = None
    tries: int = 1
    offset: int | None = None
    is_stored: bool = False
    is_refused: bool = False
    transaction: Transaction | None = None


@dataclass(slots=True)
class Shelf:
    """The view of one partition. known: values by offset; ``base``: everything below is stored. shown: readers have
    seen only offsets below. readable: readers may see offsets below. starts: how often a start has recovered it.
    """

    known: dict[int, bytes] = field(default_factory=dict)
    base: int = 0
    shown: int = 0
    readable: int = 0
    starts: int = 0


@dataclass(slots=True)
class Spot:
    """One position: its possible values, the latest last; the answers and their levels. first: the number of the first
    value.
    """

    asked: list[tuple[int, Level | None]] = field(default_factory=list)
    first: int = 0


class Ledger:
    """Guards: no value is sent by two clients, or twice."""

    def __init__(self, durability: Level) -> None:
        self._durability = durability
        self._sendings: Final[dict[bytes, tuple[Sending, int]]] = {}
        self._tagged: Final[dict[bytes, tuple[Sending, int]]] = {}
        """By the prefix of their values."""
        self._answered: list[Sending] = []
        self._transactions: list[Transaction] = []
        self.shelves: Final = {place: Shelf() for place in PLACES}
        self.spots: Final[dict[tuple[Owner, Place], Spot]] = {}

    def level(self, level: Level) -> Level:
        """Return the level that an answer at this level means here."""
        return level if level is Level.MEMORY else max(level, self._durability)

    # Records

    def sent(self, sending: Sending) -> None:
        """Note sent values."""
        if sending.transaction is not None and sending.transaction not in self._transactions:
            self._transactions.append(sending.transaction)
        for index, value in enumerate(sending.values):
            self._sendings[value] = self._tagged[value.partition(b":")[0]] = sending, index

    def stored(self, sending: Sending, offset: int | None) -> None:
        """Check an acknowledgement with an offset, or without one if the protocol has none."""
        require(not sending.is_refused, "what was refused is not stored", place=sending.place, offset=offset)
        if offset is None:
            sending.is_stored = True
            self._answered.append(sending)
            return
        sending.offset = offset
        self._answered.append(sending)
        for index, value in enumerate(sending.values):
            self._learn(sending.place, offset + index, value)
        if sending.level is not Level.MEMORY:
            self._is_readable(sending.place, offset + len(sending.values))

    @staticmethod
    def _judge_transaction(sending: Sending, offset: int) -> None:
        transaction = sending.transaction
        fine = transaction is None or (transaction.is_asked and sending in transaction.staged)
        require(fine, "no uncommitted record is visible", place=sending.place, offset=offset)

    def starts(self, place: Place) -> int:
        """Return how often a start has recovered a partition. An earlier request may be lost, and still be answered by
        another process.
        """
        return self.shelves[place].starts

    def _is_readable(self, place: Place, end: int) -> None:
        shelf = self.shelves[place]
        shelf.readable = max(shelf.readable, end)

    def readable(self, place: Place) -> int:
        """Return the end of what readers may see."""
        return self.shelves[place].readable

    def _learn(self, place: Place, offset: int, value: bytes) -> None:
        known = self.shelves[place].known.setdefault(offset, value)
        require(
            known == value, "an offset has one record", place=place, offset=offset, known=known[:20], now=value[:20]
        )
        sending, index = self._sendings[value]
        self._judge_transaction(sending, offset)
        if sending.offset is not None:
            right = sending.offset + index == offset and sending.place == place
            require(right, "a record is where its answer said", place=place, offset=offset, answered=sending.offset)

    def shown(
        self,
        place: Place,
        first: int,
        records: Sequence[tuple[int, bytes | None]],
        next_offset: int,
        spelled: Callable[[bytes], bytes],
    ) -> None:
        """Check the records [first, next_offset) of a read, with values as the protocol writes them."""
        offset = first
        for at, value in records:
            require(at == offset, "records come in order, once", place=place, expected=offset, found=at)
            self._learn(place, at, self._original(place, at, value or b"", spelled))
            offset += 1
        require(offset == next_offset, "every offset has its record", place=place, end=offset, next_offset=next_offset)
        shelf = self.shelves[place]
        shelf.shown = max(shelf.shown, offset if records else 0)
        self._is_readable(place, shelf.shown)

    def _original(self, place: Place, offset: int, seen: bytes, spelled: Callable[[bytes], bytes]) -> bytes:
        """Return the sent value of a read value."""
        if seen in self._sendings:
            return seen
        sending, index = self._tagged.get(seen.partition(b":")[0], (None, 0))
        sent = b"" if sending is None else sending.values[index]
        fine = sent and spelled(sent) == seen
        require(fine, "a record is one that was sent", place=place, offset=offset, seen=seen[:40], sent=sent[:40])
        return sent

    def settle(self, place: Place, content: Sequence[bytes], *, powerless: bool) -> None:
        """Check the records of a partition after a start."""
        shelf, end = self.shelves[place], len(content)
        require(end >= shelf.base, "what was stored at a start stays", place=place, end=end, base=shelf.base)
        stays = not powerless or self._durability is Level.SYNCED
        shelf.starts += 1
        require(
            end >= shelf.shown or not stays, "what a reader was shown stays", place=place, end=end, shown=shelf.shown
        )
        present = set(content)
        for sending in self._answered:
            if sending.place == place:
                floor = Level.SYNCED if powerless else Level.WRITTEN
                kept = sending.offset is not None and sending.offset + len(sending.values) <= end
                kept = kept or (sending.is_stored and set(sending.values) <= present)
                lost = self.level(sending.level) < floor
                require(kept or lost, "an acknowledged record is there", place=place, offset=sending.offset, end=end)
        self._answered = [sending for sending in self._answered if sending.place != place]
        self._judge(place, content)
        shelf.known = dict(enumerate(content))
        shelf.base = shelf.shown = shelf.readable = end

    def _judge(self, place: Place, content: Sequence[bytes]) -> None:
        latest: dict[str, tuple[int, int]] = {}
        seen: set[bytes] = set()
        known = self.shelves[place].known
        for offset, value in enumerate(content):
            require(value in self._sendings, "a record is one that was sent", place=place, offset=offset)
            require(value not in seen, "a record is there once", place=place, offset=offset, value=value[:20])
            seen.add(value)
            sending, index = self._sendings[value]
            require(sending.place == place, "a record is where it was sent to", place=place, sent_to=sending.place)
            require(not sending.is_refused, "what was refused is not stored", place=place, offset=offset)
            self._judge_transaction(sending, offset)
            require(known.get(offset, value) == value, "a record stays what it was", place=place, offset=offset)
            at, before = (sending.number, index), latest.get(sending.line, (-1, -1))
            require(at > before, "records of a connection stay in order", place=place, offset=offset, line=sending.line)
            latest[sending.line] = at

    # Transactions

    def committed(self, transaction: Transaction) -> None:
        """Note an acknowledged commit."""
        for sending in transaction.staged:
            sending.is_stored = True
            self._answered.append(sending)

    def goes_on(self, transaction: Transaction) -> None:
        """Note that a transaction may end in another process."""
        if transaction.staged:
            self._transactions.append(transaction)

    def settle_transactions(self, moved: Mapping[Owner, int | None]) -> None:
        """Check transactions after ``settle`` of every partition, with the positions that transactions commit."""
        present = {value for shelf in self.shelves.values() for value in shelf.known.values()}
        last: dict[Owner, int] = {}
        for transaction in self._transactions:
            values = [value for sending in transaction.staged for value in sending.values]
            there = [value for value in values if value in present]
            require(
                len(there) in (0, len(values)), "a transaction is there as a whole", there=len(there), of=len(values)
            )
            if there and transaction.moved is not None:
                last[transaction.owner] = transaction.moved
        for owner, offset in last.items():
            found = moved[owner]
            require(found == offset, "a position moves with its transaction", owner=owner, found=found, last=offset)
        self._transactions = []

    # Positions

    def asks(self, owner: Owner, place: Place, offset: int) -> int:
        """Note a request to store a position; return its number for ``was_stored``."""
        spot = self.spots.setdefault((owner, place), Spot())
        spot.asked.append((offset, None))
        return spot.first + len(spot.asked) - 1

    def was_stored(self, owner: Owner, place: Place, number: int, level: Level) -> None:
        """Note an acknowledged position; a request through another process may be answered after a restart."""
        spot = self.spots[owner, place]
        at = number - spot.first
        if at >= 0:
            spot.asked[at] = (spot.asked[at][0], self.level(level))

    def finds(self, owner: Owner, place: Place, found: int | None, since: int) -> None:
        """Check a fetched position. since: the first possible one: the last acknowledged when it was requested."""
        spot = self.spots.get((owner, place))
        allowed: list[int | None] = [None] if spot is None or since < 0 else []
        allowed += self._late(owner, place)
        allowed += [offset for offset, _ in spot.asked[max(since - spot.first, 0) :]] if spot is not None else []
        require(found in allowed, "a position is the one that was stored", owner=owner, place=place, found=found)

    def furthest(self, owner: Owner, place: Place) -> int:
        """Return the highest position that may be stored, 0 if there is none."""
        spot = self.spots.get((owner, place))
        return 0 if spot is None else max((offset for offset, _ in spot.asked), default=0)

    def last_answered(self, owner: Owner, place: Place) -> int:
        """Return the last acknowledged position, -1 if there is none."""
        spot = self.spots.get((owner, place))
        if spot is None:
            return -1
        answered = [at for at, (_, level) in enumerate(spot.asked, spot.first) if level is not None]
        return answered[-1] if answered else -1

    def _late(self, owner: Owner, place: Place) -> Sequence[int]:
        """Return positions that may be stored at any time: the requests of lost connections."""
        return ()

    def stopped(self, places: Collection[Place] = PLACES) -> None:
        """Note a clean stop of the process of these partitions: everything acknowledged is synced."""
        for sending in self._answered:
            if sending.place in places:
                sending.level = Level.SYNCED
        for (_, place), spot in self.spots.items():
            if place in places:
                spot.asked = [(offset, None if level is None else Level.SYNCED) for offset, level in spot.asked]

    def settle_position(self, owner: Owner, place: Place, found: int | None, *, powerless: bool) -> None:
        """Check a position after a start: it is not older than the last one acknowledged at its level."""
        spot = self.spots[owner, place]
        floor = Level.SYNCED if powerless else Level.WRITTEN
        kept = [at for at, (_, level) in enumerate(spot.asked) if level is not None and level >= floor]
        late = self._late(owner, place)
        allowed = [*late, *(offset for offset, _ in spot.asked[kept[-1] if kept else 0 :])]
        require(
            found in allowed or (found is None and not kept),
            "an acknowledged position is there",
            owner=owner,
            place=place,
            found=found,
        )
        spot.first += len(spot.asked)
        spot.asked = [] if found is None else [(found, Level.SYNCED)]
        spot.asked += [(offset, None) for offset in late if offset != found]
