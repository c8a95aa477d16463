"""The smallest acknowledged produce of every protocol with acknowledgements: alone, or on several connections.

Requests are encoded before the clock starts; every response is read completely and checked.
"""

from __future__ import annotations

import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Final

from benchmarks import cursus_load, iggy_load, polywire_load
from polywire.client import bulk
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.client_codec import encode_request
from polywire.protocols.kafka.messages import Api
from polywire.records.columns import Record

VALUE: Final = b"x" * 100
ANSWER_S: Final = 60.0  # under valgrind everything takes fifty times as long
RECEIVE_BYTES: Final = 4096  # more than any response has
_KAFKA_VERSION: Final = 8
_KAFKA_ERROR_AT: Final = -36  # error code of the only partition of a response without record errors, from its end
_POLYWIRE_FLAGS_AT: Final = 5


@dataclass(frozen=True, slots=True)
class Lone:
    """One protocol's request.

    whole: whether these bytes are the complete response, and no refusal. opening: the first bytes of a connection, to
    which as many bytes and one frame are the response.
    """

    request: bytes
    whole: Callable[[bytes], bool]
    opening: bytes = b""


def _flux(topic: str) -> Lone:
    return Lone(
        b"V1|1|PRODUCE|%s key:%s\n" % (topic.encode(), VALUE),
        lambda answer: answer.endswith(b"\n") and b"|OK|" in answer,
    )


def _polywire(topic: str) -> Lone:
    frame = polywire_load.produce_frame(topic, 0, polywire_load.value_batch(1, len(VALUE)))
    return Lone(frame, _is_whole_polywire, polywire_load.MAGIC)


def _is_whole_polywire(answer: bytes) -> bool:
    prefix = polywire_load.PREFIX
    return (
        len(answer) >= prefix.size
        and len(answer) == prefix.size + prefix.unpack_from(answer)[0]
        and not answer[_POLYWIRE_FLAGS_AT] & polywire_load.FLAG_ERROR
    )


def _cursus(topic: str) -> Lone:
    return Lone(
        cursus_load.encoded_batch(topic, records=1, value=VALUE),
        lambda answer: _is_whole(answer) and b'"status":"OK"' in answer,
    )


def _kafka(topic: str) -> Lone:
    topics = schema.request(Api.PRODUCE).Topics
    partition = topics.Partitions(records=encode_batch([Record(VALUE)]))
    body = schema.request(Api.PRODUCE)(acks=1, timeout_ms=1000, topics=[topics(name=topic, partitions=[partition])])
    return Lone(
        encode_request(Api.PRODUCE, _KAFKA_VERSION, 1, body, client_id="bench"),
        lambda answer: _is_whole(answer) and answer[_KAFKA_ERROR_AT:][:2] == b"\0\0",
    )


def _iggy(topic: str) -> Lone:
    return Lone(iggy_load.send_request(topic, records=1), lambda answer: answer == bytes(8))


def _is_whole(answer: bytes) -> bool:
    return len(answer) >= 4 and len(answer) == 4 + struct.unpack_from(">I", answer)[0]


MADE: Final[Mapping[str, Callable[[str], Lone]]] = {
    "flux": _flux,
    "polywire": _polywire,
    "cursus": _cursus,
    "kafka": _kafka,
    "iggy": _iggy,
}
"""Of a topic, by protocol."""


def create(addresses: Mapping[str, tuple[str, int]], wire: str, topic: str) -> None:
    """Create the topic, with one partition."""
    if wire == "iggy":
        iggy_load.create(*addresses["iggy"], topic)
        return
    host, port = addresses["polywire"]
    with closing(bulk.connect(f"polywire://{host}:{port}")) as connection:
        connection.create_topic(topic, 1)


@contextmanager
def connected(address: tuple[str, int], lone: Lone, count: int) -> Iterator[list[socket.socket]]:
    """Return that many connections that are ready for requests."""
    with ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(address)) for _ in range(count)]
        for peer in peers:
            peer.settimeout(ANSWER_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if lone.opening:
                peer.sendall(lone.opening)
                peer.recv(len(lone.opening), socket.MSG_WAITALL)
                _receive(peer, lone)
        yield peers


def _receive(peer: socket.socket, lone: Lone) -> None:
    """Read one response to its end."""
    answer = peer.recv(RECEIVE_BYTES)
    while not lone.whole(answer):
        try:
            more = peer.recv(RECEIVE_BYTES)
        except TimeoutError:
            more = b""
        if not more or len(answer) > RECEIVE_BYTES:
            raise AssertionError(f"an unexpected answer answer={answer!r}")
        answer += more


def ask_all(peers: Sequence[socket.socket], lone: Lone) -> None:
    """Send one request on each connection, then read every response."""
    for peer in peers:
        peer.sendall(lone.request)
    for peer in peers:
        _receive(peer, lone)


def latency_us(address: tuple[str, int], wire: str, topic: str, *, requests: int) -> float:
    """Return the median time of one request and its response, in microseconds, with nothing else in flight."""
    lone = MADE[wire](topic)
    times: list[int] = []
    with connected(address, lone, 1) as peers:
        for _ in range(requests):
            begun = time.perf_counter_ns()
            ask_all(peers, lone)
            times.append(time.perf_counter_ns() - begun)
    return statistics.median(times) / 1000


def rate(address: tuple[str, int], wire: str, topic: str, *, connections: int, requests: int) -> float:
    """Return requests per second of concurrent connections, which all wait for each other's responses."""
    lone = MADE[wire](topic)
    with connected(address, lone, connections) as peers:
        begun = time.perf_counter()
        for _ in range(requests // connections):
            ask_all(peers, lone)
        return requests // connections * connections / (time.perf_counter() - begun)
