"""What may go, decided on numbers alone."""

from __future__ import annotations

import pytest

from polywire.log.retention import (
    Extent,
    Living,
    blobs_to_merge,
    blobs_with_dropped,
    dead_blobs,
    first_offset_to_keep,
    half_dead_blobs,
)
from polywire.log.segment import RUN, SegmentInfo

EXTENTS = [Extent(0, 10, 100, 1000), Extent(10, 20, 100, 2000), Extent(20, 30, 100, 3000)]


@pytest.mark.parametrize(
    ("age_us_max", "bytes_max", "now_us", "offset"),
    [
        (None, None, 10**9, 0),
        (500, None, 1400, 0),
        (500, None, 1500, 0),
        (500, None, 1501, 10),
        (500, None, 2501, 20),
        (500, None, 10**9, 30),
        (None, 300, 0, 0),
        (None, 299, 0, 10),
        (None, 200, 0, 10),
        (None, 100, 0, 20),
        (None, 0, 0, 20),
        (500, 200, 2501, 20),
        (500, 100, 1501, 20),
    ],
)
def test_limits_by_age_and_bytes(age_us_max: int | None, bytes_max: int | None, now_us: int, offset: int) -> None:
    found = first_offset_to_keep(EXTENTS, age_us_max=age_us_max, bytes_max=bytes_max, now_us=now_us)
    assert found == offset


def test_an_empty_partition_has_nothing_to_keep() -> None:
    assert first_offset_to_keep([], age_us_max=1, bytes_max=1, now_us=1) is None


def blob(name: str, *runs: tuple[int, int, int], token: bytes = b"") -> SegmentInfo:
    """A blob of (partition, next offset, bytes) runs."""
    position, table = 0, b""
    for partition, next_offset, size in runs:
        table += RUN.pack(partition, token, position, size, 0, next_offset, *[0] * 9)
        position += size
    return SegmentInfo(name, position + 500, position, table, b"", position, 0)


LIVING = Living({1: 0, 2: 50, 3: 100}, frozenset({b"t" * 16}))
KIB = 1024


def test_blobs_die_with_their_last_run() -> None:
    segments = [
        blob("alive", (1, 10, 100)),
        blob("trimmed", (2, 50, 100)),
        blob("half trimmed", (2, 51, 100)),
        blob("dropped", (9, 10, 100)),
        blob("mixed", (1, 10, 1), (9, 10, 100)),
        blob("staged", (1, 0, 100), token=b"t" * 16),
        blob("expired", (1, 0, 100), token=b"x" * 16),
    ]
    assert dead_blobs(segments, LIVING) == ["trimmed", "dropped", "expired"]


def test_half_dead_blobs_are_rewritten() -> None:
    segments = [
        blob("alive", (1, 10, 100)),
        blob("half", (1, 10, 100), (9, 1, 100)),
        blob("less", (1, 10, 101), (9, 1, 100)),
        blob("more", (1, 10, 10), (2, 50, 50), (9, 1, 10)),
        blob("dead", (9, 1, 100)),
    ]
    assert half_dead_blobs(segments, LIVING) == ["half", "more"]


def test_deleted_data_is_found_however_little() -> None:
    segments = [blob("a", (1, 10, 1000), (9, 1, 1)), blob("b", (2, 50, 10), (1, 1, 10)), blob("c", (9, 1, 100))]
    assert blobs_with_dropped(segments, LIVING) == ["a"]


def test_small_neighbours_are_merged() -> None:
    small = [blob(f"s{number}", (1, 10, 100 * KIB)) for number in range(5)]
    large = blob("large", (1, 10, 20_000 * KIB))
    dead = blob("dead", (9, 10, 20_000 * KIB))
    names = [info.name for info in small]
    assert blobs_to_merge(small, LIVING) == [names]
    assert blobs_to_merge(small[:3], LIVING) == []
    assert blobs_to_merge([*small, large, *small], LIVING) == [names, names]
    assert blobs_to_merge([*small[:2], dead, *small[2:]], LIVING) == [names]
    assert blobs_to_merge([*small[:2], large, *small[2:]], LIVING) == []


def test_merged_blobs_stay_below_a_slot() -> None:
    segments = [blob(f"s{number}", (1, 10, 10_000 * KIB)) for number in range(14)]
    groups = blobs_to_merge(segments, LIVING)
    assert [len(group) for group in groups] == [6, 6]
