"""Batch headers: stamping in place, verification, and walking over batches."""

from __future__ import annotations

import pytest

from polywire.errors import Invalid
from polywire.records import batch
from tests.unit.records.samples import spans

ONE = bytes(batch.from_spans(*spans([(b"k", b"value")])))


def test_numbering_touches_the_header_only() -> None:
    chunk = bytearray(b"--") + ONE
    batch.stamp(chunk, 2, 2**64 - 1, 2**32 - 1, 2**63, 2**62, -5)
    header = batch.read_header(chunk, 2)
    assert (header.partition, header.epoch, header.base_offset) == (2**64 - 1, 2**32 - 1, 2**63)
    assert (header.base_address, header.append_time_us, header.next_offset) == (2**62, -5, 2**63 + 1)
    assert chunk[2 + 104 :] == ONE[104:]
    assert batch.check_header(chunk, 2)
    assert batch.check_body(chunk, 2)


def test_a_producer_is_stamped_in_place() -> None:
    chunk = bytearray(ONE)
    batch.stamp_producer(chunk, 0, 7, 2**64 - 1)
    assert (batch.read_header(chunk).producer_epoch, batch.read_header(chunk).base_sequence) == (7, 2**64 - 1)
    assert batch.check_header(chunk, 0)


def test_read_only_and_short_buffers_cannot_be_numbered() -> None:
    with pytest.raises(BufferError):
        batch.stamp(ONE, 0, 1, 1, 1, 1, 1)
    for at in (-1, len(ONE) - 103, len(ONE)):
        with pytest.raises(Invalid):
            batch.stamp(bytearray(ONE), at, 1, 1, 1, 1, 1)
        with pytest.raises(Invalid):
            batch.stamp_producer(bytearray(ONE), at, 1, 1)
        with pytest.raises(Invalid):
            batch.totals(ONE, at)
        with pytest.raises(Invalid):
            batch.read_header(ONE, at)


def test_every_flipped_bit_is_detected() -> None:
    for bit in range(8 * len(ONE)):
        damaged = bytearray(ONE)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        in_padding = bit >> 3 >= 104 + batch.read_header(ONE).body_bytes
        assert (batch.check_header(damaged, 0) and batch.check_body(damaged, 0)) == in_padding


def test_a_header_is_checked_without_its_body() -> None:
    assert batch.check_header(ONE[:104], 0)
    assert not batch.check_body(ONE[:-1], 0)
    assert not batch.check_header(ONE[:103], 0)
    assert not batch.check_header(ONE, 1)
    assert not batch.check_body(ONE, -1)


def test_totals_are_those_of_the_header() -> None:
    header = batch.read_header(ONE)
    expected = (header.length, header.record_count, header.offset_span, header.address_span, header.columns)
    assert batch.totals(b"x" + ONE, 1) == expected


def test_walk_stops_before_an_incomplete_batch() -> None:
    size = len(ONE)
    for tail in range(size):
        assert list(batch.walk(ONE * 3 + ONE[:tail])) == [0, size, 2 * size]
    assert list(batch.walk(b"")) == []


def test_walk_refuses_bytes_that_are_not_a_batch() -> None:
    with pytest.raises(Invalid):
        batch.walk(ONE + bytes(8))
    damaged = bytearray(ONE)
    damaged[4:8] = bytes(4)  # a length of zero would never end
    with pytest.raises(Invalid):
        batch.walk(ONE + damaged)


def test_layout_refuses_incomplete_or_unaligned_batches() -> None:
    for at in (-1, 1, len(ONE)):
        with pytest.raises(Invalid):
            batch.layout(ONE, at)
    with pytest.raises(Invalid):
        batch.layout(ONE[:-8])
