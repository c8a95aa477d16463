"""Work queues, over every protocol that has them."""

from __future__ import annotations

import asyncio

import polywire
from polywire.client.base import Ability
from polywire.records.columns import Record
from tests.behaviour.compatibility import needs
from tests.behaviour.conftest import WireClients

COUNT = 30
WAIT_S = 60.0


@needs(Ability.QUEUES)
async def test_workers_share_the_jobs(writers: WireClients, readers: WireClients, topic: str) -> None:
    """Each record is done once by a worker of either protocol. One that is retried is delivered again."""
    client = await writers.open()
    await client.create_topic(topic, 2)
    for partition in range(2):
        await client.produce(topic, [Record(b"%d" % n) for n in range(partition, COUNT, 2)], partition=partition)
    group, done, attempts = f"group-of-{topic}", set[int](), list[tuple[int, int]]()

    async def work(queue: polywire.Queue) -> None:
        while len(done) < COUNT:
            job = await queue.get(timeout_s=0.5)
            if job is None:
                continue
            number = int(job.text)
            attempts.append((number, job.attempt))
            if number % 10 == 0 and job.attempt == 1:
                await job.retry(delay_s=0.2)
            else:
                await job.ack()
                done.add(number)

    urls = [clients.broker.url(clients.wire.name) for clients in (writers, readers)]
    async with (
        polywire.Queue(urls[0], topic, group=group, prefetch=3) as one,
        polywire.Queue(urls[1], topic, group=group, prefetch=3) as two,
    ):
        await asyncio.wait_for(asyncio.gather(work(one), work(two)), WAIT_S)
    again = [(number, 2) for number in range(0, COUNT, 10)]
    assert sorted(attempts) == sorted([(number, 1) for number in range(COUNT)] + again)
