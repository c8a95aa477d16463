"""The blocking twin of every asynchronous client: the same methods, run on a thread of its own.

Promises: one thread and one loop per connection; calls may come from any thread and are carried out concurrently. Must not know: any wire.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from polywire.client.base import Ability, Membership, PartitionBounds, Produced, TopicInfo, WireClient
from polywire.client.connect import connect as connect_asynchronously
from polywire.client.consume import EARLIEST, Delivered, Start, consume
from polywire.client.loop_thread import LoopThread
from polywire.records.columns import Record
from polywire.types import Assignor, Level

T = TypeVar("T")


class SyncClient:
    """A client whose methods block. Close it, or use it in a ``with``. Calls may come from any thread.

    Example:
        with connect("127.0.0.1:9555") as client:
            client.produce("orders", [Record(b"hello", key=b"a")])
            for delivered in client.consume("orders", group="billing"):
                print(delivered.value)
    """

    __slots__ = ("_client", "_thread")

    def __init__(self, url: str) -> None:
        """Connect to ``url``, as ``client.connect.connect`` does. Raises Invalid, Unavailable, Denied(LOGIN_FAILED)."""
        self._thread: Final = LoopThread()
        with ExitStack() as undo:
            undo.callback(self._thread.end)
            self._client: Final[WireClient] = self._run(connect_asynchronously(url))
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
        if not self._thread.ended:
            self._run(self._client.close())
            self._thread.end()

    def create_topic(self, topic: str, partition_count: int) -> None:
        """Make a topic; see ``WireClient.create_topic``. Raises Conflict(TOPIC_EXISTS), Invalid."""
        self._run(self._client.create_topic(topic, partition_count))

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records. Raises Missing(TOPIC_MISSING)."""
        self._run(self._client.delete_topic(topic))

    def topics(self) -> list[TopicInfo]:
        """Return the topics this peer may see."""
        return self._run(self._client.topics())

    def bounds(self, topic: str) -> list[PartitionBounds]:
        """Return where each partition of a topic begins and ends, by number. Raises Missing(TOPIC_MISSING)."""
        return self._run(self._client.bounds(topic))

    def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Return the first offset appended at a time (microseconds since 1970) or after it, else the next offset."""
        return self._run(self._client.offset_at(topic, partition, time_us))

    def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records in order, and return where each went, in their order; see ``WireClient.produce``.

        Args:
            topic: full name.
            records: what to append.
            partition: where all of them go; None: chosen for each by its key.
            level: what the acknowledgement means.

        Raises:
            Unavailable: the connection was lost; nobody knows what was stored.
            Busy: over a limit, or the disk is full.
        """
        return self._run(self._client.produce(topic, records, partition=partition, level=level))

    def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = 10_000, wait_ms: int = 0
    ) -> list[Record]:
        """Return up to ``records_max`` records from an offset on; see ``WireClient.fetch``.

        Waits up to ``wait_ms`` milliseconds for the first one where the wire can. Raises Missing(TOPIC_MISSING, OFFSET_OUT_OF_RANGE).
        """
        return self._run(self._client.fetch(topic, partition, offset, records_max=records_max, wait_ms=wait_ms))

    def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Become a member of a group, and return the partitions given to it; see ``WireClient.join``."""
        return self._run(self._client.join(group, topic, member, assignor=assignor))

    def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Stay a member, at least every few seconds. Raises Conflict(GENERATION_STALE) when the group has changed: join again."""
        return self._run(self._client.heartbeat(group, topic, member, generation))

    def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Give up one's place in a group; others get its partitions."""
        self._run(self._client.leave(group, topic, member, generation))

    def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Store a group's next offset to read, checked against the group where ``member`` is given; see ``WireClient.commit``."""
        self._run(self._client.commit(group, topic, partition, offset, member=member, generation=generation))

    def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return a group's next offset to read, None when it never committed (0 where the wire cannot tell)."""
        return self._run(self._client.position(group, topic, partition))

    def consume(
        self, topic: str, *, group: str | None = None, member: str | None = None, start: Start = EARLIEST
    ) -> Iterator[Delivered]:
        """Return an iterator over a topic's records as they come, for ever; close it to stop. See ``client.consume.consume``.

        Args:
            topic: full name.
            group: whom to share the topic with, and whose positions to go on at; None: read everything alone, and store nothing.
            member: one's name in the group; None: a new one.
            start: where to begin without a position: ``EARLIEST``, ``LATEST``, or microseconds since 1970.
        """
        records = consume(self._client, topic, group=group, member=member, start=start)
        try:
            while True:
                yield self._run(_next(records))
        finally:
            if not self._thread.ended:
                self._run(records.aclose())

    def run(self, work: Callable[[WireClient], Coroutine[Any, Any, T]]) -> T:
        """Run something on the connection's thread, given the asynchronous client, and return its result. Raises what it raises."""
        return self._run(work(self._client))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)


def connect(url: str) -> SyncClient:
    """Return a connected blocking client for a URL; see ``client.connect.connect``. Raises Invalid, Unavailable, Denied(LOGIN_FAILED)."""
    return SyncClient(url)


async def _next(records: AsyncIterator[Delivered]) -> Delivered:
    return await anext(records)
