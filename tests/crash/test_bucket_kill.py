"""``kill -9`` of a broker with its log in a bucket, and loss of its directory: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from polywire.types import Level
from tests.broker_process import BrokerProcess
from tests.crash.test_broker_kill import Producer, check, end

KILLS = 3


def test_killed_and_moved_while_producing(tmp_path: Path) -> None:
    bucket = f"file://{tmp_path / 'bucket'}"
    with BrokerProcess(tmp_path / "data", "--bucket", bucket, wires=("polywire", "cursus")) as broker:
        producers = [
            Producer(lambda wire=wire: broker.url(wire), b"p-%s" % wire.encode(), level, batch=batch)  # type: ignore[misc]
            for wire, level, batch in (
                ("polywire", Level.WRITTEN, 1),
                ("polywire", Level.STORED, 20),
                ("cursus", Level.WRITTEN, 3),
            )
        ]
        producers[1].key = b"p-stored"
        asyncio.run(_produce_and_lose(broker, producers))
        assert asyncio.run(check(broker.url("polywire"), producers)) > 0
        assert broker.stop() == 0, broker.log_text()


async def _produce_and_lose(broker: BrokerProcess, producers: Sequence[Producer]) -> None:
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    chance = random.Random(7)
    for _ in range(KILLS):
        await asyncio.sleep(0.8 + chance.random())
        broker.kill()
        shutil.rmtree(broker.data_dir)
        await asyncio.to_thread(broker.start)
    await end(producers, tasks, beyond=20)
