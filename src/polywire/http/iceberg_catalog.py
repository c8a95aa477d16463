"""A read-only Iceberg REST catalog. Streams are namespaces, and topics with Iceberg metadata are tables.

Engines read the data files themselves, so loading a table needs the permission to consume the topic. The paths follow the
Iceberg REST catalog specification.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polywire.broker.access import Principal
from polywire.broker.broker import Broker
from polywire.broker.permissions import Action
from polywire.broker.settings import TableFormat
from polywire.broker.topics import Topic
from polywire.errors import Denied, ErrorCode, Missing, Unavailable
from polywire.http.encoding import Slices
from polywire.http.endpoints import NO_STORE
from polywire.http.errors import CATALOG
from polywire.http.exchange import PEER
from polywire.http.guard import PRINCIPAL
from polywire.store.base import BlobMissing
from polywire.store.objects import Objects
from polywire.store.url import open_bucket
from polywire.table_orders import ICEBERG_HINT, iceberg_metadata_name
from polywire.types import TopicName

READERS_MAX: Final = 4  # tables that are loaded at the same time, each with up to about 1 MiB of metadata
READ_S: Final = 20.0
TRIES: Final = 3
_ROOT: Final = "/v1/{prefix}/namespaces"
ENDPOINTS: Final = (
    f"GET {_ROOT}",
    f"GET {_ROOT}/{{namespace}}",
    f"HEAD {_ROOT}/{{namespace}}",
    f"GET {_ROOT}/{{namespace}}/tables",
    f"GET {_ROOT}/{{namespace}}/tables/{{table}}",
    f"HEAD {_ROOT}/{{namespace}}/tables/{{table}}",
)
_CONFIG: Final = {"defaults": {}, "overrides": {}, "endpoints": ENDPOINTS}


def catalog_segments(raw_path: str) -> list[str] | None:
    """Return the decoded parts of a path of the catalog; None for other paths."""
    if not raw_path.startswith(f"{CATALOG}/v1/"):
        return None
    return [unquote(part) for part in raw_path.removeprefix(f"{CATALOG}/v1/").split("/")]


class IcebergCatalog:
    """Answers requests to the catalog from the topics of this process."""

    def __init__(self, broker: Broker) -> None:
        self._broker: Final = broker
        self._readers: Final = asyncio.Semaphore(READERS_MAX)

    def routes(self, is_linked: bool) -> list[Route]:
        """Return the routes. ``is_linked``: whether another process has checked the client already."""

        def route(path: str, respond: Callable[[Principal, Request], Awaitable[Any]]) -> Route:
            async def endpoint(request: Request) -> Response:
                if not is_linked:
                    self.check_client(request)
                found = await respond(request.scope[PRINCIPAL], request)
                return Response(msgspec.json.encode(found), media_type="application/json", headers=NO_STORE)

            return Route(CATALOG + path, endpoint, methods=["GET"])

        return [
            route("/v1/config", self._config),
            route("/v1/namespaces", self._namespaces),
            route("/v1/namespaces/{namespace}", self._namespace),
            route("/v1/namespaces/{namespace}/tables", self._list),
            route("/v1/namespaces/{namespace}/tables/{table}", self._load),
        ]

    def check_client(self, request: Request) -> None:
        """Raise Denied if the tables are files of this machine whose paths the client may not see."""
        broker, on_loopback = self._broker, request.scope[PEER].on_loopback
        if broker.settings.tables_url.startswith("file:") and not broker.access.sees_files(on_loopback=on_loopback):
            raise Denied(ErrorCode.DENIED, "tables are files of the broker's machine: only clients there may load them")

    async def _config(self, principal: Principal, request: Request) -> Any:
        return _CONFIG

    async def _namespaces(self, principal: Principal, request: Request) -> Any:
        if request.query_params.get("parent"):  # streams have no streams below them
            return {"namespaces": []}
        streams = {topic.name.stream for topic in await self._tables(principal)}
        return {"namespaces": [[stream] for stream in sorted(streams)]}

    async def _namespace(self, principal: Principal, request: Request) -> Any:
        stream = _parameter(request, "namespace")
        if any(topic.name.stream == stream for topic in await self._tables(principal)):
            return {"namespace": [stream], "properties": {}}
        raise Missing(ErrorCode.TOPIC_MISSING, "no such namespace: the stream does not exist, or has no tables")

    async def _list(self, principal: Principal, request: Request) -> Any:
        stream = _parameter(request, "namespace")
        names = sorted(topic.name.topic for topic in await self._tables(principal) if topic.name.stream == stream)
        return {"identifiers": [{"namespace": [stream], "name": name} for name in names]}

    async def _tables(self, principal: Principal) -> Sequence[Topic]:
        self._broker.access.authorize_somewhere(principal, Action.TOPIC_LIST)
        slices, found = Slices(), []
        for topic in self._broker.topics():
            if slices.is_over:
                await slices.rest()
            if self._is_table(topic) and self._broker.access.permits(principal, Action.TOPIC_DESCRIBE, topic):
                found.append(topic)
        return found

    def _is_table(self, topic: Topic) -> bool:
        table = topic.table_settings(self._broker.settings)
        return table is not None and table.formats is TableFormat.DELTA_AND_ICEBERG

    async def _load(self, principal: Principal, request: Request) -> Any:
        broker, name = self._broker, TopicName(_parameter(request, "namespace"), _parameter(request, "table"))
        broker.access.authorize(principal, Action.FETCH, broker.resource(name.full))
        topic = broker.find_topic(name.full)
        if topic is None or topic.name != name or not self._is_table(topic):
            raise Missing(ErrorCode.TOPIC_MISSING, f"topic has no Iceberg table topic={name.full!r}")
        async with self._readers:
            found = await asyncio.to_thread(_newest, topic.table_url(broker.settings))
        if found is None:
            raise Missing(ErrorCode.TOPIC_MISSING, f"the table is not written yet topic={name.full!r}")
        return found


def _parameter(request: Request, name: str) -> str:
    return unquote(request.path_params[name])  # the path in the scope is still encoded


def _newest(url: str) -> Mapping[str, Any] | None:
    """Return the newest metadata of a table with its location; None if there is none yet. It blocks."""
    objects = open_bucket(url, timeout_s=READ_S, make=False)
    for name in _names(objects):
        try:
            content = objects.read(name).content
        except BlobMissing:  # deleted since the hint was read
            continue
        return {"metadata-location": f"{unquote(url)}/{name}", "metadata": msgspec.Raw(content), "config": {}}
    return None


def _names(objects: Objects) -> Iterator[str]:
    for _ in range(TRIES):
        try:
            yield iceberg_metadata_name(int(objects.read(ICEBERG_HINT).content))
        except BlobMissing:
            return
        except ValueError:
            raise Unavailable(ErrorCode.STORAGE_FAILED, f"the table is damaged file={ICEBERG_HINT!r}") from None
