"""What the broker remembers by name and forgets when it is told to: one ``list`` and one ``delete`` for every such noun.

Promises: looking changes nothing. Must not know: files of the broker, which nouns there are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import App, Parameter

from polywire.choices import missing
from polywire.cli.connection import ADDRESS_DEFAULT, Address, polywire_only, run_with_client
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.usage import examples
from polywire.client.base import WireClient
from polywire.client.kept_info import TransactionInfo, WriterInfo
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode

Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]


@dataclass(frozen=True, slots=True)
class Noun:
    """A kind of thing that is remembered.

    word: as commands say it. name, names: as sentences do. columns: of the list, the name first. detail: the column that ``delete`` tells of.
    forget: what ``delete`` does, for its help. example: a name.
    """

    word: str
    name: str
    names: str
    forget: str
    example: str
    columns: tuple[str, ...]
    detail: str
    missing: ErrorCode
    listed: Callable[[PolywireClient], Awaitable[list[TransactionInfo] | list[WriterInfo]]]
    deleted: Callable[[PolywireClient, str], Awaitable[None]]

    async def rows(self, client: WireClient) -> list[dict[str, object]]:
        """What there is, as the broker tells it."""
        return [asdict(found) for found in await self.listed(polywire_only(client, f"{self.names} are listed"))]

    async def delete(self, client: WireClient, name: str, *, dry_run: bool) -> object:
        """Forget one; what ``detail`` said of it. Raises Missing."""
        wire = polywire_only(client, f"{self.names} are deleted")
        key = self.columns[0]
        rows = await self.rows(wire)
        known = [row for row in rows if row[key] == name]
        if not known:
            raise missing(self.missing, self.name, name, (str(row[key]) for row in rows))
        if not dry_run:
            await self.deleted(wire, name)
        return known[0][self.detail]


def commands(noun: Noun) -> App:
    """``polywire <word> list`` and ``polywire <word> delete``."""
    one = f"polywire {noun.word} delete {noun.example} --dry-run"
    app = App(name=noun.word, help_epilogue=examples(f"polywire {noun.word} list", one))

    def list_all(*, output: Output = ListFormat.TABLE, address: Address = ADDRESS_DEFAULT) -> None:
        print_list(run_with_client(address, noun.rows), columns=noun.columns, form=output)

    def delete(
        name: str, *, dry_run: Annotated[bool, Parameter(negative="")] = False, address: Address = ADDRESS_DEFAULT
    ) -> None:
        detail = run_with_client(address, lambda client: noun.delete(client, name, dry_run=dry_run))
        done = "would delete" if dry_run else "deleted"
        note(f"{done} {noun.name.replace(' ', '_')}={name} {noun.detail}={detail}")

    list_all.__doc__ = f"List {noun.names}: your own, or all of them as an administrator."
    delete.__doc__ = f"""{noun.forget}

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
    app.command(delete, help_epilogue=examples(one))
    return app
