"""The meaning of frames, types and replies in Iggy's protocol page of 2023, on its own port and on the detecting one.

The tests use the client written from the page alone. The fields of each command are in ``test_iggy_page_commands.py``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from itertools import count
from typing import Final

import pytest

from tests.broker_process import BrokerProcess
from tests.specs.iggy_page_client import (
    BALANCED,
    FIRST,
    GET_OFFSET,
    GROUP,
    LAST,
    NEXT,
    OFFSET,
    POLL,
    SEND,
    SINGLE,
    STORE_OFFSET,
    TIMESTAMP,
    Client,
    Message,
    Refused,
    consumer,
    frame,
    identifier,
    message,
    name,
    polled,
    status,
    strategy,
    u32,
)
from tests.specs.pages import IGGY, Differs, Row

NUMBERS: Final = count(1)  # of streams: each test has its own
READER: Final = consumer(SINGLE, 7)
ALL: Final = strategy(OFFSET) + u32(100) + b"\0"
MALFORMED: Final = 3
WHOLE_NUMBERS: Final = [(f"{sign}{bits}", bits // 8) for sign in ("Int", "Uint") for bits in (8, 16, 32, 64, 128)]
KINDS: Final = [("Raw", 5), ("String", 5), ("Bool", 1), *WHOLE_NUMBERS, ("Float32", 4), ("Float64", 8)]


@pytest.fixture(params=["iggy", "any"])
def client(request: pytest.FixtureRequest, broker: BrokerProcess) -> Iterator[Client]:
    """Return a client of the protocol's own port, and of the one that detects it."""
    found = Client(broker.addresses[request.param])
    yield found
    found.socket.close()


def new_stream(client: Client) -> bytes:
    """Create a stream."""
    number = next(NUMBERS)
    client.ask(202, u32(number) + name(f"s{number}"))
    return identifier(number)


def new_topic(client: Client, partitions: int = 2) -> bytes:
    """Return the stream and topic of a new topic in a new stream."""
    stream = new_stream(client)
    client.ask(302, stream + u32(1) + u32(partitions) + u32(0) + name("t"))
    return stream + identifier(1)


def send(client: Client, at: bytes, *payloads: bytes, partition: int = 1) -> None:
    """Send each message in its own command."""
    for payload in payloads:
        client.ask(SEND, at + b"\2\4" + u32(partition) + message(payload))


def messages(client: Client, at: bytes, partition: int = 1, how: bytes = ALL, reader: bytes = READER) -> list[Message]:
    """Return the messages of a poll."""
    return polled(client.ask(POLL, reader + at + u32(partition) + how)).messages


def payloads(client: Client, at: bytes, partition: int = 1, how: bytes = ALL, reader: bytes = READER) -> list[bytes]:
    """Return the payloads of a poll."""
    return [one.payload for one in messages(client, at, partition, how, reader)]


def stored(client: Client, at: bytes, reader: bytes, partition: int = 1) -> int:
    """Return the stored offset."""
    found: int = struct.unpack("<IQQ", client.ask(GET_OFFSET, reader + at + u32(partition)))[2]
    return found


# Frames


@IGGY.says(10, "a command has a length, a code and a payload")
@IGGY.says(22, "length, code and payload come in this order")
def test_a_frame(client: Client) -> None:
    client.socket.sendall(bytes.fromhex("0400000001000000"))
    assert client.reply() == b""


@IGGY.says(12, "the length is a number of 4 bytes that counts code and payload")
@IGGY.says(16, "a payload of 100 bytes has the length 104 and makes 108 bytes")
def test_a_frame_of_108_bytes(client: Client) -> None:
    called = f"s{next(NUMBERS)}-".ljust(95, "x")
    command = frame(202, u32(10_000 + next(NUMBERS)) + name(called))
    assert (len(command), command[:4]) == (108, u32(104))
    client.socket.sendall(command + frame(1) + frame(200, identifier(called)))
    assert [client.reply(), client.reply()] == [b"", b""]
    assert client.reply().endswith(called.encode())


@IGGY.says(
    12,
    "the length may be any number of 4 bytes",
    Differs("takes any length", "4022 above 32 MiB, and closes", "what a peer can make the broker hold has a limit"),
)
def test_a_frame_that_is_too_long(client: Client) -> None:
    assert status(client, 1) == 0
    client.socket.sendall(u32(32 * 1024 * 1024 + 1) + u32(SEND))
    with pytest.raises(Refused, match="status=4022"):
        client.reply()
    with pytest.raises(ConnectionError):
        client.reply()


@IGGY.says(13, "the code is a number of 4 bytes")
def test_a_code_has_four_bytes(client: Client) -> None:
    assert [status(client, 1 + offset) for offset in (0, 2**8, 2**16, 2**24)] == [0, MALFORMED, MALFORMED, MALFORMED]


@IGGY.says(14, "the payload has as many bytes as are left")
@pytest.mark.parametrize("size", [1, 255, 70_000, 5_000_000])
def test_a_payload_of_any_size(client: Client, size: int) -> None:
    at = new_topic(client)
    send(client, at, b"x" * size)
    assert payloads(client, at) == [b"x" * size]


# Consumers


@IGGY.says(75, "a consumer has a kind")
@IGGY.says(80, "kind 1 is a single consumer")
@IGGY.says(81, "kind 2 is a group")
@IGGY.says(89, "the kind is 1 byte")
def test_kinds_of_consumers(client: Client) -> None:
    at = new_topic(client)
    send(client, at, b"a", b"b")
    client.ask(602, at + u32(7))
    client.ask(604, at + u32(7))
    client.ask(STORE_OFFSET, consumer(SINGLE, 7) + at + u32(1) + struct.pack("<Q", 1))
    assert [stored(client, at, consumer(kind, 7)) for kind in (SINGLE, GROUP)] == [1, 0]
    assert [status(client, POLL, consumer(kind, 7), at, u32(1), ALL) for kind in (0, 1, 2, 3)] == [3, 0, 0, 3]


@IGGY.says(76, "a consumer's id is a number of 32 bits")
@IGGY.says(90, "the id has 4 bytes")
def test_ids_of_consumers(client: Client) -> None:
    at = new_topic(client)
    send(client, at, b"a", b"b", b"c")
    readers = [consumer(SINGLE, number) for number in (1, 1 + 2**24, 2**32 - 1)]
    for offset, reader in enumerate(readers):
        client.ask(STORE_OFFSET, reader + at + u32(1) + struct.pack("<Q", offset))
    assert [stored(client, at, reader) for reader in readers] == [0, 1, 2]


@IGGY.says(85, "polls, and commands that store and tell offsets, say the consumer")
@IGGY.says(367, "POLL_MESSAGES: the consumer whose offset is meant")
@IGGY.says(474, "GET_CONSUMER_OFFSET: the consumer whose offset is returned")
@IGGY.says(494, "STORE_CONSUMER_OFFSET: the consumer whose offset is stored")
def test_consumers_have_separate_offsets(client: Client) -> None:
    at = new_topic(client)
    send(client, at, b"a", b"b", b"c")
    one, other = consumer(SINGLE, 1), consumer(SINGLE, 2)
    following = strategy(NEXT) + u32(1) + b"\0"
    client.ask(STORE_OFFSET, one + at + u32(1) + struct.pack("<Q", 1))
    assert (stored(client, at, one), stored(client, at, other)) == (1, 0)
    assert payloads(client, at, how=following, reader=one) == [b"c"]
    assert payloads(client, at, how=following, reader=other) == [b"a"]


# Identifiers


@IGGY.says(96, "an identifier has a kind")
@IGGY.says(102, "kind 1 is a number")
@IGGY.says(103, "kind 2 is a name")
@IGGY.says(111, "the kind is 1 byte")
def test_kinds_of_identifiers(client: Client) -> None:
    number = next(NUMBERS)
    client.ask(202, u32(number) + name(f"n{number:03d}"))
    for kind, value in ((1, u32(number)), (2, b"n%03d" % number)):
        assert client.ask(200, bytes((kind, 4)) + value).endswith(b"n%03d" % number)
    assert [status(client, 200, bytes((kind, 4)) + u32(number)) for kind in (0, 3, 255)] == [MALFORMED] * 3


@IGGY.says(97, "an identifier has a length of 8 bits")
@IGGY.says(98, "an identifier has a value")
@IGGY.says(107, "a number has 4 bytes, a name up to 255")
@IGGY.says(112, "the length is 1 byte, and counts the value")
@IGGY.says(113, "the value has as many bytes as the length says")
def test_lengths_of_identifiers(client: Client) -> None:
    number = next(NUMBERS)
    client.ask(202, u32(number) + name(f"s{number}"))
    assert status(client, 200, b"\1\4", u32(number)) == 0
    wrong = [b"\1\3" + u32(number)[:3], b"\1\5" + u32(number) + b"\0", b"\1\0", b"\2\0", b"\2\4ab"]
    assert [status(client, 200, identity) for identity in wrong] == [MALFORMED] * len(wrong)
    assert [status(client, 200, identifier("x" * size)) for size in (1, 254, 255)] == [1010] * 3


SIGNS: Final = Differs(
    "any text", "letters of every script, digits, white space, `_ - .`", "the software of the page refuses other signs"
)


@IGGY.rows(
    "what, called, answer",
    Row(107, "a name is any text in UTF-8", ("stream", "žluť 日本_1", 0)),
    Row(107, "a name is any text in UTF-8, a topic's too", ("topic", "žluť 日本_1", 0)),
    Row(107, "a stream's name may have any signs", ("stream", "50 %: a/b", 1013), SIGNS),
    Row(107, "a topic's name may have any signs", ("topic", "50 %: a/b", 2014), SIGNS),
    Row(220, "a stream has a name", ("stream", "Plain.Name-1_2", 0)),
    Row(230, "a stream's name has at least 1 byte", ("stream", "q", 0)),
    Row(230, "a stream's name may have 255 bytes", ("stream", "n" * 255, 0)),
    Row(289, "a topic has a name", ("topic", "Plain.Name-1_2", 0)),
    Row(301, "a topic's name has at least 1 byte", ("topic", "q", 0)),
    Row(301, "a topic's name may have 255 bytes", ("topic", "n" * 255, 0)),
)
def test_names(client: Client, what: str, called: str, answer: int) -> None:
    stream, number = new_stream(client), 20_000 + next(NUMBERS)
    if what == "topic":
        assert status(client, 302, stream, u32(1), u32(1), u32(0), name(called)) == answer
        assert status(client, 300, stream, identifier(called)) == (2011 if answer else 0)
        return
    assert status(client, 202, u32(number), name(called)) == answer
    assert status(client, 200, identifier(called)) == (1010 if answer else 0)
    if not answer:
        client.ask(203, identifier(called))


@IGGY.says(219, "CREATE_STREAM: the id that the stream is to have, a number of 32 bits")
@IGGY.says(286, "CREATE_TOPIC: the id that the topic is to have, a number of 32 bits")
def test_ids_are_chosen_by_the_client(client: Client) -> None:
    number, high = 30_000 + next(NUMBERS), 2**28
    for one in (number, number + high):
        client.ask(202, u32(one) + name(f"s{one}"))
        assert client.ask(200, identifier(one)) == client.ask(200, identifier(f"s{one}"))
        assert client.ask(200, identifier(one))[:4] == u32(one)
        client.ask(302, identifier(number) + u32(one) + u32(1) + u32(0) + name(f"t{one}"))
        assert client.ask(300, identifier(number) + identifier(one))[:4] == u32(one)
    assert status(client, 202, u32(number), name("other")) == 1011


@IGGY.says(286, "CREATE_TOPIC: the highest ids")
@IGGY.says(556, "CREATE_CONSUMER_GROUP: the highest ids")
def test_the_highest_ids(client: Client) -> None:
    stream = new_stream(client)
    for one in (2**32 - 1, 2**32 - 31):
        client.ask(302, stream + u32(one) + u32(1) + u32(0) + name(f"t{one}"))
        at = stream + identifier(one)
        assert client.ask(300, at)[:4] == u32(one)
        client.ask(602, at + u32(one))
        assert client.ask(600, at + u32(one))[:4] == u32(one)


@IGGY.says(
    219,
    "CREATE_STREAM: the highest ids",
    Differs(
        "takes any but 0",
        "1014 for the highest 31",
        "one is the stream of topics of other protocols, others mean no stream",
    ),
)
def test_the_highest_ids_of_streams(client: Client) -> None:
    highest = 2**32 - 32
    assert [status(client, 202, u32(one), name(f"s{one}")) for one in (highest, highest + 1, 2**32 - 1)] == [
        0,
        1014,
        1014,
    ]
    client.ask(203, identifier(highest))


# Replies


HEADERS: Final = u32(1) + b"k" + b"\2" + u32(1) + b"v"
HEADERS_LENGTH: Final = Differs(
    "their length of 4 bytes stands before them", "as the real software", "without it the end of the headers is unknown"
)


@IGGY.rows(
    "field",
    Row(119, "PolledMessages: the partition's id, a number of 32 bits", ("partition_id",)),
    Row(120, "PolledMessages: the current offset, a number of 64 bits", ("current_offset",)),
    Row(121, "PolledMessages: then the messages", ("messages",)),
    Row(125, "a poll is answered with partition, current offset and messages", ("messages_count",)),
    Row(130, "the partition's id has 4 bytes", ("partition_id",)),
    Row(131, "the current offset has 8 bytes", ("current_offset",)),
    Row(132, "the count of messages has 4 bytes", ("messages_count",)),
    Row(133, "the messages follow, one behind the other", ("messages",)),
    Row(140, "Message: the offset, a number of 64 bits", ("offset",)),
    Row(141, "Message: the state", ("state",)),
    Row(142, "Message: the timestamp, a number of 64 bits", ("timestamp",)),
    Row(143, "Message: the id, a number of 128 bits", ("id",)),
    Row(144, "Message: the checksum, a number of 32 bits", ("checksum",)),
    Row(145, "Message: the headers, if it has any", ("headers",)),
    Row(146, "Message: the payload's length, a number of 32 bits", ("length",)),
    Row(147, "Message: the payload", ("payload",)),
    Row(151, "the offset is that in the partition", ("offset",)),
    Row(151, "the length is that of the payload", ("length",)),
    Row(155, "the offset has 8 bytes", ("offset",)),
    Row(156, "the state has 1 byte (1: available)", ("state",)),
    Row(157, "the timestamp has 8 bytes (µs, when it arrived)", ("timestamp",)),
    Row(158, "the id has 16 bytes", ("id",)),
    Row(159, "the checksum has 4 bytes (CRC-32 of the payload)", ("checksum",)),
    Row(160, "the headers follow at once", ("headers_length",), HEADERS_LENGTH),
    Row(160, "the headers have N bytes", ("headers",)),
    Row(161, "the payload's length has 4 bytes", ("length",)),
    Row(162, "the payload has as many bytes as the length says", ("payload",)),
)
def test_a_polls_reply_has_this_field(client: Client, field: str) -> None:
    at = new_topic(client)
    send(client, at, b"first", partition=2)
    client.ask(SEND, at + b"\2\4" + u32(2) + message(b"hello", 2**127 + 5, HEADERS))
    earliest = struct.unpack_from("<Q", client.ask(POLL, READER + at + u32(2) + ALL), 16 + 9)[0]
    body = client.ask(POLL, READER + at + u32(2) + strategy(OFFSET, 1) + u32(1) + b"\0")
    expected = {
        "partition_id": u32(2),
        "current_offset": struct.pack("<Q", 1),
        "messages_count": u32(1),
        "offset": struct.pack("<Q", 1),
        "state": b"\1",
        "timestamp": body[25:33],
        "id": (2**127 + 5).to_bytes(16, "little"),
        "checksum": u32(zlib.crc32(b"hello")),
        "headers_length": u32(len(HEADERS)),
        "headers": HEADERS,
        "length": u32(5),
        "payload": b"hello",
    }
    found, start = {}, 0
    for key, value in expected.items():
        found[key] = body[start : start + len(value)]
        start += len(value)
    assert start == len(body)
    assert earliest <= struct.unpack("<Q", found["timestamp"])[0] < earliest + 3600 * 10**6
    whole = b"".join(value for key, value in expected.items() if key not in ("partition_id", "current_offset"))
    found["messages"], expected["messages"] = body[16:], whole[4:]
    assert found[field] == expected[field]


@IGGY.rows(
    "start, end, value",
    Row(167, "GET_CONSUMER_OFFSET is answered with partition, current and stored offset", (0, 20, (2, 4, 3))),
    Row(171, "ConsumerOffsetInfo: the partition's id, a number of 32 bits", (0, 4, (2,))),
    Row(172, "ConsumerOffsetInfo: the current offset, a number of 64 bits", (4, 12, (4,))),
    Row(173, "ConsumerOffsetInfo: the stored offset, a number of 64 bits", (12, 20, (3,))),
    Row(179, "the partition's id has 4 bytes", (0, 4, (2,))),
    Row(180, "the current offset has 8 bytes", (4, 12, (4,))),
    Row(181, "the stored offset has 8 bytes", (12, 20, (3,))),
)
def test_an_offsets_reply_has_this_field(client: Client, start: int, end: int, value: tuple[int, ...]) -> None:
    at = new_topic(client)
    send(client, at, *(b"%d" % number for number in range(5)), partition=2)
    client.ask(STORE_OFFSET, READER + at + u32(2) + struct.pack("<Q", 3))
    body = client.ask(GET_OFFSET, READER + at + u32(2))
    assert len(body) == 20
    assert struct.unpack({4: "<I", 8: "<Q", 20: "<IQQ"}[end - start], body[start:end]) == value


# Polls and offsets


@IGGY.says(370, "POLL_MESSAGES: the partition")
@IGGY.says(477, "GET_CONSUMER_OFFSET: the partition")
@IGGY.says(497, "STORE_CONSUMER_OFFSET: the partition")
@IGGY.says(498, "STORE_CONSUMER_OFFSET: the offset, a number of 64 bits")
def test_partitions(client: Client) -> None:
    at = new_topic(client)
    send(client, at, b"a", b"b", partition=1)
    send(client, at, b"c", partition=2)
    client.ask(STORE_OFFSET, READER + at + u32(1) + struct.pack("<Q", 1))
    assert [payloads(client, at, partition) for partition in (1, 2)] == [[b"a", b"b"], [b"c"]]
    assert [stored(client, at, READER, partition) for partition in (1, 2)] == [1, 0]
    assert status(client, POLL, READER, at, u32(3), ALL) == 3007
    assert status(client, STORE_OFFSET, READER, at, u32(1), struct.pack("<Q", 2**32)) == 4100


@IGGY.rows(
    "kind, value, offsets",
    Row(371, "POLL_MESSAGES: the strategy, kind before value", (OFFSET, 3, [3, 4])),
    Row(377, "a strategy has a kind", (FIRST, 3, [0, 1, 2])),
    Row(378, "a strategy has a value, a number of 64 bits", (OFFSET, 2**32, [])),
    Row(382, "kind 1: from the offset", (OFFSET, 1, [1, 2, 3])),
    Row(383, "kind 2: from the timestamp", (TIMESTAMP, 2, [2, 3, 4])),
    Row(384, "kind 3: the first messages", (FIRST, 0, [0, 1, 2])),
    Row(385, "kind 4: the last messages", (LAST, 0, [2, 3, 4])),
    Row(386, "kind 5: those behind the stored offset", (NEXT, 0, [2, 3, 4])),
)
def test_kinds_of_polls(client: Client, kind: int, value: int, offsets: list[int]) -> None:
    """``value`` of a poll from a timestamp: whose."""
    at = new_topic(client)
    send(client, at, *(b"%d" % number for number in range(5)))
    client.ask(STORE_OFFSET, READER + at + u32(1) + struct.pack("<Q", 1))
    if kind == TIMESTAMP:
        times = [one.timestamp for one in messages(client, at)]
        value = times[value]
        begin = next(offset for offset, time in enumerate(times) if time >= value)
        offsets = list(range(begin, 5))[:3]
    found = messages(client, at, how=strategy(kind, value) + u32(3) + b"\0")
    assert [one.offset for one in found] == offsets


@IGGY.says(372, "POLL_MESSAGES: the count, how many messages at most")
def test_a_poll_has_a_count(client: Client) -> None:
    at = new_topic(client)
    send(client, at, b"a", b"b", b"c")
    assert [len(messages(client, at, how=strategy(FIRST) + u32(most) + b"\0")) for most in (1, 2, 3, 2**32 - 1)] == [
        1,
        2,
        3,
        3,
    ]


@IGGY.says(373, "POLL_MESSAGES: whether what was polled is stored as consumed")
def test_a_poll_commits(client: Client) -> None:
    at = new_topic(client)
    send(client, at, b"a", b"b", b"c")
    for commits, offset in ((b"\0", 0), (b"\1", 1)):
        messages(client, at, how=strategy(FIRST) + u32(2) + commits)
        assert stored(client, at, READER) == offset


# Sends


@IGGY.says(408, "SEND_MESSAGES: where the messages go")
@IGGY.says(413, "a partitioning has a kind")
@IGGY.says(414, "a partitioning has a length of 8 bits")
@IGGY.says(415, "a partitioning has a value")
@IGGY.says(420, "kind 2 is a partition's id")
def test_a_partition_is_chosen_by_number(client: Client) -> None:
    at = new_topic(client, 3)
    for partition in (3, 1):
        send(client, at, b"to %d" % partition, partition=partition)
    assert [payloads(client, at, partition) for partition in (1, 2, 3)] == [[b"to 1"], [], [b"to 3"]]
    wrong = [b"\0\4" + u32(1), b"\4\4" + u32(1), b"\2\3" + u32(1), b"\2\5" + u32(1)]
    assert all(status(client, SEND, at, how, message(b"m")) for how in wrong)
    assert status(client, SEND, at, b"\2\4" + u32(4), message(b"m")) == 3007


@IGGY.says(419, "kind 1 spreads the messages over the partitions")
def test_balanced_takes_turns(client: Client) -> None:
    at = new_topic(client, 3)
    for number in range(6):
        client.ask(SEND, at + BALANCED + message(b"%d" % number))
    assert [len(payloads(client, at, partition)) for partition in (1, 2, 3)] == [2, 2, 2]


@IGGY.says(421, "kind 3 keeps the messages of a key together")
def test_keys(client: Client) -> None:
    at = new_topic(client, 3)
    keys = [b"k" * size for size in (1, 2, 100, 255)]
    for number in range(12):
        key = keys[number % 4]
        client.ask(SEND, at + bytes((3, len(key))) + key + message(b"%d" % (number % 4)))
    found = [set(payloads(client, at, partition)) for partition in (1, 2, 3)]
    assert sorted(one for partition in found for one in partition) == [b"0", b"1", b"2", b"3"]


@IGGY.says(409, "SEND_MESSAGES: any number of messages, one behind the other")
@IGGY.says(427, "a payload is any bytes")
def test_several_messages_in_a_request(client: Client) -> None:
    at = new_topic(client)
    sent = [bytes(range(256)), b"\0", b"last"]
    client.ask(SEND, at + b"\2\4" + u32(1) + b"".join(map(message, sent)))
    assert payloads(client, at) == sent


@IGGY.says(425, "a message has an id of 128 bits, which its producer chooses")
def test_ids_of_messages(client: Client) -> None:
    at = new_topic(client)
    client.ask(SEND, at + b"\2\4" + u32(1) + message(b"m", 2**128 - 1) + message(b"m"))
    first, second = (one.id for one in messages(client, at))
    assert first == 2**128 - 1
    assert second not in (0, first), "one sent with 0 gets another id"


@IGGY.says(426, "a payload's length is a number of 32 bits")
@IGGY.says(
    426,
    "a payload may have no bytes",
    Differs("refused with 4024", "as the real software", "its clients take a payload of no bytes for a fault"),
)
@IGGY.says(
    426,
    "a payload may have 4 GiB",
    Differs("4022 above 10 MiB in a command", "as the real software", "what a command may hold has a limit"),
)
def test_lengths_of_payloads(client: Client) -> None:
    at = new_topic(client)
    assert status(client, SEND, at, b"\2\4", u32(1), message(b"x" * 70_000)) == 0
    assert status(client, SEND, at, b"\2\4", u32(1), message(b"")) == 4024
    assert status(client, SEND, at, b"\2\4", u32(1), message(b"x" * (10 * 1024 * 1024 + 1))) == 4022
    assert payloads(client, at) == [b"x" * 70_000]


@IGGY.says(428, "a message may have headers or none")
@IGGY.says(
    428,
    "the headers stand behind the payload",
    Differs(
        "between id and payload's length, behind a length of their own", "as the real software", "only it has clients"
    ),
)
def test_headers_of_messages(client: Client) -> None:
    at = new_topic(client)
    client.ask(SEND, at + b"\2\4" + u32(1) + message(b"with", 1, HEADERS) + message(b"without", 2))
    behind = (9).to_bytes(16, "little") + u32(4) + b"then" + HEADERS
    assert status(client, SEND, at, b"\2\4", u32(1), behind) == MALFORMED
    assert [(one.payload, one.headers) for one in messages(client, at)] == [(b"with", HEADERS), (b"without", b"")]


@IGGY.rows(
    "kind, size",
    Row(431, "a header's key is a text", (2, 5)),
    Row(434, "a header's value has a kind", (1, 5)),
    Row(435, "a header's value is bytes", (1, 255)),
    *(
        Row(438 + number, f"{word} is a kind of value (number {number})", (number, size))
        for number, (word, size) in enumerate(KINDS, 1)
    ),
)
def test_kinds_of_headers(client: Client, kind: int, size: int) -> None:
    at = new_topic(client)
    one = u32(6) + b"key-%02d" % kind + bytes((kind,)) + u32(size) + b"1" * size
    client.ask(SEND, at + b"\2\4" + u32(1) + message(b"m", 1, one))
    assert messages(client, at)[0].headers == one
    assert status(client, SEND, at, b"\2\4", u32(1), message(b"m", 1, u32(1) + b"k" + b"\20" + u32(1) + b"v")) == 3


@IGGY.says(
    439,
    "the kinds of values have no numbers, so that the first may be 0",
    Differs("counts from 1, and refuses 0", "as the real software", "only it has clients"),
)
def test_header_kind_0_is_invalid(client: Client) -> None:
    at = new_topic(client)
    one = u32(1) + b"k" + b"\0" + u32(1) + b"v"
    assert status(client, SEND, at, b"\2\4", u32(1), message(b"m", 1, one)) == 3
    assert payloads(client, at) == []
