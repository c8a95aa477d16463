"""``polywire context``: name the brokers that commands connect to, with their users."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import unquote

from cyclopts import App, Parameter

from polywire.cli.contexts import VARIABLE, Context, Contexts, check_name, contexts_file, load, save
from polywire.cli.output import Failed, ListFormat, note, print_list
from polywire.cli.usage import examples
from polywire.client.address import split_brokers

app = App(
    name="context",
    help_epilogue=examples(
        "polywire context add prod -a polywire+tls://alice@prod:9955",
        "polywire context use prod",
        "polywire --context prod topic list",
    ),
)
COLUMNS: Final = ("context", "current", "address", "http", "user", "password")

Name = Annotated[str, Parameter(help="Name of the context.")]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]


@app.command(
    help_epilogue=examples(
        "polywire context add local --address polywire://127.0.0.1:9555",
        "polywire context add lab -a kafka://lab:9094 --http http://lab:9080",
        "polywire context add prod -a polywire://al@prod:9555 --password-file pw",
    )
)
def add(
    name: Name,
    *,
    address: Annotated[str, Parameter(name=("--address", "-a"))],
    http: str | None = None,
    user: str | None = None,
    password_file: str | None = None,
    password_command: str | None = None,
    tls_authority: str | None = None,
    replace: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Add a context. The first one becomes the current one.

    Contexts are in polywire/contexts.toml of the user's directory for configuration ($XDG_CONFIG_HOME, or ~/.config), which only the user
    can read.

    Parameters
    ----------
    address
        Broker address as scheme://host:port. A password in it is stored in clear.
    http
        Address of the broker's HTTP listener. Defaults to port 9080 of the host in --address.
    user
        User name, for both addresses.
    password_file
        File with the password, which only its owner may be able to read.
    password_command
        Command that prints the password. It runs without a shell whenever a command needs the password.
    tls_authority
        PEM file of the authorities to trust, instead of those of the system.
    replace
        Replace an existing context.
    """
    check_name(name)
    if password_file and password_command:
        raise Failed("use only one of --password-file and --password-command")
    contexts = load()
    if name in contexts.by_name and not replace:
        raise Failed(f"context exists (use --replace) context={name}")
    address, in_address, password = _split_login(address)
    http, in_http, _ = _split_login(http or "")
    names = {found for found in (user, in_address, in_http) if found}
    if len(names) > 1:
        raise Failed(f"a context has one user found={','.join(sorted(names))}")
    user = next(iter(names), "")
    if not user and (password_file or password_command):
        raise Failed("a password needs a user (use --user)")
    split_brokers(address)
    made = Context(
        address, http, user, password, _absolute(password_file), password_command or "", _absolute(tls_authority)
    )
    current = contexts.current or name
    save(Contexts({**contexts.by_name, name: made}, current))
    done = "replaced" if name in contexts.by_name else "added"
    note(f"{done} context={name} current={'yes' if name == current else 'no'} file={str(contexts_file())!r}")


def _absolute(path: str | None) -> str:
    """Return the path of a file for commands that run in other directories. Raises Failed if the file is missing."""
    if not path:
        return ""
    found = Path(path).expanduser().absolute()
    if not found.exists():
        raise Failed(f"file does not exist file={str(found)!r}")
    return str(found)


def _split_login(url: str) -> tuple[str, str, str]:
    """Return a URL without its login, and the name and password in it."""
    scheme, separator, rest = url.rpartition("://")
    login, _, hosts = rest.rpartition("@")
    name, _, password = login.partition(":")
    return f"{scheme}{separator}{hosts}", unquote(name), unquote(password)


@app.command(help_epilogue=examples("polywire context use prod"))
def use(name: Name) -> None:
    """Make a context the current one: commands use it without --context, unless POLYWIRE_ADDRESS is set."""
    contexts = load()
    contexts.find(name)
    save(Contexts(contexts.by_name, name))
    note(f"using context={name}")


@app.command(name="list", help_epilogue=examples("polywire context list", "polywire context list --output json"))
def list_contexts(*, output: Output = ListFormat.TABLE) -> None:
    """List contexts, and which one is used: the one in POLYWIRE_CONTEXT, or else the current one."""
    contexts = load()
    used = os.environ.get(VARIABLE, contexts.current)
    print_list([_row(name, context, used) for name, context in contexts.by_name.items()], columns=COLUMNS, form=output)


def _row(name: str, context: Context, used: str) -> dict[str, object]:
    return {
        "context": name,
        "current": name == used,
        "address": context.address,
        "http": context.http or None,
        "user": context.user or None,
        "password": context.password_source or None,
    }


@app.command(help_epilogue=examples("polywire context show prod", "polywire context show --output json"))
def show(
    name: Annotated[str | None, Parameter(help="Name of the context; by default the one that is used.")] = None,
    *,
    output: Output = ListFormat.TABLE,
) -> None:
    """Show one context. A password is never shown, only where it comes from."""
    contexts = load()
    used = os.environ.get(VARIABLE, contexts.current)
    name = used if name is None else name
    if not name:
        raise Failed("no context is used (add one with: polywire context add)")
    row = _row(name, contexts.find(name), used)
    row["tls_authority"] = contexts.find(name).tls_authority or None
    print_list([row], columns=(*COLUMNS, "tls_authority"), form=output)


@app.command(help_epilogue=examples("polywire context delete lab"))
def delete(name: Name) -> None:
    """Delete a context. If it is the current one, there is none afterwards."""
    contexts = load()
    contexts.find(name)
    rest = {other: context for other, context in contexts.by_name.items() if other != name}
    save(Contexts(rest, "" if contexts.current == name else contexts.current))
    note(f"deleted context={name}")
