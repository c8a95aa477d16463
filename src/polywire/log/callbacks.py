"""Call callbacks of the log and of its callers, and handle their exceptions (decision 0107).

* An exception in the log's own code stops the log. No other callback runs before that.
* An exception in a caller's callback is reported by the event loop. Other callbacks are still called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import cython

from polywire.log.base import Handle, Loop

Call = tuple[Callable[..., object], tuple[Any, ...]]


class FailStop:
    """Context manager for code that changes the log's state.

    On an exception it calls ``broken``, which must stop the log because its state may be inconsistent. The exception
    propagates to the caller.
    """

    __slots__ = ("_broken",)

    def __init__(self, broken: Callable[[BaseException], None]) -> None:
        self._broken = broken

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._broken(error)


class FailStopLoop:
    """Event loop for the log's own callbacks. Calls each one through ``run``, which stops the log on an exception."""

    __slots__ = ("_loop", "_run")

    def __init__(self, loop: Loop, run: Callable[[Callable[..., object], tuple[Any, ...]], None]) -> None:
        self._loop = loop
        self._run = run

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Handle:
        return self._loop.call_soon(self._run, callback, args)

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Handle:
        return self._loop.call_soon_threadsafe(self._run, callback, args)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle:
        return self._loop.call_later(delay, self._run, callback, args)


@cython.cclass
class Notifications:
    """Queue of clients' completion callbacks. Each is called once, in the order of ``add``.

    As a context manager, passes an exception of its block to the event loop, which reports it. The session of the
    client that triggered the call does not get the exception.
    """

    if not cython.compiled:  # in the compiled module, callbacks.pxd declares the fields
        __slots__ = ("_loop", "_notifying", "waiting")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._notifying = False
        self.waiting = deque[Call]()

    def add(self, callback: Callable[..., object], *args: Any) -> None:
        self.waiting.append((callback, args))

    @cython.ccall
    def notify(self) -> None:
        """Call all queued callbacks. A nested call returns at once, because the outer one calls the rest."""
        waiting = self.waiting
        while waiting and not self._notifying:  # continue after a callback that raised
            with self:
                while waiting:
                    callback, args = waiting.popleft()
                    callback(*args)

    def notify_soon(self) -> None:
        self._loop.call_soon(self.notify)

    def __enter__(self) -> None:
        self._notifying = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._notifying = False
        if not isinstance(error, Exception):
            return False
        self._loop.call_soon(_raise, error)
        return True


def _raise(error: Exception) -> None:
    raise error
