"""Reads of history: pieces of segments read past the page cache into reused memory, once for all who ask, and one ahead of who goes on.

Filling the page cache costs up to 2.7 CPU seconds per GB where its memory is fresh (concepts: storage#what-it-costs); a direct
read into memory that is already there costs next to nothing, and runs at the disk's speed.

What memory holds, because it was sealed last or the page cache has it, is read on the loop: 50 us a MiB, and whoever spells it for a peer
finds it in the processor's cache.

Promises: at most ``WINDOWS_MAX`` windows and ``GLANCES_MAX`` glances are kept; their memory is used again only when nobody views it; what
they hold was verified when it was read, and is nobody else's; the loop never waits. Must not know: partitions, who asks.
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
from polywire.records.arena import Arena
from polywire.records.batch import check_body
from polywire.store.base import BLOCK_BYTES, BlobMissing

WINDOW_BYTES: Final = 4 * 1024 * 1024  # most of one window: what a FETCH frame carries
WINDOWS_MAX: Final = 6  # some 30 MiB: enough for the window being sent and the one ahead of several readers
PIECES_MAX: Final = 32  # segments of one window: many small runs make one read, within bounds
GLANCE_BYTES_MAX: Final = 6 * 1024 * 1024  # read on the loop: 0.3 ms, and 0.6 ms more where it must be verified
GLANCE_BYTES_AHEAD: Final = 512 * 1024  # read on the loop at least, for who goes through history
GLANCES_MAX: Final = 3  # kept for who goes on, or comes next
GLANCE_BLOCK_BYTES: Final = 1024 * 1024  # of memory for most of them; longer ones take that of windows
GLANCE_BLOCKS_MAX: Final = 16  # peers that are slow to take what was read hold on to it
BODIES_BYTES_MAX: Final = 32 * 1024 * 1024  # staged bodies kept: two of the largest
READERS_MAX: Final = 8  # reads remembered of a partition: as many readers as go through its history side by side
PARTITIONS_READ_MAX: Final = 256  # of which reads are remembered
STOPS_MAX: Final = (
    WINDOWS_MAX + GLANCES_MAX
)  # one a window: who reads a window beside somebody else looks for where it begins
PIECE_MARGIN_BYTES: Final = (
    2 * BLOCK_BYTES
)  # a piece is read from the block it begins in to the end of the block it ends in
WINDOW_BLOCK_BYTES: Final = (
    WINDOW_BYTES + 2 * 1024 * 1024 + PIECES_MAX * PIECE_MARGIN_BYTES
)  # the strides at both ends may add two large batches' worth

Key = tuple[int, int]
"""(incarnation, offset) that a window was asked for."""


class Window:
    """Stored batches of one partition from the offset ``first`` to the offset ``end``, in pieces of consecutive segments, in order.

    was_waited_for: the disk was, so what follows is better asked for before somebody needs it.
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
        """Whether damage stands where a record was: who asks for that one is better served by reading once more, for a disk that fails to
        read may do so once."""
        return any(damage.first_offset <= offset < damage.next_offset for damage in self._damages)

    def is_nearly_over(self, offset: int) -> bool:
        """Whether little lies behind an offset: who goes on there is better served by a window that begins there."""
        return (self.end - offset) * 8 <= self.end - self.first


class Stop(NamedTuple):
    """Where a read ended within a window."""

    window: Window
    position: PiecePosition


class ColdReads:
    """Guards: a window is read once, however many ask for it while it is under way."""

    __slots__ = (
        "_arena",
        "_asked",
        "_bodies",
        "_glances",
        "_glances_arena",
        "_readers",
        "_stops",
        "_windows",
        "_worker",
    )

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._arena = Arena(block_bytes=_whole_blocks(WINDOW_BLOCK_BYTES), blocks_max=WINDOWS_MAX + GLANCES_MAX)
        self._windows: OrderedDict[Key, Window | list[Completion[Window | None]]] = OrderedDict()
        self._asked: Final[dict[Key, Sequence[Segment]]] = {}
        self._glances: OrderedDict[Key, Window] = OrderedDict()
        self._glances_arena = Arena(block_bytes=GLANCE_BLOCK_BYTES, blocks_max=GLANCE_BLOCKS_MAX)
        self._bodies: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._readers: OrderedDict[int, deque[tuple[int, int]]] = OrderedDict()
        self._stops: OrderedDict[Key, Stop] = OrderedDict()

    # What waits for no disk

    def glance(
        self, segment: Segment, partition: int, offset: int, bytes_max: int, end: int, *, more: bool
    ) -> Window | None:
        """What a read of up to ``bytes_max`` bytes and the offset ``end`` gets of one segment when memory has it and it is not
        much, else None. With ``more``, what lies behind that is wanted next."""
        span = segment.locate_now(partition, offset, max(bytes_max, 1), end)
        if span is not None and more and span[1] - span[0] < GLANCE_BYTES_AHEAD:
            span = segment.locate_now(partition, offset, GLANCE_BYTES_AHEAD)
        if span is None or span[1] - span[0] > GLANCE_BYTES_MAX:
            return None
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
        """A staged batch when it is kept or in memory, else None."""
        key = (segment.name, start)
        body = self._bodies.get(key)
        if body is not None:
            self._bodies.move_to_end(key)
        elif stop - start <= GLANCE_BYTES_MAX:
            body = segment.read_now(memoryview(bytearray(stop - start)), start, stop)
            if body is not None and not check_body(body, 0):
                return None  # it is read again by who may wait: it may be no more than a copy that is damaged
            if body is not None:
                self.keep_body(segment, start, body)
        return body

    def keep_body(self, segment: Segment, start: int, body: memoryview) -> None:
        """Keep a staged batch for who reads it next."""
        self._bodies[segment.name, start] = body
        size = sum(map(len, self._bodies.values()))
        while size > BODIES_BYTES_MAX and len(self._bodies) > 1:
            size -= len(self._bodies.popitem(last=False)[1])

    def forget_body(self, segment: Segment, start: int) -> None:
        """A staged batch is not what it was: whoever asks for it next has it read once more."""
        self._bodies.pop((segment.name, start), None)

    # Who goes through history

    def goes_on(self, partition: int, offset: int) -> bool:
        """Whether a read that begins there follows another: who reads from there on will want what comes next too."""
        return any(first < offset <= end for first, end in self._readers.get(partition, ()))

    def was_read(self, partition: int, first: int, end: int, stop: Stop | None) -> None:
        """Somebody was given what lies from one offset to another; a peer may take less of it, and goes on before its end. With
        ``stop``, what comes next is at hand there."""
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
        """Where a read ended that this one follows, if that window is still kept, and no damage stands there."""
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
        """Of the windows at hand that hold this offset, and no damage there, the one that reaches furthest."""
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

    def ask(
        self,
        key: Key,
        segments: Sequence[Segment],
        completed: Completion[Window | None] | None,
        bytes_max: int,
        end: int = NO_END,
    ) -> None:
        """Read a window of up to ``bytes_max`` bytes and the offset ``end``; ``completed`` is called on the loop with it, with the
        error, or with None when a segment was removed before it was read: ask again for what there is now.
        segments: those that hold the read, in order. Whoever asks for the same offset meanwhile gets the same window."""
        known = self._windows.get(key)
        waiting = known if isinstance(known, list) else []
        if completed is not None:
            waiting.append(completed)
        if not isinstance(known, list):
            self._windows[key] = waiting
            self._asked[key] = segments
            self._worker.run(partial(self._read, key, segments, bytes_max, end), partial(self._arrived, key, waiting))

    def asked(self, key: Key) -> Sequence[Segment] | None:
        """The segments of which a window is being read that begins there: who asks for it meanwhile gets what comes of these, although
        others may have replaced them."""
        return self._asked.get(key)

    def is_under_way(self, key: Key) -> bool:
        """Whether a window was asked for that begins there, and has not come yet."""
        return isinstance(self._windows.get(key), list)

    def begins_within(self, partition: int, first: int, last: int) -> bool:
        """Whether a window begins at one of the offsets from ``first`` to ``last``, or one that does was asked for."""
        return any(key[0] == partition and first <= key[1] <= last for key in self._windows)

    def forget(self, incarnation: int) -> None:
        """What was read of a partition is not what it holds any more; what is being read is for those who asked for it before."""
        for key in [key for key in self._windows if key[0] == incarnation]:
            del self._windows[key]
            self._asked.pop(key, None)
        for key in [key for key in self._glances if key[0] == incarnation]:
            del self._glances[key]
        for key in [key for key in self._stops if key[0] == incarnation]:
            del self._stops[key]

    def _arrived(self, key: Key, waiting: list[Completion[Window | None]], window: Window | BrokerError | None) -> None:
        if self._windows.get(key) is waiting:  # else what it holds may be gone since
            del self._windows[key], self._asked[key]
            if isinstance(window, Window):
                self._windows[key] = window
                self._shrink()
        for completed in waiting:
            completed(window)

    def _shrink(self) -> None:
        """Forget the windows used longest ago; those under way are few, one a reader at most."""
        kept = [(key, found) for key, found in self._windows.items() if isinstance(found, Window)]
        for key, window in kept[:-WINDOWS_MAX]:
            del self._windows[key]
            self._forget_stops(window)

    def _forget_stops(self, window: Window) -> None:
        """A window went: who stopped in it must not keep its memory."""
        for key in [key for key, stop in self._stops.items() if stop.window is window]:
            del self._stops[key]

    def _read(self, key: Key, segments: Sequence[Segment], bytes_max: int, end: int) -> Window | None:
        """In the reader's thread; None when a segment went meanwhile. Raises Unavailable, Corrupt."""
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
    """The size rounded up to blocks of the disk, so that what follows begins on one."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
