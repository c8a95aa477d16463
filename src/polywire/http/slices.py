"""Run long work on the event loop in slices of a few milliseconds, so that other connections are served in between."""

from __future__ import annotations

import asyncio
from time import thread_time
from typing import Final

SLICE_S: Final = 0.003  # seconds of processor time per slice


class Slices:
    """The time slices of a long task. After each short step, the task checks ``is_over`` and, if it is true, awaits
    ``rest``.

    ``_end``: processor time of the thread at which the slice ends.
    """

    def __init__(self) -> None:
        self._end = thread_time() + SLICE_S
        self.count = 1

    @property
    def is_over(self) -> bool:
        """Whether the slice is used up."""
        return thread_time() >= self._end

    async def rest(self) -> None:
        """Let other tasks run, then start a new slice."""
        await asyncio.sleep(0)
        self._end = thread_time() + SLICE_S
        self.count += 1
