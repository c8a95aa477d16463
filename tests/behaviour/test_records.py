"""Producing and fetching, over every protocol."""

from __future__ import annotations

import asyncio

import pytest

from polywire.client.base import Ability
from polywire.errors import BrokerError, Conflict
from polywire.records.columns import Header, HeaderKind, Record
from polywire.types import Level
from tests.behaviour.compatibility import needs
from tests.behaviour.conftest import WireClients


def values_of(records: list[Record]) -> list[bytes | None]:
    return [record.value for record in records]


async def test_produce_then_fetch(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    produced = await client.produce(topic, [Record(value=b"one", key=b"k"), Record(value=b"two", key=b"k")])
    assert produced[0].partition == produced[1].partition
    assert [place.offset for place in produced] == [0, 1]
    records = await client.fetch(topic, produced[0].partition, 0)
    assert values_of(records) == [b"one", b"two"]
    assert [record.offset for record in records] == [0, 1]


async def test_equal_keys_stay_in_order_in_one_partition(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    sent = [Record(value=f"v{number}".encode(), key=f"key-{number % 7}".encode()) for number in range(200)]
    produced = await client.produce(topic, sent)
    homes = {record.key: place.partition for record, place in zip(sent, produced, strict=True)}
    assert len(set(homes.values())) > 1
    for record, place in zip(sent, produced, strict=True):
        assert place.partition == homes[record.key]
    for partition in set(homes.values()):
        expected = [r.value for r, place in zip(sent, produced, strict=True) if place.partition == partition]
        assert values_of(await client.fetch(topic, partition, 0)) == expected


async def test_offsets_continue_across_connections(clients: WireClients, topic: str) -> None:
    first, second = await clients.open(), await clients.open()
    one = await first.produce(topic, [Record(value=b"a", key=b"k")])
    two = await second.produce(topic, [Record(value=b"b", key=b"k")])
    assert (one[0].offset, two[0].offset) == (0, 1)


async def test_fetch_from_the_middle_and_from_the_end(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    produced = await client.produce(topic, [Record(value=str(n).encode(), key=b"k") for n in range(50)])
    partition = produced[0].partition
    middle = await client.fetch(topic, partition, 20)
    assert middle[0].offset == 20
    assert values_of(middle) == [str(n).encode() for n in range(20, 50)]
    assert await client.fetch(topic, partition, 50) == []


async def test_fetch_below_zero_is_refused(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    produced = await client.produce(topic, [Record(value=b"x", key=b"k")])
    with pytest.raises(BrokerError):
        await client.fetch(topic, produced[0].partition, -5)
    assert values_of(await client.fetch(topic, produced[0].partition, 0)) == [b"x"]


async def test_fetch_of_a_missing_partition_is_refused(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.produce(topic, [Record(value=b"x", key=b"k")])
    with pytest.raises(BrokerError):
        await client.fetch(topic, 999, 0)


@needs(Ability.CREATE_TOPIC)
async def test_clients_create_topics_at_the_same_time(clients: WireClients, topic: str) -> None:
    """In one dialect of Iggy, clients choose the numbers of topics and streams."""
    opened = [await clients.open() for _ in range(4)]
    names = [f"{topic}-together.{number}" for number in range(len(opened))]
    await asyncio.gather(*[client.create_topic(name, 1) for client, name in zip(opened, names, strict=True)])
    created = await asyncio.gather(
        *[client.create_topic(f"{topic}-same.name", 1) for client in opened], return_exceptions=True
    )
    assert {type(error) for error in created if error is not None} <= {Conflict}
    known = {info.name for info in await opened[0].topics()}
    assert known.issuperset([*names, f"{topic}-same.name"])


@needs(Ability.EMPTY_VALUES)
async def test_an_empty_value(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    produced = await client.produce(topic, [Record(value=b"", key=b"k"), Record(value=b"after", key=b"k")])
    assert values_of(await client.fetch(topic, produced[0].partition, 0)) == [b"", b"after"]


async def test_values_with_special_characters_of_text_protocols(clients: WireClients, topic: str) -> None:
    values = [
        b"a,b",
        b"p|q",
        b'{"id":7,"ok":true}',
        b"x,1:evil",
        b"k=v",
        b"100%",
        b"[1]",
        "日本".encode(),
        b"a:b:c",
        b",",
    ]
    client = await clients.open()
    produced = await client.produce(topic, [Record(value=value, key=b"k") for value in values])
    assert values_of(await client.fetch(topic, produced[0].partition, 0)) == values


async def test_a_large_value(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    value = b"x" * 60_000
    produced = await client.produce(topic, [Record(value=value, key=b"k")])
    assert values_of(await client.fetch(topic, produced[0].partition, 0)) == [value]


async def test_ten_thousand_records(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    values = [f"value-{number:05d}".encode() for number in range(10_000)]
    produced = await client.produce(topic, [Record(value=value, key=b"k") for value in values])
    assert [place.offset for place in produced] == list(range(10_000))
    fetched: list[Record] = []
    while len(fetched) < len(values):
        fetched += await client.fetch(topic, produced[0].partition, len(fetched))
    assert values_of(fetched) == values


@needs(Ability.BINARY_VALUES)
async def test_values_of_every_byte(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    value = bytes(range(256)) * 20
    produced = await client.produce(topic, [Record(value=value, key=bytes(range(255)))])
    assert values_of(await client.fetch(topic, produced[0].partition, 0)) == [value]


@needs(Ability.BINARY_VALUES)
async def test_a_value_of_four_megabytes(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    value = bytes(range(256)) * 16_384
    produced = await client.produce(topic, [Record(value=value, key=b"k")])
    assert values_of(await client.fetch(topic, produced[0].partition, 0)) == [value]


@needs(Ability.NULL_VALUES)
async def test_null_is_not_empty(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    sent = [Record(value=None, key=b"k"), Record(value=b"", key=b"k")]
    produced = await client.produce(topic, sent)
    assert values_of(await client.fetch(topic, produced[0].partition, 0)) == [None, b""]


@needs(Ability.KEYS_READ)
async def test_keys_round_trip(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    produced = await client.produce(topic, [Record(value=b"v", key=b"the key")])
    assert [record.key for record in await client.fetch(topic, produced[0].partition, 0)] == [b"the key"]


@needs(Ability.HEADERS)
async def test_typed_headers_round_trip(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    headers = (
        Header(b"content-type", b"text/plain", value_kind=HeaderKind.STRING),
        Header(b"attempt", (3).to_bytes(4, "little"), value_kind=HeaderKind.UINT32),
        Header(b"content-type", b"twice", value_kind=HeaderKind.STRING),
    )
    produced = await client.produce(
        topic, [Record(value=b"v", key=b"k", headers=headers), Record(value=b"w", key=b"k")]
    )
    records = await client.fetch(topic, produced[0].partition, 0)
    assert [record.headers for record in records] == [headers, ()]


@needs(Ability.CHOOSE_PARTITION, Ability.CREATE_TOPIC)
async def test_a_chosen_partition(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.create_topic(topic, 4)
    produced = await client.produce(topic, [Record(value=b"v")], partition=3)
    assert (produced[0].partition, produced[0].offset) == (3, 0)


@needs(Ability.CREATE_TOPIC)
async def test_a_created_topic_is_listed_with_its_partitions(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.create_topic(topic, 5)
    assert topic in {info.name for info in await client.topics()}
    keys = [f"key-{number}".encode() for number in range(64)]
    produced = await client.produce(topic, [Record(value=b"v", key=key) for key in keys])
    assert {place.partition for place in produced} == set(range(5))


@needs(Ability.DELETE_TOPIC)
async def test_a_deleted_topic_starts_again_empty(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.produce(topic, [Record(value=b"old", key=b"k")])
    await client.delete_topic(topic)
    assert topic not in {info.name for info in await client.topics()}
    produced = await client.produce(topic, [Record(value=b"new", key=b"k")])
    assert produced[0].offset == 0
    assert values_of(await client.fetch(topic, produced[0].partition, 0)) == [b"new"]


@needs(Ability.BOUNDS)
async def test_bounds_follow_the_records(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.create_topic(topic, 2)
    await client.produce(topic, [Record(value=b"v")] * 3, partition=1)
    bounds = await client.bounds(topic)
    assert [(part.partition, part.first_offset, part.next_offset) for part in bounds] == [(0, 0, 0), (1, 0, 3)]


@needs(Ability.OFFSET_BY_TIME, Ability.CHOOSE_PARTITION)
async def test_the_first_offset_at_a_time(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.create_topic(topic, 1)
    for number in range(3):
        await client.produce(topic, [Record(value=str(number).encode())], partition=0)
    records = await client.fetch(topic, 0, 0)
    time_us = records[1].append_time_us
    first = next(record.offset for record in records if record.append_time_us >= time_us)
    assert await client.offset_at(topic, 0, time_us) == first
    assert await client.offset_at(topic, 0, records[2].append_time_us + 1) == 3


@needs(Ability.LONG_POLL)
async def test_a_waiting_fetch_returns_new_records(clients: WireClients, topic: str) -> None:
    reader, writer = await clients.open(), await clients.open()
    produced = await writer.produce(topic, [Record(value=b"first", key=b"k")])
    waiting = asyncio.create_task(reader.fetch(topic, produced[0].partition, 1, wait_ms=20_000))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await writer.produce(topic, [Record(value=b"second", key=b"k")])
    assert values_of(await waiting) == [b"second"]


@needs(Ability.LEVELS)
async def test_a_synced_record(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    produced = await client.produce(topic, [Record(value=b"v", key=b"k")], level=Level.SYNCED)
    assert values_of(await client.fetch(topic, produced[0].partition, 0)) == [b"v"]


@needs(Ability.NULL_KEYS, Ability.KEYS_READ)
async def test_no_key_is_not_an_empty_key(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    await client.create_topic(topic, 1)
    await client.produce(topic, [Record(value=b"a"), Record(value=b"b", key=b"")], partition=0)
    assert [record.key for record in await client.fetch(topic, 0, 0)] == [None, b""]


@needs(Ability.WHITE_SPACE_VALUES)
async def test_white_space_is_kept(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    values = [b"two words", b" lead", b"tail ", b"\t", b" "]
    produced = await client.produce(topic, [Record(value=value, key=b"k") for value in values])
    assert values_of(await client.fetch(topic, produced[0].partition, 0)) == values


@needs(Ability.IDS, Ability.ORIGIN_TIMES)
async def test_ids_and_origin_times_round_trip(clients: WireClients, topic: str) -> None:
    client = await clients.open()
    records = [Record(value=b"v", key=b"k", id=bytes(range(16)), origin_time_us=-5), Record(value=b"w", key=b"k")]
    produced = await client.produce(topic, records)
    found = await client.fetch(topic, produced[0].partition, 0)
    assert [(record.id, record.origin_time_us) for record in found] == [(bytes(range(16)), -5), (None, None)]
