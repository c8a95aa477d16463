"""The sink: batch and streaming writes, exactly once by default (docs/spark/sink.md).

Tasks stage their rows under random tokens and list the tokens in their commit messages. The driver's commit publishes
the tokens of a write in one atomic step, under a name and a number that the broker stores.

* A batch that Spark repeats after a crash is published once, even if it is staged several times and divided
  differently.
* Staged rows of a killed attempt never become visible.
* All rows of a write become visible together, once (``exactlyOnce``), unless the options request a weaker guarantee.

The sink contains no socket.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from polywire.client.bulk import BulkConnection
from polywire.client.writing import ProduceWriter, StageWriter, Writer
from polywire.errors import Busy, ErrorCode, Invalid, Unavailable
from polywire.records.split import record_count_of, with_producer
from polywire.spark import snapshot
from polywire.spark.sink_options import Guarantee, SinkOptions
from polywire.spark.sink_rows import Outgoing, RowRouter, Topics
from polywire.spark.sink_schema import check_rows
from polywire.spark.worker_exit import depart_quietly, one_line_errors

# local property in which Spark passes the query's id to tasks of a micro-batch
QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
TOKENS_MAX: Final = 10_000  # maximum number of tokens in one publish (spec: polywire#limits)


class Write(NamedTuple):
    """Permanent name of a write, which the broker publishes only once.

    ``number`` increases with each write of one writer.
    """

    writer: str
    number: int


@dataclass(frozen=True)
class TaskWritten(WriterCommitMessage):
    """Result of one task: rows staged under these tokens, or (without tokens) rows that were already appended."""

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
        """Publish the staged rows of all tasks, once. Raises the broker's error."""
        publish(self._options, messages, self._write.number)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop the staged rows."""
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
        """Publish micro-batch ``batchId``, once. Raises the broker's error."""
        publish(self._options, messages, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Drop the staged rows of micro-batch ``batchId``."""
        abandon(self._options, messages)


def batch_write(options: SinkOptions) -> Write:
    """Return the name of a batch write: a new one unless the options name a transaction.

    A transaction is specific to the topic option, just as Delta's transactions are specific to a table.
    """
    transaction = options.transaction
    if transaction is None:
        return Write(f"spark-{uuid.uuid4()}", 0)
    named = f"{transaction.application}/{options.topic or '*'}"
    if len(named.encode()) > 255:  # longest name of a writer (spec: polywire#limits)
        named = f"spark-{uuid.uuid5(uuid.NAMESPACE_URL, named)}"
    return Write(named, transaction.number)


def stream_write(options: SinkOptions) -> Write:
    """Return the name of the micro-batch that this task writes. Raises Invalid outside of a streaming query."""
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
    """Run one task. If it raises the broker's error, its staged rows never become visible."""
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
            _quietly(writer)


def _quietly(writer: Writer) -> None:
    """Drop the rows of a failed task, and ignore errors.

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
    """Set sequence numbers in the batches: the rows of each partition are numbered from 0 in every micro-batch.

    The micro-batch's number is the producer's epoch.
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
    """Make the staged rows of all tasks visible, once. Raises the broker's error."""
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
    """Drop the staged records. If the broker cannot be reached, they expire."""
    depart_quietly()
    tokens = [token for message in _written(messages) for token in message.tokens]
    try:
        for first in range(0, len(tokens), TOKENS_MAX):
            snapshot.connect(options).abandon(tokens[first : first + TOKENS_MAX])
    except Unavailable:
        return


def _written(messages: Sequence[WriterCommitMessage | None]) -> list[TaskWritten]:
    return [message for message in messages if isinstance(message, TaskWritten)]
