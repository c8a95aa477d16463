"""Completions that can be cancelled: called once, or never after ``cancel``.

The result of a cancelled read is unpinned.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from polywire.errors import BrokerError
from polywire.log.base import Completion, Read

_Result = TypeVar("_Result")


class Pending(Generic[_Result]):
    """Cancellable completion. Implements ``Handle``; called as a completion, it passes the result on.

    Invariant: ``_then`` is None once it was called or cancelled.
    """

    __slots__ = ("_then",)

    def __init__(self, then: Completion[_Result]) -> None:
        self._then: Completion[_Result] | None = then

    @property
    def is_over(self) -> bool:
        """Whether it was called or cancelled."""
        return self._then is None

    def __call__(self, result: _Result | BrokerError) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(result)
        elif isinstance(result, Read):
            result.pin.release()

    def cancel(self) -> None:
        """Drop the completion."""
        self._then = None


def pending(then: Completion[_Result]) -> Pending[_Result]:
    """Return a cancellable completion; the same one if the operation is retried."""
    return then if isinstance(then, Pending) else Pending(then)
