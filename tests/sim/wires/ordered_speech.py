"""The common part of protocols whose responses come in the order of requests and have no request number."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tests.sim.promises import require
from tests.sim.wires.ledger import NOWHERE, Place
from tests.sim.wires.speech import Answer, Speech


@dataclass(frozen=True, slots=True)
class Request:
    """A request and its partition. offset, address: of the first record to read. name: of a member."""

    number: int
    act: str
    place: Place = NOWHERE
    offset: int = 0
    address: int = 0
    name: str = ""


class Marks:
    """Offsets with known addresses on this connection, for a protocol that counts bytes. Invariant: those of a
    partition ascend.
    """

    def __init__(self) -> None:
        self._known: dict[Place, list[tuple[int, int]]] = {}

    def nearest(self, place: Place, offset: int) -> tuple[int, int]:
        """Return the last known offset up to this one, and its address."""
        return max((mark for mark in self._known.get(place, ()) if mark[0] <= offset), default=(0, 0))

    def note(self, place: Place, offset: int, address: int) -> None:
        """Note the address of an offset."""
        known = self._known.setdefault(place, [])
        if not known or known[-1][0] < offset:
            known.append((offset, address))


class OrderedSpeech(Speech):
    """A base class. Guards: ``_requests`` are the outstanding requests in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._requests: deque[Request] = deque()

    def _ask(self, request: Request, frame: bytes) -> bytes:
        """Note a request and return its bytes."""
        self._requests.append(request)
        return frame

    @abstractmethod
    def _end(self, buffer: bytearray) -> int:
        """Return the end of the first response, 0 if it is incomplete."""

    @abstractmethod
    def _answer(self, request: Request, reply: bytes) -> Answer | None:
        """Return the answer in a response; None if another response belongs to it."""

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
    """Return the end of a length-prefixed frame, 0 if it is incomplete."""
    end = 4 + int.from_bytes(buffer[:4], "big")
    return end if len(buffer) >= max(end, 4) else 0
