"""Sessions that execute one request at a time: waiting, resuming, and the end of the connection.

The state of a session is a phase, which only advances, and the current set of reasons for waiting::

    OPEN ──► FINISHING ──► ENDING ──► CLOSED
      └────────────────────────┘          any phase may be the last before CLOSED

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
    """The client sends nothing more. The remaining complete requests are still executed."""
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
    """Reasons why the next request waits; several may apply.

    A backlog is another reason, and a protocol may have its own.

    They are plain integers, because they are checked before every request.
    """

    YIELDING: Final = 1
    """Other connections are being served."""
    SETTLING: Final = 2
    """All earlier requests must be answered."""
    HOLDING: Final = 4
    """How the next request is handled depends on an outstanding response."""
    LOOKING_UP: Final = 8
    """The next request waits for something, such as the answer of another process."""
    CLOGGED: Final = 16
    """Another process has many requests to answer."""


# A request that claims up to this length gets all its memory at once, a longer one at most four times the bytes
# received.
GROWTH_BYTES_MIN: Final = 1024 * 1024


def believed(announced: int, come: int) -> int:
    """Return how many bytes to allocate for a request that claims ``announced`` bytes, of which ``come`` have arrived."""
    return min(announced, max(GROWTH_BYTES_MIN, 4 * come))


@cython.cclass
class BareSequential:
    """The session of one client; see ``SequentialSession``, the base class for protocols.

    * ``_phase`` changes as in ``TRANSITIONS``.
    * ``_rest``: bytes that were not consumed when the client finished sending; empty except in FINISHING.
    * ``_reasons``: why the next request waits.
    * ``_held``: whether the driver waits for ``_resume``.
    * ``_awaited``: what the next request waited for. Its answer is used when the request is offered again.
    * ``_wanted``: how many bytes to allocate for the incomplete request.
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
            "_wanted",
            "broker",
            "output",
        )

    def __init__(self, broker: Any, output: Output, resume: Callable[[], None]) -> None:
        self.broker = broker
        self.output = output
        self._resume = resume
        self._held = False
        self._awaited: Pending | None = None
        self._receiving = False
        self._phase = OPEN
        self._reasons = 0
        self._rest = b""
        self._wanted = 0

    def _receive(self, data: memoryview) -> int:
        """Handle complete requests, and return the number of bytes consumed. Implemented by protocols.

        Raises PeerError to close the connection.
        """
        return 0

    def owes(self) -> bool:
        """Whether a request is unanswered. Implemented by protocols."""
        return False

    def _waits(self) -> bool:
        return bool(self._reasons) or self.output.backlog > self.output.backlog_max

    @property
    def spoken_dialect(self) -> str:
        """The dialect of the protocol; empty by default."""
        return ""

    def wanted(self) -> int:
        """How many bytes to allocate for the incomplete request; 0 if unknown."""
        return self._wanted

    def paused(self) -> bool:
        """Whether the next request must wait. If so, ``resume`` is called later."""
        self._held = self._waits()
        return self._held

    def receive(self, data: memoryview) -> int:
        """Handle complete requests, and return the number of bytes consumed.

        Raises PeerError to close the connection.
        """
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
        self._go_on()

    def _go_on(self) -> None:
        """Continue with waiting requests, if possible. Not called inside ``receive``."""
        if self._receiving or self._phase is CLOSED or self._waits():
            return
        if self._phase is FINISHING:
            self._take_rest()
        if self._held and self._phase is not FINISHING:
            self._held = False
            self._resume()
        self._end_when_done()

    def _look_up(self, pending: Pending) -> None:
        """Hold the request that raised ``pending`` until it can be offered again. The request had no effect yet."""
        self._awaited = pending
        self._reasons |= Wait.LOOKING_UP
        pending.then(self._looked_up)

    def _looked_up(self) -> None:
        self._reasons &= ~Wait.LOOKING_UP
        self._go_on()

    def drained(self) -> None:
        self._go_on()

    def finish(self, data: memoryview) -> None:
        """Handle the end of the client's data.

        An incomplete request is dropped; complete requests that wait are still executed.
        """
        if self._phase is OPEN:
            self._enter(FINISHING)
            self._rest = bytes(data)
            if not self._waits() or not data:
                self._take_rest()
        self._end_when_done()

    def _take_rest(self) -> None:
        """Handle bytes that were not consumed when the client finished sending, as far as possible now."""
        rest, self._rest = self._rest, b""
        try:
            rest = rest[self.receive(memoryview(rest)) :] if rest else b""
        except PeerError:  # the client has finished, so only outstanding responses are sent
            rest = b""
        if self._phase is FINISHING and rest and self._waits():
            self._rest = rest
        else:
            self._stop_taking()

    def _enter(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self._phase], f"no transition from {self._phase.name} to {phase.name}"
        self._phase = phase
        if phase is not FINISHING:
            self._rest = b""

    def _stop_taking(self) -> None:
        """Accept no further request, and drop waiting ones. Outstanding responses are still sent."""
        if self._phase < ENDING:
            self._enter(ENDING)

    def _end_when_done(self) -> None:
        if self._phase is ENDING and not self.owes():
            self._flush()
            self.output.close()

    def _flush(self) -> None:
        """Write collected responses. Most protocols collect none."""


class SequentialSession(BareSequential, ABC, Generic[_Broker]):
    """The session of one client, for protocols with this view of the broker."""

    __slots__ = ()

    broker: _Broker

    @abstractmethod
    def _receive(self, data: memoryview) -> int:
        """Handle complete requests, and return the number of bytes consumed.

        Raises PeerError to close the connection.
        """

    @abstractmethod
    def owes(self) -> bool:
        """Whether a request is unanswered."""
