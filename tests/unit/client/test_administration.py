"""``polywire.Client``: settings, groups and their lag; timestamps and JSON."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import polywire
from polywire import Client, Record
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.testing.thread import BrokerThread
from tests.unit.client.served import Play

MOMENT = datetime(2024, 2, 29, 12, 30, 0, 250, tzinfo=UTC)


def test_settings_and_partitions_of_a_topic(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("orders", 1)
        await client.alter_topic("orders", partitions=3, settings={"retention_bytes": 24})
        assert (await client.topic_settings("orders"))["retention_bytes"] == 24
        assert len(await client.bounds("orders")) == 3
        await client.alter_topic("orders", settings={"retention_bytes": None})
        assert (await client.topic_settings("orders")).get("retention_bytes") is None
        with pytest.raises(Invalid, match="no such topic setting, did you mean 'retention_bytes'"):
            await client.alter_topic("orders", settings={"retention_byte": 24})
        with pytest.raises(Invalid) as refused:
            await client.alter_topic("orders", partitions=2)
        assert refused.value.code is ErrorCode.INVALID_PARTITION_COUNT
        with pytest.raises(Missing):
            await client.topic_settings("ordrs")

    play(scenario)


def test_groups_and_their_lag(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("orders", 1)
        for number in range(5):
            await client.send("orders", str(number))
        async with client.consumer("orders", group="billing") as consumer:
            await consumer.batch(3)
            await consumer.commit()
            (group,) = await client.groups("billing")
            assert (group.name, group.topic, dict(group.positions)) == ("billing", "orders", {0: 3})
            (part,) = await client.lag("billing", "orders")
            assert (part.position, part.next_offset, part.records) == (3, 5, 2)
        with pytest.raises(Missing, match="no such group, did you mean 'billing'"):
            await client.lag("biling", "orders")

    play(scenario)


@pytest.mark.parametrize("wire", ["flux", "kafka"])
def test_protocols_without_these_requests_say_which_has_them(wire: str) -> None:
    with BrokerThread(wires=[wire]) as broker, polywire.connect_sync(broker.url(wire)) as client:
        with pytest.raises(Invalid, match="cannot change settings: connect with a polywire:// URL"):
            client.alter_topic("orders", settings={"retention_bytes": 1})
        if wire == "kafka":
            assert client.groups() == []
        else:
            with pytest.raises(Invalid, match="polywire:// or kafka:// URL"):
                client.groups()


def test_timestamps_are_stored(play: Play) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("events", 1)
        await client.send("events", "first", timestamp=MOMENT)
        await client.send("events", Record("second", timestamp=MOMENT + timedelta(seconds=1)))
        await client.send("events", "third")
        found = await client.fetch("events", 0, 0)
        assert [record.timestamp for record in found] == [MOMENT, MOMENT + timedelta(seconds=1), None]
        with pytest.raises(Invalid, match="must be set in the Record"):
            await client.send("events", Record("x"), timestamp=MOMENT)
        with pytest.raises(Invalid, match="datetime with a time zone"):
            await client.send("events", "x", timestamp=datetime(2024, 1, 1))
        with pytest.raises(Invalid, match="not both"):
            Record("x", origin_time_us=1, timestamp=MOMENT)

    play(scenario)


def test_values_in_json(play: Play) -> None:
    order = {"id": 7, "name": "Zoë", "lines": [1.5, None]}

    async def scenario(client: Client) -> None:
        await client.create_topic("orders", 1)
        await client.send_json("orders", order, key="a", timestamp=MOMENT)
        async with client.producer() as producer:
            await producer.send_json("orders", None)
        await client.send("orders", None)
        found = await client.fetch("orders", 0, 0)
        assert found[0].value == '{"id":7,"name":"Zoë","lines":[1.5,null]}'.encode()
        assert [record.json() for record in found] == [order, None, None]
        assert [record.value for record in found[1:]] == [b"null", None]
        with pytest.raises(Invalid, match="cannot be written as JSON"):
            await client.send_json("orders", {"at": MOMENT})
        with pytest.raises(Invalid, match="cannot be written as JSON"):
            await client.send_json("orders", float("nan"))

    play(scenario)


def test_the_blocking_client_has_the_same_calls() -> None:
    with BrokerThread(wires=["polywire"]) as broker, polywire.connect_sync(broker.url()) as client:
        client.create_topic("orders", 1)
        client.send_json("orders", [1, 2], timestamp=MOMENT)
        with client.producer() as producer:
            producer.send_json("orders", [3], timestamp=MOMENT).result()
        with client.consumer("orders", group="billing") as consumer:
            records = consumer.batch(timeout_s=10)
            assert [record.json() for record in records] == [[1, 2], [3]]
            consumer.pause("orders")
            assert consumer.paused == [("orders", 0)]
            consumer.resume("orders")
            assert consumer.paused == []
            consumer.commit()
            assert [part.records for part in client.lag("billing", "orders")] == [0]
            assert [group.name for group in client.groups()] == ["billing"]
        client.alter_topic("orders", settings={"retention_bytes": 3})
        assert client.topic_settings("orders")["retention_bytes"] == 3
