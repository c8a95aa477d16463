"""A long Cursus frame: expanded beside the loop, then stored a little at a time.

Promises: what a frame asks for is done as if it had come alone and short; the loop is never held for all of it; while it waits for what it
cannot begin without, it holds nobody up and keeps no more than what was received. Must not know: layouts, what the commands do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from polywire.errors import PeerError
from polywire.protocols.cursus.compression import Algorithm
from polywire.protocols.cursus.context import CursusState
from polywire.protocols.runtime.off_loop import OffLoopWork
from polywire.protocols.runtime.session import Output

STEP_S: Final = 0.002  # of one frame, before others get a turn


class NotYet(Exception):
    """A request that cannot begin now: it is offered again when the session wakes."""


class Stored(Protocol):
    """A batch on its way into the log."""

    def store(self, end: float | None = None) -> float | None:
        """Go on until ``end``, or to the end; None once that was reached, else in how many seconds to go on."""

    def store_at_once(self) -> bool:
        """Store all of it; False where the log takes nothing just now: then it is as if it had never been asked for."""


class Host(Protocol):
    """The session that a long frame came over."""

    @property
    def state(self) -> CursusState:
        """What it shares with others of its listener."""

    @property
    def output(self) -> Output:
        """Where what was received is pinned."""

    def take_long(self, body: memoryview, packed: Algorithm | None, /) -> Stored | None:
        """Begin what the frame asks for; a batch is returned, to be stored. Raises NotYet."""

    def carried(self) -> None:
        """The frame is carried out."""

    def failed(self, error: PeerError, /) -> None:
        """The frame makes no sense."""


class LongFrame:
    """One such frame of one session, which takes no other request meanwhile.

    Invariant: the received bytes are pinned from the beginning until ``_over``; ``_work`` is off the loop unless the frame waits to begin.
    """

    __slots__ = ("_body", "_over", "_packed", "_received", "_session", "_storing", "_unpin", "_work")

    def __init__(self, session: Host, received: memoryview, packed: Algorithm | None) -> None:
        self._session = session
        self._received = self._body = received
        self._packed = packed
        self._storing: Stored | None = None
        self._over = False
        self._unpin: Callable[[], None] | None = None
        self._work: OffLoopWork | None = None
        self.begin()

    def begin(self) -> None:
        """Wait for a turn off the loop; the first time, or again."""
        if self._work is not None:
            return
        limit = self._session.state.settings.frame_bytes_max
        prepare = None if self._packed is None else partial(self._packed.expand, self._received, limit)
        unpin, self._unpin = self._unpin or self._session.output.pin(), None
        self._work = self._session.state.off_loop.put(prepare, self._prepared, unpin)

    def _prepared(self, body: Any) -> None:
        if isinstance(body, PeerError):
            self.close()
            self._session.failed(body)
            return
        self._body = self._received if body is None else memoryview(body)
        try:
            self._storing = self._session.take_long(self._body, self._packed)
        except NotYet:
            self._park()
            return
        self._step()

    def _step(self) -> None:
        if self._over:
            return
        clock, loop = self._session.state.broker.clock, self._session.state.broker.loop
        wait_s = None if self._storing is None else self._storing.store(clock.monotonic() + STEP_S)
        if wait_s is None:
            self._storing = None
            self.close()
            self._session.carried()
        elif wait_s:
            loop.call_later(wait_s, self._step)
        else:
            loop.call_soon(self._step)

    def _park(self) -> None:
        """Something has to come first: let others have the turn, and begin anew when the session wakes."""
        assert self._work is not None, "its turn has come"
        self._body = memoryview(b"")
        self._unpin = self._session.output.pin()
        work, self._work = self._work, None
        work.leave()

    def close(self) -> None:
        """It is carried out, or nobody waits for it any more; a batch of which something was stored is stored whole."""
        self._over = True
        if self._storing is not None:
            self._storing.store()
        self._received = self._body = memoryview(b"")
        self._storing = None
        if self._work is not None:
            self._work.leave()
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
