"""Load over FLUX: pipelined produce, and single requests next to a bare echo.

The requests of the pipelined load are encoded before the clock starts. Every reply is counted and must be an OK: a
broker that refuses quickly would look fast.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import cast

import uvloop

VALUE = b"x" * 100
REQUESTS_PER_BUFFER = 5_000


def pipelined_rate(host: str, port: int, topic: str, *, requests: int) -> float:
    """Return requests per second of one connection that never waits for a reply."""
    lines = [
        b"V1|%d|PRODUCE|%s key-%d:%s\n" % (number, topic.encode(), number % 64, VALUE)
        for number in range(REQUESTS_PER_BUFFER)
    ]
    buffer = b"".join(lines)
    rounds = max(1, requests // REQUESTS_PER_BUFFER)
    with socket.create_connection((host, port)) as peer:
        begun = time.perf_counter()
        sender = threading.Thread(target=_send, args=(peer, buffer, rounds))
        sender.start()
        good = _count_good_replies(peer, rounds * REQUESTS_PER_BUFFER)
        took = time.perf_counter() - begun
        sender.join()
    if good != rounds * REQUESTS_PER_BUFFER:
        raise AssertionError(f"some requests were refused good={good} requests={rounds * REQUESTS_PER_BUFFER}")
    return rounds * REQUESTS_PER_BUFFER / took


def lone_latency_us(host: str, port: int, topic: str, *, requests: int) -> float:
    """Return the median time of one PRODUCE and its reply, in microseconds, one request in flight."""
    request = b"V1|1|PRODUCE|%s key:%s\n" % (topic.encode(), VALUE)
    return round_trip_us(host, port, request, requests=requests)


def round_trip_us(host: str, port: int, request: bytes, *, requests: int) -> float:
    """Return the median round trip of a one-line request, in microseconds."""
    times: list[int] = []
    with socket.create_connection((host, port)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(requests):
            begun = time.perf_counter_ns()
            peer.sendall(request)
            reply = peer.recv(65_536)
            times.append(time.perf_counter_ns() - begun)
            if not reply.endswith(b"\n") or b"|ERR|" in reply:
                raise AssertionError(f"an unexpected reply reply={reply!r}")
    return statistics.median(times) / 1000


class EchoProcess:
    """A bare uvloop echo in its own process: the minimum of any round trip here."""

    def __enter__(self) -> tuple[str, int]:
        ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=serve_echo, args=(theirs,), daemon=True)
        self._process.start()
        address: tuple[str, int] = ours.recv()
        return address

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio.Transport
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


def serve_echo(pipe: Connection) -> None:
    """Echo on a port that is sent through the pipe, until the process is killed."""

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Echo, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname())
        await server.serve_forever()

    uvloop.run(serve())


def _send(peer: socket.socket, buffer: bytes, rounds: int) -> None:
    for _ in range(rounds):
        peer.sendall(buffer)


def _count_good_replies(peer: socket.socket, expected: int) -> int:
    """Read until ``expected`` lines have arrived; return how many of them are OK."""
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    mark = b"|OK|"
    seen = good = 0
    end = b""  # of the previous piece: a marker may be split
    while seen < expected:
        size = peer.recv_into(buffer)
        if size == 0:
            raise AssertionError(f"the broker closed early replies={seen}")
        piece = end + view[:size]
        seen += piece.count(b"\n", len(end))
        good += piece.count(mark)
        end = piece[1 - len(mark) :]
    return good
