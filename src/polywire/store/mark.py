"""A mark in a data directory: how a process that knows the directory by its path finds out whether it sees the broker's own.

The broker that owns a directory writes a new token into its file ``LOCK`` at every start, before it writes any blob. So whoever opened a
blob and then finds the token there has opened what that broker means by the blob's name, and no other directory that lies under the same
path on another machine, in a container, or in a copy that went its own way.

Promises: anything but a file with this token is "not here", never an error. Must not know: blobs, who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from polywire.store.files import Files, read_file
from polywire.store.system_files import SYSTEM_FILES

MARK_FILE: Final = "LOCK"
MARK_BYTES: Final = 16
_CONTENT_BYTES_MAX: Final = 128  # a process id, a token, two line breaks, and some to spare


@dataclass(frozen=True, slots=True)
class BlobRoot:
    """Where blobs lie for who reads them without the broker: the absolute path of a directory, or the URL of a bucket, and what tells it
    from every other. ``prefix`` stands before the names of blobs there."""

    address: str
    mark: bytes
    prefix: str = ""

    @property
    def is_bucket(self) -> bool:
        """Whether the address is a bucket's URL."""
        return bool(self.address) and not self.address.startswith("/")

    @property
    def is_on_a_machine(self) -> bool:
        """Whether the address means something on one machine only."""
        return not self.is_bucket or self.address.startswith("file:")


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """A data directory by its absolute path, and the token of the broker start that owns it."""

    path: str
    mark: bytes

    @property
    def root(self) -> BlobRoot:
        """The same, for who is told of it."""
        return BlobRoot(self.path, self.mark)

    @classmethod
    def owned(cls, directory: Path, files: Files = SYSTEM_FILES) -> DataDirectory:
        """A directory as the process that has just locked it knows it, with a new token."""
        return cls(str(directory.resolve()), files.token(MARK_BYTES))

    def content(self, owner: int) -> bytes:
        """What the owner writes into the file: its process id, for people, and the token."""
        return f"{owner}\n{self.mark.hex()}\n".encode("ascii")

    def is_here(self) -> bool:
        """Whether this process sees the directory, and the same owner still has it."""
        try:
            content = read_file(SYSTEM_FILES, Path(self.path) / MARK_FILE, _CONTENT_BYTES_MAX)
        except (OSError, ValueError):  # a path that no system takes is no path of ours
            return False
        lines = content.split(b"\n")
        return len(self.mark) == MARK_BYTES and lines[1:2] == [self.mark.hex().encode("ascii")]
