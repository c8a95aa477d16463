"""``polywire user``: keep the file of users that ``polywire serve --users`` reads.

Promises: a password is read from a terminal without showing it, else from standard input, never from the command line.
Must not know: brokers; one that runs takes the file up at its next start.
"""

from __future__ import annotations

import sys
from getpass import getpass
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.broker.permissions import EVERYTHING
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.usage import examples
from polywire.server.users import add_user, read_users, remove_user

app = App(
    name="user",
    help_epilogue=examples("polywire user add alice", "polywire serve --users polywire.users"),
)

FILE_DEFAULT: Final = Path("polywire.users")
File = Annotated[
    Path,
    Parameter(
        name=("--users", "-u"), env_var="POLYWIRE_SERVE_USERS", help="Users file, as passed to polywire serve --users."
    ),
]
Name = Annotated[str, Parameter(help="Name of the user.")]


@app.command(
    help_epilogue=examples(
        "polywire user add alice",
        "polywire user add reader --permissions consume@shop < password",
        "polywire user add loader --permissions produce@shop/orders",
        "polywire user add connector --scram",
    )
)
def add(
    name: Name,
    *,
    permissions: str = "",
    replace: Annotated[bool, Parameter(negative="")] = False,
    scram: Annotated[bool, Parameter(negative="")] = False,
    users: File = FILE_DEFAULT,
) -> None:
    """Add a user. The password is prompted for, or read from standard input.

    Parameters
    ----------
    permissions
        Comma-separated permissions; all if not set. One of admin, manage_servers, read_servers, manage_users, read_users, manage_streams,
        read_streams, manage_topics, read_topics, consume, produce, group, transaction; NAME@stream and NAME@stream/topic limit one to
        a stream or a topic.
    replace
        Replace the password and permissions of an existing user.
    scram
        Let the user log in with SCRAM, too (Kafka clients). The file then also holds verifiers, from which a password can be guessed
        faster than from its hash.
    """
    password = getpass(f"Password of {name}: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\r\n")
    add_user(users, name, password, permissions, replace=replace, scram=scram)
    note(f"added user={name} users={users}")


@app.command(name="list", help_epilogue=examples("polywire user list", "polywire user list --output json"))
def list_users(
    *,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
    users: File = FILE_DEFAULT,
) -> None:
    """List users, whether they have all permissions, and whether they may log in with SCRAM."""
    rows = [
        {"user": user.name, "everything": user.grants == EVERYTHING, "scram": bool(user.verifiers)}
        for user in read_users(users)
    ]
    print_list(rows, columns=("user", "everything", "scram"), form=output)


@app.command(help_epilogue=examples("polywire user remove alice"))
def remove(name: Name, *, users: File = FILE_DEFAULT) -> None:
    """Remove a user."""
    remove_user(users, name)
    note(f"removed user={name} users={users}")
