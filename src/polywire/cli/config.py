"""``polywire config``: show the settings that ``polywire serve`` would use, with their sources, and check them.

Options, environment and file are read by the code of ``polywire serve``. No data directory is opened or changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import App, Parameter
from cyclopts.argument import Argument, ArgumentCollection

from polywire.broker.access import ANONYMOUS_NAME
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.serve import SOURCES, check_variables, config_of, serve
from polywire.cli.usage import examples
from polywire.server.config import RELOADED, ServeConfig
from polywire.server.link_tls import link_tls
from polywire.server.processes import inside_of
from polywire.server.tls import server_tls
from polywire.server.users import load_users

app = App(
    name="config",
    help_epilogue=examples("polywire config show --origin", "polywire config check"),
)
OPTION: Final = "option"
DEFAULT: Final = "default"

ServeOptions = Annotated[str, Parameter(allow_leading_hyphen=True, help="Options of polywire serve.")]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings of ``polywire serve``, and the arguments from which the command line parser made them."""

    config: ServeConfig
    arguments: ArgumentCollection


def resolve(words: tuple[str, ...]) -> Resolved:
    """Read options, environment and file like ``polywire serve``.

    Raises CycloptsError for wrong usage, and OSError for an unreadable file.
    """
    collections: list[ArgumentCollection] = []

    def record_arguments(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        collections.append(arguments)

    parser = App(name="serve", config=(*SOURCES, record_arguments), help_flags=[], version_flags=[])
    parser.default(serve)
    _, bound, _ = parser.parse_args(words, exit_on_error=False, print_error=False)
    bound.apply_defaults()
    return Resolved(config_of(**bound.arguments), collections[0])


@app.command(
    help_epilogue=examples(
        "polywire config show --origin",
        "polywire config show --reloaded",
        "polywire config show --output json --config staging.toml",
    )
)
def show(
    *options: ServeOptions,
    origin: Annotated[bool, Parameter(negative="", help="Show where each value comes from.")] = False,
    reloaded: Annotated[
        bool,
        Parameter(negative="", help="Show only the files that a running broker reloads when it receives SIGHUP."),
    ] = False,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
) -> None:
    """List every setting of polywire serve with its value: from an option, else the environment, the file or the default."""
    columns = ("setting", "value", *(("origin",) if origin else ()), *(("sighup",) if reloaded else ()))
    rows = [_row(argument) for argument in resolve(options).arguments if not argument.children]
    rows = [row for row in rows if row["sighup"] or not reloaded]
    print_list([{column: row[column] for column in columns} for row in rows], columns=columns, form=output)


def _row(argument: Argument) -> Mapping[str, object]:
    value: Any = argument.value if argument.tokens else argument.field_info.default
    match value:
        case Enum():
            value = value.value
        case Path():
            value = str(value)
    name = argument.name.removeprefix("--")
    return {"setting": name, "value": value, "origin": _origin(argument), "sighup": RELOADED.get(name)}


def _origin(argument: Argument) -> str:
    if not argument.tokens:
        return DEFAULT
    token = argument.tokens[0]
    match token.source:
        case "cli":
            return OPTION
        case "env":
            return str(token.keyword)
        case path:
            return path


@app.command(help_epilogue=examples("polywire config check", "polywire config check --config staging.toml"))
def check(*options: ServeOptions) -> None:
    """Check that polywire serve accepts its settings: values, addresses, users file and certificates. Exits with 1 or 2 if not."""
    resolved = resolve(options)
    check_variables(os.environ, {argument.name.removeprefix("--") for argument in resolved.arguments})
    config = resolved.config
    listeners = config.listeners()
    config.broker_settings()
    server_tls(config)
    users = None if config.users is None else load_users(config.users)
    if users is not None:
        names = {user.name for user in users}
        listeners = config.served(has_users=True, has_anonymous=ANONYMOUS_NAME in names)
    link_tls(config, config.reached_at(inside_of(config, listeners)))
    note(f"ok: {', '.join(f'{name} on {address}' for name, address in listeners.items())}")
