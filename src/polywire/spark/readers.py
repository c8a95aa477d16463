"""Batch and streaming reads of the data source ``polywire``.

The range of a batch is fixed when the read is planned. A stream reads micro-batches between offsets that Spark stores
in its checkpoint; a repeated micro-batch covers the same records. An ``availableNow`` run reads no records that were
appended after it began.

A task yields exactly the records of its ranges, in offset order per partition, in Spark's own schema. After a lost
connection it continues where it stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from polywire.client.arrow import chunk_to_arrow
from polywire.client.bulk import BulkConnection, StoredChunk
from polywire.clock import Clock, SystemClock
from polywire.errors import BrokerError, Conflict, ErrorCode, Missing
from polywire.spark import planning, snapshot
from polywire.spark.offsets import PartitionKey, Position, SourceOffset, decode_offset, encode_offset
from polywire.spark.options import LocalSegments, SourceOptions, Subscription, TimestampType
from polywire.spark.planning import Extents, Loss, clip
from polywire.spark.schema import arrow_schema
from polywire.spark.sealed import locate_ranges
from polywire.spark.worker_exit import depart_quietly, one_line_errors
from polywire.tables import sealed
from polywire.tables.sealed import ReadRange, SealedAccess, Tally, read_range

# all other columns can be computed from the headers of batches
BODY_COLUMNS: Final = frozenset({"key", "value", "headers", "typedHeaders"})
SURVIVABLE = (Missing, Conflict)  # with failOnDataLoss=false reading continues after these errors
logger: Final = logging.getLogger("polywire.spark")
for each in (logger, sealed.logger):
    each.setLevel(logging.INFO)  # Spark collects logs of workers only on request
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def record_batches(
    options: SourceOptions, ranges: tuple[ReadRange, ...], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield all records of a task's ranges. Raises Missing or Conflict for lost records (failOnDataLoss=true)."""
    reading = _TaskRead(options, schema)
    for wanted in ranges:
        if options.fail_on_data_loss:
            yield from _batches(reading, wanted)
        else:
            yield from _remaining_batches(reading, wanted)
    reading.log_bytes()


class _TaskRead:
    """State of one task: its connection, the requested columns, and the bytes read so far by source."""

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
        """Return the connection to the broker.

        It is opened at the first call, because a read from a bucket does not need it.
        """
        if self._connection is None:
            self._connection = snapshot.connect(self._options)
        return self._connection

    def to_arrow(self, chunk: StoredChunk) -> list[pa.RecordBatch]:
        return chunk_to_arrow(chunk, self._schema.names, self._schema, create_times=self._create_times)

    def log_bytes(self) -> None:
        tally = self._tally
        logger.info(
            "read a task's records file_bytes=%d wire_bytes=%d bucket_bytes=%d",
            tally.file_bytes,
            tally.wire_bytes,
            tally.bucket_bytes,
        )


def _batches(reading: _TaskRead, wanted: ReadRange) -> Iterator[pa.RecordBatch]:
    for chunk in reading.chunks(wanted, check_epoch=True):
        yield from reading.to_arrow(chunk)


def _remaining_batches(reading: _TaskRead, wanted: ReadRange) -> Iterator[pa.RecordBatch]:
    """Yield the records of a range that still exist.

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
            shorter = _remaining_range(reading.connect(), rest)
            rest = shorter if shorter != rest else None


def _remaining_range(connection: BulkConnection, wanted: ReadRange) -> ReadRange | None:
    only = Subscription(partitions=(PartitionKey(wanted.topic, wanted.partition),))
    left = clip([wanted], snapshot.extents(connection, only))
    return left[0] if left else None


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers from ``begin`` to ``end`` (exclusive). None means no limit."""

    begin: int | None = None
    end: int | None = None

    def within(self, begin: int | None, end: int | None) -> Span:
        """Return the intersection."""
        return Span(
            begin if self.begin is None else self.begin if begin is None else max(self.begin, begin),
            end if self.end is None else self.end if end is None else min(self.end, end),
        )


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """The records that a query's filters can accept. None means all."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    offsets: Span = field(default_factory=Span)
    times_us: Span = field(default_factory=Span)

    def times(self) -> tuple[int, ...]:
        """Times (µs) whose offsets are needed."""
        return tuple(sorted({time for time in (self.times_us.begin, self.times_us.end) if time is not None}))


def pushed_filters(filters: Iterable[Filter]) -> PushedFilters:
    """Combine the filters of a query.

    Filters on columns other than topic, partition, offset and timestamp are ignored.
    """
    found = PushedFilters()
    for wanted in filters:
        column = getattr(wanted, "attribute", ())
        if column == ("topic",):
            found = replace(found, topics=_both(found.topics, _named(wanted)))
        elif column == ("partition",):
            found = replace(found, partitions=_both(found.partitions, _named(wanted)))
        elif column == ("offset",):
            found = replace(found, offsets=found.offsets.within(*_ends(wanted, _whole)))
        elif column == ("timestamp",):
            found = replace(found, times_us=found.times_us.within(*_ends(wanted, _micros)))
    return found


def prune(ranges: Sequence[ReadRange], filters: PushedFilters, extents: Extents) -> list[ReadRange]:
    """Return the parts of the ranges whose records the filters can accept.

    ``extents`` must have the offsets of ``filters.times``.
    """
    remaining = []
    for wanted in ranges:
        if filters.topics is not None and wanted.topic not in filters.topics:
            continue
        if filters.partitions is not None and wanted.partition not in filters.partitions:
            continue
        offsets = extents[PartitionKey(wanted.topic, wanted.partition)].time_offsets
        span = filters.offsets.within(wanted.offset, wanted.offset_end)
        span = span.within(_found(offsets, filters.times_us.begin), _found(offsets, filters.times_us.end))
        if span.begin is not None and span.end is not None and span.begin < span.end:
            remaining.append(replace(wanted, offset=span.begin, offset_end=span.end))
    return remaining


def _found(offsets: Mapping[int, int], time_us: int | None) -> int | None:
    return None if time_us is None else offsets[time_us]


def _named(wanted: Filter) -> frozenset[Any] | None:
    match wanted:
        case EqualTo(value=value) | EqualNullSafe(value=value):
            return frozenset([value])
        case In(value=values):
            return frozenset(values)
        case _:
            return None


def _both(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _ends(wanted: Filter, number_of: Callable[[object], int | None]) -> tuple[int | None, int | None]:
    """Return the first number that a filter accepts, and the first number after the accepted ones.

    None means no limit.
    """
    number = number_of(getattr(wanted, "value", None))
    if number is None:
        return None, None
    match wanted:
        case EqualTo() | EqualNullSafe():
            return number, number + 1
        case GreaterThan():
            return number + 1, None
        case GreaterThanOrEqual():
            return number, None
        case LessThan():
            return None, number
        case LessThanOrEqual():
            return None, number + 1
        case _:
            return None, None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _micros(value: object) -> int | None:
    """Return a time in microseconds since 1970; None for a time without a time zone, which the column never has."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // _MICROSECOND


@dataclass
class RangesPartition(InputPartition):
    """Ranges that one task reads."""

    ranges: tuple[ReadRange, ...]

    def __init__(self, ranges: tuple[ReadRange, ...]) -> None:
        super().__init__(None)
        self.ranges = ranges


@one_line_errors
class BatchReader(DataSourceReader):
    """A batch read. It is planned in a process of the driver, and read in tasks."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._filters = PushedFilters()

    def partitions(self) -> Sequence[InputPartition]:
        """Return the ranges of each task.

        Raises Missing for missing topics, and for lost records with ``failOnDataLoss``. Spark requires a list. If the
        list is empty, Spark calls ``read`` once with None.
        """
        options = self._options
        filters = self._filters
        times_us = sorted({*planning.times_needed(options.starting, options.ending), *filters.times()})
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
    """A batch read that skips records according to the query's filters on topic, partition, offset and time.

    Create it only if the option pushFilters is set: unless Spark's setting is on, Spark rejects readers that accept
    filters.
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
    return [RangesPartition(piece) for piece in locate_ranges(options, pieces)]


def read_partition(
    options: SourceOptions, schema: StructType, partition: InputPartition | None
) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of one task. ``partition`` is None if there is nothing to read."""
    depart_quietly()
    if isinstance(partition, RangesPartition):
        yield from record_batches(options, partition.ranges, arrow_schema(schema))


@one_line_errors
class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the micro-batches of a stream.

    A long-lived process on the driver calls it for offsets and plans. Tasks call ``read`` on a pickled copy.
    """

    def __init__(self, options: SourceOptions, schema: StructType, clock: Clock | None = None) -> None:
        self._options = options
        self._schema = schema
        self._clock = clock or SystemClock()
        self._ceiling: SourceOffset | None = None
        self._latest: SourceOffset | None = None
        self._triggered_at: float | None = None
        self._reached: dict[PartitionKey, Position] = {}

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query begins (``startingOffsets``). Raises Missing for missing topics."""
        options = self._options
        times_us = planning.times_needed(options.starting)
        found = snapshot.extents(snapshot.connect(options), options.subscription, times_us=times_us, must_exist=True)
        return encode_offset(planning.start_offset(found, options.starting, options.missing_time))

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a micro-batch from the options."""
        options = self._options
        if options.trigger_records_max is not None:
            return ReadMaxRows(options.trigger_records_max)
        if options.trigger_bytes_max is not None:
            return ReadMaxBytes(options.trigger_bytes_max)
        if options.trigger_records_min is not None:
            return ReadMinRows(options.trigger_records_min)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Set the end of an ``availableNow`` run to the current end of all partitions. Called by Spark."""
        found = snapshot.extents(snapshot.connect(self._options), self._options.subscription)
        self._ceiling = planning.latest_offset(found)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends, within ``limit`` and the options.

        Returns ``start`` if there is nothing to read. Raises Missing if records were lost (``failOnDataLoss``).
        """
        known = decode_offset(start)
        connection = snapshot.connect(self._options)
        found = snapshot.extents(connection, self._options.subscription)
        self._latest = planning.latest_offset(found)
        if self._options.fail_on_data_loss:
            self._refuse_losses(known, found)
        everything = planning.advance(known, found, records_max=None, ceiling=self._ceiling)
        if everything is known or self._too_early(known, everything, limit):
            return start
        records_max = self._records_max(known, everything, limit)
        self._triggered_at = self._clock.monotonic()
        if records_max is None:
            return encode_offset(everything)
        return encode_offset(planning.advance(known, found, records_max=records_max, ceiling=self._ceiling))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end of all partitions as it was last observed, for Spark's progress reports."""
        return None if self._latest is None else encode_offset(self._latest)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks that read ``[start, end)``."""
        options = self._options
        ranges = planning.batch_ranges(decode_offset(start), decode_offset(end))
        if ranges and not options.fail_on_data_loss:
            ranges = planning.clip(ranges, snapshot.extents(snapshot.connect(options), options.subscription))
        return input_partitions(options, ranges)

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the offsets to the group of the option commitGroup, so that the broker shows the lag.

        The query does not depend on them.
        """
        group = self._options.group
        if group is None:
            return
        connection = snapshot.connect(self._options)
        for key, position in decode_offset(end).positions.items():
            with suppress(BrokerError):
                connection.commit_position(key.topic, key.partition, group, position.next_offset)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the batches of one task. Raises Missing for records lost since planning, or Unavailable."""
        return read_partition(self._options, self._schema, partition)

    def _refuse_losses(self, known: SourceOffset, found: Extents) -> None:
        planning.refuse_losses(planning.position_losses(known, found))
        connection = snapshot.connect(self._options)
        for key, position in planning.positions_to_confirm(known, found):
            if self._reached.get(key) == position:
                continue
            try:
                snapshot.epoch_reached(connection, key, position)
            except (Conflict, Missing) as error:
                if error.code not in (ErrorCode.EPOCH_ENDED, ErrorCode.OFFSET_OUT_OF_RANGE):
                    raise
                planning.refuse_losses([Loss(key, error.message)])
            self._reached[key] = position

    def _too_early(self, known: SourceOffset, everything: SourceOffset, limit: ReadLimit) -> bool:
        """Return whether the next micro-batch must wait for more records.

        That is the case if fewer than ``minOffsetsPerTrigger`` are available and ``maxTriggerDelay`` has not passed. An
        availableNow run never waits.
        """
        records_min = self._options.trigger_records_min
        if records_min is None or isinstance(limit, ReadAllAvailable) or self._ceiling is not None:
            return False
        if self._triggered_at is None:
            return False  # like in Kafka's source, the first batch of a run does not wait
        waiting = sum(wanted.record_count for wanted in planning.batch_ranges(known, everything))
        return waiting < records_min and self._clock.monotonic() - self._triggered_at < self._options.trigger_delay_s

    def _records_max(self, known: SourceOffset, everything: SourceOffset, limit: ReadLimit) -> int | None:
        """Return the smallest of Spark's limit and the limits in the options."""
        if isinstance(limit, ReadAllAvailable):
            return None
        records_max = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.trigger_records_max
        bytes_max = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.trigger_bytes_max
        if bytes_max is None:
            return records_max
        by_bytes = self._records_within(bytes_max, known, everything)
        return by_bytes if records_max is None else min(by_bytes, records_max)

    def _records_within(self, bytes_max: int, known: SourceOffset, everything: SourceOffset) -> int:
        connection = snapshot.connect(self._options)
        lags = {}
        for wanted in planning.batch_ranges(known, everything):
            key = PartitionKey(wanted.topic, wanted.partition)
            size = snapshot.record_bytes(connection, key, wanted.incarnation, wanted.offset)
            lags[key] = (wanted.record_count, size)
        return planning.records_within(bytes_max, lags)
