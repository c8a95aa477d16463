"""Why no connection came about, as people are told: by what really listens there."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

import polywire
from polywire.client import link
from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.client.unreachable import cannot_connect
from polywire.errors import BrokerError, Denied, ErrorCode, Unavailable
from polywire.testing.process import lasting_port
from polywire.testing.thread import BrokerThread

WIRES: Final = ("polywire", "kafka", "flux", "cursus", "iggy", "kafka07")


async def refusal(url: str) -> str:
    try:
        client = await connect(url)
    except BrokerError as error:
        return error.message
    await client.close()
    raise AssertionError("somebody answered")


@pytest.mark.parametrize("wire", WIRES)
def test_nobody_listens(wire: str) -> None:
    port = lasting_port()
    told = asyncio.run(refusal(f"{wire}://127.0.0.1:{port}"))
    assert told == f"cannot connect: connection refused, is a broker running there? address=127.0.0.1:{port}"


@pytest.mark.parametrize("wire", WIRES)
def test_tls_on_a_plain_port(wire: str) -> None:
    with BrokerThread(wires=[wire]) as broker:
        told = asyncio.run(refusal(broker.url(wire).replace("://", "+tls://")))
    assert told.startswith("cannot connect: ")
    assert "TLS" in told


def test_no_tls_on_a_port_with_tls() -> None:
    """Whatever a port with TLS is told that is no TLS, it answers with an alert."""

    async def attempt() -> str:
        async def alert(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(1)
            writer.write(b"\x15\x03\x03\x00\x02\x02\x46")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(alert, "127.0.0.1", 0) as server:
            return await refusal(f"polywire://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    assert asyncio.run(attempt()) == "the port speaks TLS, connect with polywire+tls://"


def test_a_port_that_hangs_up() -> None:
    async def attempt() -> str:
        async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            return await refusal(f"polywire://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    assert asyncio.run(attempt()).startswith("cannot connect: it hung up at once")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TimeoutError(), "no answer in time"),
        (OSError(113, "No route to host"), "[Errno 113] No route to host"),
        (OSError(), "OSError"),
    ],
)
def test_every_cause_has_words(error: Exception, cause: str) -> None:
    assert cannot_connect(error, "h", 1).message == f"cannot connect: {cause} address=h:1"


def test_a_broker_that_is_not_there_yet_is_waited_for() -> None:
    async def scenario() -> None:
        port, begun = lasting_port(), asyncio.Event()
        tries = 0

        async def late() -> BrokerThread:
            await begun.wait()
            broker = BrokerThread(wires=["polywire"])
            broker.addresses = {"polywire": ("127.0.0.1", port)}
            await asyncio.to_thread(broker.start)
            return broker

        starting = asyncio.create_task(late())
        real = connect

        async def counted(url: str) -> WireClient:
            nonlocal tries
            tries += 1
            if tries == 2:
                begun.set()
            return await real(url)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link, "connect", counted)
            async with polywire.connect(f"127.0.0.1:{port}", connect_s=60) as client:
                assert await client.topics() == []
        assert tries > 2
        (await starting).stop()

    asyncio.run(scenario())


def test_waiting_has_an_end_and_wrong_logins_are_not_tried_again() -> None:
    async def refused(url: str) -> int:
        tries = 0

        async def counted(_: str) -> WireClient:
            nonlocal tries
            tries += 1
            if "denied" in url:
                raise Denied(ErrorCode.LOGIN_FAILED, "no")
            raise Unavailable(ErrorCode.STOPPING, "cannot connect")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link, "connect", counted)
            with pytest.raises(BrokerError):
                await polywire.connect(url, connect_s=0.2)
        return tries

    assert asyncio.run(refused("polywire://denied:1")) == 1
    assert asyncio.run(refused("polywire://nobody:1")) > 1
