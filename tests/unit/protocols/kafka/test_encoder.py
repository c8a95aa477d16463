"""Encoding of stored batches as Kafka's: their boundaries, headers, and records of other protocols."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import pytest

from polywire.protocols.kafka import encoder
from polywire.protocols.kafka.client_batches import decode_batches
from polywire.records.batch import keep, stamp
from polywire.records.columns import Event, Header, HeaderKind, Record
from polywire.records.compression import Compression, compress_body
from polywire.records.rows import from_records
from polywire.types import Buffer

APPENDED_US = 1_800_000_000_123_999
ORIGIN_US = 1_700_000_000_456_000
HEAD = struct.Struct(">qiibIhiqqqhii")
ROOM = 4 * 1024 * 1024


def stored(records: Sequence[Record], base: int, *, epoch: int = 7, time_us: int = APPENDED_US) -> bytearray:
    batch = from_records(records)
    stamp(batch, 0, 1, epoch, base, 0, time_us)
    return batch


def values(*sizes: int) -> list[Record]:
    return [Record(value=bytes([number % 256]) * size) for number, size in enumerate(sizes)]


def written(
    chunk: Buffer, offset: int, *, limit: int = ROOM, append_times: bool = False
) -> tuple[int, bytes, int, int]:
    """Return (reason, bytes, next offset, bytes needed)."""
    out = bytearray(limit + 20)
    state = encoder.begin(offset, at=11, limit=limit)
    reason = encoder.put_batches(chunk, state, out, append_times=append_times)
    assert not any(out[:11])
    assert not any(out[11 + limit :])
    assert state[encoder.AT] <= 11 + limit
    return reason, bytes(out[11 : state[encoder.AT]]), state[encoder.NEXT], state[encoder.NEEDED]


def heads(data: bytes) -> list[tuple[int, int, int]]:
    """Return (base offset, next offset, records) of each batch."""
    found = []
    while data:
        base, length, _, _, _, _, last, *_, count = HEAD.unpack_from(data)
        found.append((base, base + last + 1, count))
        data = data[12 + length :]
    return found


def test_the_header_of_a_batch() -> None:
    records = [
        Record(value=b"a", origin_time_us=ORIGIN_US),
        Record(value=b"b", origin_time_us=ORIGIN_US + 9_000),
        Record(value=b"c", origin_time_us=ORIGIN_US - 5_000),
    ]
    _, data, _, _ = written(stored(records, 100), 100)
    base, length, epoch, magic, _, attributes, last, first_time, max_time, *producer, count = HEAD.unpack_from(data)
    assert (base, length, epoch, magic, attributes, last, count) == (100, len(data) - 12, 7, 2, 0, 2, 3)
    assert (first_time, max_time) == (ORIGIN_US // 1000, ORIGIN_US // 1000 + 9)
    assert producer == [-1, -1, -1]
    found = decode_batches(data)  # this checks the CRC, too
    assert [record.origin_time_us for record in found] == [record.origin_time_us for record in records]
    assert [record.offset for record in found] == [100, 101, 102]


@pytest.mark.parametrize("offset", [0, 99, 100, 101, 102, 103])
def test_a_response_starts_at_the_requested_record(offset: int) -> None:
    reason, data, following, _ = written(stored(values(5, 6, 7), 100), offset)
    assert (reason, following) == (encoder.DONE, 103)
    assert heads(data) == ([(max(offset, 100), 103, 103 - max(offset, 100))] if offset < 103 else [])


def test_short_neighbours_are_merged_and_long_ones_are_not() -> None:
    short, long = values(*[100] * 10), values(*[100] * 700)
    chunk = stored(short, 0) + stored(short, 10) + stored(long, 20) + stored(short, 720) + stored(short, 730)
    reason, data, following, _ = written(chunk, 5)
    assert (reason, following) == (encoder.DONE, 740)
    assert heads(data) == [(5, 720, 715), (720, 740, 20)]
    assert [record.offset for record in decode_batches(data)] == list(range(5, 740))


def test_batches_of_different_epochs_are_not_merged() -> None:
    chunk = stored(values(1), 0, epoch=7) + stored(values(1), 1, epoch=8) + stored(values(1), 2, epoch=8)
    data = written(chunk, 0)[1]
    assert heads(data) == [(0, 1, 1), (1, 3, 2)]
    assert HEAD.unpack_from(data)[2] == 7
    assert HEAD.unpack_from(data, len(data) // 2)[2] != 7


def test_a_long_batch_is_split_and_a_long_record_is_not() -> None:
    data = written(stored(values(*[100_000] * 25), 0), 0)[1]
    assert [count for _, _, count in heads(data)] == [10, 10, 5]
    assert all(size <= encoder.SPLIT_BYTES for size in sizes(data))
    data = written(stored(values(10, 3_000_000, 10), 0), 0)[1]
    assert heads(data) == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]
    assert [len(record.value or b"") for record in decode_batches(data)] == [10, 3_000_000, 10]


def sizes(data: bytes) -> list[int]:
    found = []
    while data:
        found.append(12 + HEAD.unpack_from(data)[1])
        data = data[found[-1] :]
    return found


def test_a_limit_is_exact_to_the_byte() -> None:
    chunk = stored(values(*[50] * 40), 0) + stored(values(*[50] * 40), 40)
    whole = written(chunk, 0)[1]
    for limit in range(len(whole) + 1):
        reason, data, following, needed = written(chunk, 0, limit=limit)
        assert reason == (encoder.DONE if limit == len(whole) else encoder.FULL)
        found = decode_batches(data)
        assert [record.offset for record in found] == list(range(following))
        assert len(data) <= limit
        if following < 80:
            assert len(data) + 60 > limit or not data
            assert written(chunk, following, limit=needed)[2] > following


def test_encoding_resumes_after_the_last_written_record() -> None:
    chunk = stored(values(10, 10), 0) + stored(values(*[300] * 9), 2)
    out = bytearray(1000)
    state = encoder.begin(0, at=0, limit=1000)
    assert encoder.put_batches(chunk, state, out) == encoder.FULL
    first = bytes(out[: state[encoder.AT]])
    rest = encoder.begin(state[encoder.NEXT], at=0, limit=ROOM)
    more = bytearray(ROOM)
    assert encoder.put_batches(chunk, rest, more) == encoder.DONE
    found = decode_batches(first + bytes(more[: rest[encoder.AT]]))
    assert [record.offset for record in found] == list(range(11))


def test_gaps_of_compaction_stay_gaps() -> None:
    whole = stored(values(1, 2, 3, 4, 5, 6), 100)
    compacted = keep(whole, array("i", (1, 3)), base_offset=90, base_address=0)
    for offset, expected in ((0, [101, 103]), (95, [101, 103]), (102, [103]), (103, [103]), (104, [])):
        reason, data, following, _ = written(compacted, offset)
        assert (reason, following) == (encoder.DONE, 104)
        assert [record.offset for record in decode_batches(data)] == expected
        if expected:
            assert heads(data) == [(expected[0], 104, len(expected))]
    behind = keep(stored(values(1, 1, 1, 1), 104), array("i", (2,)), base_offset=104, base_address=0)
    assert heads(written(compacted + behind, 0)[1]) == [(101, 107, 3)]
    limit = len(written(compacted, 0)[1])
    assert written(compacted + behind, 0, limit=limit)[2] == 104


def test_a_compressed_batch_is_left_to_the_caller() -> None:
    packed = compress_body(stored(values(*[500] * 20), 3), Compression.ZSTD)
    chunk = stored(values(1, 1, 1), 0) + packed + stored(values(1), 23)
    out = bytearray(ROOM)
    state = encoder.begin(1, at=0, limit=ROOM)
    assert encoder.put_batches(chunk, state, out) == encoder.COMPRESSED
    assert (state[encoder.NEXT], bytes(chunk[state[encoder.POSITION] :][:4])) == (3, b"PWB1")
    assert heads(bytes(out[: state[encoder.AT]])) == [(1, 3, 2)]
    assert written(chunk, 23)[2] == 24  # a batch before the requested offset is skipped


def test_append_times_are_marked_and_not_mixed() -> None:
    chunk = (
        stored(values(1, 1), 0)
        + stored(values(1), 2)
        + stored([Record(value=b"", origin_time_us=ORIGIN_US)], 3, time_us=APPENDED_US + 1000)
    )
    data = written(chunk, 0, append_times=True)[1]
    assert heads(data) == [(0, 3, 3), (3, 4, 1)]
    _, _, _, _, _, attributes, _, first_time, max_time, *_ = HEAD.unpack_from(data)
    assert (attributes, first_time, max_time) == (8, APPENDED_US // 1000, APPENDED_US // 1000)
    assert [record.append_time_us // 1000 for record in decode_batches(data)] == [APPENDED_US // 1000] * 3 + [
        APPENDED_US // 1000 + 1
    ]
    found = decode_batches(written(chunk, 0)[1])
    assert [record.origin_time_us for record in found[-2:]] == [APPENDED_US // 1000 * 1000, ORIGIN_US]


def test_times_before_1970_are_rounded_down() -> None:
    records = [Record(value=b"", origin_time_us=time) for time in (-1, -1000, -1001, -999_999, 999)]
    found = decode_batches(written(stored(records, 0), 0)[1])
    assert [record.origin_time_us for record in found] == [None, None, -2000, -1_000_000, 0]  # -1 ms means no time


def test_null_and_empty_values_are_distinguished() -> None:
    records = [Record(value=value, key=key) for value in (None, b"", b"v") for key in (None, b"", b"k")]
    found = decode_batches(written(stored(records, 0), 0)[1])
    assert [(record.value, record.key) for record in found] == [(record.value, record.key) for record in records]


def test_headers_of_other_protocols_become_names_and_bytes() -> None:
    headers = (
        Header(b"name", b"text", value_kind=HeaderKind.STRING),
        Header(b"count", b"\5\0\0\0", value_kind=HeaderKind.INT32),
        Header(b"\x01\xfe\xab", None, key_kind=HeaderKind.RAW, value_kind=HeaderKind.NULL),
        Header(b"name", b""),
    )
    found = decode_batches(written(stored([Record(value=b"v", headers=headers), Record(value=b"w")], 0), 0)[1])
    assert [(header.key, header.value) for header in found[0].headers] == [
        (b"name", b"text"),
        (b"count", b"\5\0\0\0"),
        (b"01feab", None),
        (b"name", b""),
    ]
    assert found[1].headers == ()


def test_an_events_fields_become_headers_after_its_own() -> None:
    records = [
        Record(value=b"v", headers=(Header(b"h", b"1"),), event=Event("made", 10, 2**64 - 1, b"meta")),
        Record(value=b"w"),
        Record(value=b"x", event=Event("", 0, 9)),
    ]
    found = decode_batches(written(stored(records, 0), 0)[1])
    assert [[(header.key, header.value) for header in record.headers] for record in found] == [
        [
            (b"h", b"1"),
            (b"event.type", b"made"),
            (b"event.schema_version", b"10"),
            (b"event.aggregate_version", b"18446744073709551615"),
            (b"event.metadata", b"meta"),
        ],
        [],
        [(b"event.type", b""), (b"event.schema_version", b"0"), (b"event.aggregate_version", b"9")],
    ]


def test_a_state_beyond_its_buffer_raises_an_internal_error() -> None:
    with pytest.raises(ValueError, match="outside"):
        encoder.put_batches(stored(values(1), 0), encoder.begin(0, at=0, limit=101), bytearray(100))
