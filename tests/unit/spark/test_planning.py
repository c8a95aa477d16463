"""Planning of batches: ranges, tasks, and reports of lost records."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.errors import Invalid, Missing
from polywire.spark import planning
from polywire.spark.offsets import PartitionKey, SourceOffset, decode_offset, encode_offset
from polywire.spark.options import ByOffset, ByTime, Edge, MissingTime
from polywire.spark.planning import Extent, Extents
from polywire.tables.sealed import ReadRange

ID = "ab" * 16


def extent(first: int, after: int, *, life: int = 1, epoch: int = 1, times: dict[int, int] | None = None) -> Extent:
    return Extent(ID, life, epoch, first, after, times or {})


def some(*pairs: tuple[int, int]) -> dict[PartitionKey, Extent]:
    return {PartitionKey("t", n): extent(first, after) for n, (first, after) in enumerate(pairs)}


def begin(extents: Extents) -> SourceOffset:
    return planning.start_offset(extents, Edge.EARLIEST, MissingTime.ERROR)


def spans(ranges: list[ReadRange]) -> list[tuple[int, int, int]]:
    return [(wanted.partition, wanted.offset, wanted.offset_end) for wanted in ranges]


def through_json(offset: SourceOffset) -> SourceOffset:
    return decode_offset(encode_offset(offset))


def test_starting_offsets() -> None:
    extents = some((5, 10), (0, 3))
    assert [p.next_offset for p in begin(extents).positions.values()] == [5, 0]
    latest = planning.start_offset(extents, Edge.LATEST, MissingTime.ERROR)
    assert [p.next_offset for p in latest.positions.values()] == [10, 3]
    chosen = ByOffset({PartitionKey("t", 0): 7, PartitionKey("t", 1): -1})
    offset = planning.start_offset(extents, chosen, MissingTime.ERROR)
    assert [p.next_offset for p in offset.positions.values()] == [7, 3]
    assert offset.initial


def test_starting_times() -> None:
    extents = {PartitionKey("t", 0): extent(0, 9, times={50: 4}), PartitionKey("t", 1): extent(0, 9, times={50: 9})}
    place = ByTime(50, {})
    assert planning.times_needed(place, Edge.LATEST, ByTime(None, {PartitionKey("t", 0): 7})) == (7, 50)
    with pytest.raises(Invalid, match=r"no record is at or after the starting time.*t-1"):
        planning.start_offset(extents, place, MissingTime.ERROR)
    offset = planning.start_offset(extents, place, MissingTime.LATEST)
    assert [p.next_offset for p in offset.positions.values()] == [4, 9]
    end = planning.end_offset(extents, place)
    assert [p.next_offset for p in end.positions.values()] == [4, 9]


def test_starting_offsets_must_name_every_partition_and_no_other() -> None:
    extents = some((0, 1), (0, 1))
    with pytest.raises(Invalid, match=r"startingOffsets must name every partition.*missing=t-1"):
        planning.start_offset(extents, ByOffset({PartitionKey("t", 0): 0}), MissingTime.ERROR)
    with pytest.raises(Invalid, match="endingOffsets names partitions that are not read partitions=t-7"):
        planning.end_offset(extents, ByOffset({PartitionKey("t", n): 0 for n in (0, 1, 7)}))
    with pytest.raises(Invalid, match="startingOffsetsByTimestamp must name every partition"):
        planning.start_offset(extents, ByTime(None, {}), MissingTime.ERROR)


def test_a_batch_read_covers_start_to_end() -> None:
    extents = some((5, 10), (0, 3), (4, 4))
    ranges = planning.batch_ranges(begin(extents), planning.end_offset(extents, Edge.LATEST))
    assert spans(ranges) == [(0, 5, 10), (1, 0, 3)]


def test_without_new_records_the_offset_stays_the_same() -> None:
    extents = some((0, 10))
    end = planning.advance(begin(extents), extents, records_max=None)
    assert planning.advance(end, extents, records_max=5) is end
    empty = begin(some((3, 3)))
    assert planning.advance(empty, some((3, 3)), records_max=None) is empty


def test_the_limit_is_shared_by_lag() -> None:
    extents = some((0, 900), (0, 90), (0, 10))
    end = planning.advance(begin(extents), extents, records_max=100)
    assert [p.next_offset for p in end.positions.values()] == [90, 9, 1]
    one = planning.advance(begin(extents), extents, records_max=1)
    assert [p.next_offset for p in one.positions.values()] == [1, 0, 0]


def test_a_first_batch_run_again_covers_the_same_records() -> None:
    then = some((0, 10), (0, 4))
    begun = planning.start_offset(then, Edge.LATEST, MissingTime.ERROR)
    more = some((0, 15), (0, 4))
    end = through_json(planning.advance(begun, more, records_max=None))
    assert spans(planning.batch_ranges(begun, end)) == [(0, 10, 15)]
    # After a crash Spark requests the initial offset again; by then there are more records and a new partition.
    later = planning.start_offset(some((0, 30), (0, 9), (0, 5)), Edge.LATEST, MissingTime.ERROR)
    assert spans(planning.batch_ranges(later, end)) == [(0, 10, 15)]
    assert spans(planning.batch_ranges(end, planning.advance(end, some((0, 30), (0, 9)), records_max=None))) == [
        (0, 15, 30),
        (1, 4, 9),
    ]


def test_an_empty_first_batch_run_again_stays_empty() -> None:
    begun = planning.start_offset(some((0, 10)), Edge.LATEST, MissingTime.ERROR)
    later = planning.start_offset(some((0, 30)), Edge.EARLIEST, MissingTime.ERROR)
    assert planning.batch_ranges(later, through_json(begun)) == []


def test_a_new_partition_starts_at_its_first_record_even_when_run_again() -> None:
    extents = some((0, 10))
    first = planning.advance(begin(extents), extents, records_max=None)
    grown = some((0, 10), (2, 8))
    second = through_json(planning.advance(first, grown, records_max=4))
    assert spans(planning.batch_ranges(first, second)) == [(1, 2, 6)]
    third = planning.advance(second, grown, records_max=None)
    assert spans(planning.batch_ranges(second, third)) == [(1, 6, 8)]
    assert all(position.begin_offset is None for position in third.positions.values())


def test_a_re_created_partition_is_read_from_its_start() -> None:
    extents = some((0, 10))
    first = planning.advance(begin(extents), extents, records_max=None)
    again = {PartitionKey("t", 0): extent(0, 4, life=2)}
    assert [loss.reason for loss in planning.position_losses(first, again)] == [
        "topic or partition was deleted and created again"
    ]
    second = planning.advance(first, again, records_max=None)
    assert spans(planning.batch_ranges(first, second)) == [(0, 0, 4)]
    assert planning.batch_ranges(first, second)[0].incarnation == 2


def test_a_run_never_passes_its_target() -> None:
    extents = some((0, 10), (0, 4))
    ceiling = planning.latest_offset(extents)
    start = begin(extents)
    more = some((0, 100), (0, 100), (0, 100))
    end = planning.advance(start, more, records_max=None, ceiling=ceiling)
    assert spans(planning.batch_ranges(start, end)) == [(0, 0, 10), (1, 0, 4)]
    assert planning.advance(end, more, records_max=None, ceiling=ceiling) is end


def test_the_epoch_is_that_of_the_last_record_read() -> None:
    extents = some((0, 10), (0, 10))
    end = planning.advance(begin(extents), extents, records_max=None)
    restarted = {
        PartitionKey("t", 0): extent(0, 12, epoch=2),
        PartitionKey("t", 1): extent(0, 10, epoch=2),
    }
    assert [key.partition for key, _ in planning.positions_to_confirm(end, restarted)] == [0, 1]
    after = planning.advance(end, restarted, records_max=None)
    assert [position.epoch for position in after.positions.values()] == [2, 1]


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        ({}, "deleted"),
        ({PartitionKey("t", 0): extent(6, 10)}, "retention offset=5 first_offset=6"),
        ({PartitionKey("t", 0): extent(0, 4)}, "records were lost"),
        ({PartitionKey("t", 0): extent(0, 10, life=9)}, "created again"),
    ],
)
def test_lost_records_are_detected_and_refused(now: Extents, reason: str) -> None:
    start = begin(some((5, 10)))
    found = planning.position_losses(start, now)
    assert len(found) == 1
    with pytest.raises(Missing, match=f"failOnDataLoss=false.*{reason}"):
        planning.refuse_losses(found)
    ranges = planning.batch_ranges(start, planning.latest_offset(some((5, 10))))
    assert planning.losses(ranges, now)


def test_remaining_records_are_read_if_losses_are_allowed() -> None:
    ranges = [ReadRange("t", 0, 1, 1, 0, 10), ReadRange("t", 1, 1, 1, 0, 10), ReadRange("gone", 0, 1, 1, 0, 10)]
    assert spans(planning.clip(ranges, some((4, 8), (10, 12)))) == [(0, 4, 8)]
    start = begin(some((0, 10)))
    trimmed = planning.advance(start, some((6, 12)), records_max=None)
    assert spans(planning.clip(planning.batch_ranges(start, trimmed), some((6, 12)))) == [(0, 6, 12)]
    shrunk = planning.advance(planning.advance(start, some((0, 10)), records_max=None), some((0, 3)), records_max=None)
    assert [position.next_offset for position in shrunk.positions.values()] == [3]


def test_small_ranges_share_a_task_and_large_ones_are_split() -> None:
    small = [ReadRange("t", n, 1, 1, 0, 10) for n in range(5)]
    assert planning.tasks(small) == [tuple(small)]
    assert planning.tasks([]) == []
    big = planning.tasks([ReadRange("t", 0, 1, 1, 0, 2_500_000)])
    assert [(task[0].offset, task[0].offset_end) for task in big] == [
        (0, 833_333),
        (833_333, 1_666_666),
        (1_666_666, 2_500_000),
    ]


_ranges = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 3_000_000)), min_size=1, max_size=8).map(
    lambda pairs: [ReadRange("t", n, 1, 1, start, start + count) for n, (start, count) in enumerate(pairs)]
)


@given(_ranges, st.none() | st.integers(1, 40), st.none() | st.integers(10_000, 2_000_000))
def test_tasks_cover_every_record_once(ranges: list[ReadRange], least: int | None, most: int | None) -> None:
    cut = planning.tasks(ranges, partitions_min=least, partition_records_max=most)
    assert cut == planning.tasks(ranges, partitions_min=least, partition_records_max=most)
    pieces = [piece for task in cut for piece in task]
    joined: list[ReadRange] = []
    for piece in pieces:
        assert piece.record_count > 0
        if joined and joined[-1].partition == piece.partition:
            assert joined[-1].offset_end == piece.offset
            joined[-1] = replace(joined[-1], offset_end=piece.offset_end)
        else:
            joined.append(piece)
    assert joined == ranges
    if least is not None:
        assert len(cut) >= min(least, sum(wanted.record_count for wanted in ranges))
    if most is not None:
        assert max(sum(piece.record_count for piece in task) for task in cut) <= most


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), min_size=1, max_size=12),
    st.none() | st.integers(1, 30),
    st.booleans(),
)
def test_micro_batches_cover_every_record_once(growth: list[list[int]], limit: int | None, crash: bool) -> None:
    """Whatever arrives between batches, and wherever a batch is run again, each record is read exactly once."""
    ends: dict[PartitionKey, int] = {}
    seen: Counter[tuple[int, int]] = Counter()
    offset: SourceOffset | None = None
    for arrivals in [*growth, *([[]] * 200)]:
        for number, count in enumerate(arrivals):
            ends[PartitionKey("t", number)] = ends.get(PartitionKey("t", number), 0) + count
        extents = {key: extent(0, end) for key, end in ends.items()}
        start = begin(extents) if offset is None else offset
        end = through_json(planning.advance(start, extents, records_max=limit))
        ranges = planning.batch_ranges(begin(extents) if crash and start.initial else start, end)
        assert limit is None or sum(wanted.record_count for wanted in ranges) <= limit
        for wanted in ranges:
            seen.update((wanted.partition, at) for at in range(wanted.offset, wanted.offset_end))
        offset = end
    expected = {(key.partition, at) for key, end in ends.items() for at in range(end)}
    assert set(seen) == expected or limit is not None
    assert set(seen) <= expected
    assert not seen or max(seen.values()) == 1
    if limit is not None:
        assert len(seen) == min(len(expected), limit * (len(growth) + 200)) or len(seen) == len(expected)


def test_byte_limits_become_record_limits() -> None:
    lags = {PartitionKey("t", 0): (1000, 100.0), PartitionKey("t", 1): (1000, 300.0)}
    assert planning.records_within(40_000, lags) == 200
    assert planning.records_within(10**9, lags) == 2000
    assert planning.records_within(1, lags) == 1
