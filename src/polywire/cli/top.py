"""``polywire top``: a live view of a broker's protocols, topics and groups, polled from its admin API.

Rates are differences between two samples. The web console uses the same requests.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polywire.cli.admin import AdminApi, HttpAddress
from polywire.cli.usage import examples
from polywire.escaping import escaped, escaped_json

MONTH_S: Final = 30 * 86_400

Rows = list[dict[str, Any]]
PATHS: Final = ("overview", "topics", "groups")
ROWS_MAX: Final = 20  # rows of a table on the terminal: the busiest topics, and the groups with the largest lag
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


def bucket_rows(before: Mapping[str, Any] | None, now: Mapping[str, Any], seconds: float) -> dict[str, Rows]:
    """Return rows for each table about the bucket.

    The tables are: this broker and its bucket, all brokers, requests by verb and outcome, and requests by price.
    """
    earlier = before or now
    names = ("node", "shard", "epoch", "unstored_bytes", "unstored_seconds", "journal_objects", "cache_bytes")
    this_broker = {name: now[name] for name in names}
    for name in ("put", "got"):
        moved = max(now[f"{name}_bytes"] - earlier[f"{name}_bytes"], 0)
        this_broker[f"{name}_bytes_per_s"] = round(moved / seconds, 1)
    return {
        "bucket": [this_broker],
        "brokers": [{name: node[name] for name in ("name", "state", "epoch")} for node in now["nodes"]],
        "requests": _requests(earlier["requests"], now["requests"], seconds),
        "charges": _charges(earlier["charges"], now["charges"], seconds),
    }


def _requests(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], seconds: float) -> Rows:
    earlier_by_request = {(count["verb"], count["outcome"]): count for count in before}
    rows = []
    for count in now:
        earlier = earlier_by_request.get((count["verb"], count["outcome"]), {"requests": 0, "seconds": 0.0})
        requests = max(count["requests"] - earlier["requests"], 0)
        took_ms = 1e3 * max(count["seconds"] - earlier["seconds"], 0.0)
        rows.append(
            {
                "request": count["verb"],
                "outcome": count["outcome"],
                "requests_per_s": round(requests / seconds, 1),
                "mean_ms": round(took_ms / requests, 1) if requests else None,
                "p99_ms": None if count["p99_s"] is None else round(1e3 * count["p99_s"], 1),
                "requests": count["requests"],
            }
        )
    return rows


def _charges(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], seconds: float) -> Rows:
    """Return rows of requests by price.

    If prices are configured, they have the cost so far, and for 30 days at this rate.
    """
    earlier_requests = {charge["kind"]: charge["requests"] for charge in before}
    rows: Rows = []
    for charge in now:
        per_s = max(charge["requests"] - earlier_requests.get(charge["kind"], 0), 0) / seconds
        row = {"charged_as": charge["kind"], "requests": charge["requests"], "requests_per_s": round(per_s, 1)}
        if charge["price"] is not None:
            row |= {
                "price_per_1000": charge["price"],
                "cost": round(charge["cost"], 4),
                "cost_of_30_days": round(per_s * MONTH_S * charge["price"] / 1000, 2),
            }
        rows.append(row)
    return rows


app = App(
    name="top",
    help_epilogue=examples(
        "polywire top",
        "polywire top --http http://admin@broker.example:9080 --interval 5",
        "polywire top --once --output json | jq .groups",
    ),
)


class TopFormat(Enum):
    """Format of one sample."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Sample:
    """Responses of the admin API at one time.

    Attributes:
        at: the time, in seconds of a monotonic clock.
        responses: JSON of the responses by path.
    """

    at: float
    responses: Mapping[str, Any]


@app.default
def top(
    *,
    http: HttpAddress = None,
    interval: Annotated[
        float, Parameter(help="Seconds between two samples.", validator=Number(gte=0.2, lte=3600))
    ] = 2.0,
    once: Annotated[bool, Parameter(negative="", help="Take two samples, print the view once, and exit.")] = False,
    output: Annotated[TopFormat, Parameter(name=("--output", "-o"), help="Format with --once.")] = TopFormat.TABLE,
) -> None:
    """Show a broker's activity live: throughput by protocol, the busiest topics, and the groups with the largest lag.

    If standard output is not a terminal, the view is printed again and again.
    """
    samples = _pairs(AdminApi(http), interval)
    if once or output is TopFormat.JSON:
        _print(view(*next(samples)), output)
        return
    if not sys.stdout.isatty():
        for before, now in samples:
            _print(view(before, now), output)
            sys.stdout.flush()
    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        for before, now in samples:
            live.update(_render(view(before, now), now.responses["overview"]), refresh=True)


def _pairs(admin: AdminApi, interval_s: float) -> Iterator[tuple[Sample, Sample]]:
    """Yield each sample together with the one before."""
    before = _sample(admin)
    while True:
        time.sleep(interval_s)
        now = _sample(admin)
        yield before, now
        before = now


def _sample(admin: AdminApi) -> Sample:
    return Sample(time.monotonic(), admin.get(PATHS))


def view(before: Sample, now: Sample) -> dict[str, list[dict[str, Any]]]:
    """Return rows by protocol, topic and group, with rates per second between the two samples.

    The busiest topics and the groups with the largest lag come first.
    """
    seconds = max(now.at - before.at, 1e-6)

    def rate(name: str, after: Mapping[str, Any], earlier: Mapping[str, Any]) -> float:
        change: float = max(after[name] - earlier.get(name, after[name]), 0)
        return round(change / seconds, 1)

    wires_before = before.responses["overview"]["wires"]
    topics_before = _by_name(before.responses["topics"]["topics"])
    wires = [
        {
            "wire": wire,
            "connections": traffic["connections"],
            "received_per_s": rate("received_bytes", traffic, wires_before.get(wire, {})),
            "sent_per_s": rate("sent_bytes", traffic, wires_before.get(wire, {})),
        }
        for wire, traffic in now.responses["overview"]["wires"].items()
    ]
    topics = [
        {
            "topic": topic["name"],
            "partitions": topic["partitions"],
            "records": topic["records"],
            "records_per_s": rate("records", topic, topics_before.get(topic["name"], {"records": 0})),
            "stored_bytes": topic["stored_bytes"],
        }
        for topic in now.responses["topics"]["topics"]
    ]
    groups = [
        {name: group[name] for name in ("group", "topic", "members", "lag_records", "lag_seconds")}
        for group in now.responses["groups"]["groups"]
    ]
    topics.sort(key=lambda row: (-row["records_per_s"], row["topic"]))
    groups.sort(key=lambda row: (-(row["lag_records"] or 0), row["group"], row["topic"]))
    bucket = now.responses["overview"].get("bucket")
    about_bucket = {} if bucket is None else bucket_rows(before.responses["overview"].get("bucket"), bucket, seconds)
    return {"wires": wires, "topics": topics, "groups": groups, **about_bucket}


def _by_name(topics: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {topic["name"]: topic for topic in topics}


# Printing


def _print(rows: Mapping[str, Sequence[Mapping[str, Any]]], form: TopFormat) -> None:
    if form is TopFormat.JSON:
        sys.stdout.write(escaped_json(json.dumps(rows, indent=2)) + "\n")
    else:
        Console(highlight=False, markup=False).print(Group(*_tables(rows)))


def _render(rows: Mapping[str, Sequence[Mapping[str, Any]]], overview: Mapping[str, Any]) -> Group:
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
