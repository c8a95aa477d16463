"""``polywire segment``: list, inspect and verify the sealed segments of a data directory, without a running broker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.choices import unknown
from polywire.cli.doctor import EXITS, exit_code, opened, partition_name, parts_of, print_findings, unsound
from polywire.cli.output import ListFormat, format_time, note, print_list
from polywire.cli.usage import DATA_DIR, DataDir, examples, settings_file
from polywire.errors import BrokerError
from polywire.log.doctor import OfflineLog, examine_segment
from polywire.log.segments.format import SegmentInfo, read_info
from polywire.log.segments.segment_set import SEGMENTS

LIST_COLUMNS: Final = ("segment", "state", "bytes", "runs", "topics", "records", "first_time", "last_time")
RUN_COLUMNS: Final = (
    "topic",
    "partition",
    "first_offset",
    "next_offset",
    "records",
    "bytes",
    "position",
    "first_time",
    "last_time",
    "index_entries",
    "staged",
)

app = App(
    name="segment",
    help_epilogue=examples("polywire segment list --data-dir polywire-data"),
    config=settings_file,
)
Output = Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")]
Name = Annotated[str, Parameter(help="Name of the segment, as segment list prints it.")]


@app.command(
    name="list",
    help_epilogue=examples(
        "polywire segment list --data-dir polywire-data",
        "polywire segment list --data-dir polywire-data -o csv > segments.csv",
    ),
)
def list_segments(*, data_dir: DataDir = DATA_DIR, output: Output = ListFormat.TABLE) -> None:
    """List segments with their state, topics, records and times.

    A segment is live, dead (replaced or deleted, but its file still exists) or broken (both footers are damaged).
    """
    _note_others(data_dir)
    with opened(data_dir) as offline:
        needed = _needed(offline)
        rows = [_summary(offline, name, needed) for name in offline.store.list(f"{SEGMENTS}/")]
    print_list(rows, columns=LIST_COLUMNS, form=output)


@app.command(help_epilogue=examples("polywire segment inspect segments/00000001-00000001.pws --data-dir data"))
def inspect(name: Name, *, data_dir: DataDir = DATA_DIR, output: Output = ListFormat.TABLE) -> None:
    """List the partitions in a segment, with their offsets, number of records, bytes and times."""
    with opened(data_dir) as offline:
        _needed(offline)  # replays the journal, because it contains the topic names
        rows = _runs(offline, read_info(offline.store, _known(offline, [name])[0]))
    print_list(rows, columns=RUN_COLUMNS, form=output)


@app.command(
    help_epilogue=examples(
        "polywire segment verify --data-dir polywire-data",
        "polywire segment verify segments/00000001-00000001.pws --data-dir data",
        exits=EXITS,
    )
)
def verify(*names: Name, data_dir: DataDir = DATA_DIR, output: Output = ListFormat.TABLE) -> int:
    """Read every stored batch of the named segments, or of all live segments, and list damage."""
    _note_others(data_dir)
    with opened(data_dir) as offline:
        needed = _needed(offline)
        chosen = _known(offline, names) or [
            name for name in offline.store.list(f"{SEGMENTS}/") if needed is None or name in needed
        ]
        findings = [finding for name in chosen for finding in examine_segment(offline.store, name)]
        print_findings(offline.state, unsound(findings), output)
    note(f"verified segments={len(chosen)} findings={len(unsound(findings))}")
    return exit_code(findings)


def _note_others(data_dir: Path) -> None:
    """Say that the directory has segments of other processes, which have the same names."""
    others = [str(data_dir / part) for part in parts_of(data_dir)[1:]]
    if others:
        note(f"segments of the first process only; use --data-dir for those of the others: {' '.join(others)}")


def _needed(offline: OfflineLog) -> set[str] | None:
    """Return the names of the live segments; None if the journal cannot be read."""
    try:
        log_state = offline.diagnose().log_state
    except BrokerError:
        return None
    return None if log_state is None else {item.segment.name for item in log_state.segments.by_location.values()}


def _known(offline: OfflineLog, names: Sequence[str]) -> list[str]:
    known = set(offline.store.list(f"{SEGMENTS}/"))
    for name in names:
        if name not in known:
            raise unknown("segment", name, known)
    return list(names)


def _summary(offline: OfflineLog, name: str, needed: set[str] | None) -> dict[str, object]:
    row: dict[str, object] = dict.fromkeys(LIST_COLUMNS)
    row |= {"segment": name, "bytes": offline.store.size(name)}
    try:
        info = read_info(offline.store, name)
    except BrokerError:
        return row | {"state": "broken"}
    runs = list(info)
    state = "unknown" if needed is None else "live" if name in needed else "dead"
    topics = {partition_name(offline.state, run.partition)[0] for run in runs}
    row |= {"state": state, "runs": len(runs), "topics": len(topics), "records": sum(run.record_count for run in runs)}
    if runs:
        row["first_time"] = format_time(min(run.first_time_us for run in runs))
        row["last_time"] = format_time(max(run.last_time_us for run in runs))
    return row


def _runs(offline: OfflineLog, info: SegmentInfo) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for run in info:
        topic, number = partition_name(offline.state, run.partition)
        facts = (topic, number, run.first_offset, run.next_offset, run.record_count, run.size, run.position)
        times = (format_time(run.first_time_us), format_time(run.last_time_us))
        rows.append(dict(zip(RUN_COLUMNS, (*facts, *times, run.index_count, bool(run.token)), strict=True)))
    return rows
