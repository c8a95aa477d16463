"""Frames written by hand from docs/specs/polywire.md: the protocol must not change without its version."""

from __future__ import annotations

import pytest

from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import (
    ERROR,
    MAGIC,
    MORE,
    PREFIX_BYTES,
    decode_answer,
    decode_prefix,
    decode_request,
    encode_head,
)
from polywire.protocols.polywire.messages import Head, Verb

REQUESTS = {
    "ping": ("01000000 02 00 0000 01000000 01000000 90", Verb.PING, 1, Head()),
    "cancel 300": ("04000000 03 00 0000 02000000 04000000 91 cd012c", Verb.CANCEL, 2, messages.Cancel(300)),
    "log in": (
        "07000000 04 00 0000 03000000 07000000 92 a3626f62 a17a",
        Verb.LOGIN,
        3,
        messages.LogIn("bob", "z"),
    ),
    "topics": ("02000000 10 00 0000 03000000 02000000 91 c2", Verb.TOPICS, 3, messages.ListTopics()),
    "create t with 3 partitions": (
        "0e000000 11 00 0000 04000000 0e000000 95 a174 03 a764656661756c74 02 80",
        Verb.CREATE_TOPIC,
        4,
        messages.CreateTopic("t", 3),
    ),
    "describe t": ("03000000 12 00 0000 05000000 03000000 91 a174", Verb.DESCRIBE, 5, messages.Describe("t")),
    "grow t to 5": (
        "05000000 13 00 0000 05000000 05000000 93 a174 05 02",
        Verb.GROW_TOPIC,
        5,
        messages.GrowTopic("t", 5),
    ),
    "configure t": (
        "15000000 16 00 0000 05000000 15000000 93 a174 81 ab636f6d7072657373696f6e a36c7a34 02",
        Verb.CONFIGURE_TOPIC,
        5,
        messages.ConfigureTopic("t", {"compression": "lz4"}),
    ),
    "link t": (
        "08000000 18 00 0000 05000000 08000000 93 a174 a36f6c64 02",
        Verb.LINK_TOPIC,
        5,
        messages.LinkTopic("t", "old"),
    ),
    "bounds of t at 1": (
        "06000000 20 00 0000 06000000 06000000 92 91a174 9101",
        Verb.BOUNDS,
        6,
        messages.AskBounds(["t"], [1]),
    ),
    "fetch t/0 from 7": (
        "0b000000 21 00 0000 07000000 0b000000 99 a174 00 07 ff 00 ff ff 00 c3",
        Verb.FETCH,
        7,
        messages.Fetch("t", 0, 7),
    ),
    "produce to t by key": (
        "06000000 22 00 0000 08000000 06000000 94 a174 ff 01 c2",
        Verb.PRODUCE,
        8,
        messages.Produce("t", -1),
    ),
    "stage": (
        "19000000 23 00 0000 09000000 19000000 96 c41030303030303030303030303030303030 a174 00 01 a0 00",
        Verb.STAGE,
        9,
        messages.Stage(b"0" * 16, "t", 0),
    ),
    "publish": (
        "07000000 24 00 0000 0a000000 07000000 95 a177 04 90 90 00",
        Verb.PUBLISH,
        10,
        messages.Publish("w", 4, []),
    ),
    "publish offsets in epoch 3": (
        "14000000 24 00 0000 12000000 14000000 95 a177 04 90 91 95 a174 a167 a16d 02 82 00 07 01 2a 03",
        Verb.PUBLISH,
        18,
        messages.Publish("w", 4, [], [messages.GroupOffsets("t", "g", "m", 2, {0: 7, 1: 42})], 3),
    ),
    "begin an epoch": (
        "04000000 27 00 0000 11000000 04000000 92 a177 00",
        Verb.BEGIN_EPOCH,
        17,
        messages.BeginEpoch("w"),
    ),
    "abandon": ("02000000 25 00 0000 0b000000 02000000 91 90", Verb.ABANDON, 11, messages.Abandon([])),
    "locate t/0 from 7": (
        "08000000 26 00 0000 10000000 08000000 96 a174 00 07 ff 00 ff",
        Verb.LOCATE,
        16,
        messages.Locate("t", 0, 7),
    ),
    "commit": (
        "0b000000 30 00 0000 0c000000 0b000000 98 a174 01 01 a167 2a 01 a0 ff",
        Verb.COMMIT,
        12,
        messages.Commit("t", 1, 1, "g", 42),
    ),
    "position": (
        "07000000 31 00 0000 0d000000 07000000 94 a174 01 00 a167",
        Verb.POSITION,
        13,
        messages.AskPosition("t", 1, 0, "g"),
    ),
    "join": ("08000000 40 00 0000 0e000000 08000000 94 a167 a174 a16d c0", Verb.JOIN, 14, messages.Join("g", "t", "m")),
    "heartbeat": (
        "08000000 42 00 0000 0f000000 08000000 94 a167 a174 a16d 02",
        Verb.HEARTBEAT,
        15,
        messages.Member("g", "t", "m", 2),
    ),
}

ANSWERS = {
    "a fetched frame that goes on": (
        "03000000 21 01 0000 07000000 03000000 92 09 0a",
        Verb.FETCH,
        MORE,
        7,
        messages.Fetched(9, 10),
    ),
    "no such topic": (
        "07000000 12 02 0000 05000000 07000000 95 20 03 a16d 00 c0",
        Verb.DESCRIBE,
        ERROR,
        5,
        messages.Failure(32, 3, "m", 0),
    ),
    "located": (
        "1f000000 26 00 0000 10000000 1f000000 94 a22f64 c41030303030303030303030303030303030 91 95 a162 04 08 05 07 c2",
        Verb.LOCATE,
        0,
        16,
        messages.Located("/d", b"0" * 16, [messages.SealedRange("b", 4, 8, 5, 7)], more=False),
    ),
    "begun epoch": ("02000000 27 00 0000 11000000 02000000 91 03", Verb.BEGIN_EPOCH, 0, 17, messages.EpochBegun(3)),
    "produced": (
        "06000000 22 00 0000 08000000 06000000 91 91 93 01 05 02",
        Verb.PRODUCE,
        0,
        8,
        messages.Produced([messages.Appended(1, 5, 2)]),
    ),
}


def test_the_handshake() -> None:
    assert bytes.fromhex("f1 50 57 49 52 45 00 01") == MAGIC


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(name: str) -> None:
    text, verb, correlation, head = REQUESTS[name]
    frame = bytes.fromhex(text)
    prefix = decode_prefix(frame)
    assert (prefix.length, prefix.verb, prefix.flags, prefix.correlation) == (len(frame) - 16, verb, 0, correlation)
    assert decode_request(prefix.verb, frame[PREFIX_BYTES:]) == head
    assert encode_head(verb, correlation, head) == frame


@pytest.mark.parametrize("name", ANSWERS)
def test_responses(name: str) -> None:
    text, verb, flags, correlation, head = ANSWERS[name]
    frame = bytes.fromhex(text)
    prefix = decode_prefix(frame)
    assert (prefix.verb, prefix.flags, prefix.correlation) == (verb, flags, correlation)
    assert decode_answer(frame[PREFIX_BYTES:], type(head)) == head
    assert encode_head(verb, correlation, head, flags=flags) == frame


def test_missing_elements_have_their_defaults_and_unknown_ones_are_ignored() -> None:
    assert decode_request(Verb.FETCH, bytes.fromhex("93 a174 00 07")) == messages.Fetch("t", 0, 7)
    assert decode_request(Verb.DESCRIBE, bytes.fromhex("93 a174 01 c0")) == messages.Describe("t")


def test_a_payload_counts_in_the_length_and_not_in_the_head() -> None:
    head = encode_head(Verb.PRODUCE, 1, messages.Produce("t", 0), payload_bytes=100)
    prefix = decode_prefix(head)
    assert prefix.length == prefix.head_bytes + 100
    assert len(head) == PREFIX_BYTES + prefix.head_bytes
