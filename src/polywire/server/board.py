"""Memory that the processes of a broker share: how far each has started, and how many topics it has.

Each process writes only its own words, so no lock is needed. The last word is the time of the last handover; every
process may write it.
"""

from __future__ import annotations

import mmap
from enum import IntEnum
from typing import Final

_WORDS: Final = 2  # words of each process: its stage, and its number of topics
_WORD_BYTES: Final = 8


class Stage(IntEnum):
    """How far the process of a shard has started."""

    STARTING = 0
    RECOVERED = 1
    """The process has recovered its log and registered its topics, so other processes can find them."""
    SERVING = 2


class Board:
    """The shared memory. The parent process creates it, and its children inherit it.

    The stage of a shard never goes back, even if its process is restarted.
    """

    __slots__ = ("_words", "count")

    def __init__(self, count: int) -> None:
        self.count: Final = count
        self._words: Final = memoryview(mmap.mmap(-1, (count * _WORDS + 1) * _WORD_BYTES)).cast("q")

    def reach(self, shard: int, stage: Stage) -> None:
        self._words[shard * _WORDS] = max(self._words[shard * _WORDS], stage)

    def all_have(self, stage: Stage) -> bool:
        return all(self._words[shard * _WORDS] >= stage for shard in range(self.count))

    def set_topics(self, shard: int, count: int) -> None:
        self._words[shard * _WORDS + 1] = count

    def fewest_topics(self) -> int:
        """Return the shard with the fewest topics. If there are several, return the one with the lowest number."""
        return min(range(self.count), key=lambda shard: self._words[shard * _WORDS + 1])

    def may_hand_over(self, now_s: float, pause_s: float) -> bool:
        """Return whether this process may hand its shard to another machine.

        It may if no process has handed over a shard for ``pause_s`` seconds. Two processes that call this at the same
        moment can both get True. That is harmless: the pause only prevents that all clients reconnect at once.
        """
        now_us = int(now_s * 1_000_000)
        if self._words[-1] and now_us - self._words[-1] < pause_s * 1_000_000:
            return False
        self._words[-1] = now_us
        return True
