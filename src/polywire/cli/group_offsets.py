"""``polywire group offsets``: show, set, export and import committed offsets.

* ``import`` reads what ``export`` prints, in every format.
* No offset is committed unless every entry is valid and none of the groups has members.
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
from polywire.cli.usage import Topic, examples
from polywire.client.base import WireClient
from polywire.client.polywire import PolywireClient
from polywire.errors import Conflict, ErrorCode, Invalid, Missing

ENTRIES_MAX: Final = 1_000_000  # most lines of one import, because all entries are held in memory and checked first
LINE_CHARS_MAX: Final = 10_000  # enough for three escaped names of 511 bytes each, and a number
COLUMNS: Final = ("group", "topic", "partition", "offset")
REQUIRED: Final = frozenset(COLUMNS) - {"group"}

app = App(
    name="offsets",
    help="Show, set, export and import committed offsets.",
    help_epilogue=examples(
        "polywire group offsets export > offsets.jsonl", "polywire group offsets import < offsets.jsonl"
    ),
)

Group = Annotated[str, Parameter(help="Name of the group.")]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]
DryRun = Annotated[bool, Parameter(name="--dry-run", negative="", help="Show the new offsets without committing them.")]


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


@app.command(
    help_epilogue=examples("polywire group offsets show billing", "polywire group offsets show billing --output csv")
)
def show(group: Group, *, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """Show the committed offsets of a group."""
    found = run_with_client(address, lambda client: _committed(client, group), group=group)
    if not found:
        raise Failed(f"group has no committed offsets group={group!r}")
    print_list([_row(entry) for entry in found], columns=COLUMNS, form=output)


@app.command(
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


@app.command(
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
    """Print committed offsets in a format that import reads."""
    found = run_with_client(address, lambda client: _committed(client, group), group=group)
    print_list([_row(entry) for entry in found], columns=COLUMNS, form=ListFormat(output.value))
    note(f"exported offsets={len(found)} groups={len({entry.group for entry in found})}")


@app.command(
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
    """Parse JSON lines, or CSV with a header. ``group``, if not None, replaces the group of every line. Raises Invalid."""
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
    """Check all offsets, then commit them and print the offsets before and after."""

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
    """Return ``new_groups=…`` for groups that had no committed offset before, because their names may be misspelled."""
    known = {row["group"] for row in rows if row["position"] is not None}
    new = {str(row["group"]) for row in rows} - known
    return f" new_groups={listed(new)}" if new else ""


async def _check(polywire: PolywireClient, offsets: Sequence[CommittedOffset]) -> dict[tuple[str, str, int], int]:
    """Check that all offsets can be committed, and return the current ones by group, topic and partition.

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
