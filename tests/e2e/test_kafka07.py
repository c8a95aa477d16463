"""The Kafka 0.7 protocol of a real broker: records on disk, restarts, and hostile clients."""

from __future__ import annotations

import itertools
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

from polywire.protocols.kafka07.compression import EXPANDED_BYTES_MAX, wrap
from polywire.protocols.kafka07.messages import (
    CompressionCodec,
    FetchEntry,
    encode_fetch,
    encode_message,
    encode_multifetch,
    encode_offsets,
    encode_produce,
    encode_set,
    parse_offsets_answer,
    split_multifetch_answer,
)
from tests.broker_process import BrokerProcess

MEBI = 1024 * 1024
GROWTH_BYTES_MAX = 96 * MEBI  # of the broker's own memory, whatever clients of one protocol do


class Peer:
    """A blocking connection; all are closed after their test."""

    opened: ClassVar[list[Peer]] = []

    def __init__(self, broker: BrokerProcess) -> None:
        Peer.opened.append(self)
        self.socket = socket.create_connection(broker.addresses["kafka07"], timeout=20)

    def _receive(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, MEBI))
            if not part:
                raise ConnectionError("the broker closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def ask(self, frame: bytes) -> bytes:
        """Return the body of the response."""
        self.socket.sendall(frame)
        return self._receive(struct.unpack(">i", self._receive(4))[0])

    def fetch(self, topic: bytes, partition: int, address: int, size: int) -> bytes:
        """Return the set bytes of a fetch that must succeed."""
        answer = self.ask(encode_fetch(topic, partition, address, size))
        assert answer[:2] == b"\0\0", (address, answer[:2])
        return answer[2:]

    def end(self, topic: bytes, partition: int) -> int:
        """Return the end address; everything sent before was executed."""
        return parse_offsets_answer(self.ask(encode_offsets(topic, partition, -1, 1)))[0]

    def is_closed(self) -> bool:
        """Return whether the broker closes the connection."""
        self.socket.settimeout(10)
        with suppress(ConnectionError):
            return self.socket.recv(1) == b""
        return True


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    # Slots that fill quickly, and are no larger than what one pass may receive.
    with BrokerProcess(tmp_path / "data", "--slot-mib", "2", wires=["kafka07"]) as process:
        yield process
    while Peer.opened:
        Peer.opened.pop().socket.close()


def entries(message_set: bytes) -> list[int]:
    """Return the start positions of the messages of a set, and its end."""
    places = [0]
    while places[-1] < len(message_set):
        places.append(places[-1] + 4 + struct.unpack_from(">i", message_set, places[-1])[0])
    return places


def test_stored_records_always_read_the_same(broker: BrokerProcess) -> None:
    chance = random.Random(7)
    peer = Peer(broker)
    stream = b""
    for number in range(220):
        values = [chance.randbytes(chance.choice([0, 5, 200, 900])) for _ in range(300)]
        part = encode_set(values, number % 2)
        packed = wrap(part, CompressionCodec.GZIP) if number % 50 == 0 else part
        peer.socket.sendall(
            encode_produce(b"t", 1, packed) + encode_produce(b"noise", 0, part[:0] + encode_set([b"n"]))
        )
        stream += part
    assert peer.end(b"t", 1) == len(stream)
    places = entries(stream)
    for _ in range(2):
        reader, found = Peer(broker), bytearray()
        while len(found) < len(stream):
            part = reader.fetch(b"t", 1, len(found), chance.choice([1000, 100_000, MEBI, 3 * MEBI]))
            assert part
            found += part
        assert found == stream
        for _ in range(30):
            address, size = chance.choice(places[:-1]), chance.choice([400, 5_000, 300_000])
            part = reader.fetch(b"t", 1, address, size)
            assert part == stream[address : address + len(part)]
            assert address + len(part) in places or len(part) == size
        inside = chance.choice(places[1:-1]) - 1
        assert stream[inside:].startswith(reader.fetch(b"t", 1, inside, 5000))
        wanted = [FetchEntry(b"t", 1, address, 200_000) for address in chance.sample(places[:-1], 20)]
        for (code, view), entry in zip(
            split_multifetch_answer(reader.ask(encode_multifetch(wanted))), wanted, strict=True
        ):
            assert code == 0
            assert view == stream[entry.address : entry.address + len(view)]
        broker.kill()
        broker.start()


def test_bombs_use_no_memory(broker: BrokerProcess) -> None:
    bomb = wrap(encode_message(bytes(EXPANDED_BYTES_MAX)), CompressionCodec.GZIP)
    nested = wrap(wrap(bomb, CompressionCodec.GZIP) * 40, CompressionCodec.GZIP)
    claim = encode_message(b"\xff\xff\xff\xff\x0f" + bytes(100), 1, CompressionCodec.SNAPPY)
    Peer(broker).end(b"t", 0)
    before = broker.memory_bytes
    for message_set in (
        bomb,
        nested,
        claim,
        encode_message(b"\xff\xff\xff\x07" + b"\xfe\1\0" * 300_000, 1, CompressionCodec.SNAPPY),
    ):
        for _ in range(3):
            peer = Peer(broker)
            peer.socket.sendall(encode_produce(b"t", 0, message_set))
            assert peer.is_closed()
    assert broker.memory_bytes - before < GROWTH_BYTES_MAX
    assert Peer(broker).end(b"t", 0) == 0


def test_partial_frames_and_garbage_do_not_affect_others(broker: BrokerProcess) -> None:
    chance = random.Random(11)
    before = broker.memory_bytes
    held = []
    for _ in range(200):
        held.append(Peer(broker))
        held[-1].socket.sendall(struct.pack(">ih", 16 * MEBI - 4, 0) + bytes(2000))
    for _ in range(50):
        with suppress(ConnectionError):
            Peer(broker).socket.sendall(chance.randbytes(chance.randrange(1, 100_000)))
    for length in (-1, 0, 1, 100 * MEBI + 1, 2**31 - 1):
        peer = Peer(broker)
        peer.socket.sendall(struct.pack(">i", length))
        assert peer.is_closed()
    good = Peer(broker)
    good.socket.sendall(encode_produce(b"t", 0, encode_set([b"alive"])))
    assert good.fetch(b"t", 0, 0, 1000) == encode_set([b"alive"])
    assert broker.memory_bytes - before < GROWTH_BYTES_MAX


def test_thousands_of_unread_responses_block_no_other_client(broker: BrokerProcess) -> None:
    writer = Peer(broker)
    writer.socket.sendall(encode_produce(b"t", 0, encode_set([b"x" * 900] * 1000)) * 10)
    writer.end(b"t", 0)
    before = broker.memory_bytes
    stalled = [Peer(broker) for _ in range(60)]
    for peer in stalled:
        with suppress(ConnectionError):
            peer.socket.sendall(encode_fetch(b"t", 0, 0, MEBI) * 500)
    assert writer.fetch(b"t", 0, 0, 1000)
    assert broker.memory_bytes - before < 2 * GROWTH_BYTES_MAX


def test_many_producers_at_once_lose_nothing(broker: BrokerProcess) -> None:
    def produce(name: int) -> None:
        peer = Peer(broker)
        for number in range(100):
            peer.socket.sendall(
                encode_produce(b"t", 2, encode_set([b"%d-%d-%d" % (name, number, step) for step in range(20)]))
            )
        peer.end(b"t", 2)

    threads = [threading.Thread(target=produce, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader, found = Peer(broker), b""
    while len(found) < reader.end(b"t", 2):
        found += reader.fetch(b"t", 2, len(found), MEBI)
    places = entries(found)
    values = [found[start + 10 : end] for start, end in itertools.pairwise(places)]
    for name in range(6):
        own = [value for value in values if value.startswith(b"%d-" % name)]
        assert own == [b"%d-%d-%d" % (name, number, step) for number in range(100) for step in range(20)]
