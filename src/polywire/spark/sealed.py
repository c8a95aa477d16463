"""Ranges of records, read from the broker's sealed files or its bucket where this process sees them, else over the wire.

It is decision 0015 for files, decision 0065 for a bucket.

Promises: the records that the wire alone would give, each once and in order. Files and buckets are read only where the broker's mark is
found, and what is read of them is handed on only when all its checksums match; whatever else is found there, the broker is asked instead,
or the read fails if that is what was asked for. Must not know: Spark, Arrow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from polywire.client.bulk import BulkConnection, StoredChunk
from polywire.errors import BrokerError, ErrorCode, Invalid, Unavailable
from polywire.protocols.polywire.messages import ANY_EPOCH, SealedRange
from polywire.records.arena import Arena
from polywire.records.batch import first_damaged, read_header, walk
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.spark import snapshot
from polywire.spark.planning import PACK_RECORDS, ReadRange
from polywire.spark.sealed_bucket import bucket_source
from polywire.store.base import BlobMissing, check_blob_name
from polywire.store.data_directory import DataDirectory
from polywire.store.file import FileBlob
from polywire.types import Buffer

PIECE_BYTES: Final = 4 << 20  # read at once: what a frame of the wire carries
RUN_BYTES_MIN: Final = 1 << 20  # a smaller run comes over the wire, with its neighbours: to open a file takes 0.1 ms
RANGE_RECORDS_MIN: Final = PACK_RECORDS  # a task of its own, of 12 ms and more; asking where it lies takes 0.2 ms

logger: Final = logging.getLogger("polywire.spark")
logger.setLevel(logging.INFO)  # heard only where somebody listens: Spark collects what workers log when it is told to

_elsewhere: Final[set[BulkConnection]] = set()
"""Connections to brokers whose files this process does not see: they are not asked again."""


class _NotRead(Exception):
    """A run that is not there as it was told; the broker has it."""


class _Gone(_NotRead):
    """A run whose blob was deleted since: its records were trimmed, or written elsewhere."""


class _Bytes(Protocol):
    """The bytes of one run."""

    def pread_into(self, out: Buffer, position: int) -> int:
        """Fill ``out`` from ``position``; returns the bytes read, fewer where there are no more. Raises BlobMissing, Unavailable."""

    def expect(self, start: int, stop: int) -> None:
        """These bytes are read next."""


class _Source(Protocol):
    """Where sealed runs are read."""

    @property
    def arena(self) -> Arena:
        """Where what is read lies."""

    def open(self, run: SealedRange) -> _Bytes:
        """A run, which is surely the one that the broker means. Raises _NotRead."""


@dataclass(slots=True)
class Tally:
    """Which way the bytes came."""

    file_bytes: int = 0
    wire_bytes: int = 0
    bucket_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SealedAccess:
    """Whether sealed records may be read around the broker, whether they must, and with which options a bucket is opened."""

    allowed: bool = True
    required: bool = False
    bucket: Mapping[str, str] = field(default_factory=dict)


def read_range(
    connect: Callable[[], BulkConnection],
    wanted: ReadRange,
    tally: Tally,
    *,
    bodies: bool,
    check_epoch: bool,
    access: SealedAccess,
) -> Iterator[StoredChunk]:
    """The chunks that hold a range, in order, as ``BulkConnection.fetch_range`` gives them.

    Raises what that raises, and Unavailable where sealed records must be read around the broker and cannot.

    connect: called when the broker is needed. bodies: headers alone come over the wire in any case: there they are a small part of what a
    segment holds.
    """
    epoch = wanted.epoch if check_epoch else ANY_EPOCH
    reading = _RangeRead(connect, wanted, epoch, tally, access)
    if access.allowed and bodies and (access.required or wanted.record_count >= RANGE_RECORDS_MIN):
        for source, run in reading.runs():
            yield from reading.over_the_wire(run.first_offset)
            yield from reading.sealed(source, run)
    yield from reading.over_the_wire(wanted.offset_end, bodies=bodies)


class _RangeRead:
    """One range being read. Guards: ``_at`` is the offset after the last record handed out, so none is left out and none comes twice."""

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
        """The runs worth opening; none when they are not seen from here. Raises Unavailable where they must be."""
        bytes_min = 0 if self._access.required else RUN_BYTES_MIN
        for source, run in self._runs_in_bucket() if self._wanted.sealed is not None else self._runs_in_files():
            if run.stop - run.start >= bytes_min:
                yield source, run

    def _runs_in_bucket(self) -> Iterator[tuple[_Source, SealedRange]]:
        """Where the plan says that they lie."""
        planned = self._wanted.sealed
        assert planned is not None, "it was looked at"
        try:
            source = bucket_source(planned.root, self._access.bucket)
        except BrokerError as error:
            self._refuse(error.message)
            logger.warning("cannot read the bucket: reading records from the broker instead reason=%s", error.message)
            return
        for run in planned.runs:
            yield source, run

    def _runs_in_files(self) -> Iterator[tuple[_Source, SealedRange]]:
        """As the broker tells them."""
        connection = self._connect()
        if connection in _elsewhere and not self._access.required:
            return
        answers = snapshot.located(connection, self._wanted, epoch=self._epoch)
        while True:
            try:
                located = next(answers, None)
            except Invalid:  # a broker from before this question
                self._refuse("the broker does not tell where they lie")
                _elsewhere.add(connection)
                return
            if located is None:
                return
            data_directory = DataDirectory(located.address, located.mark)
            if not data_directory.is_here():
                self._refuse(f"they are not visible here path={located.address!r}")
                _elsewhere.add(connection)
                logger.info(
                    "sealed segments are not accessible: reading records from the broker path=%r", located.address
                )
                return
            source = FileSource(data_directory, connection.arena)
            for run in located.runs:
                yield source, run

    def _refuse(self, reason: str) -> None:
        """Raise Unavailable where sealed records must be read around the broker."""
        if self._access.required:
            raise Unavailable(
                ErrorCode.STORAGE_FAILED,
                f"sealed segments cannot be read, and localSegments=required asks for it: {reason}",
            )

    def over_the_wire(self, offset_end: int, *, bodies: bool = True) -> Iterator[StoredChunk]:
        """What is left of the range below ``offset_end``, from the broker."""
        wanted = self._wanted
        offset_end = min(offset_end, wanted.offset_end)
        if self._at >= offset_end:
            return
        for chunk in self._connect().fetch_range(
            wanted.topic,
            wanted.partition,
            wanted.incarnation,
            self._at,
            offset_end,
            epoch=self._epoch,
            bodies=bodies,
        ):
            self._tally.wire_bytes += len(chunk.data)
            yield self._moved(chunk)

    def sealed(self, source: _Source, run: SealedRange) -> Iterator[StoredChunk]:
        """What a run holds of the range, as far as it can be read and is sound."""
        wanted = self._wanted
        try:
            for data, next_offset in _pieces(source, run, wanted.incarnation):
                last = min(next_offset, run.next_offset, wanted.offset_end)
                if last > self._at:
                    self._tally.file_bytes += len(data) if wanted.sealed is None else 0
                    self._tally.bucket_bytes += len(data) if wanted.sealed is not None else 0
                    yield self._moved(StoredChunk(wanted.topic, wanted.partition, data, self._at, last, last))
        except (_NotRead, BlobMissing, BrokerError) as error:
            self._refuse(f"{error} blob={run.blob!r}")
            level = logging.INFO if isinstance(error, _Gone | BlobMissing) else logging.WARNING
            logger.log(level, "reading over the wire instead blob=%r reason=%s", run.blob, error)

    def _moved(self, chunk: StoredChunk) -> StoredChunk:
        self._at = chunk.offset_end
        return chunk


def _pieces(source: _Source, run: SealedRange, incarnation: int) -> Iterator[tuple[memoryview, int]]:
    """Whole sound batches of a run, each piece beginning where the one before ended, with the offset after its last record.

    Raises _NotRead where it does not hold what was told, BlobMissing, and BrokerError where it cannot be read.
    """
    blob, arena = source.open(run), source.arena
    position, rest, next_offset = run.start, memoryview(b""), run.first_offset
    while position < run.stop:
        room = PIECE_BYTES if len(rest) < PIECE_BYTES else BATCH_BYTES_MAX
        if len(rest) >= room:
            raise _NotRead("it holds no batches")
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
            raise _NotRead("it does not verify")
        next_offset = last.next_offset
        yield data, next_offset
    if len(rest):
        raise _NotRead("the last batch is not whole")


@dataclass(frozen=True, slots=True)
class FileSource:
    """The files of a broker on this machine, or on a file system that it shares."""

    data_directory: DataDirectory
    arena: Arena

    def open(self, run: SealedRange) -> _Bytes:
        """The file of a run. The mark is looked at when it is open: then it is the file that the owner of the mark meant. Raises _NotRead."""
        check_blob_name(run.blob)
        try:
            blob = FileBlob(Path(self.data_directory.path) / run.blob)
        except FileNotFoundError:
            raise _Gone("it was deleted") from None
        except OSError as error:
            raise _NotRead(error.strerror or str(error)) from None
        if not self.data_directory.is_here():
            raise _NotRead("another broker start owns the directory")
        if not 0 <= run.start < run.stop <= blob.size:
            raise _NotRead("the file is too short")
        return blob
