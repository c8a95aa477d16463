"""Where to begin in a topic: what ``--from`` and ``--to`` take, and the offsets it means in each partition.

Promises: a start that cannot be meant is refused before anything is read. Must not know: printing, any wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polywire.cli.record_lines import parse_time_us
from polywire.client.base import PartitionBounds, TopicClient
from polywire.client.consume import Bound
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.matching import signed_64


@dataclass(frozen=True, slots=True)
class FromOffset:
    """Begin at this offset, or at the first one that is left."""

    offset: int


@dataclass(frozen=True, slots=True)
class FromTime:
    """Begin at the first record stored at or after this instant, microseconds since 1970."""

    time_us: int


Start = Bound | FromOffset | FromTime


@dataclass(frozen=True, slots=True)
class Span:
    """What to read of a partition; ``next_offset`` is its end as it was when asked."""

    partition: int
    offset: int
    next_offset: int


def parse_start(text: str, *, option: str = "--from") -> Start:
    """What an option that says where to begin means. Raises Invalid(INVALID_REQUEST)."""
    if text in (Bound.EARLIEST.value, Bound.LATEST.value):
        return Bound(text)
    if text.isascii() and text.isdigit():
        offset = signed_64(text)
        if offset is None:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"{option} takes an offset below 2^63 got={text[:40]!r}")
        return FromOffset(offset)
    try:
        return FromTime(parse_time_us(text))
    except ValueError as error:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"{option} takes earliest, latest, an offset or an ISO 8601 time got={text!r}"
        ) from error


async def spans(client: TopicClient, topic: str, *, partition: int | None, start: Start) -> list[Span]:
    """What to read of every partition, or of the one asked for. Raises Missing(PARTITION_MISSING), and what the client raises."""
    bounds = [part for part in await client.bounds(topic) if partition in (None, part.partition)]
    if not bounds:
        raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition topic={topic} partition={partition}")
    return [Span(part.partition, await _offset(client, topic, part, start), part.next_offset) for part in bounds]


def nothing_to_read(topic: str, start: Start, found: Sequence[Span]) -> str | None:
    """Why no partition has anything to read from this start on; None where one has."""
    if any(span.offset < span.next_offset for span in found):
        return None
    end = max(span.next_offset for span in found)
    match start:
        case FromOffset(offset) if offset > end:
            return f"nothing to read, every partition ends before offset={offset} topic={topic} next_offset={end}"
        case FromTime():
            return f"nothing to read, no record was stored at that time or later topic={topic}"
        case _:
            return f"nothing to read topic={topic} next_offset={end}"


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
