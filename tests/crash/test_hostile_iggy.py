"""Peers of the Iggy wire that flood, stall and lie, against a real broker: everybody else is served and memory is bounded."""

from __future__ import annotations

import random
import socket
import time
from contextlib import suppress

import pytest

from polywire.protocols.iggy.asking import ident, name, place, poll, request, to_partition
from polywire.protocols.iggy.messages import HEAD, U32, U64, Code, Consumer
from tests.broker_process import BrokerProcess
from tests.crash.test_hostile_peers import RawPeer, attacked, memory_mb, running

broker = running  # a fixture: a broker whose log and memory are looked at when it is over

FLOOD_S = 0.7
MEMORY_MB_MAX = 300
TOPIC = ident("s") + ident("t")
READER = Consumer(group=False, who=1)
MESSAGE = bytes(20) + U32.pack(1) + b"x"


def _ask(peer: RawPeer, code: int, body: bytes = b"") -> int:
    """Send one request; returns the status."""
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


def test_answers_that_nobody_reads(broker: BrokerProcess) -> None:
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


def test_announced_frames_that_never_come(broker: BrokerProcess) -> None:
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
def test_no_room_for_a_long_request_among_many(broker: BrokerProcess, announced: int) -> None:
    """Somebody is ended for want of memory, the one that asks or those that stand still, and never the process."""
    with attacked(broker):
        stalled = [RawPeer(broker, "iggy") for _ in range(700)]
        for peer in stalled:
            peer.send(HEAD.pack(announced, Code.SEND) + bytes(50_000))
        with RawPeer(broker, "iggy") as long, suppress(ConnectionError, TimeoutError):
            long.flood(HEAD.pack(31 * 1024 * 1024, Code.SEND) + bytes(31 * 1024 * 1024 - 4), 2)
        for peer in stalled:
            peer.socket.close()


def test_garbage_behind_good_requests(broker: BrokerProcess) -> None:
    _prepare(broker)
    chance = random.Random(7)
    codes = [code.value for code in Code]
    with attacked(broker):
        for number in range(300):
            body = chance.randbytes(chance.randrange(60))
            if number % 3 == 0:
                body = TOPIC + body
            with socket.create_connection(broker.addresses["iggy"], timeout=20) as peer:
                peer.sendall(request(Code.PING) + request(chance.choice(codes), body))
                peer.sendall(chance.randbytes(chance.randrange(200)))
                peer.shutdown(socket.SHUT_WR)
                _drain(peer)
    with RawPeer(broker, "iggy") as good:
        assert _ask(good, Code.PING) == 0


def test_numbers_at_the_edges(broker: BrokerProcess) -> None:
    _prepare(broker)
    edges = (0, 1, 2**31 - 1, 2**31, 2**32 - 1)
    long_edges = (0, 2**63 - 1, 2**63, 2**64 - 1)
    with RawPeer(broker, "iggy") as peer:
        for number in edges:
            for code in (Code.CREATE_GROUP, Code.JOIN_GROUP, Code.GET_GROUP, Code.LEAVE_GROUP, Code.DELETE_GROUP):
                _ask(peer, code, TOPIC + U32.pack(number))
            for code in (Code.CREATE_PARTITIONS, Code.GET_CLIENT):
                _ask(peer, code, (TOPIC if code == Code.CREATE_PARTITIONS else b"") + U32.pack(number))
            _ask(peer, Code.CREATE_STREAM, U32.pack(number) + name(f"edge-{number}"))
            numbers = b"".join(map(U32.pack, (number, number, number)))
            _ask(peer, Code.CREATE_TOPIC, ident("s") + numbers + name(f"edge-{number}"))
            _ask(peer, Code.POLL, poll(place(Consumer(group=False, who=number), TOPIC, number), 1, 0, number))
            for kind in range(1, 6):
                for value in long_edges:
                    _ask(peer, Code.POLL, poll(place(READER, TOPIC, 1), kind, value, 1))
            for value in long_edges:
                _ask(peer, Code.STORE_OFFSET, place(READER, TOPIC, 1) + U64.pack(value))
        assert _ask(peer, Code.PING) == 0
        assert _ask(peer, Code.GET_STREAMS) == 0


def _drain(peer: socket.socket) -> None:
    """Read until the broker hangs up; it must come to an end."""
    with suppress(ConnectionError):
        while peer.recv(65_536):
            pass
