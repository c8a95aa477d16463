"""``polywire group``: consumer groups, their lag and their committed offsets.

* ``import`` reads the output of ``export`` in any of its formats.
* ``import`` commits offsets only if every entry is valid and none of the groups has members.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.choices import listed, missing
from polywire.cli.connection import ADDRESS_DEFAULT, Address, polywire_only, run_with_client
from polywire.cli.output import Failed, ListFormat, note, print_list
from polywire.cli.start_position import parse_start, spans
from polywire.cli.usage import Topic, examples
from polywire.client.base import WireClient
from polywire.client.listings import GroupInfo, PartitionLag, lags_of, total_lag
from polywire.client.polywire import PolywireClient
from polywire.errors import Conflict, ErrorCode, Invalid, Missing

# maximum number of lines in one import, because all entries are held in memory and checked first
ENTRIES_MAX: Final = 1_000_000
LINE_CHARS_MAX: Final = 10_000  # enough for three escaped names of 511 bytes each, and a number
COLUMNS: Final = ("group", "topic", "partition", "offset")
REQUIRED: Final = frozenset(COLUMNS) - {"group"}

offsets_app = App(
    name="offsets",
    help="Show, set, export and import committed offsets.",
    help_epilogue=examples(
        "polywire group offsets export > offsets.jsonl", "polywire group offsets import < offsets.jsonl"
    ),
)

Group = Annotated[str, Parameter(help="Name of the group.")]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]
DryRun = Annotated[bool, Parameter(name="--dry-run", negative="", help="Show the new offsets without committing them.")]
OnlyReset = Annotated[int | None, Parameter(name=("--partition", "-p"), help="Reset only this partition.")]


class ExportFormat(Enum):
    """Format of exported offsets."""

    JSONL = "jsonl"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """The next offset that a group will read from a partition."""

    group: str
    topic: str
    partition: int
    offset: int


@offsets_app.command(
    help_epilogue=examples("polywire group offsets show billing", "polywire group offsets show billing --output csv")
)
def show(group: Group, *, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """Show the committed offsets of a group."""
    found = run_with_client(address, lambda client: _committed(client, group), group=group)
    if not found:
        raise Failed(f"group has no committed offsets group={group!r}")
    print_list([_row(entry) for entry in found], columns=COLUMNS, form=output)


@offsets_app.command(
    name="set",
    help_epilogue=examples(
        "polywire group offsets set billing orders 0=120 1=118 --dry-run",
        "polywire group offsets set billing orders 0=0",
    ),
)
def set_offsets(
    group: Group,
    topic: Topic,
    *places: Annotated[str, Parameter(help="PARTITION=OFFSET: the next offset to read from the partition.")],
    dry_run: DryRun = False,
    output: Output = ListFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Set committed offsets of a group without members."""
    offsets = [CommittedOffset(group, topic, *_partition_and_offset(text)) for text in places]
    if not offsets:
        raise Invalid(ErrorCode.INVALID_REQUEST, "no offset to set (use PARTITION=OFFSET)")
    _apply(address, offsets, dry_run=dry_run, output=output)


@offsets_app.command(
    help_epilogue=examples(
        "polywire group offsets export > offsets.jsonl", "polywire group offsets export billing --output csv"
    )
)
def export(
    group: Annotated[str | None, Parameter(help="Name of the group. Defaults to all groups.")] = None,
    *,
    output: Annotated[ExportFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ExportFormat.JSONL,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Print committed offsets in the format that polywire group offsets import reads."""
    found = run_with_client(address, lambda client: _committed(client, group), group=group)
    print_list([_row(entry) for entry in found], columns=COLUMNS, form=ListFormat(output.value))
    note(f"exported offsets={len(found)} groups={len({entry.group for entry in found})}")


@offsets_app.command(
    name="import",
    help_epilogue=examples(
        "polywire group offsets import --dry-run < offsets.jsonl",
        "polywire group offsets import --group billing-2 < offsets.csv",
    ),
)
def import_offsets(
    *,
    group: Annotated[str | None, Parameter(help="Group to set, instead of the groups named in the input.")] = None,
    dry_run: DryRun = False,
    output: Output = ListFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Set committed offsets from standard input, in JSON lines or CSV as export prints them."""
    _apply(address, read_offsets(sys.stdin, group=group), dry_run=dry_run, output=output)


def read_offsets(lines: Iterable[str], *, group: str | None) -> list[CommittedOffset]:
    """Parse JSON lines, or CSV with a header. ``group`` replaces the group of every line.

    Raises Invalid for a malformed line.
    """
    names: Sequence[str] | None = None
    found: list[CommittedOffset] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        if len(text) > LINE_CHARS_MAX or len(found) >= ENTRIES_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"input is too large line={number} lines_max={ENTRIES_MAX} line_chars_max={LINE_CHARS_MAX}",
            )
        if names is None and not text.startswith("{"):
            names = _cells(text, number)
            if not set(names) >= REQUIRED:
                raise _unreadable(number, f"the header must name {','.join(COLUMNS)}")
            continue
        members = _members(text, number) if names is None else dict(zip(names, _cells(text, number), strict=False))
        found.append(_entry(members, group, number))
    return found


def _cells(text: str, number: int) -> list[str]:
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise _unreadable(number, str(error)) from None


def _members(text: str, number: int) -> Mapping[str, object]:
    try:
        members = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(number, str(error)) from None
    if not isinstance(members, dict):
        raise _unreadable(number, "not a JSON object")
    return members


def _entry(members: Mapping[str, object], group: str | None, number: int) -> CommittedOffset:
    group_name = members.get("group") if group is None else group
    topic = members.get("topic")
    if not isinstance(group_name, str) or not group_name or not isinstance(topic, str) or not topic:
        raise _unreadable(number, "group or topic is missing")
    return CommittedOffset(
        group_name, topic, _integer(members, "partition", number), _integer(members, "offset", number)
    )


def _integer(members: Mapping[str, object], name: str, number: int) -> int:
    value = members.get(name)
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise _unreadable(number, f"{name} is not a number")
    return int(text)


def _unreadable(number: int, reason: str) -> Invalid:
    return Invalid(
        ErrorCode.INVALID_REQUEST,
        f"line is not a committed offset in the format of group offsets export line={number} reason={reason!r}",
    )


def _partition_and_offset(text: str) -> tuple[int, int]:
    partition, equals, offset = text.partition("=")
    if not (equals and text.isascii() and partition.isdigit() and offset.isdigit()):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"argument is not PARTITION=OFFSET got={text!r}")
    return int(partition), int(offset)


def _row(entry: CommittedOffset) -> dict[str, object]:
    return {"group": entry.group, "topic": entry.topic, "partition": entry.partition, "offset": entry.offset}


async def _committed(client: WireClient, group: str | None) -> list[CommittedOffset]:
    """Return the committed offsets of a group, or of all groups. Raises Missing(GROUP_MISSING)."""
    groups = await polywire_only(client, "list committed offsets").groups(group)
    if group is not None and not groups:
        raise Missing(ErrorCode.GROUP_MISSING, f"no such group group={group!r}")
    return [
        CommittedOffset(known.name, known.topic, partition, offset)
        for known in groups
        for partition, offset in sorted(known.positions.items())
    ]


def _apply(address: str, offsets: Sequence[CommittedOffset], *, dry_run: bool, output: ListFormat) -> None:
    async def work(client: WireClient) -> list[dict[str, object]]:
        polywire = polywire_only(client, "set committed offsets")
        before = await _check(polywire, offsets)
        for entry in offsets if not dry_run else ():
            await polywire.commit(entry.group, entry.topic, entry.partition, entry.offset)
        return [
            {
                "group": entry.group,
                "topic": entry.topic,
                "partition": entry.partition,
                "position": before.get((entry.group, entry.topic, entry.partition)),
                "new_position": entry.offset,
            }
            for entry in offsets
        ]

    rows = run_with_client(address, work)
    print_list(rows, columns=("group", "topic", "partition", "position", "new_position"), form=output)
    note(f"{'would set' if dry_run else 'set'} offsets={len(rows)}{new_groups(rows)}")


def new_groups(rows: Sequence[Mapping[str, object]]) -> str:
    """Return ``new_groups=…`` with the groups that had no committed offset, because their names may be misspelled."""
    known = {row["group"] for row in rows if row["position"] is not None}
    new = {str(row["group"]) for row in rows} - known
    return f" new_groups={listed(new)}" if new else ""


async def _check(polywire: PolywireClient, offsets: Sequence[CommittedOffset]) -> dict[tuple[str, str, int], int]:
    """Check that all offsets can be committed. Return the present ones by group, topic and partition.

    Raises Conflict(GROUP_NOT_EMPTY), Missing, and Invalid for an offset beyond the end of its partition.
    """
    before: dict[tuple[str, str, int], int] = {}
    for name in sorted({entry.group for entry in offsets}):
        topics_to_set = {entry.topic for entry in offsets if entry.group == name}
        for known in await polywire.groups(name):
            if known.members and known.topic in topics_to_set:
                facts = f"group={name!r} topic={known.topic!r} members={len(known.members)}"
                raise Conflict(ErrorCode.GROUP_NOT_EMPTY, f"group has members (stop them first) {facts}")
            before |= {(name, known.topic, number): offset for number, offset in known.positions.items()}
    topics = {entry.topic for entry in offsets}
    known_topics = {info.name for info in await polywire.topics()}
    for topic in sorted(topics - known_topics):
        raise missing(ErrorCode.TOPIC_MISSING, "topic", topic, known_topics)
    ends = {
        (topic, part.partition): part.next_offset for topic in sorted(topics) for part in await polywire.bounds(topic)
    }
    for entry in offsets:
        end = ends.get((entry.topic, entry.partition))
        facts = f"topic={entry.topic!r} partition={entry.partition}"
        if end is None:
            raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition {facts}")
        if entry.offset > end:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"offset is beyond the end of the partition {facts} offset={entry.offset} next_offset={end}",
            )
    return before


app = App(
    name="group",
    help_epilogue=examples("polywire group list", "polywire group describe billing"),
)


@app.command(
    name="list", help_epilogue=examples("polywire group list", "polywire group list --output jsonl | jq .lag_records")
)
def list_groups(*, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """List groups with their lag, in records and as the age of the oldest unread record. Groups without committed
    offsets have no lag.
    """

    async def work(client: WireClient) -> list[dict[str, object]]:
        polywire = polywire_only(client, "list groups")
        return [group_summary(group, await lags_of(polywire, group)) for group in await polywire.groups()]

    columns = ("group", "topic", "members", "generation", "lag_records", "lag_seconds", "owner")
    print_list(run_with_client(address, work), columns=columns, form=output)


@app.command(help_epilogue=examples("polywire group describe billing", "polywire group describe billing --output csv"))
def describe(name: str, *, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """Show the committed offset, lag and assigned member of each partition of a group.

    Parameters
    ----------
    name
        Name of the group.
    """

    async def work(client: WireClient) -> list[dict[str, object]]:
        polywire = polywire_only(client, "describe groups")
        groups = await polywire.groups(name)
        if not groups:
            raise Missing(ErrorCode.GROUP_MISSING, f"no such group group={name!r}")
        return [row for group in groups for row in group_rows(group, await lags_of(polywire, group))]

    columns = ("topic", "partition", "position", "next_offset", "lag_records", "lag_seconds", "member", "wire")
    print_list(run_with_client(address, work, group=name), columns=columns, form=output)


@app.command(
    help_epilogue=examples(
        "polywire group reset billing orders --to earliest --dry-run",
        "polywire group reset billing orders --to 2026-01-31T08:00:00Z",
        "polywire group reset billing orders --to 120 --partition 3",
    )
)
def reset(
    name: str,
    topic: Topic,
    *,
    to: str,
    partition: OnlyReset = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    output: Output = ListFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Reset the committed offsets of a group without members, and show the offsets before and after.

    Parameters
    ----------
    name
        Name of the group.
    to
        Where to resume: earliest, latest, an offset (moved into the range that exists), or an ISO 8601 time.
    dry_run
        Show the new offsets without committing them.
    """
    start = parse_start(to, option="--to")

    async def work(client: WireClient) -> list[dict[str, object]]:
        polywire = polywire_only(client, "reset offsets")
        known = next((group for group in await polywire.groups(name) if group.topic == topic), None)
        if known is not None and known.members:
            raise Conflict(
                ErrorCode.GROUP_NOT_EMPTY,
                f"group has members (stop them first) group={name!r} members={len(known.members)}",
            )
        before = {} if known is None else known.positions
        rows: list[dict[str, object]] = []
        for span in await spans(polywire, topic, partition=partition, start=start):
            offset = min(span.offset, span.next_offset)
            if not dry_run:
                await polywire.commit(name, topic, span.partition, offset)
            row = {"topic": topic, "partition": span.partition, "position": before.get(span.partition)}
            rows.append(row | {"new_position": offset, "lag_records": span.next_offset - offset})
        return rows

    rows = run_with_client(address, work, topic=topic)
    new = new_groups([row | {"group": name} for row in rows])
    print_list(rows, columns=("topic", "partition", "position", "new_position", "lag_records"), form=output)
    note(f"{'would reset' if dry_run else 'reset'} group={name} topic={topic} partitions={len(rows)}{new}")


@app.command(help_epilogue=examples("polywire group delete billing orders --dry-run"))
def delete(
    name: str,
    topic: str,
    *,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Delete a group of a topic with its members and committed offsets. Members that rejoin start without committed offsets.

    Parameters
    ----------
    name
        Name of the group.
    topic
        Topic of the group.
    dry_run
        Show what would be deleted without deleting it.
    """

    async def work(client: WireClient) -> GroupInfo | None:
        polywire = polywire_only(client, "delete groups")
        known = [group for group in await polywire.groups(name) if group.topic == topic]
        if dry_run and not known:
            raise Missing(ErrorCode.GROUP_MISSING, f"no such group group={name!r} topic={topic!r}")
        if not dry_run:
            await polywire.delete_group(name, topic)
        return known[0] if known else None

    group = run_with_client(address, work, topic=topic, group=name)
    members, offsets = (0, 0) if group is None else (len(group.members), len(group.positions))
    outcome = "would delete" if dry_run else "deleted"
    note(f"{outcome} group={name} topic={topic} members={members} offsets={offsets}")


app.command(offsets_app)


def group_summary(group: GroupInfo, lags: list[PartitionLag]) -> dict[str, object]:
    """Return the row of a group in a list of groups."""
    records, seconds = total_lag(lags)
    return {
        "group": group.name,
        "topic": group.topic,
        "members": len(group.members),
        "generation": None if group.generation < 0 else group.generation,
        "lag_records": records,
        "lag_seconds": None if seconds is None else round(seconds, 3),
        "owner": group.owner,
    }


def group_rows(group: GroupInfo, lags: list[PartitionLag]) -> list[dict[str, object]]:
    """Return the row of each partition of a group."""
    owners = {number: member for member in group.members for number in member.partitions}
    rows: list[dict[str, object]] = []
    for lag in lags:
        owner = owners.get(lag.partition)
        rows.append(
            {
                "topic": group.topic,
                "partition": lag.partition,
                "position": lag.position,
                "next_offset": lag.next_offset,
                "lag_records": lag.records,
                "lag_seconds": None if lag.seconds is None else round(lag.seconds, 3),
                "member": None if owner is None else owner.id,
                "wire": None if owner is None else owner.wire,
            }
        )
    return rows
