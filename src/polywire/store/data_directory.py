"""Check whether a path is the data directory of a given broker.

The path alone proves nothing: it may be on another machine, in a container, or a restored copy. The broker writes a new
token into the file ``LOCK`` at every start, before it writes any blob. If a client opens a blob and then finds the
broker's token in ``LOCK``, the blob belongs to the broker. In all other cases the client reads through the broker,
without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from polywire.store.files import Files, read_file
from polywire.store.system_files import SYSTEM_FILES

MARK_FILE: Final = "LOCK"
MARK_BYTES: Final = 16
_CONTENT_BYTES_MAX: Final = 128  # a process id, a token and two line breaks, with space to spare


@dataclass(frozen=True, slots=True)
class BlobRoot:
    """Location of segment files, for processes that read them without the broker.

    Attributes:
        address: absolute path of a directory, or URL of a bucket.
        mark: random token that distinguishes this location from every other.
        prefix: prefix of the names of files there.
    """

    address: str
    mark: bytes
    prefix: str = ""

    @property
    def is_bucket(self) -> bool:
        return bool(self.address) and not self.address.startswith("/")

    @property
    def is_on_a_machine(self) -> bool:
        """Whether the address is a path, which is valid on one machine only."""
        return not self.is_bucket or self.address.startswith("file:")


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """A data directory and the broker process that owns it.

    Attributes:
        path: absolute path.
        mark: random token, new at each start of the broker.
    """

    path: str
    mark: bytes

    @property
    def root(self) -> BlobRoot:
        """The location as it is sent to clients."""
        return BlobRoot(self.path, self.mark)

    @classmethod
    def owned(cls, directory: Path, files: Files = SYSTEM_FILES) -> DataDirectory:
        """Return the data directory that this process has just locked, with a new random token."""
        return cls(str(directory.resolve()), files.token(MARK_BYTES))

    def content(self, owner: int) -> bytes:
        """Return the content of the file ``LOCK``: the process id, for people who read the file, and the token."""
        return f"{owner}\n{self.mark.hex()}\n".encode("ascii")

    def is_here(self) -> bool:
        """Return whether this process can access the directory and the file ``LOCK`` still has the token ``mark``."""
        try:
            content = read_file(SYSTEM_FILES, Path(self.path) / MARK_FILE, _CONTENT_BYTES_MAX)
        except (OSError, ValueError):  # the system does not accept the path
            return False
        lines = content.split(b"\n")
        return len(self.mark) == MARK_BYTES and lines[1:2] == [self.mark.hex().encode("ascii")]
