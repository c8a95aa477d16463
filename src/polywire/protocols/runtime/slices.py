"""Answers that take long to make, made in slices of the loop's time.

Promises: between two slices every other connection has had its turn, and of all such answers together a pass of the loop makes one slice;
what is made is told once, whole, or not at all when nobody waits for it any more. Must not know: any wire's bytes, sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.protocols.runtime.broker import WireBroker

_Part = TypeVar("_Part")


class Slices(Generic[_Part]):
    """Runs an iterator slice by slice and then calls ``done`` with everything it gave, or with the error it ended with.

    The iterator must yield often (``b""`` and None will do, they are not kept) and read nothing twice that may change between two slices.
    Invariant: ``done`` is called at most once, never after ``cancel``, and never from inside the call that began.
    """

    __slots__ = ("_broker", "_cancelled", "_done", "_made", "_parts")

    def __init__(self, broker: WireBroker, parts: Iterator[_Part | None], done: Completion[list[_Part]]) -> None:
        self._broker: Final = broker
        self._parts: Final = parts
        self._done: Final = done
        self._made: list[_Part] = []
        self._cancelled = False
        broker.sliced.put(self._make)

    def _make(self, end: float) -> bool:
        """Make a slice; whether there is more to make."""
        if self._cancelled:
            return False
        now = self._broker.clock.monotonic
        try:
            for part in self._parts:
                if part:
                    self._made.append(part)
                if now() >= end:
                    return True
        except BrokerError as error:
            self._done(error)
        else:
            self._done(self._made)
        return False

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._cancelled = True
