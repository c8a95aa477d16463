"""HTTP where several processes share a data directory: requests about a topic go to the process that has it, lists and sums are those of all
(decision 0076).

Promises: whichever process is asked, the answer is that of one broker with all topics; metrics say of which shard they are; who asks proves
who it is where the request is carried out, too. Must not know: sockets, what the endpoints do.
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
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.http import errors
from polywire.http.endpoints import NOT_KEPT, PREFIX, segments_of
from polywire.http.gathering import MERGES, merged_json, merged_metrics
from polywire.http.health import READY_S
from polywire.http.metrics import CONTENT_TYPE
from polywire.http.shard_requests import ANSWER_S, ask_shard
from polywire.protocols.runtime.shards import Shards

LOOK_S: Final = READY_S + 1.0  # for it to tell how it is
_HOP_BY_HOP: Final = frozenset({b"connection", b"keep-alive", b"upgrade", b"content-length", b"expect"})


class CarryingApp:
    """An application before the one of this process."""

    def __init__(self, app: ASGIApp, broker: Broker, shards: Shards) -> None:
        self._app: Final = app
        self._broker: Final = broker
        self._shards: Final = shards

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry a request out, wherever that is."""
        try:
            answer = await self._elsewhere(Request(scope, receive))
        except BrokerError as error:
            answer = errors.answer(error)
        await (answer or self._app)(scope, receive, send)

    async def _elsewhere(self, request: Request) -> Response | None:
        """The answer of other processes, None for what this one answers alone. Raises BrokerError."""
        path = request.scope["raw_path"].decode("ascii", "replace")
        match path:
            case "/metrics":
                return await self._metrics(request)
            case "/readyz":
                return await self._ready(request)
        if not path.startswith(f"{PREFIX}/"):
            return None
        match segments_of(path):
            case ["topics", name, *behind]:
                creates = request.method == "POST" and not behind
                shard = self._place(name, creates=creates)
                return None if shard == self._shards.own else await self._ask(shard, request)
            case [("topics" | "groups" | "connections" | "overview") as what]:
                return await self._gathered(request, MERGES[what])
            case ["users" | "self", _, *_] if request.method not in ("GET", "HEAD"):
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    "users are defined in the --users file and have no tokens when several processes share a data directory",
                )
        return None

    def _place(self, name: str, *, creates: bool) -> int:
        own = self._shards.own
        if self._broker.find_topic(name) is not None:
            return own
        shard = self._shards.shard_of(name)
        if shard is None:
            return self._shards.least_loaded() if creates else own
        return shard

    # Several

    async def _all(self, request: Request, limit_s: float) -> Sequence[Response | BrokerError]:
        """What each shard says, or why it says nothing."""

        async def one(shard: int) -> Response | BrokerError:
            try:
                return await self._ask(shard, request, limit_s)
            except BrokerError as error:
                return error

        return await asyncio.gather(*map(one, range(self._shards.count)))

    async def _gathered(self, request: Request, merge: Callable[[Sequence[Any]], Any]) -> Response:
        found = []
        for answer in await self._all(request, ANSWER_S):
            if isinstance(answer, BrokerError):
                raise answer
            if answer.status_code != 200:
                return answer
            found.append(bytes(answer.body))
        merged = await asyncio.to_thread(merged_json, merge, found)
        return Response(merged, media_type="application/json", headers=NOT_KEPT)

    async def _ready(self, request: Request) -> Response | None:
        for answer in await self._all(request, LOOK_S):
            if isinstance(answer, BrokerError):
                return Response(f"not ready: {answer.message}\n", 503, media_type="text/plain")
            if answer.status_code != 200:
                return answer
        return None

    async def _metrics(self, request: Request) -> Response:
        """Those of all processes; one that does not answer is left out, and told."""
        texts: dict[int, bytes] = {}
        for shard, answer in enumerate(await self._all(request, LOOK_S)):
            if isinstance(answer, BrokerError):
                continue
            if answer.status_code != 200:
                return answer
            texts[shard] = bytes(answer.body)
        text = await asyncio.to_thread(merged_metrics, texts, self._shards.count)
        return Response(text, media_type=CONTENT_TYPE)

    # One

    async def _ask(self, shard: int, request: Request, limit_s: float = ANSWER_S) -> Response:
        """What a shard's process answers. Raises Unavailable."""
        return await ask_shard(self._shards, shard, await _encoded(request), limit_s)


async def _encoded(request: Request) -> bytes:
    """A request for another process: the same, on a connection of its own."""
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
