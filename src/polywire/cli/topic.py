"""``polywire topic``: list, create, describe and delete topics.

Promises: one command per verb of the client. Must not know: wires, files of the broker.
"""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from polywire.cli.connection import ADDRESS_DEFAULT, Address, run_with_client
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.usage import Topic, examples
from polywire.client.base import Ability, Client, PartitionBounds
from polywire.errors import Missing
from polywire.types import DEFAULT_PARTITION_COUNT

app = App(
    name="topic",
    help="List, create, describe and delete topics.",
    help_epilogue=examples("polywire topic create orders --partitions 6", "polywire topic list"),
)

Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Form of the list.")]


@app.command(
    name="list", help_epilogue=examples("polywire topic list", "polywire topic list --output jsonl | jq .topic")
)
def list_topics(*, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """List topics with their partitions and records."""

    async def work(client: Client) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for topic in await client.topics():
            records = await _count_records(client, topic.name)
            rows.append({"topic": topic.name, "partitions": topic.partition_count, "records": records})
        return rows

    print_list(run_with_client(address, work), columns=("topic", "partitions", "records"), form=output)


async def _count_records(client: Client, topic: str) -> int | None:
    """Readable records of a topic; None where the wire cannot tell, or the topic was deleted a moment ago."""
    if Ability.BOUNDS not in client.abilities:
        return None
    try:
        return sum(part.next_offset - part.first_offset for part in await client.bounds(topic))
    except Missing:
        return None


@app.command(help_epilogue=examples("polywire topic create orders --partitions 6"))
def create(
    name: Topic,
    *,
    partitions: Annotated[int, Parameter(name=("--partitions", "-p"))] = DEFAULT_PARTITION_COUNT,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Create a topic.

    Parameters
    ----------
    partitions
        Number of partitions.
    """
    run_with_client(address, lambda client: client.create_topic(name, partitions))
    note(f"created topic={name} partitions={partitions}")


@app.command(help_epilogue=examples("polywire topic describe orders", "polywire topic describe orders --output csv"))
def describe(name: Topic, *, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """Show where each partition of a topic begins and ends."""

    async def work(client: Client) -> list[PartitionBounds]:
        return await client.bounds(name)

    rows = [
        {
            "partition": part.partition,
            "first_offset": part.first_offset,
            "next_offset": part.next_offset,
            "records": part.next_offset - part.first_offset,
            "epoch": part.epoch,
        }
        for part in run_with_client(address, work)
    ]
    print_list(rows, columns=("partition", "first_offset", "next_offset", "records", "epoch"), form=output)


@app.command(help_epilogue=examples("polywire topic delete orders --dry-run", "polywire topic delete orders"))
def delete(
    name: Topic, *, dry_run: Annotated[bool, Parameter(negative="")] = False, address: Address = ADDRESS_DEFAULT
) -> None:
    """Delete a topic with all its records.

    Parameters
    ----------
    dry_run
        Say what would be deleted, delete nothing.
    """

    async def work(client: Client) -> int:
        records = sum(part.next_offset - part.first_offset for part in await client.bounds(name))
        if not dry_run:
            await client.delete_topic(name)
        return records

    records = run_with_client(address, work)
    note(f"{'would delete' if dry_run else 'deleted'} topic={name} records={records}")
