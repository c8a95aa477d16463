"""Sessions whose next request may have to wait: when it does, how it is taken up again, and what that means at the end. Compiled.

Where a conversation is, and what its next request waits for, are two things: a phase, which only goes on, and reasons, which come and go::

    OPEN ──► FINISHING ──► ENDING ──► CLOSED
      └──────────────────────┘          any phase may be the last before CLOSED

Promises: requests are handled in the order they came, never inside the handling of another; whole ones that had to wait when the peer
finished are still carried out; the connection is closed once nothing is owed. Must not know: any wire's bytes, what requests wait for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final, Generic, TypeVar

import cython

from polywire.errors import PeerError
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.session import Output

_Broker = TypeVar("_Broker", bound=WireBroker)


class Phase(IntEnum):
    """How far a conversation has come."""

    OPEN = 0
    """Requests are taken as they come."""
    FINISHING = 1
    """The peer sends no more; whole requests that it left are still carried out."""
    ENDING = 2
    """No further request is taken; what is owed still goes out, then the connection is closed."""
    CLOSED = 3
    """The connection is gone: nobody is answered."""


OPEN: Final = Phase.OPEN  # looked at for every request and answer: found by their own names in a tenth of the time
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
    """Reasons why the next request is not handled yet, beside a backlog and what a wire has of its own; several may hold at once.

    Plain numbers: they are looked at before every request.
    """

    YIELDING: Final = 1
    """Other connections have their quantum."""
    SETTLING: Final = 2
    """Everything before it has to be answered."""
    ASLEEP: Final = 4
    """What it asks for may be in the making."""
    HOLDING: Final = 8
    """The answer in hand decides how it is handled."""


GROWTH_BYTES_MIN: Final = 1024 * 1024  # an announced length is believed so far, and four times what has come of it


def believed(announced: int, come: int) -> int:
    """Bytes worth making room for, of a request that announces its length and of which so many bytes have come."""
    return min(announced, max(GROWTH_BYTES_MIN, 4 * come))


@cython.cclass
class BareSequential:
    """One peer; see ``SequentialSession``, which is what wires make a class of their own of.

    Invariant: ``_phase`` changes as ``TRANSITIONS`` says; ``_rest``, what the peer left when it finished, is empty in any but FINISHING.
    ``_reasons``: why the next request waits. ``_held``: the driver was told to wait for ``_resume``. ``_wanted``: bytes worth making room
    for, of the request that has begun.
    """

    if not cython.compiled:  # compiled, sequential.pxd declares them
        __slots__ = (
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
        self._receiving = False
        self._phase = OPEN
        self._reasons = 0
        self._rest = b""
        self._wanted = 0

    def _receive(self, data: memoryview) -> int:
        """Handle complete requests, as a wire does; returns how many bytes they had. Raises PeerError."""
        return 0

    def owes(self) -> bool:
        """Whether something that was asked for is not answered yet, as a wire knows."""
        return False

    def _waits(self) -> bool:
        """Whether something must come, or go, before the next request is handled."""
        return bool(self._reasons) or self.output.backlog > self.output.backlog_max

    @property
    def spoken_dialect(self) -> str:
        """There is one only, unless the wire says otherwise."""
        return ""

    def wanted(self) -> int:
        """Bytes worth making room for, of the request that has begun; 0 when it does not tell."""
        return self._wanted

    def paused(self) -> bool:
        """Whether something must come, or go, before the next request is handled; whoever was told so is resumed later."""
        self._held = self._waits()
        return self._held

    def receive(self, data: memoryview) -> int:
        """Handle complete requests; returns how many bytes they had. Raises PeerError."""
        if self._phase >= ENDING:
            return len(data)
        self._receiving = True
        try:
            return self._receive(data)
        finally:
            self._receiving = False

    def _end_quantum(self) -> None:
        """Let other connections have a turn before the next request."""
        self._reasons |= Wait.YIELDING
        self.broker.loop.call_soon(self._begin_quantum)

    def _begin_quantum(self) -> None:
        """The others had their turn."""
        self._reasons &= ~Wait.YIELDING
        self._go_on()

    def _go_on(self) -> None:
        """Take up what had to wait, unless it still must; never from inside ``receive``."""
        if self._receiving or self._phase is CLOSED or self._waits():
            return
        if self._phase is FINISHING:
            self._take_rest()
        if self._held and self._phase is not FINISHING:
            self._held = False
            self._resume()
        self._end_when_done()

    def drained(self) -> None:
        """The peer reads again."""
        self._go_on()

    def finish(self, data: memoryview) -> None:
        """The peer is done; a request that is not whole is none, whole ones that have to wait are still carried out."""
        if self._phase is OPEN:
            self._enter(FINISHING)
            self._rest = bytes(data)
            if not self._waits() or not data:
                self._take_rest()
        self._end_when_done()

    def _take_rest(self) -> None:
        """Handle what was left when the peer finished, as far as it goes now."""
        rest, self._rest = self._rest, b""
        try:
            rest = rest[self.receive(memoryview(rest)) :] if rest else b""
        except PeerError:  # nobody is left to be told; what is owed still goes out
            rest = b""
        if self._phase is FINISHING and rest and self._waits():
            self._rest = rest
        else:
            self._stop_taking()

    def _enter(self, phase: Phase) -> None:
        """Go on to another phase."""
        assert phase in TRANSITIONS[self._phase], f"no transition from {self._phase.name} to {phase.name}"
        self._phase = phase
        if phase is not FINISHING:
            self._rest = b""

    def _stop_taking(self) -> None:
        """Take no further request, also of those that wait; what is owed still goes out."""
        if self._phase < ENDING:
            self._enter(ENDING)

    def _end_when_done(self) -> None:
        if self._phase is ENDING and not self.owes():
            self._flush()
            self.output.close()

    def _flush(self) -> None:
        """Write answers that were collected; most wires collect none."""


class SequentialSession(BareSequential, ABC, Generic[_Broker]):
    """One peer, of a wire that sees this much of the broker."""

    __slots__ = ()

    broker: _Broker

    @abstractmethod
    def _receive(self, data: memoryview) -> int:
        """Handle complete requests; returns how many bytes they had. Raises PeerError."""

    @abstractmethod
    def owes(self) -> bool:
        """Whether something that was asked for is not answered yet."""
