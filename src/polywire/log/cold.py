"""Cold reads: pieces of segments read past the page cache into reused memory, once for all who ask, and one ahead of who goes on.

Filling the page cache costs up to 2.7 CPU seconds per GB where its memory is fresh (design §4); a direct read into memory that is already
there costs next to nothing, and runs at the disk's speed.

Small reads of what the page cache holds are answered on the loop, from strides that are kept as well.

Promises: at most ``WINDOWS_MAX`` windows and ``STRIDES_MAX`` strides are kept; their memory is used again only when nobody views it; what
they hold was verified when it was read, and is nobody else's; the loop never waits. Must not know: partitions, who asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from polywire.errors import BrokerError
from polywire.log.damage import Piece
from polywire.log.segment import Segment
from polywire.log.worker import Worker
from polywire.records.arena import Arena
from polywire.store.base import BLOCK_BYTES, BlobMissing

WINDOW_BYTES: Final = 4 * 1024 * 1024  # most of one window: what a FETCH frame carries
WINDOWS_MAX: Final = 12  # some 60 MiB: enough for the window being sent and the one ahead of several readers
PIECES_MAX: Final = 32  # segments of one window: many small runs make one read, within bounds
STRIDES_MAX: Final = 24  # 12 MiB: some 24 small readers of history at different places
STRIDES_BYTES_MAX: Final = (
    512 * 1024
)  # read and verified on the loop in less than 0.2 ms; longer reads go to the thread
BODIES_BYTES_MAX: Final = 32 * 1024 * 1024  # staged bodies kept: two of the largest
PIECE_ROOM: Final = 2 * BLOCK_BYTES  # a piece is read from the block it begins in to the end of the block it ends in
BLOCK_ROOM: Final = (
    WINDOW_BYTES + 512 * 1024 + PIECES_MAX * PIECE_ROOM
)  # the strides at both ends may add two large batches' worth

Key = tuple[int, int, int]
"""(incarnation, offset, most bytes) of the read a window answers."""

Told = Callable[["Window | None", BrokerError | None], None]
"""Gets the window, or the error, or neither when a segment was removed before it was read: ask again for what there is now."""


class Window:
    """Stored batches of one partition from an offset on: whole strides of consecutive segments, in order."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces: Final = pieces


class ColdReads:
    """Guards: a window is read once, however many ask for it while it is under way."""

    __slots__ = ("_arena", "_bodies", "_strides", "_strides_arena", "_windows", "_worker")

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._arena = Arena(block_bytes=_whole_blocks(BLOCK_ROOM), blocks_max=WINDOWS_MAX + 4)
        self._windows: OrderedDict[Key, Window | list[Told]] = OrderedDict()
        self._strides_arena = Arena(block_bytes=STRIDES_BYTES_MAX, blocks_max=STRIDES_MAX + 8)
        self._strides: OrderedDict[tuple[str, int, int, int], Window] = OrderedDict()
        self._bodies: OrderedDict[tuple[str, int], memoryview] = OrderedDict()

    # What waits for no disk

    def now(self, segment: Segment, partition: int, offset: int, bytes_max: int) -> Window | None:
        """What a small read gets of one segment when its strides are kept or in the page cache, else None."""
        place = segment.locate_now(partition, offset, min(max(bytes_max, 1), STRIDES_BYTES_MAX))
        if place is None or place[1] - place[0] > STRIDES_BYTES_MAX:
            return None
        key = (segment.name, partition, *place)
        window = self._strides.get(key)
        if window is not None:
            self._strides.move_to_end(key)
            return window
        pieces = segment.pieces_now(self._strides_arena.take(place[1] - place[0]), partition, *place)
        if pieces is None:
            return None
        window = self._strides[key] = Window(pieces)
        if len(self._strides) > STRIDES_MAX:
            self._strides.popitem(last=False)
        return window

    def body(self, segment: Segment, start: int, stop: int) -> memoryview | None:
        """A staged batch when it is kept or in the page cache, else None."""
        key = (segment.name, start)
        body = self._bodies.get(key)
        if body is not None:
            self._bodies.move_to_end(key)
        elif stop - start <= STRIDES_BYTES_MAX:
            body = segment.read_now(memoryview(bytearray(stop - start)), start, stop)
            if body is not None:
                self.keep_body(segment, start, body)
        return body

    def keep_body(self, segment: Segment, start: int, body: memoryview) -> None:
        """Keep a staged batch for who reads it next."""
        self._bodies[segment.name, start] = body
        size = sum(map(len, self._bodies.values()))
        while size > BODIES_BYTES_MAX and len(self._bodies) > 1:
            size -= len(self._bodies.popitem(last=False)[1])

    # Windows

    def find(self, key: Key) -> Window | None:
        """The window of this read if it is at hand."""
        found = self._windows.get(key)
        if not isinstance(found, Window):
            return None
        self._windows.move_to_end(key)
        return found

    def ask(self, key: Key, segments: Sequence[Segment], told: Told | None) -> None:
        """Read a window; ``told`` is called on the loop with it, or with the error. segments: those that hold the read, in order."""
        known = self._windows.get(key)
        waiting = known if isinstance(known, list) else []
        if told is not None:
            waiting.append(told)
        if known is None:
            self._windows[key] = waiting
            self._worker.run(partial(self._read, key, segments), partial(self._arrived, key))

    def forget(self, incarnation: int) -> None:
        """What was read of a partition is not what it holds any more."""
        for key in [key for key, found in self._windows.items() if key[0] == incarnation and isinstance(found, Window)]:
            del self._windows[key]
        for place in [place for place in self._strides if place[1] == incarnation]:
            del self._strides[place]

    def _arrived(self, key: Key, window: Window | None, error: BrokerError | None) -> None:
        waiting = self._windows.pop(key)
        assert isinstance(waiting, list), "a window arrives once"
        if window is not None:
            self._windows[key] = window
            self._shrink()
        for told in waiting:
            told(window, error)

    def _shrink(self) -> None:
        """Forget the windows used longest ago; those under way are few, one a reader at most."""
        for key in [key for key, found in self._windows.items() if isinstance(found, Window)][:-WINDOWS_MAX]:
            del self._windows[key]

    def _read(self, key: Key, segments: Sequence[Segment]) -> Window | None:
        """In the reader's thread; None when a segment went meanwhile. Raises Unavailable, Corrupt."""
        try:
            return self._read_all(key, segments)
        except BlobMissing:
            return None

    def _read_all(self, key: Key, segments: Sequence[Segment]) -> Window:
        partition, offset, room = key
        room = min(max(room, 1), WINDOW_BYTES)
        places = []
        for segment in segments[:PIECES_MAX]:
            start, stop = segment.locate(partition, offset, room)
            places.append((segment, start, stop))
            offset, room = segment.run(partition).next_offset, room - (stop - start)
            if room <= 0:
                break
        rooms = [_whole_blocks(stop - start + PIECE_ROOM) for _, start, stop in places]
        block = self._arena.take(sum(rooms))
        pieces: list[Piece] = []
        for (segment, start, stop), room in zip(places, rooms, strict=True):
            pieces += segment.pieces(block[:room], partition, start, stop)
            block = block[room:]
        return Window(pieces)


def _whole_blocks(size: int) -> int:
    """The size rounded up to blocks of the disk, so that what follows begins on one."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
