"""Store segments and snapshots as objects of a bucket, with a cache of local files.

* It implements the interface ``store.base.Store``.
* A failed request raises Busy. It is never reported as damage or as a missing object.
* The cache holds recently written objects, and parts of objects that were read. Its size is limited, and it may be
  deleted at any time.
* When the broker starts, the footers of all segments are read in parallel.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Final, TypeVar

from polywire.errors import BrokerError, Busy, ErrorCode, Unavailable
from polywire.store.base import Blob, BlobExists, BlobMissing, CopiedParts
from polywire.store.file import FileStore
from polywire.store.files import Access, Files
from polywire.store.objects import Objects
from polywire.types import Buffer

TAIL_BYTES: Final = 64 * 1024  # enough for the footer of most segments
AHEAD_MAX: Final = 512  # 32 MiB: two round trips of parallel reads
THREADS: Final = 256
CHUNKS: Final = "chunks"
# small reads of a blob fetch chunks of this size, because a request takes as long as transferring 1 MiB
CHUNK_BYTES: Final = 1 << 20
LITTLE_BYTES: Final = CHUNK_BYTES // 4
TRIES: Final = 6
PAUSE_FIRST_S: Final = 0.1
RETRY_MS: Final = 1000
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Tail:
    """The last bytes of an object in a bucket.

    Attributes:
        start: position of ``content`` in the object.
        size: size of the object.
        content: bytes from ``start`` to the end.
    """

    start: int
    size: int
    content: bytes


class Tails:
    """Reads the ends of objects in advance, in the order of ``names``, at most ``AHEAD_MAX`` at a time."""

    def __init__(self, fetch: Callable[[str], Tail], names: Sequence[str]) -> None:
        self._fetch = fetch
        self._names = iter(names)
        self._ahead: OrderedDict[str, Future[Tail]] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "polywire-tails")
        self._fill()

    def of(self, name: str) -> Tail | None:
        """Return the end of an object, or None if it was not read in advance. Drops the ends of objects before it."""
        if name not in self._ahead:
            return None
        while next(iter(self._ahead)) != name:
            self._ahead.popitem(last=False)
        self._fill()
        try:
            return self._ahead[name].result()
        except (BrokerError, BlobMissing):
            return None

    def _fill(self) -> None:
        while len(self._ahead) < AHEAD_MAX and (name := next(self._names, None)) is not None:
            self._ahead[name] = self._threads.submit(self._fetch, name)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._ahead.clear()


class RemoteBlob:
    """An object that has no cached file. Opening it sends no request."""

    __slots__ = ("_name", "_store")

    def __init__(self, store: BucketStore, name: str) -> None:
        self._store = store
        self._name = name

    @property
    def size(self) -> int:
        return self._store.size(self._name)

    @property
    def is_cached(self) -> bool:
        return False

    def pread_into(self, out: Buffer, position: int) -> int:
        found = self._store.fetch(self._name, position, position + len(out))
        memoryview(out)[: len(found)] = found
        return len(found)

    def read_now(self, out: Buffer, position: int) -> bool:
        return False

    def read_direct(self, block: memoryview, start: int, stop: int) -> memoryview:
        found = self._store.fetch(self._name, start, stop)
        block[: len(found)] = found
        return block[: len(found)]


class KeptBlob:
    """An object with a cached file. If the file is unreadable or incomplete, the bucket is read instead."""

    __slots__ = ("_file", "_remote", "size")

    def __init__(self, file: Blob, remote: RemoteBlob, size: int) -> None:
        self._file = file
        self._remote = remote
        self.size: Final = size

    @property
    def is_cached(self) -> bool:
        return self._file.is_cached

    def pread_into(self, out: Buffer, position: int) -> int:
        with suppress(Unavailable):
            count = self._file.pread_into(out, position)
            if count == min(len(out), self.size - position):
                return count
        return self._remote.pread_into(out, position)

    def read_now(self, out: Buffer, position: int) -> bool:
        return self._file.read_now(out, position)

    def read_direct(self, block: memoryview, start: int, stop: int) -> memoryview:
        with suppress(Unavailable):
            found = self._file.read_direct(block, start, stop)
            if len(found) == min(stop, self.size) - start:
                return found
        return self._remote.read_direct(block, start, stop)


class _Evicting(CopiedParts):
    """Evicts cached files to make space for parts, before these are written."""

    def __init__(self, parts: CopiedParts, evict: Callable[[int], None]) -> None:
        super().__init__(parts.part_bytes)
        self._parts = parts
        self._evict = evict
        self._size = 0

    def fill(self, out: memoryview) -> int:
        count = self._parts.fill(out)
        self._size += count
        self._evict(self._size)
        return count


class BucketStore:
    """Stores segments and snapshots in a bucket, with a cache in a local directory. Implements ``Store``.

    Args:
        objects: objects of this shard.
        directory: directory of the cache. Existing files are removed.
        cache_bytes: size limit of the cache directory.
        memory_bytes: limit of recently written bytes that stay in memory, for uploading and reading.
    """

    def __init__(
        self, objects: Objects, directory: Path, files: Files, *, cache_bytes: int, memory_bytes: int = 0
    ) -> None:
        self._objects = objects
        self._directory = directory
        self._files = files
        self._cache = FileStore(directory, files=files, kept_bytes=memory_bytes)
        self._cache_bytes = cache_bytes
        # sizes of blobs with a complete file, least recently used first
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._kept_bytes = 0
        self._lock = Lock()
        self._one_writes = Lock()
        self._tails: Tails | None = None
        self._stopped = Event()

    def stop(self) -> None:
        """Stop retrying. Callers that are waiting for a retry get Busy."""
        self._stopped.set()

    def read_ahead(self, names: Sequence[str]) -> None:
        """Read the ends of these objects in advance. An empty list stops reading."""
        if self._tails is not None:
            self._tails.close()
        self._tails = Tails(self._fetch_tail, names) if names else None

    def _fetch_tail(self, name: str) -> Tail:
        size = self._size(name)
        start = max(size - TAIL_BYTES, 0)
        return Tail(start, size, self._fetch(name, start, size))

    def put_new(self, name: str, parts: Iterable[Buffer]) -> None:
        content = self._cache.put_cached(name, self._evict_before(parts)) or [self._mapped(name)]
        size = sum(map(len, content))
        try:
            self._create(name, content, size)
        except (BrokerError, BlobExists):
            self._cache.delete(name)
            raise
        self._keep(name, size)

    def _mapped(self, name: str) -> memoryview:
        file = self._files.open(self._directory / name, Access.READ)
        try:
            return file.map().view
        finally:
            file.close()

    def _create(self, name: str, content: Sequence[Buffer], size: int) -> None:
        """Create an object, repeating the request if necessary.

        No two starts of a broker use the same name. So if the name exists when a request is repeated, the first request
        has succeeded.
        """
        tried = False

        def create() -> None:
            nonlocal tried
            try:
                self._objects.create(name, content)
            except BlobExists:
                if not tried or self._objects.size(name) != size:
                    raise
            except Unavailable:
                tried = True
                raise

        self._repeated(create)

    def put(self, name: str, parts: Iterable[Buffer]) -> None:
        content = b"".join(bytes(part) for part in parts)
        self._forget(name)
        self._repeated(lambda: self._objects.put(name, content))

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        blob = self.open(name)
        if isinstance(blob, RemoteBlob):
            return self.fetch(name, start, stop)
        found = bytearray(max((blob.size if stop is None else min(stop, blob.size)) - start, 0))
        count = blob.pread_into(found, start)
        return bytes(found[:count])

    def fetch(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read from the bucket. Small reads fetch and cache the chunks of fixed size that contain the range."""
        if start == 0 and stop is None:
            return self._repeated(lambda: self._objects.read(name)).content
        end = self.size(name) if stop is None else stop
        if start >= end:
            return b""
        tail = None if self._tails is None else self._tails.of(name)
        if tail is not None and tail.start <= start:
            return tail.content[start - tail.start : end - tail.start]
        if end - start > LITTLE_BYTES or self._cache_bytes < CHUNK_BYTES:
            return self._fetch(name, start, end)
        first, last = start // CHUNK_BYTES, (end - 1) // CHUNK_BYTES
        found = b"".join(self._chunk(name, number) for number in range(first, last + 1))
        return found[start - first * CHUNK_BYTES : end - first * CHUNK_BYTES]

    def _fetch(self, name: str, start: int, stop: int) -> bytes:
        return self._repeated(lambda: self._objects.read_range(name, start, stop))

    def _chunk(self, name: str, number: int) -> bytes:
        """Return a chunk of fixed size of an object, shorter or empty at the object's end."""
        chunk = _chunk_name(name, f"{number:x}")
        size = self._use(chunk)
        if size is not None:
            with suppress(BlobMissing, Unavailable):
                found = self._cache.get(chunk)
                if len(found) == size:
                    return found
            self._forget(chunk)
        found = self._fetch(name, number * CHUNK_BYTES, (number + 1) * CHUNK_BYTES)
        with suppress(BrokerError), self._one_writes:  # if the disk is full, nothing is cached
            self._cache.put(chunk, self._evict_before([found]))
            self._keep(chunk, len(found))
        return found

    def open(self, name: str) -> Blob:
        remote, size = RemoteBlob(self, name), self._use(name)
        if size is None:
            return remote
        try:
            return KeptBlob(self._cache.open(name), remote, size)
        except (BlobMissing, Unavailable):
            self._forget(name)
        return remote

    def list(self, prefix: str) -> list[str]:
        return self._repeated(lambda: self._objects.list(prefix))

    def delete(self, name: str) -> None:
        self._forget(name)
        self._repeated(lambda: self._objects.delete(name))

    def delete_in_steps(self, name: str) -> Iterator[int]:
        self.delete(name)
        yield 1

    def size(self, name: str) -> int:
        with self._lock:
            kept = self._kept.get(name)
        if kept is not None:
            return kept
        tail = None if self._tails is None else self._tails.of(name)
        return self._size(name) if tail is None else tail.size

    def drop_copy(self, name: str) -> bool:
        # True in any case: another thread may have dropped the copy that the caller has read
        with self._lock:
            chunks = [kept for kept in self._kept if kept.startswith(_chunk_name(name, ""))]
        for kept in (name, *chunks):
            self._forget(kept)
        return True

    def _size(self, name: str) -> int:
        return self._repeated(lambda: self._objects.size(name))

    # Files

    @property
    def cached_bytes(self) -> int:
        return self._kept_bytes

    def _evict_before(self, parts: Iterable[Buffer]) -> Iterable[Buffer]:
        """Return the parts. Before each part, cached files are evicted to make space for it."""
        return _Evicting(parts, self._evict) if isinstance(parts, CopiedParts) else self._evict_before_each(parts)

    def _evict_before_each(self, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        size = 0
        for part in parts:
            size += len(part)
            self._evict(size)
            yield part

    def _evict(self, size: int) -> None:
        old = []
        with self._lock:
            while self._kept and self._kept_bytes + size > self._cache_bytes:
                oldest, taken = self._kept.popitem(last=False)
                self._kept_bytes -= taken
                old.append(oldest)
        for oldest in old:
            self._cache.delete(oldest)

    def _keep(self, name: str, size: int) -> None:
        """Add a complete file to the cache, and evict others if necessary. A file larger than the limit is removed."""
        with self._lock:
            self._kept_bytes += size - self._kept.pop(name, 0)
            self._kept[name] = size
        self._evict(0)

    def _use(self, name: str) -> int | None:
        with self._lock:
            size = self._kept.get(name)
            if size is not None:
                self._kept.move_to_end(name)
            return size

    def _forget(self, name: str) -> None:
        with self._lock:
            self._kept_bytes -= self._kept.pop(name, 0)
        self._cache.delete(name)

    def _repeated(self, ask: Callable[[], _Result]) -> _Result:
        return repeated(ask, self._stopped)


def _chunk_name(name: str, number: str) -> str:
    return f"{CHUNKS}/{name.replace('/', '-')}.{number}"


def repeated(ask: Callable[[], _Result], stopped: Event) -> _Result:
    """Send a request, and repeat it a few times on failure, unless stopped. Raises Busy, BlobExists or BlobMissing."""
    pause = PAUSE_FIRST_S
    for left in range(TRIES - 1, -1, -1):
        try:
            return ask()
        except Unavailable as error:
            if left == 0 or stopped.wait(pause):
                raise Busy(ErrorCode.BUSY, error.message, retry_after_ms=RETRY_MS) from error
            pause *= 2
    raise AssertionError("the last attempt returns or raises")
