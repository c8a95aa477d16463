"""``polywire backup``: create, list, verify and restore backups of a data directory.

* A backup can be made while the broker runs, and does not change the data directory.
* A restore never overwrites data: its target must be empty or missing.
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
DAMAGED: Final = {EXIT_DAMAGED: "something is damaged; the rest can be restored"}

app = App(
    name="backup",
    help_epilogue=examples(
        "polywire backup create backups --data-dir polywire-data",
        "polywire backup restore backups --data-dir restored",
    ),
)
Shelf = Annotated[Path, Parameter(help="Directory of backups, preferably on another disk.")]
BackupPath = Annotated[Path, Parameter(help="A backup, or a directory of backups, of which the newest is used.")]
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]


@app.command(help_epilogue=examples("polywire backup create /mnt/backups --data-dir polywire-data", exits=DAMAGED))
def create(shelf: Shelf, *, data_dir: DataDir) -> int:
    """Back up a data directory, whether a broker is running or not. Segments that an earlier backup contains are not copied again."""
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
    """List backups, oldest first, with the segments and bytes that each one copied."""
    if not shelf.is_dir():
        raise Failed(f"directory of backups does not exist path={str(shelf)!r}")
    rows = []
    for name in list_backups(shelf):
        facts = read_facts(shelf / name)
        copied = (facts.copied_segments, facts.copied_bytes)
        values = (name, facts.taken_at, facts.through, facts.segments, facts.bytes, *copied, len(facts.damaged))
        rows.append(dict(zip(LIST_COLUMNS, values, strict=True)))
    print_list(rows, columns=LIST_COLUMNS, form=output)


@app.command(
    help_epilogue=examples(
        "polywire backup verify backups", "polywire backup verify backups/20260102T030405Z -o jsonl", exits=EXITS
    )
)
def verify(backup: BackupPath, *, output: Output = ListFormat.TABLE) -> int:
    """Read all data of a backup and list damaged files and records."""
    path = find_backup(backup)
    with opened(path) as offline:
        findings = examine(offline)
        print_findings(offline.state, unsound(findings), output)
    note(
        f"verified backup={str(path)!r} files={len({found.path for found in findings})} findings={len(unsound(findings))}"
    )
    return exit_code(findings)


@app.command(help_epilogue=examples("polywire backup restore backups --data-dir restored", exits=DAMAGED))
def restore(backup: BackupPath, *, data_dir: DataDir) -> int:
    """Restore a backup into a new data directory, and verify it."""
    path = find_backup(backup)
    make_private()
    with loop() as running:
        findings = restore_backup(path, data_dir, replay=empty_state, loop=running)
    note(f"restored backup={str(path)!r} data_dir={str(data_dir)!r} files={len(findings)}")
    return damages(findings)


@contextmanager
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop for replaying the log, with log lines on standard error."""
    event_loop = asyncio.new_event_loop()
    try:
        with logs_on_stderr():
            yield event_loop
    finally:
        event_loop.close()


def damages(findings: Sequence[Finding]) -> int:
    """Print damage that the backup contains because the data directory has it, and return the exit code."""
    for finding in unsound(findings):
        note(f"damaged path={finding.path!r} {finding.message}", style="red")
    return exit_code(findings)
