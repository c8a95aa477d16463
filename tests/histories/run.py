"""One history: clients of every protocol, a broker with faults, and a final read of everything.

The history is complete when ``run`` returns; the broker has stopped cleanly and its data directory is sound.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from polywire.client.connect import connect
from polywire.errors import BrokerError
from polywire.testing import SLOT_MIB
from polywire.types import Level
from tests import fork_server
from tests.broker_process import BrokerProcess, child_environment
from tests.histories.clients import (
    PAUSE_S,
    Client,
    GroupMember,
    IdempotentProducer,
    Producer,
    Reader,
    Url,
    read_everything,
)
from tests.histories.clocks import SkewedClock
from tests.histories.driven import PEERS, CommittedReader, Copier, Driven, Once, drivers
from tests.histories.history import History
from tests.histories.kafka_clients import IdempotentKafkaProducer, KafkaClient, Transformer
from tests.histories.nemesis import Nemesis, SmallDisk

TOPIC: Final = "shared"
ONCE: Final = "once"
COPY: Final = "copy"
GROUP: Final = "group"
PARTITIONS: Final = 3
WIRES: Final = ("polywire", "kafka", "cursus", "iggy", "flux")
GROUP_WIRES: Final = ("polywire", "cursus", "flux")  # whose clients report generations
LIVES_S: Final = (0.1, 1.2)  # between faults
BACK_S: Final = 120.0  # in which every client is served once there are no more faults
BACK_OF_BROKEN_S: Final = 5.0
SOUND: Final = "polywire"  # module of the broker


def everybody(url: Url, history: History, pause_s: float = PAUSE_S) -> list[Client | KafkaClient]:
    """Return producers and a reader of each protocol, members of a group, idempotent producers, and a copy."""
    clients: list[Client | KafkaClient] = []
    for wire in WIRES:
        clients.append(Producer(f"p-{wire}", wire, url, history, topic=TOPIC, level=Level.WRITTEN, size=1))
        clients.append(Producer(f"q-{wire}", wire, url, history, topic=TOPIC, level=Level.WRITTEN, size=9))
        clients.append(Reader(f"r-{wire}", wire, url, history, topic=TOPIC, partitions=PARTITIONS))
    for wire in ("polywire", "cursus", "kafka"):
        clients.append(Producer(f"s-{wire}", wire, url, history, topic=TOPIC, level=Level.SYNCED, size=3))
    clients.append(Producer("m-cursus", "cursus", url, history, topic=TOPIC, level=Level.MEMORY, size=3))
    clients += [GroupMember(f"g-{wire}", wire, url, history, group=GROUP, topic=TOPIC) for wire in GROUP_WIRES]
    clients += [
        kind(f"{kind.__name__}-{number}", url, history, topic=ONCE, partition=number, size=1 + 6 * number)
        for number in range(PARTITIONS)
        for kind in (IdempotentProducer, IdempotentKafkaProducer)
    ]
    clients.append(Transformer(COPY, url, history, source=TOPIC, target=COPY, partitions=PARTITIONS))
    for topic in (ONCE, COPY):
        clients.append(Reader(f"r-{topic}", "polywire", url, history, topic=topic, partitions=PARTITIONS))
    for client in clients:
        client.pause_s = pause_s
    return clients


def strangers(url: Url, history: History) -> list[Driven]:
    """Return other projects' Kafka clients, if available, which copy, read copies, and write idempotently."""
    programs = {peer: program for peer, program in drivers().items() if peer in PEERS}
    found = copiers(url, history, programs)
    for number, (peer, program) in enumerate(programs.items()):
        found.append(Once(peer, url, history, program, topic=ONCE, partition=number % PARTITIONS))
    return found


def copiers(url: Url, history: History, programs: Mapping[str, Sequence[str]]) -> list[Driven]:
    """Return a client of each kind that copies in transactions, and one of the next kind that reads the copy."""
    found: list[Driven] = []
    peers = list(programs)
    for peer, other in zip(peers, peers[1:] + peers[:1], strict=True):
        copier = Copier(peer, url, history, programs[peer], source=TOPIC, partitions=PARTITIONS)
        reader = CommittedReader(other, url, history, programs[other], topic=copier.name, partitions=PARTITIONS)
        found += [copier, reader]
    return found


def run(
    disk: SmallDisk,
    *,
    seed: int,
    seconds: float = math.inf,
    deeds: float = math.inf,
    module: str = SOUND,
    clock: SkewedClock | None = None,
) -> History:
    """Make a history in an empty data directory, of that many seconds or faults.

    ``module`` runs the broker. Any other than that of the project may leave clients and the data directory in any state.
    ``clock`` is the broker's, and jumps.
    """
    environment = {} if clock is None else clock.environment
    options = "--slot-mib", str(SLOT_MIB)
    with BrokerProcess(disk.folder, *options, wires=WIRES, module=module, environment=environment) as broker:
        is_sound = module == SOUND
        history = asyncio.run(_run(broker, disk, clock, random.Random(seed), seconds, deeds, is_sound=is_sound))
        if not is_sound:
            return history
        assert broker.stop() == 0, broker.log_text()[-4000:]
    check_data(disk.folder)
    return history


def check_data(folder: Path) -> None:
    """Let ``polywire doctor`` check the data directory of a stopped broker."""
    command = [sys.executable, "-m", "polywire", "doctor", "--data-dir", str(folder)]
    looked = fork_server.run(command, env=child_environment(), text=True)
    assert looked.returncode == 0, looked.stdout + looked.stderr


async def _run(
    broker: BrokerProcess,
    disk: SmallDisk,
    clock: SkewedClock | None,
    chance: random.Random,
    seconds: float,
    deeds: float,
    *,
    is_sound: bool,
) -> History:
    history = History()
    driven = strangers(broker.url, history)
    clients = [*everybody(broker.url, history), *driven]
    copies = [COPY, *(one.name for one in driven if isinstance(one, Copier))]
    topics = dict.fromkeys((TOPIC, ONCE, *copies), PARTITIONS)
    await create(topics, broker.url)
    nemesis = Nemesis(broker, disk, driven, history, chance, clock)
    try:
        async with working(clients, BACK_S if is_sound else BACK_OF_BROKEN_S):
            deadline, done = time.monotonic() + seconds, 0
            while time.monotonic() < deadline and done < deeds:
                await asyncio.sleep(chance.uniform(*LIVES_S))
                await nemesis.act()
                done += 1
    except* (BrokerError, AssertionError):
        if is_sound:
            raise
    await read_everything(broker.url("polywire"), topics, dict.fromkeys((GROUP, *copies), TOPIC), history)
    return history


async def create(topics: Mapping[str, int], url: Url) -> None:
    """Create topics with their numbers of partitions."""
    client = await connect(url("polywire"))
    for topic, partitions in topics.items():
        await client.create_topic(topic, partitions)
    await client.close()


@asynccontextmanager
async def working(clients: Sequence[Client | KafkaClient | Driven], back_s: float = BACK_S) -> AsyncIterator[None]:
    """Let clients work during the block, and then until each is served again. Raises AssertionError if one is not."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(client.run())
            yield
            silent = await silent_clients(clients, back_s)
            assert not silent, f"not served again in {back_s} s: {silent}"
            for client in clients:
                client.running = False
    finally:
        for client in clients:
            if isinstance(client, IdempotentProducer | IdempotentKafkaProducer):
                client.in_doubt()


async def silent_clients(clients: Sequence[Client | KafkaClient | Driven], within_s: float = BACK_S) -> list[str]:
    """Wait until all clients are served again, and return the names of those that are not within this time."""
    before = {client: client.answers for client in clients}
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while any(client.answers <= before[client] for client in clients):  # noqa: ASYNC110 - looking is the point
                await asyncio.sleep(0.05)
    return [client.name for client in clients if client.answers <= before[client]]
