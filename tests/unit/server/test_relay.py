"""A standby forwards connections, also those that arrive before there is a leader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress

import pytest

from polywire.server import relay
from polywire.server.config import Address
from polywire.server.relay import Relay
from polywire.server.standby import own_answer

Place = tuple[str, int]


@asynccontextmanager
async def echoing() -> AsyncIterator[Place]:
    """A leader that echoes its input until the connection ends."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while reported := await reader.read(100):
            writer.write(reported)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


@asynccontextmanager
async def relayed(find: Callable[[], Place | None], asked: Collection[str] = ()) -> AsyncIterator[tuple[Relay, Place]]:
    carrying = Relay(lambda listener: find() if listener == "polywire" else None, own_answer, answered=asked)
    addresses = await carrying.listen({"polywire": Address("127.0.0.1", 0)})
    try:
        yield carrying, ("127.0.0.1", addresses["polywire"].port)
    finally:
        await carrying.stop()
        while carrying._ends:  # noqa: ASYNC110 - looking is the point
            await asyncio.sleep(0)


async def said(place: Place, reported: bytes) -> bytes:
    """Return the reply; nothing if the peer closes the connection."""
    reader, writer = await asyncio.open_connection(*place)
    writer.write(reported)
    try:
        return await reader.read(100)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "LOOK_S", 0.001)


def test_connections_are_forwarded() -> None:
    async def run() -> None:
        async with echoing() as leader, relayed(lambda: leader) as (_, place):
            assert await said(place, b"hello") == b"hello"

    asyncio.run(run())


@pytest.mark.parametrize("closed", [False, True])
def test_connections_without_a_leader_wait_for_one(closed: bool) -> None:
    """Whether no leader is known, or the known one's port is closed."""

    async def run() -> None:
        async with echoing() as gone:
            pass
        async with echoing() as leader:
            looks = 0

            def find() -> Place | None:
                nonlocal looks
                looks += 1
                if looks > 3:
                    return leader
                return gone if closed else None

            async with relayed(find) as (_, place):
                assert await said(place, b"hello") == b"hello"
            assert looks == 4

    asyncio.run(run())


def test_connections_without_a_leader_are_closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with relayed(lambda: None) as (_, place):
            assert await said(place, b"hello") == b""

    monkeypatch.setattr(relay, "HOLD_S", 0.01)
    asyncio.run(run())


def test_stop_closes_waiting_connections() -> None:
    async def run() -> None:
        looked = asyncio.Event()

        def find() -> None:
            looked.set()

        async with relayed(find) as (carrying, place):
            waiting = asyncio.create_task(said(place, b"hello"))
            await looked.wait()
            await carrying.stop()
            assert await waiting == b""

    asyncio.run(run())


def test_a_process_answers_livez_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without a leader; every other request is forwarded."""
    live = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"

    async def run() -> None:
        async with relayed(lambda: None, {"polywire"}) as (_, place):
            assert (await said(place, live)).startswith(b"HTTP/1.1 200 OK\r\n")
            assert await said(place, live.replace(b"livez", b"readyz")) == b""
            reader, silent = await asyncio.open_connection(*place)
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 20) == b"", "silent connections are closed"
            silent.close()
        async with echoing() as leader:
            async with relayed(lambda: leader, {"polywire"}) as (_, place):
                assert (await said(place, live)).startswith(b"HTTP/1.1 200 OK\r\n")
                for carried in (b"GET /livezz HTTP/1.1\r\n\r\n", b"POST /livez HTTP/1.1\r\n\r\n", b"\x00\xff"):
                    assert await said(place, carried) == carried
            async with relayed(lambda: leader) as (_, place):
                assert await said(place, live) == live

    monkeypatch.setattr(relay, "HOLD_S", 0.01)
    monkeypatch.setattr(relay, "FIRST_BYTES_S", 0.5)
    asyncio.run(run())
