"""The HTTP listener of a standby: liveness, readiness and two metrics.

Requests are limited in size, time and number. A standby does not authenticate clients, so it serves nothing else.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from polywire.http.framing import HEAD_BYTES_MAX
from polywire.server.config import Address
from polywire.server.listener import bound
from polywire.store.objects import FIRST
from polywire.types import shard_name

CONNECTIONS_MAX: Final = 64  # concurrent connections; each gets one response
REQUEST_S: Final = 5.0
FORWARDING: Final = "standby: forwarding connections to the leader\n"
ALIVE: Final = "alive\n"
NO_LEADER: Final = "not ready: this broker is a standby, and there is no leader\n"
NOT_LEADER: Final = "this broker is a standby: send the request to the leader\n"
TEXT_TYPE: Final = "text/plain; charset=utf-8"
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
METRICS: Final = f"""\
# HELP polywire_bucket_leads 1 if the broker is the leader of the shard, 0 if it is a standby.
# TYPE polywire_bucket_leads gauge
polywire_bucket_leads{{shard="{shard_name(FIRST)}"}} 0
# HELP polywire_bucket_carries 1 if a standby forwards connections to the leader.
# TYPE polywire_bucket_carries gauge
polywire_bucket_carries %d
"""
_END: Final = b"\r\n\r\n"

log = structlog.get_logger("polywire.server")


class StandbyHealth:
    """Serves at most ``CONNECTIONS_MAX`` connections, until ``stop`` is called."""

    def __init__(self, is_forwarding: Callable[[], bool]) -> None:
        """Create the listener. ``is_forwarding`` returns whether connections are forwarded to a leader."""
        self._is_forwarding = is_forwarding
        self._servers: list[asyncio.Server] = []
        self._requests: set[asyncio.Task[None]] = set()

    async def listen(self, address: Address, context: ssl.SSLContext | None) -> Address:
        """Accept connections, and return the address with its actual port. Raises OSError."""
        sockets = await bound(address)
        for listening in sockets:
            self._servers.append(
                await asyncio.start_server(
                    self._connected, sock=listening, ssl=context, limit=HEAD_BYTES_MAX, start_serving=True
                )
            )
        return Address(address.host, sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close all listeners and connections."""
        for server in self._servers:
            server.close()
        for task in list(self._requests):
            task.cancel()
        await asyncio.sleep(0)
        self._servers.clear()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._requests) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._answer(reader, writer))
        self._requests.add(task)
        task.add_done_callback(partial(self._ended, writer))

    def _ended(self, writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        """Close the connection after its task, because a task that is cancelled before it starts does not close it."""
        self._requests.discard(task)
        with suppress(OSError, RuntimeError):
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(_END)
                writer.write(self._answer_to(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("connection ended before a complete request")

    def _answer_to(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
            return _answer("405 Method Not Allowed", NOT_LEADER)
        whole = words[0] == b"GET"
        match words[1].partition(b"?")[0]:
            case b"/livez":
                return _answer("200 OK", ALIVE, whole=whole)
            case b"/readyz" if self._is_forwarding():
                return _answer("200 OK", FORWARDING, whole=whole)
            case b"/readyz":
                return _answer("503 Service Unavailable", NO_LEADER, whole=whole)
            case b"/metrics":
                return _answer("200 OK", METRICS % self._is_forwarding(), content_type=METRICS_TYPE, whole=whole)
        return _answer("503 Service Unavailable", NOT_LEADER, whole=whole)


def own_answer(_: str, first_bytes: bytes) -> bytes | None:
    """Return the response to ``/livez``; None for any other request.

    If a standby has several processes, each answers ``/livez`` itself and forwards everything else.
    """
    line = first_bytes.partition(b"\r\n")[0].split(b" ")
    if len(line) != 3 or line[0] not in (b"GET", b"HEAD") or line[1].partition(b"?")[0] != b"/livez":
        return None
    return _answer("200 OK", ALIVE, whole=line[0] == b"GET")


def _answer(status: str, text: str, *, content_type: str = TEXT_TYPE, whole: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(text)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return (head + (text if whole else "")).encode()
