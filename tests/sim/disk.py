"""A simulated disk that separates what processes see from what survives a power loss.

Every process sees a write at once, and so does the next start after a killed process. Only synced data is certain to
survive a power loss. Syncing a file makes its contents survive, syncing a directory makes its names survive.

Every other sector of 512 bytes, and every other change of a directory, may or may not survive, independent of order.
One sector that was being written may have arbitrary contents.

* After a power loss an unsynced sector has contents that it once had, except for the one being written.
* A synced sector has its synced contents or later ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.sim.chance import Chance

SECTOR_BYTES: Final = 512
PAGE_BYTES: Final = 4096
VERSIONS_MAX: Final = 4  # of an unsynced sector: its intermediate contents


class Inode:
    """One file. Guards: ``durable`` has the contents that are certainly on the disk. ``dirty`` has the intermediate
    contents of each sector that changed since, newest last.
    """

    __slots__ = ("data", "dirty", "durable", "number", "opened", "sizes")

    def __init__(self, number: int) -> None:
        self.number: Final = number
        self.data = bytearray()
        self.durable = bytearray()
        self.dirty: dict[int, list[bytes]] = {}
        self.sizes: list[int] = []
        self.opened = 0

    def write(self, view: memoryview, position: int) -> None:
        """Write bytes; a gap behind the old end is filled with zeros."""
        self.resize(max(len(self.data), position + len(view)))
        self.data[position : position + len(view)] = view
        for sector in range(position // SECTOR_BYTES, -(-(position + len(view)) // SECTOR_BYTES)):
            versions = self.dirty.setdefault(sector, [])
            versions.append(bytes(self.data[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES]))
            if len(versions) > VERSIONS_MAX:
                del versions[0]

    def copied(self) -> Inode:
        """Return a copy."""
        copy = Inode(self.number)
        copy.data, copy.durable, copy.opened = bytearray(self.data), bytearray(self.durable), self.opened
        copy.dirty = {sector: list(versions) for sector, versions in self.dirty.items()}
        copy.sizes = list(self.sizes)
        return copy

    def resize(self, size: int) -> None:
        """Truncate the file, or extend it with zeros."""
        if size < len(self.data):
            del self.data[size:]
            self.dirty = {sector: versions for sector, versions in self.dirty.items() if sector * SECTOR_BYTES < size}
        elif size > len(self.data):
            self.data += bytes(size - len(self.data))
        else:
            return
        self.sizes.append(size)

    def sync(self, start: int = 0, stop: int | None = None) -> int:
        """Sync the pages of bytes [start, stop), or everything with the size; return the number of sectors."""
        if stop is None:
            self._resize_durable(len(self.data))
            self.sizes.clear()
            chosen = sorted(self.dirty)
        else:
            first = start // PAGE_BYTES * PAGE_BYTES // SECTOR_BYTES
            last = -(-stop // PAGE_BYTES) * PAGE_BYTES // SECTOR_BYTES
            chosen = [sector for sector in range(first, last) if sector in self.dirty]
        for sector in chosen:
            versions = self.dirty.pop(sector)
            self._put(self.durable, sector, versions[-1])
        return len(chosen)

    def read_past(self, start: int, stop: int) -> bytearray:
        """Return the bytes that the disk would have once pending writes finish, without those that a failed sync lost."""
        found = self.durable[start:stop].ljust(min(stop, len(self.data)) - start, b"\0")
        for sector, versions in self.dirty.items():
            at = sector * SECTOR_BYTES
            if start <= at < stop:
                found[at - start : at - start + len(versions[-1])] = versions[-1]
        return found[: max(len(self.data) - start, 0)]

    def lose(self, chance: Chance) -> None:
        """Fail a sync: some pending sectors are on the disk, and no later sync writes the others."""
        for sector in sorted(self.dirty):
            versions = self.dirty.pop(sector)
            if chance.happens(0.5):
                self._put(self.durable, sector, versions[-1])

    def lose_power(self, chance: Chance, kept: float) -> int:
        """Replace the contents by those on the disk; return how many sectors lost data. kept: share of unsynced data
        that survives.
        """
        size, lost = len(self.durable), 0
        if self.sizes and chance.happens(kept):
            size = chance.one_of(self.sizes) if chance.happens(0.3) else self.sizes[-1]
        self._resize_durable(size)
        for sector, versions in sorted(self.dirty.items()):
            if not chance.happens(kept):
                lost += 1
            elif len(versions) > 1 and chance.happens(0.3):
                self._put(self.durable, sector, chance.one_of(versions))
                lost += 1
            else:
                self._put(self.durable, sector, versions[-1])
        self.data = bytearray(self.durable)
        self.dirty, self.sizes, self.opened = {}, [], 0
        return lost

    def garble(self, chance: Chance) -> None:
        """Lose power while an unsynced sector is written: its end has arbitrary contents."""
        dirty = sorted(self.dirty)
        sector = dirty[0] if chance.happens(0.5) else chance.one_of(dirty)
        content = bytearray(self.dirty.pop(sector)[-1])
        at = chance.below(len(content))
        content[at:] = chance.token(len(content) - at)
        self._put(self.durable, sector, bytes(content))

    def _resize_durable(self, size: int) -> None:
        del self.durable[size:]
        self.durable += bytes(size - len(self.durable))

    def _put(self, data: bytearray, sector: int, content: bytes) -> None:
        at = sector * SECTOR_BYTES
        content = content[: max(len(data) - at, 0)]
        data[at : at + len(content)] = content


class Directory:
    """Names. Guards: ``durable`` has the names that are certainly on the disk, ``changes`` the changes since, in order."""

    __slots__ = ("changes", "durable", "names")

    def __init__(self) -> None:
        self.names: dict[str, Inode | Directory] = {}
        self.durable: dict[str, Inode | Directory] = {}
        self.changes: list[dict[str, Inode | Directory | None]] = []

    def change(self, change: dict[str, Inode | Directory | None]) -> None:
        """Set or remove names; several names change atomically."""
        _apply(self.names, change)
        self.changes.append(change)

    def copied(self, known: dict[int, Inode | Directory]) -> Directory:
        """Return a deep copy. known: copies by original, because a file may have two names."""
        copy = Directory()
        for names, into in ((self.names, copy.names), (self.durable, copy.durable)):
            into.update((name, _copied(node, known)) for name, node in names.items())
        copy.changes = [
            {name: None if node is None else _copied(node, known) for name, node in change.items()}
            for change in self.changes
        ]
        return copy

    def sync(self) -> int:
        """Sync the names; return the number of changes."""
        count = len(self.changes)
        self.durable = dict(self.names)
        self.changes.clear()
        return count

    def lose_power(self, chance: Chance, kept: float) -> int:
        """Replace the names by those on the disk; return how many changes were lost."""
        lost = 0
        for change in self.changes:
            if chance.happens(kept):
                _apply(self.durable, change)
            else:
                lost += 1
        self.names = dict(self.durable)
        self.changes.clear()
        return lost


def _apply(names: dict[str, Inode | Directory], change: dict[str, Inode | Directory | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _copied(node: Inode | Directory, known: dict[int, Inode | Directory]) -> Inode | Directory:
    if id(node) not in known:
        known[id(node)] = node.copied() if isinstance(node, Inode) else node.copied(known)
    return known[id(node)]


class SimulatedDisk:
    """All stored data. Guards: ``used_bytes`` counts files that have a name or are open. reads_past: whether files can
    be read past the page cache; otherwise a process cannot find out what a failed sync lost.
    """

    def __init__(self, capacity_bytes: int, *, reads_past: bool = True) -> None:
        self.capacity_bytes = capacity_bytes
        self.reads_past: Final = reads_past
        self.root = Directory()
        self.locks: Final[set[int]] = set()
        """Files that a process has locked."""
        self._number = 0

    def copied(self) -> SimulatedDisk:
        """Return a copy with the same contents and losses."""
        copy = SimulatedDisk(self.capacity_bytes, reads_past=self.reads_past)
        copy.root = self.root.copied({})
        copy.locks.update(self.locks)
        copy._number = self._number
        return copy

    def make_file(self) -> Inode:
        """Create a file without a name."""
        self._number += 1
        return Inode(self._number)

    def directory(self, path: Path) -> Directory:
        """Return the directory of a path. Raises FileNotFoundError, NotADirectoryError."""
        return self._directory(path.parts[1:], path)

    def find(self, path: Path) -> Inode | Directory | None:
        """Return what a path names, None if nothing. Raises as ``directory`` for the parent."""
        parts = path.parts
        return self._directory(parts[1:-1], path).names.get(parts[-1]) if len(parts) > 1 else self.root

    def _directory(self, names: Sequence[str], path: Path) -> Directory:
        found: Inode | Directory = self.root
        for name in names:
            if not isinstance(found, Directory):
                raise NotADirectoryError(20, "Not a directory", str(path))
            inner = found.names.get(name)
            if inner is None:
                raise FileNotFoundError(2, "No such file or directory", str(path))
            found = inner
        if not isinstance(found, Directory):
            raise NotADirectoryError(20, "Not a directory", str(path))
        return found

    def files(self) -> Iterator[tuple[str, Inode]]:
        """Yield every named file with its path."""
        yield from _files(self.root, "")

    @property
    def used_bytes(self) -> int:
        """The used space."""
        found: dict[int, int] = {}
        left = [self.root]
        for directory in left:
            for node in directory.names.values():
                if isinstance(node, Directory):
                    left.append(node)
                else:
                    found[node.number] = len(node.data)
        return sum(found.values())

    def close_all(self) -> None:
        """Close every file of the process, which has ended."""
        for _, inode in self.files():
            inode.opened = 0
        self.locks.clear()

    def lose_power(self, chance: Chance, kept: float) -> tuple[int, int]:
        """Lose power; return how many sectors and how many changes of directories were lost."""
        changes = self._lose_names(chance, kept)
        found = list({inode.number: inode for _, inode in self.files()}.values())
        writing = [inode for inode in found if inode.dirty]
        if writing and chance.happens(0.8):
            chance.one_of(writing).garble(chance)
        return sum(inode.lose_power(chance, kept) for inode in found), changes

    def _lose_names(self, chance: Chance, kept: float) -> int:
        changes = 0
        left: list[Directory] = [self.root]
        while left:
            directory = left.pop()
            changes += directory.lose_power(chance, kept)
            left += [node for node in directory.names.values() if isinstance(node, Directory)]
        return changes


def _files(directory: Directory, path: str) -> Iterator[tuple[str, Inode]]:
    for name, node in directory.names.items():
        if isinstance(node, Directory):
            yield from _files(node, f"{path}/{name}")
        else:
            yield f"{path}/{name}", node
