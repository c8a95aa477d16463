"""``polywire topic``: list, create, describe, alter and delete topics."""

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
    TableFormats,
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
    meaning = TOPIC_SETTINGS[name].meaning
    return f"{meaning[0].upper()}{meaning[1:]}."


@dataclass(frozen=True, slots=True)
class AlterableSettings:
    """Settings of an existing topic that can be changed; None leaves a setting unchanged."""

    compaction: Annotated[bool | None, Parameter(help=_help("compaction"))] = None
    compression: Annotated[Compression | None, Parameter(help=_help("compression"))] = None
    retention_hours: Annotated[
        float | None,
        Parameter(
            validator=Number(gte=0, lte=RETENTION_HOURS_MAX),
            help="Age in hours above which records are dropped; 0 means no limit. Defaults to the broker's setting.",
        ),
    ] = None
    retention_mib: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=0, lte=RETENTION_MIB_MAX),
            help="Size in MiB above which a partition drops its oldest records; 0 means no limit. Defaults to the broker's "
            "setting.",
        ),
    ] = None
    table: Annotated[TableFormats | None, Parameter(help=_help("table"))] = None
    table_columns: Annotated[str | None, Parameter(help=_help("table_columns"))] = None
    table_freshness_s: Annotated[
        int | None,
        Parameter(validator=Number(gte=1, lte=86_400), help=_help("table_freshness_s")),
    ] = None
    table_history_hours: Annotated[
        int | None,
        Parameter(validator=Number(gte=0, lte=8_760), help=_help("table_history_hours")),
    ] = None

    def chosen(self) -> dict[str, int | str | None]:
        """Return the settings that are not None, with the names and units of the polywire protocol."""
        age, size = self.retention_hours, self.retention_mib
        settings = {
            "compaction": None if self.compaction is None else int(self.compaction),
            "compression": None if self.compression is None else self.compression.value,
            "retention_age_us": None if age is None else int(age * HOUR_US),
            "retention_bytes": None if size is None else size * MEBI,
            "table": self.table,
            "table_columns": self.table_columns,
            "table_freshness_s": self.table_freshness_s,
            "table_history_hours": self.table_history_hours,
        }
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TopicSettings(AlterableSettings):
    """Settings of a new topic; None uses the broker's default."""

    key_hash: Annotated[KeyHash | None, Parameter(help=_help("key_hash"))] = None

    def chosen(self) -> dict[str, int | str | None]:
        """Return the settings that are not None, with the names and units of the polywire protocol."""
        settings = AlterableSettings.chosen(self)
        return settings if self.key_hash is None else {**settings, "key_hash": self.key_hash.value}


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
    """Return the number of readable records; None if the protocol cannot report it or the topic was just deleted."""
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
    settings: Annotated[TopicSettings, Parameter(name="*", group="Settings")] = TopicSettings(),
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Create a topic. Settings other than --partitions need a polywire:// address.

    Parameters
    ----------
    partitions
        Number of partitions.
    """
    chosen = settings.chosen()

    async def work(client: WireClient) -> None:
        if chosen:
            await polywire_only(client, "set topic settings").create_topic(name, partitions, settings=chosen)
        else:
            await client.create_topic(name, partitions)

    run_with_client(address, work)
    note(f"created topic={name} partitions={partitions}{_facts(chosen)}")


def _facts(settings: Mapping[str, int | str | None]) -> str:
    """Return the settings that have a value as ``key=value``, for the end of a message."""
    return "".join(f" {name}={value}" for name, value in settings.items() if value not in (None, ""))


@app.command(help_epilogue=examples("polywire topic describe orders", "polywire topic describe orders --output csv"))
def describe(name: Topic, *, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """Show the first and next offset of each partition and, with a polywire:// address, the topic's settings."""

    async def work(client: WireClient) -> tuple[list[PartitionBounds], Mapping[str, int | str | None]]:
        bounds = await client.bounds(name)
        if not isinstance(client, PolywireClient):
            return bounds, {}
        described = await client.describe(name)
        return bounds, {**described.settings, **({"link": described.link} if described.link else {})}

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
        "polywire topic alter orders --table delta",
        "polywire topic alter orders --table-columns infer",
    )
)
def alter(
    name: Topic,
    *,
    partitions: Annotated[int | None, Parameter(name=("--partitions", "-p"))] = None,
    settings: Annotated[AlterableSettings, Parameter(name="*", group="Settings")] = AlterableSettings(),
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    output: Output = ListFormat.TABLE,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Add partitions to a topic or change its settings, and show the values before and after. Other settings do not change.

    Parameters
    ----------
    partitions
        New number of partitions, at least the current one. Keys can then map to other partitions than before.
    dry_run
        Show what would change without changing it.
    """
    chosen = settings.chosen()
    if partitions is None and not chosen:
        raise Invalid(ErrorCode.INVALID_REQUEST, "nothing to change (use --partitions or a setting)")

    async def work(client: WireClient) -> list[dict[str, object]]:
        polywire = polywire_only(client, "alter topics")
        topic = await polywire.describe(name)
        before = {"partitions": len(topic.incarnations), **topic.settings}
        after = {**({} if partitions is None else {"partitions": partitions}), **chosen}
        if not dry_run:
            if partitions is not None:  # first, because the broker may reject it
                await polywire.grow_topic(name, partitions)
            if chosen:
                await polywire.configure_topic(name, chosen)
        return [{"setting": key, "before": before[key], "after": value} for key, value in after.items()]

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
