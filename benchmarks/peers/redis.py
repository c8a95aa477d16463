"""Redis Streams: a stream is one key, a record one entry with one field."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers.peer import Address, Lines, Server, Taken, connect, find, free_port, server_process

ENTRIES: Final = 1000  # of one read
_LINES_OF_ENTRY: Final = 8  # *2, $n, id, *2, $1, its field, $n, its value
_LINES_BEFORE: Final = 5  # *1, *2, $n, stream, *entries
_WORDS_AFTER_ID: Final = 6  # *2, $1, field, $n, value, and the empty rest after the last line's end


@dataclass(frozen=True, slots=True)
class Redis:
    """Redis, or a compatible broker."""

    name: str = "Redis Streams"
    program: str = "redis-server"
    package: str = "redis-server"
    pushes: bool = True

    @contextmanager
    def running(self, place: Path) -> Iterator[Server]:
        """See Peer: every command is appended to its file, which is not synced."""
        port = free_port()
        words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(place), "--save", ""]
        words += ["--appendonly", "yes", "--appendfsync", "no", "--daemonize", "no"]
        with server_process([find(self.program, self.package), *words], port, place) as server:
            yield server

    def create(self, address: Address, topic: str) -> None:
        """See Peer: the first entry creates it."""

    def producer(self, address: Address, topic: str) -> socket.socket:
        """See Peer."""
        return connect(address)

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """See Peer: one command per entry, pipelined."""
        return b"".join(_command(b"XADD", topic.encode(), b"*", b"v", value) for value in values)

    def confirmations(self) -> Callable[[memoryview], int]:
        """See Peer: an id is a bulk string of two lines."""
        lines = Lines(2)

        def count(received: memoryview) -> int:
            if bytes(received[:1]) == b"-":
                raise AssertionError(f"refused answer={bytes(received[:200])!r}")
            return lines.count(received)

        return count

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, Reader]:
        """See Peer."""
        peer = connect(address)
        peer.sendall(_read(topic, b"0-0"))
        return peer, Reader(topic)


class Reader:
    """Sends XREAD after XREAD, each after the last id of the previous one."""

    def __init__(self, topic: str) -> None:
        self._topic: Final = topic
        self._pending = bytearray()
        self._lines = 0

    def take(self, received: memoryview) -> Taken:
        """See Follower."""
        self._pending += received
        self._lines += bytes(received).count(b"\n")
        if self._lines < _LINES_BEFORE:
            return Taken(0)
        entries = int(bytes(self._pending[:200]).split(b"\r\n", _LINES_BEFORE)[_LINES_BEFORE - 1][1:])
        if self._lines < _LINES_BEFORE + entries * _LINES_OF_ENTRY:
            return Taken(0)
        last = self._pending.rsplit(b"\r\n", _WORDS_AFTER_ID)[0].rpartition(b"\n")[2]
        self._pending.clear()
        self._lines = 0
        return Taken(entries, _read(self._topic, bytes(last)))


def _read(topic: str, last: bytes) -> bytes:
    return _command(b"XREAD", b"COUNT", b"%d" % ENTRIES, b"BLOCK", b"0", b"STREAMS", topic.encode(), last)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
