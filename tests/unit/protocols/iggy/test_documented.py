"""The documented dialect: rules and errors of each command (spec: iggy#classic-framing, iggy#d0-requests)."""

from __future__ import annotations

import os

import pytest

from polywire.errors import ErrorCode
from polywire.log.base import Read
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.client_codec import by_key, ident, messages, name, place, poll, request, to_partition
from polywire.protocols.iggy.dialect import D0, D1C
from polywire.protocols.iggy.errors import NUMBERS, number_of
from polywire.protocols.iggy.messages import U32, U64, Code, Consumer, Refused
from polywire.records.columns import Header, HeaderKind, Record
from polywire.records.partitioner import murmur3_128, xxh32
from polywire.types import KeyHash, PositionKind, TopicName
from tests.unit.protocols.iggy.dialogue import Dialogue, World

TOPIC = ident(1) + ident(1)
READER = Consumer(group=False, identifier=7)
GROUP = Consumer(group=True, identifier=5)


def create_stream(peer: Dialogue, number: int, stream: str) -> int:
    return peer.classic(Code.CREATE_STREAM, U32.pack(number) + name(stream))[0]


def create_topic(peer: Dialogue, number: int, topic: str, partitions: int = 3, stream: int | str = 1) -> int:
    numbers = U32.pack(number) + U32.pack(partitions) + U32.pack(0)
    return peer.classic(Code.CREATE_TOPIC, ident(stream) + numbers + name(topic))[0]


def send(peer: Dialogue, records: list[Record], how: bytes = to_partition(1)) -> int:
    return peer.classic(Code.SEND, TOPIC + how + messages(records))[0]


def polled(peer: Dialogue, kind: int, value: int = 0, count: int = 10, *, commit: bool = False) -> client_codec.Polled:
    status, payload = peer.classic(Code.POLL, poll(place(READER, TOPIC, 1), kind, value, count, commit=commit))
    assert status == 0
    return client_codec.read_polled(payload)


def values(found: client_codec.Polled) -> list[bytes | None]:
    return [record.value for record in found.records]


@pytest.fixture
def peer() -> Dialogue:
    """Return a client with stream 1 and topic 1 of three partitions."""
    found = World().connect()
    assert create_stream(found, 1, "s") == 0
    assert create_topic(found, 1, "t") == 0
    return found


# Framing


def test_requests_truncated_at_every_byte(peer: Dialogue) -> None:
    frames = request(Code.SEND, TOPIC + to_partition(1) + messages([Record(b"hello")])) + request(Code.PING)
    for size in range(len(frames)):
        peer.feed(frames[:size])
        peer.feed(frames[size:])
        peer.pass_by()
        assert peer.take() == bytes(16), f"truncated at {size}"


def test_requests_one_byte_at_a_time(peer: Dialogue) -> None:
    for byte in request(Code.PING) * 3:
        peer.feed(bytes((byte,)))
    peer.pass_by()
    assert peer.take() == bytes(24)


def test_ten_requests_in_one_write(peer: Dialogue) -> None:
    sends = b"".join(
        request(Code.SEND, TOPIC + to_partition(1) + messages([Record(b"%d" % number)])) for number in range(9)
    )
    peer.feed(sends + request(Code.POLL, poll(place(READER, TOPIC, 1), 3, 0, 100)))
    peer.pass_by()
    answer = peer.take()
    assert answer[:72] == bytes(72)
    assert values(client_codec.read_polled(answer[80:])) == [b"%d" % number for number in range(9)]


def test_waiting_requests_are_answered_at_the_end_of_the_stream(peer: Dialogue) -> None:
    creations = b"".join(
        request(Code.CREATE_STREAM, U32.pack(number) + name(f"later-{number}")) for number in range(2, 6)
    )
    peer.feed(creations + request(Code.GET_STREAMS) + request(Code.PING)[:5])
    assert not peer.sent, "a change is acknowledged once it is synced"
    peer.finish()
    assert peer.closed
    answer = peer.take()
    assert answer[:32] == bytes(32)
    assert len(client_codec.read_streams(answer[40:])) == 5


def test_an_idle_connection_closes_at_the_end_of_the_stream(peer: Dialogue) -> None:
    peer.finish()
    assert peer.closed


@pytest.mark.parametrize("code", [0, 38, 204, 304, 999])
def test_an_unknown_code_keeps_the_connection_open(peer: Dialogue, code: int) -> None:
    if code == 38:
        assert peer.classic(code)[0] == 3
    else:
        assert peer.classic(code, b"anything")[0] in (3,)
    assert peer.classic(Code.PING) == (0, b"")


def test_a_frame_over_the_limit_gets_an_error_and_closes(peer: Dialogue) -> None:
    peer.feed(U32.pack(32 * 1024 * 1024) + U32.pack(Code.SEND))
    assert peer.take() == U32.pack(4022) + bytes(4)
    assert peer.closed


def test_a_length_below_the_code_closes_the_connection(peer: Dialogue) -> None:
    peer.feed(U32.pack(3) + b"abc")
    assert peer.closed


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (Code.PING, b"x"),
        (Code.GET_CLIENT, b"abc"),
        (Code.GET_CLIENT, U32.pack(1) + b"x"),
        (Code.POLL, poll(place(READER, TOPIC, 1), 1, 0, 10)[:-1]),
        (Code.POLL, poll(place(READER, TOPIC, 1), 6, 0, 10)),
        (Code.SEND, TOPIC + b"\x04\x00" + messages([Record(b"x")])),
        (Code.SEND, TOPIC + to_partition(1) + messages([Record(b"x")]) + b"rest"),
        (Code.GET_OFFSET, place(READER, TOPIC, 1)[:-1]),
        (Code.STORE_OFFSET, place(READER, TOPIC, 1) + bytes(7)),
        (Code.GET_STREAM, b"\x01\x03abc"),
        (Code.GET_STREAM, b"\x00\x04abcd"),
        (Code.GET_STREAM, b"\x02\x00"),
        (Code.GET_STREAM, b"\x02\x02\xff\xff"),
        (Code.CREATE_STREAM, U32.pack(2) + b"\x00"),
        (Code.CREATE_TOPIC, ident(1) + U32.pack(2) + bytes(7)),
        (Code.CREATE_PARTITIONS, TOPIC),
        (Code.GET_GROUP, TOPIC + b"\x01"),
    ],
)
def test_malformed_bodies(peer: Dialogue, code: int, body: bytes) -> None:
    assert peer.classic(code, body) == (3, b"")
    assert peer.classic(Code.PING) == (0, b"")


def test_spare_bytes_after_a_known_body_are_tolerated(peer: Dialogue) -> None:
    numbers = U32.pack(2) + U32.pack(1) + U32.pack(0)
    assert peer.classic(Code.CREATE_TOPIC, ident(1) + numbers + name("spare") + b"\x00\x00")[0] == 0
    assert peer.classic(Code.GET_STREAM, ident(1) + b"\x00")[0] == 0


# Streams and topics


def test_ids_and_names_are_unique(peer: Dialogue) -> None:
    assert create_stream(peer, 0, "zero") == 1014
    assert create_stream(peer, 1, "other") == 1011
    assert create_stream(peer, 1, "s") == 1011, "the id is checked first"
    assert create_stream(peer, 2, "s") == 1012
    assert create_topic(peer, 0, "zero") == 2016
    assert create_topic(peer, 1, "other") == 2012
    assert create_topic(peer, 2, "t") == 2013
    assert create_topic(peer, 2, "u", 100_001) == 2015
    assert create_topic(peer, 2, "u", stream=9) == 1009
    assert create_topic(peer, 2, "u", stream="nine") == 1010


@pytest.mark.parametrize(
    ("given", "kept"),
    [("Orders", "orders"), ("  My  Orders ", "my.orders"), ("a\tb", "a.b"), ("x_1-2.3", "x_1-2.3")],
)
def test_names_are_normalized(given: str, kept: str) -> None:
    peer = World().connect()
    assert create_stream(peer, 1, given) == 0
    assert create_topic(peer, 1, given) == 0
    assert client_codec.read_streams(peer.classic(Code.GET_STREAMS)[1])[0].name == kept
    assert peer.classic(Code.GET_TOPIC, ident(kept) + ident(kept))[0] == 0


@pytest.mark.parametrize("wrong", ["a/b", "a!", "   ", "a\x9bb", "..", "__x"])
def test_invalid_names_are_refused(peer: Dialogue, wrong: str) -> None:
    assert create_stream(peer, 2, wrong) == 1013
    assert create_topic(peer, 2, wrong) == 2014


def test_errors_for_missing_things_depend_on_the_identifier_kind(peer: Dialogue) -> None:
    assert peer.classic(Code.GET_STREAM, ident(9)) == (1009, b"")
    assert peer.classic(Code.GET_STREAM, ident(0)) == (1009, b"")
    assert peer.classic(Code.GET_STREAM, ident("nine")) == (1010, b"")
    assert peer.classic(Code.GET_TOPIC, ident(1) + ident(9)) == (2010, b"")
    assert peer.classic(Code.GET_TOPIC, ident("s") + ident("nine")) == (2011, b"")
    assert peer.classic(Code.DELETE_STREAM, ident(9)) == (1009, b"")
    assert peer.classic(Code.DELETE_TOPIC, ident(1) + ident("nine")) == (2011, b"")
    assert peer.classic(Code.GET_CLIENT, U32.pack(0)) == (101, b"")
    assert peer.classic(Code.GET_CLIENT, U32.pack(1)) == (100, b"")


def test_deleting_a_stream_deletes_its_topics(peer: Dialogue) -> None:
    assert create_topic(peer, 2, "u") == 0
    assert peer.classic(Code.DELETE_STREAM, ident(1))[0] == 0
    assert peer.classic(Code.GET_STREAMS) == (0, b"")
    assert peer.world.memory.broker.topics() == []
    assert create_stream(peer, 1, "s") == 0
    assert peer.classic(Code.GET_TOPICS, ident(1)) == (0, b"")


def test_partitions_are_added_and_deleted(peer: Dialogue) -> None:
    assert send(peer, [Record(b"x")], to_partition(3)) == 0
    for count, status in ((0, 2015), (100_001, 2015), (2, 0)):
        assert peer.classic(Code.CREATE_PARTITIONS, TOPIC + U32.pack(count))[0] == status
    assert send(peer, [Record(b"x")], to_partition(5)) == 0
    assert peer.classic(Code.DELETE_PARTITIONS, TOPIC + U32.pack(0))[0] == 2015
    assert peer.classic(Code.DELETE_PARTITIONS, TOPIC + U32.pack(3))[0] == 0
    assert send(peer, [Record(b"x")], to_partition(3)) == 3007
    assert peer.classic(Code.CREATE_PARTITIONS, TOPIC + U32.pack(1))[0] == 0
    topic, partitions = client_codec.read_topic(peer.classic(Code.GET_TOPIC, TOPIC)[1])
    assert topic.partition_count == 3
    assert partitions[2].message_count == 0, "a re-created partition is a new one"
    assert peer.classic(Code.DELETE_PARTITIONS, TOPIC + U32.pack(99))[0] == 0, "more than exist means all of them"
    assert send(peer, [Record(b"x")], client_codec.BALANCED) == 3008
    assert send(peer, [Record(b"x")], by_key(b"k")) == 3008
    assert peer.classic(Code.GET_TOPIC, TOPIC)[0] == 0


def test_a_topic_without_partitions_survives_a_restart() -> None:
    world = World()
    peer = world.connect()
    assert create_stream(peer, 1, "s") == 0
    assert create_topic(peer, 1, "t", 0) == 0
    world.restart()
    peer = world.connect()
    assert client_codec.read_topic(peer.classic(Code.GET_TOPIC, TOPIC)[1])[0].partition_count == 0
    assert send(peer, [Record(b"x")], client_codec.BALANCED) == 3008
    assert peer.classic(Code.CREATE_PARTITIONS, TOPIC + U32.pack(1))[0] == 0
    assert send(peer, [Record(b"x")], client_codec.BALANCED) == 0


def test_ids_survive_a_restart_including_those_of_other_protocols(peer: Dialogue) -> None:
    broker = peer.world.memory.broker
    broker.create_topic(TopicName("shop", "bills"), 2)
    broker.create_topic(TopicName("default", "plain"), 2)
    peer.pass_by()
    before = peer.classic(Code.GET_STREAMS)[1]
    streams = client_codec.read_streams(before)
    assert [stream.name for stream in streams] == ["s", "shop", "default"]
    assert streams[-1].id > 4_000_000_000, "the default stream does not collide"
    peer.world.restart()
    again = peer.beside()
    assert [(stream.id, stream.name) for stream in client_codec.read_streams(again.classic(Code.GET_STREAMS)[1])] == [
        (stream.id, stream.name) for stream in streams
    ]
    assert again.classic(Code.GET_TOPIC, ident("shop") + ident(1))[0] == 0


# Sending


def test_messages_of_a_request_form_one_batch_of_one_partition(peer: Dialogue) -> None:
    assert send(peer, [Record(b"a"), Record(b"b")], client_codec.BALANCED) == 0
    assert send(peer, [Record(b"c")], client_codec.BALANCED) == 0
    counts = [part.message_count for part in client_codec.read_topic(peer.classic(Code.GET_TOPIC, TOPIC)[1])[1]]
    assert counts == [2, 1, 0]


def test_send_errors(peer: Dialogue) -> None:
    assert send(peer, [Record(b"x")], to_partition(0)) == 3007
    assert send(peer, [Record(b"x")], to_partition(4)) == 3007
    assert peer.classic(Code.SEND, TOPIC + b"\x03\x00" + messages([Record(b"x")]))[0] == 4028
    assert peer.classic(Code.SEND, TOPIC + to_partition(1) + bytes(24))[0] == 4024
    key = U32.pack(1) + b"k"
    for header, status in (
        (U32.pack(0) + b"\x02" + U32.pack(1) + b"v", 4018),
        (key + b"\x02" + U32.pack(0), 4019),
        (key + b"\x02" + U32.pack(256) + bytes(256), 4019),
        (key + b"\x10" + U32.pack(1) + b"v", 3),
        (key + b"\x00" + U32.pack(1) + b"v", 3),
    ):
        body = bytes(16) + U32.pack(len(header)) + header + U32.pack(1) + b"x"
        assert peer.classic(Code.SEND, TOPIC + to_partition(1) + body)[0] == status
    many = b"".join(U32.pack(2) + b"%02x" % number + b"\x01" + U32.pack(255) + bytes(255) for number in range(255))
    many += many
    body = bytes(16) + U32.pack(len(many)) + many + U32.pack(1) + b"x"
    assert peer.classic(Code.SEND, TOPIC + to_partition(1) + body)[0] == 4017
    assert polled(peer, 3).records == (), "nothing of it was stored"


def test_payloads_above_the_limit(peer: Dialogue) -> None:
    half = bytes(5 * 1024 * 1024)
    assert send(peer, [Record(half), Record(half)]) == 0
    assert send(peer, [Record(half), Record(half), Record(b"x")]) == 4022
    assert polled(peer, 3, count=1).current_offset == 1


@pytest.mark.parametrize("kind", [kind for kind in HeaderKind if kind is not HeaderKind.NULL])
def test_headers_of_every_kind_round_trip(peer: Dialogue, kind: HeaderKind) -> None:
    header = Header(b"key-1", os.urandom(16), value_kind=kind)
    others = (Header("schlüssel".encode(), b"v" * 255, value_kind=HeaderKind.RAW),)
    assert send(peer, [Record(b"x", headers=(header, *others)), Record(b"y")]) == 0
    assert [record.headers for record in polled(peer, 3).records] == [(header, *others), ()]


def test_message_ids_are_stored_or_generated(peer: Dialogue) -> None:
    own = bytes(range(16))
    assert send(peer, [Record(b"a", id=own), Record(b"b"), Record(b"c")]) == 0
    ids = [record.id or b"" for record in polled(peer, 3).records]
    assert ids[0] == own
    assert len(set(ids)) == 3
    assert all((made[9] & 0xF0, made[7] & 0xC0) == (0x40, 0x80) for made in ids[1:]), (
        "UUIDs of version 4, bytes reversed"
    )
    assert [record.id for record in polled(peer, 3).records] == ids, "the same at every read"


KEYS = (
    (b"user-1", "418d9d535e58505261accd4b12ff3576", "a43fb6ad", 1, 8, 1, 8),
    (b"user-2", "286a63945bf5518f62c70edb7001f22f", "ef207309", 3, 6, 1, 5),
    (b"hello world", "ab97467d60eb63b1533f6046eb7f610e", "cebb6622", 2, 5, 1, 4),
    (U32.pack(1), "d3e47dee85e9be408895a3f5af28cafe", "f3bb7693", 3, 6, 2, 6),
    (U32.pack(2), "dd3f73654308ad15da0ce907e4355b60", "1f748196", 1, 7, 3, 2),
    (U64.pack(1), "3d8acdb4d36d9c06004403b7fb05c44a", "08ed6331", 1, 4, 1, 6),
)


@pytest.mark.parametrize(("key", "murmur", "xxh", "of_3", "of_10", "once_of_3", "once_of_10"), KEYS)
def test_a_key_chooses_its_partition(
    key: bytes, murmur: str, xxh: str, of_3: int, of_10: int, once_of_3: int, once_of_10: int
) -> None:
    """xxHash32 and a remainder from 0 for every dialect; partitions start at 1 here (spec: iggy#key-hashing)."""
    assert f"{xxh32(key):08x}" == xxh
    assert f"{murmur3_128(key):032x}" == murmur
    assert (murmur3_128(key) % 3 or 3, murmur3_128(key) % 10 or 10) == (once_of_3, once_of_10), (
        "like the servers of 2023"
    )
    for partitions, home in ((3, of_3), (10, of_10)):
        peer = World().connect()
        create_stream(peer, 1, "s")
        create_topic(peer, 1, "t", partitions)
        assert send(peer, [Record(b"x")], by_key(key)) == 0
        _, seen = client_codec.read_topic(peer.classic(Code.GET_TOPIC, TOPIC)[1])
        assert [part.id for part in seen if part.message_count] == [home]
        assert home == xxh32(key) % partitions + 1


def test_the_message_key_becomes_the_record_key(peer: Dialogue) -> None:
    assert send(peer, [Record(b"a"), Record(b"b")], by_key(b"user-1")) == 0
    topic = peer.world.memory.broker.topic("s.t")
    home = peer.world.memory.broker.partition_of_key(topic, b"user-1", KeyHash.XXH32)
    read = home.log.read(0, bytes_max=4096, then=lambda _: None)
    assert isinstance(read, Read)
    assert b"user-1user-1" in bytes(read.chunks[0])


# Polling


def test_start_positions_of_polls(peer: Dialogue) -> None:
    for number in range(10):
        peer.world.memory.advance(0.001)
        assert send(peer, [Record(b"%d" % number)]) == 0
    times = [record.append_time_us for record in polled(peer, 3, count=10).records]
    assert values(polled(peer, 1, 4, 3)) == [b"4", b"5", b"6"]
    assert values(polled(peer, 1, 9, 3)) == [b"9"]
    assert values(polled(peer, 1, 10, 3)) == []
    assert values(polled(peer, 1, 2**64 - 1, 3)) == []
    assert values(polled(peer, 2, times[6], 2)) == [b"6", b"7"]
    assert values(polled(peer, 2, times[6] + 1, 2)) == [b"7", b"8"]
    assert values(polled(peer, 2, times[9] + 1, 2)) == []
    assert values(polled(peer, 2, 2**64 - 1, 2)) == []
    assert values(polled(peer, 3, count=2)) == [b"0", b"1"]
    assert values(polled(peer, 4, count=3)) == [b"7", b"8", b"9"]
    assert values(polled(peer, 4, count=99)) == [b"%d" % number for number in range(10)]
    assert values(polled(peer, 5, count=2)) == [b"0", b"1"]
    assert values(polled(peer, 5, count=2, commit=True)) == [b"0", b"1"]
    assert values(polled(peer, 5, count=7, commit=True)) == [b"%d" % number for number in range(2, 9)]
    assert values(polled(peer, 5, count=2, commit=True)) == [b"9"]
    found = polled(peer, 5, count=2, commit=True)
    assert (found.records, found.current_offset, found.partition) == ((), 9, 1)


def test_an_empty_poll_commits_nothing(peer: Dialogue) -> None:
    assert polled(peer, 5, commit=True).records == ()
    broker = peer.world.memory.broker
    assert broker.position("s.t", 0, PositionKind.CONSUMER, "7") is None


def test_polls_start_at_the_oldest_retained_message(peer: Dialogue) -> None:
    for number in range(5):
        assert send(peer, [Record(b"%d" % number)]) == 0
    broker = peer.world.memory.broker
    broker.purge_topic(broker.topic("s.t"))
    peer.pass_by()
    assert polled(peer, 3).records == ()
    assert send(peer, [Record(b"after")]) == 0
    for kind in (1, 3, 4, 5):
        found = polled(peer, kind)
        assert [(record.offset, record.value) for record in found.records] == [(5, b"after")]


def test_poll_errors(peer: Dialogue) -> None:
    def status(consumer: Consumer, topic: bytes, partition: int, count: int = 1) -> int:
        return peer.classic(Code.POLL, poll(place(consumer, topic, partition), 1, 0, count))[0]

    assert status(READER, ident(9) + ident(1), 1) == 1009
    assert status(READER, ident("nine") + ident(1), 1) == 1010
    assert status(READER, ident(1) + ident(9), 1) == 2010
    assert status(READER, ident(1) + ident("nine"), 1) == 2011
    assert status(READER, TOPIC, 4) == 3007
    assert status(READER, TOPIC, 0) == 3007
    assert status(READER, TOPIC, 1, 0) == 4009
    assert status(GROUP, TOPIC, 1) == 5000
    assert peer.classic(Code.CREATE_GROUP, TOPIC + U32.pack(5))[0] == 0
    assert status(GROUP, TOPIC, 1) == 5002


def test_a_reply_is_split_between_messages_but_has_at_least_one(peer: Dialogue) -> None:
    value = bytes(3 * 1024 * 1024)
    for _ in range(4):
        assert send(peer, [Record(value)]) == 0
    assert len(polled(peer, 3).records) == 2, "8 MiB of messages"
    assert send(peer, [Record(bytes(9_000_000))]) == 0
    assert len(polled(peer, 1, 4).records) == 1


# Offsets and groups


def test_stored_offsets(peer: Dialogue) -> None:
    def stored(consumer: Consumer, partition: int = 1) -> tuple[int, int, int]:
        status, payload = peer.classic(Code.GET_OFFSET, place(consumer, TOPIC, partition))
        assert status == 0
        return client_codec.read_offset(payload)

    def store(offset: int, partition: int = 1, consumer: Consumer = READER) -> int:
        return peer.classic(Code.STORE_OFFSET, place(consumer, TOPIC, partition) + U64.pack(offset))[0]

    assert stored(READER) == (1, 0, 0)
    assert send(peer, [Record(b"x")] * 5) == 0
    assert stored(READER) == (1, 4, 0)
    assert store(4) == 0
    assert stored(READER) == (1, 4, 4)
    assert store(2) == 0, "a rewind"
    assert stored(READER) == (1, 4, 2)
    assert [record.offset for record in polled(peer, 5).records] == [3, 4]
    assert store(5) == 4100
    assert store(2**64 - 1) == 4100
    assert store(0, 4) == 3007
    assert store(0, 0) == 3007
    assert stored(Consumer(group=False, identifier=8)) == (1, 4, 0), "another consumer's"
    assert store(1, consumer=GROUP) == 5000
    assert peer.classic(Code.CREATE_GROUP, TOPIC + U32.pack(5))[0] == 0
    assert store(3, consumer=GROUP) == 0, "the named partition"
    assert stored(GROUP) == (1, 4, 3)
    assert store(3, 0, GROUP) == 3007, "before the first poll there is no current partition"


def test_a_consumer_and_a_group_have_separate_offsets(peer: Dialogue) -> None:
    assert send(peer, [Record(b"x")] * 9) == 0
    assert peer.classic(Code.CREATE_GROUP, TOPIC + U32.pack(7))[0] == 0
    same_number = Consumer(group=True, identifier=7)
    for consumer, offset in ((READER, 3), (same_number, 6)):
        assert peer.classic(Code.STORE_OFFSET, place(consumer, TOPIC, 1) + U64.pack(offset))[0] == 0
    broker = peer.world.memory.broker
    assert broker.position("s.t", 0, PositionKind.CONSUMER, "7") == 4
    assert broker.position("s.t", 0, PositionKind.GROUP, "group-7") == 7


def test_group_errors(peer: Dialogue) -> None:
    five = TOPIC + U32.pack(5)
    for code in (Code.GET_GROUP, Code.DELETE_GROUP, Code.JOIN_GROUP, Code.LEAVE_GROUP):
        assert peer.classic(code, five) == (5000, b"")
    assert peer.classic(Code.CREATE_GROUP, TOPIC + U32.pack(0))[0] == 5003
    assert peer.classic(Code.CREATE_GROUP, five)[0] == 0
    assert peer.classic(Code.CREATE_GROUP, five)[0] == 5001
    assert peer.classic(Code.LEAVE_GROUP, five)[0] == 5002
    for code in (Code.JOIN_GROUP, Code.JOIN_GROUP, Code.LEAVE_GROUP):
        assert peer.classic(code, five)[0] == 0
    assert peer.classic(Code.LEAVE_GROUP, five)[0] == 5002


def owned(peer: Dialogue, number: int = 5) -> dict[int, tuple[int, ...]]:
    """Return the partitions of the group's members by connection."""
    _, _, members = client_codec.read_group(peer.classic(Code.GET_GROUP, TOPIC + U32.pack(number))[1])
    return {member.id: member.partitions for member in members}


def own_id(peer: Dialogue) -> int:
    return client_codec.read_client_id(peer.classic(Code.GET_ME)[1])


def test_members_share_partitions_until_they_disconnect(peer: Dialogue) -> None:
    five = TOPIC + U32.pack(5)
    peers = [peer, *(peer.beside() for _ in range(3))]
    assert peer.classic(Code.CREATE_GROUP, five)[0] == 0
    for member in peers:
        assert member.classic(Code.JOIN_GROUP, five)[0] == 0
    shares = owned(peer)
    assert set(shares) == {own_id(member) for member in peers}
    assert sorted(len(share) for share in shares.values()) == [0, 1, 1, 1]
    idle = next(member for member in peers if not shares[own_id(member)])
    empty = idle.classic(Code.POLL, poll(place(GROUP, TOPIC, 0), 5, 0, 10))
    assert empty == (0, bytes(16)), "no partition: partition 0 and nothing"
    for gone in [member for member in peers[1:] if member is not idle]:
        gone.session.close()
    peer.world.memory.advance(60)
    left = owned(peer)
    assert set(left) == {own_id(peer), own_id(idle)}
    assert sorted(number for share in left.values() for number in share) == [1, 2, 3]
    assert peer.classic(Code.CREATE_PARTITIONS, TOPIC + U32.pack(1))[0] == 0
    peer.classic(Code.JOIN_GROUP, five)
    assert sorted(number for share in owned(peer).values() for number in share) == [1, 2, 3, 4]


def test_a_group_polls_its_partitions_in_turn_and_stores_offsets(peer: Dialogue) -> None:
    five = TOPIC + U32.pack(5)
    for number in (1, 2, 3):
        assert send(peer, [Record(b"%d-%d" % (number, index)) for index in range(2)], to_partition(number)) == 0
    assert peer.classic(Code.CREATE_GROUP, five)[0] == 0
    assert peer.classic(Code.JOIN_GROUP, five)[0] == 0
    seen: list[tuple[int, list[bytes | None]]] = []
    for _ in range(6):
        status, payload = peer.classic(Code.POLL, poll(place(GROUP, TOPIC, 0), 5, 0, 1, commit=True))
        assert status == 0
        found = client_codec.read_polled(payload)
        seen.append((found.partition, values(found)))
    assert sorted(seen) == sorted((number, [b"%d-%d" % (number, index)]) for number in (1, 2, 3) for index in range(2))
    last = seen[-1][0]
    current = peer.classic(Code.GET_OFFSET, place(GROUP, TOPIC, 0))[1]
    assert client_codec.read_offset(current) == (last, 1, 1), "the partition of the last poll"
    peer.session.close()
    other = peer.beside()
    assert other.classic(Code.JOIN_GROUP, five)[0] == 0
    assert other.classic(Code.POLL, poll(place(GROUP, TOPIC, 0), 5, 0, 9))[1][12:] == bytes(4), "nothing is left"
    assert other.classic(Code.DELETE_GROUP, five)[0] == 0
    assert other.classic(Code.CREATE_GROUP, five)[0] == 0
    assert other.classic(Code.JOIN_GROUP, five)[0] == 0
    again = client_codec.read_polled(other.classic(Code.POLL, poll(place(GROUP, TOPIC, 0), 5, 0, 9))[1])
    assert len(again.records) == 2, "a group's offsets are deleted with it"


def test_a_group_without_members_survives_a_restart(peer: Dialogue) -> None:
    assert peer.classic(Code.CREATE_GROUP, TOPIC + U32.pack(5))[0] == 0
    peer.world.restart()
    again = peer.beside()
    assert again.classic(Code.GET_GROUPS, TOPIC) == (0, U32.pack(5) + U32.pack(3) + bytes(4))


def test_groups_of_other_protocols_get_ids(peer: Dialogue) -> None:
    groups = peer.world.memory.broker.groups
    groups.create("named", "s.t")
    groups.create("group-9", "s.t")
    listed = peer.classic(Code.GET_GROUPS, TOPIC)[1]
    assert [int.from_bytes(listed[at : at + 4], "little") for at in (0, 12)] == [1, 9]
    groups.delete("named", "s.t")
    assert peer.classic(Code.GET_GROUP, TOPIC + U32.pack(1))[0] == 5000


def test_the_client_info_lists_its_groups(peer: Dialogue) -> None:
    assert peer.classic(Code.CREATE_GROUP, TOPIC + U32.pack(5))[0] == 0
    assert peer.classic(Code.JOIN_GROUP, TOPIC + U32.pack(5))[0] == 0
    assert peer.classic(Code.GET_ME)[1].endswith(U32.pack(1) + U32.pack(1) + U32.pack(1) + U32.pack(5))


def test_a_group_deleted_with_its_topic_is_removed_from_the_client(peer: Dialogue) -> None:
    assert peer.classic(Code.CREATE_GROUP, TOPIC + U32.pack(5))[0] == 0
    assert peer.classic(Code.JOIN_GROUP, TOPIC + U32.pack(5))[0] == 0
    assert peer.classic(Code.DELETE_TOPIC, TOPIC)[0] == 0
    status, me = peer.classic(Code.GET_ME)
    assert (status, me[-4:]) == (0, bytes(4))


# Errors


def test_every_error_of_the_broker_has_a_number() -> None:
    assert set(NUMBERS) == set(ErrorCode)


def test_group_errors_differ_after_the_documented_dialect() -> None:
    for number in (5002, 5003, 5004, 5006):
        assert number_of(Refused(number), D1C) == number
    assert [number_of(Refused(number), D0) for number in (5002, 5003, 5004, 5006)] == [5003, 5000, 5001, 5002]


def test_random_bytes_get_an_error_or_close_the_connection(peer: Dialogue) -> None:
    for size in (1, 5, 40, 400):
        other = peer.beside()
        other.feed(U32.pack(size + 4) + os.urandom(4 + size))
        other.pass_by()
    assert peer.classic(Code.PING) == (0, b"")
