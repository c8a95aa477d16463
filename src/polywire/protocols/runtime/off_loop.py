"""Prepare large requests in a thread, off the event loop: one at a time, in order.

A request of a few KiB may decompress to tens of MiB, which would delay all other clients. Its session queues it here
and handles no further request meanwhile. Only one request at a time is prepared or held in memory, so memory is
bounded, however many clients send such requests.

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

LARGE_BYTES: Final = 1024 * 1024  # larger requests are prepared in the thread; decompressing 1 MiB takes about 3 ms
# longer requests are stored in slices, one request at a time; storing 4 MiB takes about 3 ms
LONG_BYTES: Final = 4 * 1024 * 1024


class OffLoopWork:
    """One large request that is prepared in a thread, for example decompressed.

    The session calls ``leave`` when the request was handled or cancelled. Then the next request is prepared.
    """

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
        self.leave()

    def leave(self) -> None:
        """Let the next request start. If the thread still prepares this one, the result is ignored."""
        if self.done is not None:
            self.done = None
            self._off_loop.remove(self)


class OffLoopQueue:
    """Prepares large requests in a thread, one at a time."""

    __slots__ = ("_loop", "_on", "_running", "_waiting")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: deque[OffLoopWork] = deque()
        self._on: OffLoopWork | None = None  # the current request
        self._running = False  # whether the thread is busy, maybe with a request that was cancelled

    def put(
        self, prepare: Callable[[], Any] | None, done: Callable[[Any], None], release: Callable[[], None]
    ) -> OffLoopWork:
        """Call ``prepare`` in a thread, then ``done`` with its result or with the PeerError that it raised.

        Args:
            prepare: None if the request needs no preparation, but must not be handled at the same time as others.
            done: called on the loop.
            release: called on the loop after ``leave``, when the thread does not use the request's bytes any more.
        """
        work = OffLoopWork(self, prepare, done, release)
        self._waiting.append(work)
        self._loop.call_soon(self._next)
        return work

    def remove(self, work: OffLoopWork) -> None:
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
        result: Any = PeerError("large request could not be prepared", fatal=True)
        try:
            assert work.prepare is not None, "the caller checked this"
            result = work.prepare()
        except PeerError as error:
            result = error.with_traceback(None)  # the traceback's frames refer to the prepared data, and to this result
        finally:  # also after an unexpected error, because the caller must not wait forever
            with suppress(RuntimeError):  # the loop was closed meanwhile, so no caller waits
                self._loop.call_soon_threadsafe(self._prepared, work, result)

    def _prepared(self, work: OffLoopWork, result: Any) -> None:
        self._running = False
        if work.done is not None:
            work.done(result)
        else:
            work.release()
            self._next()
