"""``polywire doctor``: what a data directory holds, what of it is damaged, and second copies made anew.

Promises: nothing is changed without ``--rebuild``; the exit code tells the worst that was found. Must not know: how the log is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.broker.state import State
from polywire.cli.log import opened, partition_name
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.usage import DataDir, examples
from polywire.log.doctor import Finding, Severity, examine, rebuild
from polywire.log.repair import OfflineLog
from polywire.log.segments.segment_set import SEGMENTS

EXIT_DAMAGED: Final = 3
EXIT_BROKEN: Final = 4
EXITS: Final = {EXIT_DAMAGED: "something is damaged, a broker starts", EXIT_BROKEN: "no broker would start"}

app = App(
    name="doctor",
    help_epilogue=examples(
        "polywire doctor --data-dir polywire-data",
        "polywire doctor --data-dir polywire-data --rebuild",
        "polywire doctor --data-dir polywire-data --output jsonl | jq .path",
        exits=EXITS,
    ),
)
COLUMNS: Final = ("state", "path", "topic", "partition", "first_offset", "next_offset", "remedy", "message")


@app.default
def doctor(
    *,
    data_dir: DataDir,
    rebuild_copies: Annotated[
        bool, Parameter(name="--rebuild", negative="", help="Rewrite damaged second copies.")
    ] = False,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
) -> int:
    """Check a data directory offline. Exits with 0 if it is healthy, 3 if something is damaged, 4 if a broker would not start."""
    with opened(data_dir) as offline:
        findings = examine(offline)
        rebuilt = rebuild(offline, findings) if rebuild_copies else []
        if not rebuilt:
            _print(offline, findings, output)
    if rebuilt:
        note(f"rebuilt {' '.join(rebuilt)}")
        with opened(data_dir) as offline:
            findings = examine(offline)
            _print(offline, findings, output)
    return exit_code(findings)


def exit_code(findings: Sequence[Finding]) -> int:
    """What a command that found this ends with."""
    found = {finding.severity for finding in findings}
    if Severity.BROKEN in found:
        return EXIT_BROKEN
    return EXIT_DAMAGED if found & {Severity.DAMAGED, Severity.WORN} else 0


def unsound(findings: Sequence[Finding]) -> list[Finding]:
    """Those that somebody should look at."""
    return [finding for finding in findings if finding.severity is not Severity.SOUND]


def _print(offline: OfflineLog, findings: Sequence[Finding], output: ListFormat) -> None:
    note(_overview(offline))
    print_findings(offline, findings, output)


def print_findings(offline: OfflineLog, findings: Sequence[Finding], output: ListFormat) -> None:
    """Print one row for each."""
    print_list([_row(offline, finding) for finding in findings], columns=COLUMNS, form=output)


def _overview(offline: OfflineLog) -> str:
    """What is there, as far as the journal could be played back."""
    state = offline.state
    assert isinstance(state, State)
    topics = state.catalog.topics(internal=True)
    counts = {
        "topics": len(topics),
        "partitions": sum(len(topic.partitions) for topic in topics),
        "groups": len(state.groups),
        "segments": len(offline.store.list(f"{SEGMENTS}/")),
        "slots": len(offline.slots),
    }
    return " ".join(f"{name}={count}" for name, count in counts.items())


def _row(offline: OfflineLog, finding: Finding) -> Mapping[str, object]:
    damage = finding.damage
    topic, number = (None, None) if damage is None else partition_name(offline, damage.partition)
    first, end = (None, None) if damage is None else (damage.first_offset, damage.next_offset)
    remedy = None if finding.remedy is None else finding.remedy.value
    facts = (finding.severity.value, finding.path, topic, number, first, end, remedy, finding.message)
    return dict(zip(COLUMNS, facts, strict=True))
