"""``polywire transaction``: transactional ids that the broker remembers.

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
from polywire.client.kept_info import TransactionInfo
from polywire.errors import ErrorCode, Missing

app = App(
    name="transaction",
    help="List and delete transactional ids: who may hold transactions, and how the latest one stands. The broker remembers an id for seven"
    " days after its last use.",
    help_epilogue=examples("polywire transaction list", "polywire transaction delete orders-billing --dry-run"),
)

Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Form of the list.")]


@app.command(name="list", help_epilogue=examples("polywire transaction list --output jsonl | jq .id"))
def list_transactions(*, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
    """List transactional ids: one's own, and for administrators everybody's."""

    async def work(client: Client) -> list[TransactionInfo]:
        return await polywire_only(client, "transactional ids are told").transactions()

    columns = ("id", "epoch", "state", "messages", "positions", "idle_ms", "owner")
    print_list([asdict(found) for found in run_with_client(address, work)], columns=columns, form=output)


@app.command(help_epilogue=examples("polywire transaction delete orders-billing --dry-run"))
def delete(
    name: str, *, dry_run: Annotated[bool, Parameter(negative="")] = False, address: Address = ADDRESS_DEFAULT
) -> None:
    """Forget a transactional id: an open transaction is aborted, and epochs count from 0 again. Whoever still uses it must begin anew.

    Parameters
    ----------
    name
        The transactional id.
    dry_run
        Say what would be deleted, delete nothing.
    """

    async def work(client: Client) -> str:
        wire = polywire_only(client, "transactional ids are deleted")
        known = [found for found in await wire.transactions() if found.id == name]
        if not known:
            raise Missing(ErrorCode.TRANSACTION_MISSING, f"no such transactional id id={name!r}")
        if not dry_run:
            await wire.delete_transaction(name)
        return known[0].state

    state = run_with_client(address, work)
    note(f"{'would delete' if dry_run else 'deleted'} transactional_id={name} state={state}")
