"""``polywire group offsets``: committed offsets one by one: shown, set, written out and read back.

Promises: what ``export`` prints ``import`` reads, over any of these forms; nothing is moved before everything that was given made sense, and
nothing of a group that has members. Must not know: files of the broker.
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

ENTRIES_MAX: Final = 1_000_000  # of one import: a line each, held until all of them were read
LINE_CHARS_MAX: Final = 10_000  # three names of 511 bytes and a number, whatever of them is escaped
COLUMNS: Final = ("group", "topic", "partition", "offset")
NEEDED: Final = frozenset(COLUMNS) - {"group"}

app = App(
    name="offsets",
    help="Show, set, export and import committed offsets.",
    help_epilogue=examples(
        "polywire group offsets export > offsets.jsonl", "polywire group offsets import < offsets.jsonl"
    ),
)

Group = Annotated[str, Parameter(help="Name of the group.")]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]
DryRun = Annotated[bool, Parameter(name="--dry-run", negative="", help="Show what would be set without setting it.")]


class ExportFormat(Enum):
    """Form of exported offsets."""

    JSONL = "jsonl"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """The next offset that a group reads of a partition."""

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
    *places: Annotated[str, Parameter(help="PARTITION=OFFSET, the next offset to read of a partition.")],
    dry_run: DryRun = False,
    output: Output = ListFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Set committed offsets of a group that has no members."""
    wanted = [CommittedOffset(group, topic, *_place(text)) for text in places]
    if not wanted:
        raise Invalid(ErrorCode.INVALID_REQUEST, "no offset is given: PARTITION=OFFSET")
    _apply(address, wanted, dry_run=dry_run, output=output)


@app.command(
    help_epilogue=examples(
        "polywire group offsets export > offsets.jsonl", "polywire group offsets export billing --output csv"
    )
)
def export(
    group: Annotated[str | None, Parameter(help="Name of the group; all groups without it.")] = None,
    *,
    output: Annotated[ExportFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ExportFormat.JSONL,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Print committed offsets as import reads them."""
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
    group: Annotated[str | None, Parameter(help="Group to set, instead of those that the lines name.")] = None,
    dry_run: DryRun = False,
    output: Output = ListFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Set committed offsets from standard input, lines of JSON or CSV as export prints them."""
    _apply(address, read_offsets(sys.stdin, group=group), dry_run=dry_run, output=output)


def read_offsets(lines: Iterable[str], *, group: str | None) -> list[CommittedOffset]:
    """Committed offsets of lines, JSON objects or CSV below a header; ``group`` None: each line names its own. Raises Invalid."""
    names: Sequence[str] | None = None
    found: list[CommittedOffset] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        if len(text) > LINE_CHARS_MAX or len(found) >= ENTRIES_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"too long line={number} lines_max={ENTRIES_MAX}")
        if names is None and not text.startswith("{"):
            names = _cells(text, number)
            if not set(names) >= NEEDED:
                raise _unreadable(number, f"a header has {','.join(COLUMNS)}")
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
    named = members.get("group") if group is None else group
    topic = members.get("topic")
    if not isinstance(named, str) or not named or not isinstance(topic, str) or not topic:
        raise _unreadable(number, "group or topic is missing")
    return CommittedOffset(named, topic, _number(members, "partition", number), _number(members, "offset", number))


def _number(members: Mapping[str, object], name: str, number: int) -> int:
    given = members.get(name)
    text = str(given) if isinstance(given, int | str) and not isinstance(given, bool) else ""
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise _unreadable(number, f"{name} is no number")
    return int(text)


def _unreadable(number: int, reason: str) -> Invalid:
    return Invalid(
        ErrorCode.INVALID_REQUEST, f"a line is not an offset as export prints them line={number} reason={reason!r}"
    )


def _place(text: str) -> tuple[int, int]:
    partition, equals, offset = text.partition("=")
    if not (equals and text.isascii() and partition.isdigit() and offset.isdigit()):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"an offset is set with PARTITION=OFFSET got={text!r}")
    return int(partition), int(offset)


def _row(entry: CommittedOffset) -> dict[str, object]:
    return {"group": entry.group, "topic": entry.topic, "partition": entry.partition, "offset": entry.offset}


async def _committed(client: WireClient, group: str | None) -> list[CommittedOffset]:
    """Return committed offsets of a group, or of all. Raises Missing(GROUP_MISSING)."""
    wire = polywire_only(client, "groups are listed")
    groups = await wire.groups(group)
    if group is not None and not groups:
        raise Missing(ErrorCode.GROUP_MISSING, f"no such group group={group!r}")
    return [
        CommittedOffset(known.name, known.topic, partition, offset)
        for known in groups
        for partition, offset in sorted(known.positions.items())
    ]


def _apply(address: str, wanted: Sequence[CommittedOffset], *, dry_run: bool, output: ListFormat) -> None:
    """Check everything, then commit, and show what was and is."""

    async def work(client: WireClient) -> list[dict[str, object]]:
        wire = polywire_only(client, "committed offsets are moved")
        before = await _check(wire, wanted)
        for entry in wanted if not dry_run else ():
            await wire.commit(entry.group, entry.topic, entry.partition, entry.offset)
        return [
            {
                "group": entry.group,
                "topic": entry.topic,
                "partition": entry.partition,
                "position": before.get((entry.group, entry.topic, entry.partition)),
                "new_position": entry.offset,
            }
            for entry in wanted
        ]

    rows = run_with_client(address, work)
    print_list(rows, columns=("group", "topic", "partition", "position", "new_position"), form=output)
    note(f"{'would set' if dry_run else 'set'} offsets={len(rows)}{new_groups(rows)}")


def new_groups(rows: Sequence[Mapping[str, object]]) -> str:
    """Return ``new_groups=…`` for groups that had no position before: their names may be mistyped."""
    known = {row["group"] for row in rows if row["position"] is not None}
    new = {str(row["group"]) for row in rows} - known
    return f" new_groups={listed(new)}" if new else ""


async def _check(wire: PolywireClient, wanted: Sequence[CommittedOffset]) -> dict[tuple[str, str, int], int]:
    """What the groups have committed now. Raises Conflict(GROUP_NOT_EMPTY), Missing, and Invalid for an offset beyond the end."""
    before: dict[tuple[str, str, int], int] = {}
    for name in sorted({entry.group for entry in wanted}):
        moved = {entry.topic for entry in wanted if entry.group == name}
        for known in await wire.groups(name):
            if known.members and known.topic in moved:
                facts = f"group={name!r} topic={known.topic!r} members={len(known.members)}"
                raise Conflict(ErrorCode.GROUP_NOT_EMPTY, f"group has members, stop them first {facts}")
            before |= {(name, known.topic, number): offset for number, offset in known.positions.items()}
    topics = {entry.topic for entry in wanted}
    known_topics = {info.name for info in await wire.topics()}
    for topic in sorted(topics - known_topics):
        raise missing(ErrorCode.TOPIC_MISSING, "topic", topic, known_topics)
    ends = {(topic, part.partition): part.next_offset for topic in sorted(topics) for part in await wire.bounds(topic)}
    for entry in wanted:
        end = ends.get((entry.topic, entry.partition))
        facts = f"topic={entry.topic!r} partition={entry.partition}"
        if end is None:
            raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition {facts}")
        if entry.offset > end:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"an offset is beyond the end {facts} offset={entry.offset} next_offset={end}",
            )
    return before
