"""``polywire doctor``: what a data directory holds, what of it is damaged, and second copies made anew.

Promises: nothing is changed without ``--rebuild``; the exit code tells the worst that was found. Must not know: how the log is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.cli.log import empty_state, place_of
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.usage import DataDir, examples
from polywire.log.doctor import Finding, Severity, examine, rebuild
from polywire.log.repair import Patient, examining

EXIT_DAMAGED: Final = 3
EXIT_BROKEN: Final = 4

app = App(
    name="doctor",
    help_epilogue=examples(
        "polywire doctor --data-dir polywire-data",
        "polywire doctor --data-dir polywire-data --rebuild",
        "polywire doctor --data-dir polywire-data --output jsonl | jq .path",
    ),
)
COLUMNS: Final = ("state", "path", "topic", "partition", "first_offset", "next_offset", "message")


@app.default
def doctor(
    *,
    data_dir: DataDir,
    rebuild_copies: Annotated[
        bool, Parameter(name="--rebuild", negative="", help="Write second copies that are damaged anew.")
    ] = False,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Form of the list.")] = ListFormat.TABLE,
) -> int:
    """Look at a whole data directory while no broker runs: exit code 0 when all is sound, 3 when something is damaged, 4 when no broker
    would start."""
    loop = asyncio.new_event_loop()
    try:
        with examining(data_dir, empty_state, loop) as patient:
            findings = examine(patient)
            rebuilt = rebuild(patient, findings) if rebuild_copies else []
            if not rebuilt:
                _print(patient, findings, output)
        if rebuilt:
            note(f"rebuilt {' '.join(rebuilt)}")
            with examining(data_dir, empty_state, loop) as patient:
                findings = examine(patient)
                _print(patient, findings, output)
    finally:
        loop.close()
    found = {finding.severity for finding in findings}
    if Severity.BROKEN in found:
        return EXIT_BROKEN
    return EXIT_DAMAGED if found & {Severity.DAMAGED, Severity.WORN} else 0


def _print(patient: Patient, findings: Sequence[Finding], output: ListFormat) -> None:
    print_list([_row(patient, finding) for finding in findings], columns=COLUMNS, form=output)


def _row(patient: Patient, finding: Finding) -> Mapping[str, object]:
    damage = finding.damage
    topic, number = (None, None) if damage is None else place_of(patient, damage.partition)
    first, end = (None, None) if damage is None else (damage.first_offset, damage.next_offset)
    facts = (finding.severity.value, finding.path, topic, number, first, end, finding.message)
    return dict(zip(COLUMNS, facts, strict=True))
