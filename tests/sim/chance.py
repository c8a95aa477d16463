"""The random numbers of a run: derived from its seed, the same on every machine and in every version of Python.

* The same seed always gives the same numbers (SplitMix64, https://doi.org/10.1145/2714064.2660195).
* The numbers of nearby seeds are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

_T = TypeVar("_T")

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
_WHOLE: Final = 1 << 53


class Chance:
    """One sequence of random numbers."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = _mixed(seed * _STEP & _MASK)  # far apart: all sequences are parts of one

    def number(self) -> int:
        """Return the next number below 2 ** 64."""
        self._state = number = self._state + _STEP & _MASK  # ``_mixed`` inlined: runs spend their time here
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
        return number ^ number >> 31

    def below(self, end: int) -> int:
        """Return a number from 0 and below ``end``."""
        return self.number() * end >> 64

    def share(self) -> float:
        """Return a number from 0 and below 1."""
        return (self.number() >> 11) / _WHOLE

    def happens(self, probability: float) -> bool:
        """Return True with this probability."""
        return (self.number() >> 11) / _WHOLE < probability

    def one_of(self, items: Sequence[_T]) -> _T:
        """Return one of the items, all equally likely."""
        return items[self.number() * len(items) >> 64]

    def weighted(self, items: Sequence[_T], weights: Sequence[float]) -> _T:
        """Return one of the items, with probabilities in proportion to the weights."""
        left = self.share() * sum(weights)
        for item, weight in zip(items, weights, strict=True):
            left -= weight
            if left < 0:
                return item
        return items[-1]

    def token(self, size: int) -> bytes:
        """Return this many random bytes."""
        return b"".join(self.number().to_bytes(8, "little") for _ in range(-(-size // 8)))[:size]


def _mixed(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
