"""One header of all records of a batch as numbers."""

from __future__ import annotations

import pytest

from polywire.errors import Invalid
from polywire.records.columns import Header, HeaderKind, Record
from polywire.records.compression import Compression, compress_body
from polywire.records.header_numbers import ABSENT, NO_NUMBER, batches_with, header_numbers
from polywire.records.rows import from_records

KEY = b"deliver.at"


def text(value: bytes | None, key: bytes = KEY) -> Header:
    return Header(key, value, HeaderKind.STRING, HeaderKind.NULL if value is None else HeaderKind.STRING)


def numbers(*records: tuple[Header, ...]) -> list[int] | None:
    found = header_numbers(from_records([Record(b"v", headers=headers) for headers in records]), KEY)
    return None if found is None else found.tolist()


def test_each_record_has_a_number() -> None:
    int64 = Header(KEY, (77).to_bytes(8, "little"), HeaderKind.STRING, HeaderKind.INT64)
    negative = Header(KEY, (-77).to_bytes(8, "little", signed=True), HeaderKind.STRING, HeaderKind.INT64)
    assert numbers((text(b"5"),), (), (text(b"x", b"other"), text(b"123456789012345678"))) == [
        5,
        ABSENT,
        123456789012345678,
    ]
    assert numbers((text(b"5"), text(b"6")), (text(None),), (text(b""),)) == [6, ABSENT, NO_NUMBER]
    assert numbers((text(b"1234567890123456789"),), (text(b"-1"),), (text(b" 1"),)) == [NO_NUMBER] * 3
    assert numbers((int64,), (negative,)) == [77, NO_NUMBER]


def test_a_batch_without_the_header_has_no_numbers() -> None:
    assert numbers((), ()) is None
    assert numbers((text(b"5", b"deliver.a"),), (text(b"5", b"deliver.atx"),), (text(b"5", b"deliver.ax"),)) is None


def test_a_truncated_batch_is_refused() -> None:
    batch = from_records([Record(b"v", headers=(text(b"5"),))])
    for size in range(len(batch)):
        with pytest.raises(Invalid):
            header_numbers(bytes(batch[:size]), KEY)


def test_batches_with_the_header_are_found() -> None:
    plain = from_records([Record(b"v")])
    other = from_records([Record(b"v", headers=(text(b"5", b"other"),))])
    wanted = from_records([Record(b"v"), Record(b"v", headers=(text(b"5", b"a"), text(b"5")))])
    packed = compress_body(from_records([Record(b"v" * 1000, headers=(text(b"5", b"other"),))]), Compression.ZSTD)
    chunk, ends = b"", []
    for batch in (plain, other, wanted, plain, packed, wanted):
        ends.append(len(chunk))
        chunk += bytes(batch)
    assert batches_with(chunk, KEY, b"none").tolist() == [ends[2], ends[4], ends[5]]
    assert batches_with(chunk, b"none", KEY).tolist() == [ends[2], ends[4], ends[5]]
    assert batches_with(chunk[: ends[2]], KEY, KEY).tolist() == []
    assert batches_with(b"", KEY, KEY).tolist() == []
