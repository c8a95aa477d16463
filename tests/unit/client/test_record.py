"""Records and batches of the client: construction, encoding and decoding."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from polywire import Record
from polywire.client.record import decode_batches, encode_batch, to_stored
from polywire.errors import ErrorCode, Invalid
from polywire.records.batch import stamp
from polywire.records.columns import Header, HeaderKind
from polywire.records.columns import Record as StoredRecord
from polywire.records.rows import from_records

HALF_PAIR = (
    "has half a surrogate pair, which UTF-8 cannot encode (pass a name of a file through os.fsencode) got='\\udc80'"
)


def test_text_becomes_utf8() -> None:
    record = Record("hällo", key="k", headers={"source": "web"})
    assert (record.value, record.key, record.headers) == ("hällo".encode(), b"k", {"source": "web"})
    assert record.text == "hällo"
    assert (record.topic, record.partition, record.offset) == ("", -1, -1)
    assert Record(bytearray(b"a"), memoryview(b"b"))[:2] == (b"a", b"b")
    assert Record(None).text == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"value": 7}, "a value must be str, bytes or None got=int"),
        ({"value": "v", "key": 1.5}, "a key must be str, bytes or None got=float"),
        ({"value": "v", "headers": ["a"]}, 'headers must be a dict like {"source": "web"} got=list'),
        ({"value": "v", "headers": {1: "a"}}, "header name must be str got=int"),
        (
            {"value": "v", "headers": {"a": []}},
            "header value must be str, bytes, int, float, bool or None name='a' got=list",
        ),
        ({"value": "v", "headers": {"a": 1 << 127}}, "header value is an integer of more than 128 bits name='a'"),
        ({"value": "\udc80"}, f"a value {HALF_PAIR}"),
        ({"value": "v", "key": "\udc80"}, f"a key {HALF_PAIR}"),
        ({"value": "v", "headers": {"\udc80": "a"}}, f"a header name {HALF_PAIR}"),
        ({"value": "v", "headers": {"a": "\udc80"}}, f"a header value {HALF_PAIR}"),
        ({"value": "v", "origin_time_us": 1 << 63}, f"origin time does not fit 64 bits got={1 << 63}"),
        ({"value": "v", "origin_time_us": "now"}, "origin time must be an int, in microseconds since 1970 got=str"),
    ],
    ids=lambda value: ascii(value) if isinstance(value, dict) else "",
)
def test_an_error_says_which_value_was_expected(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(Invalid) as caught:
        Record(**arguments)
    assert (caught.value.code, caught.value.message) == (ErrorCode.INVALID_REQUEST, expected)


def test_typed_headers_round_trip() -> None:
    headers: dict[str, Any] = {"s": "ü", "b": b"\xff", "i": -5, "l": 1 << 100, "f": 1.5, "t": True, "n": None}
    [found] = decode_batches(
        stored(encode_batch([b"v"], [None], {0: Record("v", headers=headers)}, producer_id=None, base_sequence=0)),
        "t",
        3,
        0,
    )
    assert found.headers == headers
    assert {name: type(value) for name, value in found.headers.items()} == {
        name: type(value) for name, value in headers.items()
    }


def test_headers_of_other_protocols_are_read() -> None:
    headers = (
        Header(b"u", b"\xff\xff", value_kind=HeaderKind.UINT16),
        Header(b"f", b"\x00\x00\xc0\x3f", value_kind=HeaderKind.FLOAT32),
        Header(b"broken", b"\x00", value_kind=HeaderKind.FLOAT64),
    )
    [found] = decode_batches(stored(from_records([StoredRecord(b"v", headers=headers)])), "t", 0, 0)
    assert found.headers == {"u": 0xFFFF, "f": 1.5, "broken": b"\x00"}


@pytest.mark.parametrize("keys", [[None, None, None], [b"a", b"", b"c"], [b"a", None, b"c"]])
@pytest.mark.parametrize("values", [[b"1", b"", b"333"], [b"1", None, b"333"]])
def test_batches_round_trip(values: list[bytes | None], keys: list[bytes | None]) -> None:
    batch = stored(encode_batch(values, keys, {}, producer_id=b"p" * 16, base_sequence=4), offset=70)
    found = decode_batches(batch + stored(from_records([StoredRecord(b"x")]), offset=73), "t", 2, 71)
    assert [record.value for record in found] == [*values[1:], b"x"]
    assert [record.key for record in found] == [*keys[1:], None]
    assert [record.offset for record in found] == [71, 72, 73]
    assert {(record.topic, record.partition) for record in found} == {("t", 2)}
    assert found[0].time == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)


def test_a_record_converts_to_its_stored_form() -> None:
    made = to_stored(Record("v", "k", {"a": "b"}, origin_time_us=5))
    assert made == StoredRecord(
        b"v", b"k", headers=(Header(b"a", b"b", value_kind=HeaderKind.STRING),), origin_time_us=5
    )


def stored(batch: bytearray, *, offset: int = 0) -> bytes:
    """Return the batch with offsets, as a broker stores it."""
    stamp(batch, 0, 1, 1, offset, 0, 1_000_000)
    return bytes(batch)
