"""``polywire.toml``: the settings of ``polywire serve`` in a file.

The keys in the table ``serve`` are the names of the options; an unknown key is an error. Options override environment
variables, and these override the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from cyclopts import App, CycloptsError
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Toml

from polywire.choices import did_you_mean

DEFAULT_FILE: Final = Path("polywire.toml")  # used if it exists in the working directory
FILE_OPTION: Final = "--config"
TABLE: Final = "serve"
VARIABLES: Final = "POLYWIRE_SERVE_"  # prefix of the environment variables


class SettingsFile:
    """The settings file as a configuration source for cyclopts."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Set every argument that has no value yet from the file. Raises CycloptsError, and OSError for an unreadable
        file.
        """
        tokens = next(argument for argument in arguments if argument.name == FILE_OPTION).tokens
        path = Path(tokens[0].value) if tokens else DEFAULT_FILE
        source = Toml(path, must_exist=bool(tokens), root_keys=TABLE, use_commands_as_keys=False)
        try:
            content = source.config
        except CycloptsError as error:
            raise CycloptsError(msg=f"{path} is not valid TOML: {error}") from None
        options = {argument.name.removeprefix("--") for argument in arguments if not argument.children}
        check_keys(content, options - {FILE_OPTION.removeprefix("--")}, path)
        source(app, commands, arguments)


def check_keys(content: Mapping[str, Any], options: Collection[str], path: Path) -> None:
    """Raise CycloptsError for a key that is not the name of an option."""
    for table in content:
        if table != TABLE:
            raise CycloptsError(msg=f"{path}: unknown key {table!r}{_suggestion(table, {TABLE}, options)}")
    settings = content.get(TABLE, {})
    if not isinstance(settings, Mapping):
        raise CycloptsError(msg=f"{path}: [{TABLE}] must be a table")
    seen: set[str] = set()
    for key in settings:
        name = key.replace("_", "-")
        if name not in options:
            raise CycloptsError(msg=f"{path}: unknown key {key!r} in [{TABLE}]{_suggestion(name, options)}")
        if name in seen:
            raise CycloptsError(msg=f"{path}: duplicate key {name!r} in [{TABLE}]")
        seen.add(name)


def check_variables(names: Collection[str], options: Collection[str]) -> None:
    """Raise CycloptsError for an environment variable that has the prefix of settings but names no option."""
    known = {f"{VARIABLES}{option.replace('-', '_').upper()}" for option in options}
    for name in sorted(names):
        if name.startswith(VARIABLES) and name not in known:
            raise CycloptsError(msg=f"unknown environment variable {name!r}{_suggestion(name, known)}")


def _suggestion(key: str, known: Collection[str], below: Collection[str] = ()) -> str:
    """Return a suggestion for an unknown key, as the end of a message; empty if no known key is similar."""
    if key.replace("_", "-") in below:
        return f" (move it below [{TABLE}])"
    return did_you_mean(key, sorted(known))
