"""How help reads: parameters that several commands share, and the examples every command ends with.

Promises: one parameter has one meaning everywhere; examples appear as they are written, one per line. Must not know: any noun.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from cyclopts.validators import Number

HELP_FORMAT: Final = "plaintext"  # what is written is what is shown, brackets and back-ticks included

Topic = Annotated[str, Parameter(help="Full name of the topic: topic, or stream.topic outside the stream default.")]
OnlyPartition = Annotated[int | None, Parameter(name=("--partition", "-p"), help="Read only this partition.")]
Count = Annotated[
    int | None, Parameter(name=("--count", "-n"), help="Stop after this many records.", validator=Number(gte=1))
]
DataDir = Annotated[
    Path, Parameter(env_var="POLYWIRE_SERVE_DATA_DIR", help="Data directory, as passed to polywire serve --data-dir.")
]


def examples(*lines: str) -> str:
    """The end of a command's help."""
    title = "Example" if len(lines) == 1 else "Examples"
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])
