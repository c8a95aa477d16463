"""Unmodified Kafka clients share a group with members of other protocols, through rebalances and a kill of the broker.

Everything is read, and nothing twice by members whose offsets were stored. ``POLYWIRE_KAFKA_CLIENTS`` names an
interpreter that has confluent-kafka (spec: kafka#clients-to-test-with); without it the tests are skipped with a reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.errors import BrokerError
from polywire.records.columns import Record
from tests.three_brokers import Brokers, one_or_three

TOPIC = "shared"
GROUP = "group-7"  # a name that Iggy's numbers have, too
PARTITIONS = 6
RECORDS = 240
SECONDS_MAX = 120.0
DRIVER = Path(__file__).parent / "kafka" / "members.driver"
Place = tuple[int, int]


@pytest.fixture(scope="module")
def interpreter() -> str:
    found = os.environ.get("POLYWIRE_KAFKA_CLIENTS", "")
    if not Path(found).is_file():
        pytest.skip("clients of Kafka are not here: POLYWIRE_KAFKA_CLIENTS names no interpreter")
    if subprocess.run([found, "-c", "import confluent_kafka"], capture_output=True, check=False).returncode:
        pytest.skip("a client of Kafka is not here: confluent-kafka")
    return found


class Tally:
    """The records that members have read: with an offset that was stored, or perhaps was."""

    def __init__(self) -> None:
        self.stored: dict[Place, list[str]] = {}  # who read each record
        self.perhaps: set[Place] = set()
        self.by: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def add(self, who: str, place: Place, *, is_stored: bool | None) -> None:
        if is_stored:
            self.stored.setdefault(place, []).append(who)
            self.by[who] += 1
        else:
            self.perhaps.add(place)
        self._changed.set()

    async def wait_for(self, places: set[Place]) -> None:
        """Wait until all these were read."""
        while not self.places >= places:
            self._changed.clear()
            await self._changed.wait()

    @property
    def places(self) -> set[Place]:
        return set(self.stored) | self.perhaps


async def begin(interpreter: str, broker: Brokers, protocol: str) -> Process:
    host, port = broker.addresses["kafka"]
    command = [interpreter, str(DRIVER), protocol, f"{host}:{port}", TOPIC, GROUP]
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=asyncio.subprocess.DEVNULL)


async def follow(process: Process, who: str, tally: Tally) -> None:
    """Count what a Kafka client reads, until it ends."""
    assert process.stdout is not None
    async for line in process.stdout:
        is_stored, partition, offset = json.loads(line)
        tally.add(who, (partition, offset), is_stored=is_stored)


async def read(broker: Brokers, wire: str, tally: Tally, ended: asyncio.Event) -> None:
    """Be a member over another protocol: read from the group's offsets, one record at a time, and reconnect."""
    client: WireClient | None = None
    while not ended.is_set():
        try:
            client = client or await connect(broker.url(wire))
            await read_once(client, wire, tally)
            await asyncio.sleep(0.2)
        except BrokerError:
            await asyncio.sleep(0.2)
            if not await is_alive(client):
                client = None
    if client is not None:
        with suppress(BrokerError):
            place = await client.join(GROUP, TOPIC, wire)
            await client.leave(GROUP, TOPIC, wire, place.generation)
        await client.close()


async def is_alive(client: WireClient | None) -> bool:
    try:
        return client is not None and bool(await client.topics())
    except BrokerError:
        return False


async def read_once(client: WireClient, wire: str, tally: Tally) -> None:
    place = await client.join(GROUP, TOPIC, wire)
    for partition in place.partitions:
        offset = await client.position(GROUP, TOPIC, partition) or 0
        for record in await client.fetch(TOPIC, partition, offset, records_max=3):
            assert record.offset >= offset
            at = (partition, record.offset)
            try:
                await client.commit(
                    GROUP, TOPIC, partition, record.offset + 1, member=wire, generation=place.generation
                )
            except BrokerError:
                tally.add(wire, at, is_stored=None)
                raise
            tally.add(wire, at, is_stored=True)


async def produce(broker: Brokers) -> None:
    """Write records one by one, some of them through a kill."""
    for number in range(RECORDS):
        while True:
            try:
                client = await connect(broker.url("kafka"))
                await client.produce(TOPIC, [Record(value=b"%d" % number)], partition=number % PARTITIONS)
                await client.close()
                break
            except BrokerError:
                await asyncio.sleep(0.3)
        await asyncio.sleep(0.05)


async def share(interpreter: str, broker: Brokers, protocols: tuple[str, ...], tally: Tally) -> None:
    client = await connect(broker.url("kafka"))
    await client.create_topic(TOPIC, PARTITIONS)
    ends = {wire: asyncio.Event() for wire in ("flux", "iggy")}
    members = [await begin(interpreter, broker, protocol) for protocol in protocols]
    tasks = [asyncio.create_task(follow(one, f"kafka {at}", tally)) for at, one in enumerate(members)]
    tasks += [asyncio.create_task(read(broker, wire, tally, ended)) for wire, ended in ends.items()]
    writing = asyncio.create_task(produce(broker))
    await asyncio.sleep(8)
    await asyncio.to_thread(broker.kill)
    await asyncio.to_thread(broker.start)
    await asyncio.sleep(8)
    ends["flux"].set()
    await writing
    wanted = {(partition, offset) for partition, offset in await places(broker)}
    async with asyncio.timeout(SECONDS_MAX):
        await tally.wait_for(wanted)
    ends["iggy"].set()
    for member in members:
        assert member.stdin is not None
        member.stdin.close()
    async with asyncio.timeout(SECONDS_MAX):
        await asyncio.gather(*tasks, *(member.wait() for member in members))


async def places(broker: Brokers) -> set[Place]:
    """Return all records; one written during the kill may be duplicated."""
    client = await connect(broker.url("kafka"))
    found = {(one, record.offset) for one in range(PARTITIONS) for record in await client.fetch(TOPIC, one, 0)}
    await client.close()
    assert len(found) >= RECORDS
    return found


@pytest.mark.parametrize("protocols", [("consumer", "consumer"), ("classic", "classic"), ("classic", "consumer")])
def test_everything_is_read_once_over_rebalances_and_a_kill(
    interpreter: str, tmp_path: Path, protocols: tuple[str, ...]
) -> None:
    tally = Tally()
    with one_or_three(tmp_path, wires=["kafka", "flux", "iggy"]) as broker:
        asyncio.run(share(interpreter, broker, protocols, tally))
    again = {place: by for place, by in tally.stored.items() if len(by) > 1 and place not in tally.perhaps}
    assert {place: by for place, by in again.items() if "iggy" not in by} == {}, (
        "Iggy stores offsets without a generation, so a member that has lost a partition can still store one"
    )
    assert sum(count for who, count in tally.by.items() if who.startswith("kafka")) > 0, tally.by
    assert tally.by["flux"] + tally.by["iggy"] > 0, tally.by
    print(dict(tally.by), len(tally.perhaps), file=sys.stderr)
