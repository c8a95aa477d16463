"""``polywire backup``: copies of a data directory, taken while its broker runs, listed, verified and put back.

Promises: nothing in the data directory is changed; a restore goes to a directory that holds nothing. Must not know: how the log is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.cli.backup_files import FACTS, find_backup, list_backups, read_facts, restore_backup, take_backup
from polywire.cli.doctor import EXIT_DAMAGED, EXITS, exit_code, print_findings, unsound
from polywire.cli.log import empty_state, logs_on_stderr, opened
from polywire.cli.output import Failed, ListFormat, note, print_list
from polywire.cli.usage import DataDir, examples
from polywire.clock import SystemClock
from polywire.log.doctor import Finding, examine
from polywire.server.private import close_to_others, make_private

LIST_COLUMNS: Final = (
    "backup",
    "taken_at",
    "through",
    "segments",
    "bytes",
    "copied_segments",
    "copied_bytes",
    "damaged",
)
DAMAGED: Final = {EXIT_DAMAGED: "something is damaged, the rest can be restored"}

app = App(
    name="backup",
    help_epilogue=examples(
        "polywire backup create backups --data-dir polywire-data",
        "polywire backup restore backups --data-dir restored",
    ),
)
Shelf = Annotated[Path, Parameter(help="Directory of backups, best on another disk.")]
Chosen = Annotated[Path, Parameter(help="A backup, or a directory of backups, of which the newest is taken.")]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]


@app.command(help_epilogue=examples("polywire backup create /mnt/backups --data-dir polywire-data", exits=DAMAGED))
def create(shelf: Shelf, *, data_dir: DataDir) -> int:
    """Copy a data directory, whether a broker runs there or not. Segments that an earlier backup has are not copied again."""
    make_private()
    close_to_others(shelf, marks=(f"*/{FACTS}",))
    with loop() as running:
        taken = take_backup(data_dir, shelf, replay=empty_state, loop=running, clock=SystemClock())
    facts = taken.facts
    note(
        f"backed up backup={str(taken.path)!r} through={facts.through} segments={facts.segments} bytes={facts.bytes}"
        f" copied_segments={facts.copied_segments} copied_bytes={facts.copied_bytes}"
    )
    return damages(taken.findings)


@app.command(
    name="list", help_epilogue=examples("polywire backup list backups", "polywire backup list backups -o json")
)
def list_all(shelf: Shelf, *, output: Output = ListFormat.TABLE) -> None:
    """List backups, oldest first, and how much each has added."""
    if not shelf.is_dir():
        raise Failed(f"no such directory of backups path={str(shelf)!r}")
    rows = []
    for name in list_backups(shelf):
        facts = read_facts(shelf / name)
        copied = (facts.copied_segments, facts.copied_bytes)
        told = (name, facts.taken_at, facts.through, facts.segments, facts.bytes, *copied, len(facts.damaged))
        rows.append(dict(zip(LIST_COLUMNS, told, strict=True)))
    print_list(rows, columns=LIST_COLUMNS, form=output)


@app.command(
    help_epilogue=examples(
        "polywire backup verify backups", "polywire backup verify backups/20260102T030405Z -o jsonl", exits=EXITS
    )
)
def verify(backup: Chosen, *, output: Output = ListFormat.TABLE) -> int:
    """Read every byte of a backup, and list what does not verify."""
    path = find_backup(backup)
    with opened(path) as offline:
        findings = examine(offline)
        print_findings(offline.state, unsound(findings), output)
    note(
        f"verified backup={str(path)!r} files={len({found.path for found in findings})} findings={len(unsound(findings))}"
    )
    return exit_code(findings)


@app.command(help_epilogue=examples("polywire backup restore backups --data-dir restored", exits=DAMAGED))
def restore(backup: Chosen, *, data_dir: DataDir) -> int:
    """Make a new data directory of a backup, verified, from which a broker starts."""
    path = find_backup(backup)
    make_private()
    with loop() as running:
        findings = restore_backup(path, data_dir, replay=empty_state, loop=running)
    note(f"restored backup={str(path)!r} data_dir={str(data_dir)!r} files={len(findings)}")
    return damages(findings)


@contextmanager
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop for what is played back; what the log tells goes to standard error."""
    made = asyncio.new_event_loop()
    try:
        with logs_on_stderr():
            yield made
    finally:
        made.close()


def damages(findings: Sequence[Finding]) -> int:
    """Tell of damage that was copied as it is; returns the exit code."""
    for finding in unsound(findings):
        note(f"damaged path={finding.path!r} {finding.message}", style="red")
    return exit_code(findings)
