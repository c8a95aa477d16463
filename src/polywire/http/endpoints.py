"""The table of the admin API's endpoints and their permissions, and the API's OpenAPI document.

Permissions are checked here, before an endpoint's handler runs, so no handler can forget the check.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.requests import Request

from polywire.broker.access import Principal
from polywire.broker.broker import Broker
from polywire.broker.owners import Caller, caller_of
from polywire.broker.permissions import Action, Resource
from polywire.broker.topics import Partition, Topic
from polywire.build_info import VERSION
from polywire.choices import NAME_CHARS_SHOWN, unknown
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.http.exchange import PEER
from polywire.http.guard import PRINCIPAL

PREFIX: Final = "/api/v1"
TOPIC: Final = "{topic}"
NO_STORE: Final = {"Cache-Control": "no-store"}
_SOMEWHERE: Final = frozenset({Resource.ANY_STREAM, Resource.ANY_TOPIC})


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request to an endpoint.

    Attributes:
        principal: the user.
        caller: the user, or the client's address, against whose quota created topics and other state count.
        path: values of the parameters in the path.
        query: parameters of the query.
        body: the JSON object in the body; empty if there is none.
        authorization: the client's Authorization header, for requests to other processes on the client's behalf.
        on_loopback: whether the client is on this machine.
    """

    principal: Principal
    caller: Caller
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any]
    authorization: str = ""
    on_loopback: bool = False

    def number(self, name: str, default: int, *, least: int = 0, most: int) -> int:
        """Return an integer of the query, or the default.

        Raises Invalid(INVALID_REQUEST) if it is not an integer from ``least`` to ``most``.
        """
        given = self.query.get(name)
        if given is None:
            return default
        if not (given.isascii() and given.isdigit()) or len(given) > 19 or not least <= int(given) <= most:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"{name} must be a number from {least} to {most} got={given[:40]!r}"
            )
        return int(given)

    def text(self, name: str) -> str:
        """Return a string of the body. Raises Invalid(INVALID_REQUEST) if it is missing or not a string."""
        given = self.body.get(name)
        if not isinstance(given, str):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"{name} is required and must be a string")
        return given


Handler = Callable[[ApiCall], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path.

    Attributes:
        method: the HTTP method.
        path: the path, with parameters in braces.
        action: the action for which the user needs permission.
        summary: description for the OpenAPI document.
        handler: executes the request.
        fields: descriptions of the query parameters (GET) or of the fields of the body.
        is_own: whether every user may call the endpoint with its own name as ``{user}``.
        also: another action for which the user needs permission on the same topic.
    """

    method: str
    path: str
    action: Action
    summary: str
    handler: Handler
    fields: Mapping[str, str] = field(default_factory=dict)
    is_own: bool = False
    also: Action | None = None

    @property
    def actions(self) -> Sequence[Action]:
        return (self.action,) if self.also is None else (self.action, self.also)

    def matches(self, segments: Sequence[str]) -> Mapping[str, str] | None:
        """Return the values of the path's parameters; None if the path does not match."""
        own = self.path.strip("/").split("/")
        if len(own) != len(segments):
            return None
        parameters = {}
        for name, segment in zip(own, segments, strict=True):
            if name.startswith("{"):
                parameters[name[1:-1]] = segment
            elif name != segment:
                return None
        return parameters


# Browsers and proxies remove the segments "." and "..", also if they are percent-encoded, so these names are encoded twice.
_DOTS: Final = re.compile("(%(25)*2E){1,2}")


def segments_of(raw_path: str) -> list[str]:
    """Return the decoded segments of a path. The names ``.`` and ``..`` are encoded as ``%252E`` and ``%252E%252E``."""
    segments = (unquote(segment) for segment in raw_path.removeprefix(PREFIX).strip("/").split("/"))
    return [unquote(segment) if _DOTS.fullmatch(segment) else segment for segment in segments]


class Endpoints:
    """Finds the endpoint of a request, checks permissions and calls the handler."""

    def __init__(self, broker: Broker, table: Sequence[Endpoint]) -> None:
        self._broker: Final = broker
        self.table: Final = table

    async def respond(self, request: Request) -> Any:
        """Return the response of the endpoint, as an object to encode as JSON. Raises BrokerError."""
        raw = request.scope["raw_path"].decode("ascii", "replace")
        segments = segments_of(raw)
        method = "GET" if request.method == "HEAD" else request.method
        for endpoint in self.table:
            path = endpoint.matches(segments)
            if path is not None and endpoint.method == method:
                call = await self._call(request, path)
                self.authorize(endpoint, call)
                _check_names(endpoint, call)
                return await endpoint.handler(call)
        raise Missing(
            ErrorCode.TOPIC_MISSING, f"no such endpoint method={request.method} path={raw.removeprefix(PREFIX)[:200]!r}"
        )

    async def _call(self, request: Request, path: Mapping[str, str]) -> ApiCall:
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
        peer = request.scope[PEER]
        authorization = request.headers.get("authorization", "")
        return ApiCall(
            principal, caller_of(principal, peer.peer), path, query, body, authorization, on_loopback=peer.on_loopback
        )

    def authorize(self, endpoint: Endpoint, call: ApiCall) -> None:
        access = self._broker.access
        if endpoint.is_own and call.path["user"] == call.principal.name:
            return
        if "topic" in call.path:
            topic = self._broker.resource(call.path["topic"])
            for action in endpoint.actions:
                access.authorize(call.principal, action, topic)
        elif endpoint.action.resource in _SOMEWHERE:
            access.authorize_somewhere(call.principal, endpoint.action)
        else:
            access.authorize(call.principal, endpoint.action)

    def document(self) -> Mapping[str, Any]:
        paths: dict[str, dict[str, Any]] = {}
        for endpoint in self.table:
            paths.setdefault(PREFIX + endpoint.path, {})[endpoint.method.lower()] = dict(_operation(endpoint))
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


def _check_names(endpoint: Endpoint, call: ApiCall) -> None:
    """Raise Invalid(INVALID_REQUEST) for a parameter that the endpoint would ignore, for instance a misspelled one."""
    fields, parameters = (endpoint.fields, {}) if endpoint.method != "GET" else ({}, endpoint.fields)
    for kind, given, known in (("field", call.body, fields), ("parameter", call.query, parameters)):
        for name in given:
            if name not in known:
                raise unknown(kind, name[:NAME_CHARS_SHOWN], known)


def _operation(endpoint: Endpoint) -> Iterator[tuple[str, Any]]:
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


def partition_of(topic: Topic, number: Any) -> Partition:
    """Return a partition by its number. Raises Missing(PARTITION_MISSING)."""
    if type(number) is not int or not 0 <= number < len(topic.partitions):
        raise Missing(
            ErrorCode.PARTITION_MISSING, f"no such partition topic={topic.name.full!r} partition={number!r:.40}"
        )
    return topic.partitions[number]
