"""Completions that can be cancelled: each is called once, or never after ``cancel``.

The pin of a cancelled read's result is released.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from polywire.errors import BrokerError
from polywire.log.base import Completion, Read

_Result = TypeVar("_Result")


class Pending(Generic[_Result]):
    """Cancellable completion. Implements ``Handle``. When it is called, it passes the result to its completion.

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
    """Return a cancellable completion. If ``then`` is one already, because the operation is retried, return it
    unchanged.
    """
    return then if isinstance(then, Pending) else Pending(then)
