"""The index of a partition's tail, against lists and loops."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.log.partition.tail_index import TailIndex, spans_of

Entry = tuple[int, int, int, int, int, int]


def fill(steps: list[tuple[int, int, int]]) -> tuple[TailIndex, list[Entry]]:
    """Return an index and a list with the same entries; steps are (records, slot step, time step)."""
    tail, entries = TailIndex(), []
    offset = address = time_us = slot = position = 0
    for records, slot_step, time_step in steps:
        if slot_step:
            slot, position = slot + slot_step, 0
        length = 104 + 8 * records
        time_us += time_step
        entry = (offset, position, length, slot, address, time_us)
        tail.append(*entry)
        entries.append(entry)
        offset += records
        address += records * 110
        position += length + (32 if time_step else 0)
    return tail, entries


STEPS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1), st.integers(0, 2)), max_size=60)


@given(STEPS, st.integers(-1, 600))
def test_searches_match_a_list(steps: list[tuple[int, int, int]], key: int) -> None:
    tail, entries = fill(steps)
    assert len(tail) == len(entries)
    assert [tail.entry(index) for index in range(len(tail))] == entries
    assert tail.find_offset(key) == bisect_right([entry[0] for entry in entries], key) - 1
    assert tail.find_address(key * 100) == bisect_right([entry[4] for entry in entries], key * 100) - 1
    assert tail.find_time(key) == bisect_left([entry[5] for entry in entries], key)


@given(STEPS, st.integers(0, 400), st.integers(0, 2000), st.none() | st.integers(0, 400))
def test_take_returns_whole_batches_within_limits(
    steps: list[tuple[int, int, int]], offset: int, bytes_max: int, offset_end: int | None
) -> None:
    tail, entries = fill(steps)
    start, stop, size = tail.take(offset, bytes_max) if offset_end is None else tail.take(offset, bytes_max, offset_end)
    taken = entries[start:stop]
    assert size == sum(entry[2] for entry in taken)
    if not entries:
        assert taken == []
        return
    assert taken[0][0] <= offset
    assert size <= bytes_max or len(taken) == 1
    assert all(entry[0] < offset_end for entry in taken[1:]) if offset_end is not None else True
    if stop < len(entries):
        over = size + entries[stop][2] > bytes_max
        assert over or (offset_end is not None and entries[stop][0] >= offset_end)


@given(STEPS, st.data())
def test_tail_forgets_its_front(steps: list[tuple[int, int, int]], data: st.DataObject) -> None:
    tail, entries = fill(steps)
    while entries:
        if data.draw(st.booleans()):
            count = data.draw(st.integers(0, len(entries)))
            tail.drop_front(count)
        else:
            slot = data.draw(st.integers(0, entries[-1][3]))
            count = next((i for i, entry in enumerate(entries) if entry[3] != slot), len(entries))
            assert tail.drop_slot(slot) == count
        del entries[:count]
        assert [tail.entry(index) for index in range(len(tail))] == entries
        if not data.draw(st.booleans()):
            break
    tail.append(10**9, 1, 2, 3, 4, 5)
    assert tail.entry(len(entries)) == (10**9, 1, 2, 3, 4, 5)
    assert tail.nbytes() <= 40 * (8 * len(entries) + 80)


@given(STEPS, st.data())
def test_extents_join_neighbours_and_copies_are_their_bytes(
    steps: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    tail, entries = fill(steps)
    start = data.draw(st.integers(0, len(entries)))
    stop = data.draw(st.integers(start, len(entries)))
    slots = {slot: bytes((slot * 7 + i) % 251 for i in range(20_000)) for slot in {entry[3] for entry in entries}}
    wanted = b"".join(slots[entry[3]][entry[1] : entry[1] + entry[2]] for entry in entries[start:stop])
    extents = tail.extents(start, stop)
    assert b"".join(slots[slot][position : position + size] for slot, position, size in extents) == wanted
    assert all(first[0] != second[0] or first[1] + first[2] != second[1] for first, second in pairwise(extents))
    out = bytearray(len(wanted) + 3)
    assert tail.copy(start, stop, slots, out) == len(wanted)
    assert out == wanted + bytes(3)


def test_copying_more_than_fits_raises() -> None:
    tail, _ = fill([(1, 0, 0), (2, 0, 0)])
    with pytest.raises(IndexError):
        tail.copy(0, 2, {0: bytes(112 + 119)}, bytearray(1000))
    with pytest.raises(IndexError):
        tail.copy(0, 2, {0: bytes(1000)}, bytearray(112 + 119))
    with pytest.raises(KeyError):
        tail.copy(0, 2, {1: bytes(1000)}, bytearray(1000))
    for start, stop in ((-1, 1), (0, 3), (2, 1)):
        with pytest.raises(IndexError):
            tail.copy(start, stop, {0: bytes(1000)}, bytearray(1000))
        with pytest.raises(IndexError):
            tail.extents(start, stop)


def test_spans_are_those_of_the_requested_slots() -> None:
    tails = [
        fill([(1, 0, 1), (2, 0, 0), (3, 1, 0), (4, 0, 1), (5, 1, 0)]),
        fill([]),
        fill([(1, 3, 0), (1, 2, 4)]),
    ]
    for first, last, joined in ((0, 0, 9), (1, 1, 0), (0, 1, 3), (2, 3, 9), (5, 8, 9)):
        ends, *spans = spans_of([tail for tail, _ in tails], first, last, joined)
        expected = [
            [(entry[3], entry[1], entry[2]) for entry in entries if first <= entry[3] <= last or entry[3] == joined]
            for _, entries in tails
        ]
        assert list(zip(*spans, strict=True)) == [span for found in expected for span in found]
        assert list(ends) == list(accumulate(map(len, expected)))


@pytest.mark.parametrize("index", [-1, 1])
def test_entries_out_of_range_raise(index: int) -> None:
    tail, _ = fill([(1, 0, 0)])
    with pytest.raises(IndexError):
        tail.entry(index)
    with pytest.raises(IndexError):
        tail.drop_front(2)
