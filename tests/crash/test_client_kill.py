"""A client that survives kills of its broker: records it sends are stored once and in order, and delivered once."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Final

import polywire
from polywire import Client
from tests.broker_process import BrokerProcess

# A million takes a minute: POLYWIRE_CLIENT_RECORDS=1000000.
RECORDS: Final = int(os.environ.get("POLYWIRE_CLIENT_RECORDS", "60000"))
KILLS: Final = 3
STEP: Final = 500
AHEAD: Final = 20_000  # how far sending is ahead of reading, so that each kill finds records in both directions
TOPIC: Final = "orders"
PARTITIONS: Final = 4
PATIENCE_S: Final = 300.0  # for a broker that starts on a busy machine


def test_nothing_is_lost_or_duplicated(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire"]) as broker:
        sent, seen = asyncio.run(_through_kills(broker))
        assert sent == RECORDS
        assert {number: count for number, count in seen.items() if count != 1} == {}
        assert len(seen) == RECORDS
        assert asyncio.run(_stored(broker)) == RECORDS
        assert broker.stop() == 0, broker.log_text()


async def _through_kills(broker: BrokerProcess) -> tuple[int, Counter[int]]:
    async with polywire.connect(broker.url("polywire"), reconnect_s=PATIENCE_S) as client:
        await client.create_topic(TOPIC, PARTITIONS)
        seen: Counter[int] = Counter()
        sent, _, _ = await asyncio.gather(_produce(client, seen), _consume(client, seen), _kill(broker, seen))
        return sent, seen


async def _produce(client: Client, seen: Counter[int]) -> int:
    async with client.producer(batch_bytes=64 << 10, buffer_bytes=1 << 20) as producer:
        stored = 0
        receipts = []
        for first in range(0, RECORDS, STEP):
            values = [b"%d" % number for number in range(first, min(first + STEP, RECORDS))]
            keys = [value[-2:] for value in values]
            receipts.append(await producer.send_many(TOPIC, values, keys=keys))
            while first > len(seen) + AHEAD:  # noqa: ASYNC110 - looking is the point
                await asyncio.sleep(0.001)
        for receipt in receipts:
            stored += sum(part.record_count for part in await receipt)
        return stored


async def _consume(client: Client, seen: Counter[int]) -> None:
    """Read as a group, committing offsets of counted records."""
    last: dict[bytes, int] = {}
    async with client.consumer(TOPIC, group="counting", auto_commit=False, buffer_bytes=256 << 10) as consumer:
        while len(seen) < RECORDS:
            records = await consumer.batch(2_000)
            for record in records:
                number = int(record.value or b"")
                seen[number] += 1
                assert record.key is not None
                assert last.get(record.key, -1) < number, "records of a key arrive in the order in which they were sent"
                last[record.key] = number
            await consumer.commit()


async def _kill(broker: BrokerProcess, seen: Counter[int]) -> None:
    """Kill and restart the broker each time another part of the records has arrived."""
    loop = asyncio.get_running_loop()
    for number in range(1, KILLS + 1):
        while len(seen) < RECORDS * number // (KILLS + 2):  # noqa: ASYNC110 - looking is the point
            await asyncio.sleep(0.001)
        await loop.run_in_executor(None, broker.kill)
        await loop.run_in_executor(None, broker.start)


async def _stored(broker: BrokerProcess) -> int:
    async with polywire.connect(broker.url("polywire")) as client:
        bounds = await client.bounds(TOPIC)
        positions = [await client.position("counting", TOPIC, number) for number in range(PARTITIONS)]
        assert positions == [part.next_offset for part in bounds]
        return sum(part.next_offset for part in bounds)
