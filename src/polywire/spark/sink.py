"""The Spark sink ``polywire``: batch and streaming writes, exactly once by default (docs/spark/sink.md).

Tasks store their rows in the broker under random tokens, invisible to readers (staged), and list the tokens in their
commit messages. The driver then publishes all tokens of a write in one atomic step. The broker stores the name and
number of the write.

* A batch that Spark repeats after a crash is published once, even if it is staged several times and divided
  differently.
* Staged rows of a killed attempt never become visible.
* All rows of a write become visible together, once, unless the option ``exactlyOnce`` requests a weaker guarantee.

"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from polywire.client.arrow import arrow_to_batches
from polywire.client.bulk import BulkConnection, TopicDetail
from polywire.client.writing import ProduceWriter, StageWriter, Writer
from polywire.errors import Busy, Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.records.batch import spans_of
from polywire.records.partitioner import partitions_of, rows_by_partition
from polywire.records.split import record_count_of, split, with_producer
from polywire.spark import snapshot
from polywire.spark.options import Guarantee, SinkOptions, Transaction
from polywire.spark.schema import check_rows
from polywire.spark.worker_exit import depart_quietly, one_line_errors
from polywire.types import Buffer, KeyHash

PENDING_BYTES: Final = (
    8 << 20
)  # bytes of one topic that are buffered before they are sent: enough for large batches in several partitions
PENDING_TOTAL_BYTES: Final = 32 << 20  # bytes that one task buffers for all topics
TOPICS_MAX: Final = 10_000  # topics in one record batch, as many as a broker can have
# local property in which Spark passes the query's id to tasks of a micro-batch
QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
TOKENS_MAX: Final = 10_000  # maximum number of tokens in one publish (spec: polywire#limits)


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
    """Metadata of target topics, each of which is requested once."""

    def __init__(self, connection: BulkConnection, *, create: bool) -> None:
        self._connection: Final = connection
        self._create: Final = create
        self._known: Final[dict[str, TopicDetail]] = {}

    def __getitem__(self, name: str) -> TopicDetail:
        """Return a topic's metadata. The topic is created if the options allow it.

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
    """Assigns rows to partitions, and collects them into batches. Rows of a topic stay in order."""

    def __init__(self, topics: Topics, topic: str | None, *, round_robin: int) -> None:
        """Create the router.

        Args:
            topics: metadata of topics.
            topic: topic of all rows; None uses the column topic.
            round_robin: partition of the first row without a key.
        """
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
        names: Any = batch.column(batch.schema.get_field_index("topic")).dictionary_encode()
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
            import pyarrow.compute as pc  # not needed in most processes of Spark, and takes long to import

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
    import pyarrow.compute as pc

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


class Write(NamedTuple):
    """Id of a write. The broker publishes each write only once.

    Attributes:
        writer: name of the writer.
        number: sequence number, which increases with each write of the writer.
    """

    writer: str
    number: int


@dataclass(frozen=True)
class TaskWritten(WriterCommitMessage):
    """The result of one task.

    Attributes:
        writer: name of the writer.
        tokens: tokens to publish, so that the rows become visible; none if the rows were appended directly.
        records: number of rows.
    """

    writer: str
    tokens: tuple[bytes, ...]
    records: int


@one_line_errors
class BatchSink(DataSourceArrowWriter):
    """One batch write. Spark creates it on the driver and pickles it for the tasks and for the commit."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        check_rows(schema, options.topic)
        self._options: Final = options
        self._write: Final = batch_write(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskWritten:  # type: ignore[override]
        """Write one task's rows, and return what the driver needs to publish them."""
        return write_rows(self._options, self._write, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make the rows of all tasks visible, once. Raises the broker's error."""
        publish(self._options, messages, self._write.number)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete the rows of all tasks."""
        abandon(self._options, messages)


@one_line_errors
class StreamSink(DataSourceStreamArrowWriter):
    """The micro-batches of a query.

    Spark creates one sink per micro-batch and another one for its commit, so a sink has no state.
    """

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        check_rows(schema, options.topic)
        self._options: Final = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskWritten:  # type: ignore[override]
        """Write one task's rows of a micro-batch, and return what the driver needs to publish them."""
        return write_rows(self._options, stream_write(self._options), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Make the rows of micro-batch ``batchId`` visible, once. Raises the broker's error."""
        publish(self._options, messages, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Delete the rows of micro-batch ``batchId``."""
        abandon(self._options, messages)


def batch_write(options: SinkOptions) -> Write:
    """Return the id of a batch write: the transaction in the options, or a new one."""
    if options.transaction is None:
        return Write(f"spark-{uuid.uuid4()}", 0)
    return transaction_write(options.transaction, options.topic)


def transaction_write(transaction: Transaction, topic: str | None) -> Write:
    """Return the id of the write with a transaction. ``topic`` is the value of the option topic.

    Transactions of different topics are different writes, just as Delta's transactions are specific to a table.
    """
    named = f"{transaction.application}/{topic or '*'}"
    if len(named.encode()) > 255:  # longest name of a writer (spec: polywire#limits)
        named = f"spark-{uuid.uuid5(uuid.NAMESPACE_URL, named)}"
    return Write(named, transaction.number)


def stream_write(options: SinkOptions) -> Write:
    """Return the id of the micro-batch to which this task belongs. Raises Invalid outside of a streaming query."""
    context = TaskContext.get()
    query = None if context is None else context.getLocalProperty(QUERY_ID)
    number = None if context is None else context.getLocalProperty(BATCH_ID)
    if query is None or number is None:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "the query of this task is unknown: a streaming write must run in a streaming query",
        )
    return Write(options.sink_id or f"spark-{query}", int(number))


def write_rows(options: SinkOptions, write: Write, iterator: Iterator[pa.RecordBatch]) -> TaskWritten:
    """Write the rows of one task. With exactly-once, they are invisible until ``publish``."""
    depart_quietly()
    connection = snapshot.connect(options)
    task = _task_number()
    outgoing = _outgoing(connection, options, iterator, round_robin=task + write.number)
    if options.guarantee is Guarantee.SEQUENCE:
        outgoing = _numbered(outgoing, f"{write.writer}/{task}".encode()[-255:], epoch=write.number)
    writer: Writer
    if options.guarantee is Guarantee.PUBLISHED:
        writer = StageWriter(connection, write)
    else:
        writer = ProduceWriter(connection, options.level)
    return TaskWritten(write.writer, *_put_all(writer, outgoing))


def _put_all(writer: Writer, outgoing: Iterator[Outgoing]) -> tuple[tuple[bytes, ...], int]:
    records = 0
    done = False
    try:
        for piece in outgoing:
            writer.put(piece.topic, piece.partition, piece.batch)
            records += record_count_of(piece.batch)
        tokens = tuple(writer.finish())
        done = True
        return tokens, records
    except Busy as error:
        if error.code is not ErrorCode.STAGE_FULL:
            raise
        raise Busy(
            error.code,
            "the broker has reached its limit of staged data: write less at once (maxOffsetsPerTrigger, maxBytesPerTrigger, or a filter), or "
            f"set exactlyOnce=false to write without staging; {error.message}",
        ) from None
    finally:
        if not done:
            _abandon_ignoring_errors(writer)


def _abandon_ignoring_errors(writer: Writer) -> None:
    """Delete the rows of a failed task, and ignore errors.

    The rows expire anyway, and the user must see the error that made the task fail.
    """
    try:
        writer.abandon()
    except Unavailable:
        return


def _outgoing(
    connection: BulkConnection, options: SinkOptions, iterator: Iterator[pa.RecordBatch], *, round_robin: int
) -> Iterator[Outgoing]:
    routing = RowRouter(Topics(connection, create=options.create_topics), options.topic, round_robin=round_robin)
    for batch in iterator:
        yield from routing.add(batch)
    yield from routing.rest()


def _numbered(outgoing: Iterator[Outgoing], producer: bytes, *, epoch: int) -> Iterator[Outgoing]:
    """Set the producer and sequence numbers of batches. The rows of each partition are numbered from 0.

    ``epoch`` is the number of the micro-batch.
    """
    nexts: dict[tuple[str, int], int] = {}
    for topic, partition, batch in outgoing:
        sequence = nexts.get((topic, partition), 0)
        nexts[topic, partition] = sequence + record_count_of(batch)
        yield Outgoing(topic, partition, with_producer(batch, producer, epoch=epoch, base_sequence=sequence))


def _task_number() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


def publish(options: SinkOptions, messages: Sequence[WriterCommitMessage | None], number: int) -> None:
    """Make the rows of all tasks visible, once. Raises the broker's error."""
    depart_quietly()
    written = _written(messages)
    tokens = [token for message in written for token in message.tokens]
    if not tokens:
        return
    if len(tokens) > TOKENS_MAX:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"too many tokens for one atomic write (write less at once, or with fewer tasks) tokens={len(tokens)} limit={TOKENS_MAX}",
        )
    snapshot.connect(options).publish(written[0].writer, number, tokens)


def abandon(options: SinkOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Delete the rows of all tasks. If the broker cannot be reached, they expire."""
    depart_quietly()
    tokens = [token for message in _written(messages) for token in message.tokens]
    try:
        for first in range(0, len(tokens), TOKENS_MAX):
            snapshot.connect(options).abandon(tokens[first : first + TOKENS_MAX])
    except Unavailable:
        return


def _written(messages: Sequence[WriterCommitMessage | None]) -> list[TaskWritten]:
    return [message for message in messages if isinstance(message, TaskWritten)]
