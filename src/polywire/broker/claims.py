"""Claim a topic name, so that only one process of a broker creates the topic (decision 0126)."""

from __future__ import annotations

from typing import Final, Protocol


class Claims(Protocol):
    """Reserves topic names, if several shards share one set of names."""

    def claim(self, full_name: str) -> None:
        """Reserve the name of a topic before it is created. Reserving it again has no effect.

        Raises Busy(BUSY) if another broker has reserved the name, Unavailable(STORAGE_FAILED).
        """

    def release(self, full_name: str) -> None:
        """Release the name of a deleted topic. The deletion must be durable, so that no restart restores the topic."""


class Alone:
    """The ``Claims`` of a broker that shares topic names with no other broker: every claim succeeds."""

    def claim(self, full_name: str) -> None:
        pass

    def release(self, full_name: str) -> None:
        pass


ALONE: Final[Claims] = Alone()
