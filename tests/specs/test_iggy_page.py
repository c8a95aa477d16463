"""Iggy's protocol page of 2023, on its own port and on the one that detects protocols."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import count
from typing import Final

import pytest

from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.client_codec import BALANCED, ident, messages, name, place, poll, request
from polywire.protocols.iggy.messages import HEAD, U32, Code, Consumer
from polywire.records.columns import Header, HeaderKind, Record
from tests.broker_process import BrokerProcess
from tests.specs.pages import IGGY, Differs

READER: Final = Consumer(group=False, identifier=1)
NO_EXPIRY: Final = U32.pack(0)
SPARE: Final = b"\0\0"
NUMBERS: Final = count(100)  # of streams: each test has its own


class Peer:
    """One connection."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, 30)

    def ask(self, code: int, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and payload of a request's response."""
        self._socket.sendall(request(code, body))
        status, size = HEAD.unpack(self._take(HEAD.size))
        return status, self._take(size)

    def status(self, code: int, body: bytes = b"") -> int:
        """Return the status of a request's response."""
        return self.ask(code, body)[0]

    def stream(self) -> int:
        """Return the number of a new stream."""
        number = next(NUMBERS)
        assert self.status(Code.CREATE_STREAM, U32.pack(number) + name(f"s{number}")) == 0
        return number

    def topic(self, partitions: int = 1) -> bytes:
        """Return the identifiers of a new topic in a new stream."""
        stream = ident(self.stream())
        fields = U32.pack(1) + U32.pack(partitions) + NO_EXPIRY + name("t")
        assert self.status(Code.CREATE_TOPIC, stream + fields) == 0
        return stream + ident(1)

    def topics(self, stream: int) -> list[client_codec.TopicSeen]:
        """Return a stream's topics."""
        status, body = self.ask(Code.GET_TOPICS, ident(stream))
        assert status == 0
        return client_codec.read_topics(body)

    def values(self, topic: bytes, partition: int = 1) -> list[bytes | None]:
        """Return the payloads of a partition."""
        status, body = self.ask(Code.POLL, poll(place(READER, topic, partition), 1, 0, 100))
        assert status == 0
        return [record.value for record in client_codec.read_polled(body).records]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _take(self, size: int) -> bytes:
        taken = bytearray()
        while len(taken) < size:
            received = self._socket.recv(size - len(taken))
            assert received, "the broker closed the connection"
            taken += received
        return bytes(taken)


@pytest.fixture(params=["iggy", "any"])
def address(request: pytest.FixtureRequest, broker: BrokerProcess) -> tuple[str, int]:
    """Return the protocol's own port, and the one that detects it."""
    return broker.addresses[request.param]


@pytest.fixture
def peer(address: tuple[str, int]) -> Iterator[Peer]:
    """Open a connection without sending anything."""
    found = Peer(address)
    yield found
    found.close()


# Large requests


@pytest.mark.parametrize("size", [1024 * 1024 + 1, 9 * 1024 * 1024])
def test_a_first_request_may_be_large(peer: Peer, address: tuple[str, int], size: int) -> None:
    topic = peer.topic()
    first = Peer(address)
    value = b"v" * size
    assert first.status(Code.SEND, topic + BALANCED + messages([Record(value=value)])) == 0
    assert peer.values(topic) == [value]
    first.close()


# Trailing bytes of a request


def test_two_zero_bytes_may_follow_a_topic(peer: Peer) -> None:
    stream = peer.stream()
    for number, spare in enumerate((b"", b"\0", SPARE), 1):
        fields = U32.pack(number) + U32.pack(2) + U32.pack(60) + name(f"t{number}")
        assert peer.status(Code.CREATE_TOPIC, ident(stream) + fields + spare) == 0
    found = [(topic.id, topic.name, topic.partition_count, topic.expiry_s) for topic in peer.topics(stream)]
    assert found == [(1, "t1", 2, 60), (2, "t2", 2, 60), (3, "t3", 2, 60)]


@pytest.mark.parametrize("spare", [b"\0\0\0", b"\1", b"\0\1", b"abc"])
def test_no_other_bytes_may_follow_a_request(peer: Peer, spare: bytes) -> None:
    topic = peer.topic()
    stream = topic[:6]
    at = place(READER, topic, 1)
    number = next(NUMBERS)
    new = f"n{number}"
    asked = [
        (Code.POLL, poll(at, 1, 0, 10)),
        (Code.GET_OFFSET, at),
        (Code.STORE_OFFSET, at + bytes(8)),
        (Code.GET_STREAM, stream),
        (Code.CREATE_STREAM, U32.pack(number) + name(new)),
        (Code.GET_TOPICS, stream),
        (Code.GET_TOPIC, topic),
        (Code.CREATE_TOPIC, stream + U32.pack(7) + U32.pack(1) + NO_EXPIRY + name(new)),
        (Code.CREATE_PARTITIONS, topic + U32.pack(1)),
        (Code.DELETE_PARTITIONS, topic + U32.pack(1)),
        (Code.CREATE_GROUP, topic + U32.pack(1)),
        (Code.DELETE_TOPIC, topic),
        (Code.DELETE_STREAM, stream),
    ]
    assert [(code, peer.status(code, body + spare)) for code, body in asked] == [(code, 3) for code, _ in asked]
    status, body = peer.ask(Code.GET_TOPICS, stream)
    assert status == 0
    assert [(seen.name, seen.partition_count) for seen in client_codec.read_topics(body)] == [("t", 1)], (
        "nothing was done"
    )
    assert peer.status(Code.GET_STREAM, ident(new)) == 1010
    for code, body in asked:
        assert (code, peer.status(code, body + SPARE)) == (code, 0)


def test_no_bytes_may_follow_a_command_without_fields(peer: Peer) -> None:
    assert [peer.status(code, SPARE) for code in (Code.PING, Code.GET_ME, Code.GET_STREAMS)] == [3, 3, 3]


# Requests written from the page's byte lists


@IGGY.says(228, "CREATE_STREAM: the id as an identifier (clients send the number alone)")
def test_a_stream_whose_id_is_an_ident(peer: Peer) -> None:
    number = next(NUMBERS)
    assert peer.status(Code.CREATE_STREAM, ident(number) + name(f"Listed {number}")) == 0
    status, body = peer.ask(Code.GET_STREAM, ident(number))
    assert status == 0
    assert client_codec.read_stream(body)[0].name == f"listed.{number}"


@IGGY.says(228, "CREATE_STREAM: the id of 3 to 257 bytes, as its name")
@pytest.mark.parametrize("called", ["a", "n" * 200])
def test_a_stream_whose_id_is_its_name(peer: Peer, called: str) -> None:
    assert peer.status(Code.CREATE_STREAM, ident(called) + name(called)) == 0
    assert client_codec.read_stream(peer.ask(Code.GET_STREAM, ident(called))[1])[0].id >= 1
    assert peer.status(Code.CREATE_STREAM, ident(called) + name("another")) == 1014
    assert peer.status(Code.DELETE_STREAM, ident(called)) == 0


@IGGY.says(
    228,
    "CREATE_STREAM: the id may be any identifier",
    Differs(
        "reads the first 4 bytes as the number",
        "1014 for an identifier of 0 and for a name that is not the stream's",
        "nothing is created by accident",
    ),
)
def test_a_stream_whose_identifier_is_zero(peer: Peer) -> None:
    assert peer.status(Code.CREATE_STREAM, ident(0) + name("nought")) == 1014


@IGGY.says(298, "CREATE_TOPIC: the id as an identifier (clients send the number alone)")
@IGGY.says(288, "CREATE_TOPIC: an expiry of 32 bits, in seconds, or none (clients send 0 for none)")
@pytest.mark.parametrize("topic_id", [ident(9), U32.pack(9)])
@pytest.mark.parametrize("expiry", [b"", NO_EXPIRY, U32.pack(60)])
def test_a_topic_from_the_byte_list(peer: Peer, topic_id: bytes, expiry: bytes) -> None:
    stream = peer.stream()
    assert peer.status(Code.CREATE_TOPIC, ident(stream) + topic_id + U32.pack(3) + expiry + name("Paid Ones")) == 0
    expiry_s = 60 if expiry == U32.pack(60) else 0
    assert [(seen.id, seen.partition_count, seen.expiry_s, seen.name) for seen in peer.topics(stream)] == [
        (9, 3, expiry_s, "paid.ones")
    ]


@IGGY.says(298, "CREATE_TOPIC: the id of 3 to 257 bytes, as its name")
@pytest.mark.parametrize("expiry", [b"", NO_EXPIRY])
def test_a_topic_whose_id_is_its_name(peer: Peer, expiry: bytes) -> None:
    stream = peer.stream()
    for called in ("q", "paid", "n" * 200):
        body = ident(f"s{stream}") + ident(called) + U32.pack(2) + expiry + name(called)
        assert peer.status(Code.CREATE_TOPIC, body) == 0
        assert peer.status(Code.GET_TOPIC, ident(stream) + ident(called)) == 0
    other = ident(stream) + ident("paid") + U32.pack(2) + expiry + name("unpaid")
    assert peer.status(Code.CREATE_TOPIC, other) == 2016
    assert len(peer.topics(stream)) == 3


@IGGY.says(
    288,
    "CREATE_TOPIC: an expiry that is not there is not read",
    Differs(
        "takes the first letters of the name for one",
        "refused where both readings fit and the expiry is above 17 years",
        "nothing is created by accident",
    ),
)
def test_letters_of_a_name_are_not_read_as_an_expiry(peer: Peer) -> None:
    """The request creates that name or is refused: its first letters are never an expiry of years."""
    stream = peer.stream()
    made = []
    for size in range(1, 256):
        called = ("top" + chr(min(max(size - 4, 45), 122)) + "-abc" * 64)[:size]
        if peer.status(Code.CREATE_TOPIC, ident(stream) + U32.pack(size) + U32.pack(1) + name(called)) == 0:
            made.append((size, called.lower(), 0))
    assert [(seen.id, seen.name, seen.expiry_s) for seen in peer.topics(stream)] == made
    sizes = {size for size, _, _ in made}
    assert {1, 2, 6, 40, 48} <= sizes
    assert sizes.isdisjoint(range(49, 127)), "the fourth letter is the number of bytes after it"
    fields = U32.pack(500) + U32.pack(1) + U32.pack(0x74706F74) + name("old")
    assert peer.status(Code.CREATE_TOPIC, ident(stream) + fields) == 0
    assert [seen.expiry_s for seen in peer.topics(stream)][-1] == 0x74706F74, "an expiry that has no other meaning"


def test_a_topic_of_neither_form_is_refused(peer: Peer) -> None:
    stream = peer.stream()
    for fields in (U32.pack(1) + U32.pack(1) + name("t") + b"\0\0\0", U32.pack(1) + name("t"), ident(1), ident(1)[:5]):
        assert peer.status(Code.CREATE_TOPIC, ident(stream) + fields) == 3
    assert peer.topics(stream) == []


def listed(value: bytes, number: int = 0) -> bytes:
    """Return a message in the page's byte list, without a length of headers."""
    return number.to_bytes(16, "little") + U32.pack(len(value)) + value


@pytest.mark.parametrize(
    "values", [[b"hello"], [b"a", b"b"], [b"", b"a"], [b"a" * 300, b"bc", b"d" * 70_000], [b"v"] * 1000]
)
@IGGY.says(464, "a message to send has 16 + 4 + N bytes (clients send a length of headers, too)")
def test_messages_without_a_length_of_headers(peer: Peer, values: list[bytes]) -> None:
    topic = peer.topic()
    sent = b"".join(listed(value, 2**127 + index) for index, value in enumerate(values))
    if b"" in values:
        assert peer.status(Code.SEND, topic + BALANCED + sent) in (3, 4024)
        assert peer.values(topic) == []
        return
    assert peer.status(Code.SEND, topic + BALANCED + sent) == 0
    assert peer.values(topic) == values[:100]


@IGGY.says(464, "its id may be 0")
def test_messages_with_an_id_of_zero_from_the_byte_list(peer: Peer) -> None:
    topic = peer.topic()
    assert peer.status(Code.SEND, topic + BALANCED + listed(b"first") + listed(b"second")) == 0
    assert peer.values(topic) == [b"first", b"second"]


def test_headers_of_messages_are_stored(peer: Peer) -> None:
    topic = peer.topic()
    header = Header(b"k", b"v", value_kind=HeaderKind.STRING)
    assert peer.status(Code.SEND, topic + BALANCED + messages([Record(value=b"x", headers=(header,))])) == 0
    status, body = peer.ask(Code.POLL, poll(place(READER, topic, 1), 1, 0, 1))
    assert status == 0
    assert client_codec.read_polled(body).records[0].headers == (header,)


@pytest.mark.parametrize("spare", [SPARE, b"\0", b"abc"])
def test_messages_of_neither_form_are_refused(peer: Peer, spare: bytes) -> None:
    topic = peer.topic()
    for sent in (listed(b"hello"), messages([Record(value=b"hello")])):
        assert peer.status(Code.SEND, topic + BALANCED + sent + spare) == 3
    assert peer.values(topic) == []


# Partitioning


@IGGY.says(463, "a partitioning has 3 to 257 bytes, of every kind (clients send 2 for balanced)")
@pytest.mark.parametrize("size", [0, 1, 2, 4, 255])
def test_balanced_accepts_any_length_of_value(peer: Peer, size: int) -> None:
    topic = peer.topic(2)
    how = bytes((1, size)) + b"\3" * size
    for value in (b"a", b"b", b"c"):
        assert peer.status(Code.SEND, topic + how + messages([Record(value=value)])) == 0
    assert (peer.values(topic, 1), peer.values(topic, 2)) == ([b"a", b"c"], [b"b"])


# Names


@pytest.mark.parametrize("written", ["plain", "Upper", "Two Words", "  Led\tAnd  Trailed ", "a-b_c.d", "dotted.Name"])
def test_a_name_is_found_as_it_was_written(peer: Peer, written: str) -> None:
    number = next(NUMBERS)
    called = written + ("-iggy" if number % 2 else "-any")
    assert peer.status(Code.CREATE_STREAM, U32.pack(number) + name(called)) == 0
    status, body = peer.ask(Code.GET_STREAM, ident(called))
    assert (status, client_codec.read_stream(body)[0].id) == (0, number)
    fields = U32.pack(4) + U32.pack(1) + NO_EXPIRY + name(called)
    assert peer.status(Code.CREATE_TOPIC, ident(called) + fields) == 0
    topic = ident(called) + ident(called)
    assert peer.status(Code.SEND, topic + BALANCED + messages([Record(value=b"v")])) == 0
    assert peer.values(topic) == [b"v"]
    assert client_codec.read_topic(peer.ask(Code.GET_TOPIC, topic)[1])[0].id == 4
    assert peer.status(Code.CREATE_TOPIC, ident(called) + U32.pack(5) + fields[4:]) == 2013
    assert peer.status(Code.DELETE_TOPIC, topic) == 0
    assert peer.status(Code.GET_TOPIC, topic) == 2011
    assert peer.status(Code.DELETE_STREAM, ident(called)) == 0
    assert peer.status(Code.GET_STREAM, ident(called)) == 1010
