"""Prepare large requests in a thread, off the event loop: one at a time, in order.

A request of a few KiB may decompress to tens of MiB, which would delay all other clients. Its session queues it here
and handles no further request meanwhile. At any time only one request is prepared or held. This bounds memory however
many clients send such requests.

``done`` is called on the event loop, at most once, and not after ``leave``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from polywire.errors import PeerError
from polywire.log.base import Loop

LARGE_BYTES: Final = 1024 * 1024  # larger requests are prepared here: expanding 1 MiB takes some 3 ms
LONG_BYTES: Final = 4 * 1024 * 1024  # longer requests are stored in slices and take turns here: 4 MiB take some 3 ms


class OffLoopWork:
    """One request in the queue. Its owner calls ``leave`` once it is handled, or cancelled; only then comes the next."""

    __slots__ = ("_off_loop", "done", "prepare", "release")

    def __init__(
        self,
        queue: OffLoopQueue,
        prepare: Callable[[], Any] | None,
        done: Callable[[Any], None],
        release: Callable[[], None],
    ) -> None:
        self._off_loop = queue
        self.prepare = prepare
        self.done: Callable[[Any], None] | None = done
        self.release = release

    def cancel(self) -> None:
        """Cancel the request."""
        self.leave()

    def leave(self) -> None:
        """Give way to the next; the thread may still be busy, but its result is ignored."""
        if self.done is not None:
            self.done = None
            self._off_loop.left(self)


class OffLoopQueue:
    """Queue in which one large request at a time is prepared.

    Invariant: ``_on`` is the current work; ``_running`` while the thread is busy, even for work that has left.
    """

    __slots__ = ("_loop", "_on", "_running", "_waiting")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: deque[OffLoopWork] = deque()
        self._on: OffLoopWork | None = None
        self._running = False

    def put(
        self, prepare: Callable[[], Any] | None, done: Callable[[Any], None], release: Callable[[], None]
    ) -> OffLoopWork:
        """Call ``prepare`` in a thread, then ``done`` with its result, or with the PeerError it raised.

        Args:
            prepare: None if only a turn is needed.
            done: called on the loop.
            release: called on the loop once the work has left and the thread no longer uses the request.
        """
        work = OffLoopWork(self, prepare, done, release)
        self._waiting.append(work)
        self._loop.call_soon(self._next)
        return work

    def left(self, work: OffLoopWork) -> None:
        """Its turn is over, or it was cancelled."""
        if work is not self._on:
            self._waiting.remove(work)
        else:
            self._on = None
            if self._running:
                return
            self._loop.call_soon(self._next)
        work.release()

    def _next(self) -> None:
        if self._on is not None or self._running or not self._waiting:
            return
        self._on = work = self._waiting.popleft()
        if work.prepare is None:
            self._prepared(work, None)
            return
        self._running = True
        threading.Thread(target=self._prepare, args=(work,), name="polywire-off-loop", daemon=True).start()

    def _prepare(self, work: OffLoopWork) -> None:
        """Run in the thread."""
        result: Any = PeerError("large request could not be prepared", fatal=True)
        try:
            assert work.prepare is not None, "it was looked at"
            result = work.prepare()
        except PeerError as error:
            result = error.with_traceback(None)  # its frames reference the prepared data, and this result
        finally:  # also when it broke an invariant: its caller must not wait forever
            with suppress(RuntimeError):  # the loop was closed meanwhile, so there is no caller left
                self._loop.call_soon_threadsafe(self._prepared, work, result)

    def _prepared(self, work: OffLoopWork, result: Any) -> None:
        self._running = False
        if work.done is not None:
            work.done(result)
        else:
            work.release()
            self._next()
