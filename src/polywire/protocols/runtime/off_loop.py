"""Large requests, prepared beside the loop: one at a time, in their order.

A request of a few KiB may expand to tens of MiB, which takes longer than everybody else should wait. Its session puts it here and takes no
further request meanwhile.

Promises: of all the work put here one piece at a time is being done or held, so memory is bounded however many peers ask; the loop never
waits for it; ``done`` is called on the loop, at most once, and not after ``leave``. Must not know: wires, what the work is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from polywire.errors import PeerError
from polywire.log.base import Loop

LARGE_BYTES: Final = 1024 * 1024  # what expands further is prepared here: 1 MiB takes some 3 ms
LONG_BYTES: Final = (
    4 * 1024 * 1024
)  # longer requests are stored a little at a time, and have their turn here: 4 MiB take some 3 ms


class OffLoopWork:
    """One request's stay in the queue.

    Invariant: whoever put it here calls ``leave`` once it is handled, or not wanted any more; only then comes the next.
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
        """Nobody waits for it any more."""
        self.leave()

    def leave(self) -> None:
        """Make room for the next; the thread may still be at it, but nobody is told any more."""
        if self.done is not None:
            self.done = None
            self._off_loop.left(self)


class OffLoopQueue:
    """Where one large request at a time is prepared.

    Invariant: ``_on`` is the work whose turn it is; ``_running`` while the thread is at some work, even when that has left.
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
        """Have ``prepare`` called in a thread, then ``done`` with what it returned, or with the PeerError it raised.

        prepare: None when a turn is all that is wanted. release: called on the loop once the work has left and the thread does not look at
        the request any more.
        """
        work = OffLoopWork(self, prepare, done, release)
        self._waiting.append(work)
        self._loop.call_soon(self._next)
        return work

    def left(self, work: OffLoopWork) -> None:
        """Its turn is over, or it does not want one any more."""
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
        """In the thread."""
        result: Any = PeerError("large request could not be prepared", fatal=True)
        try:
            assert work.prepare is not None, "it was looked at"
            result = work.prepare()
        except PeerError as error:
            result = error.with_traceback(None)  # its frames hold what was prepared, and this result
        finally:  # also when it broke a promise of ours: whoever waits must not wait for ever
            with suppress(RuntimeError):  # the loop was closed under us: nobody is left to be told
                self._loop.call_soon_threadsafe(self._prepared, work, result)

    def _prepared(self, work: OffLoopWork, result: Any) -> None:
        self._running = False
        if work.done is not None:
            work.done(result)
        else:
            work.release()
            self._next()
