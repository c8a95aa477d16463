"""Read ranges as Arrow record batches: the work of a Spark task.

A task yields exactly the records of its ranges, in offset order per partition, in Spark's own schema. After a lost
connection it continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import pyarrow as pa

from polywire.client.arrow import chunk_to_arrow
from polywire.client.bulk import BulkConnection, StoredChunk
from polywire.errors import Conflict, Missing
from polywire.spark import snapshot
from polywire.spark.offsets import PartitionKey
from polywire.spark.options import LocalSegments, SourceOptions, Subscription, TimestampType
from polywire.spark.planning import ReadRange, clip
from polywire.spark.sealed import SealedAccess, Tally, logger, read_range

# all other columns can be computed from the headers of batches
BODY_COLUMNS: Final = frozenset({"key", "value", "headers", "typedHeaders"})
SURVIVABLE = (Missing, Conflict)  # with failOnDataLoss=false reading continues after these errors


def record_batches(
    options: SourceOptions, ranges: tuple[ReadRange, ...], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield all records of a task's ranges. Raises Missing or Conflict for lost records (failOnDataLoss=true)."""
    reading = _RangeRead(options, schema)
    for wanted in ranges:
        if options.fail_on_data_loss:
            yield from _range(reading, wanted)
        else:
            yield from _what_is_left(reading, wanted)
    reading.tell()


class _RangeRead:
    """State of one task: its connection if it needs one, the requested columns, and the counts of bytes by origin."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options: Final = options
        self._connection: BulkConnection | None = None
        self._schema: Final = schema
        self._create_times: Final = options.timestamp_type is TimestampType.CREATE
        needed = BODY_COLUMNS | {"timestamp"} if self._create_times else BODY_COLUMNS
        self._bodies: Final = not needed.isdisjoint(schema.names)
        self._access: Final = SealedAccess(
            allowed=options.local_segments is not LocalSegments.OFF,
            required=options.local_segments is LocalSegments.REQUIRED,
            bucket=options.bucket,
        )
        self._tally: Final = Tally()

    def chunks(self, wanted: ReadRange, *, check_epoch: bool) -> Iterator[StoredChunk]:
        return read_range(
            self.connect, wanted, self._tally, bodies=self._bodies, check_epoch=check_epoch, access=self._access
        )

    def connect(self) -> BulkConnection:
        """Return the connection to the broker, opened on first use: a read from the bucket does not need one."""
        if self._connection is None:
            self._connection = snapshot.connect(self._options)
        return self._connection

    def to_arrow(self, chunk: StoredChunk) -> list[pa.RecordBatch]:
        return chunk_to_arrow(chunk, self._schema.names, self._schema, create_times=self._create_times)

    def tell(self) -> None:
        tally = self._tally
        logger.info(
            "read a task's records file_bytes=%d wire_bytes=%d bucket_bytes=%d",
            tally.file_bytes,
            tally.wire_bytes,
            tally.bucket_bytes,
        )


def _range(reading: _RangeRead, wanted: ReadRange) -> Iterator[pa.RecordBatch]:
    for chunk in reading.chunks(wanted, check_epoch=True):
        yield from reading.to_arrow(chunk)


def _what_is_left(reading: _RangeRead, wanted: ReadRange) -> Iterator[pa.RecordBatch]:
    """Yield the remaining records of a range.

    Retention may remove records repeatedly while the range is read. Each time, reading continues at the first remaining
    record.
    """
    rest: ReadRange | None = wanted
    while rest is not None:
        try:
            # Do not check the epoch: offsets of lost records may have been used again, and the new records are the ones
            # to read.
            for chunk in reading.chunks(rest, check_epoch=False):
                batches = reading.to_arrow(chunk)
                rest = replace(rest, offset=chunk.offset_end)
                yield from batches
            return
        except SURVIVABLE:
            shorter = _rest(reading.connect(), rest)
            rest = shorter if shorter != rest else None


def _rest(connection: BulkConnection, wanted: ReadRange) -> ReadRange | None:
    only = Subscription(partitions=(PartitionKey(wanted.topic, wanted.partition),))
    left = clip([wanted], snapshot.extents(connection, only))
    return left[0] if left else None
