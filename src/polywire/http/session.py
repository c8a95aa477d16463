"""The session of an HTTP connection (decision 0121).

The requests of a connection are executed one at a time, on the event loop. A request is executed when it has arrived
completely, and the next one is read after the response. If no complete request arrives for IDLE_S seconds, the
connection is closed.

Head and body of a request have limits, and a body without Content-Length is rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Final, Protocol

import structlog

from polywire.errors import PeerError
from polywire.protocols.runtime.session import Output

WIRE: Final = "http"
HEAD_BYTES_MAX: Final = 16 * 1024  # request line and headers
BODY_BYTES_MAX: Final = 2 * 1024 * 1024  # body of a request
HEADERS_MAX: Final = 100  # headers of a request
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_END: Final = b"\r\n\r\n"
_DIGITS_MAX: Final = 15  # digits of a Content-Length
CONSOLE: Final = "console"  # dialect of the connections of browsers
IDLE_S: Final = 60.0  # time for the next request to arrive completely
log = structlog.get_logger("polywire.http")


class Refusal(Enum):
    """Reasons to reject a request before it is parsed, with the status line of the response.

    The connection is then closed.
    """

    MALFORMED = "400 Bad Request"
    LENGTH_REQUIRED = "411 Length Required"
    BODY_TOO_LARGE = "413 Content Too Large"
    HEAD_TOO_LARGE = "431 Request Header Fields Too Large"

    @property
    def answer(self) -> bytes:
        return f"HTTP/1.1 {self.value}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()


def request_bytes(data: memoryview, body_bytes_max: int = BODY_BYTES_MAX) -> int | Refusal:
    beginning = bytes(data[: HEAD_BYTES_MAX + len(_END)])
    end = beginning.find(_END)
    if end < 0:
        return Refusal.HEAD_TOO_LARGE if len(beginning) > HEAD_BYTES_MAX else 0
    lines = beginning[:end].split(b"\r\n")
    if len(lines) > HEADERS_MAX + 1:
        return Refusal.HEAD_TOO_LARGE
    length = -1
    for line in lines[1:]:
        if line[:1] in (b" ", b"\t"):  # a folded header, from which other software might read another length
            return Refusal.MALFORMED
        name, _, value = line.partition(b":")
        match name.strip().lower():
            case b"transfer-encoding":
                return Refusal.LENGTH_REQUIRED
            case b"content-length":
                digits = value.strip()
                # a second length: a proxy might read the other one
                if length >= 0 or not digits.isdigit() or len(digits) > _DIGITS_MAX:
                    return Refusal.MALFORMED
                length = int(digits)
    if length > body_bytes_max:
        return Refusal.BODY_TOO_LARGE
    return end + len(_END) + max(length, 0)


def _head(request: memoryview) -> bytes:
    """Return request line and headers in lower case."""
    return bytes(request[:HEAD_BYTES_MAX]).partition(_END)[0].lower()


def expects_continue(request: memoryview) -> bool:
    """Return whether the client sends the body only after a response (RFC 9110, 10.1.1), as curl does."""
    return b"\r\nexpect: 100-continue" in _head(request)


def is_of_console(request: memoryview) -> bool:
    """Return whether a browser sent a request. Only pages of the console can make a browser do that (``guard``)."""
    head = _head(request)
    return b"\r\nsec-fetch-site:" in head or b"\r\nx-polywire: console" in head


class Exchange(Protocol):
    """Executes one HTTP request."""

    async def run(self, request: bytes) -> bool:
        """Respond to the request. Return whether the connection stays open."""


class Application(Protocol):
    """Creates an exchange for each request."""

    def exchange(self, output: Output, drained: asyncio.Event) -> Exchange:
        """Return an exchange for one request.

        ``drained`` is set whenever all response bytes were accepted by the kernel.
        """


class Site(Protocol):
    """State that the sessions of a listener share."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    async def application(self) -> Application:
        """Return the application, which the first call imports."""


class HttpSession:
    """The session of a connection. Implements ``Session``."""

    body_bytes_max: int = BODY_BYTES_MAX

    def __init__(self, site: Site, output: Output, resume: Callable[[], None]) -> None:
        self._site: Final = site
        self._output: Final = output
        self._resume: Final = resume
        self._drained: Final = asyncio.Event()
        self.requests = 0
        self._task: asyncio.Task[bool] | None = None  # executes the current request
        self._wanted = 0  # length of the request that is arriving; 0 if unknown
        self._finishing = False
        self._is_console = False
        self._rest = b""  # requests of a client that has closed its side of the connection
        # closes the connection; runs while no request is being executed
        self._idle = site.loop.call_later(IDLE_S, output.close)

    def receive(self, data: memoryview) -> int:
        """Start the request in ``data`` if it is complete. Return its length, or 0.

        Raises PeerError for a request that is rejected, after writing the response.
        """
        if self._task is not None:
            return 0
        size = request_bytes(data, self.body_bytes_max)
        if isinstance(size, Refusal):
            self._output.write(size.answer)
            raise PeerError(f"HTTP request rejected status={size.value!r}", fatal=True)
        if size > len(data) and not self._wanted and expects_continue(data):
            self._output.write(CONTINUE)
        self._wanted = size
        if not 0 < size <= len(data):
            return 0
        self._wanted = 0
        self.requests += 1
        self._idle.cancel()
        self._is_console = self._is_console or is_of_console(data[:size])
        self._task = self._site.loop.create_task(self._respond(bytes(data[:size])))
        self._task.add_done_callback(self._responded)
        return size

    async def _respond(self, request: bytes) -> bool:
        application = await self._site.application()
        return await application.exchange(self._output, self._drained).run(request)

    def _responded(self, task: asyncio.Task[bool]) -> None:
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
        return HEAD_BYTES_MAX + self.body_bytes_max

    @property
    def spoken_dialect(self) -> str:
        return CONSOLE if self._is_console else ""

    def wanted(self) -> int:
        return self._wanted

    def paused(self) -> bool:
        return self._task is not None

    def owes(self) -> bool:
        """Whether a request is being executed."""
        return self._task is not None

    def drained(self) -> None:
        self._drained.set()

    def finish(self, data: memoryview) -> None:
        """Handle the end of the client's data. Complete requests in ``data`` are still executed."""
        self._finishing = True
        self._rest = bytes(data)
        if self._task is None:
            self._take_rest()

    def _take_rest(self) -> None:
        """Execute the next complete request in ``_rest``. If there is none, close the connection."""
        with suppress(PeerError):  # raised after the response has been written
            count = self.receive(memoryview(self._rest))
            self._rest = self._rest[count:]
        if self._task is None:
            self._output.close()

    def close(self) -> None:
        self._idle.cancel()
        if self._task is not None:
            self._task.cancel()
