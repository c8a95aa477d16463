"""Derive from a query's filters which topics, partitions, offsets and times it needs (option pushFilters).

Only records that the filters reject are skipped. Spark applies the filters again to every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from polywire.spark.offsets import PartitionKey
from polywire.spark.planning import Extents, ReadRange

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers ``[begin, end)``. None means unbounded."""

    begin: int | None = None
    end: int | None = None

    def within(self, begin: int | None, end: int | None) -> Span:
        """Return the intersection."""
        return Span(
            begin if self.begin is None else self.begin if begin is None else max(self.begin, begin),
            end if self.end is None else self.end if end is None else min(self.end, end),
        )


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """Which records the filters can accept. Times are in µs. None means unrestricted."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    offsets: Span = field(default_factory=Span)
    times_us: Span = field(default_factory=Span)

    def times(self) -> tuple[int, ...]:
        """Times (µs) whose offsets must be looked up."""
        return tuple(sorted({time for time in (self.times_us.begin, self.times_us.end) if time is not None}))


def pushed_filters(filters: Iterable[Filter]) -> PushedFilters:
    """Combine the filters. Filters on other columns are ignored."""
    found = PushedFilters()
    for wanted in filters:
        column = getattr(wanted, "attribute", ())
        if column == ("topic",):
            found = replace(found, topics=_both(found.topics, _named(wanted)))
        elif column == ("partition",):
            found = replace(found, partitions=_both(found.partitions, _named(wanted)))
        elif column == ("offset",):
            found = replace(found, offsets=found.offsets.within(*_ends(wanted, _whole)))
        elif column == ("timestamp",):
            found = replace(found, times_us=found.times_us.within(*_ends(wanted, _micros)))
    return found


def prune(ranges: Sequence[ReadRange], filters: PushedFilters, extents: Extents) -> list[ReadRange]:
    """Return the parts of the ranges that the filters can accept.

    ``extents`` must have the offsets of ``filters.times``.
    """
    kept = []
    for wanted in ranges:
        if filters.topics is not None and wanted.topic not in filters.topics:
            continue
        if filters.partitions is not None and wanted.partition not in filters.partitions:
            continue
        offsets = extents[PartitionKey(wanted.topic, wanted.partition)].time_offsets
        span = filters.offsets.within(wanted.offset, wanted.offset_end)
        span = span.within(_found(offsets, filters.times_us.begin), _found(offsets, filters.times_us.end))
        if span.begin is not None and span.end is not None and span.begin < span.end:
            kept.append(replace(wanted, offset=span.begin, offset_end=span.end))
    return kept


def _found(offsets: Mapping[int, int], time_us: int | None) -> int | None:
    return None if time_us is None else offsets[time_us]


def _named(wanted: Filter) -> frozenset[Any] | None:
    match wanted:
        case EqualTo(value=value) | EqualNullSafe(value=value):
            return frozenset([value])
        case In(value=values):
            return frozenset(values)
        case _:
            return None


def _both(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _ends(wanted: Filter, number_of: Callable[[object], int | None]) -> tuple[int | None, int | None]:
    """Return (first number that the filter accepts, first number beyond the accepted ones). None means unbounded."""
    number = number_of(getattr(wanted, "value", None))
    if number is None:
        return None, None
    match wanted:
        case EqualTo() | EqualNullSafe():
            return number, number + 1
        case GreaterThan():
            return number + 1, None
        case GreaterThanOrEqual():
            return number, None
        case LessThan():
            return None, number
        case LessThanOrEqual():
            return None, number + 1
        case _:
            return None, None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _micros(value: object) -> int | None:
    """Return microseconds since 1970.

    Return None for a time without a time zone, because the column has no such times.
    """
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // _MICROSECOND
