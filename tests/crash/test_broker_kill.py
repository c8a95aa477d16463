"""``kill -9`` of a real broker while clients produce: acknowledged records are stored once and in order.

Each producer sends numbered values to its own partition, one request at a time, and records what was acknowledged. A
request in flight at a kill may be stored or not: the producer then continues with the next number.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from polywire.client.address import split_address
from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, ErrorCode
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.broker_process import BrokerProcess

KILLS = 6
PRODUCERS = 3
TOPIC = "numbers"


@dataclass(slots=True)
class Producer:
    """The numbered values of one client, and the offsets that the broker acknowledged."""

    url: Callable[[], str]
    key: bytes
    level: Level
    batch: int
    next_number: int = 0
    acknowledged: dict[int, tuple[int, int]] = field(default_factory=dict)
    running: bool = True

    @property
    def done(self) -> int:
        """Return how many records are acknowledged."""
        return len(self.acknowledged)

    async def run(self) -> None:
        while self.running:
            try:
                client = await connect(self.url())
            except (BrokerError, OSError):
                await asyncio.sleep(0.02)
                continue
            try:
                while self.running:
                    await self._produce_once(client)
            except (BrokerError, OSError):
                await asyncio.sleep(0.02)
            finally:
                await client.close()

    async def _produce_once(self, client: WireClient) -> None:
        numbers = range(self.next_number, self.next_number + self.batch)
        self.next_number = numbers.stop
        records = [Record(value=b"%s-%d" % (self.key, number), key=self.key) for number in numbers]
        places = await client.produce(TOPIC, records, level=self.level)
        for number, place in zip(numbers, places, strict=True):
            self.acknowledged[number] = (place.partition, place.offset)


@pytest.mark.parametrize(
    ("wire", "level"),
    [("flux", Level.WRITTEN), ("polywire", Level.WRITTEN), ("polywire", Level.SYNCED)],
    ids=lambda value: value.name.lower() if isinstance(value, Level) else value,
)
def test_killed_while_producing(tmp_path: Path, wire: str, level: Level) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        producers = [
            Producer(lambda: broker.url(wire), b"p%d" % number, level, batch=1 + 20 * (number % 2))
            for number in range(PRODUCERS)
        ]
        asyncio.run(_produce_and_kill(broker, producers))
        assert asyncio.run(check(broker.url("polywire"), producers)) > 0
        assert broker.stop() == 0, broker.log_text()


def test_an_idempotent_producer_retries_until_acknowledged(tmp_path: Path) -> None:
    """Requests in flight at a kill are sent again unchanged: every record is stored exactly once."""
    with BrokerProcess(tmp_path / "data") as broker:
        producers = [RepeatingProducer(lambda: broker.url("polywire"), b"p%d" % number) for number in range(PRODUCERS)]
        asyncio.run(_produce_and_kill(broker, producers))
        for producer in producers:
            stored = asyncio.run(_read_all(broker.url("polywire"), producer.topic))
            assert [stored[place] for place in sorted(stored)] == [b"%d" % n for n in range(producer.next_number)]
        assert broker.stop() == 0, broker.log_text()


@dataclass(slots=True)
class RepeatingProducer:
    """A producer with an id that retries each batch until it is acknowledged. owed: one is pending."""

    url: Callable[[], str]
    id: bytes
    next_number: int = 0
    running: bool = True
    owed: bool = False

    @property
    def done(self) -> int:
        """Return how many records are acknowledged."""
        return self.next_number

    @property
    def topic(self) -> str:
        return f"of-{self.id.decode()}"

    async def run(self) -> None:
        while self.running or self.owed:
            try:
                client = await PolywireClient.open(*split_address(self.url().partition("://")[2]))
            except BrokerError:
                await asyncio.sleep(0.02)
                continue
            try:
                while self.running or self.owed:
                    await self._produce_once(client)
            except BrokerError as error:
                if error.code is not ErrorCode.UNREACHABLE:  # only a lost connection is a reason to retry
                    raise
            finally:
                await client.close()

    async def _produce_once(self, client: PolywireClient) -> None:
        self.owed = True
        numbers = range(self.next_number, self.next_number + 7)
        records = [Record(value=b"%d" % number) for number in numbers]
        batch = from_records(records, producer_id=self.id, producer_epoch=0, base_sequence=numbers.start)
        places = await client.produce_batch(self.topic, 0, batch, create=True)
        assert [place.offset for place in places] == list(numbers)
        self.next_number = numbers.stop
        self.owed = False


STARTS = 9


def test_records_of_many_starts_are_read_together(tmp_path: Path) -> None:
    """Every kill leaves a separate segment; one read covers all of them."""
    with BrokerProcess(tmp_path / "data") as broker:
        for start in range(STARTS):
            asyncio.run(_produce_sixty(broker.url("polywire"), start))
            broker.kill()
            broker.start()
        stored = asyncio.run(_read_all(broker.url("polywire"), TOPIC))
        values = [stored[place] for place in sorted(stored)]
        assert values == [b"%d-%d" % (start, number) for start in range(STARTS) for number in range(60)]
        assert broker.stop() == 0, broker.log_text()


async def _produce_sixty(url: str, start: int) -> None:
    """Send one request each, so that a segment holds many small batches."""
    client = await connect(url)
    for number in range(60):
        await client.produce(TOPIC, [Record(value=b"%d-%d" % (start, number), key=b"k")])
    await client.close()


async def _produce_and_kill(broker: BrokerProcess, producers: Sequence[Producer] | Sequence[RepeatingProducer]) -> None:
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    chance = random.Random(7)
    for _ in range(KILLS):
        await asyncio.sleep(0.3 + chance.random())
        broker.kill()
        await asyncio.to_thread(broker.start)
    await end(producers, tasks, beyond=20)


async def end(
    producers: Sequence[Producer] | Sequence[RepeatingProducer], tasks: Sequence[asyncio.Task[None]], *, beyond: int
) -> None:
    """Stop producers once each has more acknowledged records than this, however slow the machine is."""
    while min(producer.done for producer in producers) <= beyond and not any(task.done() for task in tasks):  # noqa: ASYNC110 - looking is the point
        await asyncio.sleep(0.02)
    for producer in producers:
        producer.running = False
    await asyncio.gather(*tasks)
    assert min(producer.done for producer in producers) > beyond


async def check(url: str, producers: list[Producer]) -> int:
    """Check every acknowledged offset, and detect duplicates and disorder; return the number of records."""
    stored = await _read_all(url, TOPIC)
    for producer in producers:
        for number, place in producer.acknowledged.items():
            assert stored.get(place) == b"%s-%d" % (producer.key, number), f"acknowledged record lost place={place}"
        mine = [value for _, value in sorted(stored.items()) if value.startswith(producer.key + b"-")]
        numbers = [int(value.rpartition(b"-")[2]) for value in mine]
        assert numbers == sorted(set(numbers)), "a record is duplicated or out of order"
    return len(stored)


async def _read_all(url: str, topic: str) -> dict[tuple[int, int], bytes]:
    """Return the values of a topic by partition and offset, asserting that offsets have no gaps."""
    client = await connect(url)
    stored: dict[tuple[int, int], bytes] = {}
    for bounds in await client.bounds(topic):
        offset = bounds.first_offset
        while offset < bounds.next_offset:
            records = await client.fetch(topic, bounds.partition, offset)
            assert [record.offset for record in records] == list(range(offset, offset + len(records)))
            stored |= {(bounds.partition, record.offset): record.value or b"" for record in records}
            offset += len(records)
    await client.close()
    return stored
