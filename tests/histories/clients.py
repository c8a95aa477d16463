"""Clients of several protocols that record requests and responses: producers, readers, members of groups.

A client never requests the same thing twice, unless it is idempotent. After a lost response it continues with something
else, so that a late effect can be distinguished from a wrong one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Final

from polywire.client.base import Membership, WireClient
from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, Busy, Conflict, Invalid, Missing, NotOwner, Unavailable
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.histories.history import (
    Assignment,
    Commit,
    Fetch,
    History,
    Outcome,
    Place,
    Position,
    Produce,
    Shared,
)

Url = Callable[[str], str]
PAUSE_S: Final = 0.04  # by default, between two requests of one client
CONNECT_S: Final = 0.15  # between two attempts to connect
READ_MAX: Final = 200
READS_MAX: Final = 10  # attempts to read everything at the end
READ_AGAIN_S: Final = 2.0  # between two of them
ANSWER_S: Final = 60.0  # every request is answered, or its connection ends, by then
LOST: Final = (Unavailable, NotOwner, OSError)  # a superseded leader leaves the outcome unknown, too
STALE: Final = (Conflict, Missing)
now = time.monotonic_ns


class Client:
    """A client with one connection, which reconnects until it is done. ``answers`` counts responses."""

    def __init__(self, name: str, wire: str, url: Url, history: History) -> None:
        self.name = name
        self.wire: Final = wire
        self.running = True
        self.answers = 0
        self.pause_s = PAUSE_S
        self.history: Final = history
        # Protocols with few error codes use one for a full disk, a failed one and a wrong request; ours says whether
        # anything was done.
        self.vague: Final = (Busy,) if wire == "polywire" else (Busy, Invalid)
        self._url: Final = url

    async def run(self) -> None:
        """Work until ``running`` is cleared."""
        while self.running:
            try:
                client = await connect(self._url(self.wire))
            except LOST:
                await asyncio.sleep(CONNECT_S)
                continue
            try:
                await self._use(client)
            finally:
                await client.close()

    async def _use(self, client: WireClient) -> None:
        with suppress(*LOST):
            while self.running:
                async with asyncio.timeout(ANSWER_S):
                    await self.work(client)
                self.answers += 1

    async def work(self, client: WireClient) -> None:
        """Make one request."""
        raise AssertionError("each client has its own work")


class Producer(Client):
    """Sends numbered values, one request after the other."""

    def __init__(
        self, name: str, wire: str, url: Url, history: History, *, topic: str, level: Level, size: int
    ) -> None:
        super().__init__(name, wire, url, history)
        self._topic: Final = topic
        self._level: Final = level
        self.is_durable = level is not Level.MEMORY  # whether what is acknowledged survives the faults of this history
        self._size: Final = size
        self._numbers: Final = count()

    async def work(self, client: WireClient) -> None:
        """Send one request and record its outcome."""
        values = tuple(f"{self.name}:{next(self._numbers):06}".encode() for _ in range(self._size))
        begun, outcome = now(), Outcome.UNKNOWN
        places: tuple[Place, ...] = ()
        try:
            records = [Record(value, key=self.name.encode()) for value in values]
            reported = await client.produce(self._topic, records, level=self._level)
            outcome = Outcome.DONE
            places = tuple(Place(self._topic, one.partition, one.offset) for one in reported)
        except self.vague:
            outcome = Outcome.REFUSED if self.wire == "polywire" else Outcome.UNKNOWN
            await asyncio.sleep(self.pause_s)
        finally:
            self.history.events.append(
                Produce(self.name, begun, now(), self._topic, values, outcome, places, durable=self.is_durable)
            )
        await asyncio.sleep(self.pause_s)


class IdempotentProducer(Client):
    """Repeats each batch unchanged until it is acknowledged."""

    def __init__(self, name: str, url: Url, history: History, *, topic: str, partition: int, size: int) -> None:
        super().__init__(name, "polywire", url, history)
        self._topic: Final = topic
        self._partition: Final = partition
        self._size: Final = size
        self._next = 0
        self._begun = 0

    async def work(self, client: WireClient) -> None:
        """Send one batch, for the first time or again."""
        assert isinstance(client, PolywireClient)
        numbers = range(self._next, self._next + self._size)
        values = tuple(f"{self.name}:{number:06}".encode() for number in numbers)
        records = [Record(value) for value in values]
        batch = from_records(records, producer_id=self.name.encode(), producer_epoch=0, base_sequence=numbers.start)
        self._begun = self._begun or now()
        with suppress(*self.vague):
            reported = await client.produce_batch(self._topic, self._partition, batch)
            places = tuple(Place(self._topic, one.partition, one.offset) for one in reported)
            self.history.events.append(
                Produce(self.name, self._begun, now(), self._topic, values, Outcome.DONE, places)
            )
            self._begun, self._next = 0, numbers.stop
        await asyncio.sleep(self.pause_s)

    def in_doubt(self) -> None:
        """Record the last unacknowledged batch at the end."""
        if self._begun:
            values = tuple(f"{self.name}:{number:06}".encode() for number in range(self._next, self._next + self._size))
            self.history.events.append(Produce(self.name, self._begun, now(), self._topic, values, Outcome.UNKNOWN))


class Reader(Client):
    """Reads every partition of a topic to its end, repeatedly."""

    def __init__(self, name: str, wire: str, url: Url, history: History, *, topic: str, partitions: int) -> None:
        super().__init__(name, wire, url, history)
        self._topic: Final = topic
        self._next: Final = [0] * partitions

    async def work(self, client: WireClient) -> None:
        """Read once from each partition."""
        for partition, offset in enumerate(self._next):
            begun = now()
            with suppress(*self.vague):
                records = await client.fetch(self._topic, partition, offset, records_max=READ_MAX)
                self._next[partition] += len(records)
                if records:
                    self.history.events.append(_shown(self.name, begun, self._topic, partition, offset, records))
        await asyncio.sleep(self.pause_s)


class GroupMember(Client):
    """Reads its assigned partitions from the group's offsets, and commits.

    After a request with unknown outcome it leaves and returns under another name, which starts a generation: requests
    in flight are stale then.
    """

    def __init__(self, name: str, wire: str, url: Url, history: History, *, group: str, topic: str) -> None:
        super().__init__(f"{name}.0", wire, url, history)
        self._base: Final = name
        self._lives: Final = count(1)
        self._group: Final = group
        self._topic: Final = topic
        self._was = ""

    async def _use(self, client: WireClient) -> None:
        try:
            with suppress(*LOST):
                await self._leave(client)
                await self._come_and_go(client)
        finally:
            self._was, self.name = self._was or self.name, f"{self._base}.{next(self._lives)}"

    async def _come_and_go(self, client: WireClient) -> None:
        while self.running:
            with suppress(*STALE, *self.vague):
                await self._be_member(client)
            await asyncio.sleep(self.pause_s)

    async def _leave(self, client: WireClient) -> None:
        """Leave as the member from before the connection was lost."""
        if self._was:
            with suppress(*STALE, *self.vague):
                again = await client.join(self._group, self._topic, self._was)
                await client.leave(self._group, self._topic, self._was, again.generation)
        self._was = ""

    async def _be_member(self, client: WireClient) -> None:
        """Join, and work until the group changes."""
        begun = now()
        mine = self._reported(begun, await client.join(self._group, self._topic, self.name))
        while self.running:
            for partition in mine.partitions:
                async with asyncio.timeout(ANSWER_S):
                    await self._read_and_commit(client, partition, mine.generation)
            begun = now()
            mine = self._reported(begun, await client.heartbeat(self._group, self._topic, self.name, mine.generation))
            await asyncio.sleep(self.pause_s)

    def _reported(self, begun: int, mine: Membership) -> Membership:
        self.history.events.append(
            Assignment(self.name, begun, now(), self._group, self._topic, mine.generation, mine.partitions)
        )
        self.answers += 1
        return mine

    async def _read_and_commit(self, client: WireClient, partition: int, generation: int) -> None:
        shared = Shared(self._group, self._topic, partition)
        begun = now()
        offset = await client.position(*shared)
        self.history.events.append(Position(self.name, begun, now(), shared, offset))
        begun, offset = now(), offset or 0
        records = await client.fetch(self._topic, partition, offset, records_max=READ_MAX)
        if not records:
            return
        event = _shown(self.name, begun, self._topic, partition, offset, records, member_of=self._group)
        self.history.events.append(event)
        begun, outcome, after = now(), Outcome.UNKNOWN, records[-1].offset + 1
        try:
            await client.commit(*shared, after, member=self.name, generation=generation)
            outcome = Outcome.DONE
        except STALE:
            outcome = Outcome.REFUSED
            raise
        finally:
            self.history.events.append(Commit(self.name, begun, now(), shared, after, generation, outcome))


def _shown(
    who: str, begun: int, topic: str, partition: int, offset: int, records: list[Record], *, member_of: str = ""
) -> Fetch:
    offsets = tuple(record.offset for record in records)
    values = tuple(record.value or b"" for record in records)
    return Fetch(who, begun, now(), Place(topic, partition, offset), offsets, values, member_of)


async def read_everything(url: str, topics: dict[str, int], groups: dict[str, str], history: History) -> None:
    """Return the final content: all records of the topics, and the offsets of groups.

    Everything is read again after a lost connection: on a busy machine, a leader may resign without a fault.
    """
    for attempt in range(1, READS_MAX + 1):
        try:
            return await _read_everything(url, topics, groups, history)
        except LOST as error:
            if attempt == READS_MAX:
                raise AssertionError(f"the final read failed {READS_MAX} times") from error
        await asyncio.sleep(READ_AGAIN_S)


async def _read_everything(url: str, topics: dict[str, int], groups: dict[str, str], history: History) -> None:
    client = await connect(url)
    try:
        for topic, partitions in topics.items():
            for partition in range(partitions):
                history.stored[topic, partition] = await _all_of(client, topic, partition)
        for group, topic in groups.items():
            for partition in range(topics[topic]):
                shared = Shared(group, topic, partition)
                history.positions[shared] = await client.position(*shared)
    finally:
        await client.close()


async def _all_of(client: WireClient, topic: str, partition: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    try:
        while records := await client.fetch(topic, partition, len(found)):
            found += [(record.offset, record.value or b"") for record in records]
    except LOST:
        raise
    except BrokerError as error:
        raise AssertionError(f"{topic}/{partition} cannot be read at {len(found)}") from error
    return found
