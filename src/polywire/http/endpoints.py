"""The admin API as a table: paths, what each needs of the one table of permissions, and the OpenAPI document that is made of it.

Promises: an endpoint is carried out only after its action was permitted for what its path names; none can forget to ask. Must not know: what
endpoints do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.requests import Request

from polywire.broker.access import Principal
from polywire.broker.actions import Action, Resource
from polywire.broker.broker import Broker
from polywire.broker.owners import Caller, caller_of
from polywire.broker.topics import Partition, Topic
from polywire.build_info import VERSION
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.http.exchange import PEER
from polywire.http.guard import PRINCIPAL

PREFIX: Final = "/api/v1"
TOPIC: Final = "{topic}"
NOT_KEPT: Final = {"Cache-Control": "no-store"}
_SOMEWHERE: Final = frozenset({Resource.ANY_STREAM, Resource.ANY_TOPIC})


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as endpoints see it. path: the values of what stands in braces. query: as given. body: the JSON object, or nothing.
    authorization: the login as the client sent it, for requests to other processes in its name."""

    principal: Principal
    caller: Caller
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any]
    authorization: str = ""

    def number(self, name: str, default: int, *, least: int = 0, most: int) -> int:
        """A whole number of the query. Raises Invalid(INVALID_REQUEST)."""
        given = self.query.get(name)
        if given is None:
            return default
        if not (given.isascii() and given.isdigit()) or len(given) > 19 or not least <= int(given) <= most:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"{name} must be a number from {least} to {most} got={given[:40]!r}"
            )
        return int(given)

    def text(self, name: str) -> str:
        """A text of the body. Raises Invalid(INVALID_REQUEST)."""
        given = self.body.get(name)
        if not isinstance(given, str):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"{name} is required and must be a string")
        return given


Answering = Callable[[Asked], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One verb of one path. fields: of the query (GET) or the body, with what they mean. is_own: whether everybody may do to itself, named
    by ``{user}``, what the action does to others. also: another action that it takes for the same topic."""

    method: str
    path: str
    action: Action
    summary: str
    answer: Answering
    fields: Mapping[str, str] = field(default_factory=dict)
    is_own: bool = False
    also: Action | None = None

    @property
    def actions(self) -> Sequence[Action]:
        """Everything that it takes."""
        return (self.action,) if self.also is None else (self.action, self.also)

    def matches(self, segments: Sequence[str]) -> Mapping[str, str] | None:
        """Values of what stands in braces, None where it is another path."""
        own = self.path.strip("/").split("/")
        if len(own) != len(segments):
            return None
        found = {}
        for mine, given in zip(own, segments, strict=True):
            if mine.startswith("{"):
                found[mine[1:-1]] = given
            elif mine != given:
                return None
        return found


def segments_of(raw_path: str) -> list[str]:
    """What stands between the slashes of a path, behind the prefix of all."""
    return [unquote(segment) for segment in raw_path.removeprefix(PREFIX).strip("/").split("/")]


class Endpoints:
    """The table, and what carries a request out."""

    def __init__(self, broker: Broker, table: Sequence[Endpoint]) -> None:
        self._broker: Final = broker
        self.table: Final = table

    async def carry_out(self, request: Request) -> Any:
        """What an endpoint answers, to be spelled as JSON. Raises BrokerError."""
        raw = request.scope["raw_path"].decode("ascii", "replace")
        segments = segments_of(raw)
        method = "GET" if request.method == "HEAD" else request.method
        for endpoint in self.table:
            path = endpoint.matches(segments)
            if path is not None and endpoint.method == method:
                asked = await self._asked(request, path)
                self.authorize(endpoint, asked)
                return await endpoint.answer(asked)
        raise Missing(
            ErrorCode.TOPIC_MISSING, f"no such endpoint method={request.method} path={raw.removeprefix(PREFIX)[:200]!r}"
        )

    async def _asked(self, request: Request, path: Mapping[str, str]) -> Asked:
        body: Any = {}
        content = await request.body()
        if content:
            if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
                raise Invalid(ErrorCode.INVALID_REQUEST, "the request body must have the content type application/json")
            try:
                body = msgspec.json.decode(content)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise Invalid(ErrorCode.INVALID_REQUEST, f"the request body is not valid JSON: {error}") from error
        if not isinstance(body, dict):
            raise Invalid(ErrorCode.INVALID_REQUEST, "the request body must be a JSON object")
        principal: Principal = request.scope[PRINCIPAL]
        query = dict(parse_qsl(request.scope["query_string"].decode("ascii", "replace"), keep_blank_values=True))
        caller = caller_of(principal, request.scope[PEER].peer)
        return Asked(principal, caller, path, query, body, request.headers.get("authorization", ""))

    def authorize(self, endpoint: Endpoint, asked: Asked) -> None:
        """Refuse what somebody may not do. Raises Denied."""
        access = self._broker.access
        if endpoint.is_own and asked.path["user"] == asked.principal.name:
            return
        if "topic" in asked.path:
            topic = self._broker.resource(asked.path["topic"])
            for action in endpoint.actions:
                access.authorize(asked.principal, action, topic)
        elif endpoint.action.resource in _SOMEWHERE:
            access.authorize_somewhere(asked.principal, endpoint.action)
        else:
            access.authorize(asked.principal, endpoint.action)

    def document(self) -> Mapping[str, Any]:
        """The table as OpenAPI."""
        paths: dict[str, dict[str, Any]] = {}
        for endpoint in self.table:
            paths.setdefault(PREFIX + endpoint.path, {})[endpoint.method.lower()] = dict(_described(endpoint))
        return {
            "openapi": "3.1.0",
            "info": {"title": "Polywire", "version": VERSION, "description": "Admin API of a Polywire broker."},
            "paths": paths,
            "components": {
                "securitySchemes": {
                    "password": {"type": "http", "scheme": "basic"},
                    "token": {"type": "http", "scheme": "bearer"},
                }
            },
            "security": [{}, {"password": []}, {"token": []}],
        }


def _described(endpoint: Endpoint) -> Iterator[tuple[str, Any]]:
    names = [segment[1:-1] for segment in endpoint.path.split("/") if segment.startswith("{")]
    text = {"type": "string"}
    parameters: list[Mapping[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": text} for name in names
    ]
    yield "summary", endpoint.summary
    needs = [f"{action.permission_words or 'a login'} ({action.word})" for action in endpoint.actions]
    own = ", or to be that user" if endpoint.is_own else ""
    yield "description", f"Needs {' and '.join(needs)}{own}."
    if endpoint.method == "GET":
        parameters += [
            {"name": name, "in": "query", "schema": text, "description": meaning}
            for name, meaning in endpoint.fields.items()
        ]
    else:
        parameters.append({"name": "X-Polywire", "in": "header", "required": True, "schema": text})
        properties = {name: {"description": meaning} for name, meaning in endpoint.fields.items()}
        schema = {"type": "object", "properties": properties}
        if properties:
            yield "requestBody", {"content": {"application/json": {"schema": schema}}}
    yield "parameters", parameters
    yield "responses", {"200": {"description": "done"}, "default": {"description": "an error: code, message, retry"}}


def numbered(topic: Topic, number: Any) -> Partition:
    """The partition of this number. Raises Missing(PARTITION_MISSING)."""
    if type(number) is not int or not 0 <= number < len(topic.partitions):
        raise Missing(
            ErrorCode.PARTITION_MISSING, f"no such partition topic={topic.name.full!r} partition={number!r:.40}"
        )
    return topic.partitions[number]
