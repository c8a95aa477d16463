"""A topic in memory as the source of a table, and a check that the table has exactly its records."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from polywire.client.bulk import PartitionRange, StoredChunk
from polywire.records.batch import stamp
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.store.objects import Objects
from polywire.tables import deletion_vectors
from polywire.tables.delta_log import DeltaLog, PartitionKey, TableState
from polywire.tables.writer import DATA, TopicTable, merged
from polywire.testing.memory_objects import MemoryObjects
from polywire.types import Buffer

TOPIC = "orders"
TOPIC_ID = b"first topic 0123"
TIME_US = 1_795_000_000_000_000
START_MS = 1_795_000_000_000

Row = tuple[int, int, bytes | None]
"""Partition, offset and value."""


class FakeTopic:
    """A topic. Implements ``Source``.

    Attributes:
        chunk_records: records of one chunk.
        is_latest: whether the table has only the latest record of each key.
    """

    def __init__(self, partitions: int = 2, *, topic_id: bytes = TOPIC_ID, is_latest: bool = False) -> None:
        self.topic_id = topic_id
        self.is_latest = is_latest
        self.values: list[list[bytes | None]] = [[] for _ in range(partitions)]
        self.keys: list[list[bytes | None]] = [[] for _ in range(partitions)]
        self.first_offsets = [0] * partitions
        self.incarnations = list(range(1, partitions + 1))
        self.chunk_records = 7

    def produce(self, partition: int, *values: bytes | None, key: bytes | None = b"k") -> None:
        self.values[partition] += values
        self.keys[partition] += [key] * len(values)

    def bounds(self, topics: Sequence[str]) -> list[PartitionRange]:
        assert list(topics) == [TOPIC]
        return [
            PartitionRange(TOPIC, self.topic_id, number, incarnation, 1, first, len(values))
            for number, (incarnation, first, values) in enumerate(
                zip(self.incarnations, self.first_offsets, self.values, strict=True)
            )
        ]

    def fetch_range(
        self, topic: str, partition: int, incarnation: int, offset: int, offset_end: int, *, epoch: int
    ) -> Iterator[StoredChunk]:
        assert (topic, incarnation, epoch) == (TOPIC, self.incarnations[partition], 1)
        while offset < offset_end:
            end = min(offset + self.chunk_records, offset_end)
            pairs = zip(self.values[partition][offset:end], self.keys[partition][offset:end], strict=True)
            batch = from_records([Record(value, key) for value, key in pairs])
            stamp(batch, 0, incarnation, 1, offset, 0, TIME_US + offset)
            yield StoredChunk(topic, partition, memoryview(batch), offset, end, end)
            offset = end

    def rows(self, state: TableState) -> list[Row]:
        """Return the records below the offsets of a version of the table, or the latest of them."""
        found = []
        for number, values in enumerate(self.values):
            end = state.offsets.get(self.key(number), 0)
            latest = {key: offset for offset, key in enumerate(self.keys[number][:end])}
            for offset, key in enumerate(self.keys[number][:end]):
                is_row = key is None or (latest[key] == offset and values[offset] is not None)
                if is_row or not self.is_latest:
                    found.append((number, offset, values[offset]))
        return found

    def key(self, partition: int) -> PartitionKey:
        return PartitionKey(self.topic_id, partition, self.incarnations[partition])


class Died(BaseException):
    """The writer was killed."""


class MortalObjects(MemoryObjects):
    """A bucket whose client is killed before or after one of its writes.

    Attributes:
        writes: number of writes so far.
        dies_at: number of the write at which the client is killed; -1 for none.
        dies_after: whether that write has an effect.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.dies_at = -1
        self.dies_after = False

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        self._before()
        super().create(name, parts)
        self._after()

    def put(self, name: str, content: Buffer) -> None:
        self._before()
        super().put(name, content)
        self._after()

    def replace(self, name: str, content: Buffer, tag: str) -> None:
        self._before()
        super().replace(name, content, tag)
        self._after()

    def delete(self, name: str) -> None:
        self._before()
        super().delete(name)
        self._after()

    def _before(self) -> None:
        if self.writes == self.dies_at and not self.dies_after:
            raise Died

    def _after(self) -> None:
        self.writes += 1
        if self.writes - 1 == self.dies_at and self.dies_after:
            raise Died


class Clock:
    """Time that passes with each look."""

    def __init__(self) -> None:
        self.ms = START_MS

    def now_ms(self) -> int:
        self.ms += 1
        return self.ms


def table_of(topic: FakeTopic, objects: Objects, clock: Clock | None = None) -> TopicTable:
    now_ms = (clock or Clock()).now_ms
    return TopicTable(TOPIC, objects, topic, now_ms=now_ms, pause=lambda _: None, is_latest=topic.is_latest)


def merge(table: TopicTable) -> bool:
    """Merge one group of small files. Return False if there is none."""
    plan = table.plan_merge()
    return plan is not None and table.replace(plan, merged(plan))


def load(objects: Objects) -> TableState:
    return DeltaLog(objects, lambda: START_MS).load()


def rows_of(objects: Objects, state: TableState) -> list[Row]:
    """Return the rows of a version, read from its files."""
    rows: list[Row] = []
    for path, file in state.files.items():
        table = pq.read_table(io.BytesIO(objects.read(path).content))
        assert table.num_rows == file.row_count
        columns = [table.column(name).to_pylist() for name in ("partition", "offset", "value")]
        deleted = deletion_vectors.read(objects, file.deleted)
        assert file.live_count == table.num_rows - len(deleted) > 0
        rows += [row for number, row in enumerate(zip(*columns, strict=True)) if number not in deleted]
    return sorted(rows, key=lambda row: row[:2])


def check(topic: FakeTopic, objects: Objects) -> TableState:
    """Check that the newest version has exactly the records below its offsets."""
    state = load(objects)
    assert rows_of(objects, state) == topic.rows(state)
    return state


def check_no_garbage(objects: Objects, state: TableState) -> None:
    assert sorted(objects.list(DATA)) == sorted(state.used())


def save(objects: Objects, folder: Path) -> Path:
    """Write the objects to a directory, for readers of other projects."""
    for name in objects.list(""):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(objects.read(name).content)
    return folder
