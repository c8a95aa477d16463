"""``polywire log``: verify a log, and repair a log whose damage keeps a broker from starting.

Before a repair changes anything, it lists the records that will be lost.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import structlog
from cyclopts import App, Parameter

from polywire.broker.settings import BrokerSettings
from polywire.broker.state import State
from polywire.cli.output import ListFormat, note, print_list
from polywire.cli.usage import DataDir, examples
from polywire.clock import SystemClock
from polywire.log.base import Replay
from polywire.log.doctor import Loss, OfflineLog, Offsets, finish, open_offline, repair

app = App(
    name="log",
    help_epilogue=examples("polywire log repair --dry-run --data-dir polywire-data"),
)

COLUMNS: Final = ("loss", "topic", "partition", "first_offset", "next_offset", "count")
empty_state: Final = partial(State, BrokerSettings())
"""Creates an empty broker state, into which a log is replayed."""


app.command(
    "polywire.cli.log_verify:app",
    name="verify",
    help="Read the journal, its snapshots and every stored batch of a data directory (offline) or a bucket, and list damage.",
)


@contextmanager
def opened(directory: Path) -> Iterator[OfflineLog]:
    """Open a data directory offline. No broker can use it meanwhile."""
    loop = asyncio.new_event_loop()
    try:
        with logs_on_stderr(), open_offline(directory, empty_state, loop) as offline:
            yield offline
    finally:
        loop.close()


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
    loop = asyncio.new_event_loop()
    try:
        with logs_on_stderr(), open_offline(data_dir, empty_state, loop) as offline:
            diagnosis = offline.diagnose()
            if diagnosis.reason is None:
                note("no repair is necessary: a broker can start from this directory")
                return
            note(f"damage: {diagnosis.reason.message}")
            print_list(list(rows_of(offline, diagnosis.loss)), columns=COLUMNS, form=output)
            if dry_run:
                note("dry run: nothing was changed")
                return
            backup, slot_bytes = repair(offline, diagnosis), offline.slots[0].size
        finish(data_dir, diagnosis.through, slot_bytes, empty_state(), loop, SystemClock())
        note(f"repaired; the original journal files are in {backup}")
    finally:
        loop.close()


@contextmanager
def logs_on_stderr() -> Iterator[None]:
    """Send log lines to standard error, because standard output is for results."""
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        yield
    finally:
        structlog.configure(**before)


def rows_of(offline: OfflineLog, loss: Loss) -> Iterator[Mapping[str, object]]:
    """Return one row for each item that a repair loses."""
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
            yield dict.fromkeys(COLUMNS) | {"loss": name, "count": count}


def _row(kind: str, offline: OfflineLog, incarnation: int, offsets: Offsets) -> Mapping[str, object]:
    topic, number = partition_name(offline.state, incarnation)
    first, end = offsets
    facts = (kind, topic, number, first, end, end - first)
    return dict(zip(COLUMNS, facts, strict=True))


def partition_name(state: Replay, incarnation: int) -> tuple[str, int]:
    """Return the topic and partition of an incarnation.

    If the topic no longer exists, return "(deleted)" and the incarnation.
    """
    found = state.catalog.find_partition(incarnation) if isinstance(state, State) else None
    return ("(deleted)", incarnation) if found is None else (found.topic.name.full, found.number)
