"""``Queue``: work on the records of a topic one by one, together with other workers (concepts: queues).

A queue holds some records under a lock that the broker gives to one worker at a time. It renews the locks while their
jobs are not finished, and sends acknowledgements of several jobs together.

* A job is finished when its acknowledgement is stored, not before.
* If the connection is lost, the broker gives the unfinished records to other workers. Acknowledging them then fails.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from inspect import isawaitable
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypedDict

from polywire.client.base import WireClient
from polywire.client.link import BACKOFF_MAX_S, BACKOFF_MIN_S, GONE, Link
from polywire.client.notices import OnConnect, OnDisconnect, failure_of, log
from polywire.client.queue_calls import Acquisition
from polywire.client.queue_worker import QueueWorker, queue_worker
from polywire.client.record import Record
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Unavailable
from polywire.protocols.polywire.messages import AcknowledgedRun
from polywire.share_settings import AUTO_OFFSET_RESET, DEAD_LETTERS, DELIVERIES, LOCK_DURATION, ORDER
from polywire.types import Outcome

WAIT_MS: Final = 1_000  # duration of a request that waits for records
PREFETCH: Final = 100
PREFETCH_MAX: Final = 10_000
RENEWALS: Final = 3  # a lock is renewed when this part of its duration is over
RETRY_DELAYS_S: Final = (1.0, 10.0, 60.0)
DELAY_S_MAX: Final = 30 * 86_400  # the broker's limit
HELD_S_MAX: Final = 600  # limit of delays during which the worker holds the record, because the protocol has no delays
REASON_BYTES_MAX: Final = 1_024  # the broker's limit
_RUNS_MAX: Final = 900  # acknowledgements of one request: with reasons of that size, they fit in its 1 MiB


class QueueOptions(TypedDict, total=False):
    """Keyword arguments of ``Queue``."""

    group: str
    worker: str | None
    prefetch: int
    start: str | None
    lock_s: float | None
    attempts: int | None
    dead_letters: str | None
    order: str | None
    reconnect_s: float
    on_connect: OnConnect | None
    on_disconnect: OnDisconnect | None


class _End(NamedTuple):
    """An acknowledgement to send."""

    job: Job
    outcome: Outcome
    delay_ms: int
    reason: str
    done: asyncio.Future[None]


class Job:
    """A record to work on. End it with ``ack``, ``retry`` or ``reject``, once.

    Attributes:
        record: the record.
        attempt: how often the record was delivered, from 1.
    """

    __slots__ = ("_queue", "attempt", "is_delayed", "is_done", "is_lost", "record", "renew_at")

    def __init__(self, queue: Queue, record: Record, attempt: int, renew_at: float) -> None:
        self._queue: Final = queue
        self.record: Final = record
        self.attempt: Final = attempt
        self.renew_at = renew_at
        self.is_done = False
        self.is_delayed = False  # the worker holds it until the next attempt
        self.is_lost = False  # its lock has expired, or its connection was lost

    @property
    def value(self) -> bytes | None:
        """The value of the record."""
        return self.record.value

    @property
    def text(self) -> str:
        """The value as text. See ``Record.text``."""
        return self.record.text

    def json(self) -> Any:
        """Return the value decoded from JSON. See ``Record.json``."""
        return self.record.json()

    async def ack(self) -> None:
        """Report that the work is done, and wait until the broker has stored this.

        Raises Conflict(RECORD_NOT_ACQUIRED) if the lock has expired or the connection was lost: another worker gets the
        record, or has got it.
        """
        await self._queue.finish(self, Outcome.ACCEPT)

    async def retry(self, *, delay_s: float = 0.0, reason: str = "") -> None:
        """Return the record to the queue. After the last attempt, it is finished, or becomes a dead letter.

        Args:
            delay_s: how long no worker gets it, in seconds, at most 30 days. Over Kafka, the worker holds the record
                until then, for at most 10 minutes. If the worker ends before, another one gets it at once.
            reason: header ``dead.reason`` of the dead letter; its first 1,024 bytes are stored. Not sent over Kafka.

        Raises the same errors as ``ack``.
        """
        await self._queue.finish(self, Outcome.RELEASE, delay_s, reason)

    async def reject(self, reason: str = "") -> None:
        """Finish the record as failed, without another attempt.

        It becomes a dead letter if the group has a dead-letter topic.

        Args:
            reason: header ``dead.reason`` of the dead letter; its first 1,024 bytes are stored. Not sent over Kafka.

        Raises the same errors as ``ack``.
        """
        await self._queue.finish(self, Outcome.REJECT, reason=reason)


class Queue:
    """Read a topic as a work queue. Create one with ``polywire.Client.queue`` and use it in an ``async with``.

    All workers with the same group share the records. Each record goes to one worker at a time, until it is
    acknowledged. Needs `polywire`, or Kafka 4.2.

    Example:
        async with client.queue("jobs", group="workers") as queue:
            async for job in queue:
                print(job.text)
                await job.ack()
    """

    def __init__(
        self,
        url: str,
        topic: str,
        *,
        group: str,
        worker: str | None = None,
        prefetch: int = PREFETCH,
        start: str | None = "earliest",
        lock_s: float | None = None,
        attempts: int | None = None,
        dead_letters: str | None = None,
        order: str | None = None,
        reconnect_s: float = 60.0,
        on_connect: OnConnect | None = None,
        on_disconnect: OnDisconnect | None = None,
    ) -> None:
        """Create a queue. It connects on entering the ``async with`` block, or on the first read.

        Args:
            url: as for ``polywire.connect``.
            topic: full name of an existing topic.
            group: share group of the workers.
            worker: name of this worker in the group; None generates one.
            prefetch: how many records this worker holds at most. While it holds them, no other worker gets them. Use a
                small number if jobs are slow.
            start: where a new group begins: "earliest", "latest", or "by_duration:P1D" for the last day.
            lock_s: seconds for which the broker waits for a worker that has vanished.
            attempts: after this many deliveries, a record becomes a dead letter.
            dead_letters: full name of the topic for dead letters. It is created if it does not exist.
            order: "key": records with the same key are given to workers one at a time, in order. "none": they are not.
            reconnect_s: how long to retry a lost connection, in seconds.
            on_connect: called with the address when a connection was opened. See ``polywire.connect``.
            on_disconnect: called with the address and the error when the connection was lost.

        ``start``, ``lock_s``, ``attempts``, ``dead_letters`` and ``order`` are settings of the group. None leaves one as it is.
        Apache Kafka does not have the last two.

        Raises:
            Invalid: INVALID_REQUEST: an argument is invalid; the message says what is expected.
        """
        if not topic or not group:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"topic and group must be names topic={topic!r} group={group!r}")
        if not 0 < prefetch <= PREFETCH_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"prefetch must be from 1 to {PREFETCH_MAX} got={prefetch}")
        self._link: Final = Link(url, reconnect_s=reconnect_s, on_connect=on_connect, on_disconnect=on_disconnect)
        self._topic, self._group = topic, group
        self._worker: Final = worker or f"polywire-{secrets.token_hex(6)}"
        self._prefetch: Final = prefetch
        self._settings: Final = _settings(start, lock_s, attempts, dead_letters, order)
        self._jobs: deque[Job] = deque()  # fetched, not returned yet
        self._held: dict[tuple[int, int], Job] = {}  # all jobs under a lock, by partition and offset
        self._ends: list[_End] = []  # acknowledgements to send
        self._news, self._space = asyncio.Event(), asyncio.Event()
        self._is_known = asyncio.Event()  # set once ``_lock_s`` is that of the group
        self._failure: BrokerError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sending: asyncio.Task[None] | None = None
        self._connected: QueueWorker | None = None
        self._lock_s, self._stores_delays, self._closed = math.inf, True, False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect and begin to fetch.

        Raises:
            Missing: TOPIC_MISSING.
            Unavailable: no broker responds.
            Denied: the login failed, or a permission is missing.
            Conflict: GROUP_PROTOCOL_MISMATCH: a consumer group has this name. Over Kafka, ``get`` raises it.
            Invalid: INVALID_REQUEST: the protocol has no queues, or a setting is invalid.
        """
        if self._closed:
            raise Unavailable(ErrorCode.STOPPING, "queue was closed")
        if not self._tasks:
            await self._link.read(self._configure)
            self._tasks = [asyncio.ensure_future(self._fetch()), asyncio.ensure_future(self._renew())]
            for task in self._tasks:
                task.add_done_callback(self._task_ended)

    async def _configure(self, wire: WireClient) -> None:
        worker = self._worker_over(wire)
        self._stores_delays = worker.stores_delays
        await worker.configure(self._settings)

    def _worker_over(self, wire: WireClient) -> QueueWorker:
        return queue_worker(wire, group=self._group, topic=self._topic, worker=self._worker)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Job:
        job = None if self._closed else await self.get()
        if job is None:
            raise StopAsyncIteration
        return job

    async def get(self, *, timeout_s: float | None = None) -> Job | None:
        """Wait for the next job and return it.

        Args:
            timeout_s: how long to wait, in seconds, before returning None. None waits until the queue is closed.

        Raises the errors of ``start``.
        """
        await self.start()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wait_for_jobs(), timeout_s)
        return self._jobs.popleft() if self._jobs else None

    async def _wait_for_jobs(self) -> None:
        while not self._jobs and not self._closed:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            self._news.clear()
            await self._news.wait()

    async def run(
        self,
        handler: Callable[[Job], Awaitable[object]],
        *,
        concurrency: int = 1,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        job_timeout_s: float | None = None,
    ) -> None:
        """Call a handler for each job, until the queue is closed. A job is acknowledged when its handler returns.

        If the handler raises, the job is retried with a delay. After the last attempt it is finished, or becomes a dead
        letter with the exception as its reason. A handler may also end the job itself.

        Args:
            handler: coroutine function with one argument, the job.
            concurrency: number of jobs to work on at the same time.
            retry_delays_s: delay before each further attempt, in seconds; the last one repeats.
            job_timeout_s: a handler that takes longer is cancelled, and its job has failed.

        Raises Invalid(INVALID_REQUEST) if the handler is not a coroutine function.

        Example:
            async def send(job):
                print(job.json()["to"])

            async with client.queue("emails", group="senders", attempts=5, dead_letters="emails.dead") as queue:
                await queue.run(send, concurrency=20)
        """
        if concurrency < 1 or not retry_delays_s:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"concurrency must be above 0 got={concurrency}")
        await self.start()
        for delay_s in retry_delays_s:
            self._check_delay(delay_s)

        async def work() -> None:
            async for job in self:
                await _work(job, handler, retry_delays_s, job_timeout_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())

    async def close(self) -> None:
        """Send pending acknowledgements and close the connection. The broker gives unfinished records to others."""
        if self._closed:
            return
        self._closed = True
        self._news.set()
        while self._sending is not None:
            await asyncio.gather(self._sending, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()
        self._lose(Unavailable(ErrorCode.STOPPING, "queue was closed"))

    # Fetching

    async def _fetch(self) -> None:
        pause_s = BACKOFF_MIN_S
        while True:
            try:
                wire = None  # until the link is connected
                wire = await self._link.wire()
                await self._fetch_from(self._worker_over(wire))
            except GONE as error:
                self._connected = None
                self._lose(error)
                if wire is None:  # the link has given up
                    raise
                await self._link.lost(wire, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, BACKOFF_MAX_S)
            except BrokerError as error:
                if error.retry_after_ms is None:
                    raise
                await asyncio.sleep(error.retry_after_ms / 1000)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._failure = self._failure or failure_of(task, "the queue")
        self._news.set()

    async def _fetch_from(self, worker: QueueWorker) -> None:
        self._connected = worker
        try:
            while True:
                await self._fetch_once(worker)
        finally:
            await worker.leave()

    async def _fetch_once(self, worker: QueueWorker) -> None:
        space = self._prefetch - len(self._held)
        if space <= 0:
            self._space.clear()
            await self._space.wait()
            return
        try:
            found = await worker.acquire(records_max=space, wait_ms=WAIT_MS)
        except BrokerError as error:
            if error.retry_after_ms is None or isinstance(error, GONE):
                raise
            await asyncio.sleep(error.retry_after_ms / 1000)
        else:
            self._add(found)

    def _add(self, found: Acquisition) -> None:
        self._link.note_response()
        self._lock_s = found.lock_s
        self._is_known.set()
        renew_at = asyncio.get_running_loop().time() + found.lock_s / RENEWALS
        for record, attempt in found.records:
            job = Job(self, record, attempt, renew_at)
            older = self._held.get((record.partition, record.offset))
            if older is not None:  # its lock has expired
                older.is_lost = True
            self._held[record.partition, record.offset] = job
            self._jobs.append(job)
        for partition, offset in found.gaps:
            gap = Job(self, _gap(self._topic, partition, offset), 0, math.inf)
            self._put(gap, Outcome.GAP)
        if found.records:
            self._news.set()

    def _lose(self, error: BrokerError) -> None:
        """Forget all records, because the broker gives them to other workers."""
        lost, self._held = self._held, {}
        self._jobs.clear()
        for job in lost.values():
            job.is_lost = True
        ends, self._ends = self._ends, []
        for end in ends:
            if not end.done.done():
                end.done.set_exception(_lost(error))
        self._space.set()

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        await self._is_known.wait()
        while True:
            await asyncio.sleep(self._lock_s / (2 * RENEWALS))
            now = loop.time()
            for job in list(self._held.values()):
                if job.renew_at <= now and (not job.is_done or job.is_delayed) and not job.is_lost:
                    job.renew_at = now + self._lock_s / RENEWALS
                    self._put(job, Outcome.RENEW)

    # Acknowledging

    async def finish(self, job: Job, outcome: Outcome, delay_s: float = 0.0, reason: str = "") -> None:
        """End a job. Called by its methods."""
        if job.is_done or job.is_lost:
            why = "the job has ended" if job.is_done else "its lock has ended, so another worker gets the record"
            facts = f"topic={self._topic!r} partition={job.record.partition} offset={job.record.offset}"
            raise Conflict(ErrorCode.RECORD_NOT_ACQUIRED, f"{why} {facts}")
        self._check_delay(delay_s)
        reason = reason.encode(errors="replace")[:REASON_BYTES_MAX].decode(errors="ignore")
        job.is_done = True
        if delay_s and not self._stores_delays:
            job.is_delayed = True
            asyncio.get_running_loop().call_later(delay_s, self._release, job)
            return
        await self._put(job, outcome, int(delay_s * 1000), reason)

    def _check_delay(self, delay_s: float) -> None:
        if not 0 <= delay_s <= DELAY_S_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"delay_s must be from 0 to {DELAY_S_MAX} (30 days) got={delay_s}")
        if delay_s > HELD_S_MAX and not self._stores_delays:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"over this protocol, the worker holds a record during its delay, so delay_s must be from 0 to {HELD_S_MAX}"
                f" (use a polywire:// URL for longer delays) got={delay_s}",
            )

    def _release(self, job: Job) -> None:
        """Release a job that this worker has held during its delay."""
        job.is_delayed = False
        if self._held.get((job.record.partition, job.record.offset)) is job:
            self._put(job, Outcome.RELEASE)

    def _put(self, job: Job, outcome: Outcome, delay_ms: int = 0, reason: str = "") -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_seen)
        self._ends.append(_End(job, outcome, delay_ms, reason, done))
        if self._sending is None:
            self._sending = asyncio.ensure_future(self._send())
        return done

    async def _send(self) -> None:
        """Send the acknowledgements that were put in the meantime, until there are none."""
        ends: list[_End] = []
        try:
            await asyncio.sleep(0)  # jobs that end in the same pass of the loop share one request
            while self._ends:
                ends, self._ends = self._ends, []
                await self._send_all(sorted(ends, key=lambda end: (end.job.record.partition, end.job.record.offset)))
        finally:
            self._sending = None
            for end in ends:
                if not end.done.done():  # after an unforeseen exception
                    end.done.set_exception(_lost(Unavailable(ErrorCode.STOPPING, "the request could not be sent")))

    async def _send_all(self, ends: Sequence[_End]) -> None:
        runs: list[AcknowledgedRun] = []
        parts: list[list[tuple[Job, asyncio.Future[None]]]] = []
        last_kind: tuple[int, Outcome, int, str] | None = None
        last = -1
        for job, outcome, delay_ms, reason, done in ends:
            partition, offset = job.record.partition, job.record.offset
            kind = partition, outcome, delay_ms, reason
            if kind == last_kind and offset == last + 1:
                runs[-1] = AcknowledgedRun(partition, runs[-1].first, offset, outcome, delay_ms, reason)
            else:
                runs.append(AcknowledgedRun(partition, offset, offset, outcome, delay_ms, reason))
                parts.append([])
            parts[-1].append((job, done))
            last_kind, last = kind, offset
        for first in range(0, len(runs), _RUNS_MAX):
            sent, jobs = runs[first : first + _RUNS_MAX], parts[first : first + _RUNS_MAX]
            refused = await self._acknowledge(sent, self._freed(sent, jobs))
            for index, part in enumerate(jobs):
                error = refused if isinstance(refused, BrokerError) else refused.get(index)
                for job, done in part:
                    self._ended(job, sent[index].outcome, done, error)

    def _freed(self, runs: Sequence[AcknowledgedRun], jobs: Sequence[Sequence[tuple[Job, Any]]]) -> int:
        """Return how many records to acquire with these acknowledgements, which is 0 while ``_fetch`` acquires some."""
        if len(self._held) < self._prefetch or self._closed:
            return 0
        ended = (job for run, part in zip(runs, jobs, strict=True) if run.outcome != Outcome.RENEW for job, _ in part)
        return sum(self._held.get((job.record.partition, job.record.offset)) is job for job in ended)

    def _ended(self, job: Job, outcome: int, done: asyncio.Future[None], error: BrokerError | None) -> None:
        if outcome != Outcome.RENEW or error is not None:
            job.is_done = True
            if self._held.get((job.record.partition, job.record.offset)) is job:
                del self._held[job.record.partition, job.record.offset]
                self._space.set()
        if not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

    async def _acknowledge(
        self, runs: Sequence[AcknowledgedRun], records_max: int
    ) -> Mapping[int, BrokerError] | BrokerError:
        """Send acknowledgements, and acquire up to ``records_max`` records with the same request."""
        worker = self._connected
        if worker is None:
            return _lost(Unavailable(ErrorCode.UNREACHABLE, "the connection was lost"))
        try:
            if not records_max or not worker.combines:
                return await worker.acknowledge(runs)
            found = await worker.acquire(records_max=records_max, wait_ms=0, runs=runs)
            if worker is self._connected:  # otherwise the records are lost with their connection
                self._add(found)
            return found.refused or {}
        except GONE as error:
            self._lose(error)  # the next request for records fails, too, but maybe later
            return _lost(error)
        except BrokerError as error:
            return error


async def _work(
    job: Job, handler: Callable[[Job], Awaitable[object]], retry_delays_s: Sequence[float], timeout_s: float | None
) -> None:
    try:
        working = handler(job)
        if isawaitable(working):
            await asyncio.wait_for(working, timeout_s)
    except Exception as error:  # whatever fails, the job is retried
        delay_s = retry_delays_s[min(job.attempt, len(retry_delays_s)) - 1]
        log.warning(
            "job failed, and is retried unless this was the last attempt topic=%s partition=%d offset=%d attempt=%d",
            job.record.topic,
            job.record.partition,
            job.record.offset,
            job.attempt,
            exc_info=True,
        )
        if not job.is_done:
            with suppress(BrokerError):
                await job.retry(delay_s=delay_s, reason=repr(error))
        return
    if not isawaitable(working):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"handler must be a coroutine function (async def) got={handler!r}")
    if not job.is_done:
        with suppress(Conflict):  # another worker gets the record
            await job.ack()


def _settings(
    start: str | None, lock_s: float | None, attempts: int | None, dead_letters: str | None, order: str | None
) -> dict[str, str | None]:
    given = {
        AUTO_OFFSET_RESET: start,
        LOCK_DURATION: None if lock_s is None else str(int(lock_s * 1000)),
        DELIVERIES: None if attempts is None else str(attempts),
        DEAD_LETTERS: dead_letters,
        ORDER: order,
    }
    return {name: value for name, value in given.items() if value is not None}


def _gap(topic: str, partition: int, offset: int) -> Record:
    fields = Record(None)._replace(topic=topic, partition=partition, offset=offset)
    assert isinstance(fields, Record), "_replace makes the same class"
    return fields


def _lost(error: BrokerError) -> Conflict:
    return Conflict(
        ErrorCode.RECORD_NOT_ACQUIRED, f"the connection was lost, so another worker gets the record: {error.message}"
    )


def _seen(done: asyncio.Future[None]) -> None:
    """Mark the error of an acknowledgement as seen, because the application may not wait for it."""
    if not done.cancelled():
        done.exception()
