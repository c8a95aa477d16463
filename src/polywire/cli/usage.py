"""Parameters that several commands share, and the examples and exit codes at the end of every command's help.

This module imports no client, because every command loads it and the import would take most of the time of a call with
``--help``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import CycloptsError, Parameter
from cyclopts.validators import Number

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import ArgumentCollection
    from cyclopts.config import Toml

EXIT_CODES: Final = "Exit codes:"
HELP_FORMAT: Final = "plaintext"  # otherwise cyclopts would interpret brackets and back-ticks as markup

Topic = Annotated[str, Parameter(help="Full name of the topic: topic, or stream.topic outside the stream default.")]
OnlyPartition = Annotated[int | None, Parameter(name=("--partition", "-p"), help="Read only this partition.")]
Count = Annotated[
    int | None, Parameter(name=("--count", "-n"), help="Stop after this many records.", validator=Number(gte=1))
]
DataDir = Annotated[Path, Parameter(env_var="POLYWIRE_SERVE_DATA_DIR", help="Data directory of the broker.")]
DATA_DIR: Final = Path("polywire-data")  # of a broker whose settings name no other
SETTINGS_FILE: Final = Path("polywire.toml")  # used if it exists in the working directory
SERVE: Final = "serve"  # the table of the settings file
SHARED: Final = ("--data-dir", "--bucket")

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_MEANINGS: Final = {
    EXIT_DONE: "success",
    EXIT_FAILED: "the command failed; standard error gives the reason",
    EXIT_USAGE: "wrong usage",
    EXIT_INTERRUPTED: "interrupted",
}


def settings_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Set the options that a command shares with ``polywire serve`` from the settings file (a source of cyclopts).

    ``polywire stop`` and ``polywire doctor`` then find the broker that ``polywire serve`` starts in the same directory,
    unless the user names one.
    """
    if not any(argument.tokens for argument in arguments if argument.name in SHARED):
        read_settings(SETTINGS_FILE, allow_unknown=True)(app, commands, arguments)


def read_settings(path: Path, *, must_exist: bool = False, allow_unknown: bool = False) -> Toml:
    """Read a settings file of ``polywire serve``. Raises CycloptsError if it is not valid TOML, and OSError."""
    from cyclopts.config import Toml

    source = Toml(path, must_exist=must_exist, root_keys=SERVE, use_commands_as_keys=False, allow_unknown=allow_unknown)
    try:
        _ = source.config
    except CycloptsError as error:
        raise CycloptsError(msg=f"{path} is not valid TOML: {error}") from None
    return source


def examples(*lines: str, exits: Mapping[int, str] | None = None) -> str:
    """Return the end of a command's help: examples and exit codes.

    ``exits`` has exit codes that only this command uses.
    """
    title = "Example" if len(lines) == 1 else "Examples"
    codes = sorted((EXIT_MEANINGS | dict(exits or {})).items())
    meanings = [f"  {code:<3}  {meaning}" for code, meaning in codes]
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines), EXIT_CODES, *meanings])
