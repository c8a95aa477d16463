"""``polywire link``: let the broker follow topics of another broker, and watch how far it is.

The commands use the admin API over HTTP, because links are part of the administration of a broker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import quote

from cyclopts import App, Parameter
from cyclopts.validators import Number

from polywire.cli.admin import AdminApi, HttpAddress
from polywire.cli.output import Failed, ListFormat, note, print_list
from polywire.cli.progress import reported
from polywire.cli.usage import examples
from polywire.client.address import split_login
from polywire.escaping import escaped
from polywire.link_orders import EVERY_GROUP, QUIET_MS, QUIET_MS_MAX, LinkStart, Phase

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
QuietMs = Annotated[int, Parameter(validator=Number(gte=0, lte=QUIET_MS_MAX))]
LIST_COLUMNS: Final = ("link", "source", "topics", "state", "lag", "lag_s", "rate")
STATUS_COLUMNS: Final = ("topic", "state", "partitions", "copied", "lag", "lag_s", "rate", "offsets", "late", "error")
GROUP_COLUMNS: Final = ("group", "topic", "source", "here", "active", "skipped", "error")
CUT_OVER_COLUMNS: Final = ("topic", "state", "pause_s")
UNITS_S: Final = {"s": 1, "m": 60, "h": 3600}
NAMED_MAX: Final = 5  # topics that a message names
NOTE_S: Final = 5.0  # interval of notes on what a cut-over waits for
DEFAULTS: Final = (None, 0, "none")  # values of settings that need no mention
PLAN_COLUMNS: Final = ("topic", "partitions", "records", "creates", "offsets", "error")


@app.command(
    help_epilogue=examples(
        "polywire link create old --from kafka://old:9092 --topics 'orders*'",
        "polywire link create old --from polywire://old:9555 --topics orders --dry-run",
        "polywire link create old --from kafka://old:9092 -t clicks --start latest",
    )
)
def create(
    name: Name,
    *,
    from_: Annotated[str, Parameter(name="--from")],
    topics: Annotated[tuple[str, ...], Parameter(name=("--topics", "-t"), negative="")],
    start: LinkStart = LinkStart.EARLIEST,
    groups: Annotated[tuple[str, ...], Parameter(negative="")] = (EVERY_GROUP,),
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
    groups
        Names and patterns of consumer groups whose committed offsets are copied in both directions; all by default, '' for none.
    dry_run
        Show what the link would do with each topic, without creating it.
    """
    body = {"source": _with_password(from_), "topics": _split(topics), "start": start.value, "dry_run": dry_run}
    body["groups"] = _split(groups)
    with reported("waiting for the source"):
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
    note(
        f"{'would create' if dry_run else 'created'} link={name} topics={len(rows)} records={records}"
        f" groups={len(plan['groups'])}"
    )


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS_S else (text, "s")
    if not number.isdecimal():
        raise Failed(
            f"timeout is invalid (use a number of seconds, minutes or hours, such as 60s, 10m or 1h) got={text!r}"
        )
    return float(int(number) * UNITS_S[unit])


def _split(words: Sequence[str]) -> list[str]:
    return [pattern for word in words for pattern in word.split(",") if pattern]


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
    lag_s = found["lag_s"]
    return {"lag": found["lag"], "lag_s": None if lag_s is None else round(lag_s, 1), "rate": round(found["rate"], 1)}


@app.command(help_epilogue=examples("polywire link status old", "polywire link status old --output json"))
def status(
    name: Name,
    *,
    groups: Annotated[bool, Parameter(negative="")] = False,
    output: Output = ListFormat.TABLE,
    http: HttpAddress = None,
) -> None:
    """Show the state of a link, and of each topic that it follows: lag in records and seconds, and records per second.

    Parameters
    ----------
    groups
        Show the consumer groups instead of the topics: the sums of their offsets at both ends, and where they have members.
    """
    link = AdminApi(http).request("GET", _path(name))
    if groups:
        rows = [_group_row(group) for group in link["group_reports"]]
        print_list(rows, columns=GROUP_COLUMNS, form=output)
        reason = f" error={json.dumps(escaped(link['group_error']))}" if link["group_error"] else ""
        note(f"link={name} source={link['source']} groups={link['carried_groups']}{reason}")
        return
    print_list(_status_rows(link["topic_reports"]), columns=STATUS_COLUMNS, form=output)
    for topic in link["topic_reports"]:
        if topic["settings"]:
            note(f"note: the source has other settings topic={topic['topic']} source: {topic['settings']}")
    reason = f" error={json.dumps(escaped(link['error']))}" if link["error"] else ""
    facts = " ".join(f"{key}={'-' if value is None else value}" for key, value in _numbers(link).items())
    for topic in link["topic_reports"]:
        if topic["late"]:
            command = escaped(topic["late_command"])
            note(f"late records are not copied topic={escaped(topic['topic'])} count={topic['late']}: {command}")
    note(f"link={name} source={link['source']} state={link['state']} {facts}{reason}")


def _group_row(group: Mapping[str, Any]) -> dict[str, object]:
    return {**group, "active": group["active"] or "-", "error": group["error"] or "-"}


def _status_rows(topics: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    return [
        {
            "topic": topic["topic"],
            "state": _topic_state(topic),
            "partitions": topic["partitions"],
            "copied": topic["copied"],
            **_numbers(topic),
            "offsets": "differ" if topic["shifted"] else "same",
            "late": topic["late"],
            "error": topic["error"] or "-",
        }
        for topic in topics
    ]


def _topic_state(topic: Mapping[str, Any]) -> str:
    if topic["phase"] in (Phase.CUT_OVER.value, Phase.REVERSED.value) and not topic["error"]:
        return str(topic["phase"])
    return "failing" if topic["error"] else "running"


@app.command(
    name="cut-over",
    help_epilogue=examples(
        "polywire link cut-over old",
        "polywire link cut-over old --topics 'orders*' --timeout 10m",
        "polywire link cut-over old --reverse",
    ),
)
def cut_over(
    name: Name,
    *,
    topics: Annotated[tuple[str, ...], Parameter(name=("--topics", "-t"), negative="")] = (),
    timeout: str = "60s",
    quiet_ms: QuietMs = QUIET_MS,
    reverse: Annotated[bool, Parameter(negative="")] = False,
    output: Output = ListFormat.TABLE,
    http: HttpAddress = None,
) -> None:
    """End the copy of topics, so that clients can write to them here.

    Stop the producers at the source first. The command waits until everything is copied and nothing more has arrived at the source for
    a moment. Each topic is cut over as soon as it is ready. After Ctrl-C or the timeout, the link continues to follow the other topics.

    Parameters
    ----------
    topics
        Names and patterns of topics that the link follows, separated by commas; all of them by default. If topics were cut over with
        --reverse, the command without --reverse ends the copy to the source.
    timeout
        How long to wait, such as 60s or 10m.
    quiet_ms
        Milliseconds for which nothing must arrive at the source.
    reverse
        Copy what clients write here from now on to the source, so that they can go back with polywire link fall-back.
    """
    waits_for = "records arrive at the source: stop the producers there"
    phase = Phase.REVERSED if reverse else Phase.CUT_OVER
    change = _Change(name, "cut-over", phase, waits_for, {"topics": _split(topics), "quiet_ms": quiet_ms})
    if reverse:
        change.body["reverse"] = True
    change.make(AdminApi(http), timeout, output)


@app.command(
    name="fall-back",
    help_epilogue=examples(
        "polywire link fall-back old", "polywire link fall-back old --topics 'orders*' --timeout 10m"
    ),
)
def fall_back(
    name: Name,
    *,
    topics: Annotated[tuple[str, ...], Parameter(name=("--topics", "-t"), negative="")] = (),
    timeout: str = "60s",
    quiet_ms: QuietMs = QUIET_MS,
    output: Output = ListFormat.TABLE,
    http: HttpAddress = None,
) -> None:
    """Follow topics again that were cut over with --reverse, so that clients write to them at the source.

    Stop the producers here first. The command waits until the source has everything, and each topic falls back as soon as it is ready.
    After Ctrl-C or the timeout, clients continue to write to the other topics here.

    Parameters
    ----------
    topics
        Names and patterns of topics, separated by commas; all topics of the link by default.
    timeout
        How long to wait, such as 60s or 10m.
    quiet_ms
        Milliseconds for which nothing must be written here.
    """
    waits_for = "records are written here: stop the producers"
    body = {"topics": _split(topics), "quiet_ms": quiet_ms}
    _Change(name, "fall-back", Phase.FOLLOWING, waits_for, body).make(AdminApi(http), timeout, output)


@dataclass(frozen=True, slots=True)
class _Change:
    """A cut-over or a fall-back.

    Attributes:
        verb: last part of its path.
        phase: phase of its topics afterwards.
        waits_for: what it waits for if everything is copied.
        body: body of its requests.
    """

    name: str
    verb: str
    phase: Phase
    waits_for: str
    body: dict[str, Any]

    def make(self, admin: AdminApi, timeout: str, output: ListFormat) -> None:
        """Make the change, and print its topics. Raises Failed if it takes too long."""
        end = time.monotonic() + _seconds(timeout)
        rows: Sequence[Mapping[str, Any]] = ()
        try:
            rows = self._wait(admin, end)
        finally:
            if self._waiting(rows) or not rows:
                body = {"topics": self.body["topics"]}
                rows = admin.request("POST", _path(self.name, "cut-over", "cancel"), body)["topics"]
        if not rows:
            raise Failed(f"the link has not found its topics yet, so nothing changes timeout={timeout}")
        found = [{"topic": row["topic"], "state": row["phase"], "pause_s": round(row["pause_s"], 3)} for row in rows]
        print_list(found, columns=CUT_OVER_COLUMNS, form=output)
        if waiting := self._waiting(rows):
            raise Failed(self._late(rows, waiting, timeout))
        pause_s = max([row["pause_s"] for row in rows], default=0.0)
        note(f"{self._done} link={self.name} topics={len(rows)} pause_s={pause_s:.3f}")

    def _wait(self, admin: AdminApi, end: float) -> Sequence[Mapping[str, Any]]:
        noted_at = 0.0
        while True:
            found = admin.request("POST", _path(self.name, self.verb), self.body)
            rows: Sequence[Mapping[str, Any]] = found["topics"]
            waiting, now = self._waiting(rows), time.monotonic()
            if (rows and not waiting) or now >= end:
                return rows
            if now - noted_at >= NOTE_S:
                noted_at = now
                note(f"waiting: {self._reason(waiting, found['error'])} topics={len(waiting)}")

    def _waiting(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [row for row in rows if row["phase"] != self.phase.value]

    def _late(self, rows: Sequence[Mapping[str, Any]], waiting: Sequence[Mapping[str, Any]], timeout: str) -> str:
        """Return the error for topics that were not ready in time. The topics that were ready are changed."""
        done = len(rows) - len(waiting)
        effect = (
            f"{done} of {len(rows)} topics are {self._done}, the others are as before" if done else "nothing changes"
        )
        names = ",".join(str(row["topic"]) for row in waiting[:NAMED_MAX])
        return f"not done in time, so {effect}: {self._reason(waiting)} topics={names} timeout={timeout}"

    @property
    def _done(self) -> str:
        return "cut over" if self.phase is not Phase.FOLLOWING else "fallen back"

    def _reason(self, waiting: Sequence[Mapping[str, Any]], error: str = "") -> str:
        """Return what the change waits for."""
        error = error or next((row["error"] for row in waiting if row["error"]), "")
        if error:
            return f"the link fails: {escaped(error)}"
        behind = [row for row in waiting if row["lag"]]
        if behind:
            facts = " ".join(f"{row['topic']}={row['lag']}" for row in behind[:NAMED_MAX])
            return f"records are not copied yet lag: {facts}"
        return self.waits_for


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
