"""Build long responses in slices of time on the event loop.

Other connections are served between two slices. In each pass of the loop, all long responses together get one slice.
This module is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import cython

from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.protocols.runtime.broker import WireBroker

AT_ONCE_MAX: Final = 64  # steps that run without a pause: entries of a request or a response

_Part = TypeVar("_Part")


class Slices(Generic[_Part]):
    """Runs an iterator in several passes of the loop, then calls ``done`` with the yielded values, or with its error.

    The iterator must yield often: ``b""`` or None if there is no value. Other code runs between two passes, so the
    iterator must read the broker's state again after each yield.

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
        """Run the iterator until ``end``. Return whether it has more to do."""
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


def rest_in_slices(
    broker: WireBroker, steps: Iterator[None], then: Callable[[], None], *, at_once: int = AT_ONCE_MAX
) -> Slices[None] | None:
    """Run the first steps. Return None if there are no others: the caller continues with ``then`` itself.

    Otherwise the others run in slices, and ``then`` is called after the last one. The steps raise no BrokerError.
    """
    left: cython.long = at_once
    for _ in steps:
        if left == 0:
            break
        left -= 1
    else:
        return None

    def done(made: list[None] | BrokerError) -> None:
        assert not isinstance(made, BrokerError), "errors are set in the entries"
        then()

    return Slices(broker, steps, done)
