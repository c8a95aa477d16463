"""The ASGI application for health, metrics, the admin API and the console.

The module ``guard`` authenticates every request first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from polywire.broker.broker import Broker
from polywire.broker.permissions import Action
from polywire.errors import BrokerError
from polywire.http import errors
from polywire.http.api import Api
from polywire.http.dead_letters import STAGING_PATH, Redrive
from polywire.http.endpoints import NO_STORE, PREFIX, Endpoints
from polywire.http.exchange import AsgiExchange
from polywire.http.forwarding import ForwardingApp
from polywire.http.guard import PRINCIPAL, Guard
from polywire.http.health import readiness
from polywire.http.iceberg_catalog import IcebergCatalog
from polywire.http.metrics import CONTENT_TYPE, metrics_text
from polywire.http.process import Process
from polywire.protocols.runtime.forwarded import Forwarding
from polywire.protocols.runtime.session import Output

FILES: Final = {
    "index.html": "text/html; charset=utf-8",
    "console.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
} | {
    f"{name}.js": "text/javascript; charset=utf-8"
    for name in (
        "avro",
        "bucket",
        "bytes",
        "chart",
        "clients",
        "console",
        "frame",
        "groups",
        "letters",
        "links",
        "overview",
        "parts",
        "produce",
        "queues",
        "quotas",
        "records",
        "settings",
        "sql",
        "switch",
        "tables",
        "topics",
        "users",
        "views",
    )
}


@cache
def _content(name: str) -> bytes:
    return (files("polywire.http") / "static" / name).read_bytes()


def console_file(name: str) -> Response:
    """Return a file of the console, or 404."""
    media_type = FILES.get(name)
    if media_type is None:
        return PlainTextResponse("no such file\n", status_code=404)
    return Response(_content(name), media_type=media_type, headers={"Cache-Control": "no-cache"})


class HttpApplication:
    """All HTTP paths of a broker."""

    def __init__(
        self,
        broker: Broker,
        process: Process,
        *,
        names: Sequence[str],
        router: Forwarding | None = None,
        is_linked: bool = False,
    ) -> None:
        """Create the routes.

        Args:
            broker: the broker of this process.
            process: statistics of this process.
            names: allowed host names; see ``HttpFactory``.
            router: reaches the other processes of this broker, if there are several.
            is_linked: whether requests come from other processes of this broker, so that they must not be forwarded
                again.
        """
        routes = [
            Route("/livez", self._live, methods=["GET"]),
            Route("/readyz", self._ready, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        redrive = Redrive(broker, router)
        catalog = IcebergCatalog(broker)
        if is_linked:
            routes.append(Route(STAGING_PATH, redrive.stage, methods=["POST"]))
        changes = broker.users if router is None or is_linked else router.users
        self._endpoints: Final = Endpoints(broker, Api(broker, process, redrive, changes).table())
        routes += [
            Route(f"{PREFIX}/openapi.json", self._document, methods=["GET"]),
            Route(f"{PREFIX}/{{rest:path}}", self._api, methods=["GET", "POST", "DELETE"]),
            *catalog.routes(is_linked),
            Route("/", self._page, methods=["GET"]),
            Route("/static/{name}", self._static, methods=["GET"]),
        ]
        self._broker: Final = broker
        self._process: Final = process
        app = Starlette(routes=routes, exception_handlers={BrokerError: _error_response})
        app.router.redirect_slashes = False
        inner = app if router is None or is_linked else ForwardingApp(app, broker, router, catalog)
        self._guard: Final = Guard(inner, broker.access, names=names)

    def exchange(self, output: Output, drained: asyncio.Event) -> AsgiExchange:
        return AsgiExchange(self._guard, output, drained)

    async def _live(self, request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def _ready(self, request: Request) -> Response:
        status, text = await readiness(self._broker, self._process)
        return PlainTextResponse(text, status_code=status)

    async def _metrics(self, request: Request) -> Response:
        self._broker.access.authorize(request.scope[PRINCIPAL], Action.SERVER_DESCRIBE)
        return Response(await metrics_text(self._broker, self._process), media_type=CONTENT_TYPE)

    async def _api(self, request: Request) -> Response:
        found = await self._endpoints.respond(request)
        if isinstance(found, Response):
            return found
        return Response(msgspec.json.encode(found), media_type="application/json", headers=NO_STORE)

    async def _document(self, request: Request) -> Response:
        return Response(msgspec.json.encode(self._endpoints.document()), media_type="application/json")

    async def _page(self, request: Request) -> Response:
        return console_file("index.html")

    async def _static(self, request: Request) -> Response:
        return console_file(request.path_params["name"])


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, BrokerError), "registered for BrokerError only"
    return errors.error_response(error, request.scope["path"])
