"""``Producer``: collects records into batches, chooses partitions, and reports deliveries.

* Unacknowledged records use a limited amount of memory. At the limit, ``send`` waits.
* The failure of a record is reported by its receipt, by ``flush`` and by the callback.

The module ``lane`` sends batches and retries them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Final, Self, TypeAlias, TypedDict, Unpack

from polywire.choices import choice
from polywire.client.base import Produced, WireClient
from polywire.client.bulk import AppendedRange
from polywire.client.lane import ANY_PARTITION, NO_OFFSET, Batch, Delivery, Lane, OnDelivery, warn_lost
from polywire.client.link import Link
from polywire.client.notices import WARN_AFTER_S, WARN_INTERVAL_S, OnConnect, OnDisconnect, call_soon, log
from polywire.client.polywire import PolywireClient
from polywire.client.record import (
    RECORD_OVERHEAD_BYTES,
    Headers,
    Record,
    Text,
    as_bytes,
    as_json,
    as_record,
    size_of,
)
from polywire.client.tracing import active
from polywire.delivery_times import DeliveryTimes
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.records.partitioner import fnv1a_32, fnv1a_64, murmur3_128, xxh32
from polywire.types import KeyHash, Level

LINGER_MS: Final = 5.0  # the default of Kafka's producer since version 4
BATCH_BYTES: Final = 1 << 20
BATCH_BYTES_LIMIT: Final = 8 << 20  # leaves space in a batch for one more record of the maximum size
BUFFER_BYTES: Final = 32 << 20
FLUSH_S: Final = 10.0  # how long an ``async with`` that ends with an exception waits for records that were sent
UNREPORTED_MAX: Final = 1000  # failed batches of which a producer remembers the error until the application gets it
METADATA_S: Final = 60.0  # how long the partition count of a topic is cached
HASHES: Final[Mapping[KeyHash, Callable[[bytes], int]]] = {
    KeyHash.FNV32: fnv1a_32,
    KeyHash.FNV64: fnv1a_64,
    KeyHash.XXH32: xxh32,
    KeyHash.MURMUR3: murmur3_128,
}

OnError: TypeAlias = Callable[[Delivery, int], None]
"""Called with a failed delivery and the number of its records whose error the application has received."""


class Receipt:
    """The result of ``Producer.send``. Awaiting it returns the record's partition and offset, or raises the error."""

    __slots__ = ("_batch", "_on_error", "_row", "outcome")

    def __init__(
        self, batch: Batch, row: int, on_error: OnError, outcome: asyncio.Future[Delivery] | None = None
    ) -> None:
        """Create a receipt.

        ``on_error`` is called when the application has received the error. ``outcome`` is the record's own outcome if
        it has a time limit.
        """
        self._batch: Final = batch
        self._row: Final = row
        self._on_error: OnError | None = on_error
        self.outcome: Final = outcome or batch.completed

    @property
    def done(self) -> bool:
        """Whether the result is available."""
        return self.outcome.done()

    def __await__(self) -> Generator[object, None, Produced]:
        delivery = yield from asyncio.shield(self.outcome).__await__()
        if delivery.error is not None:
            if self._on_error is not None:
                self._on_error(delivery, 1)
                self._on_error = None
            raise delivery.error
        return _produced(self._batch, delivery, self._row)


class Receipts:
    """The result of ``Producer.send_many``.

    Awaiting it returns the stored ranges, or raises the error if a record failed.
    """

    __slots__ = ("_on_error", "_parts")

    def __init__(self, parts: Sequence[tuple[Batch, int, int]], on_error: OnError) -> None:
        self._parts: Final = parts
        self._on_error: OnError | None = on_error

    @property
    def done(self) -> bool:
        """Whether the result is available."""
        return all(batch.completed.done() for batch, _, _ in self._parts)

    def __await__(self) -> Generator[object, None, list[AppendedRange]]:
        ranges = []
        failure: BrokerError | None = None
        for batch, first, count in self._parts:
            delivery = yield from asyncio.shield(batch.completed).__await__()
            failure = failure or delivery.error
            if failure is None:
                ranges += _ranges(batch, delivery, first, count)
            elif delivery.error is not None and self._on_error is not None:
                self._on_error(delivery, count)
        if failure is not None:
            self._on_error = None
            raise failure
        return ranges


@dataclass(slots=True)
class _Topic:
    """Metadata for choosing partitions.

    Attributes:
        partition_count: number of partitions; 0 if the protocol chooses the partition.
    """

    partition_count: int
    key_hash: KeyHash
    fetched_at: float
    sticky: int = 0


class ProducerOptions(TypedDict, total=False):
    """Keyword arguments of ``Producer``."""

    linger_ms: float
    batch_bytes: int
    buffer_bytes: int
    level: Level | str
    idempotent: bool | None
    create: bool
    on_delivery: OnDelivery | None
    reconnect_s: float
    on_connect: OnConnect | None
    on_disconnect: OnDisconnect | None


class Producer:
    """Send records in batches. Create one with ``polywire.Client.producer`` and use it in an ``async with``.

    Over `polywire`, each record is stored exactly once, even if connections are lost or the broker restarts. Over other
    protocols, no record is lost, but a batch that was in flight may be stored twice.

    Example:
        async with client.producer() as producer:
            for number in range(1000):
                await producer.send("orders", f"order {number}", key=f"customer {number % 10}")
    """

    def __init__(
        self,
        url: str,
        *,
        linger_ms: float = LINGER_MS,
        batch_bytes: int = BATCH_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
        level: Level | str = Level.WRITTEN,
        idempotent: bool | None = None,
        create: bool = True,
        on_delivery: OnDelivery | None = None,
        reconnect_s: float = 60.0,
        on_connect: OnConnect | None = None,
        on_disconnect: OnDisconnect | None = None,
    ) -> None:
        """Create a producer. It connects when the first record is sent.

        Args:
            url: as for ``polywire.connect``.
            linger_ms: how long an incomplete batch waits for more records, in milliseconds.
            batch_bytes: a batch of about this size is sent immediately.
            buffer_bytes: maximum size of unacknowledged records; at this size, ``send`` waits.
            level: durability of an acknowledged record, a ``Level`` or its name: "memory", "written" (survives a broker
                crash), "synced" (survives a power failure) or "stored" (in the bucket).
            idempotent: store each record exactly once. With None, the producer is idempotent if the protocol supports it.
            create: create missing topics.
            on_delivery: called with a ``Delivery`` for each batch that was stored or failed. It must not block.
            reconnect_s: how long to retry a lost connection, in seconds, before records fail.
            on_connect: called with the address when a connection was opened. See ``polywire.connect``.
            on_disconnect: called with the address and the error when the connection was lost.

        Raises:
            Invalid: INVALID_REQUEST: a number is out of range, or the level is unknown.
        """
        if linger_ms < 0 or not 0 < batch_bytes <= BATCH_BYTES_LIMIT or buffer_bytes < batch_bytes:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"linger_ms must be 0 or more, and batch_bytes at most {BATCH_BYTES_LIMIT} and not above buffer_bytes"
                f" linger_ms={linger_ms} batch_bytes={batch_bytes} buffer_bytes={buffer_bytes}",
            )
        self._link: Final = Link(url, reconnect_s=reconnect_s, on_connect=on_connect, on_disconnect=on_disconnect)
        self._linger_s: Final = linger_ms / 1000
        self._batch_bytes: Final = batch_bytes
        self._buffer_bytes: Final = buffer_bytes
        self._level: Final = choice(Level, level, "level")
        self._idempotent: Final = idempotent
        self._create: Final = create
        self._on_delivery: Final = on_delivery
        self._topics: Final[dict[str, _Topic]] = {}
        self._lanes: Final[dict[tuple[str, int], Lane]] = {}
        self._buffered = 0
        self._has_space = asyncio.Event()
        self._warned_at = float("-inf")
        self._unreported: Final[dict[Delivery, int]] = {}
        self._is_idempotent = False
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                with suppress(BrokerError, TimeoutError):
                    await asyncio.wait_for(self.flush(), FLUSH_S)
        finally:
            await self.close(flush=kind is None)

    @property
    def buffered_bytes(self) -> int:
        """Size of the records that are not acknowledged yet."""
        return self._buffered

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
    ) -> Receipt:
        """Queue a record and return its receipt. Waits only if ``buffer_bytes`` are unacknowledged.

        Args:
            topic: full name.
            value: str, bytes, None, or a ``Record``.
            key: str, bytes or None. Records with the same key go to the same partition, in order.
            headers: mapping of names to str, bytes, int, float, bool or None.
            timestamp: when the event happened, a datetime with a time zone. The broker adds its own append time.
            partition: number of the partition. With None, the key selects it; without a key, partitions are used
                round-robin.
            timeout_s: seconds within which the record must be acknowledged, counted from the call. Then it fails with
                Unavailable, and the message says whether it may still be stored. None tries for ``reconnect_s``.
            deliver_at: when queues deliver the record, a datetime with a time zone at most 366 days from now. Consumers
                that are not queues get it at once.
            delay_s: the same, in seconds from now.
            expires_at: when the record is worthless. A queue that has not delivered it by then drops it, or copies it
                to the dead-letter topic.
            ttl_s: the same, in seconds from now.

        Raises:
            Invalid: INVALID_REQUEST: an argument has the wrong type; the message says what is expected.
            Missing: TOPIC_MISSING if ``create`` is false, PARTITION_MISSING.
            Unavailable: the broker is not reachable, the time is over, or the producer is closed.

        Example:
            receipt = await producer.send("orders", "hello", key="a")
            stored = await receipt
        """
        record = as_record(value, key, headers, timestamp, **times)
        telemetry = active()
        if telemetry is None:
            return await self._queue(topic, record, partition, timeout_s)
        with telemetry.sending(self._link.place, topic, record.headers) as sending:
            receipt = await self._queue(topic, sending.traced(record), partition, timeout_s)
        sending.wait_for([receipt.outcome])
        return receipt

    async def _queue(self, topic: str, record: Record, partition: int | None, timeout_s: float | None) -> Receipt:
        size = size_of(record)
        end = None if timeout_s is None else asyncio.get_running_loop().time() + checked_timeout(timeout_s)
        try:
            async with asyncio.timeout_at(end):
                where = await self._partition(topic, record.key, partition)
                await self._capacity(size)
        except TimeoutError:
            raise _late(topic, timeout_s, is_sent=False) from None
        batch = self._lane(topic, where).open_batch(size)
        row = batch.next_row
        if record.headers or record.origin_time_us is not None:
            batch.others[len(batch.values)] = record
        self._join(topic, where, batch, [record.value], [record.key], size)
        if end is None:
            return Receipt(batch, row, self._note_reported)
        outcome = self._timed(topic, where, batch, row, end=end, timeout_s=timeout_s)
        return Receipt(batch, row, self._note_reported, outcome)

    def _timed(
        self, topic: str, partition: int, batch: Batch, row: int, *, end: float, timeout_s: float | None
    ) -> asyncio.Future[Delivery]:
        """Return the outcome of a record that fails at the time ``end``."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Delivery] = loop.create_future()

        def expire() -> None:
            if batch.completed.done():
                return
            is_sent = not self._lanes[topic, partition].expire(batch, row)
            batch.late += is_sent
            error = _late(topic, timeout_s, is_sent=is_sent)
            delivery = Delivery(topic, partition, NO_OFFSET, 1, error)
            self._note_failure(delivery, 1)
            outcome.set_result(delivery)

        timer = loop.call_at(end, expire)

        def complete(completed: asyncio.Future[Delivery]) -> None:
            timer.cancel()
            if not outcome.done():
                outcome.set_result(completed.result())

        batch.completed.add_done_callback(complete)
        return outcome

    async def send_and_wait(
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
        """Send one record immediately, and return its partition and offset once it is stored.

        Arguments and errors are the same as in ``send``.

        Example:
            stored = await producer.send_and_wait("orders", "hello")
            print(stored.partition, stored.offset)
        """
        record = as_record(value, key, headers, timestamp, **times)
        receipt = await self.send(topic, record, partition=partition, timeout_s=timeout_s)
        self._flush_lanes()
        return await receipt

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
    ) -> Receipt:
        """Queue a record whose value is written as JSON in UTF-8. Other arguments and errors are the same as in ``send``.

        Example:
            await producer.send_json("orders", {"id": 7, "amount": 12.5}, key="customer 3")
        """
        record = Record(as_json(value), key, headers, timestamp=timestamp, **times)
        return await self.send(topic, record, partition=partition, timeout_s=timeout_s)

    async def send_many(
        self,
        topic: str,
        values: Iterable[Text | Record | None],
        *,
        keys: Iterable[Text | None] | None = None,
        partition: int | None = None,
    ) -> Receipts:
        """Queue many records and return their receipts. This is much cheaper per record than ``send``.

        Args:
            topic: full name.
            values: each is a str, bytes, None, or a ``Record``.
            keys: one str, bytes or None per value. Without ``keys``, only values that are a ``Record`` can have a key.
            partition: as for ``send``.

        Raises:
            Invalid: INVALID_REQUEST: an argument has the wrong type, or the numbers of keys and values differ. Nothing
                was sent.
            Missing: TOPIC_MISSING if ``create`` is false, PARTITION_MISSING.
            Unavailable: the broker is not reachable, or the producer is closed.

        Example:
            receipts = await producer.send_many("orders", [b"one", b"two"], keys=["a", "b"])
            await receipts
        """
        found, others = _values(values)
        named: Sequence[bytes | None] = [None] * len(found)
        if keys is not None:
            named = [as_bytes(key, "a key") for key in keys]
            if len(named) != len(found):
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    f"keys and values must have the same length values={len(found)} keys={len(named)}",
                )
        elif others:
            named = [others[row].key if row in others else None for row in range(len(found))]
        telemetry = active()
        if telemetry is None or not found:
            return Receipts(await self._queue_all(topic, found, named, others, partition), self._note_reported)
        with telemetry.sending(self._link.place, topic, {}, count=len(found)) as sending:
            if sending.has_context:
                others = {
                    row: sending.traced(others[row]) if row in others else sending.traced_value(value, named[row])
                    for row, value in enumerate(found)
                }
            parts = await self._queue_all(topic, found, named, others, partition)
        sending.wait_for([batch.completed for batch, _, _ in parts])
        return Receipts(parts, self._note_reported)

    async def _queue_all(
        self,
        topic: str,
        found: list[bytes | None],
        named: Sequence[bytes | None],
        others: dict[int, Record],
        partition: int | None,
    ) -> list[tuple[Batch, int, int]]:
        parts: list[tuple[Batch, int, int]] = []
        for where, rows in await self._rows_by_partition(topic, named, partition):
            chosen = [found[row] for row in rows] if rows is not None else found
            chosen_keys = [named[row] for row in rows] if rows is not None else named
            positions: Iterable[int] = rows if rows is not None else range(len(found))
            special = {at: others[row] for at, row in enumerate(positions) if row in others} if others else {}
            parts += await self._put_all(topic, where, chosen, chosen_keys, special)
        return parts

    async def flush(self) -> None:
        """Send all queued records, and wait until all are acknowledged.

        Raises the first error since the last flush that the application has not received by awaiting a receipt.
        """
        while self._buffered:
            self._flush_lanes()
            self._has_space.clear()
            await self._has_space.wait()
        failed = next(iter(self._unreported), None)
        self._unreported.clear()
        if failed is not None and failed.error is not None:
            raise failed.error

    async def close(self, *, flush: bool = True) -> None:
        """Flush and close the connection. A second call does nothing.

        Args:
            flush: if false, do not wait for unacknowledged records; the broker may or may not have stored them.

        Raises the errors of ``flush``, after everything is closed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if flush:
                await self.flush()
        finally:
            warn_lost(sum([await lane.close() for lane in self._lanes.values()]))
            await self._link.close()

    def _is_ready(self, topic: str, partition: int | None) -> bool:
        """Return whether ``send`` would not raise an error at once. May be called in any thread."""
        known = self._topics.get(topic) if type(topic) is str else None
        return (
            known is not None
            and time.monotonic() < known.fetched_at + METADATA_S
            and (partition is None or (type(partition) is int and partition >= 0))
            and not self._closed
            and active() is None
        )

    async def _send_or_fail(self, topic: str, record: Record, partition: int | None) -> Receipt:
        """Queue a record. If that fails, return a receipt with the error."""
        try:
            return await self._queue(topic, record, partition, None)
        except BrokerError as error:
            return self._failed(topic, error)

    def _failed(self, topic: str, error: BrokerError) -> Receipt:
        """Return the receipt of a record that could not be queued."""
        delivery = Delivery(topic, ANY_PARTITION, NO_OFFSET, 1, error)
        self._note_failure(delivery, 1)
        outcome: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        outcome.set_result(delivery)
        return Receipt(Batch(outcome, 0.0), 0, self._note_reported)

    def _flush_lanes(self) -> None:
        for lane in self._lanes.values():
            lane.flush()

    async def _capacity(self, size: int) -> None:
        """Wait until the buffer has space for ``size`` bytes. If it is empty, a record of any size fits."""
        if not self._buffered or self._buffered + size <= self._buffer_bytes:
            return
        begun = time.monotonic()
        while self._buffered and self._buffered + size > self._buffer_bytes:
            self._flush_lanes()
            self._has_space.clear()
            await self._has_space.wait()
        now = time.monotonic()
        if now - begun >= WARN_AFTER_S and now - self._warned_at >= WARN_INTERVAL_S:
            self._warned_at = now
            log.warning(
                "send waited %.1f s for space in the buffer: records are stored more slowly than they are sent buffer_bytes=%d",
                now - begun,
                self._buffer_bytes,
            )

    def _lane(self, topic: str, partition: int) -> Lane:
        lane = self._lanes.get((topic, partition))
        if lane is None or lane.ended:
            lane = self._lanes[topic, partition] = Lane(
                self._link,
                topic,
                partition,
                idempotent=self._is_idempotent,
                level=self._level,
                linger_s=self._linger_s,
                batch_bytes=self._batch_bytes,
                on_completed=self._on_completed,
            )
        return lane

    def _join(
        self,
        topic: str,
        partition: int,
        batch: Batch,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None],
        size: int,
    ) -> None:
        """Add records to a batch.

        If the batch is then full, it is sent, and later records without a key go to the next partition.
        """
        batch.values += values
        batch.keys += keys
        batch.size += size
        self._buffered += size
        if batch.size + size > self._batch_bytes:
            self._topics[topic].sticky += 1
            self._lanes[topic, partition].wake()

    async def _put_all(
        self,
        topic: str,
        partition: int,
        values: list[bytes | None],
        keys: Sequence[bytes | None],
        others: dict[int, Record],
    ) -> list[tuple[Batch, int, int]]:
        """Add records to as many batches as needed.

        Return (batch, index of its first new record, number of new records) for each.
        """
        parts: list[tuple[Batch, int, int]] = []
        waiting = [(0, len(values))] if values else []
        while waiting:
            first, stop = waiting.pop()
            size = _size_of(values[first:stop], keys[first:stop]) + _size_of_headers(others, first, stop)
            if size > self._batch_bytes and stop - first > 1:
                middle = (first + stop) // 2
                waiting += [(middle, stop), (first, middle)]
                continue
            await self._capacity(size)
            batch = self._lane(topic, partition).open_batch(size)
            row, index = batch.next_row, len(batch.values)
            batch.others.update({index + at - first: record for at, record in others.items() if first <= at < stop})
            self._join(topic, partition, batch, values[first:stop], keys[first:stop], size)
            parts.append((batch, row, stop - first))
        return parts

    def _on_completed(self, batch: Batch, delivery: Delivery) -> None:
        if delivery.record_count:
            call_soon(self._on_delivery, delivery)  # before the tasks that wait for the batch
        self._buffered -= batch.size
        self._has_space.set()
        self._topics[delivery.topic].sticky += 1
        if delivery.error is not None:
            self._note_failure(delivery, delivery.record_count - batch.late)

    def _note_failure(self, delivery: Delivery, count: int) -> None:
        """Remember that ``count`` records failed with an error that the application has not received."""
        if count and (delivery in self._unreported or len(self._unreported) < UNREPORTED_MAX):
            self._unreported[delivery] = self._unreported.get(delivery, 0) + count

    def _note_reported(self, delivery: Delivery, count: int) -> None:
        """Note that the application has received the error of ``count`` records."""
        left = self._unreported.get(delivery, 0) - count
        if left > 0:
            self._unreported[delivery] = left
        else:
            self._unreported.pop(delivery, None)

    # Where records go

    async def _partition(self, topic: str, key: bytes | None, partition: int | None) -> int:
        known = await self._topic(topic)
        if partition is not None:
            return checked_partition(partition)
        if not known.partition_count:
            return ANY_PARTITION
        if key is None:
            return known.sticky % known.partition_count
        return HASHES[known.key_hash](key) % known.partition_count

    async def _rows_by_partition(
        self, topic: str, keys: Sequence[bytes | None], partition: int | None
    ) -> list[tuple[int, list[int] | None]]:
        """Return the indexes of the records for each partition, None if all records go to one partition."""
        known = await self._topic(topic)
        if partition is not None or not known.partition_count or not any(key is not None for key in keys):
            where = await self._partition(topic, None, partition)
            return [(where, None)]
        sticky, digest, count = known.sticky % known.partition_count, HASHES[known.key_hash], known.partition_count
        chosen: dict[int, list[int]] = {}
        for row, key in enumerate(keys):
            chosen.setdefault(sticky if key is None else digest(key) % count, []).append(row)
        return list(chosen.items())

    async def _topic(self, topic: str) -> _Topic:
        """Return the metadata of a topic, which is cached for ``METADATA_S`` because partitions may be added."""
        if self._closed:
            raise Unavailable(ErrorCode.STOPPING, "producer is closed")
        known = self._topics.get(topic)
        now = asyncio.get_running_loop().time()
        if known is None or now - known.fetched_at > METADATA_S:
            if self._knows_partitions(await self._link.wire(), topic):
                known = await self._link.read(lambda wire: self._ask_topic(wire, topic))
            else:
                known = _Topic(0, KeyHash.FNV32, now)
            known.sticky = self._topics[topic].sticky if topic in self._topics else secrets.randbelow(1 << 16)
            self._topics[topic] = known
        return known

    def _knows_partitions(self, wire: WireClient, topic: str) -> bool:
        """Return whether the producer chooses partitions itself. Over most protocols, the protocol's client does."""
        if not isinstance(topic, str):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"topic must be a str got={type(topic).__name__}")
        self._is_idempotent = isinstance(wire, PolywireClient) and self._idempotent is not False
        if self._idempotent and not self._is_idempotent:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"this protocol has no idempotent producers url={self._link.url}")
        return isinstance(wire, PolywireClient)

    async def _ask_topic(self, wire: WireClient, topic: str) -> _Topic:
        assert isinstance(wire, PolywireClient), "a URL has one protocol"
        try:
            description = await wire.describe(topic)
        except Missing:
            if not self._create:
                raise
            with suppress(Conflict):  # another client created it at the same time
                await wire.create_topic(topic)
            description = await wire.describe(topic)
        named = description.settings.get("key_hash")
        fetched_at = asyncio.get_running_loop().time()
        return _Topic(len(description.incarnations), KeyHash(named) if named else KeyHash.FNV32, fetched_at)


def checked_partition(partition: object) -> int:
    """Return the number of a partition. Raises Invalid(INVALID_REQUEST) if it cannot be one."""
    if type(partition) is not int or partition < 0:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"partition must be an int of 0 or more got={partition!r}")
    return partition


def checked_timeout(timeout_s: object) -> float:
    """Return a number of seconds. Raises Invalid(INVALID_REQUEST) unless it is above 0."""
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"timeout_s must be a number above 0 got={timeout_s!r}")
    return timeout_s


def _late(topic: str, timeout_s: float | None, *, is_sent: bool) -> Unavailable:
    outcome = "it was sent, so it may be stored, now or later" if is_sent else "it was not sent and will not be stored"
    return Unavailable(
        ErrorCode.UNREACHABLE, f"record was not acknowledged in time; {outcome} topic={topic!r} timeout_s={timeout_s}"
    )


def _values(source: Iterable[Text | Record | None]) -> tuple[list[bytes | None], dict[int, Record]]:
    """Return all values, and the ``Record`` objects among them by row. Raises Invalid(INVALID_REQUEST)."""
    if isinstance(source, str | bytes | bytearray | memoryview) or not isinstance(source, Iterable):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"values must be a list with one for each record got={type(source).__name__}",
        )
    values = list(source)
    if set(map(type, values)) == {bytes}:
        return values, {}  # type: ignore[return-value]  # the types were checked
    others = {row: value for row, value in enumerate(values) if isinstance(value, Record)}
    found = [value.value if isinstance(value, Record) else as_bytes(value, "a value") for value in values]
    return found, others


def _size_of(values: Sequence[bytes | None], keys: Sequence[bytes | None]) -> int:
    size = RECORD_OVERHEAD_BYTES * len(values)
    for parts in (values, keys):
        size += sum(map(len, filter(None, parts)))
    return size


def _size_of_headers(others: dict[int, Record], first: int, stop: int) -> int:
    return sum(
        len(name) + len(str(value))
        for row, record in others.items()
        if first <= row < stop
        for name, value in record.headers.items()
    )


def _produced(batch: Batch, delivery: Delivery, row: int) -> Produced:
    index = batch.index_of(row)
    if batch.locations is not None and len(batch.locations) > 1:
        return Produced(*batch.locations[index])
    offset = NO_OFFSET if delivery.base_offset == NO_OFFSET else delivery.base_offset + index
    return Produced(delivery.partition, offset)


def _ranges(batch: Batch, delivery: Delivery, first: int, count: int) -> list[AppendedRange]:
    first = batch.index_of(first)  # records of one call are not removed, because none of them has a time limit
    if batch.locations is not None and len(batch.locations) > 1:
        return [AppendedRange(*location, 1) for location in batch.locations[first : first + count]]
    offset = NO_OFFSET if delivery.base_offset == NO_OFFSET else delivery.base_offset + first
    return [AppendedRange(delivery.partition, offset, count)]
