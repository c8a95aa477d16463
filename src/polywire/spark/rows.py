"""From ranges to Arrow record batches: what a Spark task does.

Promises: exactly the records of its ranges, in offset order per partition, as record batches of Spark's own schema; a lost connection is
replaced and the range goes on where it stood. Must not know: plans, Spark's session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import pyarrow as pa

from polywire.client.arrow import chunk_to_arrow
from polywire.client.bulk import BulkConnection
from polywire.errors import Conflict, Missing
from polywire.spark import snapshot
from polywire.spark.offsets import PartitionKey
from polywire.spark.options import SourceOptions, Subscription
from polywire.spark.planning import ReadRange, clip

BODY_COLUMNS: Final = frozenset({"key", "value", "headers", "typedHeaders"})  # the rest is told by headers of batches
SURVIVABLE = (Missing, Conflict)  # what failOnDataLoss=false goes on after


def record_batches(
    options: SourceOptions, ranges: tuple[ReadRange, ...], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """All records of a task's ranges. Raises Missing or Conflict for records that are gone (failOnDataLoss=true)."""
    connection = snapshot.connect(options)
    for wanted in ranges:
        if options.fail_on_data_loss:
            yield from _range(connection, wanted, schema)
        else:
            yield from _what_is_left(connection, wanted, schema)


def _range(connection: BulkConnection, wanted: ReadRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    chunks = connection.fetch_range(
        wanted.topic,
        wanted.partition,
        wanted.incarnation,
        wanted.offset,
        wanted.offset_end,
        epoch=wanted.epoch,
        bodies=not BODY_COLUMNS.isdisjoint(schema.names),
    )
    for chunk in chunks:
        yield from chunk_to_arrow(chunk, schema.names, schema)


def _what_is_left(connection: BulkConnection, wanted: ReadRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Retention may overtake a reader more than once; each time the rest of the range begins where records begin now."""
    rest: ReadRange | None = wanted
    while rest is not None:
        try:
            for batch, next_offset in _with_progress(connection, rest, schema):
                rest = replace(rest, offset=next_offset)
                yield from batch
            return
        except SURVIVABLE:
            shorter = _rest(connection, rest)
            rest = shorter if shorter != rest else None


def _with_progress(
    connection: BulkConnection, wanted: ReadRange, schema: pa.Schema
) -> Iterator[tuple[list[pa.RecordBatch], int]]:
    # The epoch is not checked: the numbers of lost records may have been used again, and what they hold now is what is left.
    for chunk in connection.fetch_range(
        wanted.topic,
        wanted.partition,
        wanted.incarnation,
        wanted.offset,
        wanted.offset_end,
        bodies=not BODY_COLUMNS.isdisjoint(schema.names),
    ):
        yield chunk_to_arrow(chunk, schema.names, schema), min(chunk.next_offset, wanted.offset_end)


def _rest(connection: BulkConnection, wanted: ReadRange) -> ReadRange | None:
    only = Subscription(partitions=(PartitionKey(wanted.topic, wanted.partition),))
    left = clip([wanted], snapshot.extents(connection, only))
    return left[0] if left else None
