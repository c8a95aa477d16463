"""Read sealed records directly from the broker's files or bucket, and all others from the broker (decision 0120).

The Spark source and the process that writes tables use it. The result is the same as from the broker: each record once
and in order. Files and buckets are read only if they contain the broker's identifying token. Their data is used only if
all checksums match. Otherwise records are fetched from the broker, or the read fails if sealed segments are required.

A *run* is the contiguous part of a segment file that has the records of one partition.

A bucket is read with the credentials of this process, and with several concurrent requests per run.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Final, Protocol

from polywire.client.bulk import BulkConnection, PartitionRange, StoredChunk
from polywire.client.failures import beyond
from polywire.errors import BrokerError, ErrorCode, Invalid, Unavailable
from polywire.protocols.polywire.messages import ANY_EPOCH, Located, SealedRange
from polywire.records.allocation import Arena
from polywire.records.batch import first_damaged, read_header, walk
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.store.base import BlobMissing, check_blob_name
from polywire.store.data_directory import BlobRoot, DataDirectory
from polywire.store.file import FileBlob
from polywire.store.identity import find_identity
from polywire.store.objects import Objects
from polywire.store.url import open_bucket
from polywire.types import Buffer

CHUNK_BYTES: Final = 4 << 20  # bytes of one request: as many as a connection transfers in a round trip of 40 ms
READS_AT_ONCE: Final = 4  # concurrent requests of one run; with more, the CPU would be the bottleneck, not the bucket
TIMEOUT_S: Final = 30.0
TRIES: Final = 4
PAUSE_FIRST_S: Final = 0.1
_Key = tuple[int, str, bytes, tuple[tuple[str, str], ...]]
_sources: dict[_Key, BucketSource | BrokerError] = {}
_lock: Final = Lock()
PIECE_BYTES: Final = 4 << 20  # bytes read at a time, as many as a protocol frame contains
# smaller runs are read from the broker, together with their neighbours, because opening a file takes 0.1 ms
RUN_BYTES_MIN: Final = 1 << 20
# Limits of SegmentReader. Its time matters less than the broker's: locating a range costs the broker as much as serving
# 2,000 records.
READER_RECORDS_MIN: Final = 2_000
READER_RUN_BYTES_MIN: Final = 64 << 10
REQUEST_BYTES: Final = 16 << 20  # bytes requested at a time over a connection that cannot be opened again
RANGE_RECORDS_MIN: Final = 50_000  # smaller ranges are read from the broker, because locating a range takes 0.2 ms
logger: Final = logging.getLogger("polywire.sealed")
_inaccessible: Final[set[BulkConnection]] = set()
"""Connections to brokers whose files this process cannot access. No more locations are requested over them."""


@dataclass(frozen=True, slots=True)
class SealedRuns:
    """Locations of a range's records in segment files in a bucket."""

    root: BlobRoot
    runs: tuple[SealedRange, ...]


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Records of a partition, from ``offset`` to ``offset_end`` (exclusive).

    Attributes:
        incarnation: incarnation number of the partition.
        epoch: leader epoch in which ``offset_end`` was observed.
        sealed: locations of its records in segment files; None if that was not requested.
    """

    topic: str
    partition: int
    incarnation: int
    epoch: int
    offset: int
    offset_end: int
    sealed: SealedRuns | None = None

    @property
    def record_count(self) -> int:
        """Number of offsets in the range. Compaction may have left fewer records."""
        return self.offset_end - self.offset


def located(connection: BulkConnection, wanted: ReadRange, *, epoch: int) -> Iterator[Located]:
    """Yield the locations of a range's records in segments.

    Raises the errors of ``BulkConnection.locate``, and Corrupt.
    """
    offset, more = wanted.offset, True
    while more:
        answer = connection.locate(
            wanted.topic, wanted.partition, wanted.incarnation, offset, wanted.offset_end, epoch=epoch
        )
        more = answer.more and bool(answer.runs)
        if more:
            offset = beyond(offset, answer.runs[-1].next_offset, "offset")
        yield answer


class BucketSource:
    """Reads segments in a broker's bucket, after its identity was checked."""

    def __init__(self, objects: Objects) -> None:
        self.arena: Final = Arena()
        self._objects = objects
        self._readers = ThreadPoolExecutor(READS_AT_ONCE, "polywire-bucket")

    def open(self, run: SealedRange) -> RunBytes:
        """Return a reader of a byte range of a segment. The first bytes are requested immediately."""
        return RunBytes(self, run)

    def request(self, name: str, start: int, stop: int) -> Future[bytes]:
        """Request the bytes from ``start`` to ``stop`` of an object.

        The future fails with BlobMissing or Unavailable.
        """
        return self._readers.submit(self._read, name, start, stop)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        pause = PAUSE_FIRST_S
        for left in range(TRIES - 1, -1, -1):
            try:
                return self._objects.read_range(name, start, stop)
            except Unavailable:
                if not left:
                    raise
                time.sleep(pause)
                pause *= 2
        raise AssertionError("the last attempt returns or raises")


class RunBytes:
    """Reads a byte range of a segment in a bucket, in order. The following bytes are always requested ahead."""

    def __init__(self, source: BucketSource, run: SealedRange) -> None:
        self._source = source
        self._run = run
        self._next = run.start
        self._ahead: deque[tuple[int, Future[bytes]]] = deque()
        self._look_ahead()

    def _look_ahead(self) -> None:
        while len(self._ahead) < READS_AT_ONCE and self._next < self._run.stop:
            stop = min(self._next + CHUNK_BYTES, self._run.stop)
            self._ahead.append((self._next, self._source.request(self._run.blob, self._next, stop)))
            self._next = stop

    def pread_into(self, out: Buffer, position: int) -> int:
        """Fill ``out`` with the bytes at ``position``, which must be where the last read ended. Return their number.

        It is smaller than ``out`` if the object is too short. Raises BlobMissing or Unavailable.
        """
        into, done = memoryview(out), 0
        while done < len(into) and self._ahead:
            start, asked = self._ahead[0]
            found = memoryview(asked.result())[position + done - start :]
            part = found[: len(into) - done]
            into[done : done + len(part)] = part
            done += len(part)
            if len(part) == len(found):
                self._ahead.popleft()
                self._look_ahead()
            if not len(part):
                break
        return done

    def expect(self, start: int, stop: int) -> None:
        """Do nothing, because the following bytes are always requested ahead."""


def bucket_source(root: BlobRoot, options: Mapping[str, str]) -> BucketSource:
    """Return a broker's bucket, which is opened once per process.

    Raises BrokerError. An error that is not temporary is raised again by later calls.
    """
    key = (os.getpid(), root.address, root.mark, tuple(sorted(options.items())))
    with _lock:
        known = _sources.get(key)
        if known is None:
            try:
                known = _opened(root, options)
            except Invalid as error:  # Unavailable is not cached, because it may be temporary
                known = error
            _sources[key] = known
    if isinstance(known, BrokerError):
        raise known
    return known


def _opened(root: BlobRoot, options: Mapping[str, str]) -> BucketSource:
    try:
        objects = open_bucket(root.address, timeout_s=TIMEOUT_S, options=options, make=False)
    except OSError as error:
        raise Unavailable(ErrorCode.STORAGE_FAILED, f"cannot open the bucket: {error}") from error
    identity = find_identity(objects)
    if identity is None or identity.mark != root.mark:
        found = None if identity is None else identity.id
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"the bucket is not the broker's bucket url={root.address!r} id={found}"
        )
    return BucketSource(objects)


class _NotRead(Exception):
    """Raised if a part of a segment is not where the broker located it, or is damaged.

    The broker has its records, too.
    """


class _Gone(_NotRead):
    """Raised if a segment was deleted after the broker located it, because its records were trimmed or rewritten."""


class _Bytes(Protocol):
    def pread_into(self, out: Buffer, position: int) -> int:
        """Fill ``out`` with the bytes at ``position``, and return their number. It is smaller at the end of the file.

        Raises BlobMissing or Unavailable.
        """

    def expect(self, start: int, stop: int) -> None:
        """Request bytes in advance that will be read next."""


class _Source(Protocol):
    @property
    def arena(self) -> Arena: ...

    def open(self, run: SealedRange) -> _Bytes:
        """Return a reader of a byte range of a segment, after checking that the file belongs to the broker.

        Raises _NotRead.
        """


@dataclass(slots=True)
class Tally:
    """Counts the bytes that were read from files, a bucket, and the broker."""

    file_bytes: int = 0
    wire_bytes: int = 0
    bucket_bytes: int = 0

    def add(self, source: _Source, size: int) -> None:
        """Count bytes that were read from segments."""
        if isinstance(source, BucketSource):
            self.bucket_bytes += size
        else:
            self.file_bytes += size


@dataclass(frozen=True, slots=True)
class SealedAccess:
    """Whether records are read from segments without the broker.

    Attributes:
        allowed: whether records may be read from segments.
        required: whether they must be read from segments; otherwise an error is raised.
        bucket: options of the library that reads the bucket.
        records_min: smaller ranges are read from the broker. None means ``RANGE_RECORDS_MIN``.
        run_bytes_min: smaller runs are read from the broker. None means ``RUN_BYTES_MIN``.
        request_bytes: bytes that are requested from the broker at a time; -1 for whole ranges. With a limit, each
            response is received completely before its first chunk is used. So a connection that cannot be opened again
            remains usable if the caller stops before the end of the range.
    """

    allowed: bool = True
    required: bool = False
    bucket: Mapping[str, str] = field(default_factory=dict)
    records_min: int | None = None
    run_bytes_min: int | None = None
    request_bytes: int = -1


def read_range(
    connect: Callable[[], BulkConnection],
    wanted: ReadRange,
    tally: Tally,
    *,
    bodies: bool,
    check_epoch: bool,
    access: SealedAccess,
) -> Iterator[StoredChunk]:
    """Yield the chunks of a range in order, like ``BulkConnection.fetch_range``.

    Args:
        connect: returns a connection to the broker. Called only if it is needed.
        wanted: the range.
        tally: counts the bytes read.
        bodies: if false, only headers of batches are read, always from the broker, because they are a small part of a
            segment.
        check_epoch: whether the range must have been observed since the broker's last start.
        access: whether records are read from segments without the broker.

    Raises the errors of ``fetch_range``, and Unavailable if segments must be read without the broker but cannot.
    """
    epoch = wanted.epoch if check_epoch else ANY_EPOCH
    reading = _RangeRead(connect, wanted, epoch, tally, access)
    records_min = RANGE_RECORDS_MIN if access.records_min is None else access.records_min
    if access.allowed and bodies and (access.required or wanted.record_count >= records_min):
        for source, run in reading.runs():
            yield from reading.from_broker(run.first_offset)
            yield from reading.sealed(source, run)
    yield from reading.from_broker(wanted.offset_end, bodies=bodies)


class _RangeRead:
    """A range that is being read: from files or the bucket where possible, otherwise from the broker."""

    def __init__(
        self, connect: Callable[[], BulkConnection], wanted: ReadRange, epoch: int, tally: Tally, access: SealedAccess
    ) -> None:
        self._connect = connect
        self._wanted = wanted
        self._epoch = epoch
        self._tally = tally
        self._access = access
        self._at = wanted.offset

    def runs(self) -> Iterator[tuple[_Source, SealedRange]]:
        """Yield the segment parts of the range that are large enough, if this process can access them.

        Raises Unavailable if it cannot, and the options require it.
        """
        bytes_min = RUN_BYTES_MIN if self._access.run_bytes_min is None else self._access.run_bytes_min
        bytes_min = 0 if self._access.required else bytes_min
        for root, runs in self._locations():
            source = self._open(root)
            if source is None:
                return
            for run in runs:
                if run.stop - run.start >= bytes_min:
                    yield source, run

    def _locations(self) -> Iterator[tuple[BlobRoot, Sequence[SealedRange]]]:
        """Yield the locations that were planned, or those that the broker reports now."""
        if self._wanted.sealed is not None:
            yield self._wanted.sealed.root, self._wanted.sealed.runs
            return
        connection = self._connect()
        if connection in _inaccessible and not self._access.required:
            return
        answers = located(connection, self._wanted, epoch=self._epoch)
        while True:
            try:
                answer = next(answers, None)
            except Invalid:  # an older broker without this request
                self._refuse("the broker does not report their location")
                _inaccessible.add(connection)
                return
            if answer is None:
                return
            yield BlobRoot(answer.address, answer.mark), answer.runs

    def _open(self, root: BlobRoot) -> _Source | None:
        """Return the directory or bucket with the segments, or None if this process cannot access it."""
        if root.is_bucket:
            try:
                return bucket_source(root, self._access.bucket)
            except BrokerError as error:
                self._refuse(error.message)
                logger.warning(
                    "cannot read the bucket: reading records from the broker instead reason=%s", error.message
                )
                if isinstance(error, Invalid) and self._wanted.sealed is None:
                    _inaccessible.add(self._connect())
                return None
        connection = self._connect()
        data_directory = DataDirectory(root.address, root.mark)
        if data_directory.is_here():
            return FileSource(data_directory, connection.arena)
        self._refuse(f"they are not visible here path={root.address!r}")
        _inaccessible.add(connection)
        logger.info("sealed segments are not accessible: reading records from the broker path=%r", root.address)
        return None

    def _refuse(self, reason: str) -> None:
        """Raise Unavailable if the options forbid reading records of segments from the broker."""
        if self._access.required:
            raise Unavailable(
                ErrorCode.STORAGE_FAILED,
                f"sealed segments cannot be read directly, but localSegments=required demands it: {reason}",
            )

    def from_broker(self, offset_end: int, *, bodies: bool = True) -> Iterator[StoredChunk]:
        """Yield the records below ``offset_end`` that were not yielded yet, from the broker."""
        offset_end, limit = min(offset_end, self._wanted.offset_end), self._access.request_bytes
        while self._at < offset_end:
            before, chunks = self._at, self._request(offset_end, limit, bodies=bodies)
            for chunk in chunks if limit < 0 else list(chunks):
                self._tally.wire_bytes += len(chunk.data)
                yield self._moved(chunk)
            if limit < 0:
                return
            if self._at == before:
                limit = -1  # compaction has removed the rest; otherwise the broker reports the error

    def _request(self, offset_end: int, limit: int, *, bodies: bool) -> Iterator[StoredChunk]:
        wanted = self._wanted
        return self._connect().fetch_range(
            wanted.topic,
            wanted.partition,
            wanted.incarnation,
            self._at,
            offset_end,
            epoch=self._epoch,
            bytes_max=limit,
            bodies=bodies,
        )

    def sealed(self, source: _Source, run: SealedRange) -> Iterator[StoredChunk]:
        """Yield the records in a part of a segment, up to the first that cannot be read or is damaged."""
        wanted = self._wanted
        try:
            for data, next_offset in _pieces(source, run, wanted.incarnation):
                last = min(next_offset, run.next_offset, wanted.offset_end)
                if last > self._at:
                    self._tally.add(source, len(data))
                    yield self._moved(StoredChunk(wanted.topic, wanted.partition, data, self._at, last, last))
        except (_NotRead, BlobMissing, BrokerError) as error:
            self._refuse(f"{error} blob={run.blob!r}")
            level = logging.INFO if isinstance(error, _Gone | BlobMissing) else logging.WARNING
            logger.log(level, "reading from the broker instead blob=%r reason=%s", run.blob, error)

    def _moved(self, chunk: StoredChunk) -> StoredChunk:
        self._at = chunk.offset_end
        return chunk


def _pieces(source: _Source, run: SealedRange, incarnation: int) -> Iterator[tuple[memoryview, int]]:
    """Yield whole batches in a part of a segment whose checksums match, and the offset after them.

    Raises _NotRead if the batches are not where they were located, BlobMissing, and BrokerError if they cannot be read.
    """
    blob, arena = source.open(run), source.arena
    position, rest, next_offset = run.start, memoryview(b""), run.first_offset
    while position < run.stop:
        room = PIECE_BYTES if len(rest) < PIECE_BYTES else BATCH_BYTES_MAX
        if len(rest) >= room:
            raise _NotRead("it contains no batches")
        size = min(room - len(rest), run.stop - position)
        block = arena.take(len(rest) + size)
        block[: len(rest)] = rest
        if blob.pread_into(block[len(rest) :], position) < size:
            raise _NotRead("it is too short")
        position += size
        blob.expect(position, min(position + PIECE_BYTES, run.stop))
        starts = walk(block)
        if not len(starts):
            rest = block
            continue
        first, last = read_header(block), read_header(block, starts[-1])
        end = starts[-1] + last.length
        data, rest = block[:end], block[end:]
        if first.partition != incarnation or first.base_offset > next_offset or first_damaged(data) >= 0:
            raise _NotRead("a checksum does not match")
        next_offset = last.next_offset
        yield data, next_offset
    if len(rest):
        raise _NotRead("the last batch is incomplete")


@dataclass(frozen=True, slots=True)
class FileSource:
    """Reads segment files of a broker on this machine, or on a shared file system."""

    data_directory: DataDirectory
    arena: Arena

    def open(self, run: SealedRange) -> _Bytes:
        """Return a reader of a byte range, after checking that the file is the broker's.

        The broker's token in the directory proves it. Raises _NotRead.
        """
        check_blob_name(run.blob)
        try:
            blob = FileBlob(Path(self.data_directory.path) / run.blob)
        except FileNotFoundError:
            raise _Gone("it was deleted") from None
        except OSError as error:
            raise _NotRead(error.strerror or str(error)) from None
        if not self.data_directory.is_here():
            raise _NotRead("the directory belongs to another broker start")
        if not 0 <= run.start < run.stop <= blob.size:
            raise _NotRead("the file is too short")
        return blob


class SegmentReader:
    """Reads sealed records of a broker from its segments. Implements ``polywire.tables.writer.Source``.

    Attributes:
        tally: counts the bytes read.
    """

    def __init__(self, connection: BulkConnection) -> None:
        self._connection: Final = connection
        self.tally: Final = Tally()

    def ping(self) -> None:
        """Wait for a response from the broker. Raises Unavailable."""
        self._connection.ping()

    def bounds(self, topics: Sequence[str]) -> list[PartitionRange]:
        """Implements ``Source``."""
        return self._connection.bounds(topics)

    def fetch_range(
        self, topic: str, partition: int, incarnation: int, offset: int, offset_end: int, *, epoch: int
    ) -> Iterator[StoredChunk]:
        """Implements ``Source``."""
        wanted = ReadRange(topic, partition, incarnation, epoch, offset, offset_end)
        access = SealedAccess(
            records_min=READER_RECORDS_MIN, run_bytes_min=READER_RUN_BYTES_MIN, request_bytes=REQUEST_BYTES
        )
        return read_range(lambda: self._connection, wanted, self.tally, bodies=True, check_epoch=True, access=access)
