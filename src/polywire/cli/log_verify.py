"""``polywire log verify``: everything a start and every reader would read of a data directory, read and checked.

Promises: nothing is changed. Must not know: how the log is stored.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

from cyclopts import Parameter

from polywire.cli.doctor import EXITS, exit_code, print_findings, unsound
from polywire.cli.log import empty_state
from polywire.cli.output import ListFormat, note
from polywire.cli.usage import DataDir, examples
from polywire.log.doctor import examine
from polywire.log.repair import open_offline

EXAMPLES: Final = examples(
    "polywire log verify --data-dir polywire-data",
    "polywire log verify --data-dir polywire-data --output jsonl | jq .path",
    exits=EXITS,
)


def verify(
    *,
    data_dir: DataDir,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
) -> int:
    """Read the journal, its snapshots and every stored batch offline, and list what does not verify."""
    loop = asyncio.new_event_loop()
    try:
        with open_offline(data_dir, empty_state, loop) as offline:
            findings = examine(offline)
            print_findings(offline, unsound(findings), output)
    finally:
        loop.close()
    note(f"verified files={len({finding.path for finding in findings})} findings={len(unsound(findings))}")
    return exit_code(findings)
