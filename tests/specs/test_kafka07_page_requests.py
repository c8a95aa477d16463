"""Frames, requests and responses in the pages on Kafka 0.7, on both ports.

The tests use the client written from the pages alone. Message sets are in
``test_kafka07_page_messages.py``, limits in ``test_kafka07_page.py``.
"""

from __future__ import annotations

import itertools
import random
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests.broker_process import BrokerProcess
from tests.specs.kafka07_page_client import (
    EARLIEST,
    FETCH,
    LATEST,
    MULTIFETCH,
    MULTIPRODUCE,
    OFFSETS,
    PRODUCE,
    Client,
    Failed,
    asked,
    fetched,
    frame,
    message,
    place,
    produced,
)
from tests.specs.pages import KAFKA07, Differs, Row

HELLO: Final = bytes.fromhex("0000000b01003610a68668656c6c6f")
ABC: Final = bytes.fromhex("000000090100352441c2616263")
EMPTY: Final = bytes.fromhex("000000020000")
CLOSED: Final = None
SEEDS: Final = itertools.count(random.getrandbits(40))

Asked = Callable[[bytes], bytes]
"""A request about partition 0 of a topic with two messages of 15 and 13 bytes."""


@pytest.fixture(params=["kafka07", "any"])
def client(request: pytest.FixtureRequest, broker: BrokerProcess) -> Iterator[Client]:
    """Return a client of the protocol's own port, and of the one that detects it, after a first request."""
    found = Client(broker.addresses[request.param])
    found.ask(frame(OFFSETS, asked(b"nothing", 0, LATEST, 1)))
    yield found
    found.socket.close()


@pytest.fixture
def topic(client: Client) -> bytes:
    """Create a topic with two messages."""
    name = new_topic()
    client.socket.sendall(frame(PRODUCE, produced(name, 0, HELLO + ABC)))
    assert end_of(client, name) == 28
    return name


def new_topic() -> bytes:
    """Return an unused topic name."""
    return b"t%014d" % next(SEEDS)


def counted(*entries: bytes) -> bytes:
    """Encode entries after their count."""
    return struct.pack(">h", len(entries)) + b"".join(entries)


def end_of(client: Client, topic: bytes, partition: int = 0) -> int:
    """Return the end of a partition."""
    found: int = struct.unpack(">iq", client.ask(frame(OFFSETS, asked(topic, partition, LATEST, 1))))[1]
    return found


def is_closed(client: Client) -> bool:
    """Return whether the broker closes the connection without a response."""
    try:
        return client.socket.recv(1) == b""
    except ConnectionError:
        return True


def whole_answer(client: Client) -> bytes | None:
    """Return the next response with its length and error code; None if the broker closes the connection."""
    try:
        length = client.take(4)
        return length + client.take(int.from_bytes(length, "big"))
    except ConnectionError:
        return CLOSED


# Frames


@KAFKA07.rows(
    "written",
    Row(10, "a request of no bytes closes the connection", (bytes(4),)),
    Row(10, "a request of less than no bytes closes it", (struct.pack(">i", -5),)),
    Row(10, "a request that ends within its type closes it", (b"\0\0\0\1\0",)),
    Row(10, "a request that is shorter than its fields closes it", (b"\0\0\0\4\0\1\0\4",)),
    Row(10, "a request of more than 100 MiB closes it at its length", (struct.pack(">i", 104_857_601),)),
    Row(40, "an unknown request type closes the connection", (b"\0\0\0\2\0\5",)),
    Row(40, "a type below them closes it", (b"\0\0\0\2\xff\xff",)),
    Row(10, "a topic of no name closes it", (frame(OFFSETS, b"\xff\xff" + bytes(4) + b"\xff" * 8 + bytes(4)),)),
)
def test_invalid_frames_close_the_connection(client: Client, written: bytes) -> None:
    client.socket.sendall(written)
    assert is_closed(client)


@KAFKA07.says(
    10, "a request is its length, which does not count itself, its type, topic and partition, all numbers big-endian"
)
@KAFKA07.says(33, "FETCH (1): offset, and most bytes")
def test_a_request(client: Client, topic: bytes) -> None:
    written = bytes.fromhex("0000002300010011") + topic + bytes.fromhex("00000000 0000000000000000 00100000")
    length = struct.pack(">ih", 20 + len(topic), 1) + struct.pack(">h", len(topic)) + topic + written[8 + len(topic) :]
    client.socket.sendall(length)
    assert whole_answer(client) == bytes.fromhex("0000001e0000") + HELLO + ABC


@KAFKA07.says(10, "an answer is its length, which does not count itself, its error code, and what was asked for")
def test_an_answer(client: Client, topic: bytes) -> None:
    client.socket.sendall(frame(FETCH, fetched(topic, 0, 28, 100)) + frame(FETCH, fetched(topic, 0, 15, 100)))
    assert [whole_answer(client), whole_answer(client)] == [EMPTY, bytes.fromhex("0000000f0000") + ABC]


@KAFKA07.says(10, "what a request has behind its fields is ignored")
def test_surplus_bytes(client: Client, topic: bytes) -> None:
    for kind, body, size in (
        (FETCH, fetched(topic, 0, 0, 100), 30),
        (OFFSETS, asked(topic, 0, LATEST, 1), 14),
        (MULTIFETCH, counted(fetched(topic, 0, 0, 100)), 36),
    ):
        client.socket.sendall(frame(kind, body, b"surplus"))
        assert (whole_answer(client) or b"")[:4] == struct.pack(">i", size)
    client.socket.sendall(frame(PRODUCE, produced(topic, 0, HELLO), b"surplus"))
    assert end_of(client, topic) == 43


@KAFKA07.says(10, "a request may come in pieces of any size")
def test_byte_by_byte(client: Client, topic: bytes) -> None:
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in frame(FETCH, fetched(topic, 0, 0, 100)):
        client.socket.sendall(bytes((byte,)))
    assert whole_answer(client) == bytes.fromhex("0000001e0000") + HELLO + ABC


@KAFKA07.says(10, "answers come in the order of the requests, and producing has none")
@KAFKA07.says(10, "a request is carried out when all before it are")
@KAFKA07.says(31, "PRODUCE has no answer")
@KAFKA07.says(32, "MULTIPRODUCE has no answer")
@KAFKA07.says(70, "what a connection sends is stored in that order")
def test_many_requests_at_once(client: Client) -> None:
    topic, written = new_topic(), b""
    for number in range(200):
        sets = produced(topic, 0, message(b"%03d" % number))
        written += frame(PRODUCE, sets) if number % 2 else frame(MULTIPRODUCE, counted(sets))
        written += frame(OFFSETS, asked(topic, 0, LATEST, 1))
    client.socket.sendall(written)
    ends = [struct.unpack(">iq", client.answer())[1] for _ in range(200)]
    assert ends == [13 * number for number in range(1, 201)]
    assert client.consume(topic, 0) == [b"%03d" % number for number in range(200)]


@KAFKA07.says(10, "complete requests of a disconnected client are executed")
@KAFKA07.says(10, "an incomplete request of a disconnected client is not executed")
def test_disconnecting(client: Client, request: pytest.FixtureRequest, broker: BrokerProcess, topic: bytes) -> None:
    other = Client(broker.addresses[request.node.callspec.params["client"]])
    whole = frame(PRODUCE, produced(topic, 0, HELLO))
    other.socket.sendall(whole * 3 + whole[:-1])
    other.socket.shutdown(socket.SHUT_WR)
    assert is_closed(other)
    assert end_of(client, topic) == 28 + 45
    other.socket.close()


# Requests with responses


def fetch(offset: int, most: int, partition: int = 0, *, name: bytes | None = None) -> Asked:
    """Encode a FETCH."""
    return lambda topic: frame(FETCH, fetched(topic if name is None else name, partition, offset, most))


def offsets(moment: int, most: int, partition: int = 0, *, name: bytes | None = None) -> Asked:
    """Encode an OFFSETS."""
    return lambda topic: frame(OFFSETS, asked(topic if name is None else name, partition, moment, most))


def multifetch(*entries: tuple[int, int, int]) -> Asked:
    """Encode a MULTIFETCH of partitions, offsets and sizes."""
    return lambda topic: frame(MULTIFETCH, counted(*(fetched(topic, *entry) for entry in entries)))


def answer(code: int, body: bytes = b"") -> bytes:
    """Return a whole response."""
    return struct.pack(">ih", 2 + len(body), code) + body


def listed(*found: int) -> bytes:
    """Return a whole response to OFFSETS."""
    return answer(0, struct.pack(f">i{len(found)}q", len(found), *found))


FAR: Final = 2**62
ONE_SEGMENT: Final = Differs(
    "where segments begin, by their files' times", "the record's end, by its own time", "finer"
)


@KAFKA07.rows(
    "ask, answered",
    Row(33, "FETCH is answered with the messages from the offset on", (fetch(0, 2**20), answer(0, HELLO + ABC))),
    Row(33, "FETCH may begin at any message", (fetch(15, 2**20), answer(0, ABC))),
    Row(33, "FETCH is answered with no messages at the end", (fetch(28, 2**20), EMPTY)),
    Row(
        33,
        "what FETCH is answered with ends where so many bytes end",
        (fetch(0, 20), answer(0, HELLO)),
        Differs(
            "cut there, within a message", "ends before that message", "no client wants a part, some take it for one"
        ),
    ),
    Row(33, "a first message that is longer is cut there", (fetch(0, 10), answer(0, HELLO[:10]))),
    Row(33, "FETCH of no bytes is answered with none", (fetch(0, 0), EMPTY)),
    Row(33, "FETCH of 3 bytes is answered with 3", (fetch(0, 3), answer(0, HELLO[:3]))),
    Row(
        40,
        "FETCH of less than no bytes",
        (fetch(0, -1), CLOSED),
        Differs("answers with a wrong length, and closes", "closes", "no client can read that answer"),
    ),
    Row(40, "error 1: the offset is beyond the end", (fetch(29, 100), answer(1))),
    Row(40, "error 1: the offset is negative", (fetch(-1, 100), answer(1))),
    Row(40, "an offset within a message is answered with its bytes from there", (fetch(20, 100), answer(0, ABC[5:]))),
    Row(40, "error 3: the topic has no such partition", (fetch(0, 100, 10_000), answer(3))),
    Row(40, "error 3: partition -1 is not for consumers", (fetch(0, 100, -1), answer(3))),
    Row(40, "error -1: the topic's name is impossible", (fetch(0, 100, name=b"a/b"), answer(-1))),
    Row(40, "a topic without messages is empty", (fetch(0, 100, name=b"unused"), EMPTY)),
    Row(40, "a topic without messages is empty whatever the offset", (fetch(12_345, 100, name=b"unused"), EMPTY)),
    Row(40, "a partition without messages is empty, whatever the offset", (fetch(12_345, 100, 1), EMPTY)),
    Row(
        34,
        "MULTIFETCH (2): a count, and FETCHes; answered with error 0 and a whole answer to each",
        (multifetch((0, 0, 100), (0, 15, 100)), answer(0, answer(0, HELLO + ABC) + answer(0, ABC))),
    ),
    Row(
        10,
        "all five requests have one header: type, topic, partition",
        (multifetch((0, 0, 100)), answer(0, answer(0, HELLO + ABC))),
        Differs(
            "MULTIFETCH and MULTIPRODUCE have a count there, each entry has a topic and a partition",
            "the same",
            "clients are written for the software",
        ),
    ),
    Row(
        34,
        "an entry that fails has an error of its own",
        (multifetch((9_999, 0, 9), (0, 29, 9), (0, 15, 99)), answer(0, answer(3) + answer(1) + answer(0, ABC))),
    ),
    Row(34, "MULTIFETCH of nothing is answered with nothing", (multifetch(), EMPTY)),
    Row(34, "MULTIFETCH of less than nothing closes", (lambda _: frame(MULTIFETCH, b"\xff\xff"), CLOSED)),
    Row(35, "OFFSETS (4): time, and most offsets; answered with a count and offsets", (offsets(-2, 1), listed(0))),
    Row(35, "time -1 is the latest: the end, then where segments begin", (offsets(-1, 10), listed(28, 0))),
    Row(35, "no more offsets than were asked for", (offsets(-1, 1), listed(28))),
    Row(35, "no offsets for a maximum of 0", (offsets(-1, 0), listed())),
    *(
        Row(
            35,
            f"no offsets for a maximum of 0 on an unknown topic, time {time}",
            (offsets(time, 0, name=b"unused"), listed(0)),
            Differs("one offset, 0, whatever the maximum", "the same", "as the software; no client sends 0"),
        )
        for time in (-1, -2)
    ),
    Row(35, "time -2 is the earliest: one offset, however many were asked for", (offsets(-2, 10), listed(0))),
    Row(35, "offsets are descending", (offsets(FAR, 10), listed(28, 0))),
    Row(35, "a time is in milliseconds since 1970; the future is as -1", (offsets(FAR, 1), listed(28))),
    Row(51, "a time before all messages has no offsets", (offsets(1, 10), listed())),
    Row(51, "time 0 has no offsets", (offsets(0, 10), listed())),
    Row(51, "a time below -2 has no offsets", (offsets(-3, 10), listed())),
    Row(40, "OFFSETS of a topic without messages: 0 is the latest", (offsets(-1, 1, name=b"unused"), listed(0))),
    Row(40, "OFFSETS of a topic without messages: 0 is the earliest", (offsets(-2, 5, name=b"unused"), listed(0))),
    Row(40, "OFFSETS of a topic without messages: none at other times", (offsets(FAR, 5, name=b"unused"), listed())),
    Row(40, "OFFSETS of a partition that the topic has not closes", (offsets(-1, 1, 10_000), CLOSED)),
    Row(40, "OFFSETS of an impossible name closes", (offsets(-1, 1, name=b"a/b"), CLOSED)),
    Row(40, "OFFSETS of less than no offsets closes", (offsets(-1, -1), CLOSED)),
)
def test_responses(client: Client, topic: bytes, ask: Asked, answered: bytes | None) -> None:
    """Errors keep the connection open."""
    client.socket.sendall(ask(topic))
    assert whole_answer(client) == answered
    if answered is not CLOSED:
        assert end_of(client, topic) == 28


@KAFKA07.says(33, "a first message longer than the maximum is cut, for any sizes")
@KAFKA07.says(34, "a first message longer than the maximum is cut in each entry")
@pytest.mark.parametrize("most", [100_000, 2**20, 2**20 + 1, 3_000_000, 4_999_999])
def test_a_long_first_message_is_truncated(client: Client, most: int) -> None:
    topic, whole = new_topic(), message(random.Random(7).randbytes(5_000_000 - 10))
    client.socket.sendall(frame(PRODUCE, produced(topic, 0, whole)) + frame(PRODUCE, produced(topic, 1, whole)))
    assert end_of(client, topic, 1) == len(whole)
    assert client.ask(frame(FETCH, fetched(topic, 0, 0, most))) == whole[:most]
    entries = counted(fetched(topic, 0, 0, most), fetched(topic, 1, 0, most))
    assert client.ask(frame(MULTIFETCH, entries)) == answer(0, whole[:most]) * 2


@KAFKA07.says(35, "a time lists where segments begin that were written by then", ONE_SEGMENT)
def test_offsets_at_a_time(client: Client) -> None:
    """The message's time is found by bisection: a millisecond before it there are no offsets."""
    topic = new_topic()
    client.produce(topic, 0, b"one")
    now = 1
    while not struct.unpack_from(">i", client.ask(frame(OFFSETS, asked(topic, 0, now, 1))))[0]:
        now *= 2
    low, high = now // 2, now
    while high - low > 1:
        middle = (low + high) // 2
        found = struct.unpack_from(">i", client.ask(frame(OFFSETS, asked(topic, 0, middle, 1))))[0]
        low, high = (low, middle) if found else (middle, high)
    assert client.ask(frame(OFFSETS, asked(topic, 0, high, 9))) == listed(13, 0)[6:]


@KAFKA07.says(33, "the next offset is that asked for and the bytes of the whole messages")
@KAFKA07.says(50, "an offset is a position in bytes: the first message's is 0, the next one's is behind it")
def test_consuming_with_any_sizes(client: Client) -> None:
    topic, sizes = new_topic(), random.Random(7)
    sent = [bytes([number % 256]) * sizes.randrange(300) for number in range(200)]
    client.produce(topic, 0, *sent)
    offset, found = 0, list[bytes]()
    begins = [0, *itertools.accumulate(10 + len(payload) for payload in sent)]
    while len(found) < len(sent):
        client.offsets[f"{topic.decode()}-0"] = offset
        found += client.consume(topic, 0, sizes.randrange(1, 900))
        offset = client.offsets[f"{topic.decode()}-0"]
        assert offset == begins[len(found)]
    assert found == sent
    for number in (0, 17, 199):
        assert client.ask(frame(FETCH, fetched(topic, 0, begins[number], 10 + len(sent[number])))) == message(
            sent[number]
        )


# Producing


Sets = Callable[[bytes], list[bytes]]


@KAFKA07.says(31, "PRODUCE (0): the messages behind their length in bytes")
def test_produce(client: Client) -> None:
    topic = new_topic()
    written = struct.pack(">ihh", 12 + len(topic) + 15, 0, len(topic)) + topic + bytes(4) + bytes.fromhex("0000000f")
    client.socket.sendall(written + HELLO)
    assert end_of(client, topic) == 15
    assert client.consume(topic, 0) == [b"hello"]


@KAFKA07.says(32, "MULTIPRODUCE (3): a count, and as many PRODUCEs without their type")
def test_multiproduce(client: Client) -> None:
    one, other = new_topic(), new_topic()
    entries = produced(one, 0, HELLO), produced(other, 2, ABC), produced(one, 0, ABC)
    client.socket.sendall(frame(MULTIPRODUCE, counted(*entries)))
    assert (end_of(client, one), end_of(client, other), end_of(client, other, 2)) == (28, 0, 13)


@KAFKA07.rows(
    "partition, written, end",
    Row(40, "an empty set makes its topic, and stores nothing", (0, b"", 0)),
    Row(40, "a set of 3 bytes makes its topic, and stores nothing", (0, b"abc", 0)),
    Row(40, "an incomplete last message is dropped", (0, HELLO + ABC[:-1], 15)),
    Row(40, "bytes after the last message are dropped", (0, HELLO + b"\0\0\0", 15)),
    Row(40, "a first message that is not whole closes", (0, HELLO[:-1], CLOSED)),
    Row(40, "a message of a negative length closes", (0, HELLO + b"\xff" * 4 + HELLO, CLOSED)),
    Row(40, "a message too short for its head closes", (0, HELLO + b"\0\0\0\4" + bytes(4), CLOSED)),
    Row(40, "a wrong CRC closes, and nothing of the set is stored", (0, HELLO + HELLO[:-1] + b"O", CLOSED)),
    Row(40, "a magic above 1 closes", (0, HELLO + message(b"x", 2), CLOSED)),
    Row(40, "codec 3 closes", (0, HELLO + message(b"x", 1, 3), CLOSED)),
    Row(40, "a compressed message that cannot be opened closes", (0, HELLO + message(b"x", 1, 1), CLOSED)),
    Row(40, "a partition that the topic has not closes", (10_000, HELLO, CLOSED)),
    Row(40, "a partition below -1 closes", (-2, HELLO, CLOSED)),
)
def test_stored_sets(client: Client, partition: int, written: bytes, end: int | None) -> None:
    topic = new_topic()
    client.socket.sendall(frame(PRODUCE, produced(topic, partition, written)))
    if end is CLOSED:
        assert is_closed(client)
        end = 0
        client.connect_again()
    assert end_of(client, topic) == end
    client.socket.sendall(frame(PRODUCE, produced(topic, 0, HELLO)))
    assert end_of(client, topic) == end + 15


@KAFKA07.rows(
    "name, closes",
    Row(40, "a topic's name may have letters, digits, dots, dashes and low lines", (b"A-z.0_9", False)),
    Row(40, "a topic's name may have any other characters, too", ('a b: 50 % für \\ "x"|,*'.encode(), False)),
    Row(
        40,
        "a `%` before two hexadecimal digits is as good as any character",
        (b"a%0Ab", True),
        Differs("a percent sign", "an escape", "topics of other wires have characters that this one refuses"),
    ),
    Row(40, "a name of a topic may not have a control character", (b"a\nb", True)),
    Row(40, "a name of a topic is UTF-8", (b"a\xff", True)),
    Row(40, "a name of a topic may not have a slash", (b"a/b", True)),
    Row(40, "a name of a topic may not be a dot", (b".", True)),
    Row(40, "a name of a topic may not be two dots", (b"..", True)),
    Row(40, "a name of a topic may not be empty", (b"", True)),
    Row(40, "a name of a topic may have 255 characters", (b"n" * 255, False)),
    Row(40, "a name of a topic may not have more", (b"s.".ljust(256, b"n"), True)),
)
def test_names_of_topics(client: Client, name: bytes, *, closes: bool) -> None:
    client.socket.sendall(frame(PRODUCE, produced(name, 0, b"")) + frame(OFFSETS, asked(b"other", 0, LATEST, 1)))
    assert whole_answer(client) == (CLOSED if closes else listed(0))


@KAFKA07.rows(
    "count, entries, ends",
    Row(40, "entries beyond MULTIPRODUCE's count are ignored", (1, 2, (15, 0, True))),
    Row(40, "fewer entries than the count close, and nothing is stored", (3, 2, (0, 0, False))),
    Row(40, "a negative count closes", (-1, 2, (0, 0, False))),
    Row(40, "a count of 0 does nothing", (0, 0, (0, 0, True))),
)
def test_counts(client: Client, count: int, entries: int, ends: tuple[int, int, bool]) -> None:
    topics = new_topic(), new_topic()
    body = b"".join(produced(topic, 0, HELLO) for topic in topics[:entries])
    client.socket.sendall(frame(MULTIPRODUCE, struct.pack(">h", count) + body))
    if not ends[2]:
        assert is_closed(client)
        client.connect_again()
    assert tuple(end_of(client, topic) for topic in topics) == ends[:2]


@KAFKA07.says(40, "what stands before a MULTIPRODUCE's bad entry is stored, what stands behind it is not")
def test_a_bad_entry(client: Client) -> None:
    topics = new_topic(), new_topic(), new_topic()
    sets = HELLO, HELLO[:-1] + b"O", HELLO
    entries = (produced(topic, 0, one) for topic, one in zip(topics, sets, strict=True))
    client.socket.sendall(frame(MULTIPRODUCE, counted(*entries)))
    assert is_closed(client)
    client.connect_again()
    assert [end_of(client, topic) for topic in topics] == [15, 0, 0]


@KAFKA07.says(31, "the length of the messages closes if it is negative or goes beyond the request")
def test_lengths_of_sets(client: Client) -> None:
    topic = new_topic()
    for length in (-1, 16):
        client.socket.sendall(frame(PRODUCE, place(topic, 0) + struct.pack(">i", length) + HELLO))
        assert is_closed(client)
        client.connect_again()
    assert end_of(client, topic) == 0


# Topics, partitions, delivery


@KAFKA07.says(60, "a topic begins with the first request that produces to it, and asking makes none")
@KAFKA07.says(60, "partitions are numbered from 0")
@KAFKA07.says(
    60,
    "a topic has 1 partition unless configured otherwise",
    Differs("1", "3, `--partitions` sets it", "as topics of every other wire"),
)
def test_partitions(client: Client) -> None:
    topic = new_topic()
    assert client.consume(topic, 0) == []
    client.produce(topic, 2, b"two")
    assert [client.consume(topic, partition) for partition in range(3)] == [[], [], [b"two"]]
    with pytest.raises(Failed, match="code=3"):
        client.consume(topic, 3)


@KAFKA07.says(31, "partition -1: the broker picks one")
@KAFKA07.says(60, "partition -1 is chosen again for each set")
def test_any_partition(client: Client) -> None:
    topic = new_topic()
    for number in range(100):
        client.produce(topic, -1, b"%02d" % number)
    found = [client.consume(topic, partition) for partition in range(3)]
    assert sorted(payload for part in found for payload in part) == [b"%02d" % number for number in range(100)]
    assert all(found), "one of them stays empty once in 10 to the 17"


@KAFKA07.says(70, "a set is stored as a whole, and in a row")
def test_a_set_is_stored_as_one(client: Client, request: pytest.FixtureRequest, broker: BrokerProcess) -> None:
    topic = new_topic()
    peers = [Client(broker.addresses[request.node.callspec.params["client"]]) for _ in range(4)]
    for turn in range(20):
        for number, peer in enumerate(peers):
            payloads = [b"%d-%d-%d" % (number, turn, index) for index in range(3)]
            peer.socket.sendall(frame(PRODUCE, produced(topic, 0, b"".join(map(message, payloads)))))
    for peer in peers:
        end_of(peer, topic)
        peer.socket.close()
    found = client.consume(topic, 0)
    assert len(found) == 240
    for begin in range(0, 240, 3):
        assert [payload.rsplit(b"-", 1)[1] for payload in found[begin : begin + 3]] == [b"0", b"1", b"2"]
        assert len({payload.rsplit(b"-", 1)[0] for payload in found[begin : begin + 3]}) == 1


@KAFKA07.says(70, "the broker keeps nothing of consumers: each says the offset it wants, any time again")
def test_consumers_store_their_offsets(client: Client, topic: bytes) -> None:
    for offset in (0, 15, 0, 28, 15):
        expected = {0: HELLO + ABC, 15: ABC, 28: b""}[offset]
        assert client.ask(frame(FETCH, fetched(topic, 0, offset, 100))) == expected


@KAFKA07.says(
    50,
    "messages are seen once they are flushed",
    Differs("up to seconds later", "at once", "no client counts on not seeing them"),
)
def test_messages_are_visible_at_once(client: Client) -> None:
    topic = new_topic()
    written = frame(PRODUCE, produced(topic, 0, HELLO)) + frame(FETCH, fetched(topic, 0, 0, 100))
    assert client.ask(written) == HELLO
    assert client.ask(frame(OFFSETS, asked(topic, 0, EARLIEST, 1))) == listed(0)[6:]
