"""Validation refuses every violation of decision 0101, also with correct checksums."""

from __future__ import annotations

from array import array
from struct import pack_into

import pytest

from polywire.errors import ErrorCode, Invalid
from polywire.records import batch
from polywire.records.columns import Column
from polywire.records.rows import from_records
from tests.unit.records.samples import PRODUCER, RICH, reseal, spans

SMALL = bytes(batch.from_spans(*spans([(b"k", b"value"), (None, None)]), None, b"\0\x01"))
FULL = bytes(from_records(RICH, producer_id=PRODUCER, base_sequence=5))


def test_every_flipped_bit_is_refused() -> None:
    assert batch.validate(SMALL) == len(SMALL)
    for bit in range(8 * len(SMALL)):
        damaged = bytearray(SMALL)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        with pytest.raises(Invalid):
            batch.validate(damaged)


def test_every_truncation_is_refused() -> None:
    for size in range(len(SMALL)):
        with pytest.raises(Invalid):
            batch.validate(SMALL[:size])


def test_bytes_around_a_batch_do_not_matter() -> None:
    assert batch.validate(b"x" + FULL + b"y", 1) == len(FULL)
    for at in (-1, 0, 2):
        with pytest.raises(Invalid):
            batch.validate(b"x" + FULL + b"y", at)


def test_the_brokers_own_fields_may_hold_anything() -> None:
    numbered = bytearray(FULL)
    batch.stamp(numbered, 0, 2**64 - 1, 1, 2**64 - 1, 2**64 - 1, -1)
    assert batch.validate(numbered) == len(FULL)


@pytest.mark.parametrize(
    ("position", "code", "number", "rule"),
    [
        (0, "I", 0x32425750, "wrong header"),
        (4, "I", 0, "wrong header"),
        (4, "I", len(FULL) + 8, "wrong header"),
        (4, "I", 0xFFFFFFFF, "wrong header"),
        (8, "I", 2, "wrong header, compressed"),
        (8, "I", 8, "header field"),
        (8, "I", 16, "header field"),
        (12, "I", 0xFFFFFFFF, "wrong header"),
        (12, "I", 0, "wrong header"),
        (28, "I", 0, "header field"),
        (28, "I", 4, "column has the wrong size"),
        (28, "I", 4_194_305, "header field"),
        (28, "I", 0xFFFFFFFF, "header field"),
        (56, "q", -2, "producer"),
        (72, "I", 3, "wrong header"),
        (72, "I", 0xFFFFFFFF, "wrong header"),
        (76, "I", 0, "header field"),
        (80, "I", 0, "spans"),
        (84, "I", 6, "spans"),
        (104, "I", 0, "wrong header"),
        (104, "I", 0xFFFFFFFF, "wrong header"),
    ],
)
def test_header_fields(position: int, code: str, number: int, rule: str) -> None:
    damaged = bytearray(FULL)
    pack_into("<" + code, damaged, position, number)
    _refused(damaged, rule)


@pytest.mark.parametrize("field", [56, 64])
def test_fields_of_a_producer_need_a_producer(field: int) -> None:
    damaged = bytearray(SMALL)
    pack_into("<q", damaged, field, 1)
    _refused(damaged, "producer")


@pytest.mark.parametrize(
    ("column", "index", "code", "number", "rule"),
    [
        (Column.VALUE_OFFSETS, 0, "i", 1, "offsets"),
        (Column.VALUE_OFFSETS, 1, "i", -1, "offsets"),
        (Column.VALUE_OFFSETS, 1, "i", 2**31 - 1, "offsets"),
        (Column.VALUE_OFFSETS, 1, "i", 3, "a null key or value has bytes"),
        (Column.VALUE_OFFSETS, 5, "i", 3, "value_bytes"),
        (Column.KEY_OFFSETS, 1, "i", 0x7FFF, "offsets"),
        (Column.KEY_OFFSETS, 1, "i", 0, "a null key or value has bytes"),
        (Column.HEADER_COUNTS, 1, "i", -5, "offsets"),
        (Column.HEADER_COUNTS, 5, "i", -5, "header_counts"),
        (Column.HEADER_COUNTS, 5, "i", 2**30, "header_key_kinds"),
        (Column.HEADER_KEY_KINDS, 0, "B", 0, "kind"),
        (Column.HEADER_KEY_KINDS, 0, "B", 16, "kind"),
        (Column.HEADER_VALUE_KINDS, 0, "B", 16, "kind"),
        (Column.HEADER_VALUE_KINDS, 1, "B", 0, "kind"),
        (Column.HEADER_KEY_OFFSETS, 1, "i", 3, "offsets"),
        (Column.HEADER_VALUE_OFFSETS, 1, "i", 5, "offsets"),
        (Column.RECORD_FLAGS, 0, "B", 8, "flags"),
        (Column.RECORD_FLAGS, 0, "B", 1, "spans"),
        (Column.EVENT_TYPE_OFFSETS, 3, "i", 3, "utf-8"),
        (Column.EVENT_TYPE_BYTES, 0, "B", 0xFF, "utf-8"),
        (Column.EVENT_METADATA_OFFSETS, 1, "i", 100, "offsets"),
    ],
)
def test_columns(column: Column, index: int, code: str, number: int, rule: str) -> None:
    damaged = bytearray(FULL)
    position = batch.layout(damaged)[2 * column] + index * array(code).itemsize
    pack_into("<" + code, damaged, position, number)
    _refused(damaged, rule)


def test_an_event_needs_event_columns() -> None:
    damaged = bytearray(SMALL)
    damaged[batch.layout(damaged)[2 * Column.RECORD_FLAGS]] = 2
    _refused(damaged, "flags")


def test_bytes_between_columns_are_zero() -> None:
    numbers = batch.layout(SMALL)
    claimed = set(range(104 + 4 * sum(place >= 0 for place in numbers[::2])))
    for place, size in zip(numbers[::2], numbers[1::2], strict=True):
        claimed |= set(range(place, place + size)) if place >= 0 else set()
    unclaimed = set(range(len(SMALL))) - claimed
    assert unclaimed
    for position in unclaimed:
        damaged = bytearray(SMALL)
        damaged[position] = 1
        _refused(damaged, "not zero")


def test_values_have_their_crcs() -> None:
    columns = {Column.VALUE_OFFSETS: array("i", [0, 9]).tobytes(), Column.VALUE_BYTES: b"123456789"}
    built = batch.from_columns({**columns, Column.VALUE_CRC32: array("I", [0xCBF43926]).tobytes()}, 1)
    assert batch.validate(built) == len(built)
    _refused(batch.from_columns({**columns, Column.VALUE_CRC32: array("I", [0]).tobytes()}, 1), "crc")


@pytest.mark.parametrize(
    ("offsets", "addresses", "good"),
    [
        ([0, 1, 5], [0, 11, 60], True),
        ([0, 1, 2], [0, 11, 23], True),
        ([1, 2, 5], [0, 11, 60], True),
        ([3, 2, 5], [0, 11, 60], False),
        ([0, 1, 1], [0, 11, 60], False),
        ([0, 3, 2], [0, 11, 60], False),
        ([0, 1, 5], [1, 20, 60], True),
        ([0, 1, 5], [40, 20, 60], False),
        ([0, 1, 5], [0, 10, 60], False),
        ([0, 1, 5], [0, 11, 22], False),
    ],
)
def test_deltas_of_a_compacted_batch(offsets: list[int], addresses: list[int], good: bool) -> None:
    built = batch.from_columns(
        {
            Column.VALUE_OFFSETS: array("i", [0, 1, 3, 6]).tobytes(),
            Column.VALUE_BYTES: b"abcdef",
            Column.OFFSET_DELTAS: array("I", offsets).tobytes(),
            Column.ADDRESS_DELTAS: array("I", addresses).tobytes(),
        },
        3,
    )
    if good:
        assert batch.validate(built) == len(built)
        pack_into("<I", built, 84, offsets[-1])
    _refused(built, "deltas")


def test_large_batches_are_checked_too() -> None:
    built = batch.from_spans(*spans([(None, bytes(400_000))]))
    assert batch.validate(built) == len(built)
    built[200_000] = 1
    _refused(built, "checksum", sealed=False)


def _refused(damaged: bytearray, rule: str, *, sealed: bool = True) -> None:
    if sealed:
        reseal(damaged)
    with pytest.raises(Invalid, match=rule) as caught:
        batch.validate(damaged)
    assert caught.value.code is ErrorCode.INVALID_BATCH
