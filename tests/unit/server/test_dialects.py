"""The reported dialect of a connection: empty until its session has detected it."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from polywire.client.connect import connect
from polywire.server.connection import Connection
from polywire.testing.thread import BrokerThread

SPOKEN: Final = {"polywire": "", "flux": "", "kafka07": "", "cursus": "modern", "iggy": "0.0"}


def dialects(broker: BrokerThread) -> list[str]:
    async def look() -> list[str]:
        return [one.dialect for one in broker._hub.connections if isinstance(one, Connection)]

    return broker._call(look())


@pytest.mark.parametrize("wire", SPOKEN)
def test_our_clients(wire: str) -> None:
    async def scenario(broker: BrokerThread) -> list[str]:
        client = await connect(broker.url(wire))
        if wire == "kafka07":
            await client.fetch("orders", 0, 0)
        else:
            await client.topics()
        found = await asyncio.to_thread(dialects, broker)
        await client.close()
        return found

    with BrokerThread(wires=[wire]) as broker:
        assert asyncio.run(scenario(broker)) == [SPOKEN[wire]]
