"""The examples of the documented dialect: every request built and executed, every reply byte for byte.

spec: iggy#d0-examples
"""

from __future__ import annotations

from pathlib import Path

import pytest

from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.client_codec import by_key, ident, name, place, poll, request, to_partition
from polywire.protocols.iggy.messages import U32, U64, Code, Consumer
from polywire.records.columns import Header, HeaderKind, Record
from polywire.types import PositionKind
from tests.unit.protocols.iggy.dialogue import T_US, Dialogue, World


def examples(kind: str) -> dict[str, bytes]:
    """Return frames by their title."""
    lines = (Path(__file__).parent / f"documented_{kind}.txt").read_text().splitlines()
    return {
        title.removeprefix("# "): bytes.fromhex(frame) for title, frame in zip(lines[::2], lines[1::2], strict=True)
    }


REQUESTS = examples("requests")
REPLIES = examples("replies")
EMPTY = REPLIES["empty ok (any void command)"]

CONSUMER = Consumer(group=False, identifier=1)
TOPIC = ident(1) + ident(2)
NAMED = ident("orders") + ident("paid")
HEADER = Header(b"key-1", b"Value 1", value_kind=HeaderKind.STRING)

BUILT = {
    "PING": request(Code.PING),
    "GET_STATS": request(Code.GET_STATS),
    "GET_ME": request(Code.GET_ME),
    "GET_CLIENT id=7": request(Code.GET_CLIENT, U32.pack(7)),
    "GET_CLIENTS": request(Code.GET_CLIENTS),
    "POLL_MESSAGES consumer 1, stream 1, topic 2, partition 1, offset 0, count 10, no commit": request(
        Code.POLL, poll(place(CONSUMER, TOPIC, 1), 1, 0, 10)
    ),
    'POLL_MESSAGES group 5, "orders"/"paid", partition 0 (none), next, count 3, auto commit': request(
        Code.POLL, poll(place(Consumer(group=True, identifier=5), NAMED, 0), 5, 0, 3, commit=True)
    ),
    'SEND_MESSAGES 1/2 balanced, one message id 0 payload "hello"': request(
        Code.SEND, TOPIC + client_codec.BALANCED + client_codec.messages([Record(b"hello")])
    ),
    "SEND_MESSAGES 1/2 partition 3, two messages": request(
        Code.SEND,
        TOPIC
        + to_partition(3)
        + client_codec.messages(
            [Record(value, id=number.to_bytes(16, "little")) for number, value in ((1, b"a"), (2, b"bc"))]
        ),
    ),
    'SEND_MESSAGES "orders"/"paid" key "user-1", header key-1="Value 1" (string)': request(
        Code.SEND,
        NAMED
        + by_key(b"user-1")
        + client_codec.messages([Record(b"hello", headers=(HEADER,), id=(9).to_bytes(16, "little"))]),
    ),
    "GET_CONSUMER_OFFSET consumer 1, 1/2, partition 1": request(Code.GET_OFFSET, place(CONSUMER, TOPIC, 1)),
    "STORE_CONSUMER_OFFSET consumer 1, 1/2, partition 1, offset 41": request(
        Code.STORE_OFFSET, place(CONSUMER, TOPIC, 1) + U64.pack(41)
    ),
    "GET_STREAM 1": request(Code.GET_STREAM, ident(1)),
    'GET_STREAM "orders"': request(Code.GET_STREAM, ident("orders")),
    "GET_STREAMS": request(Code.GET_STREAMS),
    'CREATE_STREAM id 1 "orders"': request(Code.CREATE_STREAM, U32.pack(1) + name("orders")),
    "DELETE_STREAM 1": request(Code.DELETE_STREAM, ident(1)),
    "GET_TOPIC 1/2": request(Code.GET_TOPIC, TOPIC),
    "GET_TOPICS 1": request(Code.GET_TOPICS, ident(1)),
    'CREATE_TOPIC stream 1, id 2, 3 partitions, no expiry, "paid"': request(
        Code.CREATE_TOPIC, ident(1) + U32.pack(2) + U32.pack(3) + U32.pack(0) + name("paid")
    ),
    'CREATE_TOPIC stream "orders", id 2, 3 partitions, expiry 60, "paid"': request(
        Code.CREATE_TOPIC, ident("orders") + U32.pack(2) + U32.pack(3) + U32.pack(60) + name("paid")
    ),
    "DELETE_TOPIC 1/2": request(Code.DELETE_TOPIC, TOPIC),
    "CREATE_PARTITIONS 1/2 x3": request(Code.CREATE_PARTITIONS, TOPIC + U32.pack(3)),
    "DELETE_PARTITIONS 1/2 x1": request(Code.DELETE_PARTITIONS, TOPIC + U32.pack(1)),
    "GET_CONSUMER_GROUP 1/2/5": request(Code.GET_GROUP, TOPIC + U32.pack(5)),
    "GET_CONSUMER_GROUPS 1/2": request(Code.GET_GROUPS, TOPIC),
    "CREATE_CONSUMER_GROUP 1/2/5": request(Code.CREATE_GROUP, TOPIC + U32.pack(5)),
    "DELETE_CONSUMER_GROUP 1/2/5": request(Code.DELETE_GROUP, TOPIC + U32.pack(5)),
    "JOIN_CONSUMER_GROUP 1/2/5": request(Code.JOIN_GROUP, TOPIC + U32.pack(5)),
    "LEAVE_CONSUMER_GROUP 1/2/5": request(Code.LEAVE_GROUP, TOPIC + U32.pack(5)),
}

# In an order in which each can succeed; replies that are not empty have their tests below.
ORDER = (
    "PING",
    'CREATE_STREAM id 1 "orders"',
    "GET_STREAM 1",
    'GET_STREAM "orders"',
    'CREATE_TOPIC stream 1, id 2, 3 partitions, no expiry, "paid"',
    "GET_TOPIC 1/2",
    "GET_TOPICS 1",
    'SEND_MESSAGES 1/2 balanced, one message id 0 payload "hello"',
    "SEND_MESSAGES 1/2 partition 3, two messages",
    'SEND_MESSAGES "orders"/"paid" key "user-1", header key-1="Value 1" (string)',
    "POLL_MESSAGES consumer 1, stream 1, topic 2, partition 1, offset 0, count 10, no commit",
    "GET_CONSUMER_OFFSET consumer 1, 1/2, partition 1",
    "CREATE_CONSUMER_GROUP 1/2/5",
    "JOIN_CONSUMER_GROUP 1/2/5",
    'POLL_MESSAGES group 5, "orders"/"paid", partition 0 (none), next, count 3, auto commit',
    "GET_CONSUMER_GROUP 1/2/5",
    "GET_CONSUMER_GROUPS 1/2",
    "GET_STATS",
    "GET_ME",
    "GET_CLIENTS",
    "GET_STREAMS",
    "LEAVE_CONSUMER_GROUP 1/2/5",
    "DELETE_CONSUMER_GROUP 1/2/5",
    "CREATE_PARTITIONS 1/2 x3",
    "DELETE_PARTITIONS 1/2 x1",
    "DELETE_TOPIC 1/2",
    'CREATE_TOPIC stream "orders", id 2, 3 partitions, expiry 60, "paid"',
    "DELETE_STREAM 1",
)
VOID = ("CREATE", "DELETE", "SEND", "JOIN", "LEAVE", "PING")


def prepared() -> Dialogue:
    """Return a client with stream 1 ``orders`` and topic 2 ``paid`` of three partitions, created at T."""
    peer = World().connect()
    assert peer.ask(REQUESTS['CREATE_STREAM id 1 "orders"']) == EMPTY
    assert peer.ask(REQUESTS['CREATE_TOPIC stream 1, id 2, 3 partitions, no expiry, "paid"']) == EMPTY
    return peer


def send(peer: Dialogue, record: Record, partition: int = 1) -> None:
    """Send one message to a partition."""
    assert peer.ask(request(Code.SEND, TOPIC + to_partition(partition) + client_codec.messages([record]))) == EMPTY


@pytest.mark.parametrize("title", BUILT)
def test_a_request_is_built_like_the_example(title: str) -> None:
    assert BUILT[title] == REQUESTS[title]


def test_every_example_has_its_builder() -> None:
    assert list(REQUESTS) == list(BUILT)


def test_every_request_is_executed() -> None:
    peer = World().connect()
    for title in ORDER:
        reply = peer.ask(REQUESTS[title])
        assert reply[:4] == bytes(4), title
        assert (reply == EMPTY) == title.startswith(VOID), title
    others = {"GET_CLIENT id=7", "STORE_CONSUMER_OFFSET consumer 1, 1/2, partition 1, offset 41"}
    assert set(REQUESTS) - set(ORDER) == others, "which have their own tests"


def test_a_poll_of_two_messages() -> None:
    peer = prepared()
    send(peer, Record(b"hello", id=(7).to_bytes(16, "little")))
    peer.world.memory.advance(0.000005)
    send(peer, Record(b"world!", headers=(HEADER,), id=(8).to_bytes(16, "little")))
    title = "POLL_MESSAGES consumer 1, stream 1, topic 2, partition 1, offset 0, count 10, no commit"
    expected = REPLIES["POLL_MESSAGES partition 1, current 1, two messages (the second with a header)"]
    assert peer.ask(REQUESTS[title]) == expected
    polled = client_codec.read_polled(expected[8:])
    assert (polled.partition, polled.current_offset) == (1, 1)
    assert [(record.value, record.headers, record.append_time_us) for record in polled.records] == [
        (b"hello", (), T_US),
        (b"world!", (HEADER,), T_US + 5),
    ]


def test_a_poll_of_nothing() -> None:
    peer = prepared()
    for _ in range(2):
        send(peer, Record(b"x"))
    reply = peer.ask(request(Code.POLL, poll(place(CONSUMER, TOPIC, 1), 1, 2, 10)))
    assert reply == REPLIES["POLL_MESSAGES partition 1, nothing to read"]


def test_a_stored_offset() -> None:
    peer = prepared()
    for _ in range(42):
        send(peer, Record(b"x"))
    store = REQUESTS["STORE_CONSUMER_OFFSET consumer 1, 1/2, partition 1, offset 41"]
    assert peer.ask(store) == EMPTY
    broker = peer.world.memory.broker
    assert broker.position("orders.paid", 0, PositionKind.CONSUMER, "1") == 42, "the next one, as we count"
    assert peer.ask(request(Code.STORE_OFFSET, place(CONSUMER, TOPIC, 1) + U64.pack(40))) == EMPTY
    reply = peer.ask(REQUESTS["GET_CONSUMER_OFFSET consumer 1, 1/2, partition 1"])
    assert reply == REPLIES["GET_CONSUMER_OFFSET partition 1, current 41, stored 40"]
    assert client_codec.read_offset(reply[8:]) == (1, 41, 40)


def _with_size(example: bytes, own: bytes, *places: int) -> bytes:
    """Return the example with our own sizes in bytes, which are those of stored batches."""
    changed = bytearray(example)
    for at in places:
        changed[at : at + 8] = own[at : at + 8]
    return bytes(changed)


def test_streams_and_topics_as_lists_show_them() -> None:
    peer = prepared()
    for _ in range(2):
        send(peer, Record(b"x"))
    stream = peer.ask(REQUESTS["GET_STREAM 1"])
    assert stream == _with_size(REPLIES['GET_STREAM id 1 "orders", one topic "paid"'], stream, 24, 67)
    seen, topics = client_codec.read_stream(stream[8:])
    assert (seen.id, seen.name, seen.topic_count, seen.message_count, topics[0].name) == (1, "orders", 1, 2, "paid")
    assert topics[0].size_bytes == seen.size_bytes > 0
    listed = peer.ask(REQUESTS["GET_TOPICS 1"])
    assert listed == _with_size(REPLIES["GET_TOPICS one topic"], listed, 28)
    assert client_codec.read_topics(listed[8:]) == topics
    assert peer.ask(request(Code.CREATE_STREAM, U32.pack(2) + name("logs"))) == EMPTY
    streams = peer.ask(REQUESTS["GET_STREAMS"])
    assert streams == _with_size(REPLIES["GET_STREAMS two streams"], streams, 24)


def test_a_topic_with_an_expiry_and_its_partitions() -> None:
    peer = World().connect()
    peer.ask(REQUESTS['CREATE_STREAM id 1 "orders"'])
    body = ident(1) + U32.pack(2) + U32.pack(2) + U32.pack(60) + name("paid")
    assert peer.ask(request(Code.CREATE_TOPIC, body)) == EMPTY
    for _ in range(2):
        send(peer, Record(b"x"))
    reply = peer.ask(REQUESTS["GET_TOPIC 1/2"])
    assert reply == _with_size(REPLIES['GET_TOPIC id 2 "paid", expiry 60, two partitions'], reply, 28, 73)
    topic, partitions = client_codec.read_topic(reply[8:])
    assert (topic.expiry_s, topic.partition_count) == (60, 2)
    assert [(partition.id, partition.message_count) for partition in partitions] == [(1, 2), (2, 0)]
    assert peer.world.memory.broker.topic("orders.paid").settings.retention_age_us == 60_000_000


def test_groups_and_their_members() -> None:
    peer = prepared()
    other = peer.beside()
    for number in (5, 6):
        assert peer.ask(request(Code.CREATE_GROUP, TOPIC + U32.pack(number))) == EMPTY
    for member in (peer, other):
        assert member.ask(REQUESTS["JOIN_CONSUMER_GROUP 1/2/5"]) == EMPTY
    number, partition_count, members = client_codec.read_group(peer.ask(REQUESTS["GET_CONSUMER_GROUP 1/2/5"])[8:])
    assert (number, partition_count, len(members)) == (5, 3, 2)
    assert sorted(len(member.partitions) for member in members) == [1, 2]
    assert sorted(partition for member in members for partition in member.partitions) == [1, 2, 3]
    example = REPLIES["GET_CONSUMER_GROUP id 5, 3 partitions, two members"]
    assert [len(member.partitions) for member in client_codec.read_group(example[8:])[2]] == [2, 1]
    third = peer.beside()
    assert third.ask(REQUESTS["JOIN_CONSUMER_GROUP 1/2/5"]) == EMPTY
    assert third.ask(request(Code.JOIN_GROUP, TOPIC + U32.pack(6))) == EMPTY
    listed = peer.ask(REQUESTS["GET_CONSUMER_GROUPS 1/2"])[8:]
    assert listed == U32.pack(5) + U32.pack(3) + U32.pack(3) + U32.pack(6) + U32.pack(3) + U32.pack(1)
    assert len(listed) == len(REPLIES["GET_CONSUMER_GROUPS"]) - 8


def test_clients() -> None:
    world = World()
    peer, other = world.connect(), world.connect()
    peer.peer, other.peer = "127.0.0.1:50000", "127.0.0.1:50001"
    peer.ask(REQUESTS['CREATE_STREAM id 1 "orders"'])
    peer.ask(REQUESTS['CREATE_TOPIC stream 1, id 2, 3 partitions, no expiry, "paid"'])
    peer.ask(REQUESTS["CREATE_CONSUMER_GROUP 1/2/5"])
    peer.ask(REQUESTS["JOIN_CONSUMER_GROUP 1/2/5"])
    me = peer.ask(REQUESTS["GET_ME"])
    example = REPLIES["GET_ME client 7 over TCP, member of group 5 of stream 1, topic 2 (our order)"]
    assert me[:8] + me[12:] == example[:8] + example[12:], "except for its number"
    number = client_codec.read_client_id(me[8:])
    assert other.ask(request(Code.GET_CLIENT, U32.pack(number))) == me
    listed = other.ask(REQUESTS["GET_CLIENTS"])
    assert len(listed) == len(REPLIES["GET_CLIENTS"])
    assert listed.count(b"127.0.0.1:5000") == 2


def test_statistics_are_those_of_the_process() -> None:
    peer = prepared()
    send(peer, Record(b"x"))
    reply = peer.ask(REQUESTS["GET_STATS"])
    example = REPLIES["GET_STATS"]
    assert reply[:4] == example[:4]
    numbers, own = memoryview(example)[8:112], memoryview(reply)[8:112]
    assert len(numbers) == len(own)
    stream_count, topic_count, partition_count = (int.from_bytes(own[at : at + 4], "little") for at in (72, 76, 80))
    assert (stream_count, topic_count, partition_count) == (1, 1, 3)
    assert int.from_bytes(own[88:96], "little") == 1, "messages"
    texts, at = [], 112
    for _ in range(4):
        size = int.from_bytes(reply[at : at + 4], "little")
        texts.append(reply[at + 4 : at + 4 + size].decode())
        at += 4 + size
    assert at == len(reply)
    assert all(texts)


@pytest.mark.parametrize(
    ("reply", "code", "body"),
    [
        ("stream id not found", Code.GET_STREAM, ident(9)),
        ("stream name exists", Code.CREATE_STREAM, U32.pack(9) + name("orders")),
        ("invalid messages count", Code.POLL, poll(place(CONSUMER, TOPIC, 1), 1, 0, 0)),
    ],
)
def test_errors(reply: str, code: int, body: bytes) -> None:
    assert prepared().ask(request(code, body)) == REPLIES[reply]
