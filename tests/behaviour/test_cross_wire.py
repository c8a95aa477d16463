"""What one wire writes, every other reads."""

from __future__ import annotations

import pytest

from polywire.client.base import Ability
from polywire.records.columns import Record
from tests.behaviour.conftest import WireClients

TEXT = [b"plain", b"", b"a,b", b"p|q", b'{"id":7,"ok":true}', "日本".encode(), b"100%", b"x" * 5_000]
SPACES = [b"two words", b" lead", b"tail "]
BYTES = [bytes(range(256)), b"line\nbreak", b"\xff\xfe"]


async def write_then_read(
    writers: WireClients, readers: WireClients, topic: str, records: list[Record]
) -> list[Record]:
    writer, reader = await writers.open(), await readers.open()
    produced = await writer.produce(topic, records)
    assert [place.offset for place in produced] == list(range(len(records)))
    return await reader.fetch(topic, produced[0].partition, 0)


async def test_text(writers: WireClients, readers: WireClients, topic: str) -> None:
    found = await write_then_read(writers, readers, topic, [Record(value=value, key=b"k") for value in TEXT])
    assert [record.value for record in found] == TEXT
    if Ability.KEYS_READ in readers.wire.abilities:
        assert [record.key for record in found] == [b"k"] * len(TEXT)


async def test_awkward_values_are_never_torn_nor_dropped(
    writers: WireClients, readers: WireClients, topic: str
) -> None:
    if Ability.BINARY_VALUES not in writers.wire.abilities:
        values = TEXT
    else:
        values = TEXT + SPACES + BYTES
    records = [Record(value=value, key=b"k") for value in values]
    found = await write_then_read(writers, readers, topic, records)
    assert [record.offset for record in found] == list(range(len(values)))
    exact = TEXT if Ability.BINARY_VALUES not in readers.wire.abilities else values
    assert [record.value for record in found[: len(exact)]] == exact


async def test_interleaved_writers_share_one_order(writers: WireClients, readers: WireClients, topic: str) -> None:
    one, two = await writers.open(), await readers.open()
    offsets = []
    for number in range(20):
        client = one if number % 2 else two
        place = (await client.produce(topic, [Record(value=str(number).encode(), key=b"k")]))[0]
        offsets.append(place.offset)
    assert offsets == list(range(20))
    for client in (one, two):
        found = await client.fetch(topic, place.partition, 0)
        assert [record.value for record in found] == [str(number).encode() for number in range(20)]


async def test_members_of_two_wires_in_one_group(writers: WireClients, readers: WireClients, topic: str) -> None:
    for wires in (writers, readers):
        if Ability.GROUPS not in wires.wire.abilities:
            pytest.fail(f"{wires.wire.name} has no groups: exclude it from this scenario by a declared ability")
    one, two = await writers.open(), await readers.open()
    await one.produce(topic, [Record(value=b"v", key=b"k")])
    group = f"group-of-{topic}"
    await one.join(group, topic, "m1")
    second = await two.join(group, topic, "m2")
    first = await one.join(group, topic, "m1")
    assert first.generation == second.generation
    assert sorted(first.partitions + second.partitions) == [0, 1, 2]
    await one.commit(group, topic, first.partitions[0], 1, member="m1", generation=first.generation)
    assert await two.position(group, topic, first.partitions[0]) == 1
