"""Split a batch by partition. Records stay in order within a partition."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from struct import Struct
from typing import Final

from polywire.records.batch import from_columns, from_spans, layout, take
from polywire.records.columns import COLUMN_COUNT, Column
from polywire.records.memory import Lendable
from polywire.records.partitioner import rows_by_partition
from polywire.types import Buffer

# Decision 0101: u32 columns at byte 12, record count at 28.
_FACTS: Final = Struct("<12xI12xI")
_PLAIN_BITS: Final = sum(
    [
        1 << column
        for column in (
            Column.VALUE_OFFSETS,
            Column.VALUE_BYTES,
            Column.VALUE_VALIDITY,
            Column.KEY_OFFSETS,
            Column.KEY_BYTES,
            Column.KEY_VALIDITY,
        )
    ]
)


def split(batch: Buffer, spans: Lendable, numbers: Lendable, partition_count: int) -> Iterator[tuple[int, Buffer]]:
    """Yield (partition, batch of its records) for each partition that has records, in ascending order.

    Each batch is built on demand, because there may be thousands. If all records belong to one partition, the batch is
    yielded unchanged.

    Args:
        batch: a validated batch.
        spans: as returned by ``batch.spans_of``.
        numbers: i32 array, the partition of each record.
        partition_count: number of partitions of the topic.

    Raises:
        ValueError: a number is not below ``partition_count``.
    """
    rows, starts = rows_by_partition(numbers, partition_count)
    return _parts(batch, spans, rows, starts)


def _parts(batch: Buffer, spans: Lendable, rows: array[int], starts: array[int]) -> Iterator[tuple[int, Buffer]]:
    columns, record_count = _FACTS.unpack_from(batch)
    plain = not columns & ~_PLAIN_BITS
    with memoryview(rows) as chosen:
        for number in range(len(starts) - 2):
            start, stop = starts[number], starts[number + 1]
            if stop - start == record_count:
                yield number, batch
                return
            if stop > start:
                own = chosen[start:stop]
                yield number, from_spans(batch, spans, own) if plain else take(batch, own)


def record_count_of(batch: Buffer) -> int:
    return int(_FACTS.unpack_from(batch)[1])


def with_producer(batch: Buffer, producer: bytes, *, epoch: int, base_sequence: int) -> bytearray:
    """Return a copy of the batch with a producer id, so that the broker can detect duplicates.

    Args:
        base_sequence: sequence number of the first record.
    """
    places = layout(batch, 0).tolist()
    view = memoryview(batch)
    columns: dict[int, Buffer] = {
        column: view[places[2 * column] : places[2 * column] + places[2 * column + 1]]
        for column in range(COLUMN_COUNT)
        if places[2 * column] >= 0
    }
    columns[Column.PRODUCER_ID] = producer
    return from_columns(columns, record_count_of(batch), producer_epoch=epoch, base_sequence=base_sequence)
