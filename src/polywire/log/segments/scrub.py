"""The scrub: reads every sealed segment once in so many hours and notes what is damaged, before somebody needs it.

Promises: a steady pace, one piece at a time, in a thread of its own and past the page cache; nothing is changed. Must not know: who reads,
what is done about damage.
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
PAUSE_S_MIN: Final = (
    0.05  # between two pieces of 4 MiB: at most 80 MB/s and a tenth of a core, whatever period was asked for
)
PAUSE_S_MAX: Final = 600.0  # a log that is empty now may hold much in a while

logger: Final = structlog.get_logger("polywire.log")


class Scrub:
    """One pass after the other. Guards: one piece is read at a time; segments that go meanwhile are passed over."""

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
        """hours: of one pass; 0 for none at all. token: gives so many random bytes."""
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
        """Begin."""
        if self._hours > 0:
            self._loop.call_later(self._pause(), self.step)

    def _pause(self) -> float:
        """Until the next piece, so that all of them take the hours given."""
        size = sum(sealed.live_bytes for sealed in self._segments.by_location.values())
        pause = self._hours * HOUR_S * CHUNK_BYTES / max(size, 1)
        return min(max(pause, PAUSE_S_MIN), PAUSE_S_MAX)

    def step(self) -> None:
        """Verify the next piece."""
        if self._stopped:
            return
        if self._pieces is None:
            segments = [sealed.segment for sealed in self._segments.by_location.values()]
            number = int.from_bytes(self._token(8), "little")
            begin = number % (len(segments) + 1)  # who is often started anew comes to all of them in time
            self._pieces = self._pass(segments[begin:] + segments[:begin])
        self._worker.run(partial(next, self._pieces, True), self._stepped)

    def _stepped(self, ended: bool | BrokerError | None) -> None:
        if ended is not None:  # by its end or an error
            self._pieces = self._block = None
            self.passes += 1
        if not self._stopped:
            self._loop.call_later(self._pause(), self.step)

    def _pass(self, segments: list[Segment]) -> Iterator[None]:
        """In the thread: verifies one piece per step; what is damaged is noted by the segment."""
        self._block = block = aligned_buffer(BATCH_BYTES_MAX + CHUNK_BYTES + 2 * BLOCK_BYTES)
        for segment in segments:
            yield from self._segment(segment, block)

    def _segment(self, segment: Segment, block: memoryview) -> Iterator[None]:
        try:
            for partition in [run.partition for run in segment.info if not run.token]:
                for start, stop in segment.windows(partition, CHUNK_BYTES):
                    segment.verify_past(block, partition, start, stop)
                    yield None
        except BlobMissing:
            return
        except BrokerError as error:  # not even the index can be read: the next segment is no worse for it
            logger.error("stored segment cannot be verified", segment=segment.name, error=str(error))

    def stop(self) -> None:
        """Finish the piece at hand and end the thread."""
        self._stopped = True
        self._worker.stop()
