"""``polywire writer``: writers of staged publishes that the broker remembers.

Promises, must not know: as ``cli.kept``.
"""

from __future__ import annotations

from polywire.cli.kept import Noun, commands
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode

app = commands(
    Noun(
        word="writer",
        name="writer",
        names="writers",
        help="List and delete writers: who publishes what was staged, as Spark's sink does, and the last number of each. The broker"
        " remembers a writer for thirty days after its last publish.",
        forget="Forget a writer: what it publishes again under an old number is stored again.",
        example="nightly/totals",
        columns=("writer", "number", "idle_ms", "owner"),
        detail="number",
        missing=ErrorCode.WRITER_MISSING,
        listed=PolywireClient.writers,
        deleted=PolywireClient.delete_writer,
    )
)
