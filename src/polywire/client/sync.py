"""The blocking twin of every asynchronous client: the same methods, run on a thread of its own.

Promises: one thread and one loop per connection; calls may come from any thread and are carried out concurrently. Must not know: any wire.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from polywire.client.base import Ability, Client, Membership, PartitionBounds, Produced, TopicInfo
from polywire.client.connect import connect as connect_asynchronously
from polywire.client.consume import EARLIEST, Delivered, Start, consume
from polywire.records.columns import Record
from polywire.types import Assignor, Level

T = TypeVar("T")


class SyncClient:
    """A client whose methods block. Close it, or use it in a ``with``."""

    __slots__ = ("_client", "_loop", "_thread")

    def __init__(self, url: str) -> None:
        """Connect. Raises what ``connect`` raises."""
        self._loop: Final = asyncio.new_event_loop()
        self._thread: Final = threading.Thread(target=self._loop.run_forever, name="polywire-client", daemon=True)
        self._thread.start()
        with ExitStack() as undo:
            undo.callback(self._stop)
            self._client: Final[Client] = self._run(connect_asynchronously(url))
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def abilities(self) -> frozenset[Ability]:
        """What this wire can do."""
        return self._client.abilities

    def close(self) -> None:
        """Close the connection and end the thread; calling it again does nothing."""
        if not self._loop.is_closed():
            self._run(self._client.close())
            self._stop()

    def create_topic(self, topic: str, partition_count: int) -> None:
        """See ``Client``, as for all that follows."""
        self._run(self._client.create_topic(topic, partition_count))

    def delete_topic(self, topic: str) -> None:
        self._run(self._client.delete_topic(topic))

    def topics(self) -> list[TopicInfo]:
        return self._run(self._client.topics())

    def bounds(self, topic: str) -> list[PartitionBounds]:
        return self._run(self._client.bounds(topic))

    def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        return self._run(self._client.offset_at(topic, partition, time_us))

    def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        return self._run(self._client.produce(topic, records, partition=partition, level=level))

    def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = 10_000, wait_ms: int = 0
    ) -> list[Record]:
        return self._run(self._client.fetch(topic, partition, offset, records_max=records_max, wait_ms=wait_ms))

    def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        return self._run(self._client.join(group, topic, member, assignor=assignor))

    def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        return self._run(self._client.heartbeat(group, topic, member, generation))

    def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        self._run(self._client.leave(group, topic, member, generation))

    def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        self._run(self._client.commit(group, topic, partition, offset, member=member, generation=generation))

    def position(self, group: str, topic: str, partition: int) -> int | None:
        return self._run(self._client.position(group, topic, partition))

    def consume(
        self, topic: str, *, group: str | None = None, member: str | None = None, start: Start = EARLIEST
    ) -> Iterator[Delivered]:
        """Records of a topic as they come, for ever; see ``client.consume``. Close the iterator to stop."""
        records = consume(self._client, topic, group=group, member=member, start=start)
        try:
            while True:
                yield self._run(_next(records))
        finally:
            if not self._loop.is_closed():
                self._run(records.aclose())

    def run(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Run something on the connection's thread, given the asynchronous client, and wait for it."""
        return self._run(work(self._client))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            # An interrupted caller must not leave its request running; one that is done cannot be cancelled.
            future.cancel()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        with suppress(RuntimeError):
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def connect(url: str) -> SyncClient:
    """A connected blocking client; see ``client.connect.connect``."""
    return SyncClient(url)


async def _next(records: AsyncIterator[Delivered]) -> Delivered:
    return await anext(records)
