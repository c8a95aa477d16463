"""Start positions in a topic: convert the values of ``--from`` and ``--to`` to an offset in each partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polywire.cli.output import parse_time_us
from polywire.client.base import PartitionBounds, TopicClient
from polywire.client.consume import Bound
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.matching import signed_64


@dataclass(frozen=True, slots=True)
class FromOffset:
    """Start at this offset, or at the first retained one."""

    offset: int


@dataclass(frozen=True, slots=True)
class FromTime:
    """Start at the first record stored at or after this time, in microseconds since 1970."""

    time_us: int


Start = Bound | FromOffset | FromTime


@dataclass(frozen=True, slots=True)
class Span:
    """The offsets to read from a partition.

    Attributes:
        next_offset: end of the partition when the span was created.
    """

    partition: int
    offset: int
    next_offset: int


def parse_start(text: str, *, option: str = "--from") -> Start:
    """Parse the value of an option that selects a start position. Raises Invalid(INVALID_REQUEST) for another value."""
    if text in (Bound.EARLIEST.value, Bound.LATEST.value):
        return Bound(text)
    if text.isascii() and text.isdigit():
        offset = signed_64(text)
        if offset is None:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"offset is too large (use a number below 2^63) option={option} got={text[:40]!r}",
            )
        return FromOffset(offset)
    try:
        return FromTime(parse_time_us(text))
    except ValueError as error:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"start position is invalid (use earliest, latest, an offset or an ISO 8601 time) option={option} got={text!r}",
        ) from error


async def spans(client: TopicClient, topic: str, *, partition: int | None, start: Start) -> list[Span]:
    """Return the span to read from each partition, or only from ``partition``.

    Raises Missing(PARTITION_MISSING), and the errors of the client.
    """
    bounds = [part for part in await client.bounds(topic) if partition in (None, part.partition)]
    if not bounds:
        raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition topic={topic} partition={partition}")
    return [Span(part.partition, await _offset(client, topic, part, start), part.next_offset) for part in bounds]


def nothing_to_read(topic: str, start: Start, found: Sequence[Span]) -> str | None:
    """Return why no partition has records at or after a start position; None if one has."""
    if any(span.offset < span.next_offset for span in found):
        return None
    end = max(span.next_offset for span in found)
    match start:
        case FromOffset(offset) if offset > end:
            return f"no records to read: every partition ends before offset={offset} topic={topic} next_offset={end}"
        case FromTime():
            return f"no records to read: none was stored at or after that time topic={topic}"
        case _:
            return f"no records to read topic={topic} next_offset={end}"


async def _offset(client: TopicClient, topic: str, part: PartitionBounds, start: Start) -> int:
    match start:
        case Bound.EARLIEST:
            return part.first_offset
        case Bound.LATEST:
            return part.next_offset
        case FromOffset(offset):
            return max(offset, part.first_offset)
        case FromTime(time_us):
            return await client.offset_at(topic, part.partition, time_us)
