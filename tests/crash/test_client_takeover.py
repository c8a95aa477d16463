"""A client that survives takeovers between brokers of a bucket: records are stored once and delivered once.

It is given all three addresses. One leader is killed for good, and one is asked to hand over.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import polywire
from polywire import Client
from tests.broker_process import BrokerProcess, child_environment
from tests.crash.test_client_kill import PATIENCE_S, TOPIC, _stored

RECORDS = 30_000
STEP = 500
PARTITIONS = 4


def test_nothing_is_lost_or_duplicated(tmp_path: Path) -> None:
    bucket = f"file://{tmp_path / 'bucket'}"
    with ExitStack() as running:
        brokers = [
            running.enter_context(
                BrokerProcess(tmp_path / name, "--bucket", bucket, "--node", name, wires=["polywire"])
            )
            for name in ("one", "two", "three")
        ]
        url = ",".join(broker.url("polywire") for broker in brokers)
        seen: Counter[int] = Counter()
        assert asyncio.run(_through_takeovers(url, brokers[0], bucket, seen)) == RECORDS
        assert {number: count for number, count in seen.items() if count != 1} == {}
        assert len(seen) == RECORDS
        assert asyncio.run(_stored(brokers[1])) == RECORDS
        for broker in brokers[1:]:
            assert broker.stop() == 0, broker.log_text()


async def _through_takeovers(url: str, leader: BrokerProcess, bucket: str, seen: Counter[int]) -> int:
    async with polywire.connect(url, reconnect_s=PATIENCE_S) as client:
        await client.create_topic(TOPIC, PARTITIONS)
        sent, _, _ = await asyncio.gather(
            _produce(client, seen), _consume(client, seen), _change_leaders(leader, bucket, seen)
        )
        return sent


async def _produce(client: Client, seen: Counter[int]) -> int:
    async with client.producer(batch_bytes=4 << 10, buffer_bytes=64 << 10) as producer:
        receipts = []
        for first in range(0, RECORDS, STEP):
            values = [b"%d" % number for number in range(first, first + STEP)]
            receipts.append(await producer.send_many(TOPIC, values, keys=[value[-2:] for value in values]))
            while first > len(seen) + RECORDS // 4:  # noqa: ASYNC110 - looking is the point
                await asyncio.sleep(0.001)
        return sum([sum(part.record_count for part in await receipt) for receipt in receipts])


async def _consume(client: Client, seen: Counter[int]) -> None:
    """Read as a group, committing offsets of counted records."""
    async with client.consumer(TOPIC, group="counting", auto_commit=False, buffer_bytes=64 << 10) as consumer:
        while len(seen) < RECORDS:
            for record in await consumer.batch(500):
                seen[int(record.value or b"")] += 1
            await consumer.commit()


async def _until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - looking is the point
        await asyncio.sleep(0.005)


async def _change_leaders(leader: BrokerProcess, bucket: str, seen: Counter[int]) -> None:
    loop = asyncio.get_running_loop()
    await _until(lambda: len(seen) > RECORDS // 4)
    await loop.run_in_executor(None, leader.kill)
    for part in (2, 3):
        await _until(lambda part=part: len(seen) > RECORDS * part // 4)  # type: ignore[misc]
        words = ("-m", "polywire", "cluster", "takeover", bucket)
        process = await asyncio.create_subprocess_exec(sys.executable, *words, env=child_environment())
        assert await process.wait() == 0
    await _until(lambda: len(seen) == RECORDS)
