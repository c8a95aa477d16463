"""Send HTTP requests to the other processes of a broker over the HTTP link between them.

A response must be complete and have at most ANSWER_BYTES_MAX bytes; otherwise the request fails.
"""

from __future__ import annotations

import asyncio
from typing import Final

import h11
from starlette.responses import Response

from polywire.errors import ErrorCode, Unavailable
from polywire.http.guard import HEADERS
from polywire.http.link import MAGIC
from polywire.protocols.runtime.shards import Link, Shards

ANSWER_S: Final = 30.0  # time for a process to respond
ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024  # far more than a page with the largest record needs, in base64
# a response up to this size is parsed on the loop, which takes less than a millisecond
SMALL_ANSWER_BYTES: Final = 1024 * 1024
_ANSWERED_AGAIN: Final = frozenset({b"connection", b"date", *(name for name, _ in HEADERS)})


class _Answer:
    """Implements ``LinkPeer`` for one request. ``whole`` completes when the connection ends."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_too_large = False
        self.whole: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()

    def received(self, data: bytes) -> None:
        self.is_too_large = self.is_too_large or len(self.data) + len(data) > ANSWER_BYTES_MAX
        if self.is_too_large:
            self.data.clear()
            self.lost()
        else:
            self.data += data

    def relieved(self) -> None:
        pass

    def lost(self) -> None:
        if not self.whole.done():
            self.whole.set_result(None)


async def ask_shard(shards: Shards, shard: int, request: bytes, limit_s: float = ANSWER_S) -> Response:
    """Send an encoded request to a shard's process, and return its response.

    Raises Unavailable if there is no complete response within ``limit_s``.
    """
    answer = _Answer()
    link: Link = shards.connect(shard, answer)
    try:
        link.write(MAGIC + shards.key + request)
        await asyncio.wait_for(answer.whole, limit_s)
    except TimeoutError:
        raise _no_response(shard) from None
    finally:
        link.close()
    if answer.is_too_large:
        message = f"answer of a process is too large shard={shard:04x} limit_bytes={ANSWER_BYTES_MAX}"
        raise Unavailable(ErrorCode.STOPPING, message)
    if len(answer.data) <= SMALL_ANSWER_BYTES:
        return _decoded(bytes(answer.data), shard)
    return await asyncio.to_thread(_decoded, bytes(answer.data), shard)


def request_bytes(path: str, authorization: str, body: bytes) -> bytes:
    """Encode a POST request that this process sends on behalf of a client, with the client's credentials."""
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "X-Polywire: 1",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if authorization:
        head.append(f"Authorization: {authorization}")
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def _no_response(shard: int) -> Unavailable:
    return Unavailable(ErrorCode.STOPPING, f"a process of this broker does not respond shard={shard:04x}")


def _decoded(data: bytes, shard: int) -> Response:
    """Parse a response. Raises Unavailable if it is incomplete."""
    conn = h11.Connection(h11.CLIENT)
    conn.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    conn.send(h11.EndOfMessage())
    conn.receive_data(data)
    try:
        head = conn.next_event()
        if not isinstance(head, h11.Response):
            raise _no_response(shard)
        parts = []
        while isinstance(event := conn.next_event(), h11.Data):
            parts.append(bytes(event.data))
    except h11.RemoteProtocolError:
        raise _no_response(shard) from None
    if not isinstance(event, h11.EndOfMessage):
        raise _no_response(shard)
    answer = Response(b"".join(parts), head.status_code)
    answer.raw_headers = [(name, value) for name, value in head.headers if name not in _ANSWERED_AGAIN]
    return answer
