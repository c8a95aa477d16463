"""Records as lines: printed lines can be read back, and invalid lines are rejected with a reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.cli.output import format_time, parse_time_us
from polywire.cli.record import LineFormat, line_of_record, record_of_line
from polywire.errors import ErrorCode, Invalid
from polywire.records.columns import Event, Header, HeaderKind, Record

YEAR_1_US = -62_135_596_800_000_000
YEAR_10000_US = 253_402_300_800_000_000

kinds = st.sampled_from([kind for kind in HeaderKind if kind is not HeaderKind.NULL])
headers = st.one_of(
    st.builds(Header, st.binary(), st.binary(), kinds, kinds),
    st.builds(Header, st.binary(), st.none(), kinds, st.just(HeaderKind.NULL)),
)
events = st.builds(
    Event,
    st.text(),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.none() | st.binary(min_size=1),
)
records = st.builds(
    Record,
    value=st.none() | st.binary(),
    key=st.none() | st.binary(),
    headers=st.lists(headers, max_size=3).map(tuple),
    offset=st.integers(0, 2**63 - 1),
    append_time_us=st.integers(-(2**63), 2**63 - 1),
    origin_time_us=st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    id=st.none() | st.binary(min_size=16, max_size=16),
    event=st.none() | events,
)


def read(line: str | bytes, *, key: bytes | None = None, form: LineFormat = LineFormat.JSONL) -> Record:
    return record_of_line(line.encode() if isinstance(line, str) else line, form=form, key=key)


@given(records)
def test_json_lines_read_back(record: Record) -> None:
    line = line_of_record(record, topic="t", partition=1, form=LineFormat.JSONL)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert read(line) == replace(record, offset=-1, append_time_us=0)


@given(st.binary().filter(lambda value: b"\n" not in value))
def test_raw_lines_read_back(value: bytes) -> None:
    line = line_of_record(Record(value), topic="t", partition=1, form=LineFormat.RAW)
    assert read(line[:-1], form=LineFormat.RAW) == Record(value)


@given(st.integers(YEAR_1_US, YEAR_10000_US - 1))
def test_times_read_back(time_us: int) -> None:
    text = format_time(time_us)
    assert isinstance(text, str)
    assert parse_time_us(text) == time_us


@pytest.mark.parametrize(
    ("text", "time_us"),
    [
        ("1970-01-01", 0),
        ("1970-01-01T00:00:01", 1_000_000),
        ("1970-01-01T00:00:01Z", 1_000_000),
        ("1970-01-01T02:00:00.000001+02:00", 1),
        ("1969-12-31T23:59:59.999999Z", -1),
    ],
)
def test_times_without_a_zone_are_utc(text: str, time_us: int) -> None:
    assert parse_time_us(text) == time_us


def test_a_printed_record_starts_with_topic_partition_and_offset() -> None:
    record = Record(b"\xff", "schlüssel".encode(), offset=7, append_time_us=1_500_000)
    fields = json.loads(line_of_record(record, topic="orders", partition=2, form=LineFormat.JSONL))
    assert list(fields.items()) == [
        ("topic", "orders"),
        ("partition", 2),
        ("offset", 7),
        ("timestamp", "1970-01-01T00:00:01.500000Z"),
        ("key", "schlüssel"),
        ("value_base64", "/w=="),
    ]


@pytest.mark.parametrize(
    ("line", "record"),
    [
        ("{}", Record(None)),
        ('{"value": "v", "key": "k"}', Record(b"v", b"k")),
        ('{"value": null}', Record(None)),
        ('{"value": {"a": [1, "ä"]}}', Record('{"a":[1,"ä"]}'.encode())),
        ('{"value": 3.5, "key": 7}', Record(b"3.5", b"7")),
        ('{"value": true}', Record(b"true")),
        ('{"value": ""}', Record(b"")),
        (
            '{"value": "v", "headers": {"h": "x", "none": null}}',
            Record(
                b"v",
                headers=(
                    Header(b"h", b"x", value_kind=HeaderKind.STRING),
                    Header(b"none", None, value_kind=HeaderKind.NULL),
                ),
            ),
        ),
        ('{"id": "00112233-4455-6677-8899-aabbccddeeff"}', Record(None, id=bytes.fromhex("00112233445566778899aabbccddeeff"))),
    ],
)  # fmt: skip
def test_handwritten_lines(line: str, record: Record) -> None:
    assert read(line) == record


def test_the_key_option_applies_to_lines_without_a_key() -> None:
    assert read('{"value": "v"}', key=b"k").key == b"k"
    assert read('{"value": "v", "key": null}', key=b"k").key == b"k"
    assert read('{"value": "v", "key": "own"}', key=b"k").key == b"own"
    assert read("v", key=b"k", form=LineFormat.RAW) == Record(b"v", b"k")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hello", "not JSON"),
        (b"\xff", "not JSON"),
        ("[1]", "not a JSON object"),
        ('"text"', "not a JSON object"),
        ('{"valeu": "v"}', "unknown field field='valeu'"),
        ('{"value": "a", "value_base64": "YQ=="}', "twice"),
        ('{"value_base64": "?"}', "not valid base64"),
        ('{"value_base64": "ä"}', "not valid base64"),
        ('{"value_base64": 5}', "not valid base64"),
        ('{"value": "\\ud800"}', "surrogate"),
        ('{"value": {"a": "\\ud800"}}', "surrogate"),
        ('{"value": ' + "[" * 200_000 + "]" * 200_000 + "}", "too deeply"),
        ('{"headers": 1}', "headers are invalid"),
        ('{"headers": ["a"]}', "headers are invalid"),
        ('{"headers": [{"value": "x"}]}', "no key"),
        ('{"headers": [{"key": "x", "kind": "string"}]}', "unknown field"),
        ('{"headers": [{"key": "x", "value": "1", "value_kind": "int"}]}', "unknown kind"),
        ('{"id": "12"}', "32 hexadecimal"),
        ('{"origin_timestamp": "yesterday"}', "ISO 8601"),
        ('{"origin_timestamp": true}', "ISO 8601"),
        ('{"event": "created"}', "event is not an object"),
        ('{"event": {"schema_version": 1}}', "event needs a string type"),
        ('{"event": {"type": "t", "schema_version": "1"}}', "event needs a string type"),
    ],
)  # fmt: skip
def test_invalid_lines_are_rejected(line: str | bytes, reason: str) -> None:
    with pytest.raises(Invalid) as caught:
        read(line)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert reason in caught.value.message
    assert "\n" not in caught.value.message


def test_records_do_not_control_the_terminal() -> None:
    value = "a\x1b[2J\x9b\u202eb\x7f".encode()
    record = Record(value=value, key=value)
    line = line_of_record(record, topic="t", partition=0, form=LineFormat.JSONL)
    assert line.decode().strip().isprintable()
    assert read(line) == replace(record, append_time_us=0)
    assert line_of_record(record, topic="t", partition=0, form=LineFormat.RAW) == value + b"\n", (
        "other programs get the unescaped bytes"
    )
    shown = line_of_record(record, topic="t", partition=0, form=LineFormat.RAW, for_terminal=True)
    assert shown == rb"a\x1b[2J\x9b\u202eb\x7f" + b"\n"
    for_terminal = line_of_record(
        Record(value=b"\xff\x1b"), topic="t", partition=0, form=LineFormat.RAW, for_terminal=True
    )
    assert for_terminal == rb"\xff\x1b" + b"\n"
