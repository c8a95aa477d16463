"""Requests of the documented dialect in the forms its page has, where another dialect or the bytes themselves come between."""

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
    """A peer of a dialect that keeps names as they are written."""
    peer = world.connect()
    assert peer.classic(Code.LOGIN, LOGIN + str32_bytes("0.8.0") + str32_bytes(""))[0] == 0
    return peer


@pytest.mark.parametrize("spare", documented.SPARE)
def test_the_go_client_logs_in_and_has_two_zeros_behind_a_topic(spare: bytes) -> None:
    peer = World().connect()
    assert peer.classic(Code.LOGIN, LOGIN)[0] == 0
    assert peer.classic(Code.CREATE_STREAM, U32.pack(1) + name("s")) == (0, b"")
    assert peer.classic(Code.CREATE_TOPIC, ident(1) + TOPIC + spare) == (0, b"")
    found = read_topics(peer.classic(Code.GET_TOPICS, ident(1))[1])
    assert [(seen.id, seen.partition_count, seen.expiry_s, seen.name) for seen in found] == [(7, 2, 60, "seventh")]


def test_a_name_is_found_as_written_before_it_is_found_as_kept() -> None:
    world = World()
    new, old = later(world), world.connect()
    assert new.classic(Code.CREATE_STREAM, name("Orders"))[0] == 0
    assert old.classic(Code.CREATE_STREAM, U32.pack(9) + name("ORDERS"))[0] == 0
    assert old.classic(Code.CREATE_STREAM, U32.pack(10) + name("Orders"))[0] == 1012
    numbers = [
        read_stream(old.classic(Code.GET_STREAM, ident(said))[1])[0].id for said in ("Orders", "ORDERS", "orders")
    ]
    assert numbers == [1, 9, 9]
    assert new.classic(Code.GET_STREAM, ident("ORDERS")) == (0, b""), "there names are what they are"
    topic = U32.pack(1) + bytes((1,)) + bytes(8) + bytes(8) + bytes((1,))
    assert new.classic(Code.CREATE_TOPIC, ident("Orders") + topic + name("Paid"))[0] == 0
    assert old.classic(Code.CREATE_TOPIC, ident("Orders") + U32.pack(5) + bytes(8) + name("Paid"))[0] == 2013
    assert old.classic(Code.CREATE_TOPIC, ident("Orders") + U32.pack(5) + bytes(8) + name("PAID"))[0] == 0


def test_what_is_nowhere_is_missing_by_what_it_was_asked() -> None:
    peer = World().connect()
    assert peer.classic(Code.CREATE_STREAM, U32.pack(1) + name("S"))[0] == 0
    asked = [(ident(3), 1009), (ident("X"), 1010), (ident("S"), 2011)]
    assert [peer.classic(Code.GET_TOPIC, stream + ident("T"))[0] for stream, _ in asked] == [
        error for _, error in asked
    ]
    assert peer.classic(Code.GET_TOPIC, ident("S") + ident(4))[0] == 2010


def test_a_stream_that_may_be_either_is_refused() -> None:
    """The ident's letters would be an id, and the third of them the length of a name that ends where the request does."""
    called = "abd" + "-" * 48
    whole = ident(called) + name(called)
    assert len(whole) == 4 + 1 + ord("d")
    peer = World().connect()
    assert peer.classic(Code.CREATE_STREAM, whole)[0] == 3
    assert peer.classic(Code.CREATE_STREAM, ident("aa") + name("large"))[0] == 3
    assert peer.classic(Code.CREATE_STREAM, U32.pack(0x61610302) + name("large"))[0] == 0, "it can be nothing else"


def test_a_topic_that_may_be_either_is_refused() -> None:
    """An ident of two letters has as many bytes as an id."""
    peer = World().connect()
    assert peer.classic(Code.CREATE_STREAM, U32.pack(1) + name("s"))[0] == 0
    assert peer.classic(Code.CREATE_TOPIC, ident(1) + ident("q1") + TOPIC[4:])[0] == 3
    assert peer.classic(Code.CREATE_TOPIC, ident(1) + U32.pack(0x31710302) + TOPIC[4:])[0] == 0
    assert peer.classic(Code.CREATE_TOPIC, ident(1) + U32.pack(1025) + TOPIC[4:-7] + b"seventy")[0] == 0


def test_requests_cut_anywhere_are_refused() -> None:
    for code, payload in (
        (Code.CREATE_STREAM, ident(5) + name("abc")),
        (Code.CREATE_TOPIC, ident(1) + ident(5) + TOPIC[4:]),
    ):
        assert documented.reader_of(code, memoryview(payload)).left > 0
        for size in range(len(payload)):
            with pytest.raises(Refused) as refused:
                documented.reader_of(code, memoryview(payload[:size]))
            assert refused.value.number == 3


def test_a_batch_has_one_form() -> None:
    listed = bytes(16) + U32.pack(5) + b"hello"
    whole = messages([Record(value=b"hello")])
    assert isinstance(decoder.from_flat(listed * 2, 0, 50, None, decoder.LISTED), bytearray)
    assert decoder.from_flat(listed + whole, 0, 54, None, decoder.LISTED) == 3
    assert decoder.from_flat(listed + whole, 0, 54) == 3
    assert decoder.from_flat(listed, 0, 25, None, 21) == 3


def test_the_byte_list_of_a_message_is_the_documented_dialects_only() -> None:
    peer = World().connect()
    assert peer.classic(Code.LOGIN, LOGIN)[0] == 0
    assert peer.classic(Code.CREATE_STREAM, U32.pack(1) + name("s"))[0] == 0
    assert peer.classic(Code.CREATE_TOPIC, ident(1) + TOPIC)[0] == 0
    listed = bytes(16) + U32.pack(5) + b"hello"
    assert peer.classic(Code.SEND, ident(1) + ident(7) + BALANCED + listed)[0] == 3


def test_a_first_request_is_recognised_by_its_code_up_to_the_longest_one() -> None:
    factory = World().factory
    first = [U32.pack(length) + U32.pack(Code.SEND) for length in (4, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1)]
    assert [factory.recognise(opening) for opening in first] == [True, True, False]
    assert [factory.recognise(opening[:4]) for opening in first] == [None, None, False]
    assert factory.recognise(U32.pack(FRAME_BYTES_MAX) + U32.pack(9)) is False
    assert factory.recognise(request(Code.PING)) is True
