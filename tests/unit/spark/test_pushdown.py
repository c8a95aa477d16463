"""Pushed-down filters on the positions of records."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from polywire.spark.offsets import PartitionKey
from polywire.spark.planning import Extent, ReadRange
from polywire.spark.readers import PushedFilters, Span, prune, pushed_filters

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOON_US = 1_767_268_800_000_000
OFFSET, TIME, TOPIC, PARTITION = ("offset",), ("timestamp",), ("topic",), ("partition",)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([EqualTo(OFFSET, 5)], PushedFilters(offsets=Span(5, 6))),
        ([GreaterThan(OFFSET, 5), LessThanOrEqual(OFFSET, 9)], PushedFilters(offsets=Span(6, 10))),
        (
            [GreaterThanOrEqual(OFFSET, 5), GreaterThan(OFFSET, 7), LessThan(OFFSET, 9)],
            PushedFilters(offsets=Span(8, 9)),
        ),
        ([GreaterThanOrEqual(TIME, NOON)], PushedFilters(times_us=Span(NOON_US, None))),
        ([LessThan(TIME, NOON)], PushedFilters(times_us=Span(None, NOON_US))),
        ([In(PARTITION, (1, 2)), In(PARTITION, (2, 3))], PushedFilters(partitions=frozenset([2]))),
        ([EqualTo(TOPIC, "a"), IsNotNull(TOPIC)], PushedFilters(topics=frozenset(["a"]))),
        # Filters that do not restrict positions, or compare with an unsuitable value.
        ([Not(EqualTo(OFFSET, 5)), EqualTo(("key",), b"k"), In(OFFSET, (1, 2))], PushedFilters()),
        ([GreaterThan(TIME, NOON.replace(tzinfo=None)), EqualTo(OFFSET, "5"), LessThan(PARTITION, 3)], PushedFilters()),
    ],
)
def test_filters_become_position_limits(filters: list[Filter], expected: PushedFilters) -> None:
    assert pushed_filters(filters) == expected


def test_ranges_are_restricted_by_filters() -> None:
    ranges = [ReadRange("a", 0, 1, 1, 10, 50), ReadRange("a", 1, 2, 1, 0, 5), ReadRange("b", 0, 3, 1, 0, 100)]
    times = {100: 20, 200: 40}
    extents = {PartitionKey(r.topic, r.partition): Extent("", r.incarnation, 1, 0, 100, times) for r in ranges}

    def left(filters: PushedFilters) -> list[tuple[str, int, int, int]]:
        return [(r.topic, r.partition, r.offset, r.offset_end) for r in prune(ranges, filters, extents)]

    assert left(PushedFilters()) == [("a", 0, 10, 50), ("a", 1, 0, 5), ("b", 0, 0, 100)]
    assert left(PushedFilters(topics=frozenset(["a"]), partitions=frozenset([1]))) == [("a", 1, 0, 5)]
    assert left(PushedFilters(offsets=Span(4, 20))) == [("a", 0, 10, 20), ("a", 1, 4, 5), ("b", 0, 4, 20)]
    assert left(PushedFilters(times_us=Span(100, 200))) == [("a", 0, 20, 40), ("b", 0, 20, 40)]
    assert left(PushedFilters(offsets=Span(30, 20))) == []
