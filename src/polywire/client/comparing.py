"""Compare topics of two brokers record by record, over any two protocols.

* Records with the same offset are compared. If a protocol has no offsets, records are compared in their order.
* Fields that one of the protocols does not expose are not compared, and are reported.
* The ends of the partitions are read once, the end of the copy first. So a copy that a link writes at the same time
  never seems to have more records than its source.
* Memory is bounded: of each side, one response is compared while the next one is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final

import msgspec

from polywire.choices import listed, missing
from polywire.client.base import Ability, WireClient
from polywire.client.copying import MILLISECOND_US, StoredFields
from polywire.client.failures import beyond
from polywire.client.listings import names_matching
from polywire.client.partition_reader import PartitionReader, reader_of, uses_offsets
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.matching import is_pattern
from polywire.records.columns import Record

RANGE: Final = 10_000  # offsets with a checksum of their own
RANGES_MAX: Final = 100  # different ranges that are reported for a partition
DIGEST_BYTES: Final = 16
SHOWN_CHARS: Final = 60  # of a value in a report
SHOWN_BEFORE: Final = 10  # characters before the first different one

EQUAL: Final = "equal"
PREFIX: Final = "prefix"
DIFFERENT: Final = "different"

OFFSET: Final = "offset"
FIELDS: Final = (OFFSET, "key", "value", "headers", "timestamp", "id", "event")

_Content = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """Differences that are accepted.

    Attributes:
        ignored: fields that are not compared.
        is_prefix_equal: the copy may end before the source, because a link still copies.
        may_continue: the copy may continue after the end of the source, because producers were moved to it.
        is_overlap_only: the copy may begin after the beginning of the source.
        is_compacted: each side may lack records of the other one between its first and last.
    """

    ignored: frozenset[str] = frozenset()
    is_prefix_equal: bool = False
    may_continue: bool = False
    is_overlap_only: bool = False
    is_compacted: bool = False


class Difference(msgspec.Struct, frozen=True):
    """The first difference in a partition.

    Attributes:
        offset: offset of the record or, without offsets, its number in the partition.
        field: the first field that differs; ``record`` if one side does not have the record.
        source: the value in the source, shortened.
        copy: the value in the copy, shortened.
    """

    offset: int
    field: str
    source: str
    copy: str


class Range(msgspec.Struct, frozen=True):
    """The records of ``RANGE`` offsets on both sides."""

    first: int
    source_records: int
    copy_records: int
    source_checksum: str
    copy_checksum: str


class Compared(msgspec.Struct):
    """The result for one partition.

    Attributes:
        source_records: number of records that were compared; copy_records likewise.
        source_first: first offset, source_last, copy_first and copy_last likewise; None if there is no record, or no
            offset.
        missing: offsets at the end of the source that the copy does not have yet; records, if there are no offsets.
        removed: offsets at the beginning of the copy that the source does not have any more.
        only_source: records that only the source has; only_copy likewise.
        result: equal, prefix or different.
        source_checksum: checksum over the compared fields of all records; copy_checksum likewise.
        difference: the first one.
        ranges: different ranges, at most ``RANGES_MAX``.
        different_ranges: their number.
        continued: offsets of the copy after the end of the source, which are not compared.
    """

    topic: str
    partition: int
    source_records: int = 0
    copy_records: int = 0
    source_first: int | None = None
    source_last: int | None = None
    copy_first: int | None = None
    copy_last: int | None = None
    missing: int = 0
    removed: int = 0
    only_source: int = 0
    only_copy: int = 0
    result: str = EQUAL
    source_checksum: str = ""
    copy_checksum: str = ""
    difference: Difference | None = None
    ranges: list[Range] = []
    different_ranges: int = 0
    continued: int = 0


class Comparable:
    """The fields that can be compared over two protocols, and how."""

    def __init__(self, source: WireClient, copy: WireClient, ignored: frozenset[str]) -> None:
        """Raises Invalid(INVALID_REQUEST) for an unknown field."""
        if unknown := sorted(ignored - set(FIELDS)):
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"no such field field={unknown[0]!r} known={','.join(sorted(FIELDS))}"
            )
        ours, theirs = StoredFields.by(source), StoredFields.by(copy)
        able = source.abilities & copy.abilities
        both_headers = (ours.headers or ours.plain_headers) and (theirs.headers or theirs.plain_headers)
        exposed = {
            OFFSET: uses_offsets(source) and uses_offsets(copy),
            "key": ours.keys and theirs.keys,
            "value": True,
            "headers": both_headers,
            # a copy has the append time of the source as the producer's timestamp, so the source may have either one
            "timestamp": (ours.times or ours.times_ms or Ability.OFFSET_BY_TIME in source.abilities)
            and (theirs.times or theirs.times_ms),
            "id": ours.ids and theirs.ids,
            "event": ours.events and theirs.events,
        }
        self.unexposed: Final = [name for name in FIELDS if not exposed[name] and name not in ("id", "event")]
        self._compared: Final = frozenset(name for name in FIELDS if exposed[name]) - ignored
        self.by_offset: Final = OFFSET in self._compared
        self._null_keys: Final = Ability.NULL_KEYS in able
        self._null_values: Final = Ability.NULL_VALUES in able
        self._kinds: Final = ours.headers and theirs.headers
        self._unit_us: Final = 1 if ours.times and theirs.times else MILLISECOND_US

    def content(self, record: Record) -> _Content:
        """Return the compared fields, in the order of ``FIELDS``; None for others."""
        compared = self._compared
        key = record.key if "key" in compared else None
        value = record.value if "value" in compared else None
        time_us: int | None = None
        if "timestamp" in compared:
            time_us = record.origin_time_us if record.origin_time_us is not None else record.append_time_us or None
            time_us = time_us if time_us is None else time_us // self._unit_us
        headers: object = None
        if "headers" in compared and record.headers:
            headers = [
                (header.key, header.value, header.key_kind, header.value_kind)
                if self._kinds
                else (header.key, header.value)
                for header in record.headers
            ]
        event = record.event if "event" in compared else None
        return (
            record.offset if self.by_offset else None,
            key or None if not self._null_keys else key,
            value or None if not self._null_values else value,
            headers,
            time_us,
            record.id if "id" in compared else None,
            event and (event.type, event.schema_version, event.aggregate_version, event.metadata),
        )


class _Stream:
    """The records of a partition up to an end. The next ones are read while the last ones are compared."""

    def __init__(self, reader: PartitionReader, partition: int, begin: int, end: int) -> None:
        self._reader: Final = reader
        self._partition: Final = partition
        self._location = begin
        self._end: Final = end
        self._next: asyncio.Task[list[Record]] | None = None
        self.records: Sequence[Record] = ()
        self.at = 0
        self.is_ended = begin >= end

    async def fill(self) -> None:
        """Wait for more records, if all were compared."""
        while self.at >= len(self.records) and not self.is_ended:
            if self._next is None and self._location >= self._end:
                self.is_ended = True
                return
            self.records, self.at = await (self._next or self._read()), 0
            self._next = asyncio.ensure_future(self._read()) if self._location < self._end else None

    async def _read(self) -> list[Record]:
        """Return the next records; there are none at the end, or in a gap."""
        records, following = await self._reader.read(self._partition, self._location)
        if following <= self._location:  # retention may have removed the remaining records
            following = beyond(self._location, await self._reader.first(self._partition), OFFSET)
        self._location = following
        return [record for record in records if record.offset < self._end]

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)


class _Side:
    """Counts and checksums of one side."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = None
        self.records = 0
        self.records_before = 0  # this range
        self._total: Final = blake2b(digest_size=DIGEST_BYTES)
        self._range = blake2b(digest_size=DIGEST_BYTES)

    def add(self, record: Record, content: bytes) -> None:
        self._range.update(content)
        self.records += 1
        self.first = record.offset if self.first is None else self.first
        self.last = record.offset

    def end_range(self) -> tuple[int, str]:
        """Return the number of records and the checksum of this range, and begin the next one."""
        count, checksum = self.records - self.records_before, self._range.hexdigest()
        self.records_before = self.records
        self._total.update(self._range.digest())
        self._range = blake2b(digest_size=DIGEST_BYTES)
        return count, checksum

    @property
    def checksum(self) -> str:
        """The checksum over all ranges."""
        return self._total.hexdigest()


class _Tally:
    """Compares records in order, and sums up ranges of them."""

    def __init__(self, found: Compared, comparable: Comparable, rules: Rules) -> None:
        self._found: Final = found
        self._comparable: Final = comparable
        self._rules: Final = rules
        self._encode: Final = msgspec.msgpack.Encoder().encode
        self._source: Final = _Side()
        self._copy: Final = _Side()
        self._range = 0
        self._count = 0

    def compare(self, source: _Stream, copy: _Stream) -> None:
        """Compare records until one side has to read more."""
        by_offset = self._comparable.by_offset
        while True:
            ours = source.records[source.at] if source.at < len(source.records) else None
            theirs = copy.records[copy.at] if copy.at < len(copy.records) else None
            if (ours is None and not source.is_ended) or (theirs is None and not copy.is_ended):
                return
            if ours is None and theirs is None:
                return
            if by_offset and ours is not None and theirs is not None and ours.offset != theirs.offset:
                ours, theirs = (ours, None) if ours.offset < theirs.offset else (None, theirs)
            self._add(ours, theirs)
            source.at += ours is not None
            copy.at += theirs is not None

    def _add(self, ours: Record | None, theirs: Record | None) -> None:
        """Compare two records with the same offset. One of them may be missing."""
        record = ours or theirs
        assert record is not None, "there is a record"
        number = record.offset if self._comparable.by_offset else self._count
        self._count += 1
        if number // RANGE != self._range:
            self._end_range()
            self._range = number // RANGE
        source = copy = None
        if ours is not None:
            source = self._comparable.content(ours)
            self._source.add(ours, self._encode(source))
        if theirs is not None:
            copy = self._comparable.content(theirs)
            self._copy.add(theirs, self._encode(copy))
        if source != copy:
            self._differ(number, source, copy)

    def _differ(self, number: int, source: _Content | None, copy: _Content | None) -> None:
        found, rules = self._found, self._rules
        if source is not None and copy is not None:
            found.difference = found.difference or Difference(number, *_different_field(source, copy))
            return
        if copy is None and rules.is_prefix_equal and not self._comparable.by_offset:
            found.missing += 1
            return
        found.only_source += copy is None
        found.only_copy += source is None
        if not rules.is_compacted:
            sides = ("none", "a record") if source is None else ("a record", "none")
            found.difference = found.difference or Difference(number, "record", *sides)

    def _end_range(self) -> None:
        """Add the range to the result."""
        (source_records, source), (copy_records, copy) = self._source.end_range(), self._copy.end_range()
        if source != copy:
            self._found.different_ranges += 1
            if len(self._found.ranges) < RANGES_MAX:
                first = self._range * RANGE
                self._found.ranges.append(Range(first, source_records, copy_records, source, copy))

    def end(self) -> None:
        """Complete the result."""
        self._end_range()
        found, source, copy = self._found, self._source, self._copy
        found.source_records, found.copy_records = source.records, copy.records
        found.source_checksum, found.copy_checksum = source.checksum, copy.checksum
        if self._comparable.by_offset:
            found.source_first, found.source_last = source.first, source.last
            found.copy_first, found.copy_last = copy.first, copy.last
        if found.difference is not None:
            found.result = DIFFERENT
        elif found.missing:
            found.result = PREFIX


def _different_field(ours: _Content, theirs: _Content) -> tuple[str, str, str]:
    """Return the first field that differs, and both values."""
    for name, one, other in zip(FIELDS, ours, theirs, strict=True):
        if one != other:
            return name, *_shown(_text(one), _text(other))
    raise AssertionError("the contents differ")


def _text(value: object) -> str:
    match value:
        case None:
            return "null"
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case list() | tuple():
            return ",".join(_text(entry) for entry in value)
        case _:
            return str(value)


def _shown(ours: str, theirs: str) -> tuple[str, str]:
    """Return the part of both texts that begins shortly before the first difference."""
    same = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(ours), len(theirs)) if same is None else same
    begin = 0 if max(len(ours), len(theirs)) <= SHOWN_CHARS else max(0, same - SHOWN_BEFORE)

    def part(text: str) -> str:
        cut = text[begin : begin + SHOWN_CHARS]
        return f"{'…' if begin else ''}{cut}{'…' if begin + SHOWN_CHARS < len(text) else ''}"

    return part(ours), part(theirs)


async def topics_matching(client: WireClient, patterns: Sequence[str], *, role: str) -> list[str]:
    """Return the names of existing topics that match names and patterns.

    Raises Missing for a name or pattern without a topic. If the protocol cannot list topics, only names are possible,
    and a missing topic is found when it is read.
    """
    try:
        known = [info.name for info in await client.topics()]
    except Invalid:
        if any(is_pattern(pattern) for pattern in patterns):
            raise
        return list(dict.fromkeys(patterns))
    found: dict[str, None] = {}
    for pattern in patterns:
        names = names_matching(pattern, known)
        if not names and is_pattern(pattern):
            raise Missing(
                ErrorCode.TOPIC_MISSING, f"no topic matches pattern={pattern!r} end={role} known={listed(known)}"
            )
        if not names:
            raise missing(ErrorCode.TOPIC_MISSING, "topic", pattern, known, facts=f"end={role}")
        found |= dict.fromkeys(names)
    return list(found)


@dataclass(frozen=True, slots=True)
class Pair:
    """A topic of the source and its copy."""

    source: str
    copy: str


class Comparison:
    """A comparison of topics over two connections."""

    def __init__(
        self, source: WireClient, copy: WireClient, rules: Rules, on_progress: Callable[[int], object] = lambda _: None
    ) -> None:
        """``on_progress`` is called with the number of compared records."""
        self.source: Final = source
        self.copy: Final = copy
        self._rules: Final = rules
        self._on_progress: Final = on_progress
        self.comparable: Final = Comparable(source, copy, rules.ignored)
        self._done = 0
        if rules.is_overlap_only and not self.comparable.by_offset:
            raise Invalid(ErrorCode.INVALID_REQUEST, "the overlap can be compared by offset only")

    async def run(self, pair: Pair, *, may_continue: bool = False) -> AsyncIterator[Compared]:
        """Compare a topic, and yield the result of each partition. Raises Missing(TOPIC_MISSING).

        With ``may_continue``, the copy may continue after the end of the source, because producers were moved to it.
        """
        rules = replace(self._rules, may_continue=may_continue)
        source, copy = reader_of(self.source, pair.source), reader_of(self.copy, pair.copy)
        count = await source.partition_count()
        try:
            copy_count = await copy.partition_count()
        except Missing:
            copy_count = 0
        # the copy first, because a link may add records in between
        copy_extents = await copy.extents(copy_count) if copy_count else []
        source_extents = await source.extents(count)
        for number in range(max(count, copy_count)):
            found = Compared(pair.source, number)
            if number >= min(count, copy_count):
                sides = ("a partition", "none") if number < count else ("none", "a partition")
                found.result, found.difference = DIFFERENT, Difference(0, "partition", *sides)
            else:
                await self._compare(found, rules, source, source_extents[number], copy, copy_extents[number])
            yield found

    async def _compare(
        self,
        found: Compared,
        rules: Rules,
        source: PartitionReader,
        source_extent: tuple[int, int],
        copy: PartitionReader,
        copy_extent: tuple[int, int],
    ) -> None:
        (first, end), (copy_first, copy_end) = source_extent, copy_extent
        if self.comparable.by_offset:
            found.removed = max(0, min(first, copy_end) - copy_first)
            copy_first = max(first, copy_first)
            if rules.is_overlap_only:
                first = copy_first
            if rules.is_prefix_equal and copy_end < end:
                found.missing = end - max(copy_end, first)
                end = max(copy_end, first)
            if rules.may_continue and copy_end > end:
                found.continued = copy_end - max(end, copy_first)
                copy_end = max(end, copy_first)
        ours = _Stream(source, found.partition, first, end)
        theirs = _Stream(copy, found.partition, copy_first, copy_end)
        tally = _Tally(found, self.comparable, rules)
        try:
            while not (ours.is_ended and theirs.is_ended):
                await asyncio.gather(ours.fill(), theirs.fill())
                before = ours.at + theirs.at
                tally.compare(ours, theirs)
                self._done += ours.at + theirs.at - before
                self._on_progress(self._done // 2)
        finally:
            await ours.close()
            await theirs.close()
        tally.end()
