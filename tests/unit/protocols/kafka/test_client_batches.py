"""Fetched batches: records of committed transactions with their offsets."""

from __future__ import annotations

from struct import Struct

import pytest

from polywire.errors import PeerError
from polywire.protocols.kafka.client_batches import CONTROL, decode_pieces, encode_batch
from polywire.protocols.kafka.crc32c import crc32c
from polywire.protocols.kafka.messages import Codec
from polywire.records.columns import Header, HeaderKind, Record

TRANSACTIONAL = 16
BASE = Struct(">q")
LAST_DELTA = Struct(">i")
ABORT, COMMIT = b"\0\0\0\0", b"\0\0\0\1"


def batch(base: int, *values: bytes, producer: int = -1, codec: Codec = Codec.NONE, last: int | None = None) -> bytes:
    records = [Record(value, b"k", origin_time_us=5_000) for value in values]
    attributes = TRANSACTIONAL if producer >= 0 else 0
    encoded = bytearray(encode_batch(records, codec=codec, producer_id=producer, attributes=attributes))
    BASE.pack_into(encoded, 0, base)
    if last is not None:
        LAST_DELTA.pack_into(encoded, 23, last - base)
        encoded[17:21] = crc32c(memoryview(encoded)[21:]).to_bytes(4, "big")
    return bytes(encoded)


def marker(base: int, producer: int, key: bytes) -> bytes:
    encoded = bytearray(encode_batch([Record(b"", key)], producer_id=producer, attributes=TRANSACTIONAL | CONTROL))
    BASE.pack_into(encoded, 0, base)
    return bytes(encoded)


def rows(
    data: bytes, offset: int = 0, aborted: tuple[tuple[int, int], ...] = ()
) -> tuple[list[tuple[int, bytes]], int]:
    pieces, following = decode_pieces(data, offset=offset, aborted=aborted)
    return [(record.offset, record.value or b"") for piece in pieces for record in piece.records()], following


def test_records_of_aborted_transactions_are_skipped() -> None:
    data = b"".join(
        [
            batch(0, b"a", b"b", producer=1),
            batch(2, b"plain"),
            batch(3, b"c", producer=2),
            batch(4, b"d", producer=1),
            marker(5, 1, ABORT),
            batch(6, b"e", producer=1),
            marker(7, 2, COMMIT),
            marker(8, 1, COMMIT),
            batch(9, b"f", producer=1),
            batch(10, b"g", producer=3),
            marker(11, 1, ABORT),
        ]
    )
    found = rows(data, aborted=((1, 0), (1, 9)))
    assert found == ([(2, b"plain"), (3, b"c"), (6, b"e"), (10, b"g")], 12)


def test_only_markers() -> None:
    assert rows(marker(7, 1, COMMIT) + marker(8, 2, ABORT), 7) == ([], 9)


@pytest.mark.parametrize("codec", list(Codec))
def test_records_before_the_offset_are_skipped(codec: Codec) -> None:
    data = batch(10, b"a", b"b", b"c", codec=codec) + batch(20, b"d", codec=codec, last=29)
    assert rows(data, 11) == ([(11, b"b"), (12, b"c"), (20, b"d")], 30)
    assert rows(batch(20, b"d", last=29), 25) == ([], 30)  # compaction removed the last records of the batch


def test_a_truncated_last_batch_is_read_again() -> None:
    data = batch(0, b"a") + batch(1, b"b")
    assert rows(data[:-1]) == ([(0, b"a")], 1)
    with pytest.raises(PeerError, match="no complete batch"):
        rows(data[:20])
    assert rows(b"", 5) == ([], 5)


def test_fields_of_records() -> None:
    record = Record(None, None, (Header(b"h", None), Header(b"", b"x", HeaderKind.STRING, HeaderKind.RAW)))
    [piece], _ = decode_pieces(encode_batch([record, Record(b"", b"", origin_time_us=7_000)]), offset=0, aborted=[])
    first, second = piece.records()
    assert (first.value, first.key, [(one.key, one.value) for one in first.headers], first.origin_time_us) == (
        None,
        None,
        [(b"h", None), (b"", b"x")],
        None,
    )
    assert (second.value, second.key, second.origin_time_us) == (b"", b"", 7_000)


def test_little_is_decompressed_at_once() -> None:
    data = b"".join(batch(number, bytes(5_000), codec=Codec.ZSTD) for number in range(10))
    pieces, following = decode_pieces(data, offset=0, aborted=[], expanded_max=12_000)
    assert (len(pieces), following) == (3, 3)
