"""The compiled FLUX codec against the precise parser and plain Python: the same lines, groups and replies."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.client.flux import read_records, resolve_boundary
from polywire.protocols.flux import decoder, encoder, messages
from polywire.protocols.flux.encoder import put_chunks
from polywire.records.columns import Record
from polywire.records.rows import from_records

PIECES = [
    b"V1",
    b"v1",
    b"|",
    b"PRODUCE",
    b"produce",
    b"CONSUME",
    b" ",
    b"  ",
    b":",
    b"t",
    b"topic.a-b_c",
    b"a=b",
    b".",
    b"..",
    b"k",
    b"v",
    b"acks=0",
    b"acks=1",
    b"acks=all",
    b"acks=10",
    b"\r",
    b"\t",
    b"\x1c",
    b"\x7f",
    b"\xc2\x85",
    b"\xc2\xa0",
    b"\xc3\xa9",
    b"\xe1\x9a\x80",
    b"\xe2\x80\x8a",
    b"\xe2\x80\x8b",
    b"\xe2\x80\xa8",
    b"\xe2\x81\x9f",
    b"\xe3\x80\x80",
    b"\xe6\x97\xa5",
    b"\xf0\x9f\x98\x80",
    b"\xed\xa0\x80",
    b"\xff",
    b"\xe2\x80",
    b"12",
]

words = st.lists(st.sampled_from(PIECES), max_size=8).map(b"".join)
whole = st.builds(
    lambda correlation, topic, key, value, tail: b"V1|%b|PRODUCE|%b %b:%b%b" % (correlation, topic, key, value, tail),
    words,
    st.sampled_from([b"t", b"topic.a-b_c", b"a=b", b".", b"..", b"x" * 249, b"x" * 250]),
    words,
    words,
    st.sampled_from([b"", b" acks=0", b" acks=1", b" acks=all", b"\r", b" acks=0\r", b" ", b"\r\r"]),
)
line = st.one_of(whole, words).map(lambda text: text.replace(b"\n", b""))


@given(st.lists(line, max_size=6))
def test_bulk_scanned_lines_equal_those_of_the_precise_parser(lines: list[bytes]) -> None:
    data = b"".join(text + b"\n" for text in lines)
    work = memoryview(array("q", bytes(8 * decoder.WORK_WORDS)))
    at, number = 0, 0
    while at < len(data):
        reason, after, end, count, topics = decoder.scan(data, at, len(data), work)
        names = [
            data[work[7 * decoder.RUN_RECORDS_MAX + 2 * t] :][: work[7 * decoder.RUN_RECORDS_MAX + 2 * t + 1]]
            for t in range(topics)
        ]
        for index in range(count):
            request = messages.parse(lines[number])
            number += 1
            key_at, key_size, value_at, value_size = work[4 * index : 4 * index + 4]
            place = 4 * decoder.RUN_RECORDS_MAX + 2 * index
            assert request.command == "PRODUCE"
            assert request.id == data[work[place] : work[place] + work[place + 1]]
            assert request.args[0] == names[work[6 * decoder.RUN_RECORDS_MAX + index]]
            assert messages.topic_name(request.args[0])
            key, _, value = request.args[1].partition(b":")
            assert key == data[key_at : key_at + key_size]
            assert value == data[value_at : value_at + value_size]
            assert messages.is_plain(value)
            assert request.args[2:] in ([], [b"acks=0"], [b"acks=1"])
        at = after
        if reason == decoder.LINE:
            assert data[at : end - 1] == lines[number]
            number += 1
            at = end
        else:
            assert reason == decoder.FULL or at == len(data)
    assert number == len(lines)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50), st.integers(0, 3))
def test_records_are_grouped_like_a_dictionary(partitions: list[int], base: int) -> None:
    count = len(partitions)
    seats, groups, rows = array("i", bytes(40)), array("i", bytes(4 * count)), array("i", bytes(4 * count))
    bounds = array("i", bytes(8 * count))
    total = decoder.divide(array("i", partitions), count, None, base, seats, groups, rows, bounds)
    expected: dict[int, list[int]] = {}
    for index, partition in enumerate(partitions):
        expected.setdefault(partition, []).append(index)
    assert total == len(expected)
    assert [bounds[2 * group + 1] for group in range(total)] == list(expected)
    assert list(rows) == [index for indexes in expected.values() for index in indexes]
    assert [bounds[2 * (groups[index] - base) + 1] for index in range(count)] == partitions
    assert not any(seats), "the slots are free again"


numbers = st.integers(-(2**63) + 1, 2**63 - 100)


@given(st.lists(st.binary(max_size=5).map(lambda text: text.replace(b"\n", b"")), min_size=1, max_size=20), numbers)
def test_replies_equal_those_of_plain_python(ids: list[bytes], start: int) -> None:
    groups = array("i", [index % 2 for index in range(len(ids))])
    table = array("q", [3, start, -1, 70_000, 5, 10**18])
    out = bytearray(sum(map(len, ids)) + len(ids) * (1 + encoder.REPLY_BYTES))
    size = encoder.put_produced(b"".join(name + b"\n" for name in ids), groups, table, out)
    offsets = [start, 5]
    expected = b""
    for index, name in enumerate(ids):
        group = index % 2
        hw = max(offsets[group], (-1, 10**18)[group])
        expected += b"V1|%b|OK|partition=%d offset=%d hw=%d\n" % (name, (3, 70_000)[group], offsets[group], hw)
        offsets[group] += 1
    assert bytes(out[:size]) == expected


def shown(value: bytes) -> bytes:
    """Apply the rule of the specification in Python."""
    try:
        clean = value.decode().isprintable() or not any(c < 0x20 or c == 0x7F for c in value)
    except UnicodeDecodeError:
        clean = False
    if clean and b" hw=" not in value:
        return value
    text = ""
    for character in value.decode("utf-8", "surrogateescape"):
        code = ord(character)
        if 0xDC80 <= code <= 0xDCFF:
            text += f"%{code - 0xDC00:02X}"
        elif code < 0x20 or code == 0x7F or character == "%":
            text += f"%{code:02X}"
        else:
            text += character
    return text.replace(" hw=", "%20hw=").encode()


values = st.one_of(
    st.binary(max_size=20),
    st.text(max_size=10).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(st.sampled_from([b" hw=", b"%", b"\n", b",1:", b"a", b"\xc3\xa9", b"\xc3"]), max_size=6).map(b"".join),
)


@given(st.lists(values, min_size=1, max_size=12), st.integers(0, 12), st.integers(1, 14), st.integers(1, 200))
def test_consumed_values_are_escaped_and_capped(payloads: list[bytes], start: int, end: int, limit: int) -> None:
    batch = from_records([Record(payload) for payload in payloads])
    out, size, escaped = put_chunks([memoryview(batch)], start, end, limit, bytearray(8))
    wanted = [(index, shown(value)) for index, value in enumerate(payloads) if start <= index < end]
    expected: list[bytes] = []
    for index, text in wanted:
        expected.append(b"%d:%b" % (index, text))
        if len(expected) > 1 and len(b",".join(expected)) > limit:
            expected.pop()
            break
    assert bytes(out[:size]) == b",".join(expected)
    assert b"\n" not in out[:size]
    assert escaped >= sum(payloads[start + index] != wanted[index][1] for index in range(len(expected)))


awkward = st.lists(st.sampled_from([b",1:", b",2:", b",3:", b"0:", b"a", b",", b":", b"11:", b",10:"]), max_size=5).map(
    b"".join
)


@given(st.lists(awkward, min_size=1, max_size=12))
def test_the_client_decodes_ambiguous_values_exactly(payloads: list[bytes]) -> None:
    hw = len(payloads) - 1

    def reply(start: int) -> bytes:
        return b",".join(b"%d:%b" % (index, value) for index, value in enumerate(payloads) if index >= start)

    read: list[bytes] = []
    while len(read) < len(payloads):
        batch = read_records(reply(len(read)), hw)
        read += batch.values
        if batch.rest:
            value = resolve_boundary(batch.rest, reply(batch.next + 1))
            assert value is not None
            read.append(value)
    assert read == payloads


@given(
    prefix=st.binary(max_size=40),
    request_id=st.text("abc0129-", min_size=1, max_size=20),
    topic=st.from_regex(r"[a-z]{1,10}", fullmatch=True),
    key=st.text("abc", max_size=10),
)
def test_the_first_record_is_parsed_in_one_call(prefix: bytes, request_id: str, topic: str, key: str) -> None:
    data = prefix + f"V1|{request_id}|PRODUCE|{topic} {key}:value\n".encode()
    work = memoryview(array("q", bytes(8 * decoder.WORK_WORDS)))
    assert decoder.scan(data, len(prefix), len(data), work)[3] == 1
    assert decoder.first_of(data, work) == (request_id.encode(), topic, key.encode())
    with pytest.raises(ValueError, match="outside"):
        decoder.first_of(data[:-10], work)
    with pytest.raises(ValueError, match="too small"):
        decoder.first_of(data, work[:10])
