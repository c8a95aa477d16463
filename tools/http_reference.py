"""The reference pages of HTTP: paths with their permissions, and metrics, both read from a broker in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from polywire.broker.client_quotas import DEFAULT
from polywire.broker.permissions import ANYBODY, Action
from polywire.errors import ErrorCode
from polywire.http.api import Api
from polywire.http.dead_letters import Redrive
from polywire.http.endpoints import PREFIX, Endpoint
from polywire.http.errors import CATALOG, LOGIN_CODES, STATUSES
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.server.standby import METRICS as STANDBY_METRICS
from polywire.types import Level, PositionKind, TopicName
from tests.permissions.cases import HTTP_PAGES
from tests.unit.http.site import Site, bucket_view, table_report
from tools.markdown import MADE, table

PREFIX_OF_ALL: Final = "polywire_"
TOPIC: Final = "orders"
# The first prefix that a metric's name begins with names its section.
SECTIONS: Final[Mapping[str, Sequence[str]]] = {
    "Records and topics": ("topic", "batches", "congested"),
    "Groups": ("group",),
    "Queues": ("queue",),
    "Connections and requests": ("connections", "received", "sent", "receive_buffer", "request_seconds"),
    "Quotas": ("quota",),
    "The log": ("log_work",),
    "Tables and SQL": ("table", "sql"),
    "Links": ("link",),
    "A bucket": ("bucket",),
    "The process": ("process", "build_info", "stopping", "shard_up"),
}
NOTES: Final[Mapping[str, str]] = {
    "Records and topics": """\
At most 1,000 topics have their own series; the rest are summed in the topic `(others)`.""",
    "Groups": """\
Lag counts partitions with a committed offset only. A group without any commit has no series. At most 1,000 pairs of group and
topic have series, and at most 50,000 partitions are read for them.""",
    "Queues": """\
These exist only with [queues](../concepts/queues.md). At most 1,000 pairs of group and topic have series, and at most 50,000
partitions are read for them. `outcome` is `accepted`, `released` (also when the worker's connection ended), `rejected` (also after
the last permitted delivery) or `expired` (the lock ended first). These counters begin at 0 when the broker is started.""",
    "Connections and requests": """\
`polywire_request_seconds` is sampled. Its label `kind` is `produce` or `other`. A fetch that waits for records includes its wait. Requests
without a response, and requests pipelined behind a pending one, are not timed.""",
    "Quotas": """\
There are series for at most 1,000 quotas. `user` and `client_id` are those of the quota; `*` stands for all without a quota of their own, and
their usage is summed. `limit` is `produce` or `fetch` (bytes) or `requests`.""",
    "The log": """\
`work` is `sync` (journal), `bucket` (an object stored, retries included), `seal` (segments written and merged), `reader` (reads from
disk), `scrub` or `delete`.""",
    "Tables and SQL": """\
A table has series once it was written for the first time. At most 1,000 tables have series. `outcome` of `polywire_sql_queries_total` is
`done`, `failed` (with cancelled statements and those that exceed a limit) or `rejected` (too many at the same time).""",
    "Links": """\
`state` of `polywire_link_state` is `starting`, `running`, `paused` or `failing`. At most 1,000 topics of links have series. The counters of
records begin at 0 when the process that runs links is started.""",
    "A bucket": """\
* `state` of `polywire_bucket_node` is `leads`, `takes over`, `standby`, `deposed` or `silent`.
* `outcome` of `polywire_bucket_request_seconds`: `refused` means that a conditional write lost, `missing` that the object does not
  exist, `failed` that there was no answer or an error. Failed requests are retried.
* `polywire_bucket_cost_total` exists only with `--bucket-prices`.
* A standby exports `polywire_bucket_leads` (0) and `polywire_bucket_carries` only.""",
    "The process": """\
With several processes or shards, every series has the label `shard`, and `polywire_shard_up` exists.""",
}
SHARD_UP: Final = (f"{PREFIX_OF_ALL}shard_up", "gauge", "`shard`", "", "1 if this process or shard answers.")
UNITS: Final = ("seconds", "bytes")


def _filled() -> Site:
    """Return the site of a broker that has one of everything with metrics."""
    site = Site()
    site.process.view = bucket_view()
    site.broker.access.set_quota(None, DEFAULT, {"requests": 100.0})
    site.process.table_reports[TOPIC] = table_report(TOPIC)
    site.broker.create_topic(TopicName.parse(TOPIC), partition_count=1)
    batch = from_records([Record(value=b"v")] * 2)
    site.broker.produce(site.broker.topic(TOPIC).partitions[0], batch, level=Level.WRITTEN, done=None)
    site.broker.commit()
    site.broker.commit_position(TOPIC, 0, PositionKind.GROUP, "billing", 1)
    site.broker.shares.configure("workers", site.broker.topic(TOPIC), {}, done=lambda _: None)
    return site


def _families() -> Iterator[Metric]:
    site = _filled()
    try:
        text = site.ask("GET", "/metrics").body.decode()
    finally:
        site.close()
    return chain(text_string_to_metric_families(text), text_string_to_metric_families(STANDBY_METRICS % 1))


def _row(family: Metric) -> tuple[str, str, str, str, str]:
    """Return name, type, labels, unit and meaning."""
    labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
    name = family.name + ("_total" if family.type == "counter" else "")
    words = family.name.split("_")
    unit = next((unit for unit in UNITS if unit in words), "")
    return name, family.type, ", ".join(f"`{label}`" for label in labels), unit, family.documentation


def _section(name: str) -> str:
    bare = name.removeprefix(PREFIX_OF_ALL)
    return next(title for title, starts in SECTIONS.items() if bare.startswith(tuple(starts)))


def metrics_page() -> Iterator[str]:
    """Yield every metric: name, type, labels, unit, meaning."""
    yield from ["# Metrics", "", MADE, ""]
    yield f"`GET /metrics` returns these in the Prometheus text format. It needs the permission `{Action.SERVER_DESCRIBE.permission_words}`."
    yield "[Monitor a broker](../operate/monitor.md) says which ones to watch. Metrics are collected on request; reading them stores nothing."
    rows = [*map(_row, _families()), SHARD_UP]
    for title, notes in NOTES.items():
        yield from ["", f"## {title}", ""]
        own = sorted({row[0]: row for row in reversed(rows) if _section(row[0]) == title}.values())
        named = [(f"`{name}`", kind, labels, unit, meaning) for name, kind, labels, unit, meaning in own]
        yield from table(("metric", "type", "labels", "unit", "meaning"), named)
        yield from ["", notes]
    yield from ["", "## Names in labels", ""]
    yield "Control characters in names of topics and groups are escaped: `\\x1b` for ESC, `\\u202e` for a change of the writing direction."
    yield "Names that contain `\\x` or `\\u` have their backslashes doubled, so that two names never share a series."


# Paths.

PAGES: Final[Mapping[str, str]] = {
    "/livez": "200 while the process serves requests",
    "/readyz": "200 if a write would succeed now, otherwise 503 with the reason",
    "/metrics": "[metrics](metrics.md)",
    "/": "the console",
    "/static/{name}": "files of the console",
    f"{PREFIX}/openapi.json": "the admin API as OpenAPI 3.1",
    f"{CATALOG}/v1/config": "[Iceberg REST catalog](../concepts/tables.md#iceberg): what it can do",
    f"{CATALOG}/v1/namespaces": "Iceberg: streams with tables",
    f"{CATALOG}/v1/namespaces/{{namespace}}": "Iceberg: 200 if the stream has tables",
    f"{CATALOG}/v1/namespaces/{{namespace}}/tables": "Iceberg: tables of a stream",
    f"{CATALOG}/v1/namespaces/{{namespace}}/tables/{{table}}": "Iceberg: the metadata of a table",
}


def _endpoints() -> Sequence[Endpoint]:
    site = Site()
    try:
        return Api(site.broker, site.process, Redrive(site.broker, None), site.broker.users).table()
    finally:
        site.close()


def _of_action(action: Action) -> str:
    if action in ANYBODY:
        return "none"
    return f"`{action.permission_words}`" if action.permission_words else "a login"


def _permission(endpoint: Endpoint) -> str:
    needed = dict.fromkeys(_of_action(action) for action in endpoint.actions)
    return " and ".join(needed) + (", or own user" if endpoint.is_own else "")


def http_page(limits: Iterator[str]) -> Iterator[str]:
    """Yield every path with method, permission and parameters. ``limits``: the lines of the table of limits."""
    yield from ["# HTTP", "", MADE, ""]
    yield "HTTP listens on `127.0.0.1:9080` by default ([monitor](../operate/monitor.md), [console](../operate/console.md))."
    yield "If the broker has users, it requires `Basic` credentials, or an access token as `Bearer`."
    yield ""
    rows = [("GET", f"`{path}`", _of_action(action), PAGES[path]) for path, action in HTTP_PAGES.items()]
    yield from table(("method", "path", "permission", "response"), rows)
    yield from ["", "## Admin API", ""]
    yield f"Paths are below `{PREFIX}`. Parameters of GET go into the query, others into a JSON object as the body."
    yield "Requests other than GET need the header `X-Polywire` with any value. Names in paths are percent-encoded. Browsers and proxies"
    yield "remove the segments `.` and `..`, so these names are `%252E` and `%252E%252E`."
    yield ""
    endpoints = [
        (
            endpoint.method,
            f"`{endpoint.path}`",
            _permission(endpoint),
            endpoint.summary,
            "; ".join(f"`{name}`: {meaning}" for name, meaning in endpoint.fields.items()),
        )
        for endpoint in _endpoints()
    ]
    yield from table(("method", "path", "permission", "action", "parameters"), endpoints)
    yield ""
    yield 'The response is JSON. An error is `{"error": {"code", "message", "retry"}}` with a [code](errors.md) and one of these statuses:'
    yield ""
    yield from table(("status", "error"), _statuses())
    yield from ["", "## Limits", ""]
    yield "Responses that a limit shortens say so in `cut`, `header_count`, `more` or `next_offset`."
    yield ""
    yield from limits


def _statuses() -> Sequence[tuple[str, str]]:
    """Return the errors of each status."""
    kinds: dict[int, list[str]] = {}
    for kind, status in STATUSES.items():
        kinds.setdefault(status, []).append(f"`{kind.__name__}`")
    kinds[401] = [f"`Denied` with `{code.value}`" for code in ErrorCode if code in LOGIN_CODES]
    return [(str(status), ", ".join(kinds[status])) for status in sorted(kinds)]
