"""Cold reads: pieces of segments read past the page cache into reused memory, once for all who ask, and one ahead of who goes on.

Filling the page cache costs up to 2.7 CPU seconds per GB where its memory is fresh (design §4); a direct read into memory that is already
there costs next to nothing, and runs at the disk's speed.

Promises: at most ``WINDOWS_MAX`` windows are kept; a window's memory is used again only when nobody views it; the loop never waits.
Must not know: partitions, who asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from polywire.errors import BrokerError
from polywire.log.segment import Segment
from polywire.log.worker import Worker
from polywire.records.arena import Arena
from polywire.store.base import BLOCK_BYTES, BlobMissing

WINDOW_BYTES: Final = 4 * 1024 * 1024  # most of one window: what a FETCH frame carries
WINDOWS_MAX: Final = 12  # some 60 MiB: enough for the window being sent and the one ahead of several readers
PIECES_MAX: Final = 32  # segments of one window: many small runs make one read, within bounds
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

    def __init__(self, pieces: Sequence[tuple[memoryview, int]]) -> None:
        """pieces: bytes of a segment, and the offset after the last record of its run."""
        self.pieces: Final = pieces


class ColdReads:
    """Guards: a window is read once, however many ask for it while it is under way."""

    __slots__ = ("_arena", "_windows", "_worker")

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._arena = Arena(block_bytes=_whole_blocks(BLOCK_ROOM), blocks_max=WINDOWS_MAX + 4)
        self._windows: OrderedDict[Key, Window | list[Told]] = OrderedDict()

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
        pieces = []
        for (segment, start, stop), room in zip(places, rooms, strict=True):
            piece = segment.read_into(block[:room], start, stop)
            pieces.append((piece, segment.run(partition).next_offset))
            block = block[room:]
        return Window(pieces)


def _whole_blocks(size: int) -> int:
    """The size rounded up to blocks of the disk, so that what follows begins on one."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES
