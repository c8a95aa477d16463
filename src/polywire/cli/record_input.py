"""Standard input as numbered lines.

* Lines of a slow writer are returned as they arrive. A file is read in large pieces.
* An interrupt takes effect at once, even if no input arrives.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from polywire.errors import ErrorCode, Invalid

LINE_BYTES_MAX: Final = 16 * 1024 * 1024  # fits a record of 10 MB as base64; a longer line indicates a wrong file
READ_BYTES_MAX: Final = 1024 * 1024  # all whole lines from one read are sent in one produce request


class LineReader:
    """Reads the lines of a descriptor and numbers them from 1, blank lines included."""

    __slots__ = ("_descriptor", "_ended", "_number", "_rest")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._number = 1
        self._rest = b""
        self._ended = False

    async def next_lines(self) -> list[tuple[int, bytes]] | None:
        """Return the next lines with their numbers, without line feeds.

        The list is empty if only part of a line has arrived; None follows the last line. Raises
        Invalid(RECORD_TOO_LARGE) for a line that is too long for a record.
        """
        if len(self._rest) > LINE_BYTES_MAX:
            message = f"line is too long line={self._number} bytes_max={LINE_BYTES_MAX}"
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
    """Wait until reading does not block."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:
        return  # a regular file: selectors do not support it, and reading it never waits for a writer
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
