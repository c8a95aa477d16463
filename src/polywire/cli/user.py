"""``polywire user``: manage the users file of ``polywire serve --users``.

A password is read from the terminal without echo, or from standard input. It is never read from the command line, which
other users of the machine can see. A running broker reads the file when it receives SIGHUP or restarts.
"""

from __future__ import annotations

import sys
from getpass import getpass
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.broker.access import ConfiguredUser
from polywire.broker.permissions import EVERYTHING, grant_words
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.usage import examples
from polywire.server.users import add_user, alter_user, read_users, remove_user

app = App(
    name="user",
    help_epilogue=examples("polywire user add alice", "polywire serve --users polywire.users"),
)

RELOAD_NOTE: Final = "a running broker reads the file when it receives SIGHUP (kill -HUP PID)"
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
    permissions: str | None = None,
    replace: Annotated[bool, Parameter(negative="")] = False,
    scram: Annotated[bool, Parameter(negative="")] = False,
    users: File = FILE_DEFAULT,
) -> None:
    """Add a user. The command prompts for the password, or reads it from standard input.

    Parameters
    ----------
    permissions
        Comma-separated permissions: admin, manage_servers, read_servers, manage_users, read_users, manage_streams, read_streams,
        manage_topics, read_topics, consume, produce, group, transaction. PERMISSION@stream and PERMISSION@stream/topic limit one to a
        stream or a topic. Defaults to all permissions for a new user, and to the current ones with --replace.
    replace
        Change the password of an existing user, and its permissions if --permissions is given.
    scram
        Also allow logins with SCRAM (Kafka clients). The file then holds SCRAM verifiers, which are weaker against guessing than the
        password hash.
    """
    password = getpass(f"Password of {name}: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\r\n")
    user = add_user(users, name, password, permissions, replace=replace, scram=scram)
    note(f"{'replaced' if replace else 'added'} user={name} permissions={_permissions(user)} users={users}")
    note(RELOAD_NOTE)


@app.command(
    help_epilogue=examples(
        "polywire user alter alice --permissions consume@shop,produce@shop/orders",
        "polywire user alter alice --permissions all",
    )
)
def alter(
    name: Name,
    *,
    permissions: Annotated[str, Parameter(help="Comma-separated permissions, as for polywire user add, or all.")],
    users: File = FILE_DEFAULT,
) -> None:
    """Replace the permissions of a user. The password stays the same, and the user's connections stay open."""
    user = alter_user(users, name, permissions)
    note(f"altered user={name} permissions={_permissions(user)} users={users}")
    note(RELOAD_NOTE)


@app.command(name="list", help_epilogue=examples("polywire user list", "polywire user list --output json"))
def list_users(
    *,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
    users: File = FILE_DEFAULT,
) -> None:
    """List users with their permissions, and whether they can log in with SCRAM."""
    rows = [
        {
            "user": user.name,
            "everything": user.grants == EVERYTHING,
            "scram": bool(user.verifiers),
            "permissions": _permissions(user),
        }
        for user in read_users(users)
    ]
    print_list(rows, columns=("user", "everything", "scram", "permissions"), form=output)


def _permissions(user: ConfiguredUser) -> str:
    return "all" if user.grants == EVERYTHING else ",".join(grant_words(user.grants))


@app.command(help_epilogue=examples("polywire user remove alice"))
def remove(name: Name, *, users: File = FILE_DEFAULT) -> None:
    """Remove a user."""
    remove_user(users, name)
    note(f"removed user={name} users={users}")
