"""Queues as applications use them: our Python client, and Kafka's KafkaShareConsumer on any broker.

The clients do most of the work, so the server's processor time says more than the rate.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import polywire
from benchmarks.peers.kafka import JARS
from benchmarks.peers.peer import Absent, Server, find
from benchmarks.peers.workloads import Costs, Round
from benchmarks.queues.kafka import KafkaShares
from benchmarks.queues.peer import QueuePeer, group_of
from benchmarks.queues.polywire import PolywireQueue
from benchmarks.queues.workloads import PREFETCH, SPARE, fill
from polywire.client.queue import Job

CONCURRENCY: Final = 100
TIMEOUT_S: Final = 300.0
PROGRAM: Final = Path(__file__).with_name("ShareWorker.java")


def python(peer: QueuePeer, server: Server, topic: str, records: int) -> Sequence[Round]:
    """Return jobs per second of one ``Queue.run`` whose handlers do nothing; none for other protocols."""
    if not isinstance(peer, PolywireQueue):
        return []
    fill(peer, server, topic, records + SPARE)
    costs = Costs(server)
    asyncio.run(_run("polywire://{}:{}".format(*server.address), topic, records))
    return [costs.round(records)]


async def _run(url: str, topic: str, records: int) -> None:
    done = 0
    all_done = asyncio.Event()

    async def handler(job: Job) -> None:
        nonlocal done
        done += 1
        if done >= records:
            all_done.set()

    async with (
        polywire.connect(url) as client,
        client.queue(topic, group=group_of(topic), prefetch=PREFETCH) as queue,
    ):
        running = asyncio.ensure_future(queue.run(handler, concurrency=CONCURRENCY))
        await all_done.wait()
        running.cancel()


def java(peer: QueuePeer, server: Server, topic: str, records: int) -> Sequence[Round]:
    """Return records per second of one KafkaShareConsumer with explicit acknowledgements. Raises Absent."""
    if not isinstance(peer, KafkaShares):
        return []
    jars = os.environ.get(JARS, "")
    if not jars:
        raise Absent(
            f"set {JARS}='directory/*' to jars of org.apache.kafka:kafka-clients and what it depends on (Maven)"
        )
    fill(peer, server, topic, records + SPARE)
    command = [find("java", "openjdk-17-jdk-headless"), "-Xmx512m", "-cp", jars, str(PROGRAM)]
    address = "{}:{}".format(*server.address)
    used = server.processor_seconds()
    begun = time.perf_counter()
    done = subprocess.run(
        [*command, address, topic, group_of(topic), str(records)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{PROGRAM.name} failed seconds={time.perf_counter() - begun:.0f}\n{done.stderr[-1500:]}")
    return [Round(float(done.stdout.split()[-1]), (server.processor_seconds() - used) * 1e6 / records)]
