"""Load over Iggy in its current dialect: pre-encoded sends with checksums, polls, and the real client.

Requests are encoded before the clock starts; the status and counts of every reply are checked.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import xxhash

from benchmarks.iggy_load import COUNT, REQUESTS_IN_FLIGHT, VALUE
from benchmarks.receiving import receive
from polywire.protocols.iggy import client_codec, vsr
from polywire.protocols.iggy.dialect import D3
from polywire.protocols.iggy.messages import U32

INTEROP: Final = Path(os.environ.get("POLYWIRE_INTEROP") or Path(__file__).resolve().parents[1] / ".venv" / "interop")
SDKS: Final = {"apache-iggy-0.5.0": 1, "apache-iggy-0.8.0": 0, "apache-iggy-0.9.0": 0}
"""Releases of the SDK with different dialects, and the first partition number of each."""
SEND, PLAIN, REGISTER, CREATE_STREAM, CREATE_TOPIC, POLL = 160, 2, 1, 128, 132, 100
STREAM: Final = "bench-today"
ORIGIN_US: Final = 1_700_000_000_000_000
_POLLED: Final = struct.Struct("<IQI")
_BODY: Final = memoryview(bytearray(1 << 20))  # replies are read into it one after the other


def request(operation: int, body: bytes, *, code: int = 0, number: int = 0, client: int = 1) -> bytes:
    """Return a frame of the current framing. client: a number that no other connection has; only a login needs it."""
    head = bytearray(vsr.HEADER_BYTES)
    struct.pack_into("<I", head, 48, vsr.HEADER_BYTES + len(body))
    head[60] = vsr.REQUEST
    head[128:144] = client.to_bytes(16, "little")
    struct.pack_into("<Q", head, 168, number)
    head[176] = operation
    head[184] = operation != REGISTER  # any login epoch but 0; servers use that of the connection
    struct.pack_into("<I", head, 196, code)
    return bytes(head) + body


def send_request(topic: str, values: Sequence[bytes]) -> bytes:
    """Return a request that sends these values to the first partition; its number is how many they are."""
    where = client_codec.ident(STREAM) + client_codec.ident(topic) + b"\x02\x04" + bytes(4) + U32.pack(len(values))
    return request(SEND, U32.pack(len(where)) + where + batch(values), number=len(values))


def batch(values: Sequence[bytes]) -> bytes:
    """Return messages with ids and checksums, as the SDKs send them."""
    frames = []
    for number, value in enumerate(values):
        rest = (number + 1).to_bytes(16, "little") + struct.pack("<IIIIQ", number, 0, 0, len(value), 0) + value
        frames.append(xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest)
    body = b"".join(frames)
    head = bytearray(256)
    struct.pack_into("<QQ", head, 24, ORIGIN_US, 256 + len(body))
    struct.pack_into("<I", head, 48, len(values))
    sums = b"".join(frame[:8] for frame in frames)
    struct.pack_into("<Q", head, 40, xxhash.xxh3_64_intdigest(bytes(head[:40]) + bytes(head[48:52]) + sums))
    return bytes(head) + body


def connect(host: str, port: int) -> socket.socket:
    """Return a connection that has logged in as the default user."""
    peer = socket.create_connection((host, port))
    words = b"".join(map(client_codec.name, ("bench", "0.11.0", "iggy", "iggy")))
    client = int.from_bytes(os.urandom(16))
    _ask(peer, request(REGISTER, U32.pack(D3.protocols[0]) + words + bytes(4), client=client))
    return peer


def create(host: str, port: int, topic: str) -> None:
    """Create a topic of one partition, and its stream if missing."""
    with connect(host, port) as peer:
        _ask(peer, request(CREATE_STREAM, client_codec.name(STREAM), number=1))
        _ask(peer, request(CREATE_TOPIC, client_codec.ident(STREAM) + U32.pack(1) + client_codec.name(topic), number=2))


def send_rate(host: str, port: int, topic: str, *, requests: int) -> float:
    """Return acknowledged messages per second of one connection that does not wait for replies."""
    frame = send_request(topic, [VALUE] * COUNT)
    with connect(host, port) as peer:
        begun = time.perf_counter()
        sender = threading.Thread(target=_send, args=(peer, frame, requests))
        sender.start()
        for _ in range(requests):
            _read_reply(peer)
        took = time.perf_counter() - begun
        sender.join()
    return requests * COUNT / took


def poll_rate(host: str, port: int, topic: str, *, polls: int) -> float:
    """Return messages per second of one connection with pipelined polls of a thousand, from the start."""
    consumer = b"\x01\x01\x04\x01\0\0\0" + client_codec.ident(STREAM) + client_codec.ident(topic) + b"\x01" + bytes(4)
    frames = [
        request(PLAIN, consumer + b"\x01" + struct.pack("<QIB", number * COUNT, COUNT, 0), code=POLL)
        for number in range(polls)
    ]
    with connect(host, port) as peer:
        begun = time.perf_counter()
        peer.sendall(b"".join(frames[:REQUESTS_IN_FLIGHT]))
        for number in range(polls):
            body = _read_reply(peer)
            if _POLLED.unpack_from(body)[2] != COUNT:
                raise AssertionError(f"a poll went wrong messages={_POLLED.unpack_from(body)[2]}")
            if number + REQUESTS_IN_FLIGHT < polls:
                peer.sendall(frames[number + REQUESTS_IN_FLIGHT])
        took = time.perf_counter() - begun
    return polls * COUNT / took


def check(head: bytes) -> None:
    """Raise AssertionError if this is not the header of a success."""
    if len(head) < vsr.HEADER_BYTES or head[60] != vsr.REPLY or any(head[216:220]):
        raise AssertionError(
            f"a request was refused or the broker closed command={head[60:61]!r} status={head[216:220]!r}"
        )


def _ask(peer: socket.socket, frame: bytes) -> None:
    peer.sendall(frame)
    _read_reply(peer)


def _read_reply(peer: socket.socket) -> memoryview:
    """Return the body of the next reply."""
    head = peer.recv(vsr.HEADER_BYTES, socket.MSG_WAITALL)
    check(head)
    size, filled = int.from_bytes(head[48:52], "little") - vsr.HEADER_BYTES, 0
    while filled < size:
        filled += receive(peer, _BODY[filled:size])
    return _BODY[:size]


def _send(peer: socket.socket, frame: bytes, requests: int) -> None:
    for _ in range(requests):
        peer.sendall(frame)


# The real client in its own process: most of the time is the client's own work.
_CLIENT: Final = """
import asyncio, os, sys, time
import apache_iggy as iggy
async def main(host, port, count):
    client = iggy.IggyClient(f"{host}:{port}")
    await client.connect()
    await client.login_user("iggy", "iggy")
    await client.create_stream("sdk")
    await client.create_topic("sdk", "t", 1)
    newest = hasattr(iggy, "Partitioning")
    first = int(os.environ["IGGY_BASE"])
    where = iggy.Partitioning.partition_id(0) if newest else first
    text = "x" * 100
    begun = time.perf_counter()
    for _ in range(count):
        await client.send_messages("sdk", "t", where, [iggy.SendMessage(text) for _ in range(1000)])
    sent = time.perf_counter() - begun
    begun = time.perf_counter()
    for number in range(count):
        strategy = iggy.PollingStrategy.Offset(number * 1000)
        if newest:
            got = await client.poll_messages("sdk", "t", consumer=iggy.Consumer.Single(1), polling_strategy=strategy,
                                             count=1000, auto_commit=False, partition_id=0)
        else:
            got = await client.poll_messages("sdk", "t", first, strategy, 1000, False)
        assert len(got) == 1000
    polled = time.perf_counter() - begun
    print(count * 1000 / sent, count * 1000 / polled, flush=True)
    os._exit(0)
asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


def client_rates(host: str, port: int, sdk: Path, *, base: int, requests: int) -> tuple[float, float]:
    """Return messages per second that an unmodified Python SDK sends and polls, a thousand of 100 B per call."""
    environment = {"PYTHONPATH": str(sdk), "IGGY_BASE": str(base)}
    command = [sys.executable, "-c", _CLIENT, host, str(port), str(requests)]
    reported = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return float(reported[0]), float(reported[1])
