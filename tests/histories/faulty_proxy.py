"""A TCP proxy with the faults of a network and of an object store, between a broker and its bucket.

* **silent**: nothing is forwarded until the fault ends, and then all of it, late, as after a partition.
* **silent replies**: requests arrive, and their responses come late (an asymmetric partition).
* **lost replies**: requests are executed, and the connection is reset instead of a response.
* **reset**: connections are reset, and so are new ones.
* **slow**: a few kilobytes per second. **late**: every piece of data takes a while.
* **unavailable**: the store answers 503 without executing the request. **throttled**: 429, for half of the requests.
"""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from types import TracebackType
from typing import Final

import uvloop

NONE: Final = ""
SILENT: Final = "silent"
SILENT_REPLIES: Final = "silent replies"
LOST_REPLIES: Final = "lost replies"
RESET: Final = "reset"
SLOW: Final = "slow"
LATE: Final = "late"
UNAVAILABLE: Final = "unavailable"
THROTTLED: Final = "throttled"
FAULTS: Final = (SILENT, SILENT_REPLIES, LOST_REPLIES, RESET, SLOW, LATE, UNAVAILABLE, THROTTLED)
CHUNK_BYTES: Final = 1 << 16
SLOW_BYTES: Final = 512  # forwarded at a time
SLOW_S: Final = 0.05  # between two such pieces
LATE_S: Final = (0.05, 0.6)
LOOK_S: Final = 0.02
HEAD_END: Final = b"\r\n\r\n"
ERROR: Final = "HTTP/1.1 {} Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
DRAIN_S: Final = 1.0  # for the rest of a request that gets an error


class FaultyProxy:
    """Forwards connections to a port of this machine. ``fault`` can be set at any time, from any thread."""

    def __init__(self, target_port: int, chance: random.Random) -> None:
        self._target: Final = target_port
        self._chance: Final = chance
        self._fault = NONE
        self._loop: Final = uvloop.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread: Final = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = 0

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def fault(self) -> str:
        """The fault that applies now."""
        return self._fault

    @fault.setter
    def fault(self, fault: str) -> None:
        self._fault = fault
        if fault == RESET:
            self._loop.call_soon_threadsafe(self._reset_all)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _end(self) -> None:
        """Close all connections and the listener."""
        assert self._server is not None
        self._server.close()
        self._reset_all()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _reset_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._fault == RESET:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there[1]}
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._requests(reader, writer, there[1]))
                pumps.create_task(self._replies(there[0], writer))
        except* (OSError, EOFError):
            pass
        finally:
            self._writers -= {writer, there[1]}
            for each in (writer, there[1]):
                each.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, there: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            refused = self._fault == THROTTLED and self._chance.random() < 0.5
            if (self._fault == UNAVAILABLE or refused) and HEAD_END in data:
                writer.write(ERROR.format(429 if refused else 503).encode())
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(-1), DRAIN_S)
                break
            await self._forward(data, there, holding=(SILENT,))
        raise EOFError

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self._fault == LOST_REPLIES:
                break
            await self._forward(data, writer, holding=(SILENT, SILENT_REPLIES))
        raise EOFError

    async def _forward(self, data: bytes, to: asyncio.StreamWriter, *, holding: tuple[str, ...]) -> None:
        while self._fault in holding:  # noqa: ASYNC110 - looking is the point
            await asyncio.sleep(LOOK_S)
        if self._fault == LATE:
            await asyncio.sleep(self._chance.uniform(*LATE_S))
        while data:  # the fault may end meanwhile
            if to.is_closing():  # the other direction has ended
                raise EOFError
            size = SLOW_BYTES if self._fault == SLOW else len(data)
            to.write(data[:size])
            data = data[size:]
            await to.drain()
            if self._fault == SLOW:
                await asyncio.sleep(SLOW_S)
