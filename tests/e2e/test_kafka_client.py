"""The ``kafka://`` client against a running broker: login mechanisms, mixed groups, and a kill."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

import polywire
from polywire.client import connect as connecting
from polywire.client.connect import connect
from polywire.client.kafka import KafkaClient
from polywire.client.kafka_connection import MECHANISMS
from polywire.client.listings import lags_of
from polywire.errors import Conflict, Denied, ErrorCode, Missing
from polywire.records.columns import Record
from polywire.server.users import add_user
from tests.broker_process import BrokerProcess
from tests.certificates import Certificates

PASSWORD = "pencil, with = and ü"
IN_URL = "pencil%2C%20with%20%3D%20and%20%C3%BC"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    if which("openssl") is None:
        pytest.skip("logins under TLS were NOT tried: no openssl to make a certificate with")
    directory = tmp_path_factory.mktemp("kafka-client")
    certificates = Certificates(directory)
    users = directory / "users"
    add_user(users, "alice", PASSWORD, "all", scram=True)
    tls = ("--tls-certificate", certificates.path("server"), "--tls-key", certificates.path("server", "key"))
    options = ("--users", str(users), "--kafka-tls", "127.0.0.1:0", *tls)
    with pytest.MonkeyPatch.context() as patch, BrokerProcess(directory / "data", *options, wires=["kafka"]) as process:
        patch.setenv("SSL_CERT_FILE", certificates.path("authority"))
        yield process


def url(broker: BrokerProcess, words: str, *, tls: bool, mechanism: str) -> str:
    host, port = broker.addresses["kafka-tls" if tls else "kafka"]
    return f"kafka{'+tls' if tls else ''}://{words}@{host}:{port}{connecting.MECHANISM_OPTION}{mechanism}"


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_logins(broker: BrokerProcess, mechanism: str, tls: bool) -> None:
    topic = f"{mechanism}-{tls}"

    async def scenario() -> None:
        at = url(broker, f"alice:{IN_URL}", tls=tls, mechanism=mechanism)
        async with polywire.connect(at) as client:
            place = await client.send(topic, "one", key="k")
            assert [record.text for record in await client.fetch(topic, place.partition, 0)] == ["one"]
            async with client.consumer(topic, group=f"group-{topic}") as consumer:
                assert [record.text for record in await consumer.batch()] == ["one"]
        with pytest.raises(Denied) as caught:
            await connect(url(broker, "alice:guessed", tls=tls, mechanism=mechanism))
        assert caught.value.code is ErrorCode.LOGIN_FAILED
        assert "guessed" not in caught.value.message

    asyncio.run(asyncio.wait_for(scenario(), 120))


async def opened(broker: BrokerProcess) -> KafkaClient:
    client = await connect(broker.url("kafka"))
    assert isinstance(client, KafkaClient)
    return client


@pytest.fixture
def open_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", wires=["kafka", "flux"]) as process:
        yield process


def test_groups_are_listed_with_their_lag(open_broker: BrokerProcess) -> None:
    async def scenario() -> None:
        client, flux = await opened(open_broker), await connect(open_broker.url("flux"))
        for topic in ("orders", "others"):
            await client.create_topic(topic, 2)
            await client.produce(topic, [Record(value=b"v")] * 5, partition=1)
        one = await client.join("g", "orders", "m1")
        more = await client.join("g", "others", "m1")
        assert one.partitions == more.partitions == (0, 1)
        await client.commit("g", "orders", 1, 3, member="m1", generation=one.generation)
        await client.commit("alone", "others", 0, 7)
        place = await flux.join("f", "orders", "m2")
        await flux.commit("f", "orders", 0, 1, member="m2", generation=place.generation)
        await client.heartbeat("g", "orders", "m1", one.generation)

        found = {(group.topic, group.name): group for group in await client.groups()}
        assert set(found) == {("orders", "g"), ("others", "g"), ("others", "alone"), ("orders", "f")}
        assert [(member.id, member.wire, member.partitions) for member in found["orders", "g"].members] == [
            ("m1", "polywire", (0, 1))
        ]
        assert (found["orders", "f"].positions, found["orders", "f"].members) == ({0: 1}, ())
        assert found["orders", "g"].positions == {1: 3}
        lags = await lags_of(client, found["orders", "g"])
        assert [(lag.partition, lag.position, lag.records) for lag in lags] == [(0, None, None), (1, 3, 2)]
        assert lags[1].seconds is not None
        assert 0 < lags[1].seconds < 60
        assert [group.topic for group in await client.groups("alone")] == ["others"]

        await client.leave("g", "orders", "m1", one.generation)
        assert (await client.heartbeat("g", "others", "m1", more.generation)).partitions == (0, 1)
        with pytest.raises(Missing):
            await client.heartbeat("g", "orders", "m1", one.generation)
        await flux.close()
        await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_partition_is_reassigned_only_after_its_reader_rejoined(open_broker: BrokerProcess) -> None:
    async def scenario() -> None:
        first, second = await opened(open_broker), await opened(open_broker)
        await first.create_topic("orders", 2)
        one = await first.join("g", "orders", "m1")
        assert (await second.join("g", "orders", "m2")).partitions == ()
        with pytest.raises(Conflict):
            await first.heartbeat("g", "orders", "m1", one.generation)
        await first.commit("g", "orders", 1, 1, member="m1", generation=one.generation)
        assert (await second.join("g", "orders", "m2")).partitions == (), "its reader has not rejoined"
        kept = await first.join("g", "orders", "m1")
        with pytest.raises(Conflict):
            await first.commit("g", "orders", 1 - kept.partitions[0], 2, member="m1", generation=kept.generation)
        other = await second.join("g", "orders", "m2")
        assert sorted(kept.partitions + other.partitions) == [0, 1]
        assert await second.position("g", "orders", 1) == 1
        with pytest.raises(Missing) as caught:
            await first.join("g", "nothing", "m1")
        assert caught.value.code is ErrorCode.TOPIC_MISSING
        assert await first.heartbeat("g", "orders", "m1", kept.generation) == kept
        await first.close()
        await second.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_consumers_resume_after_a_kill(open_broker: BrokerProcess) -> None:
    records = 200
    values: list[str] = []

    async def scenario() -> None:
        async with polywire.connect(open_broker.url("kafka")) as client:
            producer = await opened(open_broker)
            await producer.create_topic("orders", 3)
            for number in range(records // 2):
                await client.send("orders", str(number), key=str(number))
            async with client.consumer("orders", group="g") as consumer:
                while len(values) < records // 2:
                    values.extend(record.text for record in await consumer.batch())
                open_broker.kill()
                open_broker.start()
                again = await opened(open_broker)
                late = [Record(value=str(number).encode(), key=b"k") for number in range(records // 2, records)]
                await again.produce("orders", late)
                while len(values) < records:
                    values.extend(record.text for record in await consumer.batch())
                await again.close()
            await producer.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))
    assert sorted(map(int, values)) == list(range(records))
