"""``polywire top``: what a broker does right now, by wire, topic and group, asked of its admin API again and again.

Promises: rates are what changed between two looks; nothing is asked of the broker that the console does not ask. Must not know: the broker.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polywire.cli.output import Failed
from polywire.cli.top_bucket import bucket_rows
from polywire.cli.usage import examples
from polywire.client.brokers import split_address, split_brokers
from polywire.client.login import Login, split_login
from polywire.client.tls import SCHEME_SUFFIX
from polywire.client.unreachable import cannot_connect
from polywire.escaping import escaped, escaped_json
from polywire.types import spell_address

HTTP_PORT: Final = 9080
HTTP_DEFAULT: Final = f"http://127.0.0.1:{HTTP_PORT}"
PATHS: Final = ("overview", "topics", "groups")
ROWS_MAX: Final = 20  # of a table on the terminal: the busiest, and who is furthest behind
TIMEOUT_S: Final = 10.0
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
KIBI: Final = 1024.0
NOTHING: Final = "–"
SIZES: Final = (
    "received_per_s",
    "sent_per_s",
    "stored_bytes",
    "unstored_bytes",
    "cache_bytes",
    "put_bytes_per_s",
    "got_bytes_per_s",
)
EXACT: Final = ("price_per_1000", "cost", "cost_of_30_days")

app = App(
    name="top",
    help_epilogue=examples(
        "polywire top",
        "polywire top --http http://admin@broker.example:9080 --interval 5",
        "polywire top --once --output json | jq .groups",
    ),
)


class TopFormat(Enum):
    """Form of one look."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Look:
    """What the broker told, by path, and when in seconds of a monotonic clock."""

    at: float
    told: Mapping[str, Any]


@app.default
def top(
    *,
    http: Annotated[
        str | None,
        Parameter(
            env_var="POLYWIRE_HTTP",
            help="Where the broker serves HTTP; by default port 9080 of the host in POLYWIRE_ADDRESS, else of this machine. With "
            "http://name@host:port, the password is read from POLYWIRE_PASSWORD.",
        ),
    ] = None,
    interval: Annotated[float, Parameter(help="Seconds between two looks.", validator=Number(gte=0.2, lte=3600))] = 2.0,
    once: Annotated[bool, Parameter(negative="", help="Look twice, print what changed, and end.")] = False,
    output: Annotated[TopFormat, Parameter(name=("--output", "-o"), help="Format with --once.")] = TopFormat.TABLE,
) -> None:
    """Show live what a broker does: throughput by wire, the busiest topics, and groups with their lag, the furthest behind first; with a
    log in a bucket also who leads, what is not in the bucket yet, and what is asked of it."""
    admin = _Admin(http or default_http(os.environ.get("POLYWIRE_ADDRESS", "")))
    before = admin.look()
    if once or output is TopFormat.JSON:
        time.sleep(interval)
        _print(view(before, admin.look()), output)
        return
    with Live(console=Console(highlight=False), screen=sys.stdout.isatty(), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now = admin.look()
            live.update(_drawn(view(before, now), now.told["overview"]), refresh=True)
            before = now


def view(before: Look, now: Look) -> dict[str, list[dict[str, Any]]]:
    """Rows by wire, topic and group; rates a second between the two looks. The busiest topics come first, and who is furthest behind."""
    seconds = max(now.at - before.at, 1e-6)

    def rate(name: str, after: Mapping[str, Any], earlier: Mapping[str, Any]) -> float:
        change: float = max(after[name] - earlier.get(name, after[name]), 0)
        return round(change / seconds, 1)

    wires_before, topics_before = before.told["overview"]["wires"], _by_name(before.told["topics"]["topics"])
    wires = [
        {
            "wire": wire,
            "connections": traffic["connections"],
            "received_per_s": rate("received_bytes", traffic, wires_before.get(wire, {})),
            "sent_per_s": rate("sent_bytes", traffic, wires_before.get(wire, {})),
        }
        for wire, traffic in now.told["overview"]["wires"].items()
    ]
    topics = [
        {
            "topic": topic["name"],
            "partitions": topic["partitions"],
            "records": topic["records"],
            "records_per_s": rate("records", topic, topics_before.get(topic["name"], {"records": 0})),
            "stored_bytes": topic["stored_bytes"],
        }
        for topic in now.told["topics"]["topics"]
    ]
    groups = [
        {name: group[name] for name in ("group", "topic", "members", "lag_records", "lag_seconds")}
        for group in now.told["groups"]["groups"]
    ]
    topics.sort(key=lambda row: (-row["records_per_s"], row["topic"]))
    groups.sort(key=lambda row: (-(row["lag_records"] or 0), row["group"], row["topic"]))
    bucket = now.told["overview"].get("bucket")
    found = {} if bucket is None else bucket_rows(before.told["overview"].get("bucket"), bucket, seconds)
    return {"wires": wires, "topics": topics, "groups": groups, **found}


def _by_name(topics: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {topic["name"]: topic for topic in topics}


def default_http(address: str) -> str:
    """Return where the broker at an address serves HTTP unless configured otherwise: on its default port, under TLS where the address is."""
    if not address:
        return HTTP_DEFAULT
    first = split_brokers(address)[0]
    scheme, _, place = first.rpartition("://")
    login, at, place = place.rpartition("@")
    host, _ = split_address(place.partition("?")[0])
    secure = "s" if scheme.endswith(SCHEME_SUFFIX) else ""
    return f"http{secure}://{login}{at}{spell_address(host, HTTP_PORT)}"


class _Admin:
    """The admin API of a broker."""

    def __init__(self, url: str) -> None:
        login, place = split_login(url)
        parts = urlsplit(place)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise Failed(f"an address is http://host:port or https://host:port got={place!r}")
        self._secure: Final = parts.scheme == "https"
        self._host: Final = parts.hostname
        self._port: Final = port or (443 if self._secure else 80)
        self._headers: Final = {} if login is None else {"Authorization": _basic(login)}

    def look(self) -> Look:
        """Ask for everything. Raises Failed, and Unavailable where nobody answers."""
        connection: HTTPConnection = (
            HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=ssl.create_default_context())
            if self._secure
            else HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        )
        try:
            return Look(time.monotonic(), {path: self._ask(connection, path) for path in PATHS})
        except OSError as error:
            raise cannot_connect(error, self._host, self._port) from None
        except (HTTPException, ValueError) as error:
            raise Failed(f"what answers there is no broker's HTTP address={self._host}:{self._port}") from error
        finally:
            connection.close()

    def _ask(self, connection: HTTPConnection, path: str) -> Any:
        connection.request("GET", f"/api/v1/{path}", headers=self._headers)
        answer = connection.getresponse()
        told = json.loads(answer.read())
        if answer.status != 200:
            raise Failed(f"{told['error']['message']} path={path}")
        return told


def _basic(login: Login) -> str:
    return f"Basic {b64encode(f'{login.name}:{login.password}'.encode()).decode()}"


# What is printed


def _print(rows: Mapping[str, Sequence[Mapping[str, Any]]], form: TopFormat) -> None:
    if form is TopFormat.JSON:
        sys.stdout.write(escaped_json(json.dumps(rows, indent=2)) + "\n")
    else:
        Console(highlight=False, markup=False).print(Group(*_tables(rows)))


def _drawn(rows: Mapping[str, Sequence[Mapping[str, Any]]], overview: Mapping[str, Any]) -> Group:
    state = "ready" if overview["ready"] else escaped(overview["readiness"])
    head = f"Polywire {overview['version']}  {state}  topics {overview['topics']}  records {overview['records']:,}"
    return Group(Text(head, style="bold"), *_tables(rows))


def _tables(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Table]:
    tables = []
    for name, found in rows.items():
        table = Table(box=None, pad_edge=False, header_style="bold", title=f"\n{name}", title_justify="left")
        columns = list(found[0]) if found else []
        for column in columns:
            numeric = any(isinstance(row[column], int | float) for row in found)
            table.add_column(column.replace("_per_s", "/s").replace("_", " "), justify="right" if numeric else "left")
        for row in found[:ROWS_MAX]:
            table.add_row(*(Text(_shown(column, row[column])) for column in columns))
        if len(found) > ROWS_MAX:
            table.caption = f"and {len(found) - ROWS_MAX} more"
        tables.append(table)
    return tables


def _shown(column: str, value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return escaped(value)
    if column in SIZES:
        return _size(value)
    if column in EXACT:
        return f"{value:,.7g}"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _size(count: float) -> str:
    for unit in UNITS:
        if count < KIBI or unit == UNITS[-1]:
            break
        count /= KIBI
    return f"{count:,.1f} {unit}"
