"""Whose callback it is: the log's own, where an exception ends the log, or a peer's, where it is that peer's alone (decision 0020). Compiled.

Promises: an exception of the log's own code reaches ``broken`` before anything else runs; one of a peer's callback is raised in a callback of
the loop by itself, where it is reported, and keeps nobody else from being notified. Must not know: what the callbacks do.
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
    """The context in which the log's state changes. What is half done there cannot be trusted any more, so ``broken`` must end the log;
    the exception goes on to whoever called, and from there to the report."""

    __slots__ = ("_broken",)

    def __init__(self, broken: Callable[[BaseException], None]) -> None:
        self._broken = broken

    def __enter__(self) -> None:
        """State may change from here on."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._broken(error)


class FailStopLoop:
    """A ``Loop`` for the log's own callbacks: each is given to ``run``."""

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
    """Completions that peers wait for, in order. Guards: each is called once; what a callback adds comes behind all others.

    As a context it hands an exception to the loop, which reports it: a session that runs when others are notified is not to blame for what
    they do.
    """

    waiting = cython.declare(object, visibility="public")
    _loop: Loop
    _notifying: cython.bint

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._notifying = False
        self.waiting = deque[Call]()

    def add(self, callback: Callable[..., object], *args: Any) -> None:
        """Call this behind everything else."""
        self.waiting.append((callback, args))

    def notify(self) -> None:
        """Call everything that waits. From inside a callback: nothing, whoever notifies goes on."""
        waiting = self.waiting
        while waiting and not self._notifying:  # once more after one that broke
            with self:
                while waiting:
                    callback, args = waiting.popleft()
                    callback(*args)

    def notify_soon(self) -> None:
        """Notify in the loop's next pass."""
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
