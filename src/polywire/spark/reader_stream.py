"""Streaming reads: micro-batches between offsets that Spark stores in its checkpoint.

A repeated batch covers the same records. An ``availableNow`` run reads no records that were appended after it began.
Readers contain no socket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from polywire.clock import Clock, SystemClock
from polywire.errors import BrokerError, Conflict, ErrorCode, Missing
from polywire.spark import planning, snapshot
from polywire.spark.offsets import PartitionKey, Position, SourceOffset, decode_offset, encode_offset
from polywire.spark.options import SourceOptions
from polywire.spark.planning import Extents, Loss
from polywire.spark.reader_batch import input_partitions, read_partition
from polywire.spark.worker_exit import one_line_errors


@one_line_errors
class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads the micro-batches of a stream.

    A long-lived process on the driver calls it for offsets and plans. Tasks call ``read`` on a pickled copy.

    After ``prepareForTriggerAvailableNow``, no offset goes beyond the end that it recorded.
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
        times_us = planning.times_asked(options.starting)
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
        """Set the end of an ``availableNow`` run to the current end."""
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
        """Return the last observed end of the topics, for Spark's progress reports."""
        return None if self._latest is None else encode_offset(self._latest)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks that read ``[start, end)``."""
        options = self._options
        ranges = planning.batch_ranges(decode_offset(start), decode_offset(end))
        if ranges and not options.fail_on_data_loss:
            ranges = planning.clip(ranges, snapshot.extents(snapshot.connect(options), options.subscription))
        return input_partitions(options, ranges)

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the query's offsets to the broker, to show its lag. The query does not depend on them."""
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
        for key, position in planning.doubtful(known, found):
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
        """Return whether to wait for more records.

        That is the case if fewer than ``minOffsetsPerTrigger`` records are available and ``maxTriggerDelay`` has not
        passed. It is never the case in an availableNow run.
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
