"""Load over `polywire`: pre-encoded produce and a range fetch into Arrow.

The requests and their batches are encoded before the clock starts; every response is read and checked.
"""

from __future__ import annotations

import socket
import struct
import threading
import time

import msgspec
import pyarrow as pa

from polywire.client import arrow, bulk
from polywire.records.batch import from_spans
from polywire.types import Level

MAGIC = b"\xf1PWIRE\x00\x01"
PREFIX = struct.Struct("<IBBHII")  # of a frame (spec: polywire#frames)
VERB_PRODUCE = 34
FLAG_ERROR = 2
VALUES = pa.schema([pa.field("value", pa.binary())])


def value_batch(records: int, value_bytes: int) -> bytes:
    """Return a stored batch of equal-sized values."""
    source = b"x" * value_bytes
    spans = memoryview(struct.pack("<4q", 0, -1, 0, value_bytes) * records).cast("q")
    return bytes(from_spans(source, spans))


def produce_rate(
    host: str, port: int, topic: str, *, batch: bytes, batch_records: int, batches: int, partitions: int = 1
) -> float:
    """Return records per second of one connection that writes to the partitions in turn and reads every response."""
    frames = [produce_frame(topic, number % partitions, batch) for number in range(max(partitions, 8))]
    per_turn = len(frames)
    buffer = b"".join(frames)
    turns = max(1, batches // per_turn)
    with socket.create_connection((host, port)) as peer:
        peer.sendall(MAGIC)
        begun = time.perf_counter()
        sender = threading.Thread(target=_send, args=(peer, buffer, turns))
        sender.start()
        _read_answers(peer, turns * per_turn)
        took = time.perf_counter() - begun
        sender.join()
    return turns * per_turn * batch_records / took


def fetch_rate(host: str, port: int, topic: str, *, partition: int = 0) -> tuple[float, float]:
    """Return (payload bytes per second, records per second) of one range fetch of a partition into Arrow."""
    connection = bulk.connect(f"polywire://{host}:{port}")
    bounds = next(part for part in connection.bounds([topic]) if part.partition == partition)
    payload = records = 0
    begun = time.perf_counter()
    for chunk in connection.fetch_range(topic, partition, bounds.incarnation, bounds.first_offset, bounds.next_offset):
        for batch in arrow.chunk_to_arrow(chunk, ("value",), VALUES):
            records += batch.num_rows
            values = batch.column(0).buffers()[2]
            payload += 0 if values is None else values.size
    took = time.perf_counter() - begun
    if records != bounds.next_offset - bounds.first_offset:
        raise AssertionError(f"a record is missing found={records} bounds={bounds}")
    return payload / took, records / took


def produce_frame(topic: str, partition: int, batch: bytes) -> bytes:
    """Return one PRODUCE that is acknowledged once it is written."""
    head = msgspec.msgpack.encode([topic, partition, int(Level.WRITTEN), True])
    return PREFIX.pack(len(head) + len(batch), VERB_PRODUCE, 0, 0, partition + 1, len(head)) + head + batch


def _send(peer: socket.socket, buffer: bytes, turns: int) -> None:
    for _ in range(turns):
        peer.sendall(buffer)


def _read_answers(peer: socket.socket, expected: int) -> None:
    """Read the handshake and ``expected`` responses; raise on an error frame."""
    buffer = bytearray(1 << 20)
    filled = answered = 0
    position = len(MAGIC)
    while answered < expected:
        size = peer.recv_into(memoryview(buffer)[filled:])
        if size == 0:
            raise AssertionError(f"the broker closed early answers={answered}")
        filled += size
        while filled - position >= PREFIX.size:
            length, verb, flags, _, _, _ = PREFIX.unpack_from(buffer, position)
            if filled - position < PREFIX.size + length:
                break
            if flags & FLAG_ERROR:
                raise AssertionError(f"an error answer frame={bytes(buffer[position : position + 200])!r}")
            answered += verb == VERB_PRODUCE
            position += PREFIX.size + length
        buffer[: filled - position] = buffer[position:filled]
        filled -= position
        position = 0
