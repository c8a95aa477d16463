"""The blocking version of every protocol client: the same methods, run in a background thread.

Each connection has one thread with an event loop. Calls may come from any thread and run concurrently.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from polywire.client.base import Ability, Membership, PartitionBounds, Produced, TopicInfo, WireClient
from polywire.client.connect import connect as connect_asynchronously
from polywire.client.consume import EARLIEST, Delivered, Start, consume
from polywire.client.notices import log
from polywire.errors import BrokerError, ErrorCode, Invalid, Unavailable
from polywire.records.columns import Record
from polywire.types import Assignor, Level

T = TypeVar("T")

EXIT_S: Final = 10.0
"""How long the end of a program waits for clients that it did not close."""
CANCEL_S: Final = 1.0
"""How long the end of a thread waits for operations that it cancels."""


class LoopThread:
    """A thread that runs an event loop. Calls fail after ``end``, in a fork, and in callbacks, which run in this thread.

    If the program ends before, ``close`` runs in the loop.
    """

    __slots__ = ("_loop", "_process", "_thread", "close")

    def __init__(self, close: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self.close = close
        self._process: Final = os.getpid()
        self._loop: Final = asyncio.new_event_loop()
        self._thread: Final = threading.Thread(target=self._run_forever, name="polywire-client", daemon=True)
        self._thread.start()
        _running.add(self)
        _close_at_the_end()

    @property
    def ended(self) -> bool:
        """Whether the loop has ended, or this process is a fork, which has no such thread."""
        return not self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and return its result or raise its exception.

        Raises Unavailable(STOPPING) after the loop has ended, and Invalid where the call would wait for ever.
        """
        error = self._reason_not_to_run()
        if error is not None:
            work.close()
            raise error
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # the caller was interrupted; cancelling a finished call does nothing

    def _reason_not_to_run(self) -> BrokerError | None:
        if threading.current_thread() is self._thread:
            return Invalid(
                ErrorCode.INVALID_REQUEST,
                "a callback runs in the thread of its client and cannot use its blocking methods (use another thread)",
            )
        if not self.ended:
            return None
        if self._process == os.getpid():
            return Unavailable(ErrorCode.STOPPING, "client was closed")
        return Invalid(
            ErrorCode.INVALID_REQUEST,
            "this process is a fork and cannot use a client of its parent (call connect_sync in each process)",
        )

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def begin_close(self) -> Future[None] | None:
        """Begin to run ``close``. Return None if there is none, or in a fork."""
        if self.ended:
            self._loop.set_exception_handler(lambda _loop, _context: None)  # it reports every task of the loop
            return None
        return asyncio.run_coroutine_threadsafe(self.close(), self._loop) if self.close is not None else None

    def end(self) -> None:
        """Cancel what still runs in the loop, and stop it and its thread."""
        _running.discard(self)
        self.run(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run_forever(self) -> None:
        while True:
            try:
                return self._loop.run_forever()
            except SystemExit as error:
                message = "a callback cannot end the program, because it runs in the thread of its client"
                self._loop.call_exception_handler({"message": message, "exception": error})

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)
        await self._loop.shutdown_asyncgens()


_running: Final[set[LoopThread]] = set()


def _close_at_the_end() -> None:
    """Let the end of a process of ``multiprocessing`` call ``_close_all``. If it is a fork, ``atexit`` does not."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None and os.getpid() not in _registered:
        from multiprocessing.util import Finalize

        _registered.add(os.getpid())
        Finalize(None, _close_all, exitpriority=0)


_registered: Final[set[int]] = set()


@atexit.register
def _close_all() -> None:
    """Close the clients that the program did not close, so that the records of their producers are stored."""
    closing = [(thread, thread.begin_close()) for thread in tuple(_running)]
    end = time.monotonic() + EXIT_S
    for thread, closed in closing:
        if closed is None:
            continue
        try:
            closed.result(max(0.0, end - time.monotonic()))
        except TimeoutError:
            log.warning("the program ended, and a client could not be closed in time seconds=%d", EXIT_S)
            closed.cancel()
        except (BrokerError, OSError) as error:  # nothing can handle it any more
            log.warning("the program ended, and a client was closed with an error reason=%s", error)
        thread.end()


class SyncClient:
    """A client with blocking methods. Close it, or use it in a ``with``. Calls may come from any thread.

    Example:
        with connect("127.0.0.1:9555") as client:
            client.produce("orders", [Record(b"hello", key=b"a")])
            for delivered in client.consume("orders", group="billing"):
                print(delivered.value)
    """

    __slots__ = ("_client", "_thread")

    def __init__(self, url: str) -> None:
        """Connect to ``url``, like ``client.connect.connect``. Raises Invalid, Unavailable, Denied(LOGIN_FAILED)."""
        self._thread: Final = LoopThread()
        with ExitStack() as undo:
            undo.callback(self._thread.end)
            self._client: Final[WireClient] = self._run(connect_asynchronously(url))
            undo.pop_all()
        self._thread.close = self._client.close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def abilities(self) -> frozenset[Ability]:
        """The features that this protocol supports."""
        return self._client.abilities

    def close(self) -> None:
        """Close the connection and end the thread. A second call does nothing."""
        if not self._thread.ended:
            self._run(self._client.close())
            self._thread.end()

    def create_topic(self, topic: str, partition_count: int) -> None:
        """Create a topic. See ``WireClient.create_topic``. Raises Conflict(TOPIC_EXISTS), Invalid."""
        self._run(self._client.create_topic(topic, partition_count))

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records. Raises Missing(TOPIC_MISSING)."""
        self._run(self._client.delete_topic(topic))

    def topics(self) -> list[TopicInfo]:
        """Return the topics that this user may see."""
        return self._run(self._client.topics())

    def bounds(self, topic: str) -> list[PartitionBounds]:
        """Return the first and next offset of each partition, in order of their numbers. Raises Missing(TOPIC_MISSING)."""
        return self._run(self._client.bounds(topic))

    def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Return the first offset appended at or after a time, or the next offset. See ``WireClient.offset_at``."""
        return self._run(self._client.offset_at(topic, partition, time_us))

    def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records in order, and return their offsets. See ``WireClient.produce``.

        Args:
            topic: full name.
            records: the records.
            partition: number of the partition. With None, the key of each record selects its partition.
            level: durability of an acknowledged record.

        Raises:
            Unavailable: the connection was lost; some or all records may be stored.
            Busy: a limit is reached, or the disk is full.
        """
        return self._run(self._client.produce(topic, records, partition=partition, level=level))

    def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = 10_000, wait_ms: int = 0
    ) -> list[Record]:
        """Return up to ``records_max`` records from an offset on. See ``WireClient.fetch``.

        Waits up to ``wait_ms`` milliseconds for the first record, if the protocol supports it. Raises
        Missing(TOPIC_MISSING, OFFSET_OUT_OF_RANGE).
        """
        return self._run(self._client.fetch(topic, partition, offset, records_max=records_max, wait_ms=wait_ms))

    def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Join a group, and return the assignment. See ``WireClient.join``."""
        return self._run(self._client.join(group, topic, member, assignor=assignor))

    def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Send a heartbeat, which is necessary every few seconds. See ``WireClient.heartbeat``.

        Raises Conflict(GENERATION_STALE) if the group has changed: join again.
        """
        return self._run(self._client.heartbeat(group, topic, member, generation))

    def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Leave a group. See ``WireClient.leave``."""
        self._run(self._client.leave(group, topic, member, generation))

    def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Commit a group's next offset to read. See ``WireClient.commit``."""
        self._run(self._client.commit(group, topic, partition, offset, member=member, generation=generation))

    def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return the committed offset of a group, or None if nothing was committed. Some protocols report 0 instead."""
        return self._run(self._client.position(group, topic, partition))

    def consume(
        self, topic: str, *, group: str | None = None, member: str | None = None, start: Start = EARLIEST
    ) -> Iterator[Delivered]:
        """Return an iterator over a topic's records that never ends. Close it to stop. See ``client.consume.consume``.

        Args:
            topic: full name.
            group: name of the group to join; None reads all partitions and commits nothing.
            member: name of the member; None generates one.
            start: where to start without a committed offset: ``EARLIEST``, ``LATEST``, or microseconds since 1970.
        """
        records = consume(self._client, topic, group=group, member=member, start=start)
        try:
            while True:
                yield self._run(_next(records))
        finally:
            if not self._thread.ended:
                self._run(records.aclose())

    def run(self, work: Callable[[WireClient], Coroutine[Any, Any, T]]) -> T:
        """Call a function with the asynchronous client in the connection's thread, and return its result."""
        return self._run(work(self._client))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)


def connect(url: str) -> SyncClient:
    """Return a connected blocking client for a URL.

    See ``client.connect.connect``. Raises Invalid, Unavailable, Denied(LOGIN_FAILED).
    """
    return SyncClient(url)


async def _next(records: AsyncIterator[Delivered]) -> Delivered:
    return await anext(records)
