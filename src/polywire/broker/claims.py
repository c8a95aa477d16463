"""Claim topic names when several brokers share one namespace (decision 0126)."""

from __future__ import annotations

from typing import Final, Protocol


class Claims(Protocol):
    """Claims of topic names on behalf of one broker."""

    def claim(self, full_name: str) -> None:
        """Claim the name of a topic before it is created. Claiming it again has no effect.

        Raises Busy(BUSY) if another broker has claimed the name, Unavailable(STORAGE_FAILED).
        """

    def release(self, full_name: str) -> None:
        """Release the name of a deleted topic, once no recovery can restore the topic."""


class Alone:
    """The ``Claims`` of a broker that shares its namespace with no other broker: the methods do nothing."""

    def claim(self, full_name: str) -> None:
        pass

    def release(self, full_name: str) -> None:
        pass


ALONE: Final[Claims] = Alone()
