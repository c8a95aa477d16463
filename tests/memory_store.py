"""A store in memory, for tests and for brokers that do not persist. It implements the whole ``Store`` interface."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from polywire.store.base import BlobExists, BlobMissing, check_blob_name
from polywire.types import Buffer


class MemoryBlob:
    """Bytes as an open blob."""

    __slots__ = ("_content",)

    def __init__(self, content: bytes) -> None:
        self._content = content

    @property
    def size(self) -> int:
        return len(self._content)

    @property
    def is_cached(self) -> bool:
        return False

    def pread_into(self, out: Buffer, position: int) -> int:
        part = self._content[position : position + len(out)]
        memoryview(out)[: len(part)] = part
        return len(part)

    def read_now(self, out: Buffer, position: int) -> bool:
        return self.pread_into(out, position) == len(out)

    def read_direct(self, block: memoryview, start: int, stop: int) -> memoryview:
        part = self._content[start:stop]
        block[: len(part)] = part
        return block[: len(part)]


class MemoryStore:
    """Blobs in a dictionary."""

    __slots__ = ("_blobs",)

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def put_new(self, name: str, parts: Iterable[Buffer]) -> None:
        check_blob_name(name)
        if name in self._blobs:
            raise BlobExists(name)
        content = bytearray()
        for part in parts:
            content += part
        self._blobs[name] = bytes(content)

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        check_blob_name(name)
        self._blobs[name] = b"".join(bytes(part) for part in parts)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._content(name)[start:stop]

    def open(self, name: str) -> MemoryBlob:
        return MemoryBlob(self._content(name))

    def list(self, prefix: str) -> list[str]:
        depth = prefix.count("/")
        return sorted(name for name in self._blobs if name.startswith(prefix) and name.count("/") == depth)

    def delete(self, name: str) -> None:
        check_blob_name(name)
        self._blobs.pop(name, None)

    def delete_in_steps(self, name: str) -> Iterator[int]:
        size = len(self._blobs.get(name, b""))
        self.delete(name)
        yield size

    def drop_copy(self, name: str) -> bool:
        return False

    def size(self, name: str) -> int:
        return len(self._content(name))

    def _content(self, name: str) -> bytes:
        check_blob_name(name)
        content = self._blobs.get(name)
        if content is None:
            raise BlobMissing(name)
        return content
