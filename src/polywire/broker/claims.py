"""Claim topic names when several brokers share one namespace (decision 0126)."""

from __future__ import annotations

from typing import Final, Protocol


class Claims(Protocol):
    """Names of topics that several brokers share."""

    def claim(self, full_name: str) -> None:
        """Claim the name of a topic that is about to be created; idempotent.

        Raises Busy(BUSY) if another broker was first, Unavailable(STORAGE_FAILED).
        """

    def release(self, full_name: str) -> None:
        """Release the name of a deleted topic once nothing can restore it."""


class Alone:
    """Claims of a single broker."""

    def claim(self, full_name: str) -> None:
        """Do nothing."""

    def release(self, full_name: str) -> None:
        """Do nothing."""


ALONE: Final[Claims] = Alone()
