"""The interface to a protocol: encode requests and decode answers. An answer belongs to a request by its number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from polywire.types import Level, PositionKind
from tests.sim.wires.group_ledger import Membership
from tests.sim.wires.ledger import PLACES, Owner, Place

ACTS: Final = frozenset({"produce", "fetch", "commit", "position", "ping"})
GROUP_ACTS: Final = frozenset({"join", "stay", "leave", "move", "look"})
GAP: Final = "gap"  # the error for sequences after those that were refused, or lost in a power loss


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request. offset: of the first record, or the position. error: the refusal, and whether a retry
    may succeed. is_fenced: because a group has changed; is_denied: for lack of permission. is_partial: whether some
    records are stored all the same. is_last: whether the answer is complete. place: in a group.
    """

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
    """The abilities of a protocol.

    acts: its requests. places: partitions that it can write. is_ordered: whether answers come in order. records_max: of
    one request. is_text: whether values are text. tells_offsets, tells_repeats: whether an acknowledgement has the
    offset, and that of a repeated batch. reads_all: whether an answer has all records. hangs_up: whether closing the
    connection refuses records. positions: their owners; whether they may decrease, and must be of existing records.
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
    """The protocol of one connection. Requests that its ``Words`` lack are not made."""

    words: ClassVar[Words]

    def greeting(self) -> bytes:
        """Return the first bytes."""
        return b""

    def level(self, level: Level) -> Level:
        """Return the level to use if the protocol lacks this one."""
        return level

    def sequence(self, place: Place, count: int) -> tuple[int, int] | None:
        """Return producer and sequence of the next records if the protocol has them: such records can be repeated."""
        return None

    def give_up(self) -> None:
        """Become another producer: numbered records are not repeated."""
        return  # most protocols have no sequences

    def spelled(self, value: bytes) -> bytes:
        """Return a value as readers of this protocol get it."""
        return value

    @abstractmethod
    def produce(
        self, number: int, place: Place, values: Sequence[bytes], level: Level, sequence: tuple[int, int] | None
    ) -> bytes:
        """Store records."""

    @abstractmethod
    def fetch(self, number: int, place: Place, offset: int, wait_ms: int) -> bytes:
        """Read from an offset."""

    def commit(self, number: int, owner: Owner, place: Place, offset: int) -> bytes:
        """Store a position at level WRITTEN."""
        raise AssertionError("not among its words")

    def position(self, number: int, owner: Owner, place: Place) -> bytes:
        """Fetch a position."""
        raise AssertionError("not among its words")

    def join(self, number: int, name: str) -> bytes:
        """Join the group, or rejoin."""
        raise AssertionError("not among its words")

    def stay(self, number: int, place: Membership) -> bytes:
        """Send a heartbeat and ask for the assignment."""
        raise AssertionError("not among its words")

    def leave(self, number: int, place: Membership) -> bytes:
        """Leave the group."""
        raise AssertionError("not among its words")

    def move(self, number: int, place: Membership, partition: int, offset: int) -> bytes:
        """Commit the group's position as a member."""
        raise AssertionError("not among its words")

    @abstractmethod
    def ping(self, number: int) -> bytes:
        """Send a request without effect."""

    @abstractmethod
    def take(self, data: bytes) -> Iterator[Answer]:
        """Yield the answers in these bytes and those before."""
