"""``Consumer``: reads topics, alone or as a member of a group.

A consumer connects, joins its group if it has one, and fetches until the connection is lost or the group changes. Then
it begins again, and continues after the last record that was returned to the application.

* Records of a partition are returned in order.
* After a restart of the broker, reading continues without gaps or duplicates.
* An offset is committed only when the application has finished the record: when it has requested the next one.
* Fetched records that were not returned yet have a size limit.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, cast

from polywire.choices import listed
from polywire.client.assignment import (
    EARLIEST,
    LATEST,
    Assignment,
    Part,
    Start,
    check_arguments,
    checked_start,
    first_offset,
    not_owned,
    partition_count,
    read,
)
from polywire.client.base import Ability, WireClient, fetch_wait_ms
from polywire.client.link import BACKOFF_MAX_S, BACKOFF_MIN_S, GONE, Link
from polywire.client.notices import OnConnect, OnDisconnect, OnRebalance, call_soon, failure_of, log, rebalance
from polywire.client.record import Record
from polywire.client.rows import Cursor
from polywire.client.tracing import active
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.protocols.polywire.messages import GroupOffsets

if TYPE_CHECKING:
    from opentelemetry.trace import Span

WAIT_MS: Final = 1000  # duration of a long poll
POLL_INTERVAL_S: Final = 0.05  # seconds between fetches over protocols without long polls
PARTITIONS_S: Final = 30.0  # how often a consumer without a group looks for new partitions
HEARTBEAT_S: Final = 3.0  # the broker removes members after 10 seconds of silence
COMMIT_INTERVAL_S: Final = 1.0
BUFFER_BYTES: Final = 32 << 20
FETCH_BYTES_MIN: Final = 64 << 10
FETCH_BYTES_MAX: Final = 512 << 10  # small enough for the processor's cache, together with the decoded records
FETCHES_MAX: Final = 32  # concurrent fetches; the broker accepts 64 per connection
# duration of a long poll if there are more partitions than fetches, so that they take turns
SHARED_WAIT_MS: Final = 100
BATCH_RECORDS: Final = 10_000
COMMIT_SESSIONS_MAX: Final = 10  # sessions in which a commit is retried
# attempts to leave a group that keeps changing; if all fail, the broker removes the silent member
LEAVES_MAX: Final = 5


class _SessionOver(Exception):
    """The group has changed, so the consumer must join again."""


class ConsumerOptions(TypedDict, total=False):
    """Keyword arguments of ``Consumer``."""

    group: str | None
    member: str | None
    start: Start
    auto_commit: bool
    commit_interval_s: float
    buffer_bytes: int
    reconnect_s: float
    on_connect: OnConnect | None
    on_disconnect: OnDisconnect | None
    on_rebalance: OnRebalance | None


class Consumer:
    """Read topics. Create one with ``polywire.Client.consumer`` and use it in an ``async with``.

    The members of a group share the partitions, and start at the group's committed offsets. Without a group, the
    consumer reads all partitions and commits nothing. With ``auto_commit``, offsets are committed about once a second
    and on closing. Otherwise call ``commit``.

    Example:
        async with client.consumer("orders", group="billing") as consumer:
            async for record in consumer:
                print(record.offset, record.value)
    """

    def __init__(
        self,
        url: str,
        *topics: str,
        group: str | None = None,
        member: str | None = None,
        start: Start = EARLIEST,
        auto_commit: bool = True,
        commit_interval_s: float = COMMIT_INTERVAL_S,
        buffer_bytes: int = BUFFER_BYTES,
        reconnect_s: float = 60.0,
        on_connect: OnConnect | None = None,
        on_disconnect: OnDisconnect | None = None,
        on_rebalance: OnRebalance | None = None,
    ) -> None:
        """Create a consumer. It connects on entering the ``async with`` block, or on the first read.

        Args:
            url: as for ``polywire.connect``.
            topics: full names, at least one.
            group: consumer group to join.
            member: name of the member in the group; None generates one.
            start: where to start without a committed offset: "earliest", "latest", an offset, or a datetime with a time
                zone.
            auto_commit: commit offsets automatically.
            commit_interval_s: interval of automatic commits, in seconds.
            buffer_bytes: maximum stored size of records that are fetched but not delivered yet.
            reconnect_s: how long to retry a lost connection, in seconds.
            on_connect: called with the address when a connection was opened. See ``polywire.connect``.
            on_disconnect: called with the address and the error when the connection was lost.
            on_rebalance: called with a ``Rebalance`` when the partitions of this consumer have changed.

        Raises:
            Invalid: INVALID_REQUEST: an argument is invalid; the message says what is expected.
        """
        check_arguments(topics, group, commit_interval_s, buffer_bytes)
        self._link: Final = Link(url, reconnect_s=reconnect_s, on_connect=on_connect, on_disconnect=on_disconnect)
        self._on_rebalance: Final = on_rebalance
        self._topics: Final = tuple(dict.fromkeys(topics))
        self._group: Final = group
        self._member: Final = member or f"polywire-{secrets.token_hex(6)}"
        self._start: Final = checked_start(start)
        self._auto_commit: Final = auto_commit and group is not None
        self._commit_interval_s: Final = commit_interval_s
        self._buffer_bytes: Final = buffer_bytes
        self._assignment: Final = Assignment()
        self._generations: dict[str, int] = {}
        self._seeks: Final[dict[tuple[str, int], int]] = {}
        self._wire: WireClient | None = None
        self._cursor: Final = Cursor(self._next_record)
        self._lock: Final = threading.Lock()  # of the cursor, because ``_take_fetched`` runs in other threads
        self._batch, self._is_waiting = (0, 0), False
        self._part: Part | None = None
        self._news = asyncio.Event()
        self._in_session, self._over = asyncio.Event(), asyncio.Event()
        self._failing_since: float | None = None
        self._pause_s = BACKOFF_MIN_S
        self._failure: BrokerError | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(commit_last=kind is None)

    def __aiter__(self) -> AsyncIterator[Record]:
        return self._cursor

    async def __anext__(self) -> Record:
        return cast("Record", await self._cursor.__anext__())

    async def _next_record(self) -> Record:
        if not await self._next_chunk(None):
            raise StopAsyncIteration
        self._cursor.row = 1
        return cast("Record", self._cursor.records[0])

    async def start(self) -> None:
        """Connect, join the group, and start to fetch.

        Raises:
            Missing: TOPIC_MISSING.
            Unavailable: no broker responds.
            Denied: the login failed, or a permission is missing.
            Invalid: INVALID_REQUEST: the protocol has no groups, or does not support this ``start``.
        """
        if self._task is None and not self._closed:
            self._task = asyncio.ensure_future(self._run())
            self._task.add_done_callback(self._ended)
        await self._session_begun()

    async def batch(self, records_max: int = BATCH_RECORDS, *, timeout_s: float | None = None) -> Sequence[Record]:
        """Wait until there are records, and return some of them, all from one partition.

        Args:
            records_max: maximum number of records.
            timeout_s: how long to wait for the first record, in seconds, before returning an empty list. None waits
                forever.

        Raises the errors of ``start``, and Missing(OFFSET_OUT_OF_RANGE) if the next records were deleted: call
        ``seek``.

        Example:
            while records := await consumer.batch(timeout_s=1):
                store(records)
                await consumer.commit()
        """
        if records_max < 1:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"records_max must be above 0 got={records_max}")
        cursor = self._cursor
        if cursor.row >= len(cursor.records) and not await self._next_chunk(timeout_s):
            return ()
        with self._lock:
            first = cursor.row
            cursor.row = min(first + records_max, len(cursor.records))
            self._batch = (first, cursor.row)
            records: list[Record] = cursor.records[first : cursor.row]
        return records

    async def batches(self, records_max: int = BATCH_RECORDS) -> AsyncGenerator[Sequence[Record], None]:
        """Yield batches of records forever. See ``batch``.

        Example:
            async for records in consumer.batches():
                print(len(records), records[0].partition)
        """
        while records := await self.batch(records_max):
            yield records

    async def commit(self, record: Record | None = None) -> None:
        """Commit the group's offsets after all records returned so far, and wait until the broker has stored them.

        Args:
            record: commit only the offset after this record.

        Raises:
            Conflict: PARTITION_NOT_ASSIGNED: some partitions now belong to another member, which reads the uncommitted
                records again. The offsets of the other partitions are committed. The error is raised once per lost
                partition.
            Invalid: INVALID_REQUEST: the consumer has no group.
        """
        if self._group is None:
            raise Invalid(ErrorCode.INVALID_REQUEST, "committing needs a group (create the consumer with group=)")
        self._mark()
        if record is not None:
            was_lost = self._assignment.is_lost(record.topic, record.partition)
            await self._commit(record.topic, record.partition, record.offset + 1, was_lost=was_lost)
            return
        refused = self._assignment.take_lost()
        for (topic, partition), offset in self._assignment.uncommitted().items():
            try:
                await self._commit(topic, partition, offset, was_lost=False)
            except Conflict:
                refused.add((topic, partition))
        refused |= self._assignment.take_lost()
        if refused:
            raise not_owned(refused)

    def processing(self, records: Record | Sequence[Record]) -> AbstractContextManager[Span | None]:
        """Return a context manager that makes an OpenTelemetry span of the processing of records.

        The span is a child of the span that sent the record. With several records, it has links to the spans that sent
        them. Records that are sent in the block continue the trace. Without a provider of OpenTelemetry, it does
        nothing.

        Example:
            async for record in consumer:
                with consumer.processing(record):
                    await producer.send("invoices", record.value)
        """
        telemetry = active()
        return nullcontext() if telemetry is None else telemetry.processing(self._link.place, self._group, records)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Continue at another offset of a partition.

        Before the consumer is started, this sets the offset at which it begins if the partition is assigned to it.
        Raises Missing(PARTITION_MISSING) if the partition is not assigned, or the topic is not one of the consumer's.
        """
        if self._task is None and topic in self._topics and partition >= 0:
            self._seeks[topic, partition] = offset
            return
        part = self._assigned(topic, partition)
        part.move(offset)
        if part is self._part:
            self._drop_current()

    def pause(self, topic: str, partition: int | None = None) -> None:
        """Deliver no more records of a partition, or of all assigned partitions of a topic, until ``resume``.

        The consumer remains a member of its group. Records that it has fetched remain in memory, within
        ``buffer_bytes``. A partition that is assigned later, or again, is not paused. Raises Missing(PARTITION_MISSING)
        if the partition is not assigned.

        Example:
            consumer.pause("orders")
            await database.recover()
            consumer.resume("orders")
        """
        for part in self._parts_of(topic, partition):
            part.paused = True
            if part is self._part:
                with self._lock:
                    part.put_back(self._cursor.records[self._cursor.row :])
                    del self._cursor.records[self._cursor.row :]

    def resume(self, topic: str, partition: int | None = None) -> None:
        """Deliver records again after ``pause``. Raises Missing(PARTITION_MISSING) if the partition is not assigned."""
        for part in self._parts_of(topic, partition):
            part.paused = False
        self._news.set()

    @property
    def paused(self) -> list[tuple[str, int]]:
        """The paused partitions, as (topic, partition)."""
        return [(part.topic, part.partition) for part in self._assignment if part.paused]

    def _parts_of(self, topic: str, partition: int | None) -> list[Part]:
        if partition is not None:
            return [self._assigned(topic, partition)]
        return [part for part in self._assignment if part.topic == topic] or [self._assigned(topic, partition)]

    def _assigned(self, topic: str, partition: int | None) -> Part:
        part = None if partition is None else self._assignment.find(topic, partition)
        if part is not None:
            return part
        numbers = [str(number) for name, number in sorted(self._assignment.positions()) if name == topic]
        raise Missing(
            ErrorCode.PARTITION_MISSING,
            "the partition is not assigned to this consumer"
            f" topic={topic!r} partition={partition} assigned={listed(numbers)} topics={listed(self._topics)}",
        )

    @property
    def positions(self) -> dict[tuple[str, int], int]:
        """The next offset of each assigned partition, by topic and partition."""
        self._mark()
        return self._assignment.positions()

    # Used by ``SyncConsumer``

    def _take_fetched(self) -> Record | None:
        """Return the next record that was fetched already, or None. May be called in any thread."""
        with self._lock:
            cursor = self._cursor
            if cursor.row >= len(cursor.records):
                return None
            cursor.row += 1
            return cast("Record", cursor.records[cursor.row - 1])

    # Used by ``Transaction``

    def _check_transactional(self, url: str) -> None:
        """Raise Invalid unless transactions of a client with this URL can commit offsets of this consumer."""
        if self._group is None or self._auto_commit or url != self._link.url:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "a transaction needs a consumer of the same client with a group and auto_commit=False"
                f" group={self._group!r} auto_commit={self._auto_commit}",
            )

    async def _offsets_to_commit(self) -> list[GroupOffsets]:
        """Return the offsets after all records returned so far, to commit them in a transaction.

        Raises Conflict(PARTITION_NOT_ASSIGNED) if another member reads some of these records, too.
        """
        if self._task is None:
            return []
        await self._session_begun()
        self._mark()
        lost = self._assignment.take_lost()
        if lost:
            raise not_owned(lost)
        topics: dict[str, dict[int, int]] = {}
        for (topic, partition), offset in self._assignment.uncommitted().items():
            topics.setdefault(topic, {})[partition] = offset
        return [
            GroupOffsets(topic, self._group or "", self._member, self._generations[topic], offsets)
            for topic, offsets in topics.items()
        ]

    def _rejoin(self) -> None:
        """End the session, because the broker does not accept its membership any more."""
        self._in_session.clear()
        self._over.set()

    def _committed(self, groups: Sequence[GroupOffsets]) -> None:
        """Record that a transaction has committed these offsets."""
        self._assignment.take_lost()  # a new session can have taken the offsets for those of another member
        for group in groups:
            for partition, offset in group.offsets.items():
                part = self._assignment.find(group.name, partition)
                if part is not None:
                    part.stored, part.done = offset, max(part.done, offset)

    def _rewind(self) -> None:
        """Continue at the committed offsets, because the transaction with the records after them was not committed."""
        self._mark()
        self._assignment.take_lost()
        for part in self._assignment:
            if part.position != part.stored:
                part.move(part.stored)
                if part is self._part:
                    self._drop_current()

    async def _reload(self) -> None:
        """Continue at offsets that another process has committed since this consumer has read them."""
        if self._task is None:
            return  # it reads them when it starts
        for _ in range(COMMIT_SESSIONS_MAX):
            wire = await self._session_begun()
            try:
                for part in self._assignment:
                    self._overtake(part, await wire.position(self._group or "", part.topic, part.partition))
                return
            except GONE as error:
                self._in_session.clear()
                await self._link.lost(wire, error)
        raise Unavailable(ErrorCode.UNREACHABLE, f"the connection is lost again and again url={self._link.url}")

    def _overtake(self, part: Part, committed: int | None) -> None:
        self._mark()
        if committed is not None and committed > part.stored:
            self._assignment.overtake(part, committed)
            if part is self._part:
                self._drop_current()

    async def close(self, *, commit_last: bool = True) -> None:
        """Commit offsets (``auto_commit``), leave the group, and close the connection. A second call does nothing.

        Args:
            commit_last: whether the application has finished the last records it received.

        Raises Unavailable if offsets could not be committed; records since the last commit are then delivered again.
        Nothing is raised if only leaving the group failed: the broker removes the member after its session timeout.
        """
        if self._closed:
            return
        self._closed = True
        self._news.set()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        try:
            if self._wire is not None and self._failure is None and task is not None:
                await self._farewell(self._wire, commit_last=commit_last)
        finally:
            self._drop_current()
            await self._link.close()

    async def _farewell(self, wire: WireClient, *, commit_last: bool) -> None:
        self._mark()
        with suppress(Conflict, Missing, _SessionOver):  # the group has changed: other members own the partitions now
            for part in self._assignment if self._auto_commit else ():
                await self._store(wire, part, part.position if commit_last else part.done)
        if self._is_grouped(wire):
            for topic, generation in self._generations.items():
                await self._leave(wire, topic, generation)

    async def _leave(self, wire: WireClient, topic: str, generation: int) -> None:
        """Leave the group, even if it has changed. Otherwise the other members would wait until this one times out."""
        # Missing: the broker has already removed this member. GONE: it will do so after the session timeout.
        with suppress(Missing, *GONE):
            for _ in range(LEAVES_MAX):
                try:
                    await wire.leave(self._group or "", topic, self._member, generation)
                except Conflict:
                    generation = (await wire.join(self._group or "", topic, self._member)).generation
                else:
                    return

    # Delivery to the application

    async def _next_chunk(self, timeout_s: float | None) -> bool:
        """Wait for fetched records of a partition, and make them the current ones.

        Returns False after the timeout, or once the consumer is closed. Raises Invalid if another task waits already.
        """
        if self._is_waiting:
            advice = "create a consumer for each, with the same group, or use a queue"
            message = f"another task or thread already waits for records of this consumer ({advice})"
            raise Invalid(ErrorCode.INVALID_REQUEST, message)
        self._is_waiting = True
        try:
            return await self._wait_for_chunk(timeout_s)
        finally:
            self._is_waiting = False

    async def _wait_for_chunk(self, timeout_s: float | None) -> bool:
        self._leave_chunk()
        begun = time.monotonic()
        if self._task is None:
            await self.start()
        part: Part | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                part = await self._next_part()
        if part is None:
            return False
        records = part.take()
        self._hold(part, records)
        telemetry = active()
        if telemetry is not None:
            telemetry.received(self._link.place, self._group, records, begun)
        return True

    async def _next_part(self) -> Part | None:
        """Wait for a partition with fetched records. Return None once the consumer is closed."""
        while (part := self._assignment.next_part()) is None:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if self._closed:
                return None
            self._news.clear()
            await self._news.wait()
        if part.failure is not None:
            raise part.failure.with_traceback(None)
        return part

    def _leave_chunk(self) -> None:
        """Mark all records returned so far as finished, because the application has requested the next ones."""
        self._mark()
        if self._part is not None:
            self._part.done = self._part.position
        self._drop_current()

    def _drop_current(self) -> None:
        self._hold(None, [])

    def _hold(self, part: Part | None, records: list[Record]) -> None:
        with self._lock:
            self._part, self._batch = part, (0, 0)
            self._cursor.records, self._cursor.row = records, 0

    def _mark(self) -> None:
        """Update the offsets of the current partition from the number of records returned so far."""
        with self._lock:
            row, records = self._cursor.row, self._cursor.records
        if self._part is None or not row:
            return
        first, stop = self._batch
        unfinished = records[first if stop == row else row - 1]
        self._part.position = records[row - 1].offset + 1
        self._part.done = max(self._part.done, unfinished.offset)

    # Sessions

    def _is_grouped(self, wire: WireClient) -> bool:
        return self._group is not None and Ability.GROUPS in wire.abilities

    async def _session_begun(self) -> WireClient:
        await self._in_session.wait()
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._closed or self._wire is None:
            raise Unavailable(ErrorCode.STOPPING, "consumer is closed")
        return self._wire

    async def _run(self) -> None:
        """Run one session after another. Raises an error that another session cannot fix."""
        while True:
            await self._one_session(await self._link.wire())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._failure = failure_of(task, "the consumer")
        self._news.set()
        self._in_session.set()

    async def _one_session(self, wire: WireClient) -> None:
        """Run a session. If it failed, pause before the next one.

        Raises Unavailable if all sessions have failed for ``reconnect_s``.
        """
        now = asyncio.get_running_loop().time()
        try:
            await self._session(wire)
        except _SessionOver:
            self._failing_since = None
        except GONE as error:
            if self._in_session.is_set() or self._failing_since is None:
                self._failing_since, self._pause_s = now, BACKOFF_MIN_S
            elif self._link.is_wrong_port or now > self._failing_since + self._link.reconnect_s:
                raise
            self._in_session.clear()
            await self._link.lost(wire, error)
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, BACKOFF_MAX_S)
        finally:
            self._in_session.clear()

    async def _session(self, wire: WireClient) -> None:
        """Fetch until the connection is lost or the group changes, then raise the reason."""
        self._over = asyncio.Event()
        await self._assign(wire)
        self._wire = wire
        self._link.note_response()
        self._in_session.set()
        parts = list(self._assignment)
        slots = asyncio.Semaphore(FETCHES_MAX)
        bytes_max = min(max(self._buffer_bytes // max(len(parts), 1), FETCH_BYTES_MIN), FETCH_BYTES_MAX)
        longest_ms = WAIT_MS if len(parts) <= FETCHES_MAX else SHARED_WAIT_MS
        wait_ms = fetch_wait_ms(wire.abilities, len(parts), longest_ms)
        work = [self._fetch(wire, part, slots, bytes_max=bytes_max, wait_ms=wait_ms) for part in parts]
        await _until_one_fails([self._keep_up(wire), self._watch(), *work])

    async def _watch(self) -> None:
        await self._over.wait()
        raise _SessionOver

    async def _assign(self, wire: WireClient) -> None:
        if self._group is not None and not {Ability.GROUPS, Ability.POSITIONS} & wire.abilities:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"this protocol has no consumer groups url={self._link.url}")
        chosen: set[tuple[str, int]] = set()
        counts: dict[str, int] = {}
        for topic in self._topics:
            if self._is_grouped(wire):
                membership = await wire.join(self._group or "", topic, self._member)
                self._generations[topic] = membership.generation
                chosen |= {(topic, partition) for partition in membership.partitions}
            else:
                count = await partition_count(wire, topic)
                chosen |= {(topic, partition) for partition in range(count)}
                counts[topic] = count
        self._mark()
        change = rebalance(self._assignment.positions(), chosen)
        self._assignment.keep(chosen)
        if self._part is not None and (self._part.topic, self._part.partition) not in chosen:
            self._drop_current()
        for topic, partition in sorted(chosen):
            await self._begin_partition(wire, topic, partition)
        self._assignment.counts = counts
        if change.assigned or change.revoked:
            log.info(
                "partitions assigned group=%s member=%s assigned=%s revoked=%s",
                self._group,
                self._member,
                list(change.assigned),
                list(change.revoked),
            )
            call_soon(self._on_rebalance, change)

    async def _begin_partition(self, wire: WireClient, topic: str, partition: int) -> None:
        commits = self._group is not None and Ability.POSITIONS in wire.abilities
        stored = await wire.position(self._group or "", topic, partition) if commits else None
        part = self._assignment.find(topic, partition)
        if part is None:
            sought = self._seeks.get((topic, partition))
            # a partition that was added while this consumer reads the topic is read from its beginning
            start = EARLIEST if partition >= self._assignment.counts.get(topic, partition + 1) else self._start
            offset = stored if sought is None else sought
            if offset is None:
                offset = await first_offset(wire, topic, partition, start)
            part = Part.at(topic, partition, offset)
            if commits and stored is None and (sought is not None or start == LATEST):
                # otherwise, a member that begins here later would not get the records that this one has not committed
                part.stored = -1
                await self._store(wire, part, offset)
            self._seeks.pop((topic, partition), None)
            self._assignment.add(part)
        elif stored is not None and stored != part.stored and self._is_overtaken(part, stored):
            self._assignment.overtake(part, stored)
            if part is self._part:
                self._drop_current()

    def _is_overtaken(self, part: Part, stored: int) -> bool:
        """Return whether another member owned the partition in the meantime and committed an offset.

        Offsets of records that this member delivered count only if the application decides when to commit: it must not
        commit records, too, that another member has committed.
        """
        is_uncommitted = part.position != part.stored and not self._auto_commit
        return stored > part.position or (is_uncommitted and stored > part.stored and stored != part.pending)

    async def _fetch(
        self, wire: WireClient, part: Part, slots: asyncio.Semaphore, *, bytes_max: int, wait_ms: int
    ) -> None:
        """Fetch a partition until the session ends.

        Wait with the next fetch until the application has requested the last chunk.
        """
        while True:
            await part.consumed.wait()
            offset = part.fetched
            async with slots:
                found = await read(wire, part, bytes_max=bytes_max, wait_ms=wait_ms)
            if part.fetched != offset:
                continue  # the application has called seek
            if isinstance(found, Missing):
                part.fail(found)
                self._news.set()
                continue
            part.put(*found)
            if found[0]:
                self._news.set()
            elif not wait_ms:
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _keep_up(self, wire: WireClient) -> None:
        loop = asyncio.get_running_loop()
        heartbeat_at = counted_at = loop.time()
        while True:
            await asyncio.sleep(min(self._commit_interval_s, HEARTBEAT_S) if self._auto_commit else HEARTBEAT_S)
            if self._auto_commit:
                self._mark()
                for part in self._assignment:
                    await self._store(wire, part, part.done)
            if self._is_grouped(wire) and loop.time() - heartbeat_at >= HEARTBEAT_S:
                heartbeat_at = loop.time()
                await self._heartbeat(wire)
            elif not self._is_grouped(wire) and loop.time() - counted_at >= PARTITIONS_S:
                counted_at = loop.time()
                await self._look_for_partitions(wire)

    async def _look_for_partitions(self, wire: WireClient) -> None:
        """Raise _SessionOver if a topic has more partitions than before."""
        for topic, known in self._assignment.counts.items():
            if await partition_count(wire, topic) > known:
                raise _SessionOver

    async def _heartbeat(self, wire: WireClient) -> None:
        try:
            for topic in self._topics:
                await wire.heartbeat(self._group or "", topic, self._member, self._generations[topic])
        except (Conflict, Missing) as error:
            raise _SessionOver from error

    async def _store(self, wire: WireClient, part: Part, offset: int) -> None:
        """Commit an offset, unless it is committed already. Raises _SessionOver if the group has changed."""
        if offset == part.stored:
            return
        member, generation = "", -1
        if self._is_grouped(wire):
            member, generation = self._member, self._generations[part.topic]
        part.pending = offset
        try:
            await wire.commit(
                self._group or "", part.topic, part.partition, offset, member=member, generation=generation
            )
        except Conflict as error:
            part.pending = -1
            raise _SessionOver from error
        except Missing as error:
            if error.code not in (ErrorCode.GROUP_MISSING, ErrorCode.MEMBER_MISSING):
                raise
            part.pending = -1
            raise _SessionOver from error
        part.stored, part.pending = offset, -1

    async def _commit(self, topic: str, partition: int, offset: int, *, was_lost: bool) -> None:
        """Commit an offset in this session.

        If the group changes, commit it in a later session that has the partition, unless another member has committed
        in between.
        """
        for _ in range(COMMIT_SESSIONS_MAX):
            wire = await self._session_begun()
            part = self._assignment.find(topic, partition)
            if part is None or (self._assignment.is_lost(topic, partition) and not was_lost):
                break
            try:
                await self._store(wire, part, offset)
                part.done = max(part.done, offset)
                return
            except _SessionOver:
                self._rejoin()
            except GONE as error:
                self._in_session.clear()
                await self._link.lost(wire, error)
        raise not_owned({(topic, partition)})


async def _until_one_fails(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    # Prefer _SessionOver: the consumer then joins again. If another error also occurred, it will occur again.
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    raise next((failure for failure in failures if isinstance(failure, _SessionOver)), failures[0])
