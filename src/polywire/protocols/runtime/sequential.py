"""Sessions that execute one request at a time: waiting, resuming, and the end of the connection.

A session has a set of reasons why the next request waits, and a phase, which only advances::

    OPEN ──► FINISHING ──► ENDING ──► CLOSED
      └────────────────────────┘          every phase may be followed by CLOSED

* Requests are handled in order, never inside the handling of another request.
* Complete requests that wait when the client finishes sending are still executed.
* The connection is closed when no response is outstanding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final, Generic, TypeVar

import cython

from polywire.broker.api import Pending
from polywire.errors import PeerError
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.session import Output

_Broker = TypeVar("_Broker", bound=WireBroker)


class Phase(IntEnum):
    OPEN = 0
    """Requests are accepted."""
    FINISHING = 1
    """The client has closed its side. Complete requests that it has sent are still executed."""
    ENDING = 2
    """No further request is accepted. Outstanding responses are sent, then the connection is closed."""
    CLOSED = 3
    """The connection is closed. Responses are dropped."""


OPEN: Final = Phase.OPEN  # read for every request and response; a module constant is ten times as fast as an attribute
FINISHING: Final = Phase.FINISHING
ENDING: Final = Phase.ENDING
CLOSED: Final = Phase.CLOSED

TRANSITIONS: Final[Mapping[Phase, frozenset[Phase]]] = {
    OPEN: frozenset({FINISHING, ENDING, CLOSED}),
    FINISHING: frozenset({ENDING, CLOSED}),
    ENDING: frozenset({CLOSED}),
    CLOSED: frozenset(),
}


class Wait:
    """Reasons for which a session does not execute the next request. Several may apply.

    It also waits while the connection has too many unsent bytes. Protocols may add reasons.
    """

    # plain integers instead of an enum, because they are checked before every request

    YIELDING: Final = 1
    """Other connections are being served."""
    EARLIER: Final = 2
    """All earlier requests must be answered."""
    HOLDING: Final = 4
    """The outstanding response determines how the next request is handled."""
    PENDING: Final = 8
    """The next request raised ``Pending``: it waits for another process, for example."""
    CLOGGED: Final = 16
    """A process to which requests are forwarded has many unanswered ones."""
    LONG: Final = 32
    """A long request is executed in steps."""


# Memory for a request up to this length is allocated at once. For a longer one, it is at most four times the received
# bytes, so that a client cannot have memory allocated by only announcing a long request.
GROWTH_BYTES_MIN: Final = 1024 * 1024


def bytes_to_allocate(announced: int, received: int) -> int:
    """Return how many bytes to allocate for an incomplete request, given its announced length and received bytes."""
    return min(announced, max(GROWTH_BYTES_MIN, 4 * received))


TakeRepeated = Callable[[Any, memoryview, int, int], bool]


@cython.cclass
class BareSequential:
    """The compiled base class of ``SequentialSession``.

    Attributes:
        take_repeated: for framed sessions. Executes a request that is equal to an earlier one in most of its bytes,
            given the session, and the request's position without its prefix of four bytes. Returns False, without an
            effect, for any other request. None if there was no such request yet.
    """

    if not cython.compiled:  # when compiled, sequential.pxd declares the fields
        __slots__ = (
            "_awaited",
            "_held",
            "_phase",
            "_reasons",
            "_receiving",
            "_rest",
            "_resume",
            "_short_bytes_max",
            "_wanted",
            "broker",
            "output",
            "requests",
            "take_repeated",
        )

    def __init__(self, broker: Any, output: Output, resume: Callable[[], None]) -> None:
        self.broker = broker
        self.output = output
        self.requests = 0
        self._resume = resume
        self._held = False  # whether the connection offers no request until ``_resume`` is called
        self._awaited: Pending | None = None  # raised by the next request, which finds the result here when repeated
        self._receiving = False
        self._phase = OPEN
        self._reasons = 0  # bits of ``Wait``
        self._rest = b""  # requests that were not executed when the client finished sending; used in FINISHING only
        self._wanted = 0  # bytes to allocate for the incomplete request
        self._short_bytes_max = 0  # see ``FramedSession``
        self.take_repeated: TakeRepeated | None = None

    def _receive(self, data: memoryview) -> int:
        return 0  # overridden by protocols

    def owes(self) -> bool:
        return False  # overridden by protocols

    def _waits(self) -> bool:
        return bool(self._reasons) or self.output.backlog > self.output.backlog_max

    @property
    def spoken_dialect(self) -> str:
        return ""  # overridden by protocols with dialects

    def wanted(self) -> int:
        return self._wanted

    def paused(self) -> bool:
        self._held = self._waits()
        return self._held

    def receive(self, data: memoryview) -> int:
        if self._phase >= ENDING:
            return len(data)
        self._receiving = True
        try:
            return self._receive(data)
        finally:
            self._receiving = False

    def _end_quantum(self) -> None:
        """Let other connections be served before the next request."""
        self._reasons |= Wait.YIELDING
        self.broker.loop.call_soon(self._begin_quantum)

    def _begin_quantum(self) -> None:
        self._reasons &= ~Wait.YIELDING
        self._continue()

    def _continue(self) -> None:
        """Execute requests that waited, unless a reason to wait remains."""
        if self._receiving or self._phase is CLOSED or self._waits():
            return
        if self._phase is FINISHING:
            self._handle_rest()
        if self._held and self._phase is not FINISHING:
            self._held = False
            self._resume()
        self._end_when_done()

    def _await_pending(self, pending: Pending) -> None:
        """Accept no requests until the request that raised ``pending`` can be repeated."""
        self._awaited = pending
        self._reasons |= Wait.PENDING
        pending.then(self._resume_pending)

    def _resume_pending(self) -> None:
        self._reasons &= ~Wait.PENDING
        self._continue()

    def drained(self) -> None:
        self._continue()

    def finish(self, data: memoryview) -> None:
        if self._phase is OPEN:
            self._enter(FINISHING)
            self._rest = bytes(data)
            if not self._waits() or not data:
                self._handle_rest()
        self._end_when_done()

    def _handle_rest(self) -> None:
        rest, self._rest = self._rest, b""
        try:
            rest = rest[self.receive(memoryview(rest)) :] if rest else b""
        except PeerError:  # the client has finished, so only outstanding responses are sent
            rest = b""
        if self._phase is FINISHING and rest and self._waits():
            self._rest = rest
        else:
            self._stop_receiving()

    def _enter(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self._phase], f"no transition from {self._phase.name} to {phase.name}"
        self._phase = phase
        if phase is not FINISHING:
            self._rest = b""

    def _stop_receiving(self) -> None:
        """Drop waiting and later requests. Responses to requests that have started are still sent."""
        if self._phase < ENDING:
            self._enter(ENDING)

    def _end_when_done(self) -> None:
        if self._phase is ENDING and not self.owes():
            self._flush()
            self.output.close()

    def _flush(self) -> None:
        """Write responses that the session has collected. Overridden by protocols that collect them."""


class SequentialSession(BareSequential, ABC, Generic[_Broker]):
    """The base class of the sessions of a protocol. It executes one request at a time."""

    __slots__ = ()

    broker: _Broker

    @abstractmethod
    def _receive(self, data: memoryview) -> int:
        """Execute the complete requests at the start of ``data``, and return their length in bytes.

        Raises PeerError to close the connection.
        """

    @abstractmethod
    def owes(self) -> bool:
        """Whether a request is unanswered."""
