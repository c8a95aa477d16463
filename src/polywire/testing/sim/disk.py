"""A disk that keeps apart what processes see and what a power loss leaves.

What a process writes, every process sees at once, and the next start as well if only the process was killed. On the disk for certain is
what was synced: bytes with their file, names with their directory. Of everything else each sector of 512 bytes and each change of a
directory is on the disk or not, whatever came before or after it. One sector, which was being written just then, may hold anything.

Promises: a sector that was never synced has, after a power loss, bytes that it once had, but for one that has any; one that was synced
those it had then, or later ones. Must not know: who writes, when the power goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from polywire.testing.sim.chance import Chance

SECTOR_BYTES: Final = 512
PAGE_BYTES: Final = 4096
VERSIONS_MAX: Final = 4  # of a sector that is not synced: what it was on its way


class Inode:
    """One file. Guards: ``durable`` is what is on the disk for certain; ``dirty`` holds, for each sector that has changed since, what it was
    on its way, newest last."""

    __slots__ = ("data", "dirty", "durable", "number", "opened", "sizes")

    def __init__(self, number: int) -> None:
        self.number: Final = number
        self.data = bytearray()
        self.durable = bytearray()
        self.dirty: dict[int, list[bytes]] = {}
        self.sizes: list[int] = []
        self.opened = 0

    def write(self, view: memoryview, position: int) -> None:
        """Change bytes; what lies between the old end and the new ones is zeros."""
        self.resize(max(len(self.data), position + len(view)))
        self.data[position : position + len(view)] = view
        for sector in range(position // SECTOR_BYTES, -(-(position + len(view)) // SECTOR_BYTES)):
            versions = self.dirty.setdefault(sector, [])
            versions.append(bytes(self.data[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES]))
            if len(versions) > VERSIONS_MAX:
                del versions[0]

    def copied(self) -> Inode:
        """Another one like it."""
        copy = Inode(self.number)
        copy.data, copy.durable, copy.opened = bytearray(self.data), bytearray(self.durable), self.opened
        copy.dirty = {sector: list(versions) for sector, versions in self.dirty.items()}
        copy.sizes = list(self.sizes)
        return copy

    def resize(self, size: int) -> None:
        """Cut the file, or fill it with zeros."""
        if size < len(self.data):
            del self.data[size:]
            self.dirty = {sector: versions for sector, versions in self.dirty.items() if sector * SECTOR_BYTES < size}
        elif size > len(self.data):
            self.data += bytes(size - len(self.data))
        else:
            return
        self.sizes.append(size)

    def sync(self, start: int = 0, stop: int | None = None) -> int:
        """Put pages on the disk, of bytes [start, stop) or all with the size; returns how many sectors that were."""
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
        """Bytes as the disk has them once what waits is written, which that takes for done; without what a failed sync has lost."""
        found = self.durable[start:stop].ljust(min(stop, len(self.data)) - start, b"\0")
        for sector, versions in self.dirty.items():
            at = sector * SECTOR_BYTES
            if start <= at < stop:
                found[at - start : at - start + len(versions[-1])] = versions[-1]
        return found[: max(len(self.data) - start, 0)]

    def lose(self, chance: Chance) -> None:
        """A sync has failed: some of what waited is on the disk, the rest will not be, however often it is tried."""
        for sector in sorted(self.dirty):
            versions = self.dirty.pop(sector)
            if chance.happens(0.5):
                self._put(self.durable, sector, versions[-1])

    def lose_power(self, chance: Chance, kept: float) -> int:
        """Become what the disk has; returns how many sectors lost something. kept: how much of what was not synced is there."""
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
        """The power goes while a sector is written that was not synced: from somewhere on it holds anything."""
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
    """Names. Guards: ``durable`` are those on the disk for certain; ``changes`` what was done since, in order."""

    __slots__ = ("changes", "durable", "names")

    def __init__(self) -> None:
        self.names: dict[str, Inode | Directory] = {}
        self.durable: dict[str, Inode | Directory] = {}
        self.changes: list[dict[str, Inode | Directory | None]] = []

    def change(self, change: dict[str, Inode | Directory | None]) -> None:
        """Name something, or nothing any more; several names change together or not at all."""
        _apply(self.names, change)
        self.changes.append(change)

    def copied(self, known: dict[int, Inode | Directory]) -> Directory:
        """Another one like it, and of everything below. known: copies that were made, by what they are of: a file may have two names."""
        copy = Directory()
        for names, into in ((self.names, copy.names), (self.durable, copy.durable)):
            into.update((name, _copied(node, known)) for name, node in names.items())
        copy.changes = [
            {name: None if node is None else _copied(node, known) for name, node in change.items()}
            for change in self.changes
        ]
        return copy

    def sync(self) -> int:
        """Put the names on the disk; returns how many changes that were."""
        count = len(self.changes)
        self.durable = dict(self.names)
        self.changes.clear()
        return count

    def lose_power(self, chance: Chance, kept: float) -> int:
        """Become what the disk has; returns how many changes went."""
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
    """Everything that is stored. Guards: ``used_bytes`` are those of files that have a name or are open. reads_past: whether files can be
    read past what the system keeps of them; of one that cannot, nobody could tell what a failed sync has lost."""

    def __init__(self, capacity_bytes: int, *, reads_past: bool = True) -> None:
        self.capacity_bytes = capacity_bytes
        self.reads_past: Final = reads_past
        self.root = Directory()
        self.locks: Final[set[int]] = set()
        """Files that a process has locked."""
        self._number = 0

    def copied(self) -> SimulatedDisk:
        """Another one that has the same, and lost the same."""
        copy = SimulatedDisk(self.capacity_bytes, reads_past=self.reads_past)
        copy.root = self.root.copied({})
        copy.locks.update(self.locks)
        copy._number = self._number
        return copy

    def make_file(self) -> Inode:
        """A file without a name."""
        self._number += 1
        return Inode(self._number)

    def directory(self, path: Path) -> Directory:
        """The directory of this path. Raises FileNotFoundError, NotADirectoryError."""
        return self._directory(path.parts[1:], path)

    def find(self, path: Path) -> Inode | Directory | None:
        """What this path names. Raises what ``directory`` raises of the path above."""
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
        """Every file that has a name, with its path."""
        yield from _files(self.root, "")

    @property
    def used_bytes(self) -> int:
        """Space that is taken."""
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
        """The process is gone, and with it every file it had open."""
        for _, inode in self.files():
            inode.opened = 0
        self.locks.clear()

    def lose_power(self, chance: Chance, kept: float) -> tuple[int, int]:
        """Become what the power loss leaves; returns how many sectors and how many changes of directories went."""
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
