"""What peers share whose answers say nothing of the request: it is the next one that is not answered.

Promises: as ``Speech``. Must not know: bytes of wires.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from polywire.testing.sim.promises import require
from polywire.testing.sim.wires.ledger import NOWHERE, Place
from polywire.testing.sim.wires.speech import Answer, Speech


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for, and where. offset, address: of the record that is read first. name: of a member."""

    number: int
    act: str
    place: Place = NOWHERE
    offset: int = 0
    address: int = 0
    name: str = ""


class Marks:
    """Offsets whose addresses this connection has learned, where a wire counts bytes. Invariant: those of a place ascend."""

    def __init__(self) -> None:
        self._known: dict[Place, list[tuple[int, int]]] = {}

    def nearest(self, place: Place, offset: int) -> tuple[int, int]:
        """The last offset that is known up to this one, and its address."""
        return max((mark for mark in self._known.get(place, ()) if mark[0] <= offset), default=(0, 0))

    def note(self, place: Place, offset: int, address: int) -> None:
        """A reader has come so far."""
        known = self._known.setdefault(place, [])
        if not known or known[-1][0] < offset:
            known.append((offset, address))


class OrderedSpeech(Speech):
    """A base of peers. Guards: ``_requests`` are those that are not answered, in their order."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._requests: deque[Request] = deque()

    def _ask(self, request: Request, frame: bytes) -> bytes:
        """What is sent for a request."""
        self._requests.append(request)
        return frame

    @abstractmethod
    def _end(self, buffer: bytearray) -> int:
        """Where the first reply ends, 0 while it is not whole."""

    @abstractmethod
    def _answer(self, request: Request, reply: bytes) -> Answer | None:
        """What a reply says; None when another one belongs to it."""

    def take(self, data: bytes) -> Iterator[Answer]:
        buffer = self._buffer
        buffer += data
        while end := self._end(buffer):
            reply = bytes(buffer[:end])
            del buffer[:end]
            require(self._requests, "an answer is to a request", reply=reply[:40])
            answer = self._answer(self._requests[0], reply)
            if answer is not None:
                self._requests.popleft()
                yield answer


def framed_end(buffer: bytearray) -> int:
    """Where a frame ends that begins with its length, 0 while it is not whole."""
    end = 4 + int.from_bytes(buffer[:4], "big")
    return end if len(buffer) >= max(end, 4) else 0
