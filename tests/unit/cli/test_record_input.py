"""Standard input as numbered lines, wherever reads cut the bytes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.cli import record
from polywire.cli.record import LineReader
from polywire.errors import ErrorCode, Invalid


def read_all(pieces: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Write the pieces into a pipe one by one, and return the lines read from it."""
    source, sink = os.pipe()

    def write() -> None:
        for piece in pieces:
            os.write(sink, piece)
        os.close(sink)

    async def read() -> list[tuple[int, bytes]]:
        reader, found = LineReader(source), []
        while (lines := await reader.next_lines()) is not None:
            found += lines
        return found

    writer = threading.Thread(target=write)
    writer.start()
    try:
        return asyncio.run(read())
    finally:
        writer.join()
        os.close(source)


@given(st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"x", b"\n")), max_size=6))
def test_lines_are_whole_and_numbered_wherever_the_bytes_are_cut(pieces: list[bytes]) -> None:
    text = b"".join(pieces)
    lines = text.split(b"\n")
    expected = lines if lines[-1] else lines[:-1]
    assert read_all([piece for piece in pieces if piece]) == list(enumerate(expected, 1))


def test_lines_of_a_slow_writer_are_returned_at_once() -> None:
    source, sink = os.pipe()

    async def read() -> None:
        reader = LineReader(source)
        os.write(sink, b"one\ntw")
        assert await reader.next_lines() == [(1, b"one")]
        os.write(sink, b"o\n")
        assert await reader.next_lines() == [(2, b"two")]
        waiting = asyncio.ensure_future(reader.next_lines())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    try:
        asyncio.run(read())
    finally:
        os.close(source)
        os.close(sink)


def test_a_line_that_is_too_long_is_rejected_after_the_lines_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "LINE_BYTES_MAX", 10)
    source, sink = os.pipe()

    async def read() -> None:
        reader = LineReader(source)
        os.write(sink, b"fine\n" + b"x" * 11)
        assert await reader.next_lines() == [(1, b"fine")]
        with pytest.raises(Invalid, match="line=2") as caught:
            await reader.next_lines()
        assert caught.value.code is ErrorCode.RECORD_TOO_LARGE

    try:
        asyncio.run(read())
    finally:
        os.close(source)
        os.close(sink)
