"""The journal on files: preallocated slots that are overwritten in place and used again (decision 0002).

Promises: a group lies in one slot; the first one after ``align`` begins on a new page; bytes are readable through the slot's mapping as
soon as they are written; a slot's serial is never used again while the process lives. A failed write is raised and never tried again.
Must not know: batches, partitions, what a group holds.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from polywire.errors import Corrupt, ErrorCode, Unavailable
from polywire.log.journal.group import GROUP_BYTES_MAX, GROUP_HEADER_BYTES, GroupHead
from polywire.log.journal.seed import find_seed, keep_seed, read_seed
from polywire.log.settings import PAGE_BYTES
from polywire.store.base import BLOCK_BYTES, CHUNK_BYTES, aligned_buffer
from polywire.store.files import Access, File, Files, fill, make_directories, remove, write_parts
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import Buffer

IOV_MAX: Final = 1024  # buffers of one gathered write on Linux and macOS
_ZEROS_BYTES: Final = 4 * 1024 * 1024
_SUFFIX: Final = ".pwj"


class Slot:
    """One journal file, mapped read-only. ``serial`` numbers its current filling; ``pins`` counts readers of its bytes.

    ``first`` and ``last`` are the sequences of its first and last group, 0 while it is empty.
    """

    __slots__ = (
        "_files",
        "file",
        "first",
        "last",
        "mapping",
        "number",
        "path",
        "pins",
        "seed",
        "serial",
        "size",
        "view",
    )

    def __init__(self, path: Path, number: int, seed: int, files: Files = SYSTEM_FILES) -> None:
        """seed: of the journal it belongs to."""
        self.path: Final = path
        self.number: Final = number
        self.seed: Final = seed
        self._files: Final = files
        self.file: Final = files.open(path, Access.WRITE)
        self.size: Final = self.file.size
        if self.size == 0:
            self.file.close()
            raise Corrupt(ErrorCode.CORRUPT, f"a slot of the journal is empty path={str(path)!r}")
        self.mapping: Final = self.file.map()
        self.view = self.mapping.view
        self.serial = -1
        self.pins = 0
        self.first = 0
        self.last = 0

    def lock(self) -> None:
        """Keep every other process from writing here. Raises Unavailable."""
        try:
            self.file.lock()
        except BlockingIOError:
            raise Unavailable(
                ErrorCode.STORAGE_FAILED, f"another process writes this journal path={str(self.path)!r}"
            ) from None

    def find(self, pattern: bytes, start: int) -> int:
        """Position of a pattern at or after ``start``, -1 when there is none."""
        return self.mapping.find(pattern, start)

    def check_readable(self) -> None:
        """Read everything once: touching a bad sector through the mapping would end the process. Raises Corrupt."""
        block = memoryview(bytearray(min(self.size, _ZEROS_BYTES)))
        try:
            for at in range(0, self.size, len(block)):
                self.file.read(block, at)
        except OSError as error:
            raise Corrupt(
                ErrorCode.CORRUPT, f"cannot read a slot of the journal: {error.strerror} path={str(self.path)!r}"
            ) from error

    def is_blank(self) -> bool:
        """Whether there are only zeros behind the first page."""
        zeros = bytes(_ZEROS_BYTES)
        pieces = range(PAGE_BYTES, self.size, _ZEROS_BYTES)
        return all(self.view[at : at + _ZEROS_BYTES] == zeros[: self.size - at] for at in pieces)

    def forget(self) -> None:
        """Give the mapped pages back; they stay in the page cache and are not the broker's memory any more."""
        self.mapping.forget()

    def sync(self) -> None:
        """Put all of it on the disk. Raises OSError."""
        self.file.sync(data_only=True)

    def recover(self) -> None:
        """Put all of it on the disk, even what an earlier sync has failed to: the system takes that for written, so it is asked what the disk
        has, and written what that lacks. Raises OSError."""
        self.sync()
        lost = self.lost_pages()
        for at in lost:
            write_parts(self.file, [self.view[at : at + PAGE_BYTES]], at)
        if lost:
            self.sync()

    def lost_pages(self) -> list[int]:
        """Return the positions of pages that memory has and the disk has not; none where the system cannot read past its page cache.

        Raises OSError."""
        try:
            file = self._files.open(self.path, Access.DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return []
        try:
            return list(self._differing(file))
        finally:
            file.close()

    def _differing(self, file: File) -> Iterator[int]:
        # A slot that was cut short may have any length, a direct read may not: it asks for whole blocks, and the system stops at the end.
        block = aligned_buffer(-(-min(self.size, CHUNK_BYTES) // BLOCK_BYTES) * BLOCK_BYTES)
        for start in range(0, self.size, len(block)):
            stop = min(start + len(block), self.size)
            fill(file, block, start, stop - start)
            found, cached = block[: stop - start], self.view[start:stop]
            if found != cached:
                pages = range(0, stop - start, PAGE_BYTES)
                yield from (start + at for at in pages if found[at:][:PAGE_BYTES] != cached[at:][:PAGE_BYTES])

    def close(self) -> None:
        """Close the file; the mapping goes with its last reader, and must not keep the lock until then."""
        self.file.close()
        self.view = memoryview(b"")


class FileJournal:
    """The slots of one directory. Guards: the current slot is written at ``position`` and nowhere else; free slots hold nothing needed."""

    def __init__(self, directory: Path, *, slot_bytes: int, slot_count_max: int, files: Files = SYSTEM_FILES) -> None:
        self._files = files
        self._directory = directory
        self._slot_bytes = slot_bytes
        self._slot_count_max = slot_count_max
        self._serial = 0
        self._making = 0
        self._planned = 0
        """The highest number of a slot that is being made, while one is."""
        self.slots: Final[dict[int, Slot]] = {}
        """Every slot that holds something needed, by serial."""
        self.views: Final[dict[int, Buffer]] = {}
        """Mapped bytes of these."""
        self.free: Final[deque[Slot]] = deque()
        self.current: Slot | None = None
        self.position = 0
        self.seed = 0
        """The secret that every group's checksum covers; known once ``open_all`` was called."""

    # Slots

    def open_all(self) -> list[Slot]:
        """Open every slot that exists; each counts as needed until ``release``. Raises Corrupt, Unavailable, OSError."""
        make_directories(self._files, self._directory)
        for name in self._files.names(self._directory):
            if name.startswith("."):  # a slot or a seed that was being made
                self._files.unlink(self._directory / name)
        # Who was killed before it could do this has left names that a power loss takes.
        self._files.sync_directory(self._directory)
        self.seed = find_seed(self._files, self._directory, has_slots=any(self._slot_paths()))
        for slot in self._open_slots():
            slot.lock()
        return list(self.slots.values())

    def open_to_read(self) -> list[Slot]:
        """Open every slot that exists, to be read: nothing is changed. Raises Corrupt, OSError."""
        self.seed = read_seed(self._files, self._directory) if any(self._slot_paths()) else 0
        return list(self._open_slots())

    def _slot_paths(self) -> list[Path]:
        names = self._files.names(self._directory)
        return [self._directory / name for name in sorted(names) if name.startswith("slot-") and name.endswith(_SUFFIX)]

    def _open_slots(self) -> Iterator[Slot]:
        for path in self._slot_paths():
            slot = Slot(path, int(path.stem.partition("-")[2]), self.seed, self._files)
            self._use(slot)
            slot.check_readable()
            yield slot

    def keep_seed(self) -> None:
        """Make sure that there are two sound copies of the seed; call it once groups verified by it, or there were none. Raises OSError."""
        keep_seed(self._files, self._directory, self.seed)

    def is_blank(self) -> bool:
        """Whether nothing was ever written to any slot but perhaps the group of a start, which holds nothing."""
        return all(slot.is_blank() for slot in self.slots.values())

    def _use(self, slot: Slot) -> None:
        slot.serial = self._serial
        self._serial += 1
        slot.first = slot.last = slot.pins = 0
        self.slots[slot.serial] = slot
        self.views[slot.serial] = slot.view

    def arrange(self, slots: Iterable[Slot]) -> None:
        """Renumber these slots, oldest first: their file names do not say which is older."""
        for slot in slots:
            del self.slots[slot.serial], self.views[slot.serial]
            self._use(slot)

    @property
    def count(self) -> int:
        """Slots there are."""
        return len(self.slots) + len(self.free)

    def may_grow(self) -> bool:
        """Whether one more slot may be made."""
        return self.count + self._making < self._slot_count_max

    def plan_slot(self) -> Callable[[], Slot]:
        """A job that makes one more slot; for any thread. Give its result to ``add``."""
        taken = {slot.number for slot in (*self.slots.values(), *self.free)}
        first = self._planned + 1 if self._making else 0  # two that are made at a time must not be one file
        self._planned = number = next(number for number in range(first, 1 << 16) if number not in taken)
        self._making += 1
        path = self._directory / f"slot-{number:04d}{_SUFFIX}"
        return lambda: make_slot(path, number, self._slot_bytes, self.seed, self._files)

    def add(self, slot: Slot | None) -> None:
        """A slot was made, or could not be."""
        self._making -= 1
        if slot is not None:
            slot.lock()
            self.free.append(slot)

    def release(self, slot: Slot) -> None:
        """Nothing in a slot is needed any more: it may be written again, or goes when it has the wrong size, or there are too many and one of
        them is free; without that nothing could be sealed once the current one is full."""
        del self.slots[slot.serial], self.views[slot.serial]
        slot.forget()
        if slot.size == self._slot_bytes and (self.count < self._slot_count_max or not self.free):
            self.free.append(slot)
        else:
            self._files.unlink(slot.path)
            slot.close()

    def close_with(self, head: GroupHead, start: int, sequence: int, checksum: int, now_us: int) -> None:
        """A last group, empty, that says that everything up to ``sequence`` is on the disk: what is found damaged later was not torn.
        Raises OSError."""
        self.align()
        if self.capacity < GROUP_HEADER_BYTES:
            if not self.free:
                return
            self.roll()
        head.clear()
        first = head.finish(start, sequence + 1, sequence, checksum, now_us)
        self.write([first], head.size, sequence + 1)
        assert self.current is not None, "it was just written"
        self.current.sync()

    def lend(self, slot: Slot) -> None:
        """Unlink a slot that only readers still need; another file replaces it. The caller closes it when they are done."""
        del self.slots[slot.serial], self.views[slot.serial]
        self._files.unlink(slot.path)

    def close(self) -> None:
        """Close every file."""
        for slot in (*self.slots.values(), *self.free):
            slot.close()
        self.slots.clear()
        self.views.clear()
        self.free.clear()
        self.current = None

    # Writing

    @property
    def capacity(self) -> int:
        """Bytes left in the current slot."""
        return 0 if self.current is None else self.current.size - self.position

    def align(self) -> None:
        """Begin the next group on a new page: what lies before is being synced."""
        self.position = -(-self.position // PAGE_BYTES) * PAGE_BYTES

    def roll(self) -> Slot | None:
        """Go on in a free slot; returns the one that is full now. Raises IndexError when none is free."""
        full = self.current
        slot = self.free.popleft()
        self._use(slot)
        self.current, self.position = slot, 0
        return full

    def go_on(self, slot: Slot, position: int) -> None:
        """Write on in a slot, on the first page behind this position; what lies there is not needed."""
        self.current, self.position = slot, position
        self.align()

    def write(self, parts: Sequence[Buffer], size: int, sequence: int) -> int:
        """Write one group in the current slot, where it fits; returns its position. Raises OSError."""
        slot, position = self.current, self.position
        assert slot is not None
        assert position + size <= slot.size, "a group never spans slots"
        assert size <= GROUP_BYTES_MAX, "recovery takes no larger group for one"
        if len(parts) > IOV_MAX or slot.file.write(parts, position) != size:
            _write_slowly(slot, parts, position)
        self.position = position + size
        slot.first = slot.first or sequence
        slot.last = sequence
        return position


def _write_slowly(slot: Slot, parts: Sequence[Buffer], position: int) -> None:
    """Write everything, in pieces: after a short write, or with more buffers than one call takes."""
    for start in range(0, len(parts), IOV_MAX):
        position = write_parts(slot.file, parts[start : start + IOV_MAX], position)


def make_slot(path: Path, number: int, size: int, seed: int, files: Files = SYSTEM_FILES) -> Slot:
    """Preallocate one slot, filled with zeros, synced with its directory. Raises OSError; then nothing is left."""
    temporary = path.with_name(f".{path.name}")
    file = files.open(temporary, Access.REPLACE)
    try:
        file.allocate(size)
        zeros = bytes(min(size, _ZEROS_BYTES))
        position = 0
        while position < size:  # written blocks, not only reserved ones: overwriting them changes no metadata
            position = write_parts(file, [memoryview(zeros)[: size - position]], position)
        file.sync()
    except OSError:
        remove(files, temporary)
        raise
    finally:
        file.close()
    files.rename(temporary, path)
    files.sync_directory(path.parent)
    return Slot(path, number, seed, files)
