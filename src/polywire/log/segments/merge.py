"""Merge segments: drop unneeded data and join small segments (decision 0102).

* The new segment covers the same offsets of a partition as the segments that it replaces.
* Batches of uncommitted publishes and transactions are not merged, and stay in their segment.
* Data is written only if its checksums matched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec

from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.log.partition.partition import FilePartition
from polywire.log.segments.format import SegmentInfo, SegmentRun
from polywire.log.segments.segment import Segment
from polywire.log.segments.segment_set import Sealed
from polywire.log.segments.writer import RunSource, write_segment
from polywire.log.state import LogState
from polywire.log.worker import attempt
from polywire.records.compression import Compression
from polywire.store.base import Store

SHARED_BLOB_BYTES_MAX: Final = 64 * 1024 * 1024  # size of a journal file: a merged segment does not become larger
SMALL_BLOB_BYTES_MAX: Final = 16 * 1024 * 1024  # larger segments are never merged
MERGE_COUNT_MIN: Final = 4  # a merge needs at least this many segments, which limits how often a byte is rewritten
RUNS_MAX: Final = 4096  # runs in one merge: planning takes some milliseconds of the event loop
REPLACED_MAX: Final = 256  # runs replaced before the event loop may do other work: takes some milliseconds, too
GROUPS_MAX: Final = 4  # merges planned in one pass
LOST_US_MAX: Final = (
    600 * 1_000_000
)  # how long data of a dropped partition stays in a segment, so that one merge handles many drops

Source = tuple[Segment, SegmentRun]


class Merge(msgspec.Struct, frozen=True):
    """Segments that one new segment replaces, and the content of the new segment.

    Attributes:
        old: segments to replace.
        runs: for each partition, the locations of the batches to copy, in offset order.
        damaged: the segments in which the merge has found a checksum that does not match.
        over: called with None when the new segment is on disk or not needed, or with an error.
    """

    old: Sequence[Sealed]
    runs: Mapping[int, Sequence[Source]]
    compression: Mapping[int, Compression | None] = msgspec.field(default_factory=dict)
    damaged: list[Segment] = msgspec.field(default_factory=list)
    over: Completion[None] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Segments that may be merged into one, with their footers.

    Attributes:
        failed: segment whose footer could not be read. The segments are not merged then.
        error: why it could not be read.
    """

    old: Sequence[Sealed]
    runs: Sequence[tuple[Sealed, SegmentRun]] = ()
    failed: Sealed | None = None
    error: BrokerError | None = None


def choose(state: LogState, now_us: int, *, merging: bool) -> list[list[Sealed]]:
    """Return the next lists of segments to merge, best first.

    A segment comes first if half of its data is unneeded, or if it holds data of a partition that was dropped some time
    ago.

    Args:
        merging: also merge small neighbours.
    """
    living = [
        item for item in state.segments.by_location.values() if item.live and not item.staged and not item.damaged
    ]
    living.sort(key=lambda item: item.begun_us)
    groups = [[item] for item in living if is_wasteful(item, now_us)]
    if merging:
        groups += small_neighbours(living)
    return groups[:GROUPS_MAX]


def read_groups(groups: Sequence[Sequence[Sealed]]) -> list[Group]:
    """Read the footers of the segments, in a thread."""
    return [_read_group(old) for old in groups]


def _read_group(old: Sequence[Sealed]) -> Group:
    runs: list[tuple[Sealed, SegmentRun]] = []
    for sealed in old:
        info = attempt(lambda segment=sealed.segment: segment.info)  # type: ignore[misc]
        if isinstance(info, BrokerError):
            return Group(old, failed=sealed, error=info)
        runs.extend((sealed, run) for run in info if not run.token)
    return Group(old, runs)


def is_wasteful(sealed: Sealed, now_us: int) -> bool:
    """Return whether half of a segment is unneeded, or it holds data of a partition that was dropped some time ago."""
    if sealed.live_bytes > SHARED_BLOB_BYTES_MAX or sealed.segment.run_count > RUNS_MAX:
        return False
    if 2 * sealed.live_bytes <= sealed.segment.data_bytes:
        return True
    if sealed.lost_partition and not sealed.lost_at_us:
        sealed.lost_at_us = now_us
    return sealed.lost_partition and now_us - sealed.lost_at_us >= LOST_US_MAX


def small_neighbours(living: Sequence[Sealed]) -> list[list[Sealed]]:
    """Return lists of at least four consecutive small segments, each list at most 64 MiB."""
    groups: list[list[Sealed]] = [[]]
    size = runs = 0
    for sealed in living:
        small = sealed.live_bytes <= SMALL_BLOB_BYTES_MAX
        size += sealed.live_bytes
        runs += sealed.segment.run_count
        if not small or size > SHARED_BLOB_BYTES_MAX or runs > RUNS_MAX:
            groups.append([])
            size, runs = (sealed.live_bytes, sealed.segment.run_count) if small else (0, 0)
        if small:
            groups[-1].append(sealed)
    return [group for group in groups if len(group) >= MERGE_COUNT_MIN]


def plan(state: LogState, group: Group) -> Merge | None:
    runs: dict[int, list[Source]] = {}
    for sealed, run in group.runs:
        partition = state.partitions.get(run.partition)
        if partition is not None and _serves_reads(partition, run, sealed):
            runs.setdefault(run.partition, []).append((sealed.segment, run))
    for found in runs.values():
        found.sort(key=lambda source: source[1].first_offset)
        if any(one[1].next_offset != other[1].first_offset for one, other in pairwise(found)):
            return None
    packing = {incarnation: state.partitions[incarnation].compression for incarnation in runs}
    return Merge(group.old, runs, packing) if runs else None


def _serves_reads(partition: FilePartition, run: SegmentRun, sealed: Sealed) -> bool:
    """Return whether reads of these offsets use this segment.

    They do not if the offsets were trimmed, or compacted into another segment.
    """
    number = partition.runs.find_offset(run.next_offset - 1)
    return (
        run.next_offset > partition.first_offset and number >= 0 and partition.runs.entry(number)[3] == sealed.location
    )


def write_merged(store: Store, name: str, merge: Merge) -> SegmentInfo:
    """Write the new segment, in a thread.

    Raises errors of the store. Raises Corrupt after adding the damaged segment to ``merge.damaged``.
    """
    sources = [
        RunSource.of_segments(runs, damaged=merge.damaged.append, compression=merge.compression[incarnation])
        for incarnation, runs in merge.runs.items()
    ]
    return write_segment(store, name, sources)


def replace(state: LogState, merge: Merge, new: Sealed, info: SegmentInfo) -> Iterator[None]:
    """Replace the old segments by the new one. Yields so that other work can run on the event loop.

    Data that was dropped since the merge was planned is not added again.
    """
    new.live += 1  # keeps the segment alive until all runs are assigned
    for count, run in enumerate(info, 1):
        _replace_run(state, run, new)
        if count % REPLACED_MAX == 0:
            yield
    assert state.has_released or not any(item.live for item in merge.old), (
        "all needed data of the old blobs is in the new one"
    )
    new.live -= 1
    state.segments.settle([new])


def _replace_run(state: LogState, run: SegmentRun, new: Sealed) -> None:
    partition = state.partitions.get(run.partition)
    new.lost_partition |= partition is None
    numbers = range(0) if partition is None else partition.runs_between(run.first_offset, run.next_offset)
    if partition is None or not numbers:
        return
    for location, size in partition.join_runs(numbers, new.location, run.size):
        state.segments.drop(location, size)
    new.keep(run.size, run.first_time_us)
