"""Plan which records to read next and how to divide them among tasks, without I/O.

The same start and end offsets give the same plan, so a micro-batch that is run again reads the same records. Every
micro-batch reads at least one record, even if the configured limits are smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from polywire.errors import ErrorCode, Invalid, Missing
from polywire.spark.offsets import PartitionKey, Position, SourceOffset
from polywire.spark.options import EARLIEST_OFFSET, LATEST_OFFSET, ByOffset, ByTime, Edge, MissingTime, OffsetSpec
from polywire.tables.sealed import ReadRange

PACK_RECORDS: Final = 50_000  # a task with fewer records takes longer to start than to run (12 ms, at 4 M records/s)
RANGE_RECORDS_MAX: Final = 1_000_000  # larger ranges are split, so that one big partition uses all cores


@dataclass(frozen=True, slots=True)
class Extent:
    """Offsets [first_offset, next_offset) of one partition's records that the broker has synced.

    Attributes:
        time_offsets: by requested time (µs), the first offset at or after it. If there is none, ``next_offset``.
    """

    topic_id: str
    incarnation: int
    epoch: int
    first_offset: int
    next_offset: int
    time_offsets: Mapping[int, int]


Extents = Mapping[PartitionKey, Extent]


@dataclass(frozen=True, slots=True)
class Loss:
    """Records of a query that do not exist any more."""

    key: PartitionKey
    reason: str


def times_needed(*specs: OffsetSpec) -> tuple[int, ...]:
    """Return all times (µs) for which offsets must be looked up, ascending."""
    times: set[int] = set()
    for spec in specs:
        if isinstance(spec, ByTime):
            times.update(spec.times_us.values())
            times.update(() if spec.time_us is None else (spec.time_us,))
    return tuple(sorted(times))


def start_offset(extents: Extents, spec: OffsetSpec, missing_time: MissingTime) -> SourceOffset:
    """Return where reading begins.

    Raises Invalid unless the requested offsets or times cover exactly the partitions.
    """
    chosen = {
        key: _spec_offset(key, extent, spec, Edge.EARLIEST, missing_time, option="startingOffsets")
        for key, extent in extents.items()
    }
    _refuse_other_partitions(extents, spec, "startingOffsets")
    return SourceOffset({key: _position(extents[key], offset) for key, offset in chosen.items()}, initial=True)


def end_offset(extents: Extents, spec: OffsetSpec) -> SourceOffset:
    """Return where a batch read ends.

    Raises Invalid unless the requested offsets or times cover exactly the partitions.
    """
    chosen = {
        key: _spec_offset(key, extent, spec, Edge.LATEST, MissingTime.LATEST, option="endingOffsets")
        for key, extent in extents.items()
    }
    _refuse_other_partitions(extents, spec, "endingOffsets")
    return SourceOffset({key: _position(extents[key], offset) for key, offset in chosen.items()})


def latest_offset(extents: Extents) -> SourceOffset:
    """Return the current end of all partitions."""
    return SourceOffset({key: _position(extent, extent.next_offset) for key, extent in extents.items()})


def _position(extent: Extent, offset: int) -> Position:
    return Position(extent.topic_id, extent.incarnation, extent.epoch, offset)


def _spec_offset(
    key: PartitionKey, extent: Extent, spec: OffsetSpec, early: Edge, missing_time: MissingTime, *, option: str
) -> int:
    if spec is Edge.EARLIEST:
        return extent.first_offset
    if spec is Edge.LATEST:
        return extent.next_offset
    if isinstance(spec, ByOffset):
        return _explicit_offset(key, extent, spec, option)
    time_us = spec.of(key)
    name = f"{option}ByTimestamp"
    if time_us is None:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the option {name} must name every partition (times in ms) missing={_spell(key)}",
        )
    offset = extent.time_offsets[time_us]
    if offset == extent.next_offset and early is Edge.EARLIEST and missing_time is MissingTime.ERROR:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"no record is at or after the starting time (set startingOffsetsByTimestampStrategy=latest to begin at the end) "
            f"partition={_spell(key)} time_ms={time_us // 1000}",
        )
    return offset


def _explicit_offset(key: PartitionKey, extent: Extent, spec: ByOffset, option: str) -> int:
    offset = spec.offsets.get(key)
    if offset is None:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the option {option} must name every partition (use -1 for latest, -2 for earliest) missing={_spell(key)}",
        )
    if offset == EARLIEST_OFFSET:
        return extent.first_offset
    if offset == LATEST_OFFSET:
        return extent.next_offset
    return offset


def _refuse_other_partitions(extents: Extents, spec: OffsetSpec, option: str) -> None:
    named: Iterable[PartitionKey] = ()
    if isinstance(spec, ByOffset):
        named = spec.offsets
    elif isinstance(spec, ByTime):
        named, option = spec.times_us, f"{option}ByTimestamp"
    others = sorted(key for key in named if key not in extents)
    if others:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the option {option} names partitions that are not read partitions={','.join(map(_spell, others))}",
        )


def advance(
    start: SourceOffset, extents: Extents, *, records_max: int | None, ceiling: SourceOffset | None = None
) -> SourceOffset:
    """Return where the next micro-batch ends: at the end of all records, or after ``records_max`` of them.

    Each partition gets a share of ``records_max`` in proportion to its backlog. The result is never beyond ``ceiling``.
    Partitions that are new since ``start``, or re-created, begin at their first offset. Positions out of range move to
    the nearest offset that exists. Returns ``start`` itself if there is nothing new, because Spark treats any
    difference as new data.
    """
    begins, ends = {}, {}
    for key, extent in sorted(extents.items()):
        limit = _limit(key, extent, ceiling)
        known = _same_incarnation(start.positions.get(key), extent.incarnation)
        if limit is not None:
            begin = extent.first_offset if known is None else known.next_offset
            begins[key] = min(max(begin, extent.first_offset), extent.next_offset)
            ends[key] = max(limit, begins[key])
    if records_max is not None:
        ends = _share(begins, ends, records_max)
    positions = {
        key: replace(position, begin_offset=position.next_offset if start.initial else None)
        for key, position in start.positions.items()
    }
    changed = False
    for key, end in ends.items():
        known = _same_incarnation(start.positions.get(key), extents[key].incarnation)
        if end == (begins[key] if known is None else known.next_offset):
            continue  # unchanged, so it keeps the epoch in which it was observed
        changed = True
        begin_offset = begins[key] if known is None else known.next_offset if start.initial else None
        positions[key] = replace(_position(extents[key], end), begin_offset=begin_offset)
    return SourceOffset(positions) if changed else start


def _limit(key: PartitionKey, extent: Extent, ceiling: SourceOffset | None) -> int | None:
    """Return the highest end offset of a partition; None if the run must not read the partition."""
    if ceiling is None:
        return extent.next_offset
    target = _same_incarnation(ceiling.positions.get(key), extent.incarnation)
    return None if target is None else min(extent.next_offset, target.next_offset)


def _same_incarnation(position: Position | None, incarnation: int) -> Position | None:
    return position if position is not None and position.incarnation == incarnation else None


def _share(
    begins: Mapping[PartitionKey, int], ends: Mapping[PartitionKey, int], records_max: int
) -> dict[PartitionKey, int]:
    """Divide a limit of records among partitions, in proportion to their backlogs and in whole records.

    Kafka's Spark source does the same.
    """
    lags = {key: ends[key] - begins[key] for key in ends}
    total = sum(lags.values())
    if total <= records_max:
        return dict(ends)
    shares = {key: lag * records_max // total for key, lag in lags.items()}
    rest = records_max - sum(shares.values())
    for key in sorted(lags, key=lambda key: (-(lags[key] * records_max % total), key))[:rest]:
        shares[key] += 1
    return {key: begins[key] + shares[key] for key in ends}


def batch_ranges(start: SourceOffset, end: SourceOffset) -> list[ReadRange]:
    """Return the records between two offsets, by partition.

    The range of a query's first batch begins at ``Position.begin_offset`` of ``end``. When Spark repeats that batch, it
    requests the initial offset again, which may have changed.
    """
    ranges = []
    for key, position in sorted(end.positions.items()):
        known = _same_incarnation(start.positions.get(key), position.incarnation)
        if position.begin_offset is not None and (start.initial or known is None):
            begin = position.begin_offset
        elif end.initial or known is None:
            continue
        else:
            begin = known.next_offset
        if begin < position.next_offset:
            ranges.append(
                ReadRange(key.topic, key.partition, position.incarnation, position.epoch, begin, position.next_offset)
            )
    return ranges


def losses(ranges: Sequence[ReadRange], extents: Extents) -> list[Loss]:
    """Return the ranges, or parts of them, that can no longer be read."""
    found = []
    for read_range in ranges:
        key = PartitionKey(read_range.topic, read_range.partition)
        reason = _loss(read_range.incarnation, read_range.offset, read_range.offset_end, extents.get(key))
        if reason is not None:
            found.append(Loss(key, reason))
    return found


def positions_to_confirm(start: SourceOffset, extents: Extents) -> list[tuple[PartitionKey, Position]]:
    """Return the positions that were observed in an earlier leader epoch, that is, before the broker's last start.

    The broker may have lost records in a crash. It must confirm that it has the records before these positions.
    """
    return [
        (key, position)
        for key, position in sorted(start.positions.items())
        if key in extents and extents[key].incarnation == position.incarnation and extents[key].epoch != position.epoch
    ]


def position_losses(start: SourceOffset, extents: Extents) -> list[Loss]:
    """Return the positions at which a query cannot continue.

    Either the topic was deleted or re-created, or the next records were deleted.
    """
    found = []
    for key, position in sorted(start.positions.items()):
        reason = _loss(position.incarnation, position.next_offset, position.next_offset, extents.get(key))
        if reason is not None:
            found.append(Loss(key, reason))
    return found


def _loss(incarnation: int, offset: int, offset_end: int, extent: Extent | None) -> str | None:
    if extent is None:
        return "topic or partition was deleted"
    if extent.incarnation != incarnation:
        return "topic or partition was deleted and created again"
    if offset < extent.first_offset:
        return f"records were removed by retention offset={offset} first_offset={extent.first_offset}"
    if offset_end > extent.next_offset:
        return f"records were lost offset_end={offset_end} next_offset={extent.next_offset}"
    return None


def refuse_losses(found: Sequence[Loss]) -> None:
    """Raise Missing(OFFSET_OUT_OF_RANGE) if there are losses (failOnDataLoss=true)."""
    if found:
        first = found[0]
        raise Missing(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"records were lost before they were read (set failOnDataLoss=false to continue with the remaining "
            f"ones): {first.reason} partition={_spell(first.key)} partitions_affected={len(found)}",
        )


def clip(ranges: Sequence[ReadRange], extents: Extents) -> list[ReadRange]:
    """Return the parts of the ranges that still exist (failOnDataLoss=false)."""
    remaining = []
    for read_range in ranges:
        extent = extents.get(PartitionKey(read_range.topic, read_range.partition))
        if extent is None or extent.incarnation != read_range.incarnation:
            continue
        begin = max(read_range.offset, extent.first_offset)
        end = min(read_range.offset_end, extent.next_offset)
        if begin < end:
            remaining.append(replace(read_range, offset=begin, offset_end=end))
    return remaining


def tasks(
    ranges: Sequence[ReadRange], *, partitions_min: int | None = None, partition_records_max: int | None = None
) -> list[tuple[ReadRange, ...]]:
    """Split large ranges and combine small ones into tasks, in order.

    Args:
        ranges: the ranges of a batch.
        partitions_min: desired number of tasks. There are fewer if there are fewer records.
        partition_records_max: limit for the records of a task.
    """
    total = sum(read_range.record_count for read_range in ranges)
    if total == 0:
        return []
    piece_max = min(RANGE_RECORDS_MAX, partition_records_max or RANGE_RECORDS_MAX)
    pack_records = min(PACK_RECORDS, piece_max)
    if partitions_min is not None:
        piece_max = max(1, min(piece_max, total // partitions_min))
        pack_records = min(pack_records, piece_max)
    pieces = [piece for read_range in ranges for piece in _cut(read_range, piece_max)]
    packed: list[list[ReadRange]] = []
    room = 0
    for piece in pieces:
        if not packed or piece.record_count > room:
            packed.append([])
            room = pack_records
        packed[-1].append(piece)
        room = max(0, room - piece.record_count)
    return [tuple(pieces) for pieces in packed]


def _cut(read_range: ReadRange, records_max: int) -> list[ReadRange]:
    count = -(-read_range.record_count // records_max)
    cuts = [read_range.offset + read_range.record_count * number // count for number in range(count + 1)]
    return [replace(read_range, offset=cuts[n], offset_end=cuts[n + 1]) for n in range(count)]


def records_within(bytes_max: int, lags: Mapping[PartitionKey, tuple[int, float]]) -> int:
    """Return how many records have about ``bytes_max`` bytes, at least one.

    ``lags`` has, by partition, the number of records to read and the bytes per record. Each partition counts in
    proportion to its number of records.
    """
    total_bytes = sum(records * size for records, size in lags.values())
    total_records = sum(records for records, _ in lags.values())
    if total_bytes <= bytes_max:
        return max(1, total_records)
    return max(1, int(total_records * bytes_max / total_bytes))


def _spell(key: PartitionKey) -> str:
    return f"{key.topic}-{key.partition}"
