"""Statements of the Kafka 0.7 page about producers, on its own port and on the one for every protocol."""

from __future__ import annotations

import gzip
import random
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

import cramjam
import pytest

from polywire.protocols.kafka07.compression import EXPANDED_BYTES_MAX, wrap
from polywire.protocols.kafka07.decoder import FRAME_BYTES_MAX
from polywire.protocols.kafka07.messages import (
    CompressionCodec,
    encode_fetch,
    encode_message,
    encode_offsets,
    encode_produce,
    encode_set,
    parse_offsets_answer,
)
from polywire.records.inflate import XERIAL_HEAD
from tests.broker_process import BrokerProcess
from tests.specs.pages import KAFKA07, Differs

GZIP, SNAPPY = CompressionCodec.GZIP, CompressionCodec.SNAPPY
RECORD_BYTES_MAX = 10_000_000
PORTS = ("kafka07", "any")
MEMORY_GROWN_MAX = (
    320 * 1024 * 1024
)  # 64 MiB of incomplete requests, one of 128 besides, one that is decompressed, and the journal's
PATIENCE_S = 60.0
SENDERS = 6


class Peer:
    """A connection that sends sets to partition 0 of an unused topic."""

    def __init__(self, broker: BrokerProcess, port: str) -> None:
        self.topic = b"t%d" % random.getrandbits(60)
        self.socket = socket.create_connection(broker.addresses[port], timeout=PATIENCE_S)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, message_set: bytes) -> None:
        self.socket.sendall(encode_produce(self.topic, 0, message_set))

    def ask(self, frame: bytes) -> bytes:
        """Return the body of the response."""
        self.socket.sendall(frame)
        return self._take(int.from_bytes(self._take(4), "big"))

    def end(self) -> int:
        """Return the address of the partition's end."""
        return parse_offsets_answer(self.ask(encode_offsets(self.topic, 0, -1, 1)))[0]

    def fetch(self, address: int, size: int) -> bytes:
        """Return messages from an address on."""
        return self.ask(encode_fetch(self.topic, 0, address, size))[2:]

    def _take(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self.socket.recv(size - len(found))
            if not part:
                raise ConnectionError("the broker closed the connection")
            found += part
        return found

    def is_closed_by_broker(self) -> bool:
        """Return whether the broker closes the connection without a response."""
        with suppress(ConnectionError):
            return self.socket.recv(1) == b""
        return True


def closings(broker: BrokerProcess, reason: str) -> int:
    """Count log lines with this reason, including dropped ones."""
    return sum(reason in line for line in broker.log_text().splitlines())


@KAFKA07.says(
    40,
    "a set with a payload above 1,000,000 bytes is dropped without a word",
    Differs("dropped", "stored, up to 10,000,000 bytes", "nothing is lost without a sign"),
)
@pytest.mark.parametrize("port", PORTS)
def test_a_payload_may_be_as_long_as_a_record(broker: BrokerProcess, port: str) -> None:
    message_set = encode_set([b"before", b"x" * RECORD_BYTES_MAX, b"behind"])
    with Peer(broker, port) as peer:
        peer.send(message_set)
        assert peer.end() == len(message_set)
        assert peer.fetch(16, RECORD_BYTES_MAX + 10) == message_set[16:-16]


@KAFKA07.says(
    20,
    "a payload may be as long as its length field allows",
    Differs("1,000,000 by default", "10,000,000", "a record of any wire has a limit"),
)
@KAFKA07.says(
    40,
    "a set that is dropped leaves the connection open",
    Differs("it does", "closed above 10,000,000 bytes, and the log says why", "nothing is lost without a sign"),
)
@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_longer_payload_closes_the_connection_and_is_logged(
    broker: BrokerProcess, port: str, *, is_packed: bool
) -> None:
    reason = f"message is too large bytes={RECORD_BYTES_MAX + 1} limit={RECORD_BYTES_MAX}"
    before = closings(broker, reason)
    message_set = encode_set([b"before", b"x" * (RECORD_BYTES_MAX + 1)])
    with Peer(broker, port) as peer:
        peer.send(wrap(message_set, GZIP) if is_packed else message_set)
        assert peer.is_closed_by_broker()
        with Peer(broker, port) as other:
            other.topic = peer.topic
            assert other.end() == 0
    assert closings(broker, reason) == before + 1


@KAFKA07.says(10, "a request may have 100 MiB")
@pytest.mark.parametrize("port", PORTS)
def test_a_request_may_have_100_mib(broker: BrokerProcess, port: str) -> None:
    head = len(encode_produce(b"t" * 20, 0, b"")) - 4
    values = [bytes([number]) * 1_000_000 for number in range(104)]
    rest = FRAME_BYTES_MAX - head - sum(10 + len(value) for value in values) - 10
    message_set = encode_set([*values, b"r" * rest])
    with Peer(broker, port) as peer:
        peer.topic = b"%020d" % random.getrandbits(60)
        frame = encode_produce(peer.topic, 0, message_set)
        assert len(frame) == 4 + FRAME_BYTES_MAX
        peer.socket.sendall(frame)
        assert peer.end() == len(message_set)
        for number in (0, 57, 103):
            assert peer.fetch(number * 1_000_010, 1_000_010) == encode_message(values[number])


@KAFKA07.says(10, "a request of a byte more than 100 MiB closes the connection")
@pytest.mark.parametrize("port", PORTS)
def test_a_longer_request_closes_the_connection(broker: BrokerProcess, port: str) -> None:
    with Peer(broker, port) as peer:
        peer.socket.sendall(struct.pack(">ihh", FRAME_BYTES_MAX + 1, 0, 1) + b"t")
        assert peer.is_closed_by_broker()


def test_during_long_requests_others_are_served_and_memory_is_bounded(tmp_path: Path) -> None:
    """Requests of 100 MiB each, and sets among them that take long to decompress."""
    message_set = encode_set([bytes([number]) * 1_000_000 for number in range(104)])
    slow_bytes = 15 * 1_000_010
    slow = wrap(encode_set([b"v" * 1_000_000] * 15), GZIP)
    most, over = [0], threading.Event()
    options = "--cache-mib", "0"  # caches for readers have a separate limit
    with BrokerProcess(tmp_path / "data", *options, wires=["kafka07"]) as broker, Peer(broker, "kafka07") as polite:

        def sends() -> None:
            for _ in range(SENDERS):  # a sender without processor time for over a second counts as stalled
                with suppress(ConnectionError), Peer(broker, "kafka07") as peer:
                    peer.send(slow)
                    assert peer.end() == slow_bytes
                    peer.send(message_set)
                    assert peer.end() == slow_bytes + len(message_set)
                    done.append(1)
                    return

        def watches() -> None:
            while not over.wait(0.01):
                most[0] = max(most[0], broker.memory_bytes)

        before, done = broker.memory_bytes, list[int]()
        threads = [threading.Thread(target=sends) for _ in range(SENDERS)]
        watching = threading.Thread(target=watches)
        for thread in (watching, *threads):
            thread.start()
        served = 0
        while any(thread.is_alive() for thread in threads):
            polite.send(encode_message(b"x" * 290))
            served += 1
            assert polite.end() == 300 * served
            time.sleep(0.005)
        over.set()
        watching.join()
    assert len(done) == SENDERS, [line for line in broker.log_text().splitlines() if "connection" in line]
    assert served > 10
    assert most[0] - before < MEMORY_GROWN_MAX


def unopenable() -> list[tuple[bytes, CompressionCodec]]:
    """Return compressed payloads that cannot be decompressed, down to an empty one."""
    plain = encode_message(b"aaaa")
    packed, block = gzip.compress(plain, mtime=0), bytes(cramjam.snappy.compress_raw(plain))
    stream = XERIAL_HEAD + struct.pack(">i", len(block)) + block
    return [
        *((packed[:size], GZIP) for size in (*range(12), len(packed) - 8, len(packed) - 1)),
        *((stream[:size], SNAPPY) for size in (*range(16), 17, 20, 21, len(stream) - 1)),
        *((block[:size], SNAPPY) for size in (0, 1, 2, len(block) - 1)),
        (packed[:-8] + bytes(8), GZIP),
        (packed + b"x", GZIP),
        (b"\5", SNAPPY),
    ]


@KAFKA07.says(21, "compressed bytes that cannot be opened are an error")
@pytest.mark.parametrize("port", PORTS)
def test_a_compressed_payload_that_cannot_be_decompressed_closes_the_connection(
    broker: BrokerProcess, port: str
) -> None:
    for payload, codec in unopenable():
        message = encode_message(payload, 1, codec)
        for message_set in (message, encode_message(b"before") + message, wrap(message, GZIP)):
            with Peer(broker, port) as peer:
                peer.send(message_set)
                assert peer.is_closed_by_broker(), (payload, codec)


@KAFKA07.says(
    21,
    "a compressed set may expand to any size",
    Differs(
        "expanded without end", "closed above 16 MiB in a request", "what a peer can make the broker hold has a limit"
    ),
)
@pytest.mark.parametrize("port", PORTS)
def test_a_compressed_set_that_expands_too_far_closes_the_connection(broker: BrokerProcess, port: str) -> None:
    with Peer(broker, port) as peer:
        peer.send(wrap(encode_message(bytes(EXPANDED_BYTES_MAX)), GZIP))
        assert peer.is_closed_by_broker()
