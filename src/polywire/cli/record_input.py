"""Standard input as lines: a slow writer's lines at once, a file in large pieces.

Promises: an interrupt is never held up by a writer that sends nothing; lines are numbered from 1, blank ones counted.
Must not know: what a line means, the broker.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from polywire.errors import ErrorCode, Invalid

LINE_BYTES_MAX: Final = 16 * 1024 * 1024  # a record of 10 MB fits as base64; a longer line is a wrong file
READ_BYTES_MAX: Final = 1024 * 1024  # of standard input at once; its whole lines make one request


class LineReader:
    """Reads a descriptor. Guards: every line is given out once, whole and with its own number."""

    __slots__ = ("_descriptor", "_ended", "_number", "_rest")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._number = 1
        self._rest = b""
        self._ended = False

    async def next_lines(self) -> list[tuple[int, bytes]] | None:
        """Numbers and texts, without line feeds, of the lines that came (maybe none this time); None after the last.

        Raises Invalid(RECORD_TOO_LARGE) for a line that can be no record.
        """
        if len(self._rest) > LINE_BYTES_MAX:
            message = f"a line is too long line={self._number} bytes_max={LINE_BYTES_MAX}"
            raise Invalid(ErrorCode.RECORD_TOO_LARGE, message)
        if self._ended:
            return None
        await _readable(self._descriptor)
        data = os.read(self._descriptor, READ_BYTES_MAX)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if not data:
            self._ended = True
            lines, self._rest = [self._rest] if self._rest else [], b""
        numbered = list(enumerate(lines, self._number))
        self._number += len(lines)
        return numbered


async def _readable(descriptor: int) -> None:
    """Return when reading does not block."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:
        return  # a regular file: the selector refuses it, and reading it never waits for anybody
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
