"""``polywire transaction`` and ``polywire writer``: list and delete transactional ids, and writers that publish staged
data.

A transactional id is listed with the state of its latest transaction, a writer with its last sequence number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from cyclopts import App, Parameter

from polywire.choices import missing
from polywire.cli.connection import ADDRESS_DEFAULT, Address, polywire_only, run_with_client
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.usage import examples
from polywire.client.base import WireClient
from polywire.client.listings import TransactionInfo, WriterInfo
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode

Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]


@dataclass(frozen=True, slots=True)
class Noun:
    """A kind of named state that the broker stores.

    Attributes:
        word: the command, as in ``polywire writer``.
        name, names: the noun in sentences, singular and plural.
        delete_help: help of ``delete``.
        example: an example of a name.
        columns: columns of the list, the name first.
        detail: the column that ``delete`` reports.
    """

    word: str
    name: str
    names: str
    delete_help: str
    example: str
    columns: tuple[str, ...]
    detail: str
    missing: ErrorCode
    listed: Callable[[PolywireClient], Awaitable[list[TransactionInfo] | list[WriterInfo]]]
    deleted: Callable[[PolywireClient, str], Awaitable[None]]

    async def rows(self, client: WireClient) -> list[dict[str, object]]:
        listed = await self.listed(polywire_only(client, f"list {self.names}"))
        return [{column: getattr(found, column) for column in self.columns} for found in listed]

    async def delete(self, client: WireClient, name: str, *, dry_run: bool) -> object:
        """Delete an item by name, and return its ``detail``. Raises Missing if it does not exist."""
        polywire = polywire_only(client, f"delete {self.names}")
        key = self.columns[0]
        rows = await self.rows(polywire)
        known = [row for row in rows if row[key] == name]
        if not known:
            raise missing(self.missing, self.name, name, (str(row[key]) for row in rows))
        if not dry_run:
            await self.deleted(polywire, name)
        return known[0][self.detail]


def commands(noun: Noun) -> App:
    """Return the commands ``list`` and ``delete`` for a noun."""
    delete_example = f"polywire {noun.word} delete {noun.example} --dry-run"
    app = App(name=noun.word, help_epilogue=examples(f"polywire {noun.word} list", delete_example))

    def list_all(*, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
        print_list(run_with_client(address, noun.rows), columns=noun.columns, form=output)

    def delete(
        name: str, *, dry_run: Annotated[bool, Parameter(negative="")] = False, address: Address = ADDRESS_DEFAULT
    ) -> None:
        detail = run_with_client(address, lambda client: noun.delete(client, name, dry_run=dry_run))
        outcome = "would delete" if dry_run else "deleted"
        note(f"{outcome} {noun.name.replace(' ', '_')}={name} {noun.detail}={detail}")

    list_all.__doc__ = f"List your {noun.names}; administrators see those of all users."
    delete.__doc__ = f"""{noun.delete_help}

    Parameters
    ----------
    name
        The {noun.name}.
    dry_run
        Show what would be deleted without deleting it.
    """
    key = noun.columns[0]
    piped = examples(f"polywire {noun.word} list --output jsonl | jq .{key}")
    app.command(list_all, name="list", help_epilogue=piped)
    app.command(delete, help_epilogue=examples(delete_example))
    return app


app = commands(
    Noun(
        word="transaction",
        name="transactional id",
        names="transactional ids",
        delete_help="Delete a transactional id. Its open transaction is aborted and its epoch restarts at 0; producers that "
        "use it must initialize again.",
        example="orders-billing",
        columns=("id", "epoch", "state", "messages", "positions", "idle_ms", "owner"),
        detail="state",
        missing=ErrorCode.TRANSACTION_MISSING,
        listed=PolywireClient.transactions,
        deleted=PolywireClient.delete_transaction,
    )
)
writer_app = commands(
    Noun(
        word="writer",
        name="writer",
        names="writers",
        delete_help="Delete a writer. If it repeats a publish with an old number, the records are stored again.",
        example="nightly/totals",
        columns=("writer", "epoch", "number", "idle_ms", "owner"),
        detail="number",
        missing=ErrorCode.WRITER_MISSING,
        listed=PolywireClient.writers,
        deleted=PolywireClient.delete_writer,
    )
)
