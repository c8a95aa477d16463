"""Send HTTP requests to the other processes of a broker (decision 0127)."""

from __future__ import annotations

import asyncio
from typing import Final

import h11
from starlette.responses import Response

from polywire.errors import BrokerError, ErrorCode, Unavailable
from polywire.http.guard import HEADERS, completing
from polywire.http.session import WIRE
from polywire.protocols.runtime.forwarded import Forwarding, Sender

RESPONSE_S: Final = 30.0  # time for a process to respond
SENDER: Final = Sender(None, "")  # the other process reads the client's user from the request
# a response up to this size is parsed on the loop, which takes less than a millisecond
SMALL_ANSWER_BYTES: Final = 1024 * 1024
_ANSWERED_AGAIN: Final = frozenset({b"connection", b"date", *(name for name, _ in HEADERS)})


async def send_to_shard(router: Forwarding, shard: int, request: bytes, limit_s: float = RESPONSE_S) -> Response:
    """Send an encoded request to the process of a shard, and return its response.

    Raises Unavailable if there is no complete response within ``limit_s`` seconds.
    """
    answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    try:
        call = router.execute(shard, WIRE, SENDER, request, completing(answer))
        try:
            data = await asyncio.wait_for(answer, limit_s)
        finally:
            call.cancel()
    except TimeoutError:
        raise _no_response(shard) from None
    except BrokerError as error:
        raise Unavailable(ErrorCode.STOPPING, f"{error.message} shard={shard:04x}") from None
    if len(data) <= SMALL_ANSWER_BYTES:
        return _decoded(data, shard)
    return await asyncio.to_thread(_decoded, data, shard)


def request_bytes(path: str, authorization: str, body: bytes) -> bytes:
    """Encode a POST request on behalf of a client, with the client's ``authorization``."""
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
    """Parse a response of another process. Raises Unavailable if it is incomplete."""
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
