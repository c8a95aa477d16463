"""Scrub: read every segment once per period (a week by default), and report damage before a client reads it.

It reads at a steady pace, one piece at a time, in a thread. It bypasses the page cache and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import structlog

from polywire.errors import BrokerError
from polywire.log.base import Loop
from polywire.log.segments.segment import Segment
from polywire.log.segments.segment_set import SegmentSet
from polywire.log.worker import MakeWorker
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.store.base import BLOCK_BYTES, CHUNK_BYTES, BlobMissing, aligned_buffer

HOUR_S: Final = 3600.0
PAUSE_S_MIN: Final = 0.05  # seconds between two pieces of 4 MiB: limits the scrub to 80 MB/s and a tenth of a core
PAUSE_S_MAX: Final = 600.0  # longest pause, because an empty log may fill up meanwhile

logger: Final = structlog.get_logger("polywire.log")


class Scrub:
    """Verifies the checksums of all segments in a thread, again and again. Removed segments are skipped.

    Args:
        hours: duration of a pass; 0 disables scrubbing.
        token: function that returns a given number of random bytes.
    """

    __slots__ = ("_block", "_hours", "_loop", "_pieces", "_segments", "_stopped", "_token", "_worker", "passes")

    def __init__(
        self,
        segments: SegmentSet,
        loop: Loop,
        *,
        hours: float,
        make_worker: MakeWorker,
        token: Callable[[int], bytes],
    ) -> None:
        self._token = token
        self._segments = segments
        self._loop = loop
        self._hours = hours
        self._worker = make_worker("scrub", loop)
        self._pieces: Iterator[None] | None = None
        self._block: memoryview | None = None
        self._stopped = False
        self.passes = 0

    def start(self) -> None:
        if self._hours > 0:
            self._loop.call_later(self._pause(), self.step)

    def _pause(self) -> float:
        """Return the seconds until the next read, so that a pass takes the configured time."""
        size = sum(sealed.live_bytes for sealed in self._segments.by_location.values())
        pause = self._hours * HOUR_S * CHUNK_BYTES / max(size, 1)
        return min(max(pause, PAUSE_S_MIN), PAUSE_S_MAX)

    def step(self) -> None:
        """Verify the next part of a segment."""
        if self._stopped:
            return
        if self._pieces is None:
            segments = [sealed.segment for sealed in self._segments.by_location.values()]
            number = int.from_bytes(self._token(8), "little")
            # start at a random segment, so that a broker that restarts often still covers all segments in time
            begin = number % (len(segments) + 1)
            self._pieces = self._pass(segments[begin:] + segments[:begin])
        self._worker.run(partial(next, self._pieces, True), self._stepped)

    def _stepped(self, ended: bool | BrokerError | None) -> None:
        if ended is not None:  # at the end of the pass, or after an error
            self._pieces = self._block = None
            self.passes += 1
        if not self._stopped:
            self._loop.call_later(self._pause(), self.step)

    def _pass(self, segments: list[Segment]) -> Iterator[None]:
        """Verify one part of a segment per step, in the thread. Damage is logged."""
        self._block = block = aligned_buffer(BATCH_BYTES_MAX + CHUNK_BYTES + 2 * BLOCK_BYTES)
        for segment in segments:
            yield from self._segment(segment, block)

    def _segment(self, segment: Segment, block: memoryview) -> Iterator[None]:
        try:
            for partition in [run.partition for run in segment.info if not run.token]:
                for start, stop in segment.windows(partition, CHUNK_BYTES):
                    segment.verify_uncached(block, partition, start, stop)
                    yield None
        except BlobMissing:
            return
        except BrokerError as error:  # the index itself is unreadable: continue with the next segment
            logger.error("stored segment cannot be verified", segment=segment.name, error=str(error))

    def stop(self) -> None:
        """Finish the current read and stop the thread."""
        self._stopped = True
        self._worker.stop()
