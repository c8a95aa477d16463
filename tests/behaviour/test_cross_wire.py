"""Records written over one protocol are read over every other."""

from __future__ import annotations

import asyncio

from polywire.client.base import Ability, WireClient
from polywire.client.connect import connect
from polywire.records.columns import Record
from tests.behaviour.compatibility import needs
from tests.behaviour.conftest import WireClients, share, shared_group

TEXT = [b"plain", b"-", b"a,b", b"p|q", b'{"id":7,"ok":true}', "日本".encode(), b"100%", b"x" * 5_000]
SPACES = [b"two words", b" lead", b"tail "]
KEY = b"k7"  # every protocol's hash maps it to the same one of three partitions
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
    if Ability.KEYS_READ in readers.wire.abilities and not writers.wire.drops_keys:
        assert [record.key for record in found] == [b"k"] * len(TEXT)


async def test_a_name_of_any_characters(writers: WireClients, readers: WireClients, topic: str) -> None:
    """White space, invalid escapes, list and pattern characters, non-ASCII letters, over 200 bytes."""
    name = f"{topic}:a b, 50 % f\u00fcr [x]*?/|@%41%c3 message=\u65e5\U0001f600\ue000"
    name += "n" * (200 - len(name.encode()))
    if not writers.wire.makes_any_name:
        maker = await connect(writers.broker.url("polywire"))
        await maker.create_topic(name, 3)
        await maker.close()
    found = await write_then_read(writers, readers, name, [Record(value=b"v", key=KEY)])
    assert [record.value for record in found] == [b"v"]
    if Ability.CREATE_TOPIC in readers.wire.abilities:
        assert name in [reported.name for reported in await (await readers.open()).topics()]


@needs(Ability.EMPTY_VALUES)
async def test_empty_values(writers: WireClients, readers: WireClients, topic: str) -> None:
    records = [Record(value=value, key=b"k") for value in (b"", b"between", b"")]
    found = await write_then_read(writers, readers, topic, records)
    assert [record.value for record in found] == [b"", b"between", b""]


async def test_awkward_values_are_neither_truncated_nor_dropped(
    writers: WireClients, readers: WireClients, topic: str
) -> None:
    values = list(TEXT)
    if Ability.WHITE_SPACE_VALUES in writers.wire.abilities:
        values += SPACES
    if Ability.BINARY_VALUES in writers.wire.abilities:
        values += BYTES
    found = await write_then_read(writers, readers, topic, [Record(value=value, key=b"k") for value in values])
    assert [record.offset for record in found] == list(range(len(values)))
    exact = values if Ability.BINARY_VALUES in readers.wire.abilities else TEXT
    assert [record.value for record in found[: len(exact)]] == exact
    assert all(record.value for record in found[len(TEXT) :]), (
        "a value that a reader cannot represent is escaped, not empty"
    )


async def test_interleaved_writers_share_one_order(writers: WireClients, readers: WireClients, topic: str) -> None:
    one, two = await writers.open(), await readers.open()
    offsets = []
    for number in range(20):
        client = one if number % 2 else two
        place = (await client.produce(topic, [Record(value=str(number).encode(), key=KEY)]))[0]
        offsets.append(place.offset)
    assert offsets == list(range(20))
    for client in (one, two):
        found = await client.fetch(topic, place.partition, 0)
        assert [record.value for record in found] == [str(number).encode() for number in range(20)]


@needs(Ability.SAME_HASH)
async def test_equal_keys_share_a_partition_whichever_protocol_writes_them(
    writers: WireClients, readers: WireClients, topic: str
) -> None:
    one, two = await writers.open(), await readers.open()
    records = [Record(value=b"v", key=f"key-{number}".encode()) for number in range(64)]
    places = [await client.produce(topic, records) for client in (one, two)]
    homes = [[place.partition for place in produced] for produced in places]
    assert homes[0] == homes[1]
    assert len(set(homes[0])) > 1


async def test_concurrent_writers_keep_their_own_order(writers: WireClients, readers: WireClients, topic: str) -> None:
    async def write(client: WireClient, name: str) -> int:
        for number in range(0, 300, 10):
            records = [Record(value=f"{name}-{number + step}".encode(), key=KEY) for step in range(10)]
            places = await client.produce(topic, records)
        return places[0].partition

    sides = [await side.open() for side in (writers, readers) for _ in range(2)]
    partitions = await asyncio.gather(*(write(client, f"w{index}") for index, client in enumerate(sides)))
    assert len(set(partitions)) == 1
    found: list[Record] = []
    while len(found) < 1_200:
        found += await sides[-1].fetch(topic, partitions[0], len(found))
    assert [record.offset for record in found] == list(range(1_200))
    for index in range(len(sides)):
        own = [record.value for record in found if (record.value or b"").startswith(b"w%d-" % index)]
        assert own == [b"w%d-%d" % (index, number) for number in range(300)]


@needs(Ability.GROUPS, Ability.POSITIONS)
async def test_members_of_two_protocols_in_one_group(writers: WireClients, readers: WireClients, topic: str) -> None:
    one, two = await writers.open(), await readers.open()
    await one.produce(topic, [Record(value=b"v", key=b"key-%d" % number) for number in range(64)])
    group = await shared_group(writers, readers, topic)
    await one.join(group, topic, "m1")
    _, first = await share(group, topic, {"m2": two, "m1": one})
    await one.commit(group, topic, first.partitions[0], 2, member="m1", generation=first.generation)
    assert await two.position(group, topic, first.partitions[0]) == 2
    await one.leave(group, topic, "m1", first.generation)
    assert (await two.join(group, topic, "m2")).partitions == (0, 1, 2)
