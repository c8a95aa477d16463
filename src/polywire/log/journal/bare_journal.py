"""The compiled base classes of the journal's files and of their syncer: the steps of every journal write."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import cython

from polywire.clock import Clock
from polywire.log.base import Loop
from polywire.log.journal.group import GROUP_BYTES_MAX
from polywire.log.settings import PAGE_BYTES
from polywire.store.files import Mapping, write_parts
from polywire.types import Buffer

Slot: TypeAlias = Any
"""``slots.Slot``, which this module must not import."""

IOV_MAX: Final = 1024  # maximum number of buffers in one vectored write on Linux and macOS


@cython.cclass
class BareJournal:
    """The compiled base class of ``FileJournal``."""

    if not cython.compiled:  # in the compiled module, bare_journal.pxd declares the fields
        __slots__ = ("current", "free", "position")

    def __init__(self) -> None:
        self.free: deque[Slot] = deque()
        self.current: Slot = None  # no file yet
        self.position = 0

    @property
    def capacity(self) -> int:
        """Free bytes in the current journal file."""
        return 0 if self.current is None else self.current.size - self.position

    def align(self) -> None:
        """Begin the next journal write on a new page, because the current page is being synced."""
        self.position = -(-self.position // PAGE_BYTES) * PAGE_BYTES

    def write(self, parts: Sequence[Buffer], size: int, sequence: int) -> int:
        """Write ``parts``, which must fit the current journal file, and return their position in it. Raises OSError."""
        slot = self.current
        start: cython.longlong = self.position
        count: cython.longlong = size
        assert slot is not None
        assert start + count <= slot.size, "a group never spans slots"
        assert count <= GROUP_BYTES_MAX, "recovery does not accept larger groups"
        if len(parts) > IOV_MAX or slot.file.write(parts, start) != count:
            _write_slowly(slot, parts, start)
        self.position = start + count
        slot.first = slot.first or sequence
        slot.last = sequence
        return start


def _write_slowly(slot: Slot, parts: Sequence[Buffer], position: int) -> None:
    """Write all parts in several calls. Needed after a short write, or if there are too many buffers for one call."""
    for start in range(0, len(parts), IOV_MAX):
        position = write_parts(slot.file, parts[start : start + IOV_MAX], position)


@cython.cclass
class Unsynced:
    """Bytes [start, stop) of a journal file that are not on disk yet.

    Attributes:
        mapping: holds a reference to the mapping, so that it stays valid while it is flushed.
        since: when the first of them was written.
        size: total size of the journal writes in them, without padding.
    """

    if not cython.compiled:
        __slots__ = ("mapping", "since", "size", "slot", "start", "stop")

    def __init__(self, slot: Slot, start: int, stop: int, since: float) -> None:
        self.slot = slot
        self.mapping: Mapping = slot.mapping
        self.start = start
        self.stop = stop
        self.since = since
        self.size = 0


@cython.cclass
class BareFlusher:
    """The compiled base class of ``Flusher``. Subclasses add ``start``, ``_tick`` and ``_is_sealed_soon``."""

    if not cython.compiled:
        __slots__ = (
            "_bytes_soon",
            "_clock",
            "_interval",
            "_journal",
            "_last_position",
            "_loop",
            "_running",
            "_timer",
            "_unsynced",
            "synced",
            "unsynced_bytes",
            "written",
        )

    def __init__(self, journal: BareJournal, loop: Loop, clock: Clock, *, interval_s: float, bytes_soon: int) -> None:
        self._journal = journal
        self._loop = loop
        self._clock = clock
        self._interval = interval_s
        self._bytes_soon = bytes_soon
        self._unsynced: dict[int, Unsynced] = {}
        """Unsynced ranges by serial of the journal file, oldest first, without those that the running sync writes."""
        self._last_position = 0
        """Position of the last journal write in the current journal file."""
        self._running = False
        self._timer = False
        self.synced = 0
        self.written = 0
        self.unsynced_bytes = 0

    def start(self) -> None:
        """Sync everything written so far. Overridden."""

    def _tick(self) -> None:
        """Start the sync that is due. Overridden."""

    def _is_sealed_soon(self) -> bool:
        return False  # overridden

    def wrote(self, sequence: int, position: int, size: int) -> None:
        slot = self._journal.current
        assert slot is not None
        count: cython.longlong = size
        start: cython.longlong = position
        found: Unsynced | None = self._unsynced.get(slot.serial)
        if found is None:
            found = self._unsynced[slot.serial] = Unsynced(slot, start, start, self._clock.monotonic())
        found.stop = start + count
        found.size += count
        self._last_position = start
        self.written = sequence
        self.unsynced_bytes += count
        if not self._timer:
            self._timer = True
            self._loop.call_later(self._interval, self._tick)
        if not self._running and self.unsynced_bytes > self._bytes_soon and not self._is_sealed_soon():
            self.start()
