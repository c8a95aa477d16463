"""Find the latest record of each key, for the tables of compacted topics.

The latest record of a key is the one with the highest offset in its partition. Records without a key replace nothing
and are not replaced. If the latest record of a key is a tombstone (null value), the key has no row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polywire.store.objects import Objects
from polywire.tables import deletion_vectors
from polywire.tables.columns import ARROW_SCHEMA, KEY, OFFSET, PARTITION, VALUE
from polywire.tables.delta_log import DataFile
from polywire.tables.parquet import ObjectFile

if TYPE_CHECKING:
    from pyroaring import BitMap

ROWS_PENDING: Final = 1_000_000  # keys in memory before their duplicates are removed
_NEWEST: Final = pa.schema([ARROW_SCHEMA.field(name).with_nullable(True) for name in (PARTITION, KEY, OFFSET)])

ByPartition: TypeAlias = "Mapping[int, pa.Array[Any]]"
"""Keys or offsets by partition."""


def newest(rows: Iterable[pa.Table | pa.RecordBatch]) -> pa.Table:
    """Return the partition, key and offset of the latest record of each key, in parts of bounded size.

    Rows need these three columns.
    """
    found = _NEWEST.empty_table()
    pending, count = [found], 0
    for part in rows:
        table = part if isinstance(part, pa.Table) else pa.Table.from_batches([part])
        pending.append(_newest(table))
        count += pending[-1].num_rows
        if count > found.num_rows + ROWS_PENDING:
            found = _newest(pa.concat_tables(pending))
            pending, count = [found], 0
    return _newest(pa.concat_tables(pending)) if len(pending) > 1 else found


def _newest(rows: pa.Table) -> pa.Table:
    keyed = rows.select(_NEWEST.names).filter(pc.is_valid(rows.column(KEY)))
    found = keyed.group_by([PARTITION, KEY], use_threads=False).aggregate([(OFFSET, "max")])
    return found.rename_columns({f"{OFFSET}_max": OFFSET}).select(_NEWEST.names).cast(_NEWEST)


def by_partition(found: pa.Table, column: str) -> ByPartition:
    """Return the values of one column of ``newest``, by partition."""
    partitions: list[Any] = pc.unique(found.column(PARTITION)).to_pylist()
    return {at: found.filter(pc.field(PARTITION) == at).column(column).combine_chunks() for at in partitions}


def has_row(rows: pa.Table | pa.RecordBatch, offsets: ByPartition) -> Any:
    """Return for each record whether the table has a row for it, given the offsets of the latest records."""
    is_latest = _is_one_of(rows, OFFSET, offsets)
    return pc.or_(pc.and_(is_latest, pc.is_valid(rows.column(VALUE))), pc.is_null(rows.column(KEY)))


def has_key(rows: pa.Table | pa.RecordBatch, keys: ByPartition) -> Any:
    """Return for each row whether it has one of the keys."""
    return _is_one_of(rows, KEY, keys)


def _is_one_of(rows: pa.Table | pa.RecordBatch, column: str, wanted: ByPartition) -> Any:
    found: Any = pa.array([False]).take(pa.repeat(0, rows.num_rows))
    for partition, values in wanted.items():
        is_inside = pc.equal(rows.column(PARTITION), pa.scalar(partition, pa.int32()))
        found = pc.or_(found, pc.and_(is_inside, pc.is_in(rows.column(column), value_set=values)))
    return found


def replaced(objects: Objects, files: Iterable[DataFile], keys: ByPartition) -> dict[str, BitMap]:
    """Return the rows of each file that have one of the keys, with the rows that were deleted before.

    Files without such rows are not in the result. Raises BlobMissing, Unavailable, Corrupt.
    """
    found = {}
    for file in files:
        bounds = file.bounds.get(PARTITION)
        inside = {at: keys[at] for at in keys if bounds is None or bounds.lower <= at <= bounds.upper}
        if not inside:
            continue
        before = deletion_vectors.read(objects, file.deleted)
        after = before.copy()
        for first, rows in _groups(objects, file, [PARTITION, KEY]):
            after |= _numbers(has_key(rows, inside), first)
        if len(after) > len(before):
            found[file.path] = after
    return found


def outdated(objects: Objects, files: Sequence[DataFile]) -> dict[str, BitMap]:
    """Return the rows of each file that a later row of any file replaces, and tombstones.

    Files without such rows are not in the result. The keys are in memory. Raises BlobMissing, Unavailable, Corrupt.
    """
    rows = (rows for file in files for _, rows in _groups(objects, file, _NEWEST.names))
    offsets = by_partition(newest(rows), OFFSET)
    found = {}
    for file in files:
        before = deletion_vectors.read(objects, file.deleted)
        after = before.copy()
        for first, group in _groups(objects, file, [PARTITION, OFFSET, KEY, VALUE]):
            after |= _numbers(pc.invert(has_row(group, offsets)), first)
        if len(after) > len(before):
            found[file.path] = after
    return found


def _groups(objects: Objects, file: DataFile, columns: list[str]) -> Iterator[tuple[int, pa.Table]]:
    """Yield the row groups of a file, each with the number of its first row."""
    first = 0
    content: Any = ObjectFile(objects, file.path)
    with pq.ParquetFile(content, pre_buffer=False) as source:  # in this thread: few columns are needed
        for group in range(source.num_row_groups):
            rows = source.read_row_group(group, columns=columns, use_threads=False)
            yield first, rows
            first += rows.num_rows


def _numbers(chosen: Any, first: int) -> BitMap:
    """Return the numbers of rows for which a condition holds. ``first`` is the number of the first row."""
    numbers = pc.add(pc.indices_nonzero(chosen), pa.scalar(first, pa.uint64())).cast(pa.uint32())
    return deletion_vectors.bitmap(memoryview(numbers.buffers()[1]).cast("I")[: len(numbers)] if len(numbers) else ())
