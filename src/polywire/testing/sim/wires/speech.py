"""How a peer speaks a wire: requests into bytes, bytes into answers.

Promises: an answer is of one request, by its number. Must not know: what is right, when anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from polywire.testing.sim.wires.ledger import Place
from polywire.types import Level


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered. offset: of the first record, or the position. error: what it was refused with, and whether it may come
    again later. is_last: whether nothing more is said."""

    number: int
    offset: int | None = None
    records: Sequence[tuple[int, bytes | None]] = ()
    error: str = ""
    later: bool = False
    is_last: bool = True


class Speech(Protocol):
    """One connection's."""

    ordered: bool
    """Whether answers come in the order of requests."""

    def greeting(self) -> bytes:
        """What is sent first."""

    def level(self, level: Level) -> Level:
        """The level that is asked for where this one cannot be."""

    def sequence(self, place: Place, count: int) -> tuple[int, int] | None:
        """Producer and sequence of the next records, where they are numbered: those can be sent again."""

    def give_up(self) -> None:
        """Nothing that was numbered is sent again; what comes next is another producer's."""

    def produce(
        self, number: int, place: Place, values: Sequence[bytes], level: Level, sequence: tuple[int, int] | None
    ) -> bytes:
        """Store records."""

    def fetch(self, number: int, place: Place, offset: int, wait_ms: int) -> bytes:
        """Read from an offset on."""

    def commit(self, number: int, owner: str, place: Place, offset: int) -> bytes:
        """Store a position of a group, as written."""

    def position(self, number: int, owner: str, place: Place) -> bytes:
        """Ask for a position of a group."""

    def ping(self, number: int) -> bytes:
        """Ask for a sign of life."""

    def take(self, data: bytes) -> Iterator[Answer]:
        """What these bytes answer, with those before them."""
