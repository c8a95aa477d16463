"""Behavior common to all connections: errors of lost calls, reply order, cancelled callers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from unittest.mock import Mock

import pytest

from polywire.client import connection as module
from polywire.client.connection import FramedConnection
from polywire.errors import ErrorCode, Unavailable

Scene = Callable[["Frames"], Awaitable[None]]


class Frames(FramedConnection):
    """A protocol of plain frames."""

    BODY_BYTES_MIN = 1
    BODY_BYTES_MAX = 100

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self.transport = Mock(spec=asyncio.Transport)
        self.transport.get_extra_info.return_value = ("127.0.0.1", 9)
        self.transport.is_closing.return_value = False
        self.connection_made(self.transport)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def play(scene: Scene) -> None:
    async def run() -> None:
        await scene(Frames())

    asyncio.run(run())


def test_replies_go_to_calls_in_order_however_the_bytes_are_split() -> None:
    async def scene(connection: Frames) -> None:
        calls = [asyncio.ensure_future(connection.exchange(b"?", count)) for count in (1, 3, 2)]
        await asyncio.sleep(0)
        for byte in b"".join(frame(b"%d" % number) for number in range(6)):
            connection.data_received(bytes([byte]))
        assert await asyncio.gather(*calls) == [[b"0"], [b"1", b"2", b"3"], [b"4", b"5"]]

    play(scene)


def test_each_call_of_a_lost_connection_gets_its_own_error() -> None:
    async def scene(connection: Frames) -> None:
        calls = [asyncio.ensure_future(connection.exchange(b"?", 1)) for _ in range(3)]
        await asyncio.sleep(0)
        reported = Unavailable(ErrorCode.STOPPING, "gone")
        connection.fail(reported)
        connection.fail(Unavailable(ErrorCode.STOPPING, "gone again"))
        errors = await asyncio.gather(*calls, connection.exchange(b"?", 1), return_exceptions=True)
        assert [str(error) for error in errors] == ["gone"] * 4
        assert len({id(error) for error in (*errors, reported)}) == 5
        connection.transport.abort.assert_called_once_with()

    play(scene)


def test_nothing_is_written_to_a_closing_transport() -> None:
    """asyncio would print a warning for each write until it reports the loss."""

    async def scene(connection: Frames) -> None:
        connection.transport.is_closing.return_value = True
        with pytest.raises(Unavailable):
            await connection.exchange(b"?", 1)
        connection.transport.write.assert_not_called()

    play(scene)


def test_replies_to_a_cancelled_call_are_dropped() -> None:
    async def scene(connection: Frames) -> None:
        first, second = (asyncio.ensure_future(connection.exchange(b"?", 2)) for _ in range(2))
        await asyncio.sleep(0)
        connection.data_received(frame(b"a"))
        first.cancel()
        await asyncio.sleep(0)
        connection.data_received(frame(b"b") + frame(b"c") + frame(b"d"))
        assert await second == [b"c", b"d"]

    play(scene)


def test_a_call_waits_for_write_capacity() -> None:
    async def scene(connection: Frames) -> None:
        connection.pause_writing()
        call = asyncio.ensure_future(connection.exchange(b"?", 1))
        await asyncio.sleep(0)
        connection.data_received(frame(b"a"))
        await asyncio.sleep(0)
        assert not call.done()
        connection.resume_writing()
        assert await call == [b"a"]

    play(scene)


@pytest.mark.parametrize("data", [frame(b""), frame(bytes(101)), frame(b"a") + b"\0"])
def test_invalid_frames_close_the_connection(data: bytes) -> None:
    async def scene(connection: Frames) -> None:
        call = asyncio.ensure_future(connection.exchange(b"?", 1))
        await asyncio.sleep(0)
        connection.data_received(data)
        connection.transport.abort.assert_called_once_with()
        with pytest.raises(Unavailable):
            await connection.exchange(b"?", 1)
        await asyncio.wait([call])
        call.exception()

    play(scene)


def test_a_missing_first_reply_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout is longer while the peer still accepts bytes."""

    async def scene(connection: Frames) -> None:
        sizes = [7, 5, 1, 1, 0]
        connection.transport.get_write_buffer_size.side_effect = lambda: sizes.pop(0)
        errors = await asyncio.gather(*(connection.exchange(b"?", 1) for _ in range(2)), return_exceptions=True)
        cause = "cannot connect: no response in time (check that the port belongs to this protocol) address=127.0.0.1:9"
        assert [str(error) for error in errors] == [cause] * 2
        assert sizes == [0]

    monkeypatch.setattr(module, "FIRST_REPLY_S", 0.001)
    play(scene)


def test_later_and_long_running_replies_have_no_such_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answered(connection: Frames) -> None:
        connection.transport.get_write_buffer_size.return_value = 0
        calls = [asyncio.ensure_future(connection.exchange(b"?", 1)) for _ in range(2)]
        await asyncio.sleep(0)
        connection.data_received(frame(b"a"))
        await asyncio.sleep(0.02)
        connection.data_received(frame(b"b"))
        assert await asyncio.gather(*calls) == [[b"a"], [b"b"]]

    async def late(connection: Frames) -> None:
        connection.transport.get_write_buffer_size.return_value = 0
        connection.expect_late_replies()
        call = asyncio.ensure_future(connection.exchange(b"?", 1))
        await asyncio.sleep(0.02)
        connection.data_received(frame(b"a"))
        assert await call == [b"a"]

    monkeypatch.setattr(module, "FIRST_REPLY_S", 0.001)
    play(late)
    monkeypatch.setattr(module, "FIRST_REPLY_S", 0.01)
    play(answered)
