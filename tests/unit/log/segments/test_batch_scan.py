"""Batch survey, merge planning and copying, against plain loops."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.log.segments.batch_scan import (
    INDEX_STRIDE_BYTES,
    RUN_ENTRIES,
    RUN_EPOCH,
    RUN_FIRST_OFFSET,
    RUN_LAST_ENTRY,
    RUN_NEXT_OFFSET,
    RUN_PARTITION,
    RUN_POSITION,
    RUN_RECORDS,
    RUN_STATE_COUNT,
    copy_batches,
    next_merge,
    survey,
    verify,
)
from polywire.log.segments.format import ENTRY
from polywire.records.batch import stamp, stamp_producer
from tests.unit.log.batches import Slot, make_batch


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 10)), max_size=30), st.integers(1, 40), st.integers(0, 5))
def test_copies_equal_a_join_in_chunks(places: list[tuple[int, int]], chunk_bytes: int, begin: int) -> None:
    base = bytes(range(100))
    positions = array("q", (position for position, _ in places))
    lengths = array("q", (length for _, length in places))
    begin = min(begin, len(places))
    cursor = array("q", (begin, 0, 0))
    content = b""
    while cursor[0] < len(places):
        out = bytearray(chunk_bytes)
        copy_batches(base, positions, lengths, len(places), out, cursor)
        assert cursor[2] == chunk_bytes or cursor[0] == len(places)
        content += out[: cursor[2]]
        cursor[2] = 0
    assert content == b"".join(base[position : position + length] for position, length in places[begin:])


@pytest.mark.parametrize(
    ("positions", "lengths", "cursor", "stop"),
    [
        ([95], [6], [0, 0, 0], 1),
        ([-1], [6], [0, 0, 0], 1),
        ([5], [0], [0, 0, 0], 1),
        ([5], [6], [0, 6, 0], 1),
        ([5], [6], [0, 0, 0], 2),
        ([5], [2**63 - 1], [0, 0, 0], 1),
        ([5], [6], [-1, 0, 0], 1),
        ([5], [6], [0, 0, -1], 1),
        ([5], [6], [0, 0], 1),
    ],
)
def test_copying_pieces_out_of_range_raises(
    positions: list[int], lengths: list[int], cursor: list[int], stop: int
) -> None:
    with pytest.raises(IndexError):
        copy_batches(bytes(100), array("q", positions), array("q", lengths), stop, bytearray(50), array("q", cursor))


def test_large_copies() -> None:
    base = bytes(i * 7 % 256 for i in range(1 << 16)) * 32
    positions = array("q", range(0, 1 << 20, 1 << 12))
    lengths = array("q", [(1 << 12) - 8] * len(positions))
    out, cursor = bytearray(1 << 21), array("q", (0, 0, 5))
    copy_batches(base, positions, lengths, len(positions), out, cursor)
    wanted = b"".join(base[position : position + (1 << 12) - 8] for position in positions)
    assert list(cursor) == [len(positions), 0, 5 + len(wanted)]
    assert out[5 : cursor[2]] == wanted


def test_only_verified_bodies_count_towards_the_limit() -> None:
    slot = Slot(3)
    for _ in range(10):
        slot.append(3, [bytes(1000)], time_us=1)
    partition = slot.partitions[3]
    size = partition.lengths[0]
    arguments = (slot.base, partition.positions, partition.lengths)
    assert verify(*arguments, 0, 10, 2 * size + 1, size + 1) == 3
    assert verify(*arguments, 0, 10, 1, size) == 10, "a header takes no time"
    slot.base[partition.positions[7] + size - 1] ^= 1
    assert verify(*arguments, 5, 10, 10 * size, size + 1) == -1 - 7
    assert verify(*arguments, 5, 10, 10 * size, size) == 10
    slot.base[partition.positions[8] + 20] ^= 1
    assert verify(*arguments, 5, 10, 10 * size, size) == -1 - 8


def new_state(partition: int) -> array[int]:
    state = array("q", bytes(8 * RUN_STATE_COUNT))
    state[RUN_LAST_ENTRY] = -INDEX_STRIDE_BYTES
    state[RUN_FIRST_OFFSET] = state[RUN_EPOCH] = -1
    state[RUN_PARTITION] = partition
    return state


def test_survey_writes_headers_and_an_entry_per_stride() -> None:
    slot = Slot(3)
    for number in range(60):
        slot.append(3, [bytes(1000 + number)] * 5, time_us=number * 10)
    partition = slot.partitions[3]
    state, entries = new_state(3), bytearray(32 * 20)
    arguments = (slot.base, partition.positions, partition.lengths)
    assert survey(*arguments, 0, 60, state, entries) == 0  # the first epoch is reported
    state[RUN_EPOCH] = 1
    assert survey(*arguments, 0, 25, state, entries) == 25
    assert survey(*arguments, 25, 60, state, entries) == 60
    assert (state[RUN_FIRST_OFFSET], state[RUN_NEXT_OFFSET], state[RUN_RECORDS]) == (0, 300, 300)
    assert state[RUN_POSITION] == len(partition.content)
    wanted, position, last = [], 0, -INDEX_STRIDE_BYTES
    for batch in partition.batches:
        if position - last >= INDEX_STRIDE_BYTES:
            wanted.append((batch.offset, position, batch.address, batch.time_us))
            last = position
        position += len(batch.content)
    assert list(ENTRY.iter_unpack(entries[: state[RUN_ENTRIES] * 32])) == wanted
    assert len(wanted) > 3


def test_survey_detects_invalid_batches() -> None:
    slot = Slot(3, 4)
    slot.append(3, [b"a"], time_us=1)
    slot.append(4, [b"b"], time_us=1)
    slot.append(3, [b"c"], time_us=2, epoch=2)
    positions, lengths = slot.partitions[3].positions, slot.partitions[3].lengths
    state = new_state(3)
    state[RUN_EPOCH] = 1
    assert survey(slot.base, positions, lengths, 0, 2, state, bytearray(320)) == 1  # another epoch
    state[RUN_EPOCH] = 2
    state[RUN_NEXT_OFFSET] = 2  # the batch's offset is 1
    assert survey(slot.base, positions, lengths, 1, 2, state, bytearray(320)) == -2
    other = slot.partitions[4]
    assert survey(slot.base, other.positions, other.lengths, 0, 1, new_state(3), bytearray(320)) == -1
    wrong = array("q", (lengths[0] - 8,))
    assert survey(slot.base, positions, wrong, 0, 1, new_state(3), bytearray(320)) == -1
    assert survey(slot.base, array("q", (8,)), lengths, 0, 1, new_state(3), bytearray(320)) == -1
    assert survey(slot.base, array("q", (len(slot.base) - 8,)), lengths, 0, 1, new_state(3), bytearray(320)) == -1
    with pytest.raises(IndexError):
        survey(slot.base, positions, lengths, 0, 3, new_state(3), bytearray(320))
    with pytest.raises(IndexError):
        survey(slot.base, positions, lengths, 0, 2, new_state(3), bytearray(31))


def merges(slot: Slot, number: int, bytes_max: int = 1 << 18) -> list[tuple[int, int]]:
    partition, found, at = slot.partitions[number], [], 0
    while at < len(partition.positions):
        start, at = next_merge(
            slot.base, partition.positions, partition.lengths, at, len(partition.positions), bytes_max
        )
        if start < at:
            found.append((start, at))
    return found


def test_merges_do_not_mix_times_or_epochs() -> None:
    slot = Slot(3)
    for time_us, epoch in ((1, 1), (2, 1), (2, 1), (2, 1), (3, 1), (4, 1), (4, 2), (4, 2), (5, 2)):
        slot.append(3, [b"v"], time_us=time_us, epoch=epoch)
    assert merges(slot, 3) == [(1, 4), (6, 8)]


def test_merges_take_small_batches_and_stay_small() -> None:
    slot = Slot(3)
    for size in (10, 10, 40_000, 10, 10, 10, 10):
        slot.append(3, [bytes(size)], time_us=1)
    assert merges(slot, 3) == [(0, 2), (3, 7)]
    one = slot.partitions[3].lengths[0]
    assert merges(slot, 3, bytes_max=2 * one) == [(0, 2), (3, 5), (5, 7)]
    assert merges(slot, 3, bytes_max=one) == []


def test_other_batches_are_not_merged() -> None:
    def slot_with(change: int, value: int) -> Slot:
        slot = Slot(3)
        for _ in range(3):
            slot.append(3, [b"v"], time_us=1)
        at = slot.partitions[3].positions[1]
        slot.base[at + change] = value
        return slot

    assert merges(slot_with(8, 0), 3) == [(0, 3)]
    assert merges(slot_with(8, 2), 3) == []  # compressed
    assert merges(slot_with(8, 8), 3) == []  # compacted
    assert merges(slot_with(12, 0x43), 3) == []  # has a producer id
    assert merges(slot_with(0, 0), 3) == []  # no batch
    assert merges(slot_with(32, 9), 3) == []  # not the next offset
    assert merges(slot_with(40, 9), 3) == []  # not the next address
    slot = Slot(3)
    batch = make_batch([b"v"])
    stamp(batch, 0, 3, 1, 0, 0, 1)
    stamp_producer(batch, 0, 5, 0)
    partition = slot.partitions[3]
    slot.base += batch + batch
    partition.positions.extend((0, len(batch)))
    partition.lengths.extend((len(batch), len(batch)))
    assert merges(slot, 3) == []
    with pytest.raises(IndexError):
        next_merge(slot.base, partition.positions, partition.lengths, 0, 3, 1000)
