"""Ambiguous encodings of the documented dialect, which other dialects or the bytes themselves could also mean."""

from __future__ import annotations

import pytest

from polywire.protocols.iggy import decoder, documented
from polywire.protocols.iggy.client_codec import BALANCED, ident, messages, name, read_stream, read_topics, request
from polywire.protocols.iggy.messages import U32, Code, Refused, str32_bytes
from polywire.protocols.iggy.session import FRAME_BYTES_MAX
from polywire.records.columns import Record
from tests.unit.protocols.iggy.dialogue import Dialogue, World

LOGIN = name("iggy") + name("iggy")
TOPIC = U32.pack(7) + U32.pack(2) + U32.pack(60) + name("seventh")


def later(world: World) -> Dialogue:
    """Return a client of a dialect that does not normalize names."""
    peer = world.connect()
    assert peer.classic(Code.LOGIN, LOGIN + str32_bytes("0.8.0") + str32_bytes(""))[0] == 0
    return peer


@pytest.mark.parametrize("spare", documented.SPARE)
def test_the_go_client_logs_in_and_sends_two_zeros_after_a_topic(spare: bytes) -> None:
    peer = World().connect()
    assert peer.classic(Code.LOGIN, LOGIN)[0] == 0
    assert peer.classic(Code.CREATE_STREAM, U32.pack(1) + name("s")) == (0, b"")
    assert peer.classic(Code.CREATE_TOPIC, ident(1) + TOPIC + spare) == (0, b"")
    found = read_topics(peer.classic(Code.GET_TOPICS, ident(1))[1])
    assert [(seen.id, seen.partition_count, seen.expiry_s, seen.name) for seen in found] == [(7, 2, 60, "seventh")]


def test_an_exact_name_is_found_before_a_normalized_one() -> None:
    world = World()
    new, old = later(world), world.connect()
    assert new.classic(Code.CREATE_STREAM, name("Orders"))[0] == 0
    assert old.classic(Code.CREATE_STREAM, U32.pack(9) + name("ORDERS"))[0] == 0
    assert old.classic(Code.CREATE_STREAM, U32.pack(10) + name("Orders"))[0] == 1012
    numbers = [
        read_stream(old.classic(Code.GET_STREAM, ident(said))[1])[0].id for said in ("Orders", "ORDERS", "orders")
    ]
    assert numbers == [1, 9, 9]
    assert new.classic(Code.GET_STREAM, ident("ORDERS")) == (0, b""), "in this dialect names are not normalized"
    topic = U32.pack(1) + bytes((1,)) + bytes(8) + bytes(8) + bytes((1,))
    assert new.classic(Code.CREATE_TOPIC, ident("Orders") + topic + name("Paid"))[0] == 0
    assert old.classic(Code.CREATE_TOPIC, ident("Orders") + U32.pack(5) + bytes(8) + name("Paid"))[0] == 2013
    assert old.classic(Code.CREATE_TOPIC, ident("Orders") + U32.pack(5) + bytes(8) + name("PAID"))[0] == 0


def test_a_missing_topic_is_reported_by_the_kind_of_identifier() -> None:
    peer = World().connect()
    assert peer.classic(Code.CREATE_STREAM, U32.pack(1) + name("S"))[0] == 0
    asked = [(ident(3), 1009), (ident("X"), 1010), (ident("S"), 2011)]
    assert [peer.classic(Code.GET_TOPIC, stream + ident("T"))[0] for stream, _ in asked] == [
        error for _, error in asked
    ]
    assert peer.classic(Code.GET_TOPIC, ident("S") + ident(4))[0] == 2010


def test_an_ambiguous_stream_identifier_is_refused() -> None:
    """The identifier's letters could be an id, and the third one the length of a name that ends with the request."""
    called = "abd" + "-" * 48
    whole = ident(called) + name(called)
    assert len(whole) == 4 + 1 + ord("d")
    peer = World().connect()
    assert peer.classic(Code.CREATE_STREAM, whole)[0] == 3
    assert peer.classic(Code.CREATE_STREAM, ident("aa") + name("large"))[0] == 3
    assert peer.classic(Code.CREATE_STREAM, U32.pack(0x61610302) + name("large"))[0] == 0, "it is not ambiguous"


def test_an_ambiguous_topic_identifier_is_refused() -> None:
    """An identifier of two letters has as many bytes as an id."""
    peer = World().connect()
    assert peer.classic(Code.CREATE_STREAM, U32.pack(1) + name("s"))[0] == 0
    assert peer.classic(Code.CREATE_TOPIC, ident(1) + ident("q1") + TOPIC[4:])[0] == 3
    assert peer.classic(Code.CREATE_TOPIC, ident(1) + U32.pack(0x31710302) + TOPIC[4:])[0] == 0
    assert peer.classic(Code.CREATE_TOPIC, ident(1) + U32.pack(1025) + TOPIC[4:-7] + b"seventy")[0] == 0


def test_truncated_requests_are_refused() -> None:
    for code, payload in (
        (Code.CREATE_STREAM, ident(5) + name("abc")),
        (Code.CREATE_TOPIC, ident(1) + ident(5) + TOPIC[4:]),
    ):
        assert documented.reader_of(code, memoryview(payload)).left > 0
        for size in range(len(payload)):
            with pytest.raises(Refused) as refused:
                documented.reader_of(code, memoryview(payload[:size]))
            assert refused.value.number == 3


def test_a_batch_has_one_encoding() -> None:
    listed = bytes(16) + U32.pack(5) + b"hello"
    whole = messages([Record(value=b"hello")])
    assert isinstance(decoder.from_flat(listed * 2, 0, 50, None, decoder.LISTED), bytearray)
    assert decoder.from_flat(listed + whole, 0, 54, None, decoder.LISTED) == 3
    assert decoder.from_flat(listed + whole, 0, 54) == 3
    assert decoder.from_flat(listed, 0, 25, None, 21) == 3


def test_messages_as_byte_lists_exist_in_the_documented_dialect_only() -> None:
    peer = World().connect()
    assert peer.classic(Code.LOGIN, LOGIN)[0] == 0
    assert peer.classic(Code.CREATE_STREAM, U32.pack(1) + name("s"))[0] == 0
    assert peer.classic(Code.CREATE_TOPIC, ident(1) + TOPIC)[0] == 0
    listed = bytes(16) + U32.pack(5) + b"hello"
    assert peer.classic(Code.SEND, ident(1) + ident(7) + BALANCED + listed)[0] == 3


def test_a_first_request_is_detected_by_its_code_up_to_the_longest() -> None:
    factory = World().factory
    first = [U32.pack(length) + U32.pack(Code.SEND) for length in (4, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1)]
    assert [factory.recognise(opening) for opening in first] == [True, True, False]
    assert [factory.recognise(opening[:4]) for opening in first] == [None, None, False]
    assert factory.recognise(U32.pack(FRAME_BYTES_MAX) + U32.pack(9)) is False
    assert factory.recognise(request(Code.PING)) is True
