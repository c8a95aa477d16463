"""NATS JetStream: a topic is a stream of one subject in files; a follower is a push consumer."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.peers.peer import (
    Address,
    Lines,
    Server,
    Taken,
    connect,
    find,
    free_port,
    receive_until,
    server_process,
)

_LINES_OF_MESSAGE: Final = 2  # its header and its payload
_INBOX: Final = b"_INBOX.bench"


class Nats:
    """One server with JetStream."""

    name = "NATS JetStream"
    pushes = True

    @contextmanager
    def running(self, place: Path) -> Iterator[Server]:
        """See Peer: file storage syncs every two minutes by default."""
        port = free_port()
        words = ["-js", "-a", "127.0.0.1", "-p", str(port), "-sd", str(place)]
        with server_process([find("nats-server", "nats-server"), *words], port, place) as server:
            yield server

    def create(self, address: Address, topic: str) -> None:
        """See Peer: also creates a consumer, which sends nothing before a client subscribes."""
        stream = {"name": topic, "subjects": [topic], "storage": "file"}
        ask(address, f"$JS.API.STREAM.CREATE.{topic}", stream)
        config = {"durable_name": "bench", "deliver_subject": f"to.{topic}", "ack_policy": "none"}
        consumer = {"stream_name": topic, "config": {**config, "deliver_policy": "all"}}
        ask(address, f"$JS.API.CONSUMER.DURABLE.CREATE.{topic}.bench", consumer)

    def producer(self, address: Address, topic: str) -> socket.socket:
        """See Peer."""
        peer = greeted(address)
        peer.sendall(b"SUB %s 1\r\n" % _INBOX)
        return peer

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """See Peer: one message per record."""
        return b"".join(b"PUB %s %s %d\r\n%s\r\n" % (topic.encode(), _INBOX, len(value), value) for value in values)

    def confirmations(self) -> Callable[[memoryview], int]:
        """See Peer: each is a message to the inbox."""
        lines = Lines(_LINES_OF_MESSAGE)

        def count(received: memoryview) -> int:
            if b'"error"' in bytes(received[:300]):
                raise AssertionError(f"refused answer={bytes(received[:300])!r}")
            return lines.count(received)

        return count

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, Pushed]:
        """See Peer."""
        peer = greeted(address)
        peer.sendall(b"SUB to.%s 1\r\n" % topic.encode())
        return peer, Pushed()


class Pushed:
    """Receives pushed messages."""

    def __init__(self) -> None:
        self._lines: Final = Lines(_LINES_OF_MESSAGE)

    def take(self, received: memoryview) -> Taken:
        """See Follower."""
        return Taken(self._lines.count(received))


def greeted(address: Address) -> socket.socket:
    """Return a connection after the server's greeting."""
    peer = connect(address)
    peer.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
    receive_until(peer, lambda found: found.endswith(b"PONG\r\n"))
    return peer


def ask(address: Address, subject: str, request: object) -> None:
    """Send a request to the server's API. Raises AssertionError if it is refused."""
    body = json.dumps(request).encode()
    with closing(greeted(address)) as peer:
        peer.sendall(b"SUB %s 1\r\nPUB %s %s %d\r\n%s\r\n" % (_INBOX, subject.encode(), _INBOX, len(body), body))
        answer = receive_until(peer, lambda found: found.count(b"\n") >= _LINES_OF_MESSAGE)
    if b'"error"' in answer:
        raise AssertionError(f"refused subject={subject!r} answer={answer!r}")
