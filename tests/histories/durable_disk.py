"""Power losses of real processes: the rules of the simulated disk, applied to a data directory.

``remember`` copies a data directory before a start. ``losing_broker`` then adds to the copy what the broker syncs.
``lose_power`` replaces the data directory by what may be on the disk: each sector and each change of a directory that was
not synced is there or not, and one sector may have arbitrary contents (``tests.sim.disk``). Files that the broker does not
open through its file port survive as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from tests.sim.chance import Chance
from tests.sim.disk import SECTOR_BYTES, Directory, Inode, SimulatedDisk

DURABLE: Final = "DURABLE"  # environment of a broker: the directory of the copy
IMPATIENT: Final = "IMPATIENT"  # environment of a broker that does not wait for its disk
CHANGES: Final = "changes"
DIRECTORY: Final = (0, 0)
KEPT: Final = (0.0, 0.5, 0.9)  # shares of unsynced data that survive
BLOCK_BYTES: Final = 64 * 1024
CAPACITY_BYTES: Final = 1 << 40


class Change(msgspec.Struct):
    """A change of a directory: the new number and inode of each name, None if it was removed.

    Without names: the directory was synced.
    """

    directory: str
    names: dict[str, tuple[int, int] | None] | None = None


def remember(data: Path, copy: Path) -> None:
    """Make a copy in which everything is durable."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    changes: list[Change] = []
    for folder, directories, names in os.walk(data):
        found: dict[str, tuple[int, int] | None] = dict.fromkeys(directories, DIRECTORY)
        for name in names:
            inode = os.stat(Path(folder) / name).st_ino
            shutil.copyfile(Path(folder) / name, copy / str(inode))
            found[name] = inode, inode
        relative = str(Path(folder).relative_to(data))
        changes += [Change(relative, found), Change(relative)]
    (copy / CHANGES).write_bytes(b"".join(msgspec.json.encode(change) + b"\n" for change in changes))


def lose_power(data: Path, copy: Path, chance: Chance) -> tuple[int, int]:
    """Replace the data directory of a killed broker by what is on the disk.

    Returns how many sectors and how many changes of directories were lost.
    """
    disk = _disk(data, copy)
    files, folders = [path for path, _ in disk.files()], dict(_directories(disk.root, data))
    lost = disk.lose_power(chance, chance.one_of(KEPT))
    for path in files:
        (data / path[1:]).unlink(missing_ok=True)
    left = dict(_directories(disk.root, data))
    for folder in folders.keys() - left.keys():
        shutil.rmtree(folder, ignore_errors=True)
    for folder in left:
        folder.mkdir(exist_ok=True)
    for path, inode in disk.files():
        (data / path[1:]).write_bytes(inode.data)
    return lost


def _directories(directory: Directory, path: Path) -> Iterator[tuple[Path, Directory]]:
    """Yield all directories, a parent before its children."""
    yield path, directory
    for name, node in directory.names.items():
        if isinstance(node, Directory):
            yield from _directories(node, path / name)


def _disk(data: Path, copy: Path) -> SimulatedDisk:
    """Return the disk at the moment of the kill: what processes saw, and what was synced."""
    disk, nodes = SimulatedDisk(CAPACITY_BYTES), dict[int, Inode]()
    inodes: dict[int, int] = {}
    *lines, _ = (copy / CHANGES).read_bytes().split(b"\n")  # the last line may be a part of one
    for line in lines:
        change = msgspec.json.decode(line, type=Change)
        directory = disk.directory(Path("/", change.directory))
        if change.names is None:
            directory.sync()
            continue
        found: dict[str, Inode | Directory | None] = {}
        for name, entry in change.names.items():
            if entry is None or entry == DIRECTORY:
                found[name] = None if entry is None else Directory()
                continue
            number, inodes[number] = entry
            found[name] = nodes.setdefault(number, Inode(number))
        directory.change(found)
    for number, node in nodes.items():
        node.data[:] = node.durable[:] = (copy / str(number)).read_bytes()
    for path, node in disk.files():
        _read(node, data / path[1:], inodes[node.number])
    return disk


def _read(node: Inode, path: Path, inode: int) -> None:
    """Read what processes saw of a file, unless it was replaced in the moment of the kill."""
    if not path.exists() or path.stat().st_ino != inode:
        return
    node.data[:] = path.read_bytes()
    node.sizes = [] if len(node.data) == len(node.durable) else [len(node.data)]
    for block in range(0, len(node.data), BLOCK_BYTES):
        if node.data[block : block + BLOCK_BYTES] != node.durable[block : block + BLOCK_BYTES]:
            sectors = range(block, min(block + BLOCK_BYTES, len(node.data)), SECTOR_BYTES)
            pairs = ((at, bytes(node.data[at : at + SECTOR_BYTES])) for at in sectors)
            node.dirty |= {
                at // SECTOR_BYTES: [new] for at, new in pairs if new != node.durable[at : at + SECTOR_BYTES]
            }
