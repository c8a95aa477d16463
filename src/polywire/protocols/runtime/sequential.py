"""Sessions whose next request may have to wait: when it does, how it is taken up again, and what that means at the end.

Promises: requests are handled in the order they came, never inside the handling of another; whole ones that had to wait when the peer
finished are still carried out; the connection is closed once nothing is owed. Must not know: any wire's bytes, what requests wait for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from polywire.errors import PeerError
from polywire.protocols.runtime.session import Output

if TYPE_CHECKING:
    from polywire.broker.broker import Broker

GROWTH_BYTES_MIN: Final = 1024 * 1024  # an announced length is believed so far, and four times what has come of it


def believed(announced: int, come: int) -> int:
    """Bytes worth making room for, of a request that announces its length and of which so many bytes have come."""
    return min(announced, max(GROWTH_BYTES_MIN, 4 * come))


class SequentialSession(ABC):
    """One peer.

    ``_held``: the driver was told to wait for ``_resume``. ``_rest``: what the peer left when it finished. ``_yielding``: other connections
    have their turn. ``_ending``: no further request is taken; what is owed still goes out. ``_wanted``: bytes worth making room for, of the
    request that has begun.
    """

    __slots__ = (
        "_closed",
        "_ending",
        "_held",
        "_receiving",
        "_rest",
        "_resume",
        "_wanted",
        "_yielding",
        "broker",
        "output",
    )

    def __init__(self, broker: Broker, output: Output, resume: Callable[[], None]) -> None:
        self.broker: Final = broker
        self.output: Final = output
        self._resume: Final = resume
        self._held = False
        self._receiving = False
        self._ending = False
        self._closed = False
        self._yielding = False
        self._rest = b""
        self._wanted = 0

    @abstractmethod
    def _receive(self, data: memoryview) -> int:
        """Handle complete requests; returns how many bytes they had. Raises PeerError."""

    @abstractmethod
    def _owes(self) -> bool:
        """Whether something that was asked for is not done yet."""

    def _waits(self) -> bool:
        """Whether something must come, or go, before the next request is handled."""
        return self._yielding or self.output.backlog > self.output.backlog_max

    def wanted(self) -> int:
        """Bytes worth making room for, of the request that has begun; 0 when it does not tell."""
        return self._wanted

    def paused(self) -> bool:
        """Whether something must come, or go, before the next request is handled; whoever was told so is resumed later."""
        self._held = self._waits()
        return self._held

    def receive(self, data: memoryview) -> int:
        """Handle complete requests; returns how many bytes they had. Raises PeerError."""
        if self._ending:
            return len(data)
        self._receiving = True
        try:
            return self._receive(data)
        finally:
            self._receiving = False

    def _end_quantum(self) -> None:
        """Let other connections have a turn before the next request."""
        self._yielding = True
        self.broker.loop.call_soon(self._begin_quantum)

    def _begin_quantum(self) -> None:
        """The others had their turn."""
        self._yielding = False
        self._go_on()

    def _go_on(self) -> None:
        """Take up what had to wait, unless it still must; never from inside ``receive``."""
        if self._receiving or self._closed or self._waits():
            return
        if self._rest:
            self._take_rest()
        if self._held and not self._rest:
            self._held = False
            self._resume()
        self._end_when_done()

    def drained(self) -> None:
        """The peer reads again."""
        self._go_on()

    def finish(self, data: memoryview) -> None:
        """The peer is done; a request that is not whole is none, whole ones that have to wait are still carried out."""
        if self._ending or not data:
            self._ending = True
        else:
            self._rest = bytes(data)
            if not self._waits():
                self._take_rest()
        self._end_when_done()

    def _take_rest(self) -> None:
        """Handle what was left when the peer finished, as far as it goes now."""
        rest, self._rest = self._rest, b""
        try:
            rest = rest[self.receive(memoryview(rest)) :]
        except PeerError:  # nobody is left to be told; what is owed still goes out
            rest = b""
        if rest and self._waits():
            self._rest = rest
        else:
            self._ending = True

    def _end_when_done(self) -> None:
        if self._ending and not self._rest and not self._closed and not self._owes():
            self._flush()
            self.output.close()

    def _flush(self) -> None:  # noqa: B027
        """Write answers that were collected; most wires collect none."""
