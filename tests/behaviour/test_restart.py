"""State of a broker after a stop or a kill, over every protocol."""

from __future__ import annotations

from polywire.client.base import Ability
from polywire.records.columns import Record
from tests.behaviour.compatibility import needs
from tests.behaviour.conftest import WireClients


async def test_records_survive_a_stop(restartable: WireClients, topic: str) -> None:
    await _records_outlive(restartable, topic, kill=False)


async def test_records_survive_a_kill(restartable: WireClients, topic: str) -> None:
    await _records_outlive(restartable, topic, kill=True)


async def _records_outlive(wires: WireClients, topic: str, *, kill: bool) -> None:
    client = await wires.open()
    values = [f"v{number}".encode() for number in range(500)]
    partition = (await client.produce(topic, [Record(value=value, key=b"k") for value in values]))[0].partition
    for round_number in range(2):
        if kill:
            wires.broker.kill()
        else:
            assert wires.broker.stop() == 0
        wires.broker.start()
        client = await wires.open()
        found = await client.fetch(topic, partition, 0)
        assert [record.value for record in found] == values
        values.append(f"after-{round_number}".encode())
        place = (await client.produce(topic, [Record(value=values[-1], key=b"k")]))[0]
        assert (place.partition, place.offset) == (partition, len(values) - 1)


@needs(Ability.GENERATIONS, Ability.POSITIONS)
async def test_offsets_and_groups_survive_a_kill(restartable: WireClients, topic: str) -> None:
    client = await restartable.open()
    await client.produce(topic, [Record(value=b"v", key=b"k")])
    before = await client.join("g", topic, "m1")
    await client.commit("g", topic, 1, 42, member="m1", generation=before.generation)
    restartable.broker.kill()
    restartable.broker.start()
    client = await restartable.open()
    assert await client.position("g", topic, 1) == 42
    after = await client.join("g", topic, "m1")
    assert after.partitions == before.partitions
    if Ability.AT_ONCE in client.abilities:
        assert after.generation == before.generation


@needs(Ability.CREATE_TOPIC, Ability.GROUPS)
async def test_topics_survive_a_kill(restartable: WireClients, topic: str) -> None:
    client = await restartable.open()
    await client.create_topic(topic, 6)
    restartable.broker.kill()
    restartable.broker.start()
    client = await restartable.open()
    assert topic in {info.name for info in await client.topics()}
    assert (await client.join("g", topic, "m1")).partitions == tuple(range(6))
