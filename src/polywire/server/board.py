"""What the processes of one data directory tell each other in memory that they share.

Promises: each writes its own lines only, but for the last, which all do. Must not know: what they do with it.
"""

from __future__ import annotations

import mmap
from enum import IntEnum
from typing import Final

_WORDS: Final = 2  # of each process: how far it is, how many topics it has
_WORD_BYTES: Final = 8


class Stage(IntEnum):
    """How far a process has come since the first of its shard began."""

    STARTING = 0
    RECOVERED = 1
    """The names of its topics are known to the others."""
    SERVING = 2


class Board:
    """Made before the processes are, which inherit it. Guards: a stage never goes back, not even when a process is started again."""

    __slots__ = ("_words", "count")

    def __init__(self, count: int) -> None:
        self.count: Final = count
        self._words: Final = memoryview(mmap.mmap(-1, (count * _WORDS + 1) * _WORD_BYTES)).cast("q")

    def reach(self, shard: int, stage: Stage) -> None:
        """A process has come so far."""
        self._words[shard * _WORDS] = max(self._words[shard * _WORDS], stage)

    def all_have(self, stage: Stage) -> bool:
        """Whether every process has come so far."""
        return all(self._words[shard * _WORDS] >= stage for shard in range(self.count))

    def set_topics(self, shard: int, count: int) -> None:
        """A shard has so many topics."""
        self._words[shard * _WORDS + 1] = count

    def fewest_topics(self) -> int:
        """The shard that has the fewest topics, the first of several."""
        return min(range(self.count), key=lambda shard: self._words[shard * _WORDS + 1])

    def may_hand_over(self, now_s: float, pause_s: float) -> bool:
        """Whether no process has handed its shard to another machine for so long; then this one does. Two that ask at the same moment may
        both be told so: it is about clients that have to find their way, a few at a time."""
        now_us = int(now_s * 1_000_000)
        if self._words[-1] and now_us - self._words[-1] < pause_s * 1_000_000:
            return False
        self._words[-1] = now_us
        return True
