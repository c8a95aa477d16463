"""The readers against a fake broker: limits, targets, losses, reading what remains, and pushed-down filters."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, ReadMinRows

from polywire.client.base import TopicInfo
from polywire.client.bulk import PartitionRange, StoredChunk
from polywire.errors import Conflict, ErrorCode, Missing
from polywire.spark import readers, snapshot
from polywire.spark.offsets import PartitionKey, decode_offset
from polywire.spark.options import Headers, Subscription, read_options
from polywire.spark.planning import Extent
from polywire.spark.readers import (
    BatchReader,
    PushedFilters,
    RangesPartition,
    Span,
    StreamReader,
    prune,
    pushed_filters,
)
from polywire.spark.schema import source_schema
from polywire.tables.sealed import ReadRange

CHUNK_RECORDS = 10
RECORD_BYTES = 100
SCHEMA = source_schema(Headers.NONE)


@dataclass
class FakeBroker:
    """Replaces a bulk connection. Partition n holds ``extents[n]``; a record has 100 bytes, a chunk ten records."""

    extents: list[tuple[int, int]]
    life: int = 100
    epoch: int = 1
    epoch_ends: dict[int, int] = field(default_factory=dict)
    retention_after: int | None = None
    asked_times: list[Sequence[int]] = field(default_factory=list)
    positions: dict[tuple[str, int, str], int] = field(default_factory=dict)

    def topics(self, pattern: str | None = None) -> list[TopicInfo]:
        return [TopicInfo("t", b"i" * 16, len(self.extents))] if self.extents else []

    def bounds(self, topics: Sequence[str], *, times_us: Sequence[int] = ()) -> list[PartitionRange]:
        if not self.extents:
            raise Missing(ErrorCode.TOPIC_MISSING, "no such topic name='t'")
        self.asked_times.append(times_us)
        return [
            PartitionRange(
                "t", b"i" * 16, n, self.life + n, self.epoch, first, after, tuple(min(t, after) for t in times_us)
            )
            for n, (first, after) in enumerate(self.extents)
        ]

    def commit_position(self, topic: str, partition: int, group: str, offset: int) -> None:
        self.positions[topic, partition, group] = offset

    def fetch_range(
        self, topic: str, partition: int, incarnation: int = 0, offset: int = 0, offset_end: int = -1, *,
        epoch: int = -1, bytes_max: int = -1, bodies: bool = True,
    ) -> Iterator[StoredChunk]:  # fmt: skip
        if epoch in self.epoch_ends and max(offset, offset_end) > self.epoch_ends[epoch]:
            raise Conflict(ErrorCode.EPOCH_ENDED, f"epoch ended end={self.epoch_ends[epoch]}")
        while offset < offset_end or (offset_end < 0 and bytes_max >= 0):
            first, _ = self.extents[partition]
            if offset < first:
                raise Missing(ErrorCode.OFFSET_OUT_OF_RANGE, "below the first record")
            after = offset + CHUNK_RECORDS
            data = memoryview(bytes(RECORD_BYTES * CHUNK_RECORDS))
            last = after if offset_end < 0 else min(after, offset_end)
            yield StoredChunk(topic, partition, data, offset, last, after)
            if offset_end < 0:
                return
            offset = after
            if self.retention_after is not None:
                self.extents[partition] = (self.retention_after, self.extents[partition][1])


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    made = FakeBroker([(0, 100), (0, 50)])
    monkeypatch.setattr(snapshot, "connect", lambda options: made)
    return made


def stream(**options: str) -> StreamReader:
    given = {"subscribe": "t", "startingOffsets": "earliest", **options}
    return StreamReader(read_options(given, streaming=True), SCHEMA)


def ends(offset: dict[str, Any]) -> list[int]:
    return [position.next_offset for position in decode_offset(offset).positions.values()]


def planned(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, int, int]]:
    tasks = [task for task in reader.partitions(start, end) if isinstance(task, RangesPartition)]
    return [(piece.partition, piece.offset, piece.offset_end) for task in tasks for piece in task.ranges]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, ReadAllAvailable()),
        ({"maxOffsetsPerTrigger": "7"}, ReadMaxRows(7)),
        ({"maxBytesPerTrigger": "9"}, ReadMaxBytes(9)),
        ({"minOffsetsPerTrigger": "3"}, ReadMinRows(3)),
    ],
)
def test_limit_options_are_passed_to_the_engine(options: dict[str, str], limit: ReadLimit) -> None:
    assert stream(**options).getDefaultReadLimit() == limit


@pytest.mark.parametrize(
    ("options", "limit", "expected"),
    [
        ({}, ReadAllAvailable(), [100, 50]),
        ({"maxOffsetsPerTrigger": "30"}, ReadMaxRows(30), [20, 10]),
        ({"maxOffsetsPerTrigger": "30"}, ReadAllAvailable(), [100, 50]),
        ({"maxBytesPerTrigger": "1500"}, ReadMaxBytes(1500), [10, 5]),
        ({"maxBytesPerTrigger": "1500", "maxOffsetsPerTrigger": "30"}, ReadMaxRows(30), [10, 5]),
        ({"maxBytesPerTrigger": "9000", "maxOffsetsPerTrigger": "30"}, ReadMaxRows(30), [20, 10]),
    ],
)
def test_limits_are_enforced(
    broker: FakeBroker, options: dict[str, str], limit: ReadLimit, expected: list[int]
) -> None:
    reader = stream(**options)
    assert ends(reader.latestOffset(reader.initialOffset(), limit)) == expected
    latest = reader.reportLatestOffset()
    assert latest is not None
    assert ends(latest) == [100, 50]


def test_an_available_now_run_ends_at_its_initial_target(broker: FakeBroker) -> None:
    reader = stream()
    reader.prepareForTriggerAvailableNow()
    start = reader.initialOffset()
    broker.extents = [(0, 200), (0, 200), (0, 200)]
    end = reader.latestOffset(start, ReadAllAvailable())
    assert planned(reader, start, end) == [(0, 0, 100), (1, 0, 50)]
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_few_records_wait_up_to_the_maximum_delay(broker: FakeBroker) -> None:
    class Watch:
        seconds = 0.0

        def now_us(self) -> int:
            return 0

        def monotonic(self) -> float:
            return self.seconds

    watch = Watch()
    given = {"subscribe": "t", "startingOffsets": "earliest", "minOffsetsPerTrigger": "20", "maxTriggerDelay": "5s"}
    reader = StreamReader(read_options(given, streaming=True), SCHEMA, watch)
    limit = reader.getDefaultReadLimit()
    first = reader.latestOffset(reader.initialOffset(), limit)
    broker.extents = [(0, 110), (0, 50)]
    assert reader.latestOffset(first, limit) is first
    watch.seconds = 5.0
    second = reader.latestOffset(first, limit)
    assert ends(second) == [110, 50]
    broker.extents = [(0, 130), (0, 50)]
    assert ends(reader.latestOffset(second, limit)) == [130, 50]


def test_lost_records_fail_the_query_unless_losses_are_allowed(broker: FakeBroker) -> None:
    strict, lenient = stream(), stream(failOnDataLoss="false")
    start = strict.latestOffset(strict.initialOffset(), ReadMaxRows(0))
    broker.extents = [(30, 100), (0, 50)]
    with pytest.raises(Missing, match=r"failOnDataLoss=false.*removed by retention"):
        strict.latestOffset(start, ReadAllAvailable())
    end = lenient.latestOffset(start, ReadAllAvailable())
    assert planned(lenient, start, end) == [(0, 30, 100), (1, 0, 50)]
    broker.extents = []
    with pytest.raises(Missing, match="deleted"):
        strict.latestOffset(start, ReadAllAvailable())
    assert lenient.latestOffset(start, ReadAllAvailable()) == start


def test_records_of_a_superseded_epoch_fail_the_query(broker: FakeBroker) -> None:
    reader = stream()
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    broker.epoch, broker.epoch_ends = 2, {1: 100}
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    broker.extents, broker.epoch_ends = [(0, 120), (0, 50)], {1: 90}
    with pytest.raises(Missing, match=r"failOnDataLoss.*epoch ended end=90"):
        stream().latestOffset(end, ReadAllAvailable())


def test_progress_is_committed_to_the_group(broker: FakeBroker) -> None:
    reader = stream(**{"kafka.group.id": "g"})
    reader.commit(reader.latestOffset(reader.initialOffset(), ReadAllAvailable()))
    assert broker.positions == {("t", 0, "g"): 100, ("t", 1, "g"): 50}


def test_readers_can_be_sent_to_workers(broker: FakeBroker) -> None:
    reader = pickle.loads(pickle.dumps(stream()))
    assert ends(reader.initialOffset()) == [0, 0]
    batch = BatchReader(read_options({"subscribe": "t"}, streaming=False), SCHEMA)
    assert len(pickle.loads(pickle.dumps(batch)).partitions()) == 1


def test_an_empty_batch_read(broker: FakeBroker) -> None:
    broker.extents = [(7, 7)]
    reader = BatchReader(read_options({"subscribe": "t"}, streaming=False), SCHEMA)
    assert reader.partitions() == []
    assert list(reader.read(None)) == []


def test_many_times_are_looked_up_in_several_requests(broker: FakeBroker) -> None:
    times = tuple(range(40))
    found = snapshot.extents(broker, Subscription(topics=("t",)), times_us=times)  # type: ignore[arg-type]
    assert [len(asked) for asked in broker.asked_times] == [16, 16, 8]
    assert {len(extent.time_offsets) for extent in found.values()} == {40}


def test_a_missing_partition_cannot_be_assigned(broker: FakeBroker) -> None:
    given = {"assign": '{"t":[0,9]}', "startingOffsets": "earliest"}
    with pytest.raises(Missing, match="topic=t partition=9"):
        StreamReader(read_options(given, streaming=True), SCHEMA).initialOffset()


def test_retention_may_remove_records_before_they_are_read(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = pa.schema([("offset", pa.int64())])

    def offsets(
        chunk: StoredChunk, columns: Sequence[str], schema: pa.Schema, *, create_times: bool
    ) -> list[pa.RecordBatch]:
        return [pa.record_batch([pa.array(range(chunk.offset, chunk.offset_end), pa.int64())], schema=schema)]

    monkeypatch.setattr(readers, "chunk_to_arrow", offsets)
    broker.retention_after = 60
    wanted = (ReadRange("t", 0, 100, 1, 0, 85),)
    strict = read_options({"subscribe": "t"}, streaming=False)
    with pytest.raises(Missing):
        list(readers.record_batches(strict, wanted, kind))
    broker.extents = [(0, 100)]
    lenient = replace(strict, fail_on_data_loss=False)
    read = [offset for batch in readers.record_batches(lenient, wanted, kind) for offset in batch.column(0).to_pylist()]
    assert read == [*range(10), *range(60, 85)]


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOON_US = 1_767_268_800_000_000
OFFSET, TIME, TOPIC, PARTITION = ("offset",), ("timestamp",), ("topic",), ("partition",)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([EqualTo(OFFSET, 5)], PushedFilters(offsets=Span(5, 6))),
        ([GreaterThan(OFFSET, 5), LessThanOrEqual(OFFSET, 9)], PushedFilters(offsets=Span(6, 10))),
        (
            [GreaterThanOrEqual(OFFSET, 5), GreaterThan(OFFSET, 7), LessThan(OFFSET, 9)],
            PushedFilters(offsets=Span(8, 9)),
        ),
        ([GreaterThanOrEqual(TIME, NOON)], PushedFilters(times_us=Span(NOON_US, None))),
        ([LessThan(TIME, NOON)], PushedFilters(times_us=Span(None, NOON_US))),
        ([In(PARTITION, (1, 2)), In(PARTITION, (2, 3))], PushedFilters(partitions=frozenset([2]))),
        ([EqualTo(TOPIC, "a"), IsNotNull(TOPIC)], PushedFilters(topics=frozenset(["a"]))),
        # Filters that do not restrict positions, or compare with an unsuitable value.
        ([Not(EqualTo(OFFSET, 5)), EqualTo(("key",), b"k"), In(OFFSET, (1, 2))], PushedFilters()),
        ([GreaterThan(TIME, NOON.replace(tzinfo=None)), EqualTo(OFFSET, "5"), LessThan(PARTITION, 3)], PushedFilters()),
    ],
)
def test_filters_become_position_limits(filters: list[Filter], expected: PushedFilters) -> None:
    assert pushed_filters(filters) == expected


def test_ranges_are_restricted_by_filters() -> None:
    ranges = [ReadRange("a", 0, 1, 1, 10, 50), ReadRange("a", 1, 2, 1, 0, 5), ReadRange("b", 0, 3, 1, 0, 100)]
    times = {100: 20, 200: 40}
    extents = {PartitionKey(r.topic, r.partition): Extent("", r.incarnation, 1, 0, 100, times) for r in ranges}

    def left(filters: PushedFilters) -> list[tuple[str, int, int, int]]:
        return [(r.topic, r.partition, r.offset, r.offset_end) for r in prune(ranges, filters, extents)]

    assert left(PushedFilters()) == [("a", 0, 10, 50), ("a", 1, 0, 5), ("b", 0, 0, 100)]
    assert left(PushedFilters(topics=frozenset(["a"]), partitions=frozenset([1]))) == [("a", 1, 0, 5)]
    assert left(PushedFilters(offsets=Span(4, 20))) == [("a", 0, 10, 20), ("a", 1, 4, 5), ("b", 0, 4, 20)]
    assert left(PushedFilters(times_us=Span(100, 200))) == [("a", 0, 20, 40), ("b", 0, 20, 40)]
    assert left(PushedFilters(offsets=Span(30, 20))) == []
