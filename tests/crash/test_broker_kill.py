"""``kill -9`` of a real broker while clients produce: what was acknowledged is there, once, in order.

Every producer sends numbered values to a partition of its own, one request at a time, and notes what was acknowledged. A request that was
under way when the broker died may be there or not: the producer then goes on with the next number.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from polywire.client.base import Client
from polywire.client.connect import connect
from polywire.errors import BrokerError
from polywire.records.columns import Record
from polywire.types import Level
from tests.broker_process import BrokerProcess

KILLS = 6
PRODUCERS = 3
TOPIC = "numbers"


@dataclass(slots=True)
class Producer:
    """One client's numbered values and the places the broker acknowledged for them."""

    url: Callable[[], str]
    key: bytes
    level: Level
    batch: int
    next_number: int = 0
    acknowledged: dict[int, tuple[int, int]] = field(default_factory=dict)
    running: bool = True

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

    async def _produce_once(self, client: Client) -> None:
        numbers = range(self.next_number, self.next_number + self.batch)
        self.next_number = numbers.stop
        records = [Record(value=b"%s-%d" % (self.key, number), key=self.key) for number in numbers]
        places = await client.produce(TOPIC, records, level=self.level)
        for number, place in zip(numbers, places, strict=True):
            self.acknowledged[number] = (place.partition, place.offset)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("wire", "level"), [("flux", Level.WRITTEN), ("polywire", Level.WRITTEN), ("polywire", Level.SYNCED)]
)
def test_killed_while_producing(tmp_path: Path, wire: str, level: Level) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        producers = [
            Producer(lambda: broker.url(wire), b"p%d" % number, level, batch=1 + 20 * (number % 2))
            for number in range(PRODUCERS)
        ]
        asyncio.run(_produce_and_kill(broker, producers))
        assert all(len(producer.acknowledged) > 20 for producer in producers)
        assert asyncio.run(_check(broker.url("polywire"), producers)) > 0
        assert broker.stop() == 0, broker.log_text()


async def _produce_and_kill(broker: BrokerProcess, producers: list[Producer]) -> None:
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    chance = random.Random(7)
    for _ in range(KILLS):
        await asyncio.sleep(0.3 + chance.random())
        broker.kill()
        await asyncio.to_thread(broker.start)
    await asyncio.sleep(0.3)
    for producer in producers:
        producer.running = False
    await asyncio.gather(*tasks)


async def _check(url: str, producers: list[Producer]) -> int:
    """Compare every acknowledged place with what is stored there, and look for doubles and disorder; the number of records."""
    client = await connect(url)
    stored: dict[tuple[int, int], bytes] = {}
    for bounds in await client.bounds(TOPIC):
        offset = bounds.first_offset
        while offset < bounds.next_offset:
            records = await client.fetch(TOPIC, bounds.partition, offset)
            assert [record.offset for record in records] == list(range(offset, offset + len(records)))
            stored |= {(bounds.partition, record.offset): record.value or b"" for record in records}
            offset += len(records)
    await client.close()
    for producer in producers:
        for number, place in producer.acknowledged.items():
            assert stored.get(place) == b"%s-%d" % (producer.key, number), f"acknowledged record lost place={place}"
        mine = [value for _, value in sorted(stored.items()) if value.startswith(producer.key + b"-")]
        numbers = [int(value.rpartition(b"-")[2]) for value in mine]
        assert numbers == sorted(set(numbers)), "a record is doubled or out of order"
    return len(stored)
