"""Many clients that send long requests at once: those that make progress are slowed down, never closed."""

from __future__ import annotations

import random
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from polywire.protocols.cursus.messages import FRAME_BYTES_MAX, frame
from tests.broker_process import BrokerProcess
from tests.unit.protocols.cursus.test_produce import batch, messages

PRODUCERS = 300
FRAMES = 4  # of each
VALUE_BYTES = 150_000
PIECE_BYTES = 16_384  # of a frame, as a network delivers it: every frame is incomplete for a while
SECONDS_MAX = 120.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", wires=("cursus",)) as process:
        yield process


@dataclass(slots=True)
class Peer:
    """One producer. Invariant: ``left`` has the bytes not sent yet."""

    socket: socket.socket
    left: memoryview
    got: bytearray = field(default_factory=bytearray)

    def send(self) -> None:
        sent = self.socket.send(self.left[:PIECE_BYTES])
        self.left = self.left[sent:]


def asked(broker: BrokerProcess, body: bytes) -> bytes:
    with socket.create_connection(broker.addresses["cursus"], timeout=30) as peer:
        peer.sendall(frame(body))
        return peer.recv(1 << 16)


def produced(topic: str, value_bytes: int) -> bytes:
    message = {**messages(1)[0], "payload": bytes(value_bytes)}
    return frame(batch(topic, 0, [message]))


def send_all(peers: list[Peer], answers: int) -> None:
    """Send everything in pieces, a random client at a time, and read that many responses of each."""
    end = time.monotonic() + SECONDS_MAX
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            peer.socket.setblocking(False)
            selector.register(peer.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
        while any(peer.got.count(b'"status":"OK"') < answers for peer in peers):
            assert time.monotonic() < end, "a client got no response"
            ready = selector.select(1.0)
            random.shuffle(ready)
            for key, events in ready:
                turn(selector, key.data, events)


def turn(selector: selectors.BaseSelector, peer: Peer, events: int) -> None:
    if events & selectors.EVENT_READ:
        data = peer.socket.recv(1 << 16)
        assert data, "a producer that made progress was closed"
        peer.got += data
        assert b"ERROR" not in peer.got
    if events & selectors.EVENT_WRITE:
        peer.send()
        if not peer.left:
            selector.modify(peer.socket, selectors.EVENT_READ, peer)


def test_hundreds_of_producers_with_long_frames_are_all_served(broker: BrokerProcess) -> None:
    assert b"OK" in asked(broker, b"CREATE topic=crowd partitions=1")
    data = memoryview(produced("crowd", VALUE_BYTES) * FRAMES)
    peers = [Peer(socket.create_connection(broker.addresses["cursus"]), data) for _ in range(PRODUCERS)]
    try:
        send_all(peers, FRAMES)
    finally:
        for peer in peers:
            peer.socket.close()
    assert f"latest={PRODUCERS * FRAMES}".encode() in asked(broker, b"LIST_OFFSETS topic=crowd")


def test_the_longest_frame_is_accepted_during_other_incomplete_frames(broker: BrokerProcess) -> None:
    assert b"OK" in asked(broker, b"CREATE topic=crowd partitions=1")
    size = FRAME_BYTES_MAX // 8 - 200
    values = [{**message, "payload": bytes(size)} for message in messages(*range(1, 9))]
    longest = frame(batch("crowd", 0, values))
    assert FRAME_BYTES_MAX - 4096 < len(longest) <= FRAME_BYTES_MAX + 4
    others = [socket.create_connection(broker.addresses["cursus"]) for _ in range(20)]
    try:
        for other in others:
            other.sendall(produced("crowd", VALUE_BYTES)[: VALUE_BYTES // 2])
        peer = Peer(socket.create_connection(broker.addresses["cursus"]), memoryview(longest))
        others.append(peer.socket)
        send_all([peer], 1)
    finally:
        for other in others:
            other.close()
