"""``polywire group``: consumer groups, their lag and their committed offsets."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from polywire.cli import group_offsets
from polywire.cli.connection import ADDRESS_DEFAULT, Address, polywire_only, run_with_client
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.start_position import parse_start, spans
from polywire.cli.usage import Topic, examples
from polywire.client.base import WireClient
from polywire.client.group_info import GroupInfo, PartitionLag, lags_of, total_lag
from polywire.errors import Conflict, ErrorCode, Missing

app = App(
    name="group",
    help_epilogue=examples("polywire group list", "polywire group describe billing"),
)
OnlyReset = Annotated[int | None, Parameter(name=("--partition", "-p"), help="Reset only this partition.")]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]


@app.command(
    name="list", help_epilogue=examples("polywire group list", "polywire group list --output jsonl | jq .lag_records")
)
def list_groups(*, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """List groups with their lag, in records and as the age of the oldest unread record. Groups without committed
    offsets have no lag.
    """

    async def work(client: WireClient) -> list[dict[str, object]]:
        polywire = polywire_only(client, "list groups")
        return [_summary(group, await lags_of(polywire, group)) for group in await polywire.groups()]

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
        return [row for group in groups for row in _rows(group, await lags_of(polywire, group))]

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
    new = group_offsets.new_groups([row | {"group": name} for row in rows])
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


app.command(group_offsets.app)


def _summary(group: GroupInfo, lags: list[PartitionLag]) -> dict[str, object]:
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


def _rows(group: GroupInfo, lags: list[PartitionLag]) -> list[dict[str, object]]:
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
