"""Conversion between stored batches and Arrow: every way of reading a batch, compared with its records."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from polywire.client.arrow import (
    COLUMNS,
    HEADER_LIST,
    TIMESTAMP,
    TYPED_HEADER_LIST,
    WRAP_BYTES_MIN,
    arrow_to_batches,
    chunk_to_arrow,
)
from polywire.client.bulk import StoredChunk
from polywire.errors import ErrorCode, Invalid
from polywire.records.batch import read_header, stamp, validate
from polywire.records.columns import Event, Header, HeaderKind, Record
from polywire.records.compression import Compression, compress_body
from polywire.records.rows import from_records, to_records
from polywire.types import Buffer

FIELDS: list[pa.Field[Any]] = [
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("topic", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("timestamp", TIMESTAMP),
    pa.field("timestampType", pa.int32()),
    pa.field("headers", HEADER_LIST),
]
KAFKA = pa.schema(FIELDS)


def stored(batches: Sequence[Sequence[Record]], *, first_offset: int = 0) -> tuple[bytearray, list[Record]]:
    """Return batches with consecutive offsets back to back, and their records."""
    data, offset = bytearray(), first_offset
    for index, records in enumerate(batches):
        batch = from_records(records)
        stamp(batch, 0, 7, 1, offset, 0, 1_000_000 + index)
        offset += len(records)
        data += batch
    found: list[Record] = []
    at = 0
    while at < len(data):
        found += to_records(data, at)
        at += read_header(data, at).length
    return data, found


def read(data: Buffer, offset: int, offset_end: int, **options: Any) -> pa.Table:
    chunk = StoredChunk("t", 3, memoryview(data), offset, offset_end, offset_end)
    batches = chunk_to_arrow(chunk, KAFKA.names, KAFKA, **options)
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema == KAFKA
    return pa.Table.from_batches(batches, schema=KAFKA)


def rows_of(records: Sequence[Record]) -> list[dict[str, object]]:
    return [
        {
            "key": record.key,
            "value": record.value,
            "topic": "t",
            "partition": 3,
            "offset": record.offset,
            "timestampType": 1,
            "headers": [{"key": h.key.decode(), "value": h.value} for h in record.headers] or None,
        }
        for record in records
    ]


def check(table: pa.Table, records: Sequence[Record]) -> None:
    assert table.drop_columns(["timestamp"]).to_pylist() == rows_of(records)
    assert table.column("timestamp").cast(pa.int64()).to_pylist() == [record.append_time_us for record in records]


def some_records(seed: int, count: int) -> list[Record]:
    chance = random.Random(seed)

    def payload() -> bytes | None:
        return None if chance.random() < 0.2 else chance.randbytes(chance.randrange(12))

    with_keys, with_headers = chance.random() < 0.7, chance.random() < 0.5
    return [
        Record(
            payload(),
            payload() if with_keys else None,
            headers=tuple(Header(b"h%d" % n, payload()) for n in range(chance.randrange(3))) if with_headers else (),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_small_batches_are_joined_and_cut_to_the_range(seed: int) -> None:
    data, records = stored([some_records(seed * 10 + n, n % 9 + 1) for n in range(10)], first_offset=100)
    check(read(data, 100, 100 + len(records)), records)
    check(read(data, 103, 117), records[3:17])
    check(read(data, 103, 117, rows_max=4), records[3:17])
    assert read(data, 100 + len(records), 200 + len(records)).num_rows == 0


def test_client_times_are_milliseconds_and_default_to_append_time() -> None:
    """Small batches together, a large one alone, a compressed one; records without a time use their append time."""
    times = [None, 5_000, 5_999, -1, -1_000, -1_001, 2**60]
    timed = [Record(b"v", origin_time_us=time) for time in times]
    large = [Record(bytes(WRAP_BYTES_MIN // 4), origin_time_us=7_777_000 + number) for number in range(5)]
    data, records = stored([[Record(b"plain")], timed, large, timed])
    for offset in (0, 3):
        found = read(data, offset, len(records), create_times=True).column("timestamp").cast(pa.int64()).to_pylist()
        appended = [
            record.append_time_us if record.origin_time_us is None else record.origin_time_us for record in records
        ]
        assert found == [time // 1000 * 1000 for time in appended[offset:]]
    packed, _ = stored([timed])
    whole = compress_body(packed, Compression.ZSTD)
    table = read(whole, 1, len(timed), create_times=True)
    assert table.column("timestamp").cast(pa.int64()).to_pylist()[:2] == [5_000, 5_000]
    assert set(table.column("timestampType").to_pylist()) == {0}
    check(read(data, 0, len(records)), records)


def test_a_large_batch_is_wrapped_without_a_copy() -> None:
    records = [Record(b"v%06d" % n * 20, b"k%d" % n if n % 3 else None) for n in range(5000)]
    data, records = stored([records])
    assert len(data) > WRAP_BYTES_MIN
    table = read(data, 11, 4000, rows_max=1500)
    assert [len(batch) for batch in table.to_batches()] == [1500, 1500, 989]
    check(table, records[11:4000])
    lies_in = range(_address(data), _address(data) + len(data))
    for name, batch in (("value", 0), ("key", 2)):
        contents = table.to_batches()[batch].column(name).buffers()[2]
        assert contents is not None
        assert contents.address in lies_in


def test_memory_is_not_reused_while_arrow_refers_to_it() -> None:
    kept = []
    for number in range(40):
        data, records = stored([[Record(b"%d-%d" % (number, n), b"k%d" % number) for n in range(3)]] * 2)
        kept.append((read(data, 1, 5), records[1:5]))
        if number % 3 == 0:
            kept.pop(0)
    for table, records in kept:
        check(table, records)


def test_compressed_batches_are_decompressed() -> None:
    data, records = stored([[Record(b"abc" * 50) for _ in range(20)]])
    packed = compress_body(data, Compression.ZSTD)
    assert len(packed) < len(data)
    check(read(packed, 2, 9), records[2:9])


def test_unusual_headers_and_event_fields_become_text_and_bytes() -> None:
    record = Record(
        b"v",
        headers=(Header(b"\x05\x00", b"\x01", HeaderKind.INT16), Header(b"\xff\xfe", None, HeaderKind.RAW)),
        event=Event("made", 2, 9, b"{}"),
        flags=2,
    )
    data, _ = stored([[record]])
    assert read(data, 0, 1).column("headers").to_pylist() == [
        [
            {"key": "5", "value": b"\x01"},
            {"key": "��", "value": None},
            {"key": "event.type", "value": b"made"},
            {"key": "event.schema_version", "value": b"2"},
            {"key": "event.aggregate_version", "value": b"9"},
            {"key": "event.metadata", "value": b"{}"},
        ]
    ]


def test_values_can_be_read_as_text() -> None:
    data, _ = stored([[Record("grün".encode()), Record(None)], [Record(b"\xffx")]])
    chunk = StoredChunk("t", 0, memoryview(data), 0, 3, 3)
    fields: list[pa.Field[Any]] = [pa.field("value", pa.string()), pa.field("offset", pa.int32())]
    schema = pa.schema(fields)
    table = pa.Table.from_batches(chunk_to_arrow(chunk, ["value", "offset"], schema))
    assert table.to_pydict() == {"value": ["grün", None, "�x"], "offset": [0, 1, 2]}


def test_unknown_columns_are_reported() -> None:
    chunk = StoredChunk("t", 0, memoryview(b""), 0, 0, 0)
    for columns in ([], ["value", "size"]):
        with pytest.raises(Invalid) as caught:
            chunk_to_arrow(chunk, columns, KAFKA)
        assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert chunk_to_arrow(chunk, COLUMNS, KAFKA) == []


@pytest.mark.parametrize("seed", range(8))
def test_tables_become_batches_and_read_back(seed: int) -> None:
    rows = [
        {"key": r.key, "value": r.value, "headers": [{"key": h.key.decode(), "value": h.value} for h in r.headers]}
        for r in some_records(seed, 40)
    ]
    schema = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("headers", HEADER_LIST)])
    table = pa.Table.from_pylist(rows, schema=schema)
    pieces = pa.concat_tables([table.slice(0, 13), table.slice(13, 1), table.slice(14)])
    back = []
    for batch in arrow_to_batches(pieces):
        assert validate(batch) == len(batch)
        back += to_records(batch)
    found = [
        {"key": r.key, "value": r.value, "headers": [{"key": h.key.decode(), "value": h.value} for h in r.headers]}
        for r in back
    ]
    assert found == rows


def test_tables_of_text_are_split_into_bounded_batches() -> None:
    table = pa.table({"text": pa.array(["x" * 1000] * 9000, type=pa.large_string())})
    batches = arrow_to_batches(table, value="text", key=None, headers=None)
    assert max(len(batch) for batch in batches) <= 5 << 20
    assert sum(read_header(batch).record_count for batch in batches) == 9000
    with pytest.raises(Invalid) as caught:
        arrow_to_batches(pa.table({"value": [b"x" * (17 << 20)]}))
    assert caught.value.code is ErrorCode.RECORD_TOO_LARGE
    with pytest.raises(Invalid):
        arrow_to_batches(pa.table({"v": [b"x"]}))


def _address(data: bytearray) -> int:
    return pa.py_buffer(data).address


def test_typed_headers_keep_their_types() -> None:
    headers = [
        [("i", "int32", b"\x07\0\0\0"), ("s", "string", b"text")],
        None,
        [("n", "null", None), ("r", "raw", b"\xff"), ("b", "bool", b"\x01")],
    ]
    lists = [None if pairs is None else [{"key": k, "type": t, "value": v} for k, t, v in pairs] for pairs in headers]
    columns = {"value": pa.array([b"1", b"2", b"3"], pa.binary()), "typed": pa.array(lists, TYPED_HEADER_LIST)}
    (batch,) = arrow_to_batches(pa.record_batch(columns), headers="typed")
    validate(batch)
    found = [[(h.key.decode(), h.value_kind.name.lower(), h.value) for h in r.headers] for r in to_records(batch)]
    assert found == [pairs or [] for pairs in headers]
    schema = pa.schema([pa.field("typedHeaders", TYPED_HEADER_LIST)])
    chunk = StoredChunk("t", 0, memoryview(batch), 0, 3, 3)
    (back,) = chunk_to_arrow(chunk, schema.names, schema)
    assert back.column(0).to_pylist() == lists


def test_an_unknown_header_type_is_refused() -> None:
    lists = pa.array([[{"key": "k", "type": "decimal", "value": b""}]], TYPED_HEADER_LIST)
    with pytest.raises(Invalid, match="has an unknown type"):
        arrow_to_batches(pa.record_batch({"value": pa.array([b"1"], pa.binary()), "headers": lists}))


@pytest.mark.parametrize(
    "headers",
    [
        [[{"key": None, "value": b"b"}]],
        [[{"key": "a", "value": b"b"}, {"key": None, "value": None}]],
        [[None]],
    ],
)
def test_a_header_without_a_key_is_refused(headers: list[Any]) -> None:
    columns = {"value": pa.array([b"1"], pa.binary()), "headers": pa.array(headers, HEADER_LIST)}
    with pytest.raises(Invalid, match="header has no key"):
        arrow_to_batches(pa.record_batch(columns), headers="headers")


def test_a_null_list_of_headers_means_no_headers() -> None:
    lists = pa.array([[{"key": "a", "value": b"b"}], None, []], HEADER_LIST)
    (batch,) = arrow_to_batches(
        pa.record_batch({"value": pa.array([b"1"] * 3, pa.binary()), "headers": lists}), headers="headers"
    )
    assert [len(record.headers) for record in to_records(batch)] == [1, 0, 0]
