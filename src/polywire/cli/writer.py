"""``polywire writer``: writers of staged publishes, and the last sequence number of each."""

from __future__ import annotations

from polywire.cli.kept import Noun, commands
from polywire.client.polywire import PolywireClient
from polywire.errors import ErrorCode

app = commands(
    Noun(
        word="writer",
        name="writer",
        names="writers",
        delete_help="Delete a writer. If it repeats a publish with an old number, the records are stored again.",
        example="nightly/totals",
        columns=("writer", "number", "idle_ms", "owner"),
        detail="number",
        missing=ErrorCode.WRITER_MISSING,
        listed=PolywireClient.writers,
        deleted=PolywireClient.delete_writer,
    )
)
