"""Send records to one partition: collect them in batches, pipeline the batches, and retry batches without a response.

Each partition has a ``Lane``. Over `polywire`, a lane is an idempotent producer: its batches have a producer id and
consecutive sequence numbers, so that a batch is stored once even if it is retried. Over other protocols, only one batch
is in flight at a time, and a retried batch may be stored twice.

Batches are stored in the order of their creation. Each of them is either stored or fails.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from polywire.client.base import WireClient
from polywire.client.link import GONE, Link
from polywire.client.notices import log
from polywire.client.polywire import PolywireClient
from polywire.client.record import Record, encode_batch, to_stored
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid, Unavailable
from polywire.records import columns
from polywire.records.columns import RECORD_BYTES_MAX
from polywire.types import Level

WINDOW: Final = 5  # batches in flight; must be fewer than the responses that the broker remembers for a producer
PRODUCER_ID_BYTES: Final = 16
PAUSE_MIN_S: Final = 0.05  # first pause before a retry, if the broker's response does not have one
PAUSE_MAX_S: Final = 5.0  # maximum pause, even if the broker asks for a longer one

KEY_BYTES_SHOWN: Final = 60  # bytes of a record's key in an error message

ANY_PARTITION: Final = -1  # the protocol chooses the partition
NO_OFFSET: Final = -1


@dataclass(frozen=True, slots=True)
class Delivery:
    """The outcome of a batch.

    Attributes:
        topic: full name.
        partition: partition of the records; -1 if unknown.
        base_offset: offset of the first record; -1 if the batch failed, or if the protocol does not report offsets.
        record_count: number of records.
        error: why the batch failed; None if it was stored. No record of a failed batch was stored. Records that were
            removed because their time was over are not part of the batch.
    """

    topic: str
    partition: int
    base_offset: int
    record_count: int
    error: BrokerError | None = None


OnDelivery: TypeAlias = Callable[[Delivery], None]


@dataclass(eq=False, slots=True)
class Batch:
    """Records of one partition.

    Attributes:
        completed: the outcome.
        due_at: time at which the batch is sent, even if it is not full.
        values: values of the records.
        keys: keys of the records.
        others: records with more than a value and a key, by row.
        size: estimated size in memory.
        sequence: sequence number of the first record; -1 before the batch is sent.
        locations: partition and offset of the first record, or of each record if the protocol returns them
            individually.
        reply: the request in flight.
        expired: rows of records to remove before the batch is sent, because their time is over.
        late: number of records that were sent, and whose time was over before the outcome.
        removed: rows that were removed, in order. Rows are counted as if these were still there.
    """

    completed: asyncio.Future[Delivery]
    due_at: float
    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    others: dict[int, Record] = field(default_factory=dict)
    size: int = 0
    sequence: int = -1
    locations: list[tuple[int, int]] | None = None
    reply: asyncio.Task[None] | None = None
    expired: set[int] = field(default_factory=set)
    late: int = 0
    removed: list[int] = field(default_factory=list)

    @property
    def record_count(self) -> int:
        """The number of records whose time is not over."""
        return len(self.values) - len(self.expired)

    @property
    def next_row(self) -> int:
        """The row of the next record."""
        return len(self.values) + len(self.removed)

    def index_of(self, row: int) -> int:
        """Return the index of a row among the records that were not removed."""
        return row - bisect_left(self.removed, row)

    def remove_expired(self) -> None:
        """Remove the records whose time is over."""
        if not self.expired:
            return
        gone = {self.index_of(row) for row in self.expired}
        kept = [at for at in range(len(self.values)) if at not in gone]
        self.values = [self.values[at] for at in kept]
        self.keys = [self.keys[at] for at in kept]
        self.others = {new: self.others[at] for new, at in enumerate(kept) if at in self.others}
        self.removed = sorted([*self.removed, *self.expired])
        self.expired.clear()

    def records(self) -> list[columns.Record]:
        """Return the records in the form that protocol clients use."""
        return [
            to_stored(self.others[row]) if row in self.others else columns.Record(value, key)
            for row, (value, key) in enumerate(zip(self.values, self.keys, strict=True))
        ]


class Lane:
    """The batches of one partition, sent by a task. Sequence numbers have no gaps, even after a rejected batch."""

    __slots__ = (
        "_batch_bytes",
        "_failing_since",
        "_idempotent",
        "_in_flight",
        "_level",
        "_linger_s",
        "_link",
        "_loop",
        "_next_sequence",
        "_on_completed",
        "_pause_s",
        "_producer_id",
        "_queue",
        "_task",
        "_wake",
        "_wire",
        "partition",
        "topic",
    )

    def __init__(
        self,
        link: Link,
        topic: str,
        partition: int,
        *,
        idempotent: bool,
        level: Level,
        linger_s: float,
        batch_bytes: int,
        on_completed: Callable[[Batch, Delivery], None],
    ) -> None:
        self.topic: Final = topic
        self.partition: Final = partition
        self._link: Final = link
        self._idempotent: Final = idempotent
        self._level: Final = level
        self._linger_s: Final = linger_s
        self._batch_bytes: Final = batch_bytes
        self._on_completed: Final = on_completed
        self._loop: Final = asyncio.get_running_loop()
        self._queue: Final[deque[Batch]] = deque()
        self._in_flight: Final[deque[Batch]] = deque()
        self._wake: Final = asyncio.Event()
        self._wire: WireClient | None = None  # over which batches are in flight
        self._failing_since: float | None = None
        self._pause_s = PAUSE_MIN_S
        self._begin_producer()
        self._task: Final = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._ended)

    @property
    def ended(self) -> bool:
        """Whether the task has ended, so that no batch would be sent."""
        return self._task.done()

    def open_batch(self, size: int) -> Batch:
        """Return the batch to which records of this size are to be added.

        It is the last batch if the records fit and it was never sent, otherwise a new one.
        """
        last = self._queue[-1] if self._queue else None
        if last is None or last.sequence >= 0 or (last.values and last.size + size > self._batch_bytes):
            now = self._loop.time()
            self._queue.append(Batch(self._loop.create_future(), now + self._linger_s))
            self._loop.call_at(now + self._linger_s, self._wake.set)
            self._wake.set()  # the previous batch is complete: send it now
        return self._queue[-1]

    def wake(self) -> None:
        """Let the task check whether a batch must be sent."""
        self._wake.set()

    def flush(self) -> None:
        """Send all batches now, without waiting for more records."""
        for batch in self._queue:
            batch.due_at = 0.0
        self._wake.set()

    def expire(self, batch: Batch, row: int) -> bool:
        """Remove a record whose time is over. Return False if it was sent, so that it may be stored."""
        if batch.sequence >= 0:
            return False
        batch.expired.add(row)
        if len(batch.expired) == len(batch.values) and batch in self._queue:
            self._queue.remove(batch)
            self._complete(batch)
        return True

    async def close(self) -> int:
        """Stop the task, and return the number of records without an outcome. They fail."""
        self._task.remove_done_callback(self._ended)
        requests = [self._task, *(batch.reply for batch in self._in_flight if batch.reply is not None)]
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        return self._fail_all(Unavailable(ErrorCode.STOPPING, "producer was closed"))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail all batches if the task failed, or if the event loop ended. Report an exception to asyncio."""
        if task.cancelled():
            warn_lost(self._fail_all(Unavailable(ErrorCode.STOPPING, "the event loop ended")))
        elif task.exception() is not None:
            for batch in self._in_flight:
                if batch.reply is not None:
                    batch.reply.cancel()
            self._fail_all(Unavailable(ErrorCode.STOPPING, f"a batch could not be sent reason={task.exception()!r}"))
            self._loop.call_exception_handler({"message": "a batch could not be sent", "exception": task.exception()})

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._in_flight and _has_reply(self._in_flight[0]):
                error = _refusal(self._in_flight[0])
                if error is not None:
                    await self._recover(error)
                    break
                self._failing_since, self._pause_s = None, PAUSE_MIN_S
                self._link.note_response()
                self._complete(self._in_flight.popleft())
            if self._ready():
                await self._send()

    def _ready(self) -> bool:
        if not self._queue or len(self._in_flight) >= (WINDOW if self._idempotent else 1):
            return False
        first = self._queue[0]
        return len(self._queue) > 1 or first.size >= self._batch_bytes or first.due_at <= self._loop.time()

    async def _send(self) -> None:
        try:
            wire = await self._link.wire()
        except BrokerError as error:
            self._fail_all(error)
            return
        if self._in_flight and wire is not self._wire:
            return  # these batches fail, and are sent again before later ones
        self._wire = wire
        while self._ready():
            batch = self._queue.popleft()
            if batch.sequence < 0:
                batch.remove_expired()
                batch.sequence = self._next_sequence
                self._next_sequence += len(batch.values)
            self._in_flight.append(batch)
            work: Coroutine[Any, Any, None]
            if isinstance(wire, PolywireClient):
                work = self._append(wire, batch)
            else:
                work = self._produce(wire, batch)
            batch.reply = asyncio.ensure_future(work)
            batch.reply.add_done_callback(lambda _: self._wake.set())

    async def _append(self, wire: PolywireClient, batch: Batch) -> None:
        encoded = encode_batch(
            batch.values,
            batch.keys,
            batch.others,
            producer_id=self._producer_id if self._idempotent else None,
            base_sequence=batch.sequence,
        )
        try:
            base_offset = await wire.append_batch(self.topic, self.partition, encoded, level=self._level)
        except GONE as error:
            await self._link.lost(wire, error)
            raise
        batch.locations = [(self.partition, base_offset)]

    async def _produce(self, wire: Any, batch: Batch) -> None:
        partition = None if self.partition == ANY_PARTITION else self.partition
        try:
            stored = await wire.produce(self.topic, batch.records(), partition=partition, level=self._level)
        except GONE as error:
            await self._link.lost(wire, error)
            raise
        batch.locations = [(produced.partition, produced.offset) for produced in stored]

    async def _recover(self, error: BrokerError) -> None:
        """Handle the failure of the oldest batch in flight: queue all batches in flight again, or fail that batch.

        Batches that are sent again have the same sequence numbers, so the broker does not store them twice.
        """
        await asyncio.wait([batch.reply for batch in self._in_flight if batch.reply is not None])
        for batch in self._in_flight:
            _refusal(batch)
            batch.reply = None
        self._queue.extendleft(reversed(self._in_flight))
        self._in_flight.clear()
        self._wake.set()
        if isinstance(error, (*GONE, Busy)) and self._may_try_again():
            await asyncio.sleep(self._next_pause_s(error))
            return
        first = self._queue[0]
        # SEQUENCE_GAP: the broker lost earlier batches in a power loss and did not store this batch. Send it again with
        # a new producer id.
        forgotten = error.code is ErrorCode.SEQUENCE_GAP and first.sequence > 0
        if not forgotten:
            self._queue.popleft()
        # The batches after a rejected one would have a gap before them, so they get a new producer id with sequences
        # from 0.
        self._begin_producer()
        if not forgotten:
            self._complete(first, error)

    def _may_try_again(self) -> bool:
        now = self._loop.time()
        if self._failing_since is None:
            self._failing_since = now
        return not self._link.is_wrong_port and now < self._failing_since + self._link.reconnect_s

    def _next_pause_s(self, error: BrokerError) -> float:
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, PAUSE_MAX_S)
        if error.retry_after_ms is not None:
            return min(max(error.retry_after_ms / 1000, PAUSE_MIN_S), PAUSE_MAX_S)
        return pause_s

    def _begin_producer(self) -> None:
        self._producer_id = secrets.token_bytes(PRODUCER_ID_BYTES)
        self._next_sequence = 0
        for batch in self._queue:
            batch.sequence = -1

    def _complete(self, batch: Batch, error: BrokerError | None = None) -> None:
        if error is None and batch.locations:
            partition, base_offset = batch.locations[0]
        else:
            partition, base_offset = self.partition, NO_OFFSET
        if error is not None and error.code is ErrorCode.RECORD_TOO_LARGE:
            error = _too_large(self.topic, batch, error)
        delivery = Delivery(self.topic, partition, base_offset, batch.record_count, error)
        self._on_completed(batch, delivery)
        if not batch.completed.done():
            batch.completed.set_result(delivery)

    def _fail_all(self, error: BrokerError) -> int:
        """Fail all batches, and return the number of their records."""
        batches = [*self._in_flight, *self._queue]
        self._in_flight.clear()
        self._queue.clear()
        self._begin_producer()
        for batch in batches:
            self._complete(batch, error)
        return sum(batch.record_count for batch in batches)


def warn_lost(records: int) -> None:
    """Log a warning if records have no outcome when their producer ends."""
    if records:
        log.warning(
            "records may not be stored, because their producer ended before they were acknowledged"
            " (Producer.close waits for them) records=%d",
            records,
        )


def _too_large(topic: str, batch: Batch, error: BrokerError) -> Invalid:
    """Return the error for a batch that is too large. The message names the largest record."""
    sizes = [len(value or b"") + len(key or b"") for value, key in zip(batch.values, batch.keys, strict=True)]
    size = max(sizes)
    key = batch.keys[sizes.index(size)]
    named = "None" if key is None else repr(key[:KEY_BYTES_SHOWN])
    return Invalid(
        error.code,
        f"record is too large (split it, or store it elsewhere and send a reference); a broker accepts {RECORD_BYTES_MAX:,} bytes of key and "
        f"value, fewer with a small serve --slot-mib topic={topic!r} key={named} bytes={size} reason={error.message!r} "
        f"limit={RECORD_BYTES_MAX} setting=record_bytes_max",
    )


def _has_reply(batch: Batch) -> bool:
    return batch.reply is not None and batch.reply.done()


def _refusal(batch: Batch) -> BrokerError | None:
    """Return the error in the response to a batch, or None. An exception that is not a BrokerError is raised."""
    assert batch.reply is not None, "the batch is in flight"
    error = batch.reply.exception()
    if error is not None and not isinstance(error, BrokerError):
        raise error
    return error
