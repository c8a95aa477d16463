"""One peer's HTTP: requests are gathered whole, carried out one after the other, and answered on the broker's loop (decision 0054).

Promises: of one connection one request is carried out at a time, what follows it waits unread; who sends none for a while, or does not finish
one, is let go; what carries requests out is loaded for the first of them. Must not know: what requests mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import structlog

from polywire.errors import PeerError
from polywire.http.framing import BODY_BYTES_MAX, HEAD_BYTES_MAX, Refusal, request_bytes
from polywire.protocols.runtime.session import Output

IDLE_S: Final = 60.0  # between two requests, and for one to arrive
log = structlog.get_logger("polywire.http")


class Exchange(Protocol):
    """Carries out one request."""

    async def run(self, request: bytes) -> bool:
        """Answer it; whether the connection goes on."""


class Application(Protocol):
    """What requests are carried out by."""

    def exchange(self, output: Output, drained: asyncio.Event) -> Exchange:
        """For one request. drained: set whenever the peer has read."""


class Site(Protocol):
    """What the sessions of one listener share."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where everything happens."""

    async def application(self) -> Application:
        """What requests are carried out by, loaded when it is first asked for."""


class HttpSession:
    """Invariant: ``_task`` carries out the one request that was taken and not answered; without one ``_idle`` lets the connection go.
    ``_rest``: what a peer that has finished left."""

    body_bytes_max: int = BODY_BYTES_MAX

    def __init__(self, site: Site, output: Output, resume: Callable[[], None]) -> None:
        self._site: Final = site
        self._output: Final = output
        self._resume: Final = resume
        self._drained: Final = asyncio.Event()
        self._task: asyncio.Task[bool] | None = None
        self._wanted = 0
        self._finishing = False
        self._rest = b""
        self._idle = site.loop.call_later(IDLE_S, output.close)

    def receive(self, data: memoryview) -> int:
        """Take one whole request. Raises PeerError."""
        if self._task is not None:
            return 0
        size = request_bytes(data, self.body_bytes_max)
        if isinstance(size, Refusal):
            self._output.write(size.answer)
            raise PeerError(f"HTTP request rejected status={size.value!r}", fatal=True)
        self._wanted = size
        if not 0 < size <= len(data):
            return 0
        self._wanted = 0
        self._idle.cancel()
        self._task = self._site.loop.create_task(self._answer(bytes(data[:size])))
        self._task.add_done_callback(self._answered)
        return size

    async def _answer(self, request: bytes) -> bool:
        application = await self._site.application()
        return await application.exchange(self._output, self._drained).run(request)

    def _answered(self, task: asyncio.Task[bool]) -> None:
        self._task = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("HTTP request failed", peer=self._output.peer, exc_info=error)
        if error is not None or not task.result():
            self._output.close()
            return
        if self._finishing:
            self._take_rest()
            return
        self._idle = self._site.loop.call_later(IDLE_S, self._output.close)
        self._resume()

    @property
    def frame_bytes_max(self) -> int:
        """Of one request."""
        return HEAD_BYTES_MAX + self.body_bytes_max

    @property
    def spoken_dialect(self) -> str:
        """There is one only."""
        return ""

    def wanted(self) -> int:
        """Bytes of the request that has begun."""
        return self._wanted

    def paused(self) -> bool:
        """Whether a request is being carried out."""
        return self._task is not None

    def owes(self) -> bool:
        """Whether a request is being carried out."""
        return self._task is not None

    def drained(self) -> None:
        """The peer reads again."""
        self._drained.set()

    def finish(self, data: memoryview) -> None:
        """The peer sends no more; whole requests that it left are still answered."""
        self._finishing = True
        self._rest = bytes(data)
        if self._task is None:
            self._take_rest()

    def _take_rest(self) -> None:
        """Carry out the next request that was left; close behind the last."""
        with suppress(PeerError):  # it was answered
            count = self.receive(memoryview(self._rest))
            self._rest = self._rest[count:]
        if self._task is None:
            self._output.close()

    def close(self) -> None:
        """The connection is gone."""
        self._idle.cancel()
        if self._task is not None:
            self._task.cancel()
