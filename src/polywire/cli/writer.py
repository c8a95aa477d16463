"""``polywire writer``: writers of staged publishes that the broker remembers.

Promises: looking changes nothing. Must not know: files of the broker.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from cyclopts import App, Parameter

from polywire.cli.connection import ADDRESS_DEFAULT, Address, polywire_only, run_with_client
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.usage import examples
from polywire.client.base import Client
from polywire.client.kept_info import WriterInfo
from polywire.errors import ErrorCode, Missing

app = App(
    name="writer",
    help="List and delete writers: who publishes what was staged, as Spark's sink does, and the last number of each. The broker remembers a"
    " writer for thirty days after its last publish.",
    help_epilogue=examples("polywire writer list", "polywire writer delete nightly/totals --dry-run"),
)

Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Form of the list.")]


@app.command(name="list", help_epilogue=examples("polywire writer list --output jsonl | jq .writer"))
def list_writers(*, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """List writers: one's own, and for administrators everybody's."""

    async def work(client: Client) -> list[WriterInfo]:
        return await polywire_only(client, "writers are told").writers()

    columns = ("writer", "number", "idle_ms", "owner")
    print_list([asdict(found) for found in run_with_client(address, work)], columns=columns, form=output)


@app.command(help_epilogue=examples("polywire writer delete nightly/totals --dry-run"))
def delete(
    name: str, *, dry_run: Annotated[bool, Parameter(negative="")] = False, address: Address = ADDRESS_DEFAULT
) -> None:
    """Forget a writer: what it publishes again under an old number is stored again.

    Parameters
    ----------
    name
        The writer's name.
    dry_run
        Say what would be deleted, delete nothing.
    """

    async def work(client: Client) -> int:
        wire = polywire_only(client, "writers are deleted")
        known = [found for found in await wire.writers() if found.writer == name]
        if not known:
            raise Missing(ErrorCode.WRITER_MISSING, f"no such writer writer={name!r}")
        if not dry_run:
            await wire.delete_writer(name)
        return known[0].number

    number = run_with_client(address, work)
    note(f"{'would delete' if dry_run else 'deleted'} writer={name} number={number}")
