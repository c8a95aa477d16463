"""How a peer speaks a wire: requests into bytes, bytes into answers.

Promises: an answer is of one request, by its number. Must not know: what is right, when anything is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from polywire.testing.sim.wires.group_ledger import Membership
from polywire.testing.sim.wires.ledger import PLACES, Owner, Place
from polywire.types import Level, PositionKind

ACTS: Final = frozenset({"produce", "fetch", "commit", "position", "ping"})
GROUP_ACTS: Final = frozenset({"join", "stay", "leave", "move", "look"})
GAP: Final = "gap"  # what comes behind numbered records that were refused, or lost with the power, is refused with


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered. offset: of the first record, or the position. error: what it was refused with, and whether it may come
    again later. is_fenced: whether that is because a group has changed; is_denied: because this one may not. is_partial: whether
    some of it is stored all the same. is_last: whether nothing more is said. place: in a group."""

    number: int
    offset: int | None = None
    records: Sequence[tuple[int, bytes | None]] = ()
    error: str = ""
    later: bool = False
    is_fenced: bool = False
    is_denied: bool = False
    is_partial: bool = False
    is_last: bool = True
    place: Membership | None = None


@dataclass(frozen=True, slots=True)
class Words:
    """What a wire can say.

    acts: what may be asked for. places: where records may be sent to. is_ordered: whether answers come in the order of requests.
    records_max: of one request. is_text: whether values are words of text. tells_offsets, tells_repeats: whether an answer says where a
    record is, and one to what was sent before. reads_all: whether an answer has all records there
    are. hangs_up: whether that is how records are refused. positions: whose they are; whether they
    may go back, and must be of records that are there.
    """

    wire: str
    acts: Collection[str] = ACTS
    places: Sequence[Place] = PLACES
    is_ordered: bool = True
    records_max: int = 3
    is_text: bool = False
    tells_offsets: bool = True
    tells_repeats: bool = True
    reads_all: bool = False
    hangs_up: bool = False
    positions: PositionKind = PositionKind.GROUP
    goes_back: bool = True
    positions_within: bool = False


class Speech(ABC):
    """One connection's. Whatever a wire cannot say, by its ``Words``, is not asked for."""

    words: ClassVar[Words]

    def greeting(self) -> bytes:
        """What is sent first."""
        return b""

    def level(self, level: Level) -> Level:
        """The level that is asked for where this one cannot be."""
        return level

    def sequence(self, place: Place, count: int) -> tuple[int, int] | None:
        """Producer and sequence of the next records, where they are numbered: those can be sent again."""
        return None

    def give_up(self) -> None:
        """Nothing that was numbered is sent again; what comes next is another producer's."""
        return  # most number nothing

    def spelled(self, value: bytes) -> bytes:
        """A value as readers of this wire see it."""
        return value

    @abstractmethod
    def produce(
        self, number: int, place: Place, values: Sequence[bytes], level: Level, sequence: tuple[int, int] | None
    ) -> bytes:
        """Store records."""

    @abstractmethod
    def fetch(self, number: int, place: Place, offset: int, wait_ms: int) -> bytes:
        """Read from an offset on."""

    def commit(self, number: int, owner: Owner, place: Place, offset: int) -> bytes:
        """Store a position, as written."""
        raise AssertionError("not among its words")

    def position(self, number: int, owner: Owner, place: Place) -> bytes:
        """Ask for a position."""
        raise AssertionError("not among its words")

    def join(self, number: int, name: str) -> bytes:
        """Become a member of the group, or its member again."""
        raise AssertionError("not among its words")

    def stay(self, number: int, place: Membership) -> bytes:
        """Give a sign of life, and ask for the place again."""
        raise AssertionError("not among its words")

    def leave(self, number: int, place: Membership) -> bytes:
        """Be no member any more."""
        raise AssertionError("not among its words")

    def move(self, number: int, place: Membership, partition: int, offset: int) -> bytes:
        """Store the group's position, as a member."""
        raise AssertionError("not among its words")

    @abstractmethod
    def ping(self, number: int) -> bytes:
        """Ask for a sign of life."""

    @abstractmethod
    def take(self, data: bytes) -> Iterator[Answer]:
        """What these bytes answer, with those before them."""
