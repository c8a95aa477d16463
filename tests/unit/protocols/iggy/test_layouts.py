"""Records of every kind in every layout of polled messages, decoded by the decoder of sent messages."""

from __future__ import annotations

import zlib

import pytest
import xxhash

from polywire.protocols.iggy import decoder, encoder
from polywire.records.batch import stamp
from polywire.records.columns import Event, Header, HeaderKind, Record
from polywire.records.rows import from_records, to_records

FORMS = [encoder.FLAT, encoder.D2A, encoder.D2B, encoder.D2C, encoder.D3]
HEADS = {encoder.FLAT: 45, encoder.D2A: 56, encoder.D2B: 56, encoder.D2C: 64, encoder.D3: 48}
APPENDED_US = 1_700_000_000_000_000
ALL_KINDS = tuple(Header(b"k%d" % kind, bytes([kind]) * 3, value_kind=HeaderKind(kind)) for kind in range(1, 16))


def stored(records: list[Record], *, base: int = 10) -> bytearray:
    batch = from_records(records)
    stamp(batch, 0, 1, 1, base, 0, APPENDED_US)
    return batch


def put(
    batch: bytes | bytearray, form: int, *, start: int = 0, count: int = 100, cap: int = 100_000
) -> tuple[bytes, int, list[int]]:
    """Return the written bytes, the result, and the state."""
    state = encoder.new_state()
    state[encoder.NEXT], state[encoder.LEFT], state[encoder.CAP], state[encoder.LAST] = start, count, cap, -1
    state[encoder.SEED_LOW], state[encoder.SEED_HIGH] = 7, 8
    out = bytearray(cap)
    ended = encoder.put_chunk(batch, 0, out, state, form)
    return bytes(out[: state[encoder.AT]]), ended, list(state)


def taken(written: bytes, form: int) -> list[Record]:
    """Decode written bytes as if a client had sent them."""
    if form == encoder.D3:
        records: list[Record] = []
        while written:
            size = int.from_bytes(written[32:40], "little")
            batch = decoder.from_frames(written, 0, size)
            assert not isinstance(batch, int), batch
            records += to_records(batch)
            written = written[size:]
        return records
    if form == encoder.FLAT:
        sent = b"".join(_sent_flat(written))
        batch = decoder.from_flat(sent, 0, len(sent))
    else:
        index, at, ends = b"", 0, HEADS[form]
        while at < len(written):
            at += (
                ends
                + int.from_bytes(written[at + 48 : at + 52], "little")
                + int.from_bytes(written[at + 52 : at + 56], "little")
            )
            index += bytes(4) + at.to_bytes(4, "little") + bytes(8)
        sent = index + written
        batch = decoder.from_indexed(sent, 0, len(sent), len(index) // 16, ends)
    assert not isinstance(batch, int), batch
    return to_records(batch)


def _sent_flat(written: bytes) -> list[bytes]:
    """Return polled messages of the first layout as sent ones, without the fields that polls add."""
    found, at = [], 0
    while at < len(written):
        headers = int.from_bytes(written[at + 37 : at + 41], "little")
        size_at = at + 41 + headers
        end = size_at + 4 + int.from_bytes(written[size_at : size_at + 4], "little")
        assert written[at + 8] == 1
        assert int.from_bytes(written[at + 33 : at + 37], "little") == zlib.crc32(written[size_at + 4 : end])
        found.append(written[at + 17 : at + 33] + written[at + 37 : end])
        at = end
    return found


@pytest.mark.parametrize("form", FORMS)
def test_messages_round_trip(form: int) -> None:
    records = [
        Record(value=b"%d" % number * (number + 1), id=(number + 1).to_bytes(16, "little"), headers=ALL_KINDS[:number])
        for number in range(16)
    ]
    written, ended, state = put(stored(records), form)
    assert (ended, state[encoder.LAST], state[encoder.LEFT]) == (encoder.DONE, 25, 84)
    again = taken(written, form)
    assert [record.value for record in again] == [record.value for record in records]
    assert [record.id for record in again] == [record.id for record in records]
    assert [record.headers for record in again] == [record.headers for record in records]


@pytest.mark.parametrize("form", FORMS)
def test_records_without_an_id_get_a_stable_one(form: int) -> None:
    records = [Record(value=b"a"), Record(value=b"b")]
    first, _, _ = put(stored(records), form)
    later, _, _ = put(stored(records), form, start=11)
    ids = [record.id for record in taken(first, form)]
    assert None not in ids
    assert len(set(ids)) == 2
    assert taken(later, form)[0].id == ids[1], "the same at every read"
    uuid = (ids[0] or b"")[::-1]
    assert (uuid[6] >> 4, uuid[8] >> 6) == (4, 2), "a random one, like UUIDs"


@pytest.mark.parametrize("form", FORMS)
def test_header_kinds_that_a_layout_lacks(form: int) -> None:
    headers = (
        Header(b"text", b"v"),
        Header(b"number", b"v", key_kind=HeaderKind.UINT32),
        Header(b"null", None),
        Header(b"empty", b""),
        Header(b"", b"v"),
        Header(b"k" * 256, b"v"),
        Header(b"long", b"v" * 256),
    )
    (record,) = taken(put(stored([Record(value=b"x", headers=headers)]), form)[0], form)
    typed = form in (encoder.D2C, encoder.D3)
    assert [header.key for header in record.headers] == ([b"text", b"number"] if typed else [b"text"])


@pytest.mark.parametrize("form", FORMS)
def test_fields_of_events_are_shown_as_headers(form: int) -> None:
    event = Event("created", 3, 41, b"{}")
    (record,) = taken(put(stored([Record(value=b"x", event=event)]), form)[0], form)
    assert [(header.key, header.value) for header in record.headers] == [
        (b"event.type", b"created"),
        (b"event.schema_version", (3).to_bytes(4, "little")),
        (b"event.aggregate_version", (41).to_bytes(8, "little")),
        (b"event.metadata", b"{}"),
    ]


@pytest.mark.parametrize("form", FORMS)
def test_messages_that_do_not_fit_are_left_for_the_next_reply(form: int) -> None:
    batch = stored([Record(value=bytes(100)) for _ in range(10)])
    whole, _, _ = put(batch, form)
    head = 256 if form == encoder.D3 else 0
    size = HEADS[form] + 100
    written, ended, state = put(batch, form, cap=head + 3 * size + 20)
    assert (ended, state[encoder.LAST], state[encoder.LEFT]) == (encoder.FULL, 12, 97)
    assert len(written) == head + 3 * size
    assert form == encoder.D3 or whole.startswith(written)
    nothing, ended, state = put(batch, form, cap=20)
    assert (nothing, ended) == (b"", encoder.FULL)
    assert state[encoder.NEEDED] >= size
    some, ended, state = put(batch, form, start=14, count=2)
    assert (len(taken(some, form)), state[encoder.LAST]) == (2, 15)


@pytest.mark.parametrize("form", [encoder.D2A, encoder.D2B, encoder.D2C])
def test_offsets_times_and_checksums(form: int) -> None:
    batch = stored([Record(value=b"x", origin_time_us=5_000_000_000_000_000), Record(value=b"y")])
    written, _, _ = put(batch, form)
    first = written[: len(written) // 2]
    assert int.from_bytes(first[24:32], "little") == 10
    assert int.from_bytes(first[32:40], "little") == APPENDED_US
    assert int.from_bytes(first[40:48], "little") == 5_000_000_000_000_000
    assert int.from_bytes(written[len(first) + 40 : len(first) + 48], "little") == APPENDED_US
    checksum = zlib.crc32(first[8:]) if form == encoder.D2A else xxhash.xxh3_64_intdigest(first[8:])
    assert int.from_bytes(first[:8], "little") == checksum


def test_times_too_far_apart_for_one_record_of_the_current_layout() -> None:
    hour = 3_600_000_000
    times = [APPENDED_US, APPENDED_US + hour, APPENDED_US + 3 * hour, APPENDED_US + 3 * hour + 5]
    batch = stored([Record(value=b"%d" % number, origin_time_us=time) for number, time in enumerate(times)])
    written, _, _ = put(batch, encoder.D3)
    assert [record.origin_time_us for record in taken(written, encoder.D3)] == times
    assert int.from_bytes(written[32:40], "little") < len(written), "more than one record"


def test_a_time_in_milliseconds_is_detected_by_its_size() -> None:
    """The Node SDK sends milliseconds."""
    message = bytes(8) + (1).to_bytes(16, "little") + bytes(16) + (1_700_000_000_000).to_bytes(8, "little")
    message += bytes(4) + (1).to_bytes(4, "little") + b"x"
    sent = bytes(4) + len(message).to_bytes(4, "little") + bytes(8) + message
    batch = decoder.from_indexed(sent, 0, len(sent), 1, 56)
    assert not isinstance(batch, int)
    assert to_records(batch)[0].origin_time_us == 1_700_000_000_000_000


@pytest.mark.parametrize(
    ("place", "value", "error"),
    [(0, 1, 4031), (8, 1, 4032), (4, 1, 4036), (16 + 52, 0, 4024), (16 + 48, 9, 4036), (16 + 52, 200, 4036)],
)
def test_damaged_indexes_and_sizes(place: int, value: int, error: int) -> None:
    message = bytes(8) + bytes(32) + (APPENDED_US).to_bytes(8, "little") + bytes(4) + (1).to_bytes(4, "little") + b"x"
    sent = bytearray(bytes(4) + len(message).to_bytes(4, "little") + bytes(8) + message)
    assert not isinstance(decoder.from_indexed(sent, 0, len(sent), 1, 56), int)
    sent[place] = value
    assert decoder.from_indexed(sent, 0, len(sent), 1, 56) == error
    assert decoder.from_indexed(sent, 0, len(sent), 2, 56) == 4035


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        (b"\x02\x01\0\0\0k\x02\x01\0\0\0v", 0),
        (b"\x02\0\0\0\0\x02\x01\0\0\0v", 4018),
        (b"\x02\x01\0\0\0k\x02\0\0\0\0", 4019),
        (b"\x10\x01\0\0\0k\x02\x01\0\0\0v", 4040),
        (b"\x02\x01\0\0\0k\x00\x01\0\0\0v", 4040),
        (b"\x02\x01\0\0\0k\x02\x02\0\0\0v", 4019),
        (b"\x02\x01\0\0\0k\x02", 4018),
        (b"\x02\xff", 4018),
    ],
)
def test_damaged_headers(headers: bytes, error: int) -> None:
    message = bytes(48) + len(headers).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(8) + b"x" + headers
    sent = bytes(4) + len(message).to_bytes(4, "little") + bytes(8) + message
    batch = decoder.from_indexed(sent, 0, len(sent), 1, 64)
    assert batch == error if error else not isinstance(batch, int)


def test_states_and_buffers_that_do_not_fit() -> None:
    batch = stored([Record(value=b"x")])
    with pytest.raises(ValueError, match="state array has the wrong size"):
        encoder.put_chunk(batch, 0, bytearray(100), bytearray(8), encoder.FLAT)
    state = encoder.new_state()
    state[encoder.CAP] = 101
    with pytest.raises(ValueError, match="outside the output buffer"):
        encoder.put_chunk(batch, 0, bytearray(100), state, encoder.FLAT)
