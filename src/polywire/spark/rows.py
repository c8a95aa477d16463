"""From ranges to Arrow record batches: what a Spark task does.

Promises: exactly the records of its ranges, in offset order per partition, as record batches of Spark's own schema; a lost connection is
replaced and the range goes on where it stood. Must not know: where records lie, plans, Spark's session.
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

BODY_COLUMNS: Final = frozenset({"key", "value", "headers", "typedHeaders"})  # the rest is told by headers of batches
SURVIVABLE = (Missing, Conflict)  # what failOnDataLoss=false goes on after


def record_batches(
    options: SourceOptions, ranges: tuple[ReadRange, ...], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """All records of a task's ranges. Raises Missing or Conflict for records that are gone (failOnDataLoss=true)."""
    reading = _RangeRead(options, schema)
    for wanted in ranges:
        if options.fail_on_data_loss:
            yield from _range(reading, wanted)
        else:
            yield from _what_is_left(reading, wanted)
    reading.tell()


class _RangeRead:
    """What one task reads with: a connection where it needs one, what is wanted of each record, and which way the bytes came."""

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
        """The broker, which who reads the bucket alone does not need."""
        if self._connection is None:
            self._connection = snapshot.connect(self._options)
        return self._connection

    def to_arrow(self, chunk: StoredChunk) -> list[pa.RecordBatch]:
        return chunk_to_arrow(chunk, self._schema.names, self._schema, create_times=self._create_times)

    def tell(self) -> None:
        """Tell whoever listens to this worker which way the bytes came."""
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
    """Retention may overtake a reader more than once; each time the rest of the range begins where records begin now."""
    rest: ReadRange | None = wanted
    while rest is not None:
        try:
            # The epoch is not checked: the numbers of lost records may have been used again, and what they hold now is what is left.
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
