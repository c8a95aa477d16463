"""Check the batches of a request, and split them by the partitions of their keys (spec: polywire#produce).

The records of a partition remain in order.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from polywire.errors import ErrorCode, Invalid
from polywire.records.batch import fill_spans, validate
from polywire.records.columns import BatchFlags, Column
from polywire.records.fields import header_fields
from polywire.records.partitioner import partitions_of
from polywire.records.split import split
from polywire.types import Buffer, KeyHash

if TYPE_CHECKING:
    from polywire.broker.topics import Partition, Topic

# Decision 0101: u32 flags at byte 8, columns at 12, record count at 28.
_facts: Final = header_fields("flags", "columns", "record_count")


def _bits(*columns: Column) -> int:
    return sum([1 << column for column in columns])


# Columns that only the broker or other protocols may set. Events belong to Cursus (concepts: records#event-fields), a
# CRC column states that the CRC was verified, and deltas exist only after compaction.
FORBIDDEN_COLUMNS: Final = _bits(
    Column.RECORD_FLAGS,
    Column.EVENT_TYPE_OFFSETS,
    Column.EVENT_TYPE_BYTES,
    Column.EVENT_SCHEMA_VERSIONS,
    Column.AGGREGATE_VERSIONS,
    Column.EVENT_METADATA_OFFSETS,
    Column.EVENT_METADATA_BYTES,
    Column.VALUE_CRC32,
    Column.OFFSET_DELTAS,
    Column.ADDRESS_DELTAS,
)
# Columns that links must not send, because publishing already prevents duplicates. Links copy the other columns from
# their source.
LINK_FORBIDDEN_COLUMNS: Final = _bits(Column.PRODUCER_ID)
_LINK_FORBIDDEN_FLAGS: Final = ~int(BatchFlags.WIDE | BatchFlags.COMPACTED)
_FORBIDDEN_FLAGS: Final = ~int(BatchFlags.WIDE)  # a plain integer, because a test with an enum is slow
_KEY_BIT: Final = _bits(Column.KEY_OFFSETS)
_PRODUCER_BIT: Final = _bits(Column.PRODUCER_ID)
_NUMBER: Final = Struct("<I")
SPAN_BYTES: Final = 32  # size of the span of a record: two positions and two lengths
RANGE_RECORDS: Final = 50_000  # records that are processed without a pause, about 2 ms
RANGE_BYTES: Final = 1 << 20
MAPPED_BYTES_MIN: Final = 1 << 20


class Part(msgspec.Struct, frozen=True):
    """A batch, or the records of a batch, for one partition."""

    partition: Partition
    batch: Buffer

    @property
    def record_count(self) -> int:
        return int(_facts(self.batch)[2])


def accepted_batches(payload: memoryview, *, by_key: bool, is_link: bool = False) -> Iterator[memoryview]:
    """Validate the batches of a payload and yield each one.

    Raises Invalid(INVALID_BATCH) for an invalid batch, and for columns that clients must not send.

    Args:
        by_key: the broker chooses the partition of each record. Then batches with a producer id are rejected, because
            their sequence numbers count the batches of one partition.
        is_link: the caller is a link of this broker, whose batches may cover offsets without a record.
    """
    forbidden_flags = _LINK_FORBIDDEN_FLAGS if is_link else _FORBIDDEN_FLAGS
    forbidden_columns = LINK_FORBIDDEN_COLUMNS if is_link else FORBIDDEN_COLUMNS
    if not payload:
        raise Invalid(ErrorCode.INVALID_BATCH, "request contains no batch")
    at = 0
    while at < len(payload):
        length = validate(payload, at)
        batch = payload[at : at + length]
        flags, columns, _ = _facts(batch)
        if flags & forbidden_flags or columns & forbidden_columns:
            raise Invalid(
                ErrorCode.INVALID_BATCH,
                f"batch has flags or columns that clients must not send flags={flags:#x} columns={columns:#x}",
            )
        if by_key and columns & _PRODUCER_BIT:
            raise Invalid(ErrorCode.INVALID_BATCH, "a batch with a producer must have a partition")
        yield batch
        at += length


def split_by_key(
    topic: Topic, batch: memoryview, round_robin: Iterator[int], chosen: list[bytes]
) -> Iterator[Part | None]:
    """Split a batch by the partitions of its records' keys. Yields None now and then, so that the caller can pause.

    The partition of each record (u32) is appended to ``chosen``. A batch without keys is not split; its partition is
    chosen with ``round_robin``. Raises Missing(PARTITION_MISSING) if the topic has no partitions.
    """
    _, columns, record_count = _facts(batch)
    partitions = list(topic.written_to())
    if not columns & _KEY_BIT or len(partitions) == 1:
        partition = partitions[next(round_robin) % len(partitions)]
        chosen.append(_NUMBER.pack(partition.number) * record_count)
        yield Part(partition, batch)
        return
    spans = _memory_for_spans(record_count)
    numbers, key_hash = array("i"), topic.settings.key_hash or KeyHash.FNV32
    for first, stop in _ranges(record_count, len(batch)):
        fill_spans(batch, spans, first, stop)
        chunk = spans[SPAN_BYTES * first : SPAN_BYTES * stop]
        numbers.extend(partitions_of(batch, chunk, len(partitions), key_hash))
        yield None
    chosen.append(numbers.tobytes())
    parts = split(batch, spans, numbers, len(partitions))
    yield None
    for number, part in parts:
        yield Part(partitions[number], part)


def _memory_for_spans(record_count: int) -> memoryview:
    """Return memory for the positions and lengths of the keys and values of ``record_count`` records.

    Large memory comes from mmap, so its pages are allocated when used.
    """
    size = SPAN_BYTES * record_count
    return memoryview(bytearray(size) if size < MAPPED_BYTES_MIN else mmap.mmap(-1, size))


def _ranges(record_count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of record indexes, each small enough to be processed without a pause."""
    count = max(1, min(RANGE_RECORDS, record_count * RANGE_BYTES // size))
    return ((first, min(first + count, record_count)) for first in range(0, record_count, count))
