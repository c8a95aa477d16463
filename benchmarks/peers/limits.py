"""Limits of this machine, by the smallest programs: echoes, a loopback stream, a memory copy, a sequential read.

They are measured by the same generator as the brokers, in the same turns.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from benchmarks.flux_load import serve_echo
from benchmarks.peers.peer import Address, Lines, Server, Taken, connect
from polywire.records.allocation import allocate_lasting

CHUNK: Final = 1 << 20
STREAM_BYTES: Final = 1 << 30
COPY_BYTES: Final = 64 << 20
FILE_BYTES: Final = 256 << 20
COPIES: Final = 8
_FOLLOW: Final = b"follow\n"


class Echo:
    """A program that returns every line. Implements Peer; ``served`` is what its process runs."""

    pushes = True

    def __init__(self, name: str, served: Callable[[Connection], None]) -> None:
        self.name: Final = name
        self._served: Final = served

    @contextmanager
    def running(self, place: Path) -> Iterator[Server]:
        """See Peer."""
        with _child(self._served) as (process, pipe):
            address: Address = pipe.recv()
            assert process.pid is not None, "it has responded"
            yield Server(address, process.pid)

    def create(self, address: Address, topic: str) -> None:
        """See Peer: there is nothing to create."""

    def producer(self, address: Address, topic: str) -> socket.socket:
        """See Peer."""
        return connect(address)

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """See Peer: a line for each value."""
        return b"".join(value + b"\n" for value in values)

    def confirmations(self) -> Callable[[memoryview], int]:
        """See Peer."""
        return Lines(1).count

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, EchoFollower]:
        """See Peer: for ``relay`` only."""
        peer = connect(address)
        peer.sendall(_FOLLOW)
        return peer, EchoFollower()


class EchoFollower:
    """Receives the lines of other connections."""

    def __init__(self) -> None:
        self._lines: Final = Lines(1)

    def take(self, received: memoryview) -> Taken:
        """See Follower."""
        return Taken(self._lines.count(received))


def relay(pipe: Connection) -> None:
    """Return what every connection sends, also to followers: ``epoll`` and two system calls per line."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname())
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    peers: dict[int, socket.socket] = {}
    followers: set[int] = set()
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in peers:
                _pass_on(descriptor, peers, followers)
                continue
            peer = listener.accept()[0]
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peers[peer.fileno()] = peer
            poll.register(peer, select.EPOLLIN)


def _pass_on(descriptor: int, peers: dict[int, socket.socket], followers: set[int]) -> None:
    """Read what a connection has sent, and send it to its receivers."""
    try:
        received = peers[descriptor].recv(1 << 16)
    except ConnectionError:  # as brokers do: it ends one connection
        received = b""
    if not received:
        followers.discard(descriptor)
        peers.pop(descriptor).close()  # which also removes it from epoll
    elif received == _FOLLOW:
        followers.add(descriptor)
    else:
        for other in (descriptor, *followers):
            with suppress(ConnectionError):  # epoll drops it, too
                peers[other].sendall(received)


EPOLL_ECHO: Final = Echo("limit: bare epoll echo", relay)
UVLOOP_ECHO: Final = Echo("limit: bare uvloop echo", serve_echo)


def stream_bytes_per_s() -> float:
    """Return the throughput between two processes over loopback, a MiB at a time."""
    with _child(_send_stream) as (_, pipe), closing(socket.create_connection(pipe.recv())) as peer:
        buffer = memoryview(allocate_lasting(4 * CHUNK))
        left = STREAM_BYTES
        begun = time.perf_counter()
        while left > 0:
            size = peer.recv_into(buffer)
            assert size, "the sender waits until all was read"
            left -= size
        return STREAM_BYTES / (time.perf_counter() - begun)


def copy_bytes_per_s() -> float:
    """Return the throughput of one core copying memory, larger than its caches."""
    source, target = (memoryview(allocate_lasting(COPY_BYTES)) for _ in range(2))
    source[:] = bytes(COPY_BYTES)
    target[:] = source
    begun = time.perf_counter()
    for _ in range(COPIES):
        target[:] = source
    return COPIES * COPY_BYTES / (time.perf_counter() - begun)


def read_bytes_per_s(place: Path) -> float:
    """Return the throughput of a sequential read of an uncached file through the page cache, 4 MiB at a time."""
    with tempfile.NamedTemporaryFile(dir=place) as file:
        content = os.urandom(CHUNK)
        for _ in range(FILE_BYTES // CHUNK):
            file.write(content)
        file.flush()
        drop_from_cache(Path(file.name))
        buffer = memoryview(allocate_lasting(4 * CHUNK))
        begun = time.perf_counter()
        for position in range(0, FILE_BYTES, len(buffer)):
            os.preadv(file.fileno(), [buffer], position)
        return FILE_BYTES / (time.perf_counter() - begun)


def drop_from_cache(path: Path) -> None:
    """Write a file to the disk, and drop it from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _send_stream(pipe: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname())
        peer = listener.accept()[0]
    content = memoryview(bytes(CHUNK))
    with closing(peer):
        for _ in range(STREAM_BYTES // CHUNK):
            peer.sendall(content)
        peer.recv(1)  # until it was read


@contextmanager
def _child(served: Callable[[Connection], None]) -> Iterator[tuple[BaseProcess, Connection]]:
    """Start a process that runs this and sends its port through the pipe."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=served, args=(theirs,), daemon=True)
    process.start()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
