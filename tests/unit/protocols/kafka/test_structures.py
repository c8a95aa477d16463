"""The message codec: refused and ignored bytes, and fields that are not copied."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from polywire.errors import PeerError
from polywire.protocols.kafka import client_codec, codec, schema
from polywire.protocols.kafka.messages import SERVED, Api, Request
from polywire.protocols.kafka.structure_decoder import AT_ONCE_MAX, ELEMENTS_MAX, Wide, decode
from polywire.protocols.kafka.structure_encoder import PART_BYTES_MIN, encode, encode_entries, encode_entry

METADATA = schema.request(Api.METADATA)
PRODUCE = schema.request(Api.PRODUCE)
FETCHED = schema.response(Api.FETCH)


def head(api: int, version: int, client_id: bytes | None = b"c") -> bytes:
    name = struct.pack(">h", -1) if client_id is None else struct.pack(">h", len(client_id)) + client_id
    return struct.pack(">hhi", api, version, 7) + name


def test_a_truncated_message_is_refused_at_every_byte() -> None:
    topics = [PRODUCE.Topics(name="t", partitions=[PRODUCE.Topics.Partitions(index=1, records=b"abc")])]
    for version in (3, 9):
        frame = client_codec.encode_request(
            Api.PRODUCE, version, 7, PRODUCE(transactional_id="x", acks=1, topics=topics), client_id="c"
        )[4:]
        assert codec.decode_request(frame).body.topics == topics
        for end in range(len(frame)):
            with pytest.raises(PeerError) as caught:
                codec.decode_request(frame[:end])
            assert caught.value.fatal


def test_bytes_after_a_complete_body_are_ignored() -> None:
    """A widespread client writes an array's count in four bytes instead of one, which leaves three bytes over."""
    assert codec.decode_request(head(3, 9) + b"\0" + b"\0\0\0\0" + b"\1\0\0").body.topics is None
    frame = client_codec.encode_request(Api.METADATA, 4, 7, METADATA(topics=None))[4:]
    assert codec.decode_request(frame + b"more").body == codec.decode_request(frame).body


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        head(18, 3)[:9],
        head(3, 14),
        head(3, -1),
        head(99, 0),
        head(-1, 0),
        head(7, 0),
        head(0, 2) + bytes(100),  # advertised, but never implemented
        struct.pack(">hhih", 18, 0, 7, -2),
        struct.pack(">hhih", 18, 0, 7, 200) + bytes(199),
        head(18, 3) + b"\0" + b"\xff\xff\xff\xff\xff",  # a varint without an end
        head(18, 3) + b"\0" + b"\xff\xff\xff\xff\x7f" + bytes(100),
        head(18, 3) + b"\0" + b"\x00\x01\x00",  # a forbidden null
        head(18, 3) + b"\0" + b"\x03\xff\xfe\x01\x00",  # not UTF-8
        head(18, 3) + b"\x01\x05\x7f" + b"\x01\x01\x00",  # a tag longer than the rest
        head(3, 1) + struct.pack(">i", 2**31 - 1) + bytes(1000),
        head(3, 1) + struct.pack(">i", -2),
        head(36, 0) + struct.pack(">i", -1),
    ],
)
def test_invalid_requests_close_the_connection(frame: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        codec.decode_request(frame)
    assert caught.value.fatal


def test_a_client_id_is_optional_and_arbitrary() -> None:
    for client_id, text in ((None, None), (b"", ""), (b"x" * 30_000, "x" * 30_000), (b"\xff", "\ufffd")):
        assert codec.decode_request(head(18, 0, client_id)).client_id == text


def test_unknown_tags_are_skipped() -> None:
    tags = b"\x02\x07\x02ab\xff\x01\x00"
    request = codec.decode_request(head(18, 3) + tags + b"\x02n\x02v" + tags)
    assert (request.body.client_software_name, request.body.client_software_version) == ("n", "v")


def test_a_tagged_field_is_decoded_from_its_own_bytes_only() -> None:
    program = schema.response_program(Api.API_VERSIONS, 3)
    plain = b"\0\0" + b"\1" + bytes(4)
    known = decode(program, plain + b"\x02\x01\x08" + struct.pack(">q", 5) + b"\x09\x00")
    assert known.finalized_features_epoch == 5
    assert decode(program, plain + b"\0").finalized_features_epoch == -1
    assert decode(program, plain + b"\x01\x01\x0a" + struct.pack(">q", 5) + b"xx").finalized_features_epoch == 5
    with pytest.raises(PeerError):
        decode(program, plain + b"\x01\x01\x07" + struct.pack(">q", 5))


def wide(frame: bytes) -> list[Any]:
    """Return the steps of decoding a request of any width."""
    return list(codec.decode_wide_body(frame, *codec.decode_head(frame)))


def test_the_total_number_of_elements_of_a_request_is_limited() -> None:
    for count, read in ((AT_ONCE_MAX, lambda frame: codec.decode_request(frame).body), (ELEMENTS_MAX, wide)):
        topics = [METADATA.Topics(name="") for _ in range(count)]
        frame = client_codec.encode_request(Api.METADATA, 9, 7, METADATA(topics=topics))[4:]
        found = read(frame)
        assert (found[-1] if isinstance(found, list) else found).topics == topics
        topics.append(METADATA.Topics(name=""))
        frame = client_codec.encode_request(Api.METADATA, 9, 7, METADATA(topics=topics))[4:]
        with pytest.raises(Wide, match="too many elements"):
            read(frame)


def test_requests_of_many_elements_are_decoded_with_pauses() -> None:
    partitions = [PRODUCE.Topics.Partitions(index=number, records=b"r") for number in range(5_000)]
    for topics in (
        [PRODUCE.Topics(name="t", partitions=partitions)],
        [PRODUCE.Topics(name=f"t{number}", partitions=[one]) for number, one in enumerate(partitions)],
        [PRODUCE.Topics(name=f"t{number}", partitions=partitions[:number]) for number in range(90)],
    ):
        for version in (3, 9):
            request = PRODUCE(transactional_id="x", acks=1, topics=topics)
            frame = client_codec.encode_request(Api.PRODUCE, version, 7, request)[4:]
            *pauses, body = wide(frame)
            assert body == request
            assert pauses == [None] * len(pauses)
            assert len(pauses) >= 5_000 // 64
            with pytest.raises(PeerError):
                wide(frame[:-1])


def test_tags_count_as_elements() -> None:
    tags = b"\x01\x00" * (ELEMENTS_MAX + 1)
    body = b"\x02n\x02v" + b"\xa1\x8d\x06" + tags
    with pytest.raises(Wide):
        codec.decode_request(head(18, 3) + b"\0" + body)
    with pytest.raises(Wide):
        wide(head(18, 3) + b"\0" + body)
    with pytest.raises(Wide):
        codec.decode_request(head(18, 3) + b"\xa1\x8d\x06" + tags + b"\x02n\x02v\0")


def test_decoded_records_are_views() -> None:
    topics = [PRODUCE.Topics(name="t", partitions=[PRODUCE.Topics.Partitions(records=b"abc")])]
    frame = bytearray(client_codec.encode_request(Api.PRODUCE, 9, 7, PRODUCE(topics=topics))[4:])
    [topic] = codec.decode_request(frame).body.topics
    assert topic.partitions[0].records.obj is frame
    assert codec.decode_request(head(0, 3) + struct.pack(">hhiiiiii", -1, 1, 0, 0, 0, 0, 0, 0)).body.topics == []


@pytest.mark.parametrize("version", [4, 11, 12, 18])
def test_encoded_records_are_separate_parts(version: int) -> None:
    large, small = memoryview(bytes(PART_BYTES_MIN)), b"s" * (PART_BYTES_MIN - 1)
    entry: Any = FETCHED.Responses.Partitions  # the encoder also accepts several consecutive buffers
    partitions = [
        entry(index=0, records=large),
        entry(index=1, records=small),
        entry(index=2, records=[large, small, large]),
        entry(index=3, records=[]),
        entry(index=4, records=None),
    ]
    body = FETCHED(responses=[FETCHED.Responses(topic="t", partitions=partitions)])
    parts = codec.encode_response(Request(Api.FETCH, version, 7, None, METADATA()), body)
    assert sum(part is large for part in parts) == 3
    sent = b"".join(parts)
    assert len(sent) == 4 + int.from_bytes(sent[:4], "big")
    found = client_codec.decode_response(Api.FETCH, version, sent[4:])[1].responses[0].partitions
    assert [None if p.records is None else bytes(p.records) for p in found] == [
        bytes(large),
        small,
        bytes(large) + small + bytes(large),
        b"",
        None,
    ]


@pytest.mark.parametrize("version", range(1, 14))
@pytest.mark.parametrize(("topics", "partitions", "steps"), [(0, 0, 0), (3, 64, 3), (2, 65, 132)])
def test_entries_can_be_encoded_one_by_one(version: int, topics: int, partitions: int, steps: int) -> None:
    """Entries with many nested entries take a step for each."""

    def made() -> Any:
        answer = schema.response(Api.METADATA)
        reported = [answer.Topics.Partitions(index=number, replica_nodes=[1]) for number in range(partitions)]
        return answer(topics=[answer.Topics(name=f"t{number}", partitions=list(reported)) for number in range(topics)])

    program, body = schema.response_program(Api.METADATA, version), made()
    assert len(list(encode_entries(program, body))) == steps
    assert encode(program, body) == encode(program, made())
    reported: list[Any] = [part for topic in made().topics for part in encode_entry(program, topic)]
    assert encode(program, schema.response(Api.METADATA)(topics=list(filter(None, reported)))) == encode(
        program, made()
    )
    assert len(reported) == steps


def test_a_null_that_a_version_lacks_is_written_as_empty() -> None:
    answer = schema.response(Api.JOIN_GROUP)
    for version, name in ((6, ""), (7, None)):
        sent = b"".join(codec.encode_response(Request(Api.JOIN_GROUP, version, 7, None, answer()), answer()))
        assert client_codec.decode_response(Api.JOIN_GROUP, version, sent[4:])[1].protocol_name == name


@pytest.mark.parametrize(
    "body",
    [
        schema.response(Api.HEARTBEAT)(error=1 << 15),
        schema.response(Api.HEARTBEAT)(error=-(1 << 15) - 1),
        schema.response(Api.HEARTBEAT)(throttle_ms=1 << 31),
    ],
)
def test_a_number_out_of_range_is_not_truncated(body: object) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode(schema.response_program(Api.HEARTBEAT, 4), body)


def test_a_string_longer_than_its_length_field_allows_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode(schema.request_program(Api.HEARTBEAT, 0), schema.request(Api.HEARTBEAT)(group_id="x" * 32768))


def test_a_message_class_has_the_fields_of_all_versions() -> None:
    body = codec.decode_request(head(3, 0) + struct.pack(">i", 0)).body
    assert body == METADATA(topics=[], may_create=True, want_topic_operations=False)
    with pytest.raises(TypeError, match="nothing_like_it"):
        METADATA(nothing_like_it=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("api", Api)
def test_names_of_fields_are_interned(api: Api) -> None:
    """The codec sets fields by name. A name that is not interned is looked up by its value each time."""

    def names(structure: schema.Structure) -> Iterator[str]:
        for field in structure.fields:
            yield field.name
            yield from names(field.structure) if field.structure is not None else ()

    message = schema.message(api)
    for name in (*names(message.request), *names(message.response)):
        assert name is sys.intern(name.encode().decode())


def test_only_served_apis_are_decoded() -> None:
    frame = client_codec.encode_request(Api.METADATA, 4, 7, METADATA(topics=None))[4:]
    with pytest.raises(PeerError):
        codec.decode_request(frame, {Api.FETCH: SERVED[Api.FETCH]})
