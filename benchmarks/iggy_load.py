"""Load over Iggy in its documented dialect: pre-encoded sends, and polls one after the other.

Requests are encoded before the clock starts; the status and counts of every reply are checked.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence

from benchmarks.receiving import receive
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.messages import HEAD, U32, Code, Consumer

COUNT = 1_000
VALUE = b"x" * 100
REQUESTS_IN_FLIGHT = 32
_POLLED = struct.Struct("<IIIQI")  # status, length, partition, newest offset, messages


def create(host: str, port: int, topic: str) -> None:
    """Create the stream ``bench`` and a topic of one partition."""
    with socket.create_connection((host, port)) as peer:
        _ask(peer, Code.CREATE_STREAM, U32.pack(1) + client_codec.name("bench"), fine=(0, 1011))
        number = sum(topic.encode()) * 1_000 + len(topic)
        numbers = b"".join(map(U32.pack, (number, 1, 0)))
        _ask(peer, Code.CREATE_TOPIC, client_codec.ident("bench") + numbers + client_codec.name(topic))


def send_request(topic: str, *, records: int = COUNT, ids: bool = False) -> bytes:
    """Return one SEND_MESSAGES of equal messages to the first partition; with ids, each has a unique one."""
    return request_of(topic, [(number + 1 if ids else 0, VALUE) for number in range(records)])


def request_of(topic: str, messages: Sequence[tuple[int, bytes]]) -> bytes:
    """Return one SEND_MESSAGES of messages with these ids and values to the first partition."""
    encoded = [id_.to_bytes(16, "little") + bytes(4) + U32.pack(len(value)) + value for id_, value in messages]
    return client_codec.request(Code.SEND, _topic(topic) + client_codec.to_partition(1) + b"".join(encoded))


def send_rate(host: str, port: int, topic: str, *, requests: int, ids: bool = False) -> float:
    """Return acknowledged messages per second of one connection that does not wait for replies."""
    request = send_request(topic, ids=ids)
    with socket.create_connection((host, port)) as peer:
        begun = time.perf_counter()
        sender = threading.Thread(target=_send, args=(peer, request, requests))
        sender.start()
        _read_empty(peer, requests)
        took = time.perf_counter() - begun
        sender.join()
    return requests * COUNT / took


def poll_rate(host: str, port: int, topic: str, *, polls: int, requests_sent: int) -> float:
    """Return messages per second of one connection with pipelined polls of a thousand, repeatedly from the start."""
    at = client_codec.place(Consumer(group=False, identifier=1), _topic(topic), 1)
    requests = [
        client_codec.request(Code.POLL, client_codec.poll(at, 1, number % requests_sent * COUNT, COUNT))
        for number in range(polls)
    ]
    with socket.create_connection((host, port)) as peer:
        begun = time.perf_counter()
        _poll_all(peer, requests)
        took = time.perf_counter() - begun
    return polls * COUNT / took


def _topic(topic: str) -> bytes:
    return client_codec.ident("bench") + client_codec.ident(topic)


def _ask(peer: socket.socket, code: int, body: bytes, *, fine: tuple[int, ...] = (0,)) -> None:
    peer.sendall(client_codec.request(code, body))
    status, _ = HEAD.unpack(peer.recv(8, socket.MSG_WAITALL))
    if status not in fine:
        raise AssertionError(f"the broker refused code={code} status={status}")


def _send(peer: socket.socket, request: bytes, requests: int) -> None:
    for _ in range(requests):
        peer.sendall(request)


def _read_empty(peer: socket.socket, expected: int) -> None:
    """Read that many empty successes."""
    left = expected * HEAD.size
    buffer = bytearray(65_536)
    while left:
        size = peer.recv_into(buffer, min(left, len(buffer)))
        if size == 0 or any(memoryview(buffer)[:size]):
            raise AssertionError(f"a send was refused or the broker closed replies_left={left // HEAD.size}")
        left -= size


def _poll_all(peer: socket.socket, requests: list[bytes]) -> None:
    """Keep some polls in flight; every reply must have a thousand messages."""
    buffer = bytearray(4 << 20)
    view = memoryview(buffer)
    peer.sendall(b"".join(requests[:REQUESTS_IN_FLIGHT]))
    sent, answered, filled = min(REQUESTS_IN_FLIGHT, len(requests)), 0, 0
    while answered < len(requests):
        filled += receive(peer, view[filled:])
        position, before = 0, answered
        while filled - position >= _POLLED.size:
            status, length, _, _, count = _POLLED.unpack_from(buffer, position)
            if status or count != COUNT:
                raise AssertionError(f"a poll went wrong status={status} messages={count}")
            if filled - position < HEAD.size + length:
                break
            position += HEAD.size + length
            answered += 1
        buffer[: filled - position] = view[position:filled]
        filled -= position
        more = requests[sent : sent + answered - before]
        if more:
            peer.sendall(b"".join(more))
            sent += len(more)
