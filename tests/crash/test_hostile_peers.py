"""Clients that flood, stall, lie and vanish, against a real broker: other clients are served and memory is bounded.

Every attack is bounded in count; a well-behaved client produces at the same time over both protocols. The asserted
limits are far above what an idle machine needs, and far below what each attack cost without protection.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polywire.build_info import compiled_modules
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import (
    ERROR,
    MAGIC,
    MORE,
    PREFIX,
    PREFIX_BYTES,
    Prefix,
    decode_answer_prefix,
    encode_head,
)
from polywire.protocols.polywire.messages import Head, Verb
from polywire.records.batch import from_spans
from tests.broker_process import BrokerProcess
from tests.processor import loop_seconds

# Upper limit of the broker loop's processor time from a request of the well-behaved client to its response. An attack
# that held the loop took many seconds. Wall-clock time would add what a busy machine adds. Uncompiled code handles a
# batch of four million records one by one in Python, and promises no latency (decision 0108).
HELD_S_MAX = 1.5 if all(compiled_modules().values()) else 30.0
SETTLED_S_MAX = 60.0
MEMORY_MB_MAX = 500
TOPICS = 2_000


class RawPeer:
    """A connection that sends any bytes; on the `polywire` protocol it has made its handshake."""

    def __init__(self, broker: BrokerProcess, wire: str = "polywire") -> None:
        self.socket = socket.create_connection(broker.addresses[wire], timeout=60)
        self._received = b""
        if wire == "polywire":
            self.send(MAGIC)
            assert self._take(len(MAGIC)) == MAGIC
            self.read()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self) -> Prefix:
        """Read the next frame and drop its head and payload."""
        prefix = decode_answer_prefix(self._take(PREFIX_BYTES))
        self._take(prefix.length)
        return prefix

    def ask(self, verb: Verb, head: Head, payload: bytes = b"") -> Prefix:
        self.send(encode_head(verb, 1, head, payload_bytes=len(payload)) + payload)
        return self.read()

    def read_on(self, answer: Prefix) -> None:
        """Read the remaining frames of a response."""
        while answer.flags & MORE:
            answer = self.read()

    def flood(self, data: bytes, seconds: float) -> None:
        """Send this repeatedly and read nothing; end early when the broker accepts no more."""
        self.socket.settimeout(seconds)
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                self.send(data)
        except TimeoutError:
            return

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            more = self.socket.recv(1 << 20)
            if not more:
                raise EOFError("the broker closed the connection")
            self._received += more
        taken, self._received = self._received[:size], self._received[size:]
        return taken


class GoodClient:
    """Produces single records over both protocols, and records how long the broker's loop is busy with each."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.times: list[float] = []
        self._broker = broker
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> GoodClient:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    def wait(self, count: int) -> None:
        """Wait until that many requests were answered, or one was not."""
        wait(lambda: len(self.times) > count or self._failures, "the client makes no progress")

    def check(self) -> None:
        """Assert that every request was answered, and none while the loop was held."""
        assert not self._failures, self._failures
        assert max(self.times) < HELD_S_MAX, (
            f"median {statistics.median(self.times):.4f} s, max {max(self.times):.3f} s"
        )

    def _run(self) -> None:
        try:
            flux = socket.create_connection(self._broker.addresses["flux"], timeout=60)
            with RawPeer(self._broker) as peer, flux:
                batch = record_batch(1)
                while not self._stopping.wait(0.005):
                    begun = loop_seconds(self._broker)
                    assert not peer.ask(Verb.PRODUCE, messages.Produce("good", 0, create=True), batch).flags & ERROR
                    flux.sendall(b"V1|1|PRODUCE|good k:v\n")
                    assert b"|OK|" in flux.recv(4096)
                    self.times.append((loop_seconds(self._broker) - begun) / 2)
        except BaseException as failure:
            self._failures.append(failure)


def record_batch(count: int, *, keyed: bool = False) -> bytes:
    """Return a batch of that many empty records."""
    return bytes(from_spans(b"", memoryview(array("q", [0, 0 if keyed else -1, 0, 0]) * count)))


def memory_mb(broker: BrokerProcess) -> int:
    """Return the broker's peak memory."""
    status = Path(f"/proc/{broker.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) // 1024


def descriptors(broker: BrokerProcess) -> int:
    return len(os.listdir(f"/proc/{broker.pid}/fd"))


@pytest.fixture(name="broker")
def running(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as broker:
        yield broker
        log = broker.log_text()
        assert not [word for word in ("Traceback", "level=error", "level=critical") if word in log], log
        assert memory_mb(broker) < MEMORY_MB_MAX
        assert broker.stop() == 0


@contextmanager
def attacked(broker: BrokerProcess) -> Iterator[None]:
    """Run an attack during which a well-behaved client must be served."""
    with GoodClient(broker) as client:
        client.wait(1)
        client.times.clear()
        yield
        client.wait(20)
    client.check()


def test_garbage_and_truncated_frames_close_their_own_connection_only(broker: BrokerProcess) -> None:
    chance = random.Random(1)
    frame = encode_head(Verb.FETCH, 1, messages.Fetch("good", 0, 0))
    with attacked(broker):
        for number in range(200):
            wire = ("flux", "polywire")[number % 2]
            with socket.create_connection(broker.addresses[wire]) as peer:
                start = MAGIC + frame[: chance.randrange(len(frame))] if number % 3 == 0 else b""
                peer.sendall(start + chance.randbytes(chance.randrange(1, 3000)))
        for length in (2**32 - 1, 2**31, (17 << 20) + 1):
            _claim(broker, length)


def _claim(broker: BrokerProcess, length: int) -> None:
    """Announce a frame that is too long: that is an error and closes the connection."""
    with RawPeer(broker) as liar:
        liar.send(PREFIX.pack(length, Verb.PRODUCE, 0, 0, 1, 16))
        assert liar.read().flags & ERROR
        with pytest.raises(EOFError):
            liar.read()


@pytest.mark.parametrize("number", [-(2**63), -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_extreme_numbers_get_a_response(broker: BrokerProcess, number: int) -> None:
    batch = record_batch(3)
    heads: list[tuple[Verb, Head]] = [
        (Verb.FETCH, messages.Fetch("good", number, 0)),
        (Verb.FETCH, messages.Fetch("good", 0, number)),
        (Verb.FETCH, messages.Fetch("good", 0, 0, number)),
        (Verb.FETCH, messages.Fetch("good", 0, 0, -1, number)),
        (Verb.FETCH, messages.Fetch("good", 0, 0, -1, 0, number)),
        (Verb.FETCH, messages.Fetch("good", 0, 0, -1, 0, -1, number)),
        (Verb.PRODUCE, messages.Produce("good", number)),
        (Verb.PRODUCE, messages.Produce("good", 0, number)),
        (Verb.STAGE, messages.Stage(b"t" * 16, "good", number)),
        (Verb.PUBLISH, messages.Publish("w", number, [])),
        (Verb.BOUNDS, messages.AskBounds(["good"], [number])),
        (Verb.CREATE_TOPIC, messages.CreateTopic("new", number)),
        (Verb.CREATE_TOPIC, messages.CreateTopic("newer", 1, settings={"retention_bytes": number})),
        (Verb.GROW_TOPIC, messages.GrowTopic("good", number)),
        (Verb.COMMIT, messages.Commit("good", number, 1, "g", 0)),
        (Verb.COMMIT, messages.Commit("good", 0, 1, "g", number)),
        (Verb.COMMIT, messages.Commit("good", 0, 1, "g", 0, 1, "m", number)),
        (Verb.POSITION, messages.AskPosition("good", number, 1, "g")),
        (Verb.HEARTBEAT, messages.Member("g", "good", "m", number)),
        (Verb.CANCEL, messages.Cancel(number)),
    ]
    with attacked(broker), RawPeer(broker) as peer:
        for verb, head in heads:
            answer = peer.ask(verb, head, batch if verb in (Verb.PRODUCE, Verb.STAGE) else b"")
            assert (answer.verb, answer.correlation) == (verb, 1)
            peer.read_on(answer)


def test_floods_of_requests_with_unread_responses(broker: BrokerProcess) -> None:
    with RawPeer(broker) as peer:
        for number in range(TOPICS):
            peer.send(encode_head(Verb.CREATE_TOPIC, number, messages.CreateTopic(f"topic-{number:05}", 2)))
        for _ in range(TOPICS):
            assert not peer.read().flags & ERROR
    names = [f"topic-{number:05}" for number in range(1000)]
    requests = [
        (encode_head(Verb.TOPICS, 1, messages.ListTopics()), 2000),
        (encode_head(Verb.PING, 1, Head()), 2000),
        (encode_head(Verb.BOUNDS, 1, messages.AskBounds(names)), 20),
        (encode_head(Verb.JOIN, 1, messages.Join("g", names[0], "m")), 1000),
        (encode_head(Verb.FETCH, 1, messages.Fetch("good", 0, 0)), 1000),
    ]
    with attacked(broker):
        for request, count in requests:
            with RawPeer(broker) as peer:
                peer.flood(request * count, 0.7)
        with RawPeer(broker, "flux") as peer:
            peer.flood(b"V1|1|ADMIN_GET_METADATA|\n" * 1000, 0.7)
    assert memory_mb(broker) < 250, "unread responses must not accumulate"


def test_the_largest_number_of_records_in_one_batch(broker: BrokerProcess) -> None:
    many, keyed = record_batch(3_900_000), record_batch(1_900_000, keyed=True)
    with RawPeer(broker) as peer, attacked(broker):
        for _ in range(3):
            assert not peer.ask(Verb.PRODUCE, messages.Produce("many", 0, create=True), many).flags & ERROR
        assert not peer.ask(Verb.PRODUCE, messages.Produce("many", -1), keyed).flags & ERROR


def test_a_thousand_connections_that_stall(broker: BrokerProcess) -> None:
    before = descriptors(broker)
    stalled: list[RawPeer] = []
    with attacked(broker):
        for number in range(1000):
            peer = RawPeer(broker)
            stalled.append(peer)
            if number % 3:
                size = 16 << 20 if number % 20 == 1 else 30_000
                peer.send(PREFIX.pack(size, Verb.PRODUCE, 0, 0, 1, 16) + bytes(10_000))
    for peer in stalled:
        peer.socket.close()
    wait(lambda: descriptors(broker) <= before + 8, "descriptors leak")


def test_connection_storms_leak_nothing(broker: BrokerProcess) -> None:
    before = descriptors(broker)
    with attacked(broker):
        for number in range(2000):
            with socket.create_connection(broker.addresses[("flux", "polywire")[number % 2]]) as peer:
                peer.sendall(MAGIC[: number % 9])
    wait(lambda: descriptors(broker) <= before + 8, "descriptors leak")


def test_thousands_of_long_polls(broker: BrokerProcess) -> None:
    poll = b"".join(
        encode_head(Verb.FETCH, number, messages.Fetch("quiet", 0, 0, wait_ms=60_000)) for number in range(1, 61)
    )
    with RawPeer(broker) as first:
        assert not first.ask(Verb.CREATE_TOPIC, messages.CreateTopic("quiet", 1)).flags & ERROR
        peers = [RawPeer(broker) for _ in range(50)]
        with attacked(broker):
            for peer in peers:
                peer.send(poll)
            first.ask(Verb.PRODUCE, messages.Produce("quiet", 0), record_batch(1))
            for peer in peers:
                assert not any(peer.read().flags & ERROR for _ in range(60))
        for peer in peers:
            peer.socket.close()


def test_topics_created_and_deleted_while_they_are_read(broker: BrokerProcess) -> None:
    stopping = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            with RawPeer(broker) as reader:
                while not stopping.is_set():
                    reader.read_on(reader.ask(Verb.FETCH, messages.Fetch("fleeting", 0, 0, wait_ms=20)))
        except BaseException as failure:
            failures.append(failure)

    readers = [threading.Thread(target=read) for _ in range(3)]
    with attacked(broker), RawPeer(broker) as peer:
        for thread in readers:
            thread.start()
        for _ in range(15):
            assert not peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("fleeting", 3, level=1)).flags & ERROR
            for number in range(20):
                produce = messages.Produce("fleeting", number % 3)
                assert not peer.ask(Verb.PRODUCE, produce, record_batch(1000)).flags & ERROR
            assert not peer.ask(Verb.DELETE_TOPIC, messages.DeleteTopic("fleeting", level=1)).flags & ERROR
        stopping.set()
        for thread in readers:
            thread.join(60)
    assert not failures


def wait(reached: Callable[[], object], otherwise: str, seconds: float = SETTLED_S_MAX) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)
