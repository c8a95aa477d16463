"""``polywire log``: verify a log, and repair a log whose damage keeps a broker from starting.

Before a repair changes anything, it lists the records that will be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.cli.doctor import (
    EXITS,
    Bucket,
    empty_state,
    examined,
    examined_offline,
    exit_code,
    logs_on_stderr,
    partition_name,
    parts_of,
    print_unsound,
    unsound,
)
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.progress import reported
from polywire.cli.usage import DATA_DIR, DataDir, examples, settings_file
from polywire.clock import SystemClock
from polywire.log.doctor import Loss, OfflineLog, Offsets, finish, open_offline, repair

app = App(
    name="log",
    help_epilogue=examples("polywire log repair --dry-run --data-dir polywire-data"),
)

LOSS_COLUMNS: Final = ("loss", "topic", "partition", "first_offset", "next_offset", "count")


@app.command(
    help_epilogue=examples(
        "polywire log verify --data-dir polywire-data",
        "polywire log verify --bucket s3://my-bucket/polywire",
        "polywire log verify --data-dir polywire-data --output jsonl | jq .path",
        exits=EXITS,
    ),
    config=settings_file,
)
def verify(
    *,
    data_dir: DataDir = DATA_DIR,
    bucket: Bucket = None,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
) -> int:
    """Read the journal, its snapshots and every stored batch of a data directory (offline) or a bucket, and list damage."""
    found = examined_offline(data_dir) if bucket is None else examined(bucket)
    findings = print_unsound(found, output)
    note(f"verified files={len({finding.path for finding in findings})} findings={len(unsound(findings))}")
    return exit_code(findings)


@app.command(
    name="repair",
    help_epilogue=examples(
        "polywire log repair --dry-run --data-dir polywire-data", "polywire log repair --data-dir polywire-data"
    ),
)
def repair_log(
    *,
    data_dir: DataDir,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Show the records that would be lost, without changing anything.")
    ] = False,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
) -> None:
    """Skip a gap or a damaged group in the journal, and list the lost records."""
    for part in parts_of(data_dir):
        _repair(data_dir / part, dry_run=dry_run, output=output)


def _repair(directory: Path, *, dry_run: bool, output: ListFormat) -> None:
    """Repair the log of one process."""
    loop = asyncio.new_event_loop()
    try:
        with (
            reported(f"reading data_dir={str(directory)!r}"),
            logs_on_stderr(),
            open_offline(directory, empty_state, loop) as offline,
        ):
            diagnosis = offline.diagnose()
            if diagnosis.reason is None:
                note(f"no repair is necessary: a broker can start from this directory path={str(directory)!r}")
                return
            note(f"damage: {diagnosis.reason.message}")
            print_list(list(rows_of(offline, diagnosis.loss)), columns=LOSS_COLUMNS, form=output)
            if dry_run:
                note("dry run: nothing was changed")
                return
            backup, slot_bytes = repair(offline, diagnosis), offline.slots[0].size
        finish(directory, diagnosis.through, slot_bytes, empty_state(), loop, SystemClock())
        note(f"repaired; the original journal files are in {backup}")
    finally:
        loop.close()


def rows_of(offline: OfflineLog, loss: Loss) -> Iterator[Mapping[str, object]]:
    """Yield one row for each item that a repair loses."""
    for incarnation, offsets in sorted(loss.records.items()):
        yield _row("records", offline, incarnation, offsets)
    for incarnation, ranges in sorted(loss.damaged.items()):
        for offsets in ranges:
            yield _row("damaged records (unreadable)", offline, incarnation, offsets)
    counts = {
        "journal groups": loss.groups,
        "unreadable journal groups": loss.unknown,
        "broker state changes": loss.changes,
        "staged batches": loss.staged,
    }
    for name, count in counts.items():
        if count:
            yield dict.fromkeys(LOSS_COLUMNS) | {"loss": name, "count": count}


def _row(kind: str, offline: OfflineLog, incarnation: int, offsets: Offsets) -> Mapping[str, object]:
    topic, number = partition_name(offline.state, incarnation)
    first, end = offsets
    facts = (kind, topic, number, first, end, end - first)
    return dict(zip(LOSS_COLUMNS, facts, strict=True))
