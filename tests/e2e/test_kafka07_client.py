"""The Kafka 0.7 client against a real broker: produce, fetch, compressed batches, offsets that outlive a consumer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from polywire.client.connect import connect
from polywire.client.kafka07 import Kafka07Client
from polywire.client.kafka07_streams import Consumer, Message, Producer, SyncConsumer, SyncProducer
from polywire.errors import Invalid, Missing, Unavailable
from polywire.protocols.kafka07.messages import LATEST, CompressionCodec, encode_message, encode_set
from polywire.records.columns import Record
from tests.broker_process import BrokerProcess


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("kafka07") / "data") as process:
        yield process


def run(broker: BrokerProcess, work: Any) -> Any:
    async def connected() -> Any:
        client = await connect(broker.url("kafka07"))
        assert isinstance(client, Kafka07Client)
        async with client:
            return await asyncio.wait_for(work(client), 20)

    coroutine: Coroutine[Any, Any, Any] = connected()
    return asyncio.run(coroutine)


async def take(consumer: Consumer, count: int) -> list[Message]:
    found: list[Message] = []
    messages = aiter(consumer)
    while len(found) < count:
        found.append(await anext(messages))
    await messages.aclose()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("compression", list(CompressionCodec))
def test_batches_in_order(broker: BrokerProcess, compression: CompressionCodec) -> None:
    topic = f"batches-{compression.name}"

    async def work(client: Kafka07Client) -> None:
        producer = Producer(client, compression=compression)
        for number in range(1050):
            await producer.send(topic, b"%04d" % number, key=b"k%d" % (number % 5))
        await producer.flush()
        consumer = Consumer(client, topic)
        found = await take(consumer, 1050)
        by_partition = [[m.value for m in found if m.partition == number] for number in range(3)]
        assert sorted(itertools.chain(*by_partition)) == [b"%04d" % number for number in range(1050)]
        assert all(values == sorted(values) for values in by_partition)
        ends = {number: (await client.addresses(topic, number))[0] for number in range(3)}
        assert consumer.positions == ends

    run(broker, work)


def test_offsets_survive_their_consumer(broker: BrokerProcess, tmp_path: Path) -> None:
    path = tmp_path / "positions.json"
    url = broker.url("kafka07")
    producer = SyncProducer(url, batch_records=3)
    with producer:
        for number in range(20):
            producer.send("kept", b"%d" % number, partition=1)
    consumer = SyncConsumer(url, "kept", path=path)
    first = [message.value for message in itertools.islice(consumer, 12)]
    consumer.commit()
    consumer.close()
    second = SyncConsumer(url, "kept", path=path)
    assert first + [message.value for message in itertools.islice(second, 8)] == [b"%d" % n for n in range(20)]
    second.close()


def test_offsets_out_of_range_are_reset(broker: BrokerProcess) -> None:
    async def work(client: Kafka07Client) -> None:
        await client.send(b"", "reset")
        await client.write("reset", 0, encode_set([b"one", b"two"]))
        consumer = Consumer(client, "reset", partitions=[0], positions={0: 10_000})
        assert [message.value for message in await take(consumer, 2)] == [b"one", b"two"]
        latest = Consumer(client, "reset", start=LATEST)
        assert await latest.poll() == []
        await client.write("reset", 0, encode_set([b"three"]))
        assert [message.value for message in await latest.poll()] == [b"three"]

    run(broker, work)


def test_messages_of_a_wrapper_share_one_offset(broker: BrokerProcess) -> None:
    """As a real 0.7 broker returns them."""
    from polywire.protocols.kafka07.compression import wrap

    async def work(client: Kafka07Client) -> None:
        packed = wrap(encode_set([b"a", b"bb"]), CompressionCodec.GZIP)
        data = encode_message(b"x") + packed + encode_message(b"yy", 0) + packed[:-1]
        found = client.decode(memoryview(data), 1000)
        assert found.values == [b"x", b"a", b"bb", b"yy"]
        end = 1011 + len(packed)
        assert found.positions == [1011, 1011, end, end + 11]
        assert (found.next_address, found.is_cut) == (end + 11, False)
        assert client.decode(memoryview(packed[:-1]), 7).is_cut

    run(broker, work)


def test_long_messages_are_fetched_again_with_a_larger_size(broker: BrokerProcess) -> None:
    async def work(client: Kafka07Client) -> None:
        value = bytes(3_000_000)
        await client.produce("long", [Record(value)], partition=0)
        assert (await client.read("long", 0, 0, bytes_max=1000)).values == [value]
        consumer = Consumer(client, "long", partitions=[0])
        assert [message.value for message in await take(consumer, 1)] == [value]

    run(broker, work)


def test_offsets_are_counted(broker: BrokerProcess) -> None:
    async def work(client: Kafka07Client) -> None:
        other = await connect(broker.url("kafka07"))
        for number in range(30):
            side = client if number % 3 else other
            [place] = await side.produce("counted", [Record(b"%d" % number)], partition=2)
            assert (place.partition, place.offset) == (2, number)
        fresh = await connect(broker.url("kafka07"))
        [record] = await fresh.fetch("counted", 2, 17, records_max=1)
        assert (record.value, record.offset) == (b"17", 17)
        await other.close()
        await fresh.close()

    run(broker, work)


def test_refusals(broker: BrokerProcess) -> None:
    async def work(client: Kafka07Client) -> None:
        with pytest.raises(Missing):
            await client.read("t", 99, 0)
        with pytest.raises(Invalid):
            await client.read("a\nb", 0, 0)
        with pytest.raises(Invalid):
            await client.produce("t", [Record(None)])
        with pytest.raises(Invalid):
            await client.topics()
        with pytest.raises(Unavailable):
            await client.write("t", 99, encode_set([b"x"]))
        with pytest.raises(Unavailable):
            await client.read("t", 0, 0)

    run(broker, work)


def test_the_port_for_every_protocol(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", "--any", "127.0.0.1:0") as process:
        host, port = process.addresses["any"]
        with SyncProducer(f"kafka07://{host}:{port}", compression=CompressionCodec.GZIP) as producer:
            producer.send("shared", b"value", partition=0)
        consumer = SyncConsumer(f"kafka07://{host}:{port}", "shared")
        assert next(iter(consumer)).value == b"value"
        consumer.close()
