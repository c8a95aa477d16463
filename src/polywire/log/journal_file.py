"""The journal on files: preallocated slots that are overwritten in place and used again (decision 0002).

Promises: a group lies in one slot; the first one after ``align`` begins on a new page; bytes are readable through the slot's mapping as
soon as they are written; a slot's serial is never used again while the process lives. A failed write is raised and never tried again.
Must not know: batches, partitions, what a group holds.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from polywire.errors import Corrupt, ErrorCode
from polywire.log.group import GROUP_BYTES_MAX
from polywire.log.settings import PAGE_BYTES
from polywire.types import Buffer

IOV_MAX: Final = 1024  # buffers of one gathered write on Linux and macOS
_ZEROS_BYTES: Final = 4 * 1024 * 1024
_SUFFIX: Final = ".pwj"
SEED_NAME: Final = "seed"
_SEED_BYTES: Final = 8


class Slot:
    """One journal file, mapped read-only. ``serial`` numbers its current filling; ``pins`` counts readers of its bytes.

    ``first`` and ``last`` are the sequences of its first and last group, 0 while it is empty.
    """

    __slots__ = ("_map", "descriptor", "first", "last", "number", "path", "pins", "seed", "serial", "size", "view")

    def __init__(self, path: Path, number: int, seed: int) -> None:
        """seed: of the journal it belongs to."""
        self.path: Final = path
        self.number: Final = number
        self.seed: Final = seed
        self.descriptor: Final = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.size: Final = os.fstat(self.descriptor).st_size
        if self.size == 0:
            os.close(self.descriptor)
            raise Corrupt(ErrorCode.CORRUPT, f"a slot of the journal is empty path={str(path)!r}")
        self._map = mmap.mmap(self.descriptor, self.size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        self.view = memoryview(self._map)
        self.serial = -1
        self.pins = 0
        self.first = 0
        self.last = 0

    def find(self, pattern: bytes, start: int) -> int:
        """Position of a pattern at or after ``start``, -1 when there is none."""
        return self._map.find(pattern, start)

    def forget(self) -> None:
        """Give the mapped pages back; they stay in the page cache and are not the broker's memory any more."""
        with suppress(OSError, AttributeError, ValueError):  # advice only
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Close the file; the mapping goes with its last reader."""
        os.close(self.descriptor)
        self.view = memoryview(b"")


class FileJournal:
    """The slots of one directory. Guards: the current slot is written at ``position`` and nowhere else; free slots hold nothing needed."""

    def __init__(self, directory: Path, *, slot_bytes: int, slot_count_max: int) -> None:
        self._directory = directory
        self._slot_bytes = slot_bytes
        self._slot_count_max = slot_count_max
        self._serial = 0
        self._making = 0
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
        """Open every slot that exists; each counts as needed until ``release``."""
        make_directory(self._directory)
        paths = sorted(self._directory.glob(f"slot-*{_SUFFIX}"))
        for path in self._directory.glob(".*"):  # a slot or a seed that was being made
            path.unlink()
        self.seed = read_seed(self._directory) if paths else self._make_seed()
        found = [Slot(path, int(path.stem.partition("-")[2]), self.seed) for path in paths]
        for slot in found:
            self._use(slot)
        return found

    def _make_seed(self) -> int:
        """A new journal's seed, synced before there is a slot. One that is there without any slot was never used."""
        data = secrets.token_bytes(_SEED_BYTES)
        temporary = self._directory / f".{SEED_NAME}"
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._directory / SEED_NAME)
        sync_directory(self._directory)
        return int.from_bytes(data, "little")

    def _use(self, slot: Slot) -> None:
        slot.serial = self._serial
        self._serial += 1
        slot.first = slot.last = slot.pins = 0
        self.slots[slot.serial] = slot
        self.views[slot.serial] = slot.view

    @property
    def count(self) -> int:
        """Slots there are."""
        return len(self.slots) + len(self.free)

    def may_grow(self) -> bool:
        """Whether one more slot may be made."""
        return self.count + self._making < self._slot_count_max

    def plan_slot(self) -> Callable[[], Slot]:
        """A job that makes one more slot; for any thread. Give its result to ``add``."""
        numbers = {slot.number for slot in (*self.slots.values(), *self.free)}
        number = next(number for number in range(len(numbers) + self._making, 1 << 16) if number not in numbers)
        self._making += 1
        path = self._directory / f"slot-{number:04d}{_SUFFIX}"
        return lambda: make_slot(path, number, self._slot_bytes, self.seed)

    def add(self, slot: Slot | None) -> None:
        """A slot was made, or could not be."""
        self._making -= 1
        if slot is not None:
            self.free.append(slot)

    def release(self, slot: Slot) -> None:
        """Nothing in a slot is needed any more: it may be written again, or goes when it has the wrong size or there are too many."""
        del self.slots[slot.serial], self.views[slot.serial]
        slot.forget()
        if slot.size == self._slot_bytes and self.count < self._slot_count_max:
            self.free.append(slot)
        else:
            slot.path.unlink()
            slot.close()

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
    def room(self) -> int:
        """Bytes left in the current slot."""
        return 0 if self.current is None else self.current.size - self.position

    def align(self) -> None:
        """Begin the next group on a new page: what lies before is being synced."""
        self.position = -(-self.position // PAGE_BYTES) * PAGE_BYTES

    def turn_over(self) -> Slot | None:
        """Go on in a free slot; returns the one that is full now. Raises IndexError when none is free."""
        full = self.current
        slot = self.free.popleft()
        self._use(slot)
        self.current, self.position = slot, 0
        return full

    def write(self, parts: Sequence[Buffer], size: int, sequence: int) -> int:
        """Write one group in the current slot, where it fits; returns its position. Raises OSError."""
        slot, position = self.current, self.position
        assert slot is not None
        assert position + size <= slot.size, "a group never spans slots"
        assert size <= GROUP_BYTES_MAX, "recovery takes no larger group for one"
        if len(parts) > IOV_MAX or os.pwritev(slot.descriptor, parts, position) != size:
            _write_slowly(slot.descriptor, parts, position)
        self.position = position + size
        slot.first = slot.first or sequence
        slot.last = sequence
        return position


def _write_slowly(descriptor: int, parts: Sequence[Buffer], position: int) -> None:
    """Write everything, in pieces: after a short write, or with more buffers than one call takes."""
    for start in range(0, len(parts), IOV_MAX):
        views = [memoryview(part).cast("B") for part in parts[start : start + IOV_MAX]]
        while views:
            count = os.pwritev(descriptor, views, position)
            position += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]


def make_slot(path: Path, number: int, size: int, seed: int) -> Slot:
    """Preallocate one slot, filled with zeros, synced with its directory. Raises OSError; then nothing is left."""
    temporary = path.with_name(f".{path.name}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    try:
        os.posix_fallocate(descriptor, 0, size)
        zeros = bytes(min(size, _ZEROS_BYTES))
        position = 0
        while position < size:  # written blocks, not only reserved ones: overwriting them changes no metadata
            position += os.pwrite(descriptor, zeros[: size - position], position)
        os.fsync(descriptor)
    except OSError:
        temporary.unlink()
        raise
    finally:
        os.close(descriptor)
    temporary.rename(path)
    sync_directory(path.parent)
    return Slot(path, number, seed)


def sync_directory(path: Path) -> None:
    """Make names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_seed(directory: Path) -> int:
    """The seed of the journal in this directory. Raises Corrupt when it is not there."""
    path = directory / SEED_NAME
    data = path.read_bytes() if path.exists() else b""
    if len(data) != _SEED_BYTES:
        raise Corrupt(
            ErrorCode.CORRUPT,
            f"the journal's seed is missing, so none of its groups can be verified path={str(path)!r}",
        )
    return int.from_bytes(data, "little")


def make_directory(path: Path) -> None:
    """A directory that a power loss does not take away, with those above it that do not exist. Raises OSError."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)
