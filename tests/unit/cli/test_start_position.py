"""Values of ``--from``, and the offsets they mean in each partition."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from polywire.cli.start_position import FromOffset, FromTime, Span, Start, parse_start, spans
from polywire.client.base import PartitionBounds, WireClient
from polywire.client.consume import Bound
from polywire.errors import ErrorCode, Invalid, Missing


class TwoPartitions:
    """Replaces a client of a topic whose partitions hold offsets 10–19 and nothing."""

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        return [
            PartitionBounds(number, number + 1, 1, first, end) for number, first, end in ((0, 10, 20), (1, 0, 0))
        ]  # fmt: skip

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        return 15 if partition == 0 else 0


def found(start: Start, partition: int | None = None) -> list[Span]:
    return asyncio.run(spans(cast(WireClient, TwoPartitions()), "t", partition=partition, start=start))


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("earliest", Bound.EARLIEST),
        ("latest", Bound.LATEST),
        ("0", FromOffset(0)),
        ("120", FromOffset(120)),
        ("1970-01-01T00:00:02Z", FromTime(2_000_000)),
    ],
)
def test_valid_start_positions(text: str, start: Start) -> None:
    assert parse_start(text) == start


@pytest.mark.parametrize("text", ["", "first", "-1", "1.5", "٣", "2026-13-01"])
def test_invalid_start_positions(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_start(text)
    assert caught.value.message.startswith(
        "start position is invalid (use earliest, latest, an offset or an ISO 8601 time) option=--from"
    )


@pytest.mark.parametrize("text", [str(2**63), "1" * 5000])
def test_offsets_above_the_maximum_are_rejected(text: str) -> None:
    with pytest.raises(Invalid, match="use a number below 2\\^63\\) option=--from"):
        parse_start(text)


@pytest.mark.parametrize(
    ("start", "offsets"),
    [
        (Bound.EARLIEST, [10, 0]),
        (Bound.LATEST, [20, 0]),
        (FromOffset(3), [10, 3]),
        (FromOffset(12), [12, 12]),
        (FromTime(5), [15, 0]),
    ],
)
def test_offsets_of_a_start(start: Start, offsets: list[int]) -> None:
    assert [span.offset for span in found(start)] == offsets
    assert [span.next_offset for span in found(start)] == [20, 0]


def test_one_partition() -> None:
    assert found(Bound.EARLIEST, 0) == [Span(0, 10, 20)]
    with pytest.raises(Missing) as caught:
        found(Bound.EARLIEST, 2)
    assert caught.value.code is ErrorCode.PARTITION_MISSING
