"""Parameters that several commands share, and the examples and exit codes at the end of every command's help.

This module imports no client, because every command loads it and the import would take most of the time of a call with
``--help``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from cyclopts.validators import Number

EXIT_CODES: Final = "Exit codes:"
HELP_FORMAT: Final = "plaintext"  # otherwise cyclopts would interpret brackets and back-ticks as markup

Topic = Annotated[str, Parameter(help="Full name of the topic: topic, or stream.topic outside the stream default.")]
OnlyPartition = Annotated[int | None, Parameter(name=("--partition", "-p"), help="Read only this partition.")]
Count = Annotated[
    int | None, Parameter(name=("--count", "-n"), help="Stop after this many records.", validator=Number(gte=1))
]
DataDir = Annotated[
    Path, Parameter(env_var="POLYWIRE_SERVE_DATA_DIR", help="Data directory, as passed to polywire serve --data-dir.")
]

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


def examples(*lines: str, exits: Mapping[int, str] | None = None) -> str:
    """Return the end of a command's help: examples and exit codes.

    ``exits`` has exit codes that only this command uses.
    """
    title = "Example" if len(lines) == 1 else "Examples"
    codes = sorted((EXIT_MEANINGS | dict(exits or {})).items())
    meanings = [f"  {code:<3}  {meaning}" for code, meaning in codes]
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines), EXIT_CODES, *meanings])
