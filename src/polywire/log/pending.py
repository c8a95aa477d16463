"""A completion that can be taken back.

Promises: it is called once, or not at all once it was cancelled; what a read that nobody wants has pinned is let go. Must not know: what is
waited for.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from polywire.errors import BrokerError
from polywire.log.base import Completion, Read

_Result = TypeVar("_Result")


class Pending(Generic[_Result]):
    """Somebody who waits for a result. Implements ``Handle``; as a completion it passes the result on.

    Invariant: ``_then`` is None once it was called or cancelled.
    """

    __slots__ = ("_then",)

    def __init__(self, then: Completion[_Result]) -> None:
        self._then: Completion[_Result] | None = then

    @property
    def is_over(self) -> bool:
        """Whether nobody waits any more."""
        return self._then is None

    def __call__(self, result: _Result | BrokerError) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(result)
        elif isinstance(result, Read):
            result.pin.release()

    def cancel(self) -> None:
        """Call nobody."""
        self._then = None


def pending(then: Completion[_Result]) -> Pending[_Result]:
    """A completion that can be taken back: the same one when what was waited for has to be asked for again."""
    return then if isinstance(then, Pending) else Pending(then)
