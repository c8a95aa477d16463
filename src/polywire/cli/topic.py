"""``polywire topic``: list, create, describe, alter and delete topics.

Promises: one command per verb of the client. Must not know: wires, files of the broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from polywire.broker.settings import (
    HOUR_US,
    MEBI,
    RETENTION_HOURS_MAX,
    RETENTION_MIB_MAX,
    TOPIC_SETTINGS,
    Compression,
)
from polywire.cli.connection import ADDRESS_DEFAULT, Address, polywire_only, run_with_client
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.usage import Topic, examples
from polywire.client.base import Ability, PartitionBounds, WireClient
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.types import DEFAULT_PARTITION_COUNT, KeyHash

app = App(
    name="topic",
    help_epilogue=examples("polywire topic create orders --partitions 6", "polywire topic list"),
)


def _help(name: str) -> str:
    """Return the meaning of a setting as a sentence."""
    meaning = TOPIC_SETTINGS[name].meaning
    return f"{meaning[0].upper()}{meaning[1:]}."


@dataclass(frozen=True, slots=True)
class Altered:
    """Settings that may change while the topic exists; what is not given stays as it is."""

    compaction: Annotated[bool | None, Parameter(help=_help("compaction"))] = None
    compression: Annotated[Compression | None, Parameter(help=_help("compression"))] = None
    retention_hours: Annotated[
        float | None,
        Parameter(
            validator=Number(gte=0, lte=RETENTION_HOURS_MAX),
            help="Age in hours above which records are dropped; 0 for no limit, by default the broker's setting.",
        ),
    ] = None
    retention_mib: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=0, lte=RETENTION_MIB_MAX),
            help="Size in MiB above which a partition drops its oldest records; 0 for no limit, by default the broker's setting.",
        ),
    ] = None

    def given(self) -> dict[str, int | str | None]:
        """Return what is given, as the polywire protocol spells it."""
        age, size = self.retention_hours, self.retention_mib
        found = {
            "compaction": None if self.compaction is None else int(self.compaction),
            "compression": None if self.compression is None else self.compression.value,
            "retention_age_us": None if age is None else int(age * HOUR_US),
            "retention_bytes": None if size is None else size * MEBI,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Settings(Altered):
    """Settings of a new topic; what is not given is left to the broker."""

    key_hash: Annotated[KeyHash | None, Parameter(help=_help("key_hash"))] = None

    def given(self) -> dict[str, int | str | None]:
        """Return what is given, as the polywire protocol spells it."""
        found = Altered.given(self)
        return found if self.key_hash is None else {**found, "key_hash": self.key_hash.value}


Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]


@app.command(
    name="list", help_epilogue=examples("polywire topic list", "polywire topic list --output jsonl | jq .topic")
)
def list_topics(*, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """List topics with their number of partitions and records."""

    async def work(client: WireClient) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for topic in await client.topics():
            records = await _count_records(client, topic.name)
            rows.append({"topic": topic.name, "partitions": topic.partition_count, "records": records})
        return rows

    print_list(run_with_client(address, work), columns=("topic", "partitions", "records"), form=output)


async def _count_records(client: WireClient, topic: str) -> int | None:
    """Readable records of a topic; None where the wire cannot tell, or the topic was deleted a moment ago."""
    if Ability.BOUNDS not in client.abilities:
        return None
    try:
        return sum(part.next_offset - part.first_offset for part in await client.bounds(topic))
    except Missing:
        return None


@app.command(
    help_epilogue=examples(
        "polywire topic create orders --partitions 6",
        "polywire topic create prices --compaction --compression zstd",
        "polywire topic create clicks --retention-hours 48",
    )
)
def create(
    name: Topic,
    *,
    partitions: Annotated[int, Parameter(name=("--partitions", "-p"))] = DEFAULT_PARTITION_COUNT,
    settings: Annotated[Settings, Parameter(name="*", group="Settings")] = Settings(),
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Create a topic. Settings other than --partitions need the polywire wire.

    Parameters
    ----------
    partitions
        Number of partitions.
    """
    given = settings.given()

    async def work(client: WireClient) -> None:
        if given:
            wire = polywire_only(client, "settings of a topic are given")
            await wire.create_topic(name, partitions, settings=given)
        else:
            await client.create_topic(name, partitions)

    run_with_client(address, work)
    note(f"created topic={name} partitions={partitions}{_facts(given)}")


def _facts(settings: Mapping[str, int | str | None]) -> str:
    """Settings that say something, as they end a line."""
    return "".join(f" {name}={value}" for name, value in settings.items() if value is not None)


@app.command(help_epilogue=examples("polywire topic describe orders", "polywire topic describe orders --output csv"))
def describe(name: Topic, *, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """Show the first and next offset of each partition and, over the polywire wire, the topic's settings."""

    async def work(client: WireClient) -> tuple[list[PartitionBounds], Mapping[str, int | str | None]]:
        bounds = await client.bounds(name)
        return bounds, (await client.describe(name)).settings if isinstance(client, PolywireClient) else {}

    parts, settings = run_with_client(address, work, topic=name)
    rows = [
        {
            "partition": part.partition,
            "first_offset": part.first_offset,
            "next_offset": part.next_offset,
            "records": part.next_offset - part.first_offset,
            "epoch": part.epoch,
        }
        for part in parts
    ]
    if settings:
        note(f"topic={name}{_facts(settings)}")
    print_list(rows, columns=("partition", "first_offset", "next_offset", "records", "epoch"), form=output)


@app.command(
    help_epilogue=examples(
        "polywire topic alter orders --partitions 12 --dry-run",
        "polywire topic alter clicks --retention-hours 48 --compression zstd",
    )
)
def alter(
    name: Topic,
    *,
    partitions: Annotated[int | None, Parameter(name=("--partitions", "-p"))] = None,
    changed: Annotated[Altered, Parameter(name="*", group="Settings")] = Altered(),
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    output: Output = ListFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Add partitions to a topic or change its settings, and show what they were and are. What is not given stays.

    Parameters
    ----------
    partitions
        Number of partitions, not fewer than there are. Keys may then belong to other partitions than before.
    dry_run
        Show what would change without changing it.
    """
    given = changed.given()
    if partitions is None and not given:
        raise Invalid(ErrorCode.INVALID_REQUEST, "nothing to change: give --partitions or a setting")

    async def work(client: WireClient) -> list[dict[str, object]]:
        wire = polywire_only(client, "topics are altered")
        before = await wire.describe(name)
        now = {"partitions": len(before.incarnations), **before.settings}
        wanted = {**({} if partitions is None else {"partitions": partitions}), **given}
        if not dry_run:
            if partitions is not None:  # what may be refused comes first
                await wire.grow_topic(name, partitions)
            if given:
                await wire.configure_topic(name, given)
        return [{"setting": key, "before": now[key], "after": value} for key, value in wanted.items()]

    rows = run_with_client(address, work, topic=name)
    print_list(rows, columns=("setting", "before", "after"), form=output)
    note(f"{'would alter' if dry_run else 'altered'} topic={name} settings={len(rows)}")


@app.command(help_epilogue=examples("polywire topic delete orders --dry-run", "polywire topic delete orders"))
def delete(
    name: Topic, *, dry_run: Annotated[bool, Parameter(negative="")] = False, address: Address = ADDRESS_DEFAULT
) -> None:
    """Delete a topic and all its records.

    Parameters
    ----------
    dry_run
        Show what would be deleted without deleting it.
    """

    async def work(client: WireClient) -> int:
        records = sum(part.next_offset - part.first_offset for part in await client.bounds(name))
        if not dry_run:
            await client.delete_topic(name)
        return records

    records = run_with_client(address, work, topic=name)
    note(f"{'would delete' if dry_run else 'deleted'} topic={name} records={records}")
