"""Batch reads. The range is fixed when the read is planned.

Readers contain no socket, because Spark pickles them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from polywire.spark import planning, snapshot
from polywire.spark.options import SourceOptions
from polywire.spark.planning import ReadRange
from polywire.spark.pushdown import PushedFilters, prune, pushed_filters
from polywire.spark.rows import record_batches
from polywire.spark.schema import arrow_schema
from polywire.spark.sealed_plan import located
from polywire.spark.worker_exit import depart_quietly, one_line_errors


@dataclass
class RangesPartition(InputPartition):
    """Ranges that one task reads."""

    ranges: tuple[ReadRange, ...]

    def __init__(self, ranges: tuple[ReadRange, ...]) -> None:
        super().__init__(None)
        self.ranges = ranges


@one_line_errors
class BatchReader(DataSourceReader):
    """Plans in the driver's planner process and reads in tasks."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._filters = PushedFilters()

    def partitions(self) -> Sequence[InputPartition]:
        """Return one task per group of ranges.

        Raises Missing for missing topics, or for lost records (``failOnDataLoss``). The result is a list, as Spark
        requires. Spark replaces an empty one by a single None.
        """
        options = self._options
        filters = self._filters
        times_us = sorted({*planning.times_asked(options.starting, options.ending), *filters.times()})
        found = snapshot.extents(snapshot.connect(options), options.subscription, times_us=times_us, must_exist=True)
        start = planning.start_offset(found, options.starting, options.missing_time)
        ranges = planning.batch_ranges(start, planning.end_offset(found, options.ending))
        if options.fail_on_data_loss:
            planning.refuse_losses(planning.losses(ranges, found))
        else:
            ranges = planning.clip(ranges, found)
        ranges = prune(ranges, filters, found)
        return list(input_partitions(options, ranges))

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """Yield the batches of one task. Raises Missing for records lost since planning, or Unavailable."""
        return read_partition(self._options, self._schema, partition)


@one_line_errors
class FilteringReader(BatchReader):
    """Skips records by topic, partition, offset and time according to the query's filters.

    Create it only if requested: if Spark's setting is off, a reader that accepts filters makes every read fail.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Return all filters, so that Spark applies them to the remaining rows."""
        self._filters = pushed_filters(filters)
        return filters


def input_partitions(options: SourceOptions, ranges: Sequence[ReadRange]) -> list[RangesPartition]:
    """Convert ranges to Spark's tasks."""
    pieces = planning.tasks(
        ranges, partitions_min=options.partitions_min, partition_records_max=options.partition_records_max
    )
    return [RangesPartition(piece) for piece in located(options, pieces)]


def read_partition(
    options: SourceOptions, schema: StructType, partition: InputPartition | None
) -> Iterator[pa.RecordBatch]:
    """Read one task. It yields nothing for the None that Spark makes of an empty plan."""
    depart_quietly()
    if isinstance(partition, RangesPartition):
        yield from record_batches(options, partition.ranges, arrow_schema(schema))
