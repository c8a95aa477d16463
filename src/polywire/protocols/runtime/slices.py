"""Build long responses in slices of time on the event loop.

Other connections are served between two slices. Each pass of the loop runs one slice for all such responses together. A
response is delivered once and complete, or not at all if it was cancelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.protocols.runtime.broker import WireBroker

_Part = TypeVar("_Part")


class Slices(Generic[_Part]):
    """Runs an iterator in slices, then calls ``done`` with everything it yielded, or with its error.

    The iterator must yield often; ``b""`` and None are discarded. It must not rely on values that it read before a yield, because
    other code may change them between two slices.

    ``done`` is called at most once, not after ``cancel``, and not before the constructor has returned.
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
        """Run a slice. Return whether there is more to do."""
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
        self._cancelled = True
