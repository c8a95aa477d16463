"""Consume a topic through any client: fetch partitions concurrently, join groups, and commit offsets.

* Records of a partition arrive in order.
* In a group, an offset is committed only after its records were returned and the next ones were requested. After a
  crash, some records are delivered again. None is skipped.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from polywire.client.base import Ability, WireClient, fetch_wait_ms
from polywire.errors import Conflict, Missing
from polywire.records.columns import Record

WAIT_MS: Final = 1000  # time limit of one long poll, and the longest delay until the loss of a partition is noticed
POLL_INTERVAL_S: Final = 0.05  # pause between fetches over protocols without long polls
HEARTBEAT_S: Final = 3.0  # brokers remove a member after 10 s without a heartbeat
COMMIT_INTERVAL_S: Final = 1.0
RECORDS_MAX: Final = 1000


class Bound(Enum):
    """Where to start if there is no committed offset: at the first record, or after the last one."""

    EARLIEST = "earliest"
    LATEST = "latest"


EARLIEST: Final = Bound.EARLIEST
LATEST: Final = Bound.LATEST
Start = Bound | int
"""``EARLIEST``, ``LATEST``, or a time in microseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A record with its topic and partition."""

    topic: str
    partition: int
    record: Record

    @property
    def value(self) -> bytes | None:
        """The record's value, or None."""
        return self.record.value

    @property
    def key(self) -> bytes | None:
        """The record's key, or None."""
        return self.record.key

    @property
    def offset(self) -> int:
        """The record's offset in its partition."""
        return self.record.offset


async def consume(
    client: WireClient, topic: str, *, group: str | None = None, member: str | None = None, start: Start = EARLIEST
) -> AsyncGenerator[Delivered, None]:
    """Yield a topic's records forever. Close the iterator to stop.

    Records of one partition arrive in order. With a group, the offsets of returned records are committed about once a
    second and on closing. After a crash, some records are delivered again. None is skipped.

    Args:
        client: client of any protocol; without ``Ability.GROUPS``, each consumer reads all partitions.
        topic: full name.
        group: name of the group to join; None reads all partitions and commits nothing.
        member: name of the member; None generates one.
        start: where to start without a committed offset: ``EARLIEST``, ``LATEST``, or microseconds since 1970.

    Raises:
        Missing: TOPIC_MISSING, or OFFSET_OUT_OF_RANGE if the committed offset is below the first retained record.
        Unavailable: the connection was lost.
    """
    consumer = _Consumer(client, topic, group, member or f"polywire-{secrets.token_hex(6)}", start)
    try:
        await consumer.begin()
        while True:
            for delivered in await consumer.next_records():
                consumer.hand_out(delivered)
                yield delivered
            await consumer.keep_up()
    finally:
        await consumer.end()


class _Consumer:
    """One ``consume`` call. Each partition has at most one fetch at a time."""

    def __init__(self, client: WireClient, topic: str, group: str | None, member: str, start: Start) -> None:
        self._client: Final = client
        self._topic: Final = topic
        self._group: Final = group
        self._member: Final = member
        self._start: Final = start
        self._grouped: Final = group is not None and Ability.GROUPS in client.abilities
        self._wait_ms = 0
        self._generation = -1
        self._fetches: dict[int, asyncio.Task[list[Record]]] = {}
        self._reached: dict[int, int] = {}  # offset after the last returned record, by partition
        self._stored: dict[int, int] = {}  # last committed offsets
        self._heard_at = self._stored_at = time.monotonic()

    async def begin(self) -> None:
        if self._grouped:
            await self._join()
        else:
            await self._take(range(await self._partition_count()))

    async def next_records(self) -> list[Delivered]:
        """Return records of the partitions that respond first.

        The result is empty if none responds in time, so that the caller can send heartbeats.
        """
        for partition in self._reached:
            if partition not in self._fetches:
                self._fetches[partition] = asyncio.ensure_future(self._fetch(partition))
        if not self._fetches:
            await asyncio.sleep(POLL_INTERVAL_S)
            return []
        done, _ = await asyncio.wait(self._fetches.values(), timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
        found: list[Delivered] = []
        for partition in [partition for partition, task in self._fetches.items() if task in done]:
            records = self._fetches.pop(partition).result()
            found += [Delivered(self._topic, partition, record) for record in records]
        if not found and not self._wait_ms:
            await asyncio.sleep(POLL_INTERVAL_S)
        return found

    def hand_out(self, delivered: Delivered) -> None:
        self._reached[delivered.partition] = delivered.offset + 1

    async def keep_up(self) -> None:
        now = time.monotonic()
        if self._group is not None and now - self._stored_at >= COMMIT_INTERVAL_S:
            await self._store()
        if self._grouped and now - self._heard_at >= HEARTBEAT_S:
            self._heard_at = now
            try:
                await self._client.heartbeat(self._group or "", self._topic, self._member, self._generation)
            except (Conflict, Missing):
                await self._join()

    async def end(self) -> None:
        """Stop fetching, commit offsets, and leave the group. The connection stays open."""
        await self._stop()
        if self._group is None:
            return
        try:
            await self._store()
            if self._grouped and self._generation >= 0:
                await self._client.leave(self._group, self._topic, self._member, self._generation)
        except (Conflict, Missing):
            # The member was removed from the group. The new owner begins at the last committed offset.
            return

    async def _stop(self) -> None:
        tasks = list(self._fetches.values())
        self._fetches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, partition: int) -> list[Record]:
        return await self._client.fetch(
            self._topic, partition, self._reached[partition], records_max=RECORDS_MAX, wait_ms=self._wait_ms
        )

    async def _join(self) -> None:
        await self._stop()
        membership = await self._client.join(self._group or "", self._topic, self._member)
        self._generation = membership.generation
        self._heard_at = time.monotonic()
        await self._take(membership.partitions)

    async def _take(self, partitions: range | tuple[int, ...]) -> None:
        """Read exactly these partitions, from the committed offsets on.

        A start at the end counts as a position to commit. Otherwise another member would begin at the new end, after
        records that this one has returned but not committed.
        """
        reached: dict[int, int] = {}
        self._stored = {}
        for partition in partitions:
            position = None
            if self._group is not None and Ability.POSITIONS in self._client.abilities:
                position = await self._client.position(self._group, self._topic, partition)
            reached[partition] = await self._first_offset(partition) if position is None else position
            if position is not None or self._start is not LATEST:
                self._stored[partition] = reached[partition]
        self._reached = reached
        self._wait_ms = fetch_wait_ms(self._client.abilities, len(reached), WAIT_MS)

    async def _partition_count(self) -> int:
        if Ability.BOUNDS in self._client.abilities:
            return len(await self._client.bounds(self._topic))
        [count] = [topic.partition_count for topic in await self._client.topics() if topic.name == self._topic]
        return count

    async def _first_offset(self, partition: int) -> int:
        if isinstance(self._start, int):
            return await self._client.offset_at(self._topic, partition, self._start)
        if Ability.BOUNDS not in self._client.abilities:
            return 0
        bounds = (await self._client.bounds(self._topic))[partition]
        return bounds.first_offset if self._start is EARLIEST else bounds.next_offset

    async def _store(self) -> None:
        self._stored_at = time.monotonic()
        for partition, offset in self._reached.items():
            if self._stored.get(partition) == offset:
                continue
            member, generation = (self._member, self._generation) if self._grouped else ("", -1)
            try:
                await self._client.commit(
                    self._group or "", self._topic, partition, offset, member=member, generation=generation
                )
            except Conflict:
                # The group has changed. The partition's new owner begins at the last committed offset.
                await self._join()
                return
            self._stored[partition] = offset
