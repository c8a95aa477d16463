"""A damaged record of a running broker, over every protocol: its reads fail, and its neighbours are served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.client.kafka07 import Kafka07Client
from polywire.errors import BrokerError
from polywire.records.columns import Record
from tests.behaviour.wires import WIRES, Wire
from tests.three_brokers import Brokers

COUNT = 12
DAMAGED = 5
RECORD_BYTES = 10 + len(b"value-00")  # as Kafka 0.7 counts


async def sealed_values(broker: Brokers, topic: str) -> tuple[Path, bytearray, int]:
    """Write one batch per record and restart twice, so that the records are sealed and not cached.

    Returns the file, its content, and the position to damage.
    """
    client = await connect(broker.url("polywire"))
    for number in range(COUNT):
        await client.produce(topic, [Record(value=b"value-%02d" % number)], partition=0)
    await client.close()
    for _ in range(2):
        assert broker.stop() == 0
        broker.start()
    wanted = b"value-%02d" % DAMAGED
    (path,) = (found for found in (broker.data_dir / "segments").iterdir() if wanted in found.read_bytes())
    content = bytearray(path.read_bytes())
    return path, content, content.index(wanted)


async def write_and_damage(broker: Brokers, topic: str) -> None:
    """Flip one bit of one record."""
    path, content, at = await sealed_values(broker, topic)
    content[at] ^= 1
    path.write_bytes(content)


async def values_of(client: WireClient, offset: int, count: int) -> list[bytes | None]:
    if isinstance(
        client, Kafka07Client
    ):  # this protocol uses addresses: a reader that skips a record must know the next address
        read = await client.read("t", 0, offset * RECORD_BYTES)
        return list(read.values)
    records: list[Record] = []
    while len(records) < count and (found := await client.fetch("t", 0, offset + len(records), records_max=count)):
        records += found
    return [record.value for record in records[:count]]


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
async def test_a_damaged_record_is_reported_and_the_rest_is_served(own_broker: Brokers, wire: Wire) -> None:
    first = await connect(own_broker.url("polywire"))
    await first.create_topic("first", 3)  # so that the log's own number of the partition is not 0
    await first.close()
    await write_and_damage(own_broker, "t")
    client = await connect(own_broker.url(wire.name))
    before = await values_of(client, 0, DAMAGED)
    assert before == [b"value-%02d" % number for number in range(DAMAGED)]
    for _ in range(2):
        with pytest.raises(BrokerError) as raised:
            await asyncio.wait_for(values_of(client, DAMAGED, 1), 120)
        if wire.name == "polywire":
            assert f"topic='t' partition=0 first_offset={DAMAGED} " in raised.value.message
    await client.close()
    client = await connect(own_broker.url(wire.name))
    after = await values_of(client, DAMAGED + 1, COUNT - DAMAGED - 1)
    assert after == [b"value-%02d" % number for number in range(DAMAGED + 1, COUNT)]
    await client.close()
    assert own_broker.stop() == 0
    (logged,) = (line for line in own_broker.log_text().splitlines() if "stored records are damaged" in line)
    assert f"topic=t partition=0 first_offset={DAMAGED} " in logged
