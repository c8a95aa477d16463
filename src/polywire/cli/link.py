"""``polywire link``: let the broker follow topics of another broker, and watch how far it is.

The commands use the admin API over HTTP, because links are part of the administration of a broker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final
from urllib.parse import quote

from cyclopts import App, Parameter

from polywire.cli.admin import AdminApi, HttpAddress
from polywire.cli.output import Failed, ListFormat, note, print_list
from polywire.cli.usage import examples
from polywire.client.address import split_login
from polywire.escaping import escaped
from polywire.link_orders import LinkStart

app = App(
    name="link",
    help_epilogue=examples(
        "polywire link create old --from kafka://old:9092 --topics 'orders*' --dry-run",
        "polywire link create old --from kafka://old:9092 --topics 'orders*'",
        "polywire link status old",
    ),
)

app.command(
    "polywire.cli.compare:link_app",
    name="compare",
    help="Compare the topics of a link with those of its source, and show the first difference.",
)

Name = Annotated[str, Parameter(help="Name of the link.")]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]
LIST_COLUMNS: Final = ("link", "source", "topics", "state", "lag", "lag_s", "rate")
STATUS_COLUMNS: Final = ("topic", "state", "partitions", "copied", "lag", "lag_s", "rate", "offsets", "error")
DEFAULTS: Final = (None, 0, "none")  # values of settings that need no mention
PLAN_COLUMNS: Final = ("topic", "partitions", "records", "creates", "offsets", "error")


@app.command(
    help_epilogue=examples(
        "polywire link create old --from kafka://old:9092 --topics 'orders*'",
        "polywire link create old --from polywire://old:9555 --topics orders --dry-run",
        "polywire link create old --from kafka://old:9092 --topics clicks --start latest",
    )
)
def create(
    name: Name,
    *,
    from_: Annotated[str, Parameter(name="--from")],
    topics: Annotated[tuple[str, ...], Parameter(name=("--topics", "-t"), negative="")],
    start: LinkStart = LinkStart.EARLIEST,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    output: Output = ListFormat.TABLE,
    http: HttpAddress = None,
) -> None:
    """Create a link: the broker copies the topics that match, and follows them from then on.

    A topic that does not exist here is created with the partitions of the source. A topic that exists must be empty.

    Parameters
    ----------
    from_
        Broker to read from, as scheme://host:port. The scheme is polywire, kafka, kafka07, iggy, cursus or flux, with +tls for TLS. With
        scheme://name@host:port, the password is read from POLYWIRE_PASSWORD. The broker stores it, so use a user that may only read.
    topics
        Names and patterns with * and ?, separated by commas; the option can be repeated.
    start
        Where to begin with a topic: earliest copies all its records, latest only new ones.
    dry_run
        Show what the link would do with each topic, without creating it.
    """
    patterns = [pattern for words in topics for pattern in words.split(",") if pattern]
    body = {"source": _with_password(from_), "topics": patterns, "start": start.value, "dry_run": dry_run}
    plan = AdminApi(http).request("POST", _path(name), body)
    columns = ("settings", "other_settings") if output in (ListFormat.JSON, ListFormat.JSONL) else ()
    rows = [
        {**{name: topic[name] for name in (*PLAN_COLUMNS, *columns)}, "error": topic["error"] or "-"}
        for topic in plan["topics"]
    ]
    if dry_run:
        print_list(rows, columns=PLAN_COLUMNS, form=output)
    for topic in plan["topics"]:
        _note_settings(topic)
    for text in plan["notes"]:
        note(f"note: {text}")
    failed = [topic["error"] for topic in plan["topics"] if topic["error"]]
    if failed:
        raise Failed(f"the link would fail: {failed[0]}")
    records = sum(topic["records"] for topic in plan["topics"])
    note(f"{'would create' if dry_run else 'created'} link={name} topics={len(rows)} records={records}")


def _note_settings(topic: Mapping[str, Any]) -> None:
    carried = [f"{name}={value}" for name, value in topic["settings"].items() if value not in DEFAULTS]
    if carried:
        note(f"settings carried topic={topic['topic']}: {' '.join(carried)}")
    if topic["other_settings"]:
        note(f"settings not carried topic={topic['topic']}: {' '.join(topic['other_settings'])}")


def _with_password(url: str) -> str:
    """Return a URL with the password from the environment, if it has a name and no password. Raises Invalid."""
    login, _ = split_login(url)
    scheme, separator, rest = url.rpartition("://")
    words, at, host = rest.rpartition("@")
    if login is None or ":" in words:
        return url
    return f"{scheme}{separator}{words}:{quote(login.password, safe='')}{at}{host}"


def _path(name: str, *further: str) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise Failed(f"link name is invalid (use letters, digits, '.', '_' and '-') link={name!r}")
    return "/".join(("links", name, *further))


@app.command(name="list", help_epilogue=examples("polywire link list", "polywire link list --output json"))
def list_links(*, output: Output = ListFormat.TABLE, http: HttpAddress = None) -> None:
    """List links with their state and lag."""
    links = AdminApi(http).request("GET", "links")["links"]
    print_list([_row(link) for link in links], columns=LIST_COLUMNS, form=output)


def _row(link: Mapping[str, Any]) -> dict[str, object]:
    return {
        "link": link["name"],
        "source": link["source"],
        "topics": ",".join(link["topics"]),
        "state": link["state"],
        **_numbers(link),
    }


def _numbers(found: Mapping[str, Any]) -> dict[str, object]:
    return {"lag": found["lag"], "lag_s": round(found["lag_s"], 1), "rate": round(found["rate"], 1)}


@app.command(help_epilogue=examples("polywire link status old", "polywire link status old --output json"))
def status(name: Name, *, output: Output = ListFormat.TABLE, http: HttpAddress = None) -> None:
    """Show the state of a link, and of each topic that it follows: lag in records and seconds, and records per second."""
    link = AdminApi(http).request("GET", _path(name))
    print_list(_status_rows(link["topic_reports"]), columns=STATUS_COLUMNS, form=output)
    for topic in link["topic_reports"]:
        if topic["settings"]:
            note(f"note: the source has other settings topic={topic['topic']} source: {topic['settings']}")
    reason = f" error={json.dumps(escaped(link['error']))}" if link["error"] else ""
    facts = " ".join(f"{key}={value}" for key, value in _numbers(link).items())
    note(f"link={name} source={link['source']} state={link['state']} {facts}{reason}")


def _status_rows(topics: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    return [
        {
            "topic": topic["topic"],
            "state": "failing" if topic["error"] else "running",
            "partitions": topic["partitions"],
            "copied": topic["copied"],
            **_numbers(topic),
            "offsets": "differ" if topic["shifted"] else "same",
            "error": topic["error"] or "-",
        }
        for topic in topics
    ]


@app.command(help_epilogue=examples("polywire link pause old"))
def pause(name: Name, *, http: HttpAddress = None) -> None:
    """Stop copying until the link is resumed. Its positions remain."""
    AdminApi(http).request("POST", _path(name, "paused"), {"paused": True})
    note(f"paused link={name}")


@app.command(help_epilogue=examples("polywire link resume old"))
def resume(name: Name, *, http: HttpAddress = None) -> None:
    """Continue a link that was paused."""
    AdminApi(http).request("POST", _path(name, "paused"), {"paused": False})
    note(f"resumed link={name}")


@app.command(help_epilogue=examples("polywire link delete old"))
def delete(name: Name, *, http: HttpAddress = None) -> None:
    """Delete a link. The topics and their records remain, and so do its positions.

    A new link with the same name and source continues where this one ended.
    """
    AdminApi(http).request("DELETE", _path(name))
    note(f"deleted link={name}")
