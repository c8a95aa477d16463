"""The files of one simulated process: implements ``store.files`` over a simulated disk, with faults.

* A dead process reads and changes nothing.
* Every change is an event.
* A fault happens before any effect, with two exceptions: a write may write part of its data, and a sync may lose data.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from polywire.store.files import NEW_MODE, Access, Hint
from polywire.types import Buffer
from tests.sim.chance import Chance
from tests.sim.disk import SECTOR_BYTES, Directory, Inode, SimulatedDisk
from tests.sim.story import Story

OWNER: Final = 4711  # a process id, the same in every run

_READING: Final = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES)
_WRITING: Final = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOMEM, errno.EFBIG)
ERRORS: Final = {
    "open": _READING,
    "make": (*_WRITING, errno.EMFILE, errno.ENFILE),
    "read": (errno.EIO, errno.ENOMEM),
    "write": _WRITING,
    "sync": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "name": _WRITING,
    "list": _READING,
}
"""The errors of each kind of call."""


class Killed(BaseException):
    """The process ends here. Only the code that runs the world catches this."""


class Faults:
    """The faults of a process. ``calls_left`` before it is killed; ``rates`` of failures by kind of call."""

    __slots__ = ("calls_left", "dead", "rates")

    def __init__(self) -> None:
        self.calls_left = -1
        self.dead = False
        self.rates: dict[str, float] = {}


class SimulatedMapping:
    """A memory-mapped file over the bytes of the file itself."""

    __slots__ = ("_file", "view")

    def __init__(self, file: SimulatedFile) -> None:
        self._file = file
        self.view = memoryview(file.inode.data).toreadonly()

    def find(self, pattern: bytes, start: int) -> int:
        return self._file.inode.data.find(pattern, start)

    def flush(self, start: int, stop: int) -> None:
        self._file.flush(start, stop)

    def forget(self) -> None:
        """Do nothing: no memory is mapped."""


class SimulatedFile:
    """One open file of a process."""

    __slots__ = ("_direct", "_files", "_locked", "_open", "inode", "name")

    def __init__(self, files: SimulatedFiles, inode: Inode, name: str, *, direct: bool = False) -> None:
        """direct: reads return what the disk has."""
        self._files = files
        self._direct = direct
        self._locked = self._open = False
        self.inode: Final = inode
        self.name: Final = name
        inode.opened += 1
        self._open = True

    @property
    def size(self) -> int:
        return len(self.inode.data)

    def read(self, out: Buffer, position: int, *, now: bool = False) -> int:
        files = self._files
        if now and files.chance.happens(files.cold):
            raise BlockingIOError(errno.EAGAIN, "it would wait")
        files.enter("read", "read", f"{self.name} at={position} size={len(out)}")
        if self._direct and (position % SECTOR_BYTES or len(out) % SECTOR_BYTES):
            raise OSError(errno.EINVAL, "Invalid argument", self.name)
        stop = position + len(out)
        data = self.inode.read_past(position, stop) if self._direct else memoryview(self.inode.data)[position:stop]
        memoryview(out).cast("B")[: len(data)] = data
        return len(data)

    def write(self, parts: Sequence[Buffer], position: int, *, past_cache: bool = False) -> int:
        files, content = self._files, b"".join(parts)
        text = f"{self.name} at={position} size={len(content)} crc={zlib.crc32(content):08x}"
        killed = files.enter("write", "write", text, may_end_early=True)
        growth = position + len(content) - len(self.inode.data)
        room = max(files.disk.capacity_bytes - files.disk.used_bytes, 0) if growth > 0 else 0
        if growth > room:
            content = content[: max(len(content) - growth + room, 0)]
            if not content:
                raise OSError(errno.ENOSPC, "No space left on device", self.name)
        short = killed or files.chance.happens(files.short)
        if short:
            content = content[: files.chance.below(len(content) + 1)]
            files.story.tell("short", f"{self.name} size={len(content)}")
        self.inode.write(memoryview(content), position)
        if killed:
            files.die()
        return len(content)

    def sync(self, *, data_only: bool = False) -> None:
        self._files.enter_sync(self)
        self._files.story.tell("synced", f"{self.name} sectors={self.inode.sync()}")

    def flush(self, start: int, stop: int) -> None:
        """Sync a range."""
        self._files.enter_sync(self)
        self._files.story.tell("synced", f"{self.name} [{start}, {stop}) sectors={self.inode.sync(start, stop)}")

    def truncate(self, size: int) -> None:
        self._files.enter("write", "truncate", f"{self.name} size={size}")
        self.inode.resize(size)

    def allocate(self, size: int) -> None:
        self._files.enter("write", "allocate", f"{self.name} size={size}")
        if size - len(self.inode.data) > self._files.disk.capacity_bytes - self._files.disk.used_bytes:
            raise OSError(errno.ENOSPC, "No space left on device", self.name)
        self.inode.resize(max(size, len(self.inode.data)))

    def map(self) -> SimulatedMapping:
        return SimulatedMapping(self)

    def hint(self, hint: Hint, start: int, size: int) -> None:
        """Do nothing: this disk ignores hints."""

    def lock(self) -> None:
        if self.inode.number in self._files.disk.locks:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self._files.disk.locks.add(self.inode.number)
        self._locked = True

    def is_shared(self) -> bool | None:
        return self.inode.opened > 1

    def close(self) -> None:
        if self._locked:
            self._files.disk.locks.discard(self.inode.number)
        if self._open and not self._files.faults.dead:
            self.inode.opened -= 1
        self._locked = self._open = False


class SimulatedFiles:
    """Implements ``Files`` for one process. ``cold``: how often a read would wait for the disk. ``short``: how often a
    write is cut. ``haste``: how often a process is killed soon after a change of a name.
    """

    def __init__(self, disk: SimulatedDisk, chance: Chance, story: Story) -> None:
        self.disk: Final = disk
        self.chance: Final = chance
        self.story: Final = story
        self.faults: Final = Faults()
        self.cold = 0.3
        self.short = 0.0
        self.haste = 0.0

    @property
    def owner(self) -> int:
        return OWNER

    # Faults

    def enter(self, kind: str, event: str, text: str, *, may_end_early: bool = False) -> bool:
        """Begin a call: the process may be killed in it, and the call may fail. Return True if the process must be
        killed during the call.
        """
        faults = self.faults
        if faults.dead:
            raise Killed
        self.story.tell(event, text)
        if faults.calls_left > 0:
            faults.calls_left -= 1
        if faults.calls_left == 0:
            if may_end_early:
                return True
            self.die()
        if self._fails(kind):
            self._fail(kind, text)
        if kind == "name" and faults.calls_left < 0 and self.chance.happens(self.haste):
            faults.calls_left = 2 + self.chance.below(4)
        return False

    def enter_sync(self, file: SimulatedFile) -> None:
        """Begin a sync; if it fails, the pending data may be lost for good."""
        faults = self.faults
        if faults.dead:
            raise Killed
        self.story.tell("sync", file.name)
        if faults.calls_left > 0:
            faults.calls_left -= 1
        if faults.calls_left == 0:
            self.die()
        if self._fails("sync"):
            if self.disk.reads_past and self.chance.happens(0.5):
                file.inode.lose(self.chance)
            self._fail("sync", file.name)

    def die(self) -> None:
        """Kill the process."""
        self.faults.dead = True
        self.story.tell("killed")
        raise Killed

    def _fails(self, kind: str) -> bool:
        rate = self.faults.rates.get(kind, 0.0)
        return rate > 0 and self.chance.happens(rate)

    def _fail(self, kind: str, text: str) -> None:
        code = self.chance.one_of(ERRORS[kind])
        self.story.tell("fault", f"{kind} {errno.errorcode[code]} {text}")
        raise OSError(code, os.strerror(code), text)

    # The interface

    def open(self, path: Path, access: Access, mode: int = NEW_MODE) -> SimulatedFile:
        node = self.disk.find(path)
        if access in (Access.READ, Access.DIRECT, Access.WRITE) or (access is Access.KEEP and node is not None):
            self.enter("open", "open", f"{path.name} {access.name}")
            if node is None:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            if access is Access.DIRECT and not self.disk.reads_past:
                raise OSError(errno.EINVAL, "Invalid argument", str(path))
        elif node is None:
            self.enter("make", "make", path.name)
            node = self.disk.make_file()
            self.disk.directory(path.parent).change({path.name: node})
        elif access is Access.NEW:
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        else:
            self.enter("make", "empty", path.name)
            assert isinstance(node, Inode), "a directory is not written"
            node.resize(0)
        if isinstance(node, Directory):
            node = Inode(0)  # only its lock matters
        return SimulatedFile(self, node, path.name, direct=access is Access.DIRECT)

    def size(self, path: Path) -> int:
        node = self.disk.find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return len(node.data) if isinstance(node, Inode) else 0

    def names(self, path: Path) -> list[str]:
        self.enter("list", "list", path.name)
        found = [name for name, node in sorted(self.disk.directory(path).names.items()) if isinstance(node, Inode)]
        return [found.pop(self.chance.below(len(found))) for _ in range(len(found))]

    def make_directory(self, path: Path) -> bool:
        if self.disk.find(path) is not None:
            self.disk.directory(path)
            return False
        self.enter("name", "mkdir", str(path))
        self.disk.directory(path.parent).change({path.name: Directory()})
        return True

    def link(self, path: Path, new: Path) -> None:
        self.enter("name", "link", f"{path.name} {new.name}")
        directory, node = self.disk.directory(new.parent), self.disk.find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        if new.name in directory.names:
            raise FileExistsError(errno.EEXIST, "File exists", str(new))
        directory.change({new.name: node})

    def rename(self, path: Path, new: Path) -> None:
        self.enter("name", "rename", f"{path.name} {new.name}")
        directory = self.disk.directory(path.parent)
        assert path.parent == new.parent, "names change within one directory"
        node = directory.names.get(path.name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        directory.change({path.name: None, new.name: node})

    def unlink(self, path: Path) -> None:
        directory = self.disk.directory(path.parent)
        if path.name not in directory.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        self.enter("name", "unlink", path.name)
        directory.change({path.name: None})

    def sync_directory(self, path: Path) -> None:
        self.enter("sync", "sync", f"{path.name}/")
        self.story.tell("synced", f"{path.name}/ changes={self.disk.directory(path).sync()}")

    def free_bytes(self, path: Path) -> int:
        return max(self.disk.capacity_bytes - self.disk.used_bytes, 0)

    def token(self, size: int) -> bytes:
        return self.chance.token(size)
