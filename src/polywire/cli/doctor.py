"""``polywire doctor``: check a data directory or a bucket, and rewrite damaged copies with ``--rebuild``.

The exit code reports the most severe finding.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import structlog
from cyclopts import App, Parameter

from polywire.broker.settings import BrokerSettings
from polywire.broker.state import State
from polywire.cli.output import Failed, ListFormat, note, print_list
from polywire.cli.progress import reported
from polywire.cli.usage import DATA_DIR, DataDir, examples, settings_file
from polywire.clock import SystemClock
from polywire.log.base import Replay
from polywire.log.doctor import Finding, OfflineLog, Severity, examine, open_offline, rebuild
from polywire.log.segments.segment_set import SEGMENTS
from polywire.server.placement import count_shards, directory_of
from polywire.store.bucket import REQUEST_TIMEOUT_S
from polywire.store.metered import Meter, MeteredObjects, RequestCounts
from polywire.store.url import open_bucket

EXIT_DAMAGED: Final = 3
EXIT_BROKEN: Final = 4
SEGMENT_TIMEOUT_S: Final = 120
EXITS: Final = {EXIT_DAMAGED: "something is damaged; a broker still starts", EXIT_BROKEN: "a broker would not start"}

app = App(
    name="doctor",
    help_epilogue=examples(
        "polywire doctor --data-dir polywire-data",
        "polywire doctor --data-dir polywire-data --rebuild",
        "polywire doctor --bucket s3://my-bucket/polywire",
        "polywire doctor --data-dir polywire-data --output jsonl | jq .path",
        exits=EXITS,
    ),
    config=settings_file,
)
COLUMNS: Final = ("state", "path", "topic", "partition", "first_offset", "next_offset", "remedy", "message")


empty_state: Final = partial(State, BrokerSettings())
"""Creates an empty broker state, into which a log is replayed."""


Bucket = Annotated[
    str | None, Parameter(help="Check a log in a bucket instead, read-only: s3://, gs://, az:// or file:///.")
]


@contextmanager
def opened(directory: Path) -> Iterator[OfflineLog]:
    """Open a data directory offline. No broker can use it meanwhile."""
    loop = asyncio.new_event_loop()
    try:
        with (
            reported(f"reading data_dir={str(directory)!r}"),
            logs_on_stderr(),
            open_offline(directory, empty_state, loop) as offline,
        ):
            yield offline
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


@app.default
def doctor(
    *,
    data_dir: DataDir = DATA_DIR,
    bucket: Bucket = None,
    rebuild_copies: Annotated[
        bool, Parameter(name="--rebuild", negative="", help="Rewrite damaged copies from intact ones.")
    ] = False,
    output: Annotated[ListFormat, Parameter(name=("--output", "-o"), help="Output format.")] = ListFormat.TABLE,
) -> int:
    """Check a data directory offline, or a log in a bucket while brokers use it."""
    if bucket is not None and rebuild_copies:
        raise Failed("--rebuild does not apply to a bucket (the object store replicates its data itself)")
    for part in parts_of(data_dir) if rebuild_copies else ():
        with opened(data_dir / part) as offline:
            rebuilt = [part + name for name in rebuild(offline, examine(offline))]
        if rebuilt:
            note(f"rebuilt {' '.join(rebuilt)}")
    found = examined_offline(data_dir, overview=True) if bucket is None else examined(bucket)
    print_examined(found, output)
    return exit_code([finding for part in found for finding in part.findings])


@dataclass(frozen=True, slots=True)
class Examined:
    """The findings about a part of a log.

    Attributes:
        state: the broker's state, which has the topic names of partitions.
    """

    state: Replay
    findings: Sequence[Finding]


def parts_of(data_dir: Path) -> list[str]:
    """Return the paths below a data directory that have a log: "", and one with a ``/`` at its end for each further process."""
    return ["", *(f"{directory_of(Path(), shard)}/" for shard in range(1, count_shards(data_dir)))]


def placed(findings: Sequence[Finding], part: str) -> list[Finding]:
    """Return findings about a part of a data directory with paths below the data directory."""
    return [replace(finding, path=part + finding.path) for finding in findings]


def examined_offline(data_dir: Path, *, overview: bool = False) -> list[Examined]:
    """Check a data directory that no broker uses, with the directories of all processes.

    Raises the errors of ``open_offline``.

    Args:
        overview: also print what each directory contains.
    """
    found = []
    for part in parts_of(data_dir):
        with opened(data_dir / part) as offline:
            findings = placed(examine(offline), part)
            found.append(Examined(offline.state, findings))
            if overview:
                note(f"directory={part} {_overview(offline)}" if part else _overview(offline))
    return found


def examined(url: str) -> list[Examined]:
    """Check a bucket, each of its shards, and the brokers that use it.

    Raises BrokerError if the bucket cannot be read.
    """
    from polywire.cluster.doctor import BucketDoctor
    from polywire.cluster.nodes import observed_nodes

    meter = Meter(SystemClock())
    objects, blobs = (
        MeteredObjects(open_bucket(url, timeout_s=timeout_s, make=False), meter)
        for timeout_s in (REQUEST_TIMEOUT_S, SEGMENT_TIMEOUT_S)
    )
    bucket_doctor = BucketDoctor(objects, blobs)
    with reported("checking the bucket"), logs_on_stderr():
        seen = observed_nodes(objects)
        found = [Examined(empty_state(), [bucket_doctor.examine_identity()])]
        for shard in bucket_doctor.shards:
            findings, state = shard.examine(), empty_state()
            shard.replay_into(state)
            found.append(Examined(state, findings))
        found.append(Examined(empty_state(), list(bucket_doctor.brokers(seen))))
    note(_request_counts(meter.counts()))
    return found


def _request_counts(counts: RequestCounts) -> str:
    """Return how many requests the check sent to the bucket, as text, because object stores charge for requests."""
    charged = " ".join(f"{charge.value}={count}" for charge, count in counts.charged.items() if count)
    return f"requests to the bucket: {charged} got_mib={counts.got_bytes / 2**20:.1f}"


def exit_code(findings: Sequence[Finding]) -> int:
    found = {finding.severity for finding in findings}
    if Severity.BROKEN in found:
        return EXIT_BROKEN
    return EXIT_DAMAGED if found & {Severity.DAMAGED, Severity.WORN} else 0


def unsound(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity is not Severity.SOUND]


def print_unsound(found: Sequence[Examined], output: ListFormat) -> list[Finding]:
    """Print what is damaged, and return all findings."""
    print_examined([Examined(part.state, unsound(part.findings)) for part in found], output)
    return [finding for part in found for finding in part.findings]


def print_findings(state: Replay, findings: Sequence[Finding], output: ListFormat) -> None:
    print_examined([Examined(state, findings)], output)


def print_examined(found: Sequence[Examined], output: ListFormat) -> None:
    print_list([_row(part.state, finding) for part in found for finding in part.findings], columns=COLUMNS, form=output)


def _overview(offline: OfflineLog) -> str:
    """Count topics, partitions, groups, segments and journal files in the replayed part of the journal."""
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


def _row(state: Replay, finding: Finding) -> Mapping[str, object]:
    damage = finding.damage
    topic, number = (None, None) if damage is None else partition_name(state, damage.partition)
    first, end = (None, None) if damage is None else (damage.first_offset, damage.next_offset)
    remedy = None if finding.remedy is None else finding.remedy.value
    facts = (finding.severity.value, finding.path, topic, number, first, end, remedy, finding.message)
    return dict(zip(COLUMNS, facts, strict=True))


def partition_name(state: Replay, incarnation: int) -> tuple[str, int]:
    """Return topic and number of the partition with this incarnation.

    If the topic does not exist any more, return "(deleted)" and the incarnation.
    """
    found = state.catalog.partition_name(incarnation) if isinstance(state, State) else None
    return found or ("(deleted)", incarnation)
