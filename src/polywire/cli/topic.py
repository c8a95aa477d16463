"""``polywire topic``: list, create, describe and delete topics.

Promises: one command per verb of the client. Must not know: wires, files of the broker.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from cyclopts import App, Parameter

from polywire.cli.connection import ADDRESS_DEFAULT, Address, run_with_client
from polywire.cli.output import ListFormat, notes, print_list
from polywire.client.base import Client, PartitionBounds
from polywire.types import DEFAULT_PARTITION_COUNT

app = App(name="topic", help="List, create, describe and delete topics.", help_epilogue="")

Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Form of the list.")]


@app.command(name="list")
def list_topics(*, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """List topics with their partitions and records.

    Example: ``polywire topic list --output jsonl``
    """

    async def work(client: Client) -> list[dict[str, object]]:
        topics = await client.topics()
        bounds = await asyncio.gather(*(client.bounds(topic.name) for topic in topics))
        return [
            {
                "topic": topic.name,
                "partitions": topic.partition_count,
                "records": sum(part.next_offset - part.first_offset for part in parts),
            }
            for topic, parts in zip(topics, bounds, strict=True)
        ]

    print_list(run_with_client(address, work), columns=("topic", "partitions", "records"), form=output)


@app.command
def create(
    name: str,
    *,
    partitions: Annotated[int, Parameter(name=("--partitions", "-p"))] = DEFAULT_PARTITION_COUNT,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Create a topic.

    Example: ``polywire topic create orders --partitions 6``

    Parameters
    ----------
    name
        Full name: ``topic``, or ``stream.topic`` outside the stream ``default``.
    partitions
        Number of partitions.
    """
    run_with_client(address, lambda client: client.create_topic(name, partitions))
    notes.print(f"created topic={name} partitions={partitions}")


@app.command
def describe(name: str, *, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """Show where each partition of a topic begins and ends.

    Example: ``polywire topic describe orders``

    Parameters
    ----------
    name
        Full name of the topic.
    """

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


@app.command
def delete(name: str, *, dry_run: bool = False, address: Address = ADDRESS_DEFAULT) -> None:
    """Delete a topic with all its records.

    Example: ``polywire topic delete orders --dry-run``

    Parameters
    ----------
    name
        Full name of the topic.
    dry_run
        Say what would be deleted, delete nothing.
    """

    async def work(client: Client) -> int:
        records = sum(part.next_offset - part.first_offset for part in await client.bounds(name))
        if not dry_run:
            await client.delete_topic(name)
        return records

    records = run_with_client(address, work)
    notes.print(f"{'would delete' if dry_run else 'deleted'} topic={name} records={records}")
