"""HTTP of a broker that stands by: whether it lives, and whether it is of use.

Promises: a request has limits in bytes and in time, and so has the number of who ask; nothing is told but yes or no, as words or as
metrics, for who asks is not known here. Must not know: the broker that leads.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from polywire.cluster.shards import FIRST
from polywire.http.framing import HEAD_BYTES_MAX
from polywire.server.config import Address
from polywire.server.listener import bound
from polywire.types import shard_name

ASKING_MAX: Final = 64  # connections: each is answered once
REQUEST_S: Final = 5.0
CARRYING: Final = "standby: connections are carried to the broker that leads\n"
ALIVE: Final = "alive\n"
ALONE: Final = "not ready: standing by, and nobody leads\n"
TEXT_TYPE: Final = "text/plain; charset=utf-8"
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
METRICS: Final = f"""\
# HELP polywire_bucket_leads 1 where the broker leads the shard, 0 where it stands by.
# TYPE polywire_bucket_leads gauge
polywire_bucket_leads{{shard="{shard_name(FIRST)}"}} 0
# HELP polywire_bucket_carries 1 where a broker that stands by carries connections to the one that leads.
# TYPE polywire_bucket_carries gauge
polywire_bucket_carries %d
"""
_END: Final = b"\r\n\r\n"

log = structlog.get_logger("polywire.server")


class StandbyHealth:
    """Guards: at most ``ASKING_MAX`` connections; all end with ``stop``."""

    def __init__(self, is_carrying: Callable[[], bool]) -> None:
        """is_carrying: whether connections that come are carried."""
        self._is_carrying = is_carrying
        self._servers: list[asyncio.Server] = []
        self._asking: set[asyncio.Task[None]] = set()

    async def listen(self, address: Address, context: ssl.SSLContext | None) -> Address:
        """Answer there; returns the address with its real port. Raises OSError."""
        sockets = await bound(address)
        for one in sockets:
            self._servers.append(
                await asyncio.start_server(self._came, sock=one, ssl=context, limit=HEAD_BYTES_MAX, start_serving=True)
            )
        return Address(address.host, sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Answer nobody any more."""
        for server in self._servers:
            server.close()
        for task in list(self._asking):
            task.cancel()
        await asyncio.sleep(0)
        self._servers.clear()

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._asking) >= ASKING_MAX:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._answer(reader, writer))
        self._asking.add(task)
        task.add_done_callback(partial(self._went, writer))

    def _went(self, writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        """A task has ended, or will never begin: then nothing of its own hangs up."""
        self._asking.discard(task)
        with suppress(OSError, RuntimeError):
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and hang up."""
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
            return _answer("405 Method Not Allowed", "this broker is a standby: send the request to the leader\n")
        whole = words[0] == b"GET"
        match words[1].partition(b"?")[0]:
            case b"/livez":
                return _answer("200 OK", ALIVE, whole=whole)
            case b"/readyz" if self._is_carrying():
                return _answer("200 OK", CARRYING, whole=whole)
            case b"/readyz":
                return _answer("503 Service Unavailable", ALONE, whole=whole)
            case b"/metrics":
                return _answer("200 OK", METRICS % self._is_carrying(), content_type=METRICS_TYPE, whole=whole)
        return _answer("503 Service Unavailable", "this broker stands by: ask the one that leads\n", whole=whole)


def own_answer(_: str, first: bytes) -> bytes | None:
    """What a process of several says by itself while it stands by, though all else is carried: that it lives. First: of a connection."""
    line = first.partition(b"\r\n")[0].split(b" ")
    if len(line) != 3 or line[0] not in (b"GET", b"HEAD") or line[1].partition(b"?")[0] != b"/livez":
        return None
    return _answer("200 OK", ALIVE, whole=line[0] == b"GET")


def _answer(status: str, text: str, *, content_type: str = TEXT_TYPE, whole: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(text)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return (head + (text if whole else "")).encode()
