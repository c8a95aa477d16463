"""Convert Arrow record batches to stored batches, each for one partition: the work of a writing task.

Rows of a partition stay in order. Data is processed by column, and the number of buffered rows is limited.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from polywire.client.arrow import arrow_to_batches
from polywire.client.bulk import BulkConnection, TopicDetail
from polywire.errors import Conflict, ErrorCode, Invalid, Missing
from polywire.records.batch import spans_of
from polywire.records.partitioner import partitions_of, rows_by_partition
from polywire.records.split import record_count_of, split
from polywire.types import Buffer, KeyHash

PENDING_BYTES: Final = (
    8 << 20
)  # bytes of one topic that are buffered before they are sent: enough for large batches in several partitions
PENDING_TOTAL_BYTES: Final = 32 << 20  # bytes that one task buffers for all topics
TOPICS_MAX: Final = 10_000  # topics in one record batch, as many as a broker can have


class Outgoing(NamedTuple):
    """A stored batch and the partition to send it to."""

    topic: str
    partition: int
    batch: Buffer


@dataclass(slots=True)
class _PendingRows:
    batches: list[pa.RecordBatch] = field(default_factory=list)
    size: int = 0


class Topics:
    """Metadata of target topics. Each is requested once."""

    def __init__(self, connection: BulkConnection, *, create: bool) -> None:
        self._connection: Final = connection
        self._create: Final = create
        self._known: Final[dict[str, TopicDetail]] = {}

    def __getitem__(self, name: str) -> TopicDetail:
        """Return a topic's metadata, creating the topic if the options allow it.

        Raises Missing(TOPIC_MISSING) if it does not exist, Invalid for an invalid name.
        """
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._find(name)
        return found

    def _find(self, name: str) -> TopicDetail:
        try:
            return self._connection.describe(name)
        except Missing as error:
            if not self._create:
                raise Missing(
                    error.code,
                    f"the topic to write to does not exist (create it, or set createTopics=true) topic={name!r}",
                ) from None
        try:
            return self._connection.create_topic(name)
        except Conflict:
            return self._connection.describe(name)  # another task has created it meanwhile


class RowRouter:
    """Assigns rows to partitions. Rows of a topic stay in order.

    ``round_robin``: partition that gets the first row without a key.
    """

    def __init__(self, topics: Topics, topic: str | None, *, round_robin: int) -> None:
        self._topics: Final = topics
        self._topic: Final = topic
        self._round_robin = round_robin
        self._pending: Final[dict[str, _PendingRows]] = {}
        self._size = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[Outgoing]:
        """Add rows and yield batches that are ready to send.

        Raises Invalid for rows without a topic, or with a partition that does not exist.
        """
        for topic, rows in self._by_topic(batch):
            pending = self._pending.setdefault(topic, _PendingRows())
            pending.batches.append(rows)
            size = rows.nbytes
            pending.size += size
            self._size += size
            if pending.size >= PENDING_BYTES:
                yield from self._send(topic)
        if self._size >= PENDING_TOTAL_BYTES:
            yield from self.rest()

    def rest(self) -> Iterator[Outgoing]:
        """Yield all rows that are still buffered, as batches."""
        for topic in list(self._pending):
            yield from self._send(topic)

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if not batch.num_rows:
            return
        if self._topic is not None:
            yield self._topic, batch
            return
        names: Any = pc.dictionary_encode(batch.column(batch.schema.get_field_index("topic")))
        if names.null_count:
            raise Invalid(
                ErrorCode.INVALID_TOPIC,
                f"the column topic is null in some rows (fill it, or set the option topic for all rows) rows={names.null_count}",
            )
        found = names.dictionary.to_pylist()
        if len(found) > TOPICS_MAX:
            raise Invalid(
                ErrorCode.INVALID_TOPIC, f"too many topics in one batch topics={len(found)} limit={TOPICS_MAX}"
            )
        if len(found) == 1:
            yield found[0], batch
            return
        rows, starts = rows_by_partition(_numbers(names.indices), len(found))
        order = pa.Array.from_buffers(pa.int32(), len(rows), [None, pa.py_buffer(rows)])
        for number, name in enumerate(found):
            yield name, batch.take(order.slice(starts[number], starts[number + 1] - starts[number]))

    def _send(self, name: str) -> Iterator[Outgoing]:
        pending = self._pending.pop(name)
        self._size -= pending.size
        topic = self._topics[name]
        count = len(topic.incarnations)
        for rows in pa.Table.from_batches(pending.batches).combine_chunks().to_batches():
            first = 0
            for batch in arrow_to_batches(rows, headers=_headers(rows)):
                row_count = record_count_of(batch)
                for number, part in self._parts(topic, count, batch, rows.slice(first, row_count)):
                    yield Outgoing(name, number, part)
                first += row_count

    def _parts(self, topic: TopicDetail, count: int, batch: Buffer, rows: pa.RecordBatch) -> list[tuple[int, Buffer]]:
        index = rows.schema.get_field_index("partition")
        chosen = None if index < 0 else rows.column(index)
        if chosen is not None and chosen.null_count == len(chosen):
            chosen = None
        if chosen is None and (count == 1 or _keyless(rows)):
            self._round_robin += 1
            return [((self._round_robin - 1) % count, batch)]
        spans = memoryview(spans_of(batch))
        if chosen is None:
            return list(split(batch, spans, partitions_of(batch, spans, count, _key_hash(topic)), count))
        _check_numbers(topic, chosen, count)
        if chosen.null_count:
            by_key = partitions_of(batch, spans, count, _key_hash(topic))
            chosen = pc.coalesce(chosen, pa.Array.from_buffers(pa.int32(), len(by_key), [None, pa.py_buffer(by_key)]))
        return list(split(batch, spans, _numbers(chosen), count))


def _headers(rows: pa.RecordBatch) -> str:
    return "typedHeaders" if "typedHeaders" in rows.schema.names else "headers"


def _keyless(rows: pa.RecordBatch) -> bool:
    index = rows.schema.get_field_index("key")
    return index < 0 or rows.column(index).null_count == rows.num_rows


def _key_hash(topic: TopicDetail) -> KeyHash:
    return KeyHash(topic.settings.get("key_hash") or KeyHash.FNV32)


def _check_numbers(topic: TopicDetail, chosen: pa.Array[Any], count: int) -> None:
    ends: Any = pc.min_max(chosen).as_py()
    if ends["min"] < 0 or ends["max"] >= count:
        wrong = ends["min"] if ends["min"] < 0 else ends["max"]
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the column partition names a partition that does not exist topic={topic.name} partition={wrong} partitions={count}",
        )


def _numbers(column: pa.Array[Any]) -> memoryview | array[int]:
    data = column.buffers()[1]
    if data is None:
        return array("i")
    return memoryview(data).cast("B")[4 * column.offset : 4 * (column.offset + len(column))]
