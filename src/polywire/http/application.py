"""What HTTP requests are carried out by: paths, and what stands before all of them.

Promises: whatever is asked for, the guard has looked at it first. Must not know: sockets, how requests arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from polywire.broker.actions import Action
from polywire.broker.broker import Broker
from polywire.errors import BrokerError
from polywire.http import errors
from polywire.http.exchange import AsgiExchange
from polywire.http.guard import PRINCIPAL, Guard
from polywire.http.health import readiness
from polywire.http.metrics import CONTENT_TYPE, metrics_text
from polywire.http.process import Process
from polywire.http.session import Output


class HttpApplication:
    """Everything that is answered over HTTP."""

    def __init__(self, broker: Broker, process: Process, *, names: Sequence[str]) -> None:
        routes = [
            Route("/livez", self._live, methods=["GET"]),
            Route("/readyz", self._ready, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
        ]
        self._broker: Final = broker
        self._process: Final = process
        app = Starlette(routes=routes, exception_handlers={BrokerError: _refused})
        self._guard: Final = Guard(app, broker.access, names=names)

    def exchange(self, output: Output, drained: asyncio.Event) -> AsgiExchange:
        """For one request."""
        return AsgiExchange(self._guard, output, drained)

    async def _live(self, request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def _ready(self, request: Request) -> Response:
        status, text = await readiness(self._broker, self._process)
        return PlainTextResponse(text, status_code=status)

    async def _metrics(self, request: Request) -> Response:
        self._broker.access.authorize(request.scope[PRINCIPAL], Action.SERVER_DESCRIBE)
        return Response(await metrics_text(self._broker, self._process), media_type=CONTENT_TYPE)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, BrokerError), "what this is called for"
    return errors.answer(error)
