"""Claim a topic name, so that only one process of a broker creates the topic (decision 0126)."""

from __future__ import annotations

from typing import Final, Protocol


class Claims(Protocol):
    """Reserves topic names for this broker, if several brokers share one namespace."""

    def claim(self, full_name: str) -> None:
        """Claim the name of a topic before it is created. Claiming it again has no effect.

        Raises Busy(BUSY) if another broker has claimed the name, Unavailable(STORAGE_FAILED).
        """

    def release(self, full_name: str) -> None:
        """Release the name of a deleted topic, once no recovery can restore the topic."""


class Alone:
    """Implements ``Claims`` for a broker that has the namespace to itself: all names are free."""

    def claim(self, full_name: str) -> None:
        pass

    def release(self, full_name: str) -> None:
        pass


ALONE: Final[Claims] = Alone()
