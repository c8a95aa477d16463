"""Who may give a topic its name, where several brokers answer for one set of names (decision 0072).

Promises: a broker that is alone asks nobody. Must not know: other brokers, where names are kept.
"""

from __future__ import annotations

from typing import Final, Protocol


class Claims(Protocol):
    """Names of topics that brokers share."""

    def claim(self, full_name: str) -> None:
        """A topic of this name is about to begin here; whoever has claimed it before claims it again. Raises Busy(BUSY) where another broker
        was quicker, Unavailable(STORAGE_FAILED)."""

    def release(self, full_name: str) -> None:
        """A topic of this name has ended here: others may have the name once nothing can bring it back."""


class Alone:
    """The claims of a broker that is the only one."""

    def claim(self, full_name: str) -> None:
        """Nobody else could have it."""

    def release(self, full_name: str) -> None:
        """Nobody else waits for it."""


ALONE: Final[Claims] = Alone()
