"""Ranges of records, read from the broker's sealed files where this process sees them, and over the wire where it does not (decision 0015).

Promises: the records that the wire alone would give, each once and in order. A file is read only when the broker's mark lies beside it
after it was opened, and what is read of it is handed on only when all its checksums match; whatever else is found there, the broker is
asked instead. Must not know: Spark, Arrow.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from polywire.client.bulk import BulkConnection, StoredChunk
from polywire.errors import BrokerError, Invalid
from polywire.protocols.polywire.messages import ANY_EPOCH, SealedRange
from polywire.records.arena import Arena
from polywire.records.batch import first_damaged, read_header, walk
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.spark.planning import PACK_RECORDS, ReadRange
from polywire.store.base import check_blob_name
from polywire.store.file import FileBlob
from polywire.store.mark import DataDirectory

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


@dataclass(slots=True)
class Tally:
    """Which way the bytes came."""

    file_bytes: int = 0
    wire_bytes: int = 0


def read_range(
    connection: BulkConnection, wanted: ReadRange, tally: Tally, *, bodies: bool, check_epoch: bool, files: bool
) -> Iterator[StoredChunk]:
    """The chunks that hold a range, in order, as ``BulkConnection.fetch_range`` gives them; raises what that raises.

    files: sealed files may be read. Headers alone come over the wire in any case: there they are a small part of what a file holds.
    """
    epoch = wanted.epoch if check_epoch else ANY_EPOCH
    reading = _RangeRead(connection, wanted, epoch, tally)
    if files and bodies and wanted.record_count >= RANGE_RECORDS_MIN and connection not in _elsewhere:
        for data_directory, run in reading.runs():
            yield from reading.over_the_wire(run.first_offset)
            yield from reading.from_file(data_directory, run)
    yield from reading.over_the_wire(wanted.offset_end, bodies=bodies)


class _RangeRead:
    """One range being read. Guards: ``_at`` is the offset after the last record handed out, so none is left out and none comes twice."""

    def __init__(self, connection: BulkConnection, wanted: ReadRange, epoch: int, tally: Tally) -> None:
        self._connection = connection
        self._wanted = wanted
        self._epoch = epoch
        self._tally = tally
        self._at = wanted.offset

    def runs(self) -> Iterator[tuple[DataDirectory, SealedRange]]:
        """The runs worth opening, as the broker tells them; none when its files are not seen from here."""
        wanted, offset, more = self._wanted, self._wanted.offset, True
        while more:
            try:
                located = self._connection.locate(
                    wanted.topic, wanted.partition, wanted.incarnation, offset, wanted.offset_end, epoch=self._epoch
                )
            except Invalid:  # a broker from before this question
                _elsewhere.add(self._connection)
                return
            data_directory = DataDirectory(located.directory, located.mark)
            if not data_directory.is_here():
                _elsewhere.add(self._connection)
                logger.info("sealed segments are not visible here, reading over the wire path=%r", located.directory)
                return
            for run in located.runs:
                if run.stop - run.start >= RUN_BYTES_MIN:
                    yield data_directory, run
            more = located.more and bool(located.runs)
            offset = located.runs[-1].next_offset if located.runs else offset

    def over_the_wire(self, offset_end: int, *, bodies: bool = True) -> Iterator[StoredChunk]:
        """What is left of the range below ``offset_end``, from the broker."""
        wanted = self._wanted
        offset_end = min(offset_end, wanted.offset_end)
        if self._at >= offset_end:
            return
        for chunk in self._connection.fetch_range(
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

    def from_file(self, data_directory: DataDirectory, run: SealedRange) -> Iterator[StoredChunk]:
        """What a run holds of the range, as far as it can be read and is sound."""
        wanted = self._wanted
        try:
            for data, next_offset in _pieces(data_directory, run, self._connection.arena, wanted.incarnation):
                last = min(next_offset, run.next_offset, wanted.offset_end)
                if last > self._at:
                    self._tally.file_bytes += len(data)
                    yield self._moved(StoredChunk(wanted.topic, wanted.partition, data, self._at, last, last))
        except (_NotRead, BrokerError) as error:
            level = logging.INFO if isinstance(error, _Gone) else logging.WARNING
            logger.log(level, "reading over the wire instead blob=%r reason=%s", run.blob, error)

    def _moved(self, chunk: StoredChunk) -> StoredChunk:
        self._at = chunk.offset_end
        return chunk


def _pieces(
    data_directory: DataDirectory, run: SealedRange, arena: Arena, incarnation: int
) -> Iterator[tuple[memoryview, int]]:
    """Whole sound batches of a run, each piece beginning where the one before ended, with the offset after its last record.

    Raises _NotRead where the file does not hold what was told, BrokerError where it cannot be read.
    """
    blob = _open(data_directory, run)
    position, rest, next_offset = run.start, memoryview(b""), run.first_offset
    while position < run.stop:
        room = PIECE_BYTES if len(rest) < PIECE_BYTES else BATCH_BYTES_MAX
        if len(rest) >= room:
            raise _NotRead("it holds no batches")
        size = min(room - len(rest), run.stop - position)
        block = arena.take(len(rest) + size)
        block[: len(rest)] = rest
        if blob.pread_into(block[len(rest) :], position) < size:
            raise _NotRead("the file is too short")
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


def _open(data_directory: DataDirectory, run: SealedRange) -> FileBlob:
    """The file of a run. The mark is looked at when it is open: then it is the file that the owner of the mark meant. Raises _NotRead."""
    check_blob_name(run.blob)
    try:
        blob = FileBlob(Path(data_directory.path) / run.blob)
    except FileNotFoundError:
        raise _Gone("it was deleted") from None
    except OSError as error:
        raise _NotRead(error.strerror or str(error)) from None
    if not data_directory.is_here():
        raise _NotRead("another broker start owns the directory")
    if not 0 <= run.start < run.stop <= blob.size:
        raise _NotRead("the file is too short")
    return blob
