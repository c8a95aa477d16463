"""Load over Kafka 0.7: pipelined sets, and fetches of a whole partition.

Requests are encoded before the clock starts. The protocol acknowledges nothing: the clock stops at the response to an
OFFSETS after the last set, which must be the end of everything sent.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque

from benchmarks.receiving import receive
from polywire.protocols.kafka07.messages import (
    LATEST,
    encode_fetch,
    encode_offsets,
    encode_produce,
    encode_set,
    parse_offsets_answer,
)

VALUE = b"x" * 200
RECORD_BYTES = len(VALUE) + 10
BUFFER_BYTES = 1024 * 1024  # of requests sent at a time
FETCH_BYTES = 1024 * 1024


def produce_rate(host: str, port: int, topic: str, *, requests: int, messages: int = 200) -> float:
    """Return records per second of one connection that sends PRODUCE requests of that many messages to partition 0."""
    frame = encode_produce(topic.encode(), 0, encode_set([VALUE] * messages))
    frames_each = max(1, BUFFER_BYTES // len(frame))
    buffer = frame * frames_each
    rounds = max(1, requests // frames_each)
    with socket.create_connection((host, port)) as peer:
        before = _end(peer, topic)
        begun = time.perf_counter()
        for _ in range(rounds):
            peer.sendall(buffer)
        after = _end(peer, topic)
        took = time.perf_counter() - begun
    records = rounds * frames_each * messages
    if after - before != records * RECORD_BYTES:
        raise AssertionError(f"some records are missing bytes={after - before} expected={records * RECORD_BYTES}")
    return records / took


def fetch_rate(host: str, port: int, topic: str, *, ahead: int = 1) -> float:
    """Return records per second of one connection that reads partition 0 from start to end with pipelined requests.

    Addresses are known in advance, because records are equally long; what a response omits is requested again at the
    end.
    """
    with socket.create_connection((host, port)) as peer:
        end = _end(peer, topic)
        chunk = FETCH_BYTES // RECORD_BYTES * RECORD_BYTES
        requests = deque((at, min(chunk, end - at)) for at in range(0, end, chunk))
        asked: deque[tuple[int, int]] = deque()
        buffer = memoryview(bytearray(FETCH_BYTES + 64))
        read = 0
        begun = time.perf_counter()
        while requests or asked:
            while requests and len(asked) < ahead:
                at, wanted = requests.popleft()
                asked.append((at, wanted))
                peer.sendall(encode_fetch(topic.encode(), 0, at, wanted))
            at, wanted = asked.popleft()
            size, error = struct.unpack(">ih", _read(peer, buffer, 6))
            if error or not 2 < size <= 2 + wanted:
                raise AssertionError(f"an unexpected answer error={error} bytes={size} address={at}")
            _read(peer, buffer, size - 2)
            read += size - 2
            if size - 2 < wanted:
                requests.append((at + size - 2, wanted - size + 2))
        took = time.perf_counter() - begun
    if read != end:
        raise AssertionError(f"some bytes are missing read={read} expected={end}")
    return end / RECORD_BYTES / took


def _end(peer: socket.socket, topic: str) -> int:
    peer.sendall(encode_offsets(topic.encode(), 0, LATEST, 1))
    room = memoryview(bytearray(64))
    (size,) = struct.unpack(">i", _read(peer, room, 4))
    return parse_offsets_answer(bytes(_read(peer, room, size)))[0]


def _read(peer: socket.socket, buffer: memoryview, size: int) -> memoryview:
    at = 0
    while at < size:
        got = receive(peer, buffer[at:size])
        if not got:
            raise AssertionError("the broker closed early")
        at += got
    return buffer[:size]
