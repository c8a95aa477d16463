"""Read sealed segments: once for all readers that wait for the same data, and ahead of sequential readers.

Filling the page cache costs up to 2.7 CPU seconds per GB if its memory is new (decision 0104). Direct
reads into reused memory cost almost nothing and run at the disk's speed. So a thread reads data from disk with direct
I/O, in pieces of up to 4 MiB, *windows*.

Recently sealed data, and data in the page cache, is already in memory. It is copied in smaller pieces, *glances*, on
the event loop, at 50 µs per MiB.

* At most ``WINDOWS_MAX`` windows and ``GLANCES_MAX`` glances are retained. Their memory is reused when no reader uses
  it.
* The content of windows and glances was verified when it was read.
* The event loop never waits for a disk.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.log.segments.damage import Piece, PiecePosition
from polywire.log.segments.search import NO_END
from polywire.log.segments.segment import Segment
from polywire.log.worker import Worker
from polywire.records.allocation import Arena
from polywire.records.batch import check_body
from polywire.store.base import BLOCK_BYTES, BlobMissing

WINDOW_BYTES: Final = 4 * 1024 * 1024  # largest window: the size of one FETCH frame
WINDOWS_MAX: Final = 6  # some 30 MiB: the window being sent and the one ahead, for several readers
PIECES_MAX: Final = 32  # segments in one window, so that many small runs need only one read
# maximum size of a read on the event loop, which takes 0.3 ms, and 0.6 ms more if the data must be verified
GLANCE_BYTES_MAX: Final = 6 * 1024 * 1024
GLANCE_BYTES_AHEAD: Final = 512 * 1024  # minimum to read on the event loop for sequential readers
GLANCES_MAX: Final = 3  # retained for readers that continue there, or other readers of the same data
GLANCE_BLOCK_BYTES: Final = 1024 * 1024  # memory of most glances; longer ones use the memory of a window
GLANCE_BLOCKS_MAX: Final = 16  # slow clients hold the memory of their responses
BODIES_BYTES_MAX: Final = 32 * 1024 * 1024  # retained bodies of staged batches: two of the largest size
READERS_MAX: Final = 8  # remembered reads of a partition, so that this many readers can read old data at the same time
PARTITIONS_READ_MAX: Final = 256  # partitions with remembered reads
RESTS_UNUSED: Final = 6  # the log calls ``rest`` every 5 s
STOPS_MAX: Final = WINDOWS_MAX + GLANCES_MAX  # remembered ends of reads: one per window or glance
PIECE_MARGIN_BYTES: Final = (
    2 * BLOCK_BYTES
)  # a read covers whole disk blocks, from the first to the last one that contains the piece
WINDOW_BLOCK_BYTES: Final = (
    WINDOW_BYTES + 2 * 1024 * 1024 + PIECES_MAX * PIECE_MARGIN_BYTES
)  # the index strides at both ends may add two large batches

Key = tuple[int, int]
"""(incarnation, offset) at which a window was requested."""


class Window:
    """A read buffer: verified batches of one partition with offsets ``first`` to ``end``.

    Attributes:
        pieces: the batches, as parts of consecutive segments, in offset order.
        was_waited_for: a reader had to wait for the disk. The next buffer should be requested earlier.
    """

    __slots__ = ("_damages", "end", "first", "partition", "pieces", "was_waited_for")

    def __init__(self, partition: int, first: int, end: int, pieces: Sequence[Piece], *, was_waited_for: bool) -> None:
        self.partition: Final = partition
        self.first: Final = first
        self.end: Final = end
        self.pieces: Final = pieces
        self.was_waited_for: Final = was_waited_for
        self._damages = [piece.damage for piece in pieces if piece.damage is not None]

    def is_damaged_at(self, offset: int) -> bool:
        """Return whether the record at this offset was damaged when the buffer was read."""
        return any(damage.first_offset <= offset < damage.next_offset for damage in self._damages)

    def is_nearly_over(self, offset: int) -> bool:
        """Return whether so little data follows an offset that a new read buffer should begin there."""
        return (self.end - offset) * 8 <= self.end - self.first


class Stop(NamedTuple):
    """The position in a read buffer at which a read ended."""

    window: Window
    position: PiecePosition


class ColdReads:
    """Reads of segments for all partitions, with a cache of read buffers (``Window``) for sequential readers."""

    __slots__ = (
        "_arena",
        "_asked",
        "_bodies",
        "_glances",
        "_glances_arena",
        "_readers",
        "_rests",
        "_stops",
        "_windows",
        "_worker",
    )

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._arena = Arena(block_bytes=_whole_blocks(WINDOW_BLOCK_BYTES), blocks_max=WINDOWS_MAX + GLANCES_MAX)
        # a list holds the completions that wait for a window being read
        self._windows: OrderedDict[Key, Window | list[Completion[Window | None]]] = OrderedDict()
        # segments from which each window is being read
        self._asked: Final[dict[Key, Sequence[Segment]]] = {}
        self._glances: OrderedDict[Key, Window] = OrderedDict()
        self._glances_arena = Arena(block_bytes=GLANCE_BLOCK_BYTES, blocks_max=GLANCE_BLOCKS_MAX)
        self._bodies: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._readers: OrderedDict[int, deque[tuple[int, int]]] = OrderedDict()
        self._stops: OrderedDict[Key, Stop] = OrderedDict()
        self._rests = 0
        """Number of calls of ``rest`` since the last read."""

    def rest(self) -> None:
        """Free all memory if nothing was read since ``RESTS_UNUSED`` calls. Buffers being read stay."""
        self._rests += 1
        if self._rests < RESTS_UNUSED:
            return
        for key in [key for key, found in self._windows.items() if isinstance(found, Window)]:
            del self._windows[key]
        self._glances.clear()
        self._stops.clear()
        self._bodies.clear()
        self._arena.clear()
        self._glances_arena.clear()

    # Without waiting for a disk

    def glance(
        self, segment: Segment, partition: int, offset: int, bytes_max: int, end: int, *, more: bool
    ) -> Window | None:
        """Read up to ``bytes_max`` bytes of one segment, below offset ``end``, if that needs no disk access.

        Return None if disk access is needed, or if there are too many bytes.

        Args:
            more: the reader is sequential, so read ahead.
        """
        span = segment.locate_now(partition, offset, max(bytes_max, 1), end)
        if span is not None and more and span[1] - span[0] < GLANCE_BYTES_AHEAD:
            span = segment.locate_now(partition, offset, GLANCE_BYTES_AHEAD)
        if span is None or span[1] - span[0] > GLANCE_BYTES_MAX:
            return None
        self._rests = 0
        start, stop = span
        arena = self._glances_arena if stop - start <= GLANCE_BLOCK_BYTES else self._arena
        pieces = segment.pieces_now(arena.take(stop - start), partition, start, stop)
        if pieces is None:
            return None
        reached = segment.offset_at(partition, stop)
        window = self._glances[partition, offset] = Window(partition, offset, reached, pieces, was_waited_for=False)
        if len(self._glances) > GLANCES_MAX:
            self._forget_stops(self._glances.popitem(last=False)[1])
        return window

    def body(self, segment: Segment, start: int, stop: int) -> memoryview | None:
        """Return the body of a published batch if that needs no disk access, else None."""
        key = (segment.name, start)
        body = self._bodies.get(key)
        if body is not None:
            self._bodies.move_to_end(key)
        elif stop - start <= GLANCE_BYTES_MAX:
            body = segment.read_now(memoryview(bytearray(stop - start)), start, stop)
            if body is not None and not check_body(body, 0):
                return None  # a damaged copy is read again where waiting for the disk is allowed
            if body is not None:
                self.keep_body(segment, start, body)
        return body

    def keep_body(self, segment: Segment, start: int, body: memoryview) -> None:
        """Cache the body of a published batch for its next reader."""
        self._rests = 0
        self._bodies[segment.name, start] = body
        size = sum(map(len, self._bodies.values()))
        while size > BODIES_BYTES_MAX and len(self._bodies) > 1:
            size -= len(self._bodies.popitem(last=False)[1])

    def forget_body(self, segment: Segment, start: int) -> None:
        """Drop a damaged body from the cache, so that its next reader reads it from disk."""
        self._bodies.pop((segment.name, start), None)

    # Sequential readers

    def is_sequential(self, partition: int, offset: int) -> bool:
        """Return whether a read at this offset continues an earlier one, and should read ahead."""
        return any(first < offset <= end for first, end in self._readers.get(partition, ()))

    def was_read(self, partition: int, first: int, end: int, stop: Stop | None) -> None:
        """Record that a read returned offsets ``first`` to ``end``.

        The client's next read may begin before ``end``, because it may consume less than it received.

        Args:
            stop: position in the read buffer after the returned data, None if the read reached the end of the buffer.
        """
        self._rests = 0
        reads = self._readers.get(partition)
        if reads is None:
            reads = self._readers[partition] = deque(maxlen=READERS_MAX)
            if len(self._readers) > PARTITIONS_READ_MAX:
                self._readers.popitem(last=False)
        reads.append((first, end))
        if stop is not None and not stop.window.is_nearly_over(end):
            self._stops[partition, end] = stop
            if len(self._stops) > STOPS_MAX:
                self._stops.popitem(last=False)

    def resume(self, partition: int, offset: int) -> Stop | None:
        """Return the position in a read buffer at which an earlier read ended, if a read at this offset continues it.

        Returns None if there is no such read, or if its buffer was evicted or is damaged at this offset.
        """
        stop = self._stops.pop((partition, offset), None)
        if stop is None or stop.window.is_damaged_at(offset):
            return None
        key = (partition, stop.window.first)
        for kept in (self._glances, self._windows):
            if kept.get(key) is stop.window:
                kept.move_to_end(key)
                return stop
        return None

    # Windows

    def find(self, partition: int, offset: int) -> Window | None:
        """Return a cached read buffer in which the record at this offset is intact.

        If there are several, return the one that ends last.
        """
        best: Window | None = None
        for window in chain(self._glances.values(), self._windows.values()):
            if (
                isinstance(window, Window)
                and window.partition == partition
                and window.first <= offset < window.end
                and (best is None or window.end > best.end)
                and not window.is_damaged_at(offset)
            ):
                best = window
        if best is not None:
            key = (partition, best.first)
            (self._glances if self._glances.get(key) is best else self._windows).move_to_end(key)
        return best

    def request(
        self,
        key: Key,
        segments: Sequence[Segment],
        completed: Completion[Window | None] | None,
        bytes_max: int,
        end: int = NO_END,
    ) -> None:
        """Read up to ``bytes_max`` bytes, below offset ``end``, into a buffer, in the reader's thread.

        Requests at the same offset share one buffer while it is being read.

        Args:
            segments: segments that contain the data, in order.
            completed: called on the loop with the buffer, an error, or None if a segment was removed before it was
                read. After None the caller must repeat the request.
        """
        self._rests = 0
        known = self._windows.get(key)
        waiting = known if isinstance(known, list) else []
        if completed is not None:
            waiting.append(completed)
        if not isinstance(known, list):
            self._windows[key] = waiting
            self._asked[key] = segments
            self._worker.run(partial(self._read, key, segments, bytes_max, end), partial(self._arrived, key, waiting))

    def requested(self, key: Key) -> Sequence[Segment] | None:
        """Return the segments from which a buffer at this key is being read, or None if none is being read."""
        return self._asked.get(key)

    def is_under_way(self, key: Key) -> bool:
        """Return whether a buffer at this key is being read."""
        return isinstance(self._windows.get(key), list)

    def begins_within(self, partition: int, first: int, last: int) -> bool:
        """Return whether a buffer that is cached or being read begins at an offset from ``first`` to ``last``."""
        return any(key[0] == partition and first <= key[1] <= last for key in self._windows)

    def forget(self, incarnation: int) -> None:
        """Drop the read buffers of a partition that has changed.

        A buffer that is being read is passed to its waiting readers but not cached.
        """
        for key in [key for key in self._windows if key[0] == incarnation]:
            del self._windows[key]
            self._asked.pop(key, None)
        for key in [key for key in self._glances if key[0] == incarnation]:
            del self._glances[key]
        for key in [key for key in self._stops if key[0] == incarnation]:
            del self._stops[key]

    def _arrived(self, key: Key, waiting: list[Completion[Window | None]], window: Window | BrokerError | None) -> None:
        if self._windows.get(key) is waiting:  # otherwise the partition has changed, and the content may be obsolete
            del self._windows[key], self._asked[key]
            if isinstance(window, Window):
                self._windows[key] = window
                self._shrink()
        for completed in waiting:
            completed(window)

    def _shrink(self) -> None:
        kept = [(key, found) for key, found in self._windows.items() if isinstance(found, Window)]
        for key, window in kept[:-WINDOWS_MAX]:
            del self._windows[key]
            self._forget_stops(window)

    def _forget_stops(self, window: Window) -> None:
        """Drop references to an evicted read buffer, so that its memory can be reused."""
        for key in [key for key, stop in self._stops.items() if stop.window is window]:
            del self._stops[key]

    def _read(self, key: Key, segments: Sequence[Segment], bytes_max: int, end: int) -> Window | None:
        """Read a buffer, in the reader's thread. Return None if a segment was removed meanwhile.

        Raises Unavailable or Corrupt.
        """
        try:
            return self._read_all(key, segments, bytes_max, end)
        except BlobMissing:
            return None

    def _read_all(self, key: Key, segments: Sequence[Segment], bytes_max: int, end: int) -> Window:
        partition, offset = key
        bytes_left = min(max(bytes_max, 1), WINDOW_BYTES)
        spans = []
        for segment in segments[:PIECES_MAX]:
            start, stop = segment.locate(partition, offset, bytes_left, end)
            spans.append((segment, start, stop))
            offset, bytes_left = segment.run(partition).next_offset, bytes_left - (stop - start)
            if bytes_left <= 0 or offset >= end:
                break
        sizes = [_whole_blocks(stop - start + PIECE_MARGIN_BYTES) for _, start, stop in spans]
        block = self._arena.take(sum(sizes))
        pieces: list[Piece] = []
        waited = False
        for (segment, start, stop), size in zip(spans, sizes, strict=True):
            found = segment.pieces_now(block[:size], partition, start, stop)
            waited = waited or found is None
            pieces += segment.pieces(block[:size], partition, start, stop) if found is None else found
            offset = segment.offset_at(partition, stop)
            block = block[size:]
        return Window(partition, key[1], offset, pieces, was_waited_for=waited)


def _whole_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
