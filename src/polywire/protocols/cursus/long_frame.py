"""Long frames: decompressed in a thread, then stored in slices.

* The result is the same as for a short frame.
* The event loop is never blocked for the whole frame.
* A frame that waits for its preconditions delays no other client, and holds only its received bytes.
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
    """The request cannot begin now; it is offered again when the session wakes."""


class Stored(Protocol):
    """A batch being stored."""

    def store(self, end: float | None = None) -> float | None:
        """Continue until ``end``, or to the end; None at the end, else the seconds until the next attempt."""

    def store_at_once(self) -> bool:
        """Store all of it; False, without effect, if the log accepts nothing now."""


class Host(Protocol):
    """Session of a long frame."""

    @property
    def state(self) -> CursusState:
        """State shared with other sessions of its listener."""

    @property
    def output(self) -> Output:
        """Output that pins the received bytes."""

    def take_long(self, body: memoryview, packed: Algorithm | None, /) -> Stored | None:
        """Begin the frame's request; a returned batch is to be stored. Raises NotYet."""

    def carried(self) -> None:
        """The frame is complete."""

    def failed(self, error: PeerError, /) -> None:
        """The frame is invalid."""


class LongFrame:
    """A long frame of one session, which handles no other request meanwhile.

    Invariant: the received bytes are pinned until ``_over``; ``_work`` is queued unless the frame waits for a
    precondition.
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
        """Queue for a turn off the loop, first or again."""
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
        """A precondition is missing: give way, and restart when the session wakes."""
        assert self._work is not None, "its turn has come"
        self._body = memoryview(b"")
        self._unpin = self._session.output.pin()
        work, self._work = self._work, None
        work.leave()

    def close(self) -> None:
        """It is complete or cancelled; a partly stored batch is stored completely."""
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
