"""``polywire.toml``: the settings of ``polywire serve`` in a file, under the environment, which is under the options.

Promises: the file's keys are the names of the options, in the table ``serve``; a key that is none is refused with the one that was probably
meant. Must not know: what a setting means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from cyclopts import App, CycloptsError
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Toml

from polywire.choices import did_you_mean

USUAL_FILE: Final = Path("polywire.toml")  # read where the broker is started, if it is there
FILE_OPTION: Final = "--config"
TABLE: Final = "serve"
VARIABLES: Final = "POLYWIRE_SERVE_"  # what the environment's settings begin with


class SettingsFile:
    """A source of cyclopts. It comes behind the environment: the first source that has a value wins, and the options are before all."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Give every argument that has no value yet the file's. Raises CycloptsError, and OSError for a file that cannot be read."""
        given = next(argument for argument in arguments if argument.name == FILE_OPTION).tokens
        path = Path(given[0].value) if given else USUAL_FILE
        source = Toml(path, must_exist=bool(given), root_keys=TABLE, use_commands_as_keys=False)
        try:
            content = source.config
        except CycloptsError as error:
            raise CycloptsError(msg=f"{path} cannot be read as TOML: {error}") from None
        options = {argument.name.removeprefix("--") for argument in arguments if not argument.children}
        check_keys(content, options - {FILE_OPTION.removeprefix("--")}, path)
        source(app, commands, arguments)


def check_keys(content: Mapping[str, Any], options: Collection[str], path: Path) -> None:
    """Refuse what names no setting. Raises CycloptsError."""
    for table in content:
        if table != TABLE:
            raise CycloptsError(msg=f"{path}: unknown key {table!r}{_meant(table, {TABLE}, options)}")
    settings = content.get(TABLE, {})
    if not isinstance(settings, Mapping):
        raise CycloptsError(msg=f"{path}: [{TABLE}] is a table")
    seen: set[str] = set()
    for key in settings:
        name = key.replace("_", "-")
        if name not in options:
            raise CycloptsError(msg=f"{path}: unknown key {key!r} in [{TABLE}]{_meant(name, options)}")
        if name in seen:
            raise CycloptsError(msg=f"{path}: {name!r} stands in [{TABLE}] twice")
        seen.add(name)


def check_variables(names: Collection[str], options: Collection[str]) -> None:
    """Refuse variables of the environment that look like settings and are none. Raises CycloptsError."""
    known = {f"{VARIABLES}{option.replace('-', '_').upper()}" for option in options}
    for name in sorted(names):
        if name.startswith(VARIABLES) and name not in known:
            raise CycloptsError(msg=f"the variable {name!r} is no setting{_meant(name, known)}")


def _meant(key: str, known: Collection[str], below: Collection[str] = ()) -> str:
    """What was probably meant."""
    if key.replace("_", "-") in below:
        return f", it belongs below [{TABLE}]"
    return did_you_mean(key, sorted(known))
