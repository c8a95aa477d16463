"""Producing records again that may be stored already: idempotent producers and staged publishes."""

from __future__ import annotations

import pytest

from polywire.client.base import Ability, WireClient
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, ErrorCode
from polywire.records.columns import Record
from polywire.records.rows import from_records
from tests.behaviour.compatibility import needs
from tests.behaviour.conftest import WireClients

FIRST, SECOND = bytes([1] * 16), bytes([2] * 16)  # tokens


def batches_of(client: WireClient) -> PolywireClient:
    """Return the client as one that sends whole batches; so far one protocol declares the ability."""
    assert isinstance(client, PolywireClient)
    return client


def numbered(values: range, *, producer: bytes = b"producer", epoch: int = 0) -> bytearray:
    """Return a batch of a producer whose sequences equal the values."""
    records = [Record(value=b"%d" % value) for value in values]
    return from_records(records, producer_id=producer, producer_epoch=epoch, base_sequence=values.start)


async def stored(client: WireClient, topic: str) -> list[bytes | None]:
    return [record.value for record in await client.fetch(topic, 0, 0)]


@needs(Ability.IDEMPOTENCE)
async def test_a_duplicate_batch_returns_its_first_offset(clients: WireClients, topic: str) -> None:
    client, other = batches_of(await clients.open()), batches_of(await clients.open())
    await client.create_topic(topic, 1)
    for values in (range(3), range(3, 5)):
        places = await client.produce_batch(topic, 0, numbered(values))
        assert [place.offset for place in places] == list(values)
    for values in (range(3, 5), range(3)):
        again = await other.produce_batch(topic, 0, numbered(values))
        assert [place.offset for place in again] == list(values)
    assert await stored(client, topic) == [b"%d" % value for value in range(5)]


@needs(Ability.IDEMPOTENCE)
async def test_a_gap_and_an_older_epoch_are_refused(clients: WireClients, topic: str) -> None:
    client = batches_of(await clients.open())
    await client.create_topic(topic, 1)
    await client.produce_batch(topic, 0, numbered(range(3)))
    with pytest.raises(BrokerError) as gap:
        await client.produce_batch(topic, 0, numbered(range(4, 6)))
    assert gap.value.code is ErrorCode.SEQUENCE_GAP
    await client.produce_batch(topic, 0, numbered(range(1), epoch=1))
    with pytest.raises(BrokerError) as fenced:
        await client.produce_batch(topic, 0, numbered(range(3, 4)))
    assert fenced.value.code is ErrorCode.PRODUCER_FENCED
    assert await stored(client, topic) == [b"0", b"1", b"2", b"0"]


@needs(Ability.IDEMPOTENCE)
async def test_a_duplicate_batch_is_detected_after_a_kill(restartable: WireClients, topic: str) -> None:
    client = batches_of(await restartable.open())
    await client.create_topic(topic, 1)
    await client.produce_batch(topic, 0, numbered(range(3)))
    restartable.broker.kill()
    restartable.broker.start()
    client = batches_of(await restartable.open())
    again = await client.produce_batch(topic, 0, numbered(range(3)))
    assert [place.offset for place in again] == [0, 1, 2]
    assert await stored(client, topic) == [b"0", b"1", b"2"]


@needs(Ability.STAGING)
async def test_staged_records_appear_together_and_once(clients: WireClients, topic: str) -> None:
    client = batches_of(await clients.open())
    await client.create_topic(topic, 1)
    tokens = [FIRST, SECOND]
    for token, value in zip(tokens, (b"one", b"two"), strict=True):
        await client.stage(token, topic, 0, from_records([Record(value=value)]))
    assert await stored(client, topic) == []
    published = await client.publish("writer", 1, tokens)
    assert not published.duplicate
    assert await stored(client, topic) == [b"one", b"two"]
    assert (await client.publish("writer", 1, tokens)).duplicate
    await client.stage(FIRST, topic, 0, from_records([Record(value=b"staged again")]))
    assert (await client.publish("writer", 1, [FIRST])).duplicate
    assert await stored(client, topic) == [b"one", b"two"]


@needs(Ability.STAGING)
async def test_a_publish_is_all_or_nothing(clients: WireClients, topic: str) -> None:
    client = batches_of(await clients.open())
    await client.create_topic(topic, 1)
    kept, missing, abandoned = (bytes(15) + bytes([number]) for number in (11, 12, 13))
    for token in (kept, abandoned):
        await client.stage(token, topic, 0, from_records([Record(value=token)]))
    await client.abandon([abandoned])
    for unknown in (missing, abandoned):
        with pytest.raises(BrokerError) as caught:
            await client.publish(f"writer-of-{topic}", 1, [kept, unknown])
        assert caught.value.code is ErrorCode.STAGE_MISSING
        assert await stored(client, topic) == []
    await client.publish(f"writer-of-{topic}", 1, [kept])
    assert await stored(client, topic) == [kept]


@needs(Ability.STAGING)
async def test_a_publish_is_remembered_after_a_kill(restartable: WireClients, topic: str) -> None:
    client = batches_of(await restartable.open())
    await client.create_topic(topic, 1)
    await client.stage(FIRST, topic, 0, from_records([Record(value=b"one")]))
    await client.stage(SECOND, topic, 0, from_records([Record(value=b"two")]))
    await client.publish("writer", 1, [FIRST])
    restartable.broker.kill()
    restartable.broker.start()
    client = batches_of(await restartable.open())
    assert (await client.publish("writer", 1, [FIRST])).duplicate
    assert await stored(client, topic) == [b"one"]
    assert not (await client.publish("writer", 2, [SECOND])).duplicate
    assert await stored(client, topic) == [b"one", b"two"]
