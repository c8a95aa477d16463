"""``polywire.connect(url)`` and ``Client``: a connection to a broker over any protocol.

If the connection is lost, read-only calls are retried. Other calls raise ``Unavailable``, because they may have been
executed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AsyncExitStack
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Never, Protocol, Self, Unpack, runtime_checkable

from polywire.choices import check_options, missing
from polywire.client.base import Ability, PartitionBounds, Produced, TopicInfo, WireClient, renamed
from polywire.client.consumer import Consumer, ConsumerOptions
from polywire.client.link import CONNECT_S, RECONNECT_S, Link
from polywire.client.listings import GroupInfo, PartitionLag, Queries, lags_of
from polywire.client.notices import OnConnect, OnDisconnect
from polywire.client.polywire import needs_polywire
from polywire.client.producer import Producer, ProducerOptions
from polywire.client.queue import Queue, QueueOptions
from polywire.client.record import Headers, Record, Text, as_json, as_record, from_stored
from polywire.client.transaction import BUFFER_BYTES as TRANSACTION_BUFFER_BYTES
from polywire.client.transaction import TIMEOUT_S, Transaction, TransactionalId
from polywire.delivery_times import DeliveryTimes
from polywire.errors import ErrorCode, Invalid

TRANSACTIONAL_IDS_MAX: Final = 1_000  # of one client; if it uses more, it takes over the least recently used ones again


class Client:
    """A client of one broker. Its producers and consumers have their own connections, and are closed with the client.

    Example:
        async with polywire.connect("127.0.0.1:9555") as client:
            await client.send("orders", "hello", key="a")
            async with client.consumer("orders") as consumer:
                async for record in consumer:
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
        """Create a client that is not connected yet. ``open`` connects it. Arguments are the same as in ``connect``."""
        if not isinstance(url, str):
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f'url must be a str like "polywire://127.0.0.1:9555" got={type(url).__name__}',
            )
        self.url: Final = url
        self._on_connect: Final = on_connect
        self._on_disconnect: Final = on_disconnect
        self._link: Final = Link(
            url, connect_s=connect_s, reconnect_s=reconnect_s, on_connect=on_connect, on_disconnect=on_disconnect
        )
        self._producer: Producer | None = None
        self._transactional_ids: Final[dict[str, TransactionalId]] = {}
        self._children: list[Producer | Consumer | Queue] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(commit_last=kind is None)

    async def open(self) -> None:
        """Connect. ``connect`` calls this. Raises Invalid, Unavailable, Denied(LOGIN_FAILED)."""
        await self._link.open()

    async def abilities(self) -> frozenset[Ability]:
        """Return the features that this protocol supports."""
        return (await self._link.wire()).abilities

    async def close(self, *, commit_last: bool = True) -> None:
        """Flush and close all producers and consumers, then the connection. Raises their errors.

        A second call does nothing.

        Args:
            commit_last: see ``Consumer.close``. It is false if an ``async with`` ends with an exception.
        """
        children, self._children = self._children, []
        async with AsyncExitStack() as closing:  # the last first, and all of them, also if one raises its error
            closing.push_async_callback(self._link.close)
            for child in children:
                if isinstance(child, Consumer):
                    closing.push_async_callback(child.close, commit_last=commit_last)
                else:
                    closing.push_async_callback(child.close)

    def producer(self, **options: Unpack[ProducerOptions]) -> Producer:
        """Return a producer. Options are the arguments of ``Producer``.

        Example:
            async with client.producer(linger_ms=20) as producer:
                await producer.send_many("orders", ["one", "two"])
        """
        check_options("producer", options, ProducerOptions.__annotations__)
        options.setdefault("on_connect", self._on_connect)
        options.setdefault("on_disconnect", self._on_disconnect)
        producer = Producer(self.url, **options)
        self._children.append(producer)
        return producer

    def consumer(self, *topics: str, **options: Unpack[ConsumerOptions]) -> Consumer:
        """Return a consumer of the topics. Options are the arguments of ``Consumer``.

        Example:
            async with client.consumer("orders", group="billing", start="latest") as consumer:
                async for record in consumer:
                    print(record.key, record.value)
        """
        check_options("consumer", options, ConsumerOptions.__annotations__)
        options.setdefault("on_connect", self._on_connect)
        options.setdefault("on_disconnect", self._on_disconnect)
        consumer = Consumer(self.url, *topics, **options)
        self._children.append(consumer)
        return consumer

    def queue(self, topic: str, **options: Unpack[QueueOptions]) -> Queue:
        """Return a topic as a work queue. Options are the arguments of ``Queue``. Needs `polywire` or Kafka.

        Example:
            async with client.queue("jobs", group="workers") as queue:
                async for job in queue:
                    print(job.text)
                    await job.ack()
        """
        check_options("queue", options, QueueOptions.__annotations__)
        options.setdefault("on_connect", self._on_connect)
        options.setdefault("on_disconnect", self._on_disconnect)
        queue = Queue(self.url, topic, **options)
        self._children.append(queue)
        return queue

    def transaction(
        self,
        transactional_id: str,
        *,
        consumer: Consumer | None = None,
        create: bool = True,
        buffer_bytes: int = TRANSACTION_BUFFER_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> Transaction:
        """Return a transaction for an ``async with``. Its records and offsets are stored together or not at all.

        The first transaction of a client takes over the transactional id. If another process has used the id, the
        transactions of that process fail from then on. Needs `polywire`.

        Args:
            transactional_id: name of the task that must have effects only once, at most 255 bytes. It remains the same
                when the application restarts. Tasks that run at the same time need different ones.
            consumer: the transaction commits the offsets after all records that this consumer has returned. It needs a
                group and ``auto_commit=False``. If the transaction is not committed, it returns the records again.
            create: create missing topics.
            buffer_bytes: maximum size of the transaction's records, which are in memory until the commit.
            timeout_s: how long the commit may take, in seconds, with all retries.

        Example:
            async with client.consumer("orders", group="billing", auto_commit=False) as consumer:
                while True:
                    async with client.transaction("billing-1", consumer=consumer) as transaction:
                        for record in await consumer.batch(100, timeout_s=1):
                            await transaction.send("invoices", record.value, key=record.key)
        """
        known = self._transactional_ids.pop(transactional_id, None) or TransactionalId(self._link, transactional_id)
        self._transactional_ids[transactional_id] = known
        if len(self._transactional_ids) > TRANSACTIONAL_IDS_MAX:
            del self._transactional_ids[next(iter(self._transactional_ids))]
        return Transaction(known, consumer=consumer, create=create, buffer_bytes=buffer_bytes, timeout_s=timeout_s)

    async def send(
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
        """Send one record, and return its partition and offset once it is stored. See ``Producer.send_and_wait``.

        For many records, use a producer.

        Example:
            stored = await client.send("orders", "hello", key="a")
            print(stored.partition, stored.offset)
        """
        if self._producer is None:
            self._producer = self.producer()
        record = as_record(value, key, headers, timestamp, **times)
        return await self._producer.send_and_wait(topic, record, partition=partition, timeout_s=timeout_s)

    async def send_json(
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
        """Send one record whose value is written as JSON in UTF-8. See ``send``, and ``Record.json`` for the other way.

        Example:
            await client.send_json("orders", {"id": 7, "amount": 12.5}, key="customer 3")
        """
        record = Record(as_json(value), key, headers, timestamp=timestamp, **times)
        return await self.send(topic, record, partition=partition, timeout_s=timeout_s)

    async def fetch(self, topic: str, partition: int, offset: int, *, records_max: int = 1000) -> list[Record]:
        """Return records of one partition from an offset on. Return an empty list at the end of the partition.

        Args:
            topic: full name.
            partition: number of the partition, from 0.
            offset: offset of the first record.
            records_max: maximum number; fewer may be returned although there are more.

        Raises:
            Missing: TOPIC_MISSING, PARTITION_MISSING, OFFSET_OUT_OF_RANGE.
        """
        records = await self._link.read(lambda wire: wire.fetch(topic, partition, offset, records_max=records_max))
        return [from_stored(record, topic, partition) for record in records]

    async def create_topic(self, topic: str, partitions: int = 3, *, partition_count: int | None = None) -> None:
        """Create a topic. Raises Conflict(TOPIC_EXISTS), Invalid(INVALID_TOPIC, INVALID_PARTITION_COUNT).

        Args:
            topic: full name.
            partitions: number of partitions.
            partition_count: deprecated name of ``partitions``.
        """
        count = renamed(partitions, partition_count)
        await self._link.once(lambda wire: wire.create_topic(topic, count))

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records. Raises Missing(TOPIC_MISSING)."""
        await self._link.once(lambda wire: wire.delete_topic(topic))

    async def topic_settings(self, topic: str) -> dict[str, int | str | None]:
        """Return the settings of a topic by name. None stands for the broker's default. Needs `polywire`.

        Raises Missing(TOPIC_MISSING), and Invalid(INVALID_REQUEST) over another protocol.
        """
        description = await self._link.read(lambda wire: needs_polywire(wire, "report settings").describe(topic))
        return dict(description.settings)

    async def alter_topic(
        self, topic: str, *, partitions: int | None = None, settings: Mapping[str, int | str | None] | None = None
    ) -> None:
        """Add partitions to a topic, or change its settings. Needs `polywire`.

        Args:
            topic: full name.
            partitions: new number of partitions, not below the current one. Later records of a key may go to another
                partition than earlier ones.
            settings: new values by name, as the reference lists them (limits#a-topic). None
                restores the broker's default. Settings that are not named do not change.

        Raises:
            Missing: TOPIC_MISSING.
            Invalid: INVALID_PARTITION_COUNT, INVALID_REQUEST: a setting is unknown, or cannot be changed.

        Example:
            await client.alter_topic("orders", partitions=6, settings={"compression": "zstd"})
        """
        if partitions is not None:
            await self._link.once(lambda wire: needs_polywire(wire, "add partitions").grow_topic(topic, partitions))
        if settings:
            await self._link.once(
                lambda wire: needs_polywire(wire, "change settings").configure_topic(topic, dict(settings))
            )

    async def groups(self, group: str | None = None) -> list[GroupInfo]:
        """Return the groups that have members or committed offsets: one entry for each topic. Needs `polywire` or Kafka.

        Args:
            group: return only entries of the group with this name.

        Raises Invalid(INVALID_REQUEST) over another protocol.
        """
        return await self._link.read(lambda wire: _listing(wire).groups(group))

    async def lag(self, group: str, topic: str) -> list[PartitionLag]:
        """Return the lag of a group in each partition, in records and in seconds. Needs `polywire` or Kafka.

        Raises Missing(GROUP_MISSING), and Invalid(INVALID_REQUEST) over another protocol.

        Example:
            behind = sum(part.records or 0 for part in await client.lag("billing", "orders"))
        """
        return await self._link.read(lambda wire: _lag(_listing(wire), group, topic))

    async def topics(self) -> list[TopicInfo]:
        """Return the topics that the user may see, sorted by name."""
        return await self._link.read(lambda wire: wire.topics())

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Return the first and the next offset of each partition, in order of their numbers. Raises Missing(TOPIC_MISSING)."""
        return await self._link.read(lambda wire: wire.bounds(topic))

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return the next offset that a group reads, or None if it has committed nothing.

        Some protocols report 0 instead of None.
        """
        return await self._link.read(lambda wire: wire.position(group, topic, partition))


@runtime_checkable
class _Listing(Queries, Protocol):
    """A client of a protocol that lists groups."""

    async def groups(self, group: str | None = None) -> list[GroupInfo]: ...


def _listing(wire: WireClient) -> _Listing:
    if not isinstance(wire, _Listing):
        raise Invalid(
            ErrorCode.INVALID_REQUEST, "this protocol cannot list groups: connect with a polywire:// or kafka:// URL"
        )
    return wire


async def _lag(wire: _Listing, group: str, topic: str) -> list[PartitionLag]:
    for found in await wire.groups(group):
        if found.topic == topic:
            return await lags_of(wire, found)
    known = sorted({found.name for found in await wire.groups() if found.topic == topic})
    raise missing(ErrorCode.GROUP_MISSING, "group", group, known, facts=f"topic={topic!r}")


class Connecting:
    """Result of ``connect``: await it, or enter it with ``async with``, to get a connected ``Client``."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        self._client: Final = client

    def __await__(self) -> Generator[Any, None, Client]:
        return self._open().__await__()

    async def __aenter__(self) -> Client:
        return await self._open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def _open(self) -> Client:
        await self._client.open()
        return self._client

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            """Raise an error that explains how to connect."""
            raise AttributeError(
                f"not connected yet: enter it with 'async with polywire.connect(...) as client', or await it, and then use {name!r};"
                " without asyncio there is polywire.connect_sync"
            )


def connect(
    url: str,
    *,
    connect_s: float = CONNECT_S,
    reconnect_s: float = RECONNECT_S,
    on_connect: OnConnect | None = None,
    on_disconnect: OnDisconnect | None = None,
) -> Connecting:
    """Connect to a broker. Use the result in an ``async with``, or await it, to get a ``Client``.

    Args:
        url: ``scheme://host:port``, or ``host:port`` for `polywire`. With several brokers, ``host:port,host:port``, the
            first that responds is used. The scheme is cursus, flux, iggy, kafka, kafka07 or polywire; append ``+tls``
            for TLS. polywire, kafka and iggy support a login: ``polywire://name:password@host:port``. ``memory://name``
            is a broker in this process, for tests.
        connect_s: how long to retry the first connection, in seconds.
        reconnect_s: how long to retry a lost connection, in seconds, before a call fails.
        on_connect: called with the address, without the login, of each connection that was opened: the client's own
            one, and those of its producers and consumers that have no ``on_connect`` of their own. It must not block.
        on_disconnect: called with the address and the error when one of these connections was lost. The client
            connects again by itself.

    Raises:
        Invalid: INVALID_REQUEST: the scheme is unknown or the address is invalid.
        Unavailable: no broker responded in time.
        Denied: LOGIN_FAILED.

    Example:
        async with polywire.connect("127.0.0.1:9555") as client:
            print(await client.topics())
    """
    return Connecting(
        Client(url, connect_s=connect_s, reconnect_s=reconnect_s, on_connect=on_connect, on_disconnect=on_disconnect)
    )
