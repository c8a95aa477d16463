"""``Transaction``: store records and the offsets of a consumer, all or nothing (decision 0138).

The client collects the records. The commit stages them, invisibly, and publishes them with the offsets in one request,
which the broker executes in one atomic write.

* The transactional id and a sequence number identify the request. A retry after a lost connection or a crash of the
  broker is executed once.
* The first transaction of a client begins an epoch of the transactional id. The broker then rejects transactions of
  earlier processes.
* If a transaction is not committed, its consumer continues at the committed offsets.
* If the outcome is unknown, the next transaction begins an epoch. From then on it is known: the transaction was
  committed, or never will be.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Final, Self, Unpack

from polywire.client.base import WireClient
from polywire.client.consumer import Consumer
from polywire.client.lane import PAUSE_MAX_S, PAUSE_MIN_S
from polywire.client.link import GONE, Link
from polywire.client.polywire import BATCH_BYTES, PolywireClient, needs_polywire
from polywire.client.producer import checked_partition
from polywire.client.record import NO_HEADERS, Headers, Record, Text, as_json, as_record, encode_batch, size_of
from polywire.client.tracing import Sending, active
from polywire.delivery_times import DeliveryTimes
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.protocols.polywire.messages import BY_KEY, GroupOffsets
from polywire.types import Level

BUFFER_BYTES: Final = 64 << 20  # the records of a transaction are in memory until it is committed
TIMEOUT_S: Final = 60.0
BATCHES_MAX: Final = 10_000  # tokens of one publish (spec: polywire#limits)
STAGES_AT_ONCE: Final = 4  # unanswered requests with batches of about 1 MiB
STAGES_MAX: Final = 3  # attempts to stage the records again, after a crash of the broker has lost them
TOKEN_BYTES: Final = 16
MEMBERSHIP_ENDED: Final = (ErrorCode.GENERATION_STALE, ErrorCode.GROUP_MISSING, ErrorCode.MEMBER_MISSING)


class TransactionalId:
    """A transactional id of one client: its epoch, and the sequence number of its last transaction."""

    __slots__ = ("epoch", "fenced", "link", "name", "number", "open")

    def __init__(self, link: Link, name: str) -> None:
        if not isinstance(name, str):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"a transactional id must be a str got={type(name).__name__}")
        self.link: Final = link
        self.name: Final = name
        self.epoch: int | None = None
        self.number = 0
        self.open = False
        self.fenced: BrokerError | None = None

    async def begin(self, consumer: Consumer | None) -> None:
        """Begin a transaction. If this id has no epoch, begin one, and let the consumer read its offsets again."""
        if self.fenced is not None:
            raise self.fenced
        if self.open:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"this client has an open transaction with this id (use one id per task) transactional_id={self.name!r}",
            )
        self.open = True
        try:
            await self._begin_epoch(consumer)
        finally:
            self.open = self.epoch is not None

    async def _begin_epoch(self, consumer: Consumer | None) -> None:
        if self.epoch is None:
            epoch = await self.link.read(lambda wire: _polywire(wire).begin_epoch(self.name))
            if consumer is not None:
                await consumer._reload()
            self.epoch, self.number = epoch, 0


@dataclass(eq=False, slots=True)
class _Batch:
    """Records of one topic, with the same partition or all with keys.

    Attributes:
        partition: their partition; -1 selects it by key.
        others: records with more than a value and a key, by row.
    """

    topic: str
    partition: int
    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    others: dict[int, Record] = field(default_factory=dict)
    size: int = 0

    def add(self, record: Record, size: int) -> None:
        if record.headers or record.origin_time_us is not None:
            self.others[len(self.values)] = record
        self.values.append(record.value)
        self.keys.append(record.key)
        self.size += size

    def encoded(self) -> bytearray:
        return encode_batch(self.values, self.keys, self.others, producer_id=None, base_sequence=-1)


class Transaction:
    """Records and offsets that are stored together or not at all. Create one with ``polywire.Client.transaction``.

    Leaving the ``async with`` block commits the transaction, or aborts it if the block raised an exception. Records are
    visible, and have offsets, only after the commit.

    Example:
        async with client.transaction("billing-1") as transaction:
            await transaction.send("invoices", "first")
            await transaction.send("ledger", "second")
    """

    def __init__(
        self,
        transactional_id: TransactionalId,
        *,
        consumer: Consumer | None = None,
        create: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Create a transaction, which begins on entering the ``async with`` block.

        Args:
            transactional_id: state of the id, from the client.
            consumer: commit the offsets after all records that it has returned. It needs a group and
                ``auto_commit=False``. If the transaction is not committed, it returns these records again.
            create: create missing topics.
            buffer_bytes: maximum size of the transaction's records, which are in memory until the commit.
            timeout_s: how long a commit may take, in seconds, with all retries.

        Raises:
            Invalid: INVALID_REQUEST: a number is out of range, or the consumer commits by itself.
        """
        if buffer_bytes < 1 or timeout_s <= 0:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"buffer_bytes and timeout_s must be above 0 buffer_bytes={buffer_bytes} timeout_s={timeout_s}",
            )
        if consumer is not None:
            consumer._check_transactional(transactional_id.link.url)
        self._id: Final = transactional_id
        self._link: Final = transactional_id.link
        self._consumer: Final = consumer
        self._create: Final = create
        self._buffer_bytes: Final = buffer_bytes
        self._timeout_s: Final = timeout_s
        self._batches: Final[list[_Batch]] = []
        self._filling: Final[dict[tuple[str, int, bool], _Batch]] = {}
        self._size = 0
        self._sendings: Final[list[Sending]] = []
        self._is_open = False
        self._unanswered = 0  # requests to publish that may have been executed
        self._busy: Busy | None = None

    async def __aenter__(self) -> Self:
        await self._id.begin(self._consumer)
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_open:
            return
        if kind is None:
            await self.commit()
        else:
            await self.abort()

    async def send(
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
        """Add a record to the transaction. Arguments are the same as for ``Producer.send``.

        Raises:
            Invalid: INVALID_REQUEST: the transaction has ended or is too large, or an argument has the wrong type.
        """
        self._add_all(topic, [as_record(value, key, headers, timestamp, **times)], partition)

    async def send_json(
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
        """Add a record whose value is written as JSON in UTF-8. See ``send``."""
        await self.send(
            topic, as_json(value), key=key, headers=headers, timestamp=timestamp, partition=partition, **times
        )

    async def send_many(
        self, topic: str, values: Iterable[Text | Record | None], *, partition: int | None = None
    ) -> None:
        """Add many records. See ``send``. Only values that are a ``Record`` can have a key."""
        if isinstance(values, str | bytes | bytearray | memoryview):
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"values must be a list with one for each record got={type(values).__name__}"
            )
        self._add_all(topic, [as_record(value, None, None, None) for value in values], partition)

    async def abort(self) -> None:
        """Drop the records and end the transaction. Its consumer returns the uncommitted records again."""
        self._check_open()
        self._end(asyncio.CancelledError("the transaction was aborted"))

    async def commit(self) -> None:
        """Store the records and offsets, and wait until they are synced. Leaving the block does this.

        After any error, the transaction has ended, and its consumer continues at the committed offsets.

        Raises:
            Conflict: PRODUCER_FENCED: another process has taken over the transactional id. PARTITION_NOT_ASSIGNED:
                another member of the group owns a partition now. Nothing was stored.
            Missing: TOPIC_MISSING if ``create`` is false, PARTITION_MISSING. Nothing was stored.
            Busy: the broker had no space until the end of ``timeout_s``. Nothing was stored.
            Unavailable: the broker was not reachable, or did not respond in time. If the message says that the outcome
                is unknown, begin another transaction: it continues after the offsets of this one if this one was
                committed.
        """
        self._check_open()
        self._is_open = False
        failure: BaseException | None = asyncio.CancelledError("the commit was cancelled")
        try:
            async with asyncio.timeout(self._timeout_s):
                self._id.number += 1
                groups = await self._store()
            if self._consumer is not None:
                self._consumer._committed(groups)
            failure = None
        except TimeoutError:
            late = self._busy or Unavailable(ErrorCode.UNREACHABLE, "the commit did not end in time")
            failure = self._failure(late)
            raise failure from None
        except BrokerError as error:
            failure = self._failure(error)
            raise failure from error
        finally:
            if failure is not None and self._unanswered:
                self._id.epoch = None  # the broker may execute a request until another epoch begins
            self._end(failure)

    def _failure(self, error: BrokerError) -> BrokerError:
        """Return the error to raise, with the outcome of the transaction in its message."""
        if error.code is ErrorCode.PRODUCER_FENCED:
            self._id.fenced = error
        outcome = (
            "whether the transaction was committed is unknown"
            if self._unanswered
            else "the transaction was not committed"
        )
        message = f"{outcome}: {error.message} transactional_id={self._id.name!r} timeout_s={self._timeout_s:g}"
        return type(error)(error.code, message, retry_after_ms=error.retry_after_ms)

    def _check_open(self) -> None:
        if not self._is_open:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "the transaction has ended or has not begun (use it inside async with)"
                f" transactional_id={self._id.name!r}",
            )

    def _end(self, error: BaseException | None) -> None:
        self._is_open = self._id.open = False
        self._batches.clear()
        self._filling.clear()
        for sending in self._sendings:
            sending.end(error)
        self._sendings.clear()
        if self._consumer is not None and error is not None:
            self._consumer._rewind()

    def _add_all(self, topic: str, records: Sequence[Record], partition: int | None) -> None:
        self._check_open()
        if not isinstance(topic, str):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"topic must be a str got={type(topic).__name__}")
        telemetry = active()
        if telemetry is not None and records:
            headers = records[0].headers if len(records) == 1 else NO_HEADERS
            sending = telemetry.sending(self._link.place, topic, headers, count=len(records))
            self._sendings.append(sending)
            records = [sending.traced(record) for record in records]
        for record in records:
            self._add(topic, record, partition)

    def _add(self, topic: str, record: Record, partition: int | None) -> None:
        where = BY_KEY if partition is None else checked_partition(partition)
        size = size_of(record)
        # a batch without any key goes to one partition; in a batch with keys, the broker chooses it for each record
        group = (topic, where, record.key is None)
        batch = self._filling.get(group)
        is_new = batch is None or batch.size + size > BATCH_BYTES
        if self._size + size > self._buffer_bytes or (is_new and len(self._batches) >= BATCHES_MAX):
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "the transaction is too large (commit more often, or set a larger buffer_bytes)"
                f" transactional_id={self._id.name!r} bytes={self._size + size} buffer_bytes={self._buffer_bytes}"
                f" batches={len(self._batches)} batches_max={BATCHES_MAX}",
            )
        if batch is None or is_new:
            batch = self._filling[group] = _Batch(topic, where)
            self._batches.append(batch)
        batch.add(record, size)
        self._size += size

    async def _store(self) -> list[GroupOffsets]:
        """Stage the records, publish them with the consumer's offsets, and return these.

        Attempts that the broker has not executed are repeated.
        """
        stages, pause_s = 0, PAUSE_MIN_S
        while True:
            groups = [] if self._consumer is None else await self._consumer._offsets_to_commit()
            try:
                tokens = await self._stage()
                if tokens or groups:
                    await self._publish(tokens, groups)
                return groups
            except Busy as error:
                self._busy = error
                await asyncio.sleep(min(max((error.retry_after_ms or 0) / 1000, pause_s), PAUSE_MAX_S))
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            except (Missing, Conflict) as error:
                if error.code in MEMBERSHIP_ENDED and self._consumer is not None:
                    self._consumer._rejoin()  # it may still own its partitions
                elif error.code is ErrorCode.STAGE_MISSING and stages < STAGES_MAX:
                    stages += 1  # a crash of the broker loses batches that it has not written yet
                else:
                    raise

    async def _stage(self) -> list[bytes]:
        """Stage all batches and return their tokens."""
        slots = asyncio.Semaphore(STAGES_AT_ONCE)
        work = [self._stage_one(batch, slots) for batch in self._batches]
        results = await asyncio.gather(*work, return_exceptions=True)  # waits for all, also if one fails
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [token for token in results if isinstance(token, bytes)]

    async def _stage_one(self, batch: _Batch, slots: asyncio.Semaphore) -> bytes:
        # The publish syncs the batch. If a crash loses it before, the publish fails, and the batch is staged again.
        encoded, write = batch.encoded(), (self._id.name, self._id.number)

        async def stage(wire: WireClient) -> bytes:
            # A request without a response may have been executed, so its token is not used again. The broker drops its batch.
            token = secrets.token_bytes(TOKEN_BYTES)
            await _polywire(wire).stage(token, batch.topic, batch.partition, encoded, level=Level.MEMORY, write=write)
            return token

        async with slots:
            try:
                return await self._link.read(stage)
            except Missing as error:
                if error.code is not ErrorCode.TOPIC_MISSING or not self._create:
                    raise
                with suppress(Conflict):  # another client creates it at the same time
                    await self._link.once(lambda wire: _polywire(wire).create_topic(batch.topic))
                return await self._link.read(stage)

    async def _publish(self, tokens: Sequence[bytes], groups: Sequence[GroupOffsets]) -> None:
        number, epoch = self._id.number, self._id.epoch
        assert epoch is not None, "the transaction has begun"

        async def publish(wire: WireClient) -> None:
            self._unanswered += 1
            await _polywire(wire).publish(self._id.name, number, tokens, groups=groups, epoch=epoch)

        try:
            await self._link.read(publish)
        except GONE:
            raise
        except BrokerError:
            self._unanswered -= 1  # the last request was rejected; earlier ones may still be executed
            raise


def _polywire(wire: WireClient) -> PolywireClient:
    return needs_polywire(wire, "execute transactions")
