"""Handle large Cursus requests: decompress them in a thread, then store them in slices.

The result is the same as for a small request. A large request that waits delays no other client, and only its received
bytes are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from polywire.broker.api import Pending
from polywire.errors import PeerError
from polywire.protocols.cursus.compression import Algorithm
from polywire.protocols.cursus.context import CursusState
from polywire.protocols.runtime.off_loop import OffLoopWork
from polywire.protocols.runtime.session import Output

STEP_S: Final = 0.002  # seconds of work on one frame before other connections are served


class PendingBatch(Protocol):
    """A batch that is being stored."""

    def store(self, end: float | None = None) -> float | None:
        """Store messages until time ``end``; all if it is None.

        Returns None when all are stored, otherwise the seconds until the next attempt.
        """

    def store_at_once(self) -> bool:
        """Store all messages. Return False, without an effect, if the log's write buffer is full."""


class Host(Protocol):
    """The methods of the session that ``LongFrame`` uses."""

    @property
    def state(self) -> CursusState: ...

    @property
    def output(self) -> Output:
        """The connection, which can keep the received bytes in memory and writes responses."""

    def take_long(self, body: memoryview, packed: Algorithm | None, /) -> PendingBatch | None:
        """Execute the request in a long frame. The caller must store the returned batch, if there is one.

        Raises Pending if the request must be repeated later.
        """

    def hold(self, pending: Pending, /) -> None:
        """Execute the frame's request again when ``pending`` allows it."""

    def frame_done(self) -> None:
        """Handle the next request, because the frame's request was executed."""

    def failed(self, error: PeerError, /) -> None: ...


class LongFrame:
    """A long frame, which is decompressed in a thread.

    Until its request was executed, the session handles no other one. Its received bytes stay in memory meanwhile.
    """

    __slots__ = ("_body", "_is_done", "_packed", "_received", "_session", "_storing", "_unpin", "_work")

    def __init__(self, session: Host, received: memoryview, packed: Algorithm | None) -> None:
        self._session = session
        self._received = self._body = received
        self._packed = packed
        self._storing: PendingBatch | None = None
        self._is_done = False
        self._unpin: Callable[[], None] | None = None
        self._work: OffLoopWork | None = None  # entry in the queue; None while the request waits to be repeated
        self.begin()

    def begin(self) -> None:
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
        except Pending as pending:
            self._leave_queue()
            self._session.hold(pending)
            return
        self._step()

    def _step(self) -> None:
        if self._is_done:
            return
        clock, loop = self._session.state.broker.clock, self._session.state.broker.loop
        wait_s = None if self._storing is None else self._storing.store(clock.monotonic() + STEP_S)
        if wait_s is None:
            self._storing = None
            self.close()
            self._session.frame_done()
        elif wait_s:
            loop.call_later(wait_s, self._step)
        else:
            loop.call_soon(self._step)

    def _leave_queue(self) -> None:
        assert self._work is not None, "only a queued frame is processed"
        self._body = memoryview(b"")
        self._unpin = self._session.output.pin()
        work, self._work = self._work, None
        work.leave()

    def close(self) -> None:
        """Release the frame: its request was executed or cancelled.

        A batch that is partly stored is stored completely.
        """
        self._is_done = True
        if self._storing is not None:
            self._storing.store()
        self._received = self._body = memoryview(b"")
        self._storing = None
        if self._work is not None:
            self._work.leave()
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
