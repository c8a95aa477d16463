"""``record consume --follow`` and ``record tail`` over every protocol, also for partitions that are added later."""

from __future__ import annotations

import asyncio

import pytest

from polywire.cli import record
from polywire.cli.record import LineFormat
from polywire.cli.start_position import spans
from polywire.client.base import Ability
from polywire.client.connect import connect
from polywire.client.consume import Bound
from polywire.client.polywire import PolywireClient
from polywire.records.columns import Record
from polywire.testing.thread import BrokerThread


@pytest.mark.parametrize("wire", ["polywire", "kafka", "cursus"])
def test_added_partitions_are_followed(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], wire: str
) -> None:
    monkeypatch.setattr(record, "PARTITIONS_S", 0.05)

    async def scenario(broker: BrokerThread) -> None:
        writer, reader = await connect(broker.url()), await connect(broker.url(wire))
        assert isinstance(writer, PolywireClient)
        assert Ability.BOUNDS in reader.abilities
        await writer.create_topic("t", 2)
        await writer.produce("t", [Record(b"before")], partition=1)
        found = await spans(reader, "t", partition=None, start=Bound.LATEST)
        printer = record._Printer("t", LineFormat.RAW, 3)
        following = asyncio.ensure_future(record._follow_all(reader, printer, found, None))
        await writer.produce("t", [Record(b"one")], partition=0)
        await writer.grow_topic("t", 3)
        await writer.produce("t", [Record(b"two"), Record(b"three")], partition=2)
        await asyncio.wait_for(following, 60)
        await writer.close()
        await reader.close()

    with BrokerThread(wires=["polywire", wire]) as broker:
        asyncio.run(scenario(broker))
    assert sorted(capsysbinary.readouterr().out.split()) == [b"one", b"three", b"two"]
