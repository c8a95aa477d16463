"""Load over Cursus: pre-encoded batches, CONSUME and STREAM of them, and the latency of pushed records.

Batches are encoded before the clock starts; every acknowledgement is checked, and records are counted per batch.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

FRAMES_PER_BUFFER = 8
RECEIVE_BYTES = 4 * 1024 * 1024
PACE_S = 0.001  # between two batches of the paced producer
_OK = b'{"status":"OK"'


def encoded_batch(topic: str, *, records: int, value: bytes, acks: str = "1") -> bytes:
    """Return a frame with one batch of equal values in the current clients' layout."""
    name = topic.encode()
    parts = [b"\xba\x7c", struct.pack(">H", len(name)), name, struct.pack(">iB", 0, len(acks)), acks.encode()]
    parts.append(struct.pack(">BQQi", 0, 1, records, records))
    for sequence in range(1, records + 1):
        parts.append(struct.pack(">QQH", 0, sequence, 9) + b"py-1a2b3c" + struct.pack(">HqI", 0, 0, len(value)))
        parts.append(value + struct.pack(">HIQH", 0, 0, 0, 0))
    body = b"".join(parts)
    return struct.pack(">I", len(body)) + body


def command(text: str) -> bytes:
    """Return a frame with a text command."""
    return struct.pack(">I", len(text)) + text.encode()


def create(host: str, port: int, topic: str) -> None:
    """Create a topic with one partition."""
    with socket.create_connection((host, port)) as peer:
        peer.sendall(command(f"CREATE topic={topic} partitions=1"))
        reply = next(_bodies(peer))
        if not reply.startswith(b"OK"):
            raise AssertionError(f"no topic reply={reply!r}")


def produce_rate(host: str, port: int, topic: str, *, batches: int, records: int = 1_000) -> float:
    """Return acknowledged records per second of one connection that never waits."""
    buffer = encoded_batch(topic, records=records, value=b"x" * 100) * FRAMES_PER_BUFFER
    rounds = max(1, batches // FRAMES_PER_BUFFER)
    with socket.create_connection((host, port)) as peer:
        begun = time.perf_counter()
        sender = threading.Thread(target=_send, args=(peer, buffer, rounds))
        sender.start()
        good = _count_acknowledgements(peer, rounds * FRAMES_PER_BUFFER)
        took = time.perf_counter() - begun
        sender.join()
    if good != rounds * FRAMES_PER_BUFFER:
        raise AssertionError(f"some batches were refused good={good}")
    return rounds * FRAMES_PER_BUFFER * records / took


def consume_rate(host: str, port: int, topic: str, *, records: int, in_flight: int = 4, batch: int = 8_192) -> float:
    """Return records per second of one connection that requests batch after batch, a few requests ahead."""
    with socket.create_connection((host, port)) as peer:
        begun = time.perf_counter()
        asked = found = 0
        replies = _counts(peer, topic)
        while found < records:
            while asked < records and asked < found + in_flight * batch:
                peer.sendall(command(f"CONSUME topic={topic} partition=0 offset={asked} member=m batch={batch}"))
                asked += batch
            found += next(replies)
        took = time.perf_counter() - begun
    if found != records:
        raise AssertionError(f"records were lost or doubled found={found} expected={records}")
    return records / took


def stream_rate(host: str, port: int, topic: str, *, records: int) -> float:
    """Return records per second of one stream from the start."""
    with socket.create_connection((host, port)) as peer:
        begun = time.perf_counter()
        peer.sendall(command(f"STREAM topic={topic} partition=0 group=bench offset=0"))
        found = 0
        replies = _counts(peer, topic)
        while found < records:
            found += next(replies)
        took = time.perf_counter() - begun
    return records / took


def push_latency_ms(
    host: str, port: int, topic: str, *, rate: int = 10_000, seconds: float = 3.0
) -> tuple[float, float]:
    """Return (p50, p99) milliseconds from sending a record to its arrival on a stream, at a steady rate."""
    per_batch = max(1, int(rate * PACE_S))
    expected = int(seconds / PACE_S) * per_batch
    ours, theirs = multiprocessing.Pipe()
    producer = multiprocessing.get_context("spawn").Process(
        target=_produce_paced, args=(theirs, host, port, topic, per_batch, int(seconds / PACE_S)), daemon=True
    )
    delays: list[int] = []
    with socket.create_connection((host, port)) as peer:
        peer.sendall(command(f"STREAM topic={topic} partition=0 group=latency autoOffsetReset=latest"))
        producer.start()
        ours.recv()
        for body in _bodies(peer):
            now = time.perf_counter_ns()
            count = _count(body, topic)
            if count:
                delays += [now - _sent_at(body)] * count
            if len(delays) >= expected:
                break
    producer.join()
    warm = delays[len(delays) // 10 :]
    cuts = statistics.quantiles(warm, n=100)
    return cuts[49] / 1e6, cuts[98] / 1e6


def _produce_paced(pipe: Connection, host: str, port: int, topic: str, per_batch: int, batches: int) -> None:
    frame = bytearray(encoded_batch(topic, records=per_batch, value=b"T" + bytes(8) + b"x" * 91))
    place = frame.rindex(b"T") + 1
    with socket.create_connection((host, port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = threading.Thread(target=_count_acknowledgements, args=(peer, batches))
        reader.start()
        pipe.send(None)
        begun = time.perf_counter()
        for number in range(batches):
            wait = begun + number * PACE_S - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            frame[place : place + 8] = time.perf_counter_ns().to_bytes(8, "big")
            peer.sendall(frame)
        reader.join()


def _sent_at(body: bytes) -> int:
    """Return when the last record of a pushed batch was sent."""
    place = body.rindex(b"x" * 91)
    return int.from_bytes(body[place - 8 : place], "big")


def _send(peer: socket.socket, buffer: bytes, rounds: int) -> None:
    for _ in range(rounds):
        peer.sendall(buffer)


def _count_acknowledgements(peer: socket.socket, expected: int) -> int:
    good = 0
    for number, body in enumerate(_bodies(peer), 1):
        good += body.startswith(_OK)
        if number == expected:
            break
    return good


def _count(body: bytes | memoryview, topic: str) -> int:
    """Return the number of messages of a pushed batch; 0 for a keepalive."""
    if not body:
        return 0
    if bytes(body[:2]) != b"\xba\x7c":
        raise AssertionError(f"no batch body={bytes(body[:200])!r}")
    (count,) = struct.unpack_from(">i", body, 4 + len(topic) + 4 + 2 + 1 + 16)
    return int(count)


def _counts(peer: socket.socket, topic: str) -> Iterator[int]:
    """Yield the number of messages of every arriving frame."""
    buffer = bytearray(RECEIVE_BYTES)
    view = memoryview(buffer)
    filled = 0
    while True:
        size = peer.recv_into(view[filled:])
        if size == 0:
            raise AssertionError("the broker closed early")
        filled += size
        at = 0
        while filled - at >= 4:
            end = at + 4 + int.from_bytes(view[at : at + 4], "big")
            if end > filled:
                break
            yield _count(view[at + 4 : end], topic)
            at = end
        if at:
            buffer[: filled - at] = buffer[at:filled]
            filled -= at


def _bodies(peer: socket.socket) -> Iterator[bytes]:
    """Yield the bodies of arriving frames."""
    pending = bytearray()
    while True:
        data = peer.recv(1 << 20)
        if not data:
            raise AssertionError("the broker closed early")
        pending += data
        at = 0
        while len(pending) - at >= 4:
            end = at + 4 + int.from_bytes(pending[at : at + 4], "big")
            if end > len(pending):
                break
            yield bytes(pending[at + 4 : end])
            at = end
        del pending[:at]
