"""Topic options as texts: numbers with units, parsed in linear time."""

from __future__ import annotations

import pytest

from polywire.protocols.iggy import errors
from polywire.protocols.iggy.messages import Refused
from polywire.protocols.iggy.options import BYTES_MAX, encode_options, parse_options, topic_options

TEXT, BOOL, U32, U64 = 2, 3, 11, 12
DAY_US = 86_400_000_000


def option(key: bytes, value: bytes) -> bytes:
    return b"".join(bytes((TEXT,)) + len(part).to_bytes(4, "little") + part for part in (key, value))


@pytest.mark.parametrize(
    ("text", "expiry_us"),
    [
        (b"1 day", DAY_US),
        (b"2 days 5us", 2 * DAY_US + 5),
        (b"10", 10),
        (b"1s2ms", 1_002_000),
        (b" 7 Days ", 7 * DAY_US),
        (b"0", None),
        (b"never", 0),
    ],
)
def test_durations(text: bytes, expiry_us: int | None) -> None:
    assert topic_options(option(b"message_expiry", text)).expiry_us == expiry_us


@pytest.mark.parametrize(
    "text", [b"", b" ", b"day", b"1 fortnight", b"1,5 s", b"-1", b"9" * 60, b"9" * 5000, b"1 " * (BYTES_MAX // 2 - 50)]
)
def test_invalid_durations_are_refused(text: bytes) -> None:
    with pytest.raises(Refused) as refused:
        topic_options(option(b"message_expiry", text))
    assert refused.value.number == errors.BAD_OPTION


def typed(key: bytes, kind: int, value: bytes) -> bytes:
    return (
        bytes((TEXT,))
        + len(key).to_bytes(4, "little")
        + key
        + bytes((kind,))
        + len(value).to_bytes(4, "little")
        + value
    )


def u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (option(b"message_expiry", b"7 days"), typed(b"message_expiry", U64, u64(7 * DAY_US))),
        (option(b"max_topic_size", b"1 GB"), typed(b"max_topic_size", U64, u64(10**9))),
        (option(b"segment_size", b"1 MiB"), typed(b"segment_size", U64, u64(1 << 20))),
        (option(b"durability", b"Persisted"), typed(b"durability", TEXT, b"persisted")),
        (option(b"compression_algorithm", b"GZIP"), typed(b"compression_algorithm", TEXT, b"gzip")),
        (typed(b"message_expiry", U64, u64(0)), b""),  # 0 requests the default
    ],
)
def test_values_are_returned_in_the_type_of_the_catalogue(given: bytes, reported: bytes) -> None:
    assert topic_options(given).given == reported


@pytest.mark.parametrize(
    "block",
    [
        typed(b"compression_algorithm", U64, u64(1)),
        option(b"compression_algorithm", b"zstd"),
        typed(b"message_expiry", U64, b"\1"),
        typed(b"message_expiry", U32, b"\1\0\0\0"),
        typed(b"segment_size", U64, u64(1000)),
        typed(b"segment_size", U64, u64((1 << 20) + 1)),
        typed(b"segment_size", U64, u64(1 << 31)),
        option(b"durability", b"fast"),
        option(b"consumer_offset_durability", b""),
        typed(b"enforce_fsync", BOOL, b"\2"),
        typed(b"enforce_fsync", BOOL, b""),
        option(b"preallocate_segments", b"true"),
        typed(b"messages_required_to_save", U32, b"\1"),
        typed(b"size_of_messages_required_to_save", U32, b"\1\0\0\0"),
        option(b"durability", b"persisted") + option(b"durability", b"persisted"),
    ],
)
def test_bad_values_are_refused(block: bytes) -> None:
    with pytest.raises(Refused) as refused:
        topic_options(block)
    assert refused.value.number == errors.BAD_OPTION


def test_an_update_changes_only_given_options() -> None:
    before = topic_options(option(b"durability", b"persisted") + option(b"message_expiry", b"1 s")).given
    same = option(b"durability", b"persisted") + option(b"message_expiry", b"2 s")
    assert topic_options(same, before).given == topic_options(same).given
    with pytest.raises(Refused) as refused:
        topic_options(option(b"durability", b"replicated"), before)  # can only be chosen at creation
    assert refused.value.number == errors.BAD_OPTION


def test_the_record_of_a_topic_lists_given_and_default_options() -> None:
    given = topic_options(option(b"message_expiry", b"1 day")).given
    reported = encode_options(given, 2, DAY_US, 5000, today=False)
    size = int.from_bytes(reported[:4], "little")
    asked, unasked = parse_options(reported[4 : 4 + size]), parse_options(reported[8 + size :])
    assert asked == {b"message_expiry": (U64, u64(DAY_US))}
    assert unasked[b"compression_algorithm"] == (
        TEXT,
        b"gzip",
    )  # set over another dialect, and therefore not given as an option
    assert unasked[b"max_topic_size"] == (U64, u64(5000))
    assert unasked[b"segment_size"] == (U64, u64(1 << 30))
    assert len(unasked) == 9
