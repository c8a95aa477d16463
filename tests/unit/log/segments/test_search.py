"""Searches over batch headers and index entries, against lists and loops."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.log.segments.format import ENTRY, RUN
from polywire.log.segments.search import (
    BY_ADDRESS,
    BY_OFFSET,
    BY_POSITION,
    BY_TIME,
    find_entry,
    find_run,
    scan_read,
    scan_to,
    scan_to_offset,
    split_batches,
)
from tests.unit.log.batches import Slot


def chunk_of(count: int) -> tuple[bytes, Slot]:
    slot = Slot(7)
    for number in range(count):
        slot.append(7, [b"v" * (number % 50)] * (number % 3 + 1), time_us=number // 2 * 10)
    return slot.partitions[7].content, slot


def test_scans_stop_where_a_loop_stops() -> None:
    chunk, slot = chunk_of(20)
    places, at = [], 0
    for batch in slot.partitions[7].batches:
        places.append((at, at + len(batch.content), batch))
        at += len(batch.content)
    for key in range(-1, 60):
        wanted = next((start for start, _, batch in places if batch.next_offset > key), len(chunk))
        assert scan_to(chunk, 0, BY_OFFSET, key) == wanted == scan_to_offset(chunk, key)
    for key in range(-1, 4000, 9):
        assert scan_to(chunk, 0, BY_POSITION, key) == next((s for s, stop, _ in places if stop > key), len(chunk))
        wanted = next((start for start, _, batch in places if batch.next_address > key), len(chunk))
        assert scan_to(chunk, 0, BY_ADDRESS, key) == wanted
        wanted = next((start for start, _, batch in places if batch.time_us > key), len(chunk))
        assert scan_to(chunk, 0, BY_TIME, key) == wanted
    assert scan_to(chunk, places[5][0], BY_OFFSET, 0) == places[5][0]


def test_scan_read_returns_whole_batches() -> None:
    chunk, slot = chunk_of(20)
    batches = slot.partitions[7].batches
    for offset in range(batches[-1].next_offset):
        for bytes_max, offset_end in ((0, 1000), (700, 1000), (10**6, 1000), (10**6, offset + 4)):
            start, stop, next_offset = scan_read(chunk, offset, bytes_max, offset_end)
            first = next(i for i, batch in enumerate(batches) if batch.next_offset > offset)
            last = first + 1
            size = len(batches[first].content)
            while (
                last < len(batches)
                and size + len(batches[last].content) <= bytes_max
                and batches[last].offset < offset_end
            ):
                size += len(batches[last].content)
                last += 1
            assert chunk[start:stop] == b"".join(batch.content for batch in batches[first:last])
            assert next_offset == batches[last - 1].next_offset
    end = batches[-1].next_offset
    assert scan_read(chunk, end, 100) == (len(chunk), len(chunk), end)


def test_broken_chunks_are_detected() -> None:
    chunk, _ = chunk_of(4)
    sizes = list(split_batches(chunk)[1])
    for broken in (b"\0" + chunk[1:], chunk[: sizes[0] - 8], chunk[:100]):
        assert scan_to(broken, 0, BY_OFFSET, 0) == -1
        assert scan_read(broken, 0, 1000)[0] == -1
        assert len(split_batches(broken)[0]) == 0
    torn = chunk[:-1]
    assert scan_to(torn, 0, BY_OFFSET, 10**6) == -1
    assert scan_read(torn, 0, 10**6)[0] == -1
    assert list(split_batches(torn)[1]) == sizes[:-1]
    endless = chunk[:4] + bytes(4) + chunk[8:]
    assert scan_to(endless, 0, BY_OFFSET, 10**6) == -1
    assert scan_to(chunk, -8, BY_OFFSET, 0) == -1


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 4), max_size=30), st.integers(-1, 300), st.data())
def test_find_entry_is_a_bisect(steps: list[tuple[int, int, int, int]], key: int, data: st.DataObject) -> None:
    rows, row = [], (0, 0, 0, 0)
    for step in steps:
        row = (row[0] + step[0], row[1] + step[1], row[2] + step[2], row[3] + step[3])
        rows.append(row)
    table = b"".join(ENTRY.pack(*entry) for entry in rows)
    start = data.draw(st.integers(0, len(rows)))
    count = data.draw(st.integers(0, len(rows) - start))
    for by in (BY_OFFSET, BY_POSITION, BY_ADDRESS, BY_TIME):
        column = [entry[by] for entry in rows[start : start + count]]
        assert find_entry(table, start, count, by, key) == bisect_right(column, key) - 1


def test_find_entry_checks_its_range() -> None:
    table = bytes(64)
    for start, count, by in ((0, 3, 0), (-1, 1, 0), (2, 1, 0), (0, -1, 0), (0, 1, 4), (0, 1, -1)):
        with pytest.raises(IndexError):
            find_entry(table, start, count, by, 0)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(0, 2**64 - 1))
def test_find_run_is_a_bisect(partitions: list[int], key: int) -> None:
    partitions.sort()
    table = b"".join(RUN.pack(partition, bytes(16), *[0] * 13) for partition in partitions)
    for wanted in (key, *partitions):
        assert find_run(table, wanted) == bisect_left(partitions, wanted)
