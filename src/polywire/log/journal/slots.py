"""The journal's files: preallocated slots, which are overwritten in place and reused, and the seed (decision 0102).

* A group (an atomic write) never spans two slots. The first group after ``align`` begins on a new page.
* Written bytes can be read through the slot's memory mapping.
* A slot gets a new serial number for each use; a process never uses the same number twice.
* A failed write is raised and never retried.

The seed is the secret that every group's checksum covers. It is stored twice, because no group can be verified without
it. A damaged copy is replaced by the intact one.

``` seed, seed.copy: 24 bytes each      before: seed, 8 plain bytes
 0 u32 magic "PWK1" (0x314B5750)     0 u64 the seed
 4 u32 zero
 8 u64 the seed
16 u64 XXH64 of bytes 0..16 ```
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Final

from polywire.errors import Corrupt, ErrorCode, Unavailable
from polywire.log.journal.bare_journal import BareJournal
from polywire.log.journal.group import GroupHead
from polywire.log.settings import PAGE_BYTES
from polywire.records.checksum import xxh64
from polywire.store.base import BLOCK_BYTES, CHUNK_BYTES, aligned_buffer
from polywire.store.files import (
    COPY_MODE,
    Access,
    File,
    Files,
    exists,
    fill,
    make_directories,
    read_file,
    remove,
    replace_file,
    write_parts,
)
from polywire.store.system_files import SYSTEM_FILES
from polywire.types import Buffer

SEED_NAMES: Final = ("seed", "seed.copy")
_MAGIC: Final = 0x314B5750
_SEED: Final = Struct("<IIQ")
_PLAIN_BYTES: Final = 8
_ZEROS_BYTES: Final = 4 * 1024 * 1024
# ext4 keeps each write to a new file as one large page, and every later small write visits all blocks of its page. With
# writes of 4 MiB, a group of 344 bytes takes twice the processor time.
FILL_BYTES: Final = 256 * 1024
_SUFFIX: Final = ".pwj"


def find_seed(files: Files, directory: Path, *, has_slots: bool) -> int:
    """Return the seed, a random number in the checksums of this directory's journal.

    Create one if there is neither a seed nor a journal file. Raises Corrupt or OSError.
    """
    if has_slots or any(exists(files, directory / name) for name in SEED_NAMES):
        return read_seed(files, directory)
    seed = int.from_bytes(files.token(8), "little")
    restore_seed(files, directory, seed)
    return seed


def read_seed(files: Files, directory: Path) -> int:
    """Return the seed of this directory's journal from its seed files. Raises Corrupt if no copy is intact."""
    contents = seed_copies(files, directory)
    for content in contents:
        if is_seed(content):
            return int(_SEED.unpack_from(content)[2])
    if len(contents[0]) == _PLAIN_BYTES and not contents[1]:
        return int.from_bytes(contents[0], "little")
    raise Corrupt(
        ErrorCode.CORRUPT,
        f"the seed of the journal is missing or damaged, so its groups cannot be verified path={str(directory / SEED_NAMES[0])!r}",
    )


def seed_copies(files: Files, directory: Path) -> list[bytes]:
    """Return the content of both seed files, b"" for a missing one."""
    paths = [directory / name for name in SEED_NAMES]
    return [read_file(files, path) if exists(files, path) else b"" for path in paths]


def is_seed(content: bytes) -> bool:
    """Return whether this is the content of an intact seed file."""
    size = _SEED.size
    if len(content) != size + 8 or _SEED.unpack_from(content)[0] != _MAGIC:
        return False
    return xxh64(content[:size]) == int.from_bytes(content[size:], "little")


def restore_seed(files: Files, directory: Path, seed: int) -> None:
    """Write missing or damaged seed files, one after the other, each synced. Raises OSError."""
    content = _SEED.pack(_MAGIC, 0, seed)
    content += xxh64(content).to_bytes(8, "little")
    for name, found in zip(SEED_NAMES, seed_copies(files, directory), strict=True):
        if found == content:
            continue
        temporary = directory / f".{name}"
        replace_file(files, directory / name, [content], temporary=temporary, mode=COPY_MODE)


class Slot:
    """One journal file, mapped read-only.

    Attributes:
        serial: number of its current use. A reused file gets a new number.
        pins: number of readers that use the mapped bytes.
        first: sequence number of the first journal write in it, 0 while it is empty.
        last: sequence number of the last journal write in it, 0 while it is empty.

    Args:
        seed: seed of the journal.
        access: WRITE, or READ to only examine the file.
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

    def __init__(
        self, path: Path, number: int, seed: int, files: Files = SYSTEM_FILES, access: Access = Access.WRITE
    ) -> None:
        self.path: Final = path
        self.number: Final = number
        self.seed: Final = seed
        self._files: Final = files
        self.file: Final = files.open(path, access)
        self.size: Final = self.file.size
        if self.size == 0:
            self.file.close()
            raise Corrupt(ErrorCode.CORRUPT, f"journal slot is empty path={str(path)!r}")
        self.mapping: Final = self.file.map()
        self.view = self.mapping.view
        self.serial = -1
        self.pins = 0
        self.first = 0
        self.last = 0

    def lock(self) -> None:
        """Lock the file against writes by other processes. Raises Unavailable if another process holds the lock."""
        try:
            self.file.lock()
        except BlockingIOError:
            raise Unavailable(
                ErrorCode.STORAGE_FAILED, f"another process is writing this journal path={str(self.path)!r}"
            ) from None

    def find(self, pattern: bytes, start: int) -> int:
        return self.mapping.find(pattern, start)

    def check_readable(self) -> None:
        """Read the whole file once. Raises Corrupt if that fails.

        Otherwise a bad sector would kill the process at the first access through the mapping.
        """
        block = memoryview(bytearray(min(self.size, _ZEROS_BYTES)))
        try:
            for at in range(0, self.size, len(block)):
                self.file.read(block, at)
        except OSError as error:
            raise Corrupt(
                ErrorCode.CORRUPT, f"cannot read journal slot: {error.strerror} path={str(self.path)!r}"
            ) from error

    def is_blank(self) -> bool:
        """Return whether everything after the first page is zero."""
        zeros = bytearray(_ZEROS_BYTES)  # compared as a whole; two views are compared byte by byte, 20 times slower
        pieces = range(PAGE_BYTES, self.size, _ZEROS_BYTES)
        return all(zeros[: self.size - at] == self.view[at : at + _ZEROS_BYTES] for at in pieces)

    def forget(self) -> None:
        """Unmap the resident pages. They stay in the page cache but no longer count as the broker's memory."""
        self.mapping.forget()

    def sync(self) -> None:
        """Sync the whole file. Raises OSError."""
        self.file.sync(data_only=True)

    def recover(self) -> None:
        """Write the whole file to disk, including pages that an earlier sync failed to write.

        The system may mark pages as clean after a failed sync. So pages that differ between memory and disk are
        rewritten. Raises OSError.
        """
        self.sync()
        lost = self.lost_pages()
        for at in lost:
            write_parts(self.file, [self.view[at : at + PAGE_BYTES]], at)
        if lost:
            self.sync()

    def lost_pages(self) -> list[int]:
        """Return positions of pages that differ between memory and disk.

        The result is empty if the system cannot bypass its page cache. Raises OSError.
        """
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
        # A truncated file may have any length, but a direct read needs whole blocks: request whole blocks, and the
        # system stops at the end of the file.
        block = aligned_buffer(-(-min(self.size, CHUNK_BYTES) // BLOCK_BYTES) * BLOCK_BYTES)
        for start in range(0, self.size, len(block)):
            stop = min(start + len(block), self.size)
            fill(file, block, start, stop - start)
            # two views are compared byte by byte, 20 times slower
            found, cached = bytearray(block[: stop - start]), self.view[start:stop]
            if found != cached:
                pages = range(0, stop - start, PAGE_BYTES)
                yield from (start + at for at in pages if found[at:][:PAGE_BYTES] != cached[at:][:PAGE_BYTES])

    def close(self) -> None:
        """Close the file, which releases its lock. The mapping stays until its last reader finishes."""
        self.file.close()
        self.view = memoryview(b"")


class FileJournal(BareJournal):
    """The journal files of one directory.

    Attributes:
        slots: files with data that is needed, by serial.
        views: mapped bytes of these files, by serial.
        free: files without needed data.
        current: file being written.
        position: end of the written bytes in the current file.
        changes: number of changes of the broker's state in the current file.
        seed: secret that every checksum of the journal covers. Set by ``open_all``.
    """

    def __init__(self, directory: Path, *, slot_bytes: int, slot_count_max: int, files: Files = SYSTEM_FILES) -> None:
        super().__init__()
        self._files = files
        self._directory = directory
        self._slot_bytes = slot_bytes
        self._slot_count_max = slot_count_max
        self._serial = 0
        self._making = 0
        self._planned = 0
        """Highest number of a journal file that is being created."""
        self.is_closed = False
        self.changes = 0
        self.slots: Final[dict[int, Slot]] = {}
        """Journal files with needed data, by serial."""
        self.views: Final[dict[int, Buffer]] = {}
        """Mapped bytes of these files, by serial."""
        self.seed = 0
        """Secret that every checksum of the journal covers; set by ``open_all``."""

    # Slots

    def open_all(self) -> list[Slot]:
        """Open all existing journal files. Raises Corrupt, Unavailable or OSError.

        Each file counts as needed until ``release`` is called for it.
        """
        make_directories(self._files, self._directory)
        for name in self._files.names(self._directory):
            if name.startswith("."):  # a journal file or seed whose creation was interrupted
                self._files.unlink(self._directory / name)
        # If a process was killed before this sync, a power loss could still remove the names it created.
        self._files.sync_directory(self._directory)
        self.seed = find_seed(self._files, self._directory, has_slots=any(self._slot_paths()))
        for slot in self._open_slots(Access.WRITE):
            slot.lock()
        return list(self.slots.values())

    def open_to_read(self) -> list[Slot]:
        """Open all existing journal files read-only, changing nothing. Raises Corrupt or OSError."""
        self.seed = read_seed(self._files, self._directory) if any(self._slot_paths()) else 0
        return list(self._open_slots(Access.READ))

    def _slot_paths(self) -> list[Path]:
        names = self._files.names(self._directory)
        return [self._directory / name for name in sorted(names) if name.startswith("slot-") and name.endswith(_SUFFIX)]

    def _open_slots(self, access: Access) -> Iterator[Slot]:
        for path in self._slot_paths():
            slot = Slot(path, int(path.stem.partition("-")[2]), self.seed, self._files, access)
            self._use(slot)
            slot.check_readable()
            yield slot

    def restore_seed(self) -> None:
        """Ensure that both seed files are intact. Raises OSError.

        Call it only if the seed was right for the journal's checksums, or if the journal is empty.
        """
        restore_seed(self._files, self._directory, self.seed)

    def is_blank(self) -> bool:
        """Return whether no data was ever written. The empty journal write that begins a start does not count."""
        return all(slot.is_blank() for slot in self.slots.values())

    def _use(self, slot: Slot) -> None:
        slot.serial = self._serial
        self._serial += 1
        slot.first = slot.last = slot.pins = 0
        self.slots[slot.serial] = slot
        self.views[slot.serial] = slot.view

    def assign_serials(self, slots: Iterable[Slot]) -> None:
        """Assign new serials to journal files, which are given oldest first. File names do not show their age."""
        for slot in slots:
            del self.slots[slot.serial], self.views[slot.serial]
            self._use(slot)

    @property
    def count(self) -> int:
        return len(self.slots) + len(self.free)

    def may_grow(self) -> bool:
        return self.count + self._making < self._slot_count_max

    def plan_slot(self) -> Callable[[], Slot]:
        """Return a function that creates a journal file in any thread. The caller passes its result to ``add``."""
        taken = {slot.number for slot in (*self.slots.values(), *self.free)}
        first = self._planned + 1 if self._making else 0  # two files created at the same time need different names
        self._planned = number = next(number for number in range(first, 1 << 16) if number not in taken)
        self._making += 1
        path = self._directory / f"slot-{number:04d}{_SUFFIX}"
        return lambda: make_slot(path, number, self._slot_bytes, self.seed, self._files)

    def add(self, slot: Slot | None) -> None:
        """Add a created journal file, or None if it could not be created."""
        self._making -= 1
        if slot is not None:
            slot.lock()
            self.free.append(slot)

    def release(self, slot: Slot) -> None:
        """Make a journal file without needed data free for new writes.

        The file is deleted if its size is wrong, or if there are too many files and another one is free. One file must
        remain free: when the current file is full, the journal needs it to write the names of new segments.
        """
        del self.slots[slot.serial], self.views[slot.serial]
        slot.forget()
        if slot.size == self._slot_bytes and (self.count < self._slot_count_max or not self.free):
            self.free.append(slot)
        else:
            self._files.unlink(slot.path)
            slot.close()

    def close_with(
        self, head: GroupHead, parts: Sequence[Buffer], start: int, sequence: int, checksum: int, now_us: int
    ) -> None:
        """Write a last journal write, which records that everything up to ``sequence`` is on disk.

        Raises OSError. With this record, later damage is not mistaken for a torn write.

        Args:
            parts: its entries, if it has any.
        """
        self.align()
        if self.capacity < head.size:
            if not self.free:
                return
            self.roll()
        first = head.finish(start, sequence + 1, sequence, checksum, now_us)
        self.write([first, *parts], head.size, sequence + 1)
        assert self.current is not None, "it was just written"
        self.current.sync()

    def unlink(self, slot: Slot) -> None:
        """Unlink a journal file that only readers still use, so that another file can replace it.

        The caller closes it when its readers finish.
        """
        del self.slots[slot.serial], self.views[slot.serial]
        self._files.unlink(slot.path)

    def close(self) -> None:
        for slot in (*self.slots.values(), *self.free):
            slot.close()
        self.is_closed = True
        self.slots.clear()
        self.views.clear()
        self.free.clear()
        self.current = None

    # Writing

    def roll(self) -> Slot | None:
        """Continue in a free journal file and return the full one. Raises IndexError if no file is free."""
        full = self.current
        slot = self.free.popleft()
        self._use(slot)
        self.current, self.position, self.changes = slot, 0, 0
        return full

    def continue_in(self, slot: Slot, position: int) -> None:
        """Continue writing in a journal file, on the first page after ``position``. Later content is overwritten."""
        self.current, self.position = slot, position
        self.align()


def make_slot(path: Path, number: int, size: int, seed: int, files: Files = SYSTEM_FILES) -> Slot:
    """Create a journal file filled with zeros, and sync it and its directory.

    Raises OSError, leaving nothing behind.
    """
    temporary = path.with_name(f".{path.name}")
    file = files.open(temporary, Access.REPLACE)
    try:
        file.allocate(size)
        zeros = bytes(min(size, FILL_BYTES))
        position = 0
        # write the blocks instead of only reserving them, so that overwriting them changes no metadata
        while position < size:
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
