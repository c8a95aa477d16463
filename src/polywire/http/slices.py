"""Wide pages made in slices: whoever gathers much lets others have the loop in between.

Promises: between two breaks no more than a few milliseconds pass, as long as single steps are short. Must not know: what is gathered.
"""

from __future__ import annotations

import asyncio
from time import thread_time
from typing import Final

SLICE_S: Final = 0.003


class Slices:
    """Invariant: ``_end`` is the processor time at which the slice in hand is over."""

    def __init__(self) -> None:
        self._end = thread_time() + SLICE_S
        self.count = 1

    @property
    def is_over(self) -> bool:
        """Whether it is others' turn: ``rest`` then."""
        return thread_time() >= self._end

    async def rest(self) -> None:
        """Let others have the loop."""
        await asyncio.sleep(0)
        self._end = thread_time() + SLICE_S
        self.count += 1
