"""Blocking versions of ``Client``, ``Producer`` and ``Consumer``, for programs without asyncio.

Calls may come from any thread. A client and its producers and consumers share one background thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypeVar, Unpack

from polywire.client.base import Ability, PartitionBounds, Produced, TopicInfo, renamed
from polywire.client.bulk import AppendedRange
from polywire.client.client import Client
from polywire.client.consumer import BATCH_RECORDS, Consumer, ConsumerOptions
from polywire.client.lane import warn_lost
from polywire.client.link import CONNECT_S, RECONNECT_S
from polywire.client.listings import GroupInfo, PartitionLag
from polywire.client.notices import OnConnect, OnDisconnect
from polywire.client.producer import FLUSH_S, Producer, ProducerOptions, Receipt, Receipts
from polywire.client.queue import Job, Queue, QueueOptions
from polywire.client.record import Headers, Record, Text, as_json, as_record, size_of
from polywire.client.sync import LoopThread
from polywire.client.transaction import BUFFER_BYTES, TIMEOUT_S, Transaction
from polywire.delivery_times import DeliveryTimes
from polywire.errors import ErrorCode, Unavailable

if TYPE_CHECKING:
    from opentelemetry.trace import Span

T = TypeVar("T")

HANDED_AT_ONCE: Final = 100  # records that the client's thread queues before it turns to its connections
HANDED_BYTES_MAX: Final = 1 << 20
"""Size of the records that ``SyncProducer.send`` hands over without waiting. More would only delay other calls."""


class SyncReceipt(Generic[T]):
    """The result of the blocking ``send`` and ``send_many``."""

    __slots__ = ("_queued", "_receipt", "_thread")

    def __init__(self, thread: LoopThread, receipt: Receipt | Receipts | None = None) -> None:
        """Create a receipt. It is None until a record that was handed over has been queued."""
        self._thread: Final = thread
        self._receipt = receipt
        self._queued: asyncio.Future[Receipt] | None = None

    @property
    def done(self) -> bool:
        """Whether the result is available."""
        return self._receipt is not None and self._receipt.done

    def _set(self, receipt: Receipt) -> None:
        """Set the receipt of a record that was handed over. Called in the client's thread."""
        self._receipt = receipt
        if self._queued is not None and not self._queued.done():
            self._queued.set_result(receipt)

    def result(self) -> T:
        """Wait until the record is stored, and return its partition and offset. Raises the error if it failed."""

        async def wait() -> Any:
            if self._receipt is None:
                self._queued = self._queued or asyncio.get_running_loop().create_future()
                await asyncio.shield(self._queued)
            assert self._receipt is not None, "it was set"
            return await self._receipt

        return self._thread.run(wait())  # type: ignore[no-any-return]


class _Handed(NamedTuple):
    """A record that was handed over to the client's thread."""

    receipt: SyncReceipt[Produced]
    topic: str
    record: Record
    partition: int | None


class SyncProducer:
    """The blocking ``Producer``, created by ``SyncClient.producer``.

    Example:
        with client.producer() as producer:
            producer.send_many("orders", ["one", "two"])
    """

    def __init__(self, thread: LoopThread, producer: Producer) -> None:
        self._thread: Final = thread
        self._producer: Final = producer
        self._lock: Final = threading.Lock()
        # records that the client's thread sends in order, so that ``send`` need not switch threads
        self._handed: Final[deque[_Handed]] = deque()
        self._handed_bytes = 0
        self._sending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._thread.ended:
            self._thread.run(self._end(kind, error, trace))

    async def _end(self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._sent()
        finally:
            if (sending := self._sending) is not None:
                sending.cancel()
            await self._producer.__aexit__(kind, error, trace)

    @property
    def buffered_bytes(self) -> int:
        """Size of the records that are not acknowledged yet."""
        return self._handed_bytes + self._producer.buffered_bytes

    def send(
        self,
        topic: str,
        value: Text | Record | None,
        *,
        key: Text | None = None,
        headers: Headers | None = None,
        timestamp: datetime | None = None,
        partition: int | None = None,
        timeout_s: float | None = None,
        **times: Unpack[DeliveryTimes],
    ) -> SyncReceipt[Produced]:
        """Queue a record and return its receipt.

        See ``Producer.send``. ``send_many`` costs less per record.
        """
        record = as_record(value, key, headers, timestamp, **times)
        if timeout_s is None and self._producer._is_ready(topic, partition) and not self._thread.ended:
            receipt = self._hand_over(topic, record, partition)
            if receipt is not None:
                return receipt
        work = self._producer.send(topic, record, partition=partition, timeout_s=timeout_s)
        return SyncReceipt(self._thread, self._run(work))

    def _hand_over(self, topic: str, record: Record, partition: int | None) -> SyncReceipt[Produced] | None:
        """Let the client's thread send a record, and return at once. Return None if too much was handed over."""
        size = size_of(record)
        with self._lock:
            if self._handed_bytes + size > HANDED_BYTES_MAX:
                return None
            receipt = SyncReceipt[Produced](self._thread)
            if self._sending is None:
                self._sending = self._thread.begin(self._send_handed())  # it waits for the lock
            self._handed_bytes += size
            self._handed.append(_Handed(receipt, topic, record, partition))  # last, because of KeyboardInterrupt
            return receipt

    async def _send_handed(self) -> None:
        handed: _Handed | None = None
        is_done = False
        count = 0
        try:
            while (handed := self._next_handed()) is not None:
                count += 1
                if count % HANDED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                queued = await self._producer._send_or_fail(handed.topic, handed.record, handed.partition)
                handed.receipt._set(queued)
            is_done = True
        finally:
            if not is_done:  # the loop ends, or an unforeseen exception
                self._lose_handed(handed)

    def _lose_handed(self, first: _Handed | None) -> None:
        with self._lock:
            lost = [*([] if first is None else [first]), *self._handed]
            self._handed.clear()
            self._handed_bytes = 0
            self._sending = None
        warn_lost(len(lost))
        error = Unavailable(ErrorCode.STOPPING, "the record was not sent, because the producer was closed")
        for handed in lost:
            handed.receipt._set(self._producer._failed(handed.topic, error))

    def _next_handed(self) -> _Handed | None:
        with self._lock:
            if not self._handed:
                self._sending = None
                return None
            handed = self._handed.popleft()
            self._handed_bytes -= size_of(handed.record)
            return handed

    async def _sent(self) -> None:
        """Wait until all records that were handed over have been queued."""
        while (sending := self._sending) is not None:
            await asyncio.wait({asyncio.wrap_future(sending)})

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine after the records that were handed over have been queued."""
        if self._sending is None or self._thread.ended:
            return self._thread.run(work)

        async def later() -> T:
            try:
                await self._sent()
                return await work
            finally:
                work.close()  # if the caller was interrupted, it has not begun

        return self._thread.run(later())

    def send_and_wait(
        self,
        topic: str,
        value: Text | Record | None,
        *,
        key: Text | None = None,
        headers: Headers | None = None,
        timestamp: datetime | None = None,
        partition: int | None = None,
        timeout_s: float | None = None,
        **times: Unpack[DeliveryTimes],
    ) -> Produced:
        """Send one record immediately, and wait until it is stored. See ``Producer.send_and_wait``."""
        record = as_record(value, key, headers, timestamp, **times)
        return self._run(self._producer.send_and_wait(topic, record, partition=partition, timeout_s=timeout_s))

    def send_json(
        self,
        topic: str,
        value: object,
        *,
        key: Text | None = None,
        headers: Headers | None = None,
        timestamp: datetime | None = None,
        partition: int | None = None,
        timeout_s: float | None = None,
        **times: Unpack[DeliveryTimes],
    ) -> SyncReceipt[Produced]:
        """Queue a record whose value is written as JSON. See ``Producer.send_json``."""
        record = Record(as_json(value), key, headers, timestamp=timestamp, **times)
        return self.send(topic, record, partition=partition, timeout_s=timeout_s)

    def send_many(
        self,
        topic: str,
        values: Iterable[Text | Record | None],
        *,
        keys: Iterable[Text | None] | None = None,
        partition: int | None = None,
    ) -> SyncReceipt[list[AppendedRange]]:
        """Queue many records and return their receipt. See ``Producer.send_many``."""
        work = self._producer.send_many(topic, values, keys=keys, partition=partition)
        return SyncReceipt(self._thread, self._run(work))

    def flush(self) -> None:
        """Wait until all records are acknowledged. Raises the first error. See ``Producer.flush``."""
        self._run(self._producer.flush())

    def close(self, *, flush: bool = True) -> None:
        """Flush and close the connection. See ``Producer.close``."""
        if self._thread.ended:
            return
        if not flush and (sending := self._sending) is not None:
            sending.cancel()
        self._run(self._producer.close(flush=flush))


class SyncConsumer:
    """The blocking ``Consumer``, created by ``SyncClient.consumer``.

    Example:
        with client.consumer("orders", group="billing") as consumer:
            for record in consumer:
                print(record.offset, record.value)
    """

    def __init__(self, thread: LoopThread, consumer: Consumer) -> None:
        self._thread: Final = thread
        self._consumer: Final = consumer

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit_last=kind is None)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        record = None if self._thread.ended else self._consumer._take_fetched()
        if record is not None:
            return record
        records = self.batch(1)
        if not records:
            raise StopIteration
        return records[0]

    def start(self) -> None:
        """Connect, join the group, and start to fetch. See ``Consumer.start``."""
        self._thread.run(self._consumer.start())

    def batch(self, records_max: int = BATCH_RECORDS, *, timeout_s: float | None = None) -> Sequence[Record]:
        """Wait until there are records, and return some of them, all from one partition. See ``Consumer.batch``."""
        return self._thread.run(self._consumer.batch(records_max, timeout_s=timeout_s))

    def batches(self, records_max: int = BATCH_RECORDS) -> Iterator[Sequence[Record]]:
        """Yield batches of records forever. See ``Consumer.batch``."""
        while records := self.batch(records_max):
            yield records

    def commit(self, record: Record | None = None) -> None:
        """Commit the group's offsets, and wait until they are stored. See ``Consumer.commit``."""
        self._thread.run(self._consumer.commit(record))

    def processing(self, records: Record | Sequence[Record]) -> AbstractContextManager[Span | None]:
        """Return a context manager that makes an OpenTelemetry span of the processing. See ``Consumer.processing``."""
        return self._consumer.processing(records)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Continue at another offset of an assigned partition. See ``Consumer.seek``."""
        self._thread.run(_call(lambda: self._consumer.seek(topic, partition, offset)))

    def pause(self, topic: str, partition: int | None = None) -> None:
        """Deliver no more records of assigned partitions until ``resume``. See ``Consumer.pause``."""
        self._thread.run(_call(lambda: self._consumer.pause(topic, partition)))

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Deliver records again after ``pause``. See ``Consumer.resume``."""
        self._thread.run(_call(lambda: self._consumer.resume(topic, partition)))

    @property
    def paused(self) -> list[tuple[str, int]]:
        """The paused partitions, as (topic, partition)."""
        return self._thread.run(_call(lambda: self._consumer.paused))

    @property
    def positions(self) -> dict[tuple[str, int], int]:
        """The next offset of each assigned partition, by topic and partition."""
        return self._thread.run(_call(lambda: self._consumer.positions))

    def close(self, *, commit_last: bool = True) -> None:
        """Commit offsets, leave the group, and close the connection. See ``Consumer.close``."""
        if not self._thread.ended:
            self._thread.run(self._consumer.close(commit_last=commit_last))


class SyncTransaction:
    """The blocking ``Transaction``, created by ``SyncClient.transaction``.

    Example:
        with client.transaction("billing-1") as transaction:
            transaction.send("invoices", "first")
            transaction.send("ledger", "second")
    """

    def __init__(self, thread: LoopThread, transaction: Transaction) -> None:
        self._thread: Final = thread
        self._transaction: Final = transaction

    def __enter__(self) -> Self:
        self._thread.run(self._transaction.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._thread.ended:
            self._thread.run(self._transaction.__aexit__(kind, error, trace))

    def send(
        self,
        topic: str,
        value: Text | Record | None,
        *,
        key: Text | None = None,
        headers: Headers | None = None,
        timestamp: datetime | None = None,
        partition: int | None = None,
        **times: Unpack[DeliveryTimes],
    ) -> None:
        """Add a record to the transaction. See ``Transaction.send``."""
        work = self._transaction.send(
            topic, value, key=key, headers=headers, timestamp=timestamp, partition=partition, **times
        )
        self._thread.run(work)

    def send_json(
        self,
        topic: str,
        value: object,
        *,
        key: Text | None = None,
        headers: Headers | None = None,
        timestamp: datetime | None = None,
        partition: int | None = None,
        **times: Unpack[DeliveryTimes],
    ) -> None:
        """Add a record whose value is written as JSON. See ``Transaction.send_json``."""
        self.send(topic, as_json(value), key=key, headers=headers, timestamp=timestamp, partition=partition, **times)

    def send_many(self, topic: str, values: Iterable[Text | Record | None], *, partition: int | None = None) -> None:
        """Add many records. See ``Transaction.send_many``."""
        self._thread.run(self._transaction.send_many(topic, values, partition=partition))

    def commit(self) -> None:
        """Store the records and offsets, and wait until they are synced. See ``Transaction.commit``."""
        self._thread.run(self._transaction.commit())

    def abort(self) -> None:
        """Drop the records and end the transaction. See ``Transaction.abort``."""
        self._thread.run(self._transaction.abort())


class SyncJob:
    """The blocking ``Job``, returned by ``SyncQueue``."""

    __slots__ = ("_job", "_thread")

    def __init__(self, thread: LoopThread, job: Job) -> None:
        self._thread: Final = thread
        self._job: Final = job

    @property
    def record(self) -> Record:
        """The record."""
        return self._job.record

    @property
    def attempt(self) -> int:
        """How often the record was delivered, from 1."""
        return self._job.attempt

    @property
    def text(self) -> str:
        """The value as text. See ``Record.text``."""
        return self._job.text

    def json(self) -> Any:
        """Return the value decoded from JSON. See ``Record.json``."""
        return self._job.json()

    def ack(self) -> None:
        """Report that the work is done. See ``Job.ack``."""
        self._thread.run(self._job.ack())

    def retry(self, *, delay_s: float = 0.0, reason: str = "") -> None:
        """Return the record to the queue. See ``Job.retry``."""
        self._thread.run(self._job.retry(delay_s=delay_s, reason=reason))

    def reject(self, reason: str = "") -> None:
        """Finish the record as failed. See ``Job.reject``."""
        self._thread.run(self._job.reject(reason))


class SyncQueue:
    """The blocking ``Queue``, created by ``SyncClient.queue``. Several threads may take jobs from it.

    Example:
        with client.queue("jobs", group="workers") as queue:
            for job in queue:
                print(job.text)
                job.ack()
    """

    def __init__(self, thread: LoopThread, queue: Queue) -> None:
        self._thread: Final = thread
        self._queue: Final = queue

    def __enter__(self) -> Self:
        self._thread.run(self._queue.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[SyncJob]:
        while (job := self.get()) is not None:
            yield job

    def get(self, *, timeout_s: float | None = None) -> SyncJob | None:
        """Wait for the next job. See ``Queue.get``."""
        job = self._thread.run(self._queue.get(timeout_s=timeout_s))
        return None if job is None else SyncJob(self._thread, job)

    def close(self) -> None:
        """Send pending acknowledgements and close the connection. See ``Queue.close``."""
        if not self._thread.ended:
            self._thread.run(self._queue.close())


class SyncClient:
    """The blocking ``Client``, created by ``connect_sync``. Close it, or use it in a ``with``.

    Example:
        with polywire.connect_sync("127.0.0.1:9555") as client:
            client.send("orders", "hello", key="a")
            with client.consumer("orders") as consumer:
                for record in consumer:
                    print(record.text)
    """

    def __init__(
        self,
        url: str,
        *,
        connect_s: float = CONNECT_S,
        reconnect_s: float = RECONNECT_S,
        on_connect: OnConnect | None = None,
        on_disconnect: OnDisconnect | None = None,
    ) -> None:
        """Connect. Arguments and errors are the same as in ``connect_sync``."""
        client = Client(
            url, connect_s=connect_s, reconnect_s=reconnect_s, on_connect=on_connect, on_disconnect=on_disconnect
        )
        self._thread: Final = LoopThread(lambda: self._close(commit_last=False))
        self._producers: Final[list[SyncProducer]] = []
        self._client: Final = client
        with ExitStack() as undo:
            undo.callback(self._thread.end)
            self._thread.run(client.open())
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(commit_last=kind is None)

    async def _close(self, *, commit_last: bool) -> None:
        for producer in self._producers:
            await producer._sent()
        await self._client.close(commit_last=commit_last)

    def abilities(self) -> frozenset[Ability]:
        """Return the features that this protocol supports."""
        return self._thread.run(self._client.abilities())

    def close(self, *, commit_last: bool = True) -> None:
        """Flush and close producers and consumers, then the connection. See ``Client.close``.

        If a program ends without closing its clients, they are closed then, with ``commit_last=False``. It waits at
        most ten seconds for them, and a warning reports records that were not acknowledged.
        """
        if not self._thread.ended:
            try:
                self._thread.run(self._close(commit_last=commit_last))
            finally:
                self._thread.end()

    def producer(self, **options: Unpack[ProducerOptions]) -> SyncProducer:
        """Return a producer. Options are the arguments of ``Producer``."""
        producer = SyncProducer(self._thread, self._thread.run(_call(lambda: self._client.producer(**options))))
        self._producers.append(producer)
        return producer

    def consumer(self, *topics: str, **options: Unpack[ConsumerOptions]) -> SyncConsumer:
        """Return a consumer of the topics. Options are the arguments of ``Consumer``."""
        return SyncConsumer(self._thread, self._thread.run(_call(lambda: self._client.consumer(*topics, **options))))

    def queue(self, topic: str, **options: Unpack[QueueOptions]) -> SyncQueue:
        """Return a topic as a work queue. Options are the arguments of ``Queue``."""
        return SyncQueue(self._thread, self._client.queue(topic, **options))

    def transaction(
        self,
        transactional_id: str,
        *,
        consumer: SyncConsumer | None = None,
        create: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> SyncTransaction:
        """Return a transaction, for a ``with``. See ``Client.transaction``, and ``Transaction`` for the arguments."""
        made = self._client.transaction(
            transactional_id,
            consumer=None if consumer is None else consumer._consumer,
            create=create,
            buffer_bytes=buffer_bytes,
            timeout_s=timeout_s,
        )
        return SyncTransaction(self._thread, made)

    def send(
        self,
        topic: str,
        value: Text | Record | None,
        *,
        key: Text | None = None,
        headers: Headers | None = None,
        timestamp: datetime | None = None,
        partition: int | None = None,
        timeout_s: float | None = None,
        **times: Unpack[DeliveryTimes],
    ) -> Produced:
        """Send one record, and return its partition and offset once it is stored. See ``Client.send``."""
        record = as_record(value, key, headers, timestamp, **times)
        return self._thread.run(self._client.send(topic, record, partition=partition, timeout_s=timeout_s))

    def send_json(
        self,
        topic: str,
        value: object,
        *,
        key: Text | None = None,
        headers: Headers | None = None,
        timestamp: datetime | None = None,
        partition: int | None = None,
        timeout_s: float | None = None,
        **times: Unpack[DeliveryTimes],
    ) -> Produced:
        """Send one record whose value is written as JSON. See ``Client.send_json``."""
        record = Record(as_json(value), key, headers, timestamp=timestamp, **times)
        return self.send(topic, record, partition=partition, timeout_s=timeout_s)

    def fetch(self, topic: str, partition: int, offset: int, *, records_max: int = 1000) -> list[Record]:
        """Return records of one partition from an offset on. See ``Client.fetch``."""
        return self._thread.run(self._client.fetch(topic, partition, offset, records_max=records_max))

    def create_topic(self, topic: str, partitions: int = 3, *, partition_count: int | None = None) -> None:
        """Create a topic. Raises Conflict(TOPIC_EXISTS), Invalid(INVALID_TOPIC, INVALID_PARTITION_COUNT).

        Args:
            topic: full name.
            partitions: number of partitions.
            partition_count: deprecated name of ``partitions``.
        """
        self._thread.run(self._client.create_topic(topic, renamed(partitions, partition_count)))

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records. Raises Missing(TOPIC_MISSING)."""
        self._thread.run(self._client.delete_topic(topic))

    def topic_settings(self, topic: str) -> dict[str, int | str | None]:
        """Return the settings of a topic by name. See ``Client.topic_settings``."""
        return self._thread.run(self._client.topic_settings(topic))

    def alter_topic(
        self, topic: str, *, partitions: int | None = None, settings: Mapping[str, int | str | None] | None = None
    ) -> None:
        """Add partitions to a topic, or change its settings. See ``Client.alter_topic``."""
        self._thread.run(self._client.alter_topic(topic, partitions=partitions, settings=settings))

    def groups(self, group: str | None = None) -> list[GroupInfo]:
        """Return the groups that have members or committed offsets. See ``Client.groups``."""
        return self._thread.run(self._client.groups(group))

    def lag(self, group: str, topic: str) -> list[PartitionLag]:
        """Return the lag of a group in each partition. See ``Client.lag``."""
        return self._thread.run(self._client.lag(group, topic))

    def topics(self) -> list[TopicInfo]:
        """Return the topics that the user may see, sorted by name."""
        return self._thread.run(self._client.topics())

    def bounds(self, topic: str) -> list[PartitionBounds]:
        """Return the first and the next offset of each partition, in order of their numbers. Raises Missing(TOPIC_MISSING)."""
        return self._thread.run(self._client.bounds(topic))

    def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return the next offset that a group reads, or None if it has committed nothing. See ``Client.position``."""
        return self._thread.run(self._client.position(group, topic, partition))


def connect_sync(
    url: str,
    *,
    connect_s: float = CONNECT_S,
    reconnect_s: float = RECONNECT_S,
    on_connect: OnConnect | None = None,
    on_disconnect: OnDisconnect | None = None,
) -> SyncClient:
    """Connect to a broker without asyncio. Arguments and errors are the same as in ``polywire.connect``.

    Functions such as ``on_connect`` are called in the client's own thread.

    Example:
        with polywire.connect_sync("127.0.0.1:9555") as client:
            print(client.topics())
    """
    return SyncClient(
        url, connect_s=connect_s, reconnect_s=reconnect_s, on_connect=on_connect, on_disconnect=on_disconnect
    )


async def _call(function: Callable[[], T]) -> T:
    return function()
