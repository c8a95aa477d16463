"""Iggy clients that flood, stall and lie, against a real broker: other clients are served and memory is bounded."""

from __future__ import annotations

import random
import socket
import time
from contextlib import suppress

import pytest

from polywire.protocols.iggy.client_codec import ident, name, place, poll, request, to_partition
from polywire.protocols.iggy.messages import HEAD, U32, U64, Code, Consumer
from tests.broker_process import BrokerProcess
from tests.crash.test_hostile_peers import RawPeer, attacked, memory_mb, running

broker = running  # a fixture: a broker whose log and memory are checked at the end

FLOOD_S = 0.7
MEMORY_MB_MAX = 300
TOPIC = ident("s") + ident("t")
READER = Consumer(group=False, identifier=1)
MESSAGE = bytes(20) + U32.pack(1) + b"x"


def _ask(peer: RawPeer, code: int, body: bytes = b"") -> int:
    """Send one request; return the status."""
    peer.send(request(code, body))
    status, size = HEAD.unpack(peer._take(HEAD.size))
    peer._take(size)
    return int(status)


def _prepare(broker: BrokerProcess) -> None:
    with RawPeer(broker, "iggy") as peer:
        assert _ask(peer, Code.CREATE_STREAM, U32.pack(1) + name("s")) == 0
        assert _ask(peer, Code.CREATE_TOPIC, ident("s") + b"".join(map(U32.pack, (1, 3, 0))) + name("t")) == 0
        value = bytes(100_000)
        message = bytes(20) + U32.pack(len(value)) + value
        assert _ask(peer, Code.SEND, TOPIC + to_partition(1) + message * 50) == 0


def test_unread_responses(broker: BrokerProcess) -> None:
    _prepare(broker)
    at = place(READER, TOPIC, 1)
    requests = [
        request(Code.POLL, poll(at, 3, 0, 1_000)),
        request(Code.POLL, poll(at, 2, 0, 2**32 - 1)),
        request(Code.GET_STATS),
        request(Code.GET_STREAMS),
        request(Code.GET_CLIENTS),
        request(Code.GET_STREAM, ident("missing")),
        request(9_999),
        request(Code.SEND, TOPIC + to_partition(1) + MESSAGE),
    ]
    with attacked(broker):
        for flood in requests:
            with RawPeer(broker, "iggy") as peer:
                peer.flood(flood * 100, FLOOD_S)
    assert memory_mb(broker) < MEMORY_MB_MAX


def test_requests_of_very_many_messages(broker: BrokerProcess) -> None:
    _prepare(broker)
    with attacked(broker), RawPeer(broker, "iggy") as peer:
        head = TOPIC + to_partition(2)
        assert _ask(peer, Code.SEND, head + MESSAGE * 400_000) == 0
        assert _ask(peer, Code.SEND, head + MESSAGE * 1_300_000) == 0
        named = b"i" * 16 + MESSAGE[16:]
        assert _ask(peer, Code.SEND, head + named * 1_300_000) == 4022, "more than one batch can hold"
        header = U32.pack(1) + b"k\x01" + U32.pack(1) + b"v"
        full = bytes(16) + U32.pack(len(header) * 10_000) + header * 10_000 + U32.pack(1) + b"x"
        assert _ask(peer, Code.SEND, head + full * 20) == 0
        assert _ask(peer, Code.PING) == 0


def test_announced_frames_that_never_arrive(broker: BrokerProcess) -> None:
    with attacked(broker):
        stalled = [RawPeer(broker, "iggy") for _ in range(100)]
        for peer in stalled:
            peer.send(HEAD.pack(31 * 1024 * 1024, Code.SEND) + bytes(5_000))
        time.sleep(0.5)
        with RawPeer(broker, "iggy") as liar:
            liar.send(HEAD.pack(2**32 - 1, Code.SEND))
            assert HEAD.unpack(liar._take(HEAD.size)) == (4022, 0)
        for peer in stalled:
            peer.socket.close()
    assert memory_mb(broker) < MEMORY_MB_MAX


@pytest.mark.parametrize("announced", [60_000, 70_000])
def test_a_long_request_without_memory_among_many(broker: BrokerProcess, announced: int) -> None:
    """The broker closes a connection for lack of memory, the requesting or a stalled one, and never ends itself."""
    with attacked(broker):
        stalled = [RawPeer(broker, "iggy") for _ in range(700)]
        for peer in stalled:
            peer.send(HEAD.pack(announced, Code.SEND) + bytes(50_000))
        with RawPeer(broker, "iggy") as long, suppress(ConnectionError, TimeoutError):
            long.flood(HEAD.pack(31 * 1024 * 1024, Code.SEND) + bytes(31 * 1024 * 1024 - 4), 2)
        for peer in stalled:
            peer.socket.close()


def test_garbage_after_valid_requests(broker: BrokerProcess) -> None:
    _prepare(broker)
    chance = random.Random(7)
    codes = [code.value for code in Code]
    with attacked(broker):
        for number in range(300):
            body = chance.randbytes(chance.randrange(60))
            if number % 3 == 0:
                body = TOPIC + body
            with socket.create_connection(broker.addresses["iggy"], timeout=60) as peer:
                peer.sendall(request(Code.PING) + request(chance.choice(codes), body))
                peer.sendall(chance.randbytes(chance.randrange(200)))
                peer.shutdown(socket.SHUT_WR)
                _drain(peer)
    with RawPeer(broker, "iggy") as good:
        assert _ask(good, Code.PING) == 0


def test_extreme_numbers(broker: BrokerProcess) -> None:
    _prepare(broker)
    with RawPeer(broker, "iggy") as peer:
        for number in (0, 1, 2**31 - 1, 2**31, 2**32 - 1):
            for code, body in _edge_requests(number):
                _ask(peer, code, body)
        assert _ask(peer, Code.PING) == 0
        assert _ask(peer, Code.GET_STREAMS) == 0


def _edge_requests(number: int) -> list[tuple[int, bytes]]:
    """Return requests with this number, or a long number made of it, in every field."""
    group, numbers = TOPIC + U32.pack(number), U32.pack(number) * 3
    groups = (Code.CREATE_GROUP, Code.JOIN_GROUP, Code.GET_GROUP, Code.LEAVE_GROUP, Code.DELETE_GROUP)
    own = place(Consumer(group=False, identifier=number), TOPIC, number)
    longer = (number, number << 32 | number, 2**64 - 1 - number)
    at = place(READER, TOPIC, 1)
    return [
        *((code, group) for code in groups),
        (Code.CREATE_PARTITIONS, group),
        (Code.GET_CLIENT, U32.pack(number)),
        (Code.CREATE_STREAM, U32.pack(number) + name(f"edge-{number}")),
        (Code.CREATE_TOPIC, ident("s") + numbers + name(f"edge-{number}")),
        (Code.POLL, poll(own, 1, 0, number)),
        *((Code.POLL, poll(at, kind, value, 1)) for kind in range(1, 6) for value in longer),
        *((Code.STORE_OFFSET, at + U64.pack(value)) for value in longer),
    ]


def _drain(peer: socket.socket) -> None:
    """Read until the broker closes the connection, which it must do."""
    with suppress(ConnectionError):
        while peer.recv(65_536):
            pass
