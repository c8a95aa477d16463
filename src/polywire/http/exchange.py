"""Run an ASGI application for one HTTP request. h11 parses the request and encodes the response.

If the client reads slowly, the application waits, so at most one part of the response body is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Final

import h11

from polywire.http.session import HEAD_BYTES_MAX, Refusal
from polywire.protocols.runtime.session import Output
from polywire.types import host_of

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

PEER: Final = "polywire.peer"
"""Key of the connection in an ASGI scope."""


class AsgiExchange:
    """One HTTP request, which an ASGI application executes. Implements ``session.Exchange``."""

    def __init__(self, app: Asgi, output: Output, drained: asyncio.Event) -> None:
        self._app: Final = app
        self._output: Final = output
        self._drained: Final = drained
        self._conn: Final = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._body = b""
        self._body_sent = False
        self._is_head = False
        self._start: MutableMapping[str, Any] = {}

    async def run(self, request: bytes) -> bool:
        """Respond to a complete request. Return whether the connection stays open."""
        try:
            head = self._read(request)
        except h11.RemoteProtocolError:
            head = None
        if head is None:
            self._output.write(Refusal.MALFORMED.answer)
            return False
        self._is_head = head.method == b"HEAD"
        await self._app(self._scope(head), self._receive, self._send)
        return self._conn.our_state is h11.DONE and self._conn.their_state is h11.DONE

    def _read(self, request: bytes) -> h11.Request | None:
        """Parse a request, and store its body. Return its head, or None if the bytes are not exactly one request."""
        conn = self._conn
        conn.receive_data(request)
        head = conn.next_event()
        if not isinstance(head, h11.Request):
            return None
        parts = []
        while isinstance(event := conn.next_event(), h11.Data):
            parts.append(bytes(event.data))
        self._body = b"".join(parts)
        return head if isinstance(event, h11.EndOfMessage) and not conn.trailing_data[0] else None

    def _scope(self, head: h11.Request) -> Scope:
        raw_path, _, query = head.target.partition(b"?")
        raw_path = raw_path.rstrip(b"/") or b"/"  # a trailing slash is ignored, as in the admin API
        peer = self._output.peer
        host, port = host_of(peer), peer.rpartition(":")[2]
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.http_version.decode(),
            "method": head.method.decode(),
            "scheme": "http",
            # still percent-encoded: a name may contain a line break, which would prevent a route from matching
            "path": raw_path.decode("ascii", "replace"),
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": list(head.headers),
            "client": (host, int(port) if port.isdigit() else 0),
            "server": self._output.local,
            PEER: self._output,
        }

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        # waits forever; if the client disconnects, the request is cancelled
        await asyncio.get_running_loop().create_future()
        raise AssertionError("the future has no result")

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        parts = []
        if self._start:
            status = self._start["status"]
            headers = list(self._start.get("headers", ()))
            reason = HTTPStatus(status).phrase.encode()
            parts.append(self._conn.send(h11.Response(status_code=status, headers=headers, reason=reason)))
            self._start = {}
        body = message.get("body", b"")
        if body and not self._is_head:
            parts += self._conn.send_with_data_passthrough(h11.Data(data=body)) or ()
        if not message.get("more_body", False):
            parts.append(self._conn.send(h11.EndOfMessage()))
        for part in parts:
            if part:  # not joined into one piece, because that would copy a large body
                self._output.write(part)
        while self._output.backlog > self._output.backlog_max:
            self._drained.clear()
            await self._drained.wait()
