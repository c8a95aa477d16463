"""Forward HTTP requests to other processes of the broker, and merge their responses (decision 0127).

A request about a topic is forwarded to the process that owns the topic. Lists, sums and metrics are requested from all
processes and merged. A forwarded request contains the client's credentials, and the other process checks them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from polywire.broker.broker import Broker
from polywire.errors import BrokerError
from polywire.http import errors
from polywire.http.endpoints import NO_STORE, PREFIX, segments_of
from polywire.http.health import READY_S
from polywire.http.iceberg_catalog import IcebergCatalog, catalog_segments
from polywire.http.merging import MERGES, merge_namespaces, merge_tables, merged_json, merged_metrics
from polywire.http.metrics import CONTENT_TYPE
from polywire.http.shard_requests import RESPONSE_S, send_to_shard
from polywire.protocols.runtime.forwarded import Forwarding
from polywire.types import TopicName

LINKS_SHARD: Final = 0  # the one that stores values (routing.values)
CHECK_S: Final = READY_S + 1.0  # time for another process to report its health
_HOP_BY_HOP: Final = frozenset({b"connection", b"keep-alive", b"upgrade", b"content-length", b"expect"})


class ForwardingApp:
    """An ASGI application: forwards a request to other processes, or passes it to the application of this process."""

    def __init__(self, app: ASGIApp, broker: Broker, router: Forwarding, catalog: IcebergCatalog) -> None:
        self._app: Final = app
        self._broker: Final = broker
        self._router: Final = router
        self._catalog: Final = catalog
        self._shards: Final = router.shards

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._forward(Request(scope, receive))
        except BrokerError as error:
            response = errors.error_response(error, scope["path"])
        await (response or self._app)(scope, receive, send)

    async def _forward(self, request: Request) -> Response | None:
        """Return the response of other processes; None if the request is for this process.

        Raises BrokerError if a process does not respond.
        """
        path = request.scope["raw_path"].decode("ascii", "replace")
        match path:
            case "/metrics":
                return await self._metrics(request)
            case "/readyz":
                return await self._ready(request)
        if (segments := catalog_segments(path)) is not None:
            self._catalog.check_client(request)
        match segments:
            case ["namespaces", stream, "tables", name]:
                shard = self._shard_of(TopicName(stream, name).full, creates=False)
                return None if shard == self._shards.own else await self._send(shard, request)
            case ["namespaces"]:
                return await self._merged(request, merge_namespaces)
            case ["namespaces", _, "tables"]:
                return await self._merged(request, merge_tables)
            case ["namespaces", _]:
                return await self._first(request)
        if not path.startswith(f"{PREFIX}/"):
            return None
        match segments_of(path):
            case ["topics", name, *further]:
                creates = request.method == "POST" and not further
                shard = self._shard_of(name, creates=creates)
                return None if shard == self._shards.own else await self._send(shard, request)
            case ["links", *_]:
                return None if self._shards.own == LINKS_SHARD else await self._send(LINKS_SHARD, request)
            case ["sql", _]:
                return await self._first(request)
            case ["quotas"] if request.method in ("GET", "HEAD"):
                return await self._merged(request, MERGES["quotas"])
            case [("topics" | "groups" | "queues" | "connections" | "overview" | "history") as endpoint]:
                return await self._merged(request, MERGES[endpoint])
        return None

    def _shard_of(self, name: str, *, creates: bool) -> int:
        own = self._shards.own
        if self._broker.find_topic(name) is not None:
            return own
        shard = self._shards.shard_of(name)
        if shard is None:
            return self._shards.least_loaded() if creates else own
        return shard

    # Requests to all processes

    async def _all(self, request: Request, limit_s: float) -> Sequence[Response | BrokerError]:
        async def request_shard(shard: int) -> Response | BrokerError:
            try:
                return await self._send(shard, request, limit_s)
            except BrokerError as error:
                return error

        return await asyncio.gather(*map(request_shard, range(self._shards.count)))

    async def _merged(self, request: Request, merge: Callable[[Sequence[Any]], Any]) -> Response:
        found = []
        for response in await self._all(request, RESPONSE_S):
            if isinstance(response, BrokerError):
                raise response
            if response.status_code != 200:
                return response
            found.append(bytes(response.body))
        merged = await asyncio.to_thread(merged_json, merge, found)
        return Response(merged, media_type="application/json", headers=NO_STORE)

    async def _first(self, request: Request) -> Response:
        """Return a successful response. Otherwise return a failed one, or raise Unavailable if one is missing."""
        responses = await self._all(request, RESPONSE_S)
        found = [response for response in responses if isinstance(response, Response)]
        if successful := [response for response in found if response.status_code == 200]:
            return successful[0]
        for response in responses:
            if isinstance(response, BrokerError):
                raise response
        return found[0]

    async def _ready(self, request: Request) -> Response | None:
        for response in await self._all(request, CHECK_S):
            if isinstance(response, BrokerError):
                return Response(f"not ready: {response.message}\n", 503, media_type="text/plain")
            if response.status_code != 200:
                return response
        return None

    async def _metrics(self, request: Request) -> Response:
        """Return the metrics of all processes. ``polywire_shard_up`` is 0 for a process that did not respond."""
        texts: dict[int, bytes] = {}
        for shard, response in enumerate(await self._all(request, CHECK_S)):
            if isinstance(response, BrokerError):
                continue
            if response.status_code != 200:
                return response
            texts[shard] = bytes(response.body)
        text = await asyncio.to_thread(merged_metrics, texts, self._shards.count)
        return Response(text, media_type=CONTENT_TYPE)

    # Requests to one process

    async def _send(self, shard: int, request: Request, limit_s: float = RESPONSE_S) -> Response:
        """Return the response of another process. Raises Unavailable if it does not respond."""
        return await send_to_shard(self._router, shard, await _encoded(request), limit_s)


async def _encoded(request: Request) -> bytes:
    """Encode a request for another process, with the header ``Connection: close``."""
    body = await request.body()
    headers = [(name, value) for name, value in request.scope["headers"] if name.lower() not in _HOP_BY_HOP]
    query = request.scope["query_string"]
    head = h11.Request(
        method="GET" if request.method == "HEAD" else request.method,
        target=request.scope["raw_path"] + (b"?" + query if query else b""),
        headers=[*headers, (b"connection", b"close"), (b"content-length", b"%d" % len(body))],
    )
    conn = h11.Connection(h11.CLIENT)
    parts = [conn.send(head), conn.send(h11.Data(data=body)) if body else b"", conn.send(h11.EndOfMessage())]
    return b"".join(part for part in parts if part)
