"""``polywire log``: the operator's way past damage that keeps a broker from starting.

Promises: nothing is changed before it was told what is given up, nothing at all with ``--dry-run``. Must not know: how the log is stored.
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
from polywire.log.repair import GivenUp, OfflineLog, Offsets, finish, open_offline, repair

app = App(
    name="log",
    help_epilogue=examples("polywire log repair --dry-run --data-dir polywire-data"),
)

COLUMNS: Final = ("given_up", "topic", "partition", "first_offset", "next_offset", "count")
empty_state: Final = partial(State, BrokerSettings())
"""Makes a broker's state for a log to be played back into."""


app.command(
    "polywire.cli.log_verify:app",
    name="verify",
    help="Read the journal, its snapshots and every stored batch, and list what does not verify: "
    "of a data directory offline, or of a bucket.",
)


@contextmanager
def opened(directory: Path) -> Iterator[OfflineLog]:
    """A directory that no broker owns meanwhile."""
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
    dry_run: Annotated[bool, Parameter(negative="", help="Show what would be lost without changing anything.")] = False,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
) -> None:
    """Skip a gap or a damaged group in the journal, and list the records lost."""
    loop = asyncio.new_event_loop()
    try:
        with logs_on_stderr(), open_offline(data_dir, empty_state, loop) as offline:
            diagnosis = offline.diagnose()
            if diagnosis.reason is None:
                note("nothing to repair: a broker can start from this directory")
                return
            note(f"damage: {diagnosis.reason.message}")
            print_list(list(rows_of(offline, diagnosis.given_up)), columns=COLUMNS, form=output)
            if dry_run:
                note("dry run: nothing was changed")
                return
            aside, slot_bytes = repair(offline, diagnosis), offline.slots[0].size
        finish(data_dir, diagnosis.through, slot_bytes, empty_state(), loop, SystemClock())
        note(f"repaired; original journal files are kept in {aside}")
    finally:
        loop.close()


@contextmanager
def logs_on_stderr() -> Iterator[None]:
    """What the log tells an operator is kept out of the results."""
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        yield
    finally:
        structlog.configure(**before)


def rows_of(offline: OfflineLog, given_up: GivenUp) -> Iterator[Mapping[str, object]]:
    """What a repair gives up, one row each."""
    for incarnation, offsets in sorted(given_up.records.items()):
        yield _row("records", offline, incarnation, offsets)
    for incarnation, ranges in sorted(given_up.damaged.items()):
        for offsets in ranges:
            yield _row("damaged, stay unreadable", offline, incarnation, offsets)
    counts = {
        "groups": given_up.groups,
        "groups of which nothing is known": given_up.unknown,
        "changes of the broker's state": given_up.changes,
        "staged batches": given_up.staged,
    }
    for name, count in counts.items():
        if count:
            yield dict.fromkeys(COLUMNS) | {"given_up": name, "count": count}


def _row(what: str, offline: OfflineLog, incarnation: int, offsets: Offsets) -> Mapping[str, object]:
    topic, number = partition_name(offline.state, incarnation)
    first, end = offsets
    facts = (what, topic, number, first, end, end - first)
    return dict(zip(COLUMNS, facts, strict=True))


def partition_name(state: Replay, incarnation: int) -> tuple[str, int]:
    """(topic, partition) of an incarnation; the incarnation itself where the topic is not known any more."""
    found = state.catalog.find_partition(incarnation) if isinstance(state, State) else None
    return ("(deleted)", incarnation) if found is None else (found.topic.name.full, found.number)
