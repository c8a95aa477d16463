"""Polywire as a peer, over several of its protocols."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import ClassVar, Final

from benchmarks import cursus_load, iggy_load, polywire_load
from benchmarks.peers.kafka import KafkaWire
from benchmarks.peers.peer import Address, Frames, Lines, Server, Taken, connect, receive_until
from polywire.client import bulk
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import ERROR, MORE, PREFIX, decode_answer, encode_head
from polywire.protocols.polywire.messages import Verb
from polywire.records.batch import from_spans
from polywire.testing.process import BrokerProcess

FETCH_WAIT_MS: Final = 10_000


@contextmanager
def _broker(place: Path, wire: str) -> Iterator[Server]:
    wires = tuple(dict.fromkeys((wire, "polywire")))
    with BrokerProcess(place / "data", wires=wires) as broker:
        URLS[broker.addresses[wire]] = broker.url()
        yield Server(broker.addresses[wire], broker.pid)


URLS: Final[dict[Address, str]] = {}
"""The administration URL of a broker, by its address."""


class OwnWire:
    """The common part of our protocols."""

    wire: ClassVar[str]

    @contextmanager
    def running(self, place: Path) -> Iterator[Server]:
        """See Peer."""
        with _broker(place, self.wire) as server:
            yield server

    def create(self, address: Address, topic: str) -> None:
        """See Peer."""
        with closing(bulk.connect(URLS[address])) as connection:
            connection.create_topic(topic, 1)

    def producer(self, address: Address, topic: str) -> socket.socket:
        """See Peer."""
        return connect(address)


class Polywire(OwnWire):
    """The `polywire` protocol."""

    name = "Polywire, polywire"
    wire = "polywire"
    pushes = True

    def producer(self, address: Address, topic: str) -> socket.socket:
        """See Peer."""
        peer = connect(address)
        peer.sendall(polywire_load.MAGIC)
        receive_until(
            peer, lambda found: len(found) > len(polywire_load.MAGIC) and _ends(found[len(polywire_load.MAGIC) :])
        )
        return peer

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """See Peer."""
        spans = bytearray()
        at = 0
        for value in values:
            spans += struct.pack("<4q", 0, -1, at, len(value))
            at += len(value)
        batch = bytes(from_spans(b"".join(values), memoryview(bytes(spans)).cast("q")))
        return polywire_load.produce_frame(topic, 0, batch)

    def confirmations(self) -> Callable[[memoryview], int]:
        """See Peer."""
        frames = PolywireFrames()

        def count(received: memoryview) -> int:
            found = 0
            for verb, head, _ in frames.cut(received):
                if verb == Verb.PRODUCE:
                    found += sum(each.record_count for each in decode_answer(head, messages.Produced).appended)
            return found

        return count

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, PolywireFetcher]:
        """See Peer."""
        peer = self.producer(address, topic)
        with closing(bulk.connect(URLS[address])) as connection:
            incarnation = connection.bounds([topic])[0].incarnation
        fetcher = PolywireFetcher(topic, incarnation)
        peer.sendall(fetcher.request())
        return peer, fetcher


class PolywireFetcher:
    """Sends FETCH after FETCH, each to the current end."""

    def __init__(self, topic: str, incarnation: int) -> None:
        self._topic: Final = topic
        self._incarnation: Final = incarnation
        self._frames: Final = PolywireFrames()
        self._next = 0

    def request(self) -> bytes:
        """Return a fetch from its position that waits for more."""
        fetch = messages.Fetch(self._topic, 0, self._next, -1, self._incarnation, -1, -1, FETCH_WAIT_MS)
        return encode_head(Verb.FETCH, 1, fetch)

    def take(self, received: memoryview) -> Taken:
        """See Follower."""
        before = self._next
        ended = False
        for verb, head, flags in self._frames.cut(received):
            if verb == Verb.FETCH:
                self._next = decode_answer(head, messages.Fetched).next_offset
                ended = not flags & MORE
        return Taken(self._next - before, self.request() if ended else b"")


class PolywireFrames:
    """Splits received bytes into (verb, head, flags); payloads are skipped without a copy."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._skip = 0

    def cut(self, received: memoryview) -> Iterator[tuple[int, bytes, int]]:
        if self._skip >= len(received):
            self._skip -= len(received)
            return
        rest = received[self._skip :]
        data = memoryview(bytes(self._pending) + bytes(rest)) if self._pending else rest
        self._pending.clear()
        at = self._skip = 0
        while len(data) - at >= PREFIX.size:
            length, verb, flags, _, _, head_bytes = PREFIX.unpack_from(data, at)
            head_end = at + PREFIX.size + head_bytes
            if head_end > len(data):
                break
            head = bytes(data[at + PREFIX.size : head_end])
            if flags & ERROR:
                raise AssertionError(f"refused head={head!r}")
            yield verb, head, flags
            at += PREFIX.size + length
        self._skip = max(0, at - len(data))
        self._pending += data[at:]


def _ends(found: bytes) -> bool:
    return len(found) >= PREFIX.size and len(found) == PREFIX.size + PREFIX.unpack_from(found)[0]


class PolywireKafka(KafkaWire):
    """Apache Kafka's protocol."""

    name = "Polywire, kafka"

    @contextmanager
    def running(self, place: Path) -> Iterator[Server]:
        """See Peer."""
        with _broker(place, "kafka") as server:
            yield server


class PolywireCursus(OwnWire):
    """Cursus as its SDKs speak it."""

    name = "Polywire, cursus"
    wire = "cursus"
    pushes = True

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """See Peer: all values equal the first."""
        return cursus_load.encoded_batch(topic, records=len(values), value=values[0])

    def confirmations(self) -> Callable[[memoryview], int]:
        """See Peer: a response names the first and the last sequence number of its batch."""
        frames = Frames()

        def count(received: memoryview) -> int:
            found = 0
            for frame in frames.cut(received):
                answer = bytes(frame)
                if not answer.startswith(b'{"status":"OK"'):
                    raise AssertionError(f"refused answer={answer!r}")
                found += _number(answer, b'"seq_end":') - _number(answer, b'"seq_start":') + 1
            return found

        return count

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, CursusStream]:
        """See Peer."""
        peer = connect(address)
        peer.sendall(cursus_load.command(f"STREAM topic={topic} partition=0 group=bench offset=0"))
        return peer, CursusStream(topic)


class CursusStream:
    """Receives pushed batches."""

    def __init__(self, topic: str) -> None:
        self._frames: Final = Frames()
        self._count_at: Final = 4 + len(topic) + 4 + 2 + 1 + 16

    def take(self, received: memoryview) -> Taken:
        """See Follower."""
        frames = self._frames.cut(received)
        return Taken(sum(int.from_bytes(frame[self._count_at :][:4], "big") for frame in frames if len(frame)))


class PolywireFlux(OwnWire):
    """FLUX lines. It pushes nothing, so it has no followers."""

    name = "Polywire, flux"
    wire = "flux"
    pushes = False

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """See Peer."""
        return b"".join(b"V1|1|PRODUCE|%s key:%s\n" % (topic.encode(), value) for value in values)

    def confirmations(self) -> Callable[[memoryview], int]:
        """See Peer."""
        lines = Lines(1)

        def count(received: memoryview) -> int:
            if b"|ERR|" in bytes(received[:200]):
                raise AssertionError(f"refused answer={bytes(received[:200])!r}")
            return lines.count(received)

        return count

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, CursusStream]:
        """See Peer. Raises NotImplementedError."""
        raise NotImplementedError


class PolywireIggy(OwnWire):
    """Iggy's first protocol. Its polls do not wait, so it has no followers."""

    name = "Polywire, iggy"
    wire = "iggy"
    pushes = False

    def __init__(self) -> None:
        self._records = 1  # of the last request; responses do not name them

    def create(self, address: Address, topic: str) -> None:
        """See Peer."""
        iggy_load.create(*address, topic)

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """See Peer."""
        self._records = len(values)
        return iggy_load.request_of(topic, [(0, value) for value in values])

    def confirmations(self) -> Callable[[memoryview], int]:
        """See Peer: a success is eight zero bytes. All requests have as many records as the last one."""
        records, received_bytes = self._records, 0

        def count(received: memoryview) -> int:
            nonlocal received_bytes
            if any(received):
                raise AssertionError(f"refused answer={bytes(received[:200])!r}")
            before = received_bytes // 8
            received_bytes += len(received)
            return (received_bytes // 8 - before) * records

        return count

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, CursusStream]:
        """See Peer. Raises NotImplementedError."""
        raise NotImplementedError


def _number(answer: bytes, name: bytes) -> int:
    digits = answer.partition(name)[2].lstrip()
    return int(digits[: next(at for at, byte in enumerate(digits) if not 48 <= byte <= 57)])
