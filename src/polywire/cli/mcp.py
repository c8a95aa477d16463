"""``polywire mcp``: let an assistant look at a broker over the Model Context Protocol, on standard input and output.

* The tools only read, unless ``--allow-writes`` is given. Permissions are those of the user in the address.
* Results have limits on records and on bytes of values, because they fill the context of a model.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Annotated, Any, Final, ParamSpec, TypeVar

from cyclopts import App, Parameter

from polywire import __version__
from polywire.cli.admin import AdminApi, GuessedUrl, HttpListener, default_http
from polywire.cli.connection import ADDRESS_DEFAULT, Address, connect_limit_s
from polywire.cli.group import group_rows, group_summary
from polywire.cli.output import Failed
from polywire.cli.usage import examples
from polywire.client.client import Client
from polywire.client.diagnosis import explain
from polywire.client.listings import GroupInfo
from polywire.client.record import Record
from polywire.errors import BrokerError
from polywire.extras import required

RECORDS_MAX: Final = 100
VALUE_CHARS_MAX: Final = 2_000
TOPICS_MAX: Final = 1_000
GROUPS_MAX: Final = 200
SQL_ROWS_MAX: Final = 1_000
OBSERVED_S_MAX: Final = 30.0

P = ParamSpec("P")
T = TypeVar("T")

app = App(
    name="mcp",
    help_epilogue=examples("polywire mcp", "polywire mcp --address polywire://reader@broker.example:9555"),
)


@app.default
def serve_tools(
    *,
    allow_writes: Annotated[bool, Parameter(negative="")] = False,
    address: Address = ADDRESS_DEFAULT,
    http: HttpListener = None,
) -> None:
    """Serve tools of the Model Context Protocol over standard input and output.

    Configure it in your assistant as a server with the command `polywire mcp`.

    Parameters
    ----------
    allow_writes
        Add tools that produce records and create topics.
    """
    module = required("mcp.server", "polywire mcp needs the package mcp", "mcp")
    server = module.MCPServer("polywire", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    admin = AdminApi(http or GuessedUrl(default_http(address)))
    add_tools(server, Tools(Client(address, reconnect_s=connect_limit_s()), admin), allow_writes=allow_writes)
    server.run("stdio")


INSTRUCTIONS: Final = (
    "Tools for a Polywire broker, a durable log that speaks Kafka and other protocols. Topics have partitions, and records "
    "have offsets. A group's lag is the number of records that it has not read. Start with health and list_topics; "
    "explain_group says why a group is behind."
)


class Tools:
    """The tools of one broker. Their docstrings are their descriptions."""

    def __init__(self, client: Client, admin: AdminApi) -> None:
        self._client: Final = client
        self._admin: Final = admin

    async def list_topics(self) -> dict[str, Any]:
        """List topics with their number of partitions."""
        topics = await self._client.topics()
        rows = [{"topic": topic.name, "partitions": topic.partitions} for topic in topics[:TOPICS_MAX]]
        return {"topics": rows, "omitted": len(topics) - len(rows)}

    async def describe_topic(self, topic: str) -> dict[str, Any]:
        """Return the settings of a topic, and the first and next offset of each partition."""
        bounds = await self._client.bounds(topic)
        rows = [
            {"partition": part.partition, "first_offset": part.first_offset, "next_offset": part.next_offset}
            for part in bounds
        ]
        return {"topic": topic, "settings": await self._client.topic_settings(topic), "partitions": rows}

    async def read_records(self, topic: str, partition: int, offset: int = -1, limit: int = 10) -> dict[str, Any]:
        """Return up to 100 records of a partition from an offset on. With offset -1, return the newest records.

        Long values are cut; bytes that are not UTF-8 are returned as base64.
        """
        limit = min(max(limit, 1), RECORDS_MAX)
        bounds = {part.partition: part for part in await self._client.bounds(topic)}
        part = bounds.get(partition)
        if part is None:
            raise Failed(f"no such partition topic={topic!r} partition={partition} partitions={len(bounds)}")
        start = offset if offset >= 0 else max(part.first_offset, part.next_offset - limit)
        records = (
            await self._client.fetch(topic, partition, start, records_max=limit) if start < part.next_offset else []
        )
        return {"records": [_row(record) for record in records[:limit]], "next_offset": part.next_offset}

    async def list_groups(self, group: str = "") -> dict[str, Any]:
        """List consumer groups on each topic, with members and lag in records and seconds. Optionally only one group."""
        groups = await self._client.groups(group or None)
        return {
            "groups": [await self._group(found) for found in groups[:GROUPS_MAX]],
            "omitted": max(0, len(groups) - GROUPS_MAX),
        }

    async def _group(self, group: GroupInfo) -> dict[str, Any]:
        row = group_summary(group, await self._client.lag(group.name, group.topic))
        return {name: row[name] for name in ("group", "topic", "members", "lag_records", "lag_seconds")}

    async def describe_group(self, group: str, topic: str) -> dict[str, Any]:
        """Return the committed offset and lag of a group in each partition, and the member that reads it."""
        lags = await self._client.lag(group, topic)
        found = [entry for entry in await self._client.groups(group) if entry.topic == topic]
        names = ("partition", "position", "next_offset", "lag_records", "lag_seconds", "member")
        rows = [{name: row[name] for name in names} for entry in found for row in group_rows(entry, lags)]
        return {"group": group, "topic": topic, "partitions": rows}

    async def explain_group(self, group: str, topic: str, seconds: float = 3.0) -> dict[str, Any]:
        """Say why a group is behind: watches it for some seconds and compares produced with consumed records."""
        seconds = min(max(seconds, 0.5), OBSERVED_S_MAX)
        return {"group": group, "topic": topic, "reasons": await explain(self._client, group, topic, seconds=seconds)}

    async def health(self) -> dict[str, Any]:
        """Return the broker's version, state and active alerts, from its admin API."""
        return dict(await self._request("GET", "overview"))

    async def list_links(self) -> dict[str, Any]:
        """List links, which copy topics of other brokers, with their state and lag."""
        return dict(await self._request("GET", "links"))

    async def sql(self, statement: str) -> dict[str, Any]:
        """Run one SELECT statement of DuckDB over topics and return up to 1,000 rows.

        A topic is a table with the columns partition, "offset", timestamp, key, value and headers. Values are bytes: use
        decode(value), and decode(value)->>'field' for JSON.
        """
        return dict(await self._request("POST", "sql", {"statement": statement, "rows": SQL_ROWS_MAX}))

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return await asyncio.to_thread(self._admin.request, method, path, body)

    async def produce(self, topic: str, value: str, key: str | None = None) -> dict[str, Any]:
        """Append one record to a topic, which is created if it does not exist."""
        stored = await self._client.send(topic, value, key=key)
        return {"partition": stored.partition, "offset": stored.offset}

    async def create_topic(self, topic: str, partitions: int = 3) -> dict[str, Any]:
        """Create a topic."""
        await self._client.create_topic(topic, partitions)
        return {"topic": topic, "partitions": partitions}


READING: Final = (
    "health",
    "list_topics",
    "describe_topic",
    "read_records",
    "list_groups",
    "describe_group",
    "explain_group",
    "list_links",
    "sql",
)
WRITING: Final = ("produce", "create_topic")


def add_tools(server: Any, tools: Tools, *, allow_writes: bool) -> None:
    """Add the tools to a server of the package ``mcp``."""
    errors = required("mcp.server.mcpserver.exceptions", "polywire mcp needs the package mcp", "mcp")
    annotations = required("mcp", "polywire mcp needs the package mcp", "mcp")
    for name in (*READING, *(WRITING if allow_writes else ())):
        hints = annotations.types.ToolAnnotations(readOnlyHint=name in READING, destructiveHint=False)
        server.add_tool(_reporting(getattr(tools, name), errors.ToolError), name=name, annotations=hints)


def _reporting(tool: Callable[P, Awaitable[T]], failure: type[Exception]) -> Callable[P, Awaitable[T]]:
    """Return a tool that raises errors of the broker in the way of the package ``mcp``."""

    @wraps(tool)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await tool(*args, **kwargs)
        except (BrokerError, Failed) as error:
            raise failure(getattr(error, "message", "") or str(error)) from error

    return call


def _row(record: Record) -> dict[str, Any]:
    return {
        "offset": record.offset,
        "appended_at": record.time.isoformat(),
        "timestamp": None if record.timestamp is None else record.timestamp.isoformat(),
        "key": _text(record.key),
        "value": _text(record.value),
        "headers": {
            name: _text(value) if isinstance(value, bytes) else value for name, value in record.headers.items()
        },
    }


def _text(value: bytes | None) -> Any:
    """Return a value as text, or as base64 if it is not UTF-8. Long values are cut."""
    if value is None:
        return None
    try:
        text = value.decode()
    except UnicodeDecodeError:
        cut = value[:VALUE_CHARS_MAX]
        return {"base64": b64encode(cut).decode(), "bytes": len(value)}
    if len(text) > VALUE_CHARS_MAX:
        return {"text": text[:VALUE_CHARS_MAX], "characters": len(text)}
    return text
