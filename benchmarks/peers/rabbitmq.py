"""RabbitMQ Streams over the stream protocol: records in chunks, with one credit returned for each."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Final

from benchmarks.peers.peer import (
    Address,
    Frames,
    Server,
    Taken,
    connect,
    find,
    free_port,
    receive_until,
    server_process,
)

CREDIT: Final = 10  # chunks in flight to a follower
_OK: Final = 1
_VERSION: Final = 1
_RECORDS_AT: Final = 9  # of a Deliver, after key, version, subscription, magic, kind and entries: a count of records


class Key(IntEnum):
    """Commands of the stream protocol."""

    DECLARE_PUBLISHER = 1
    PUBLISH = 2
    PUBLISH_CONFIRM = 3
    PUBLISH_ERROR = 4
    SUBSCRIBE = 7
    DELIVER = 8
    CREDIT = 9
    CREATE = 13
    PEER_PROPERTIES = 17
    SASL_HANDSHAKE = 18
    SASL_AUTHENTICATE = 19
    TUNE = 20
    OPEN = 21


@contextmanager
def node(place: Path, settings: str, port: int, *, plugins: str, asked: Callable[[Address], None]) -> Iterator[Server]:
    """Start one node over an empty directory. ``settings`` name its listeners, ``plugins`` those that are enabled.

    Raises Absent.
    """
    program = find("rabbitmq-server", "rabbitmq-server")
    epmd, distribution = free_port(), free_port()
    (place / "rabbitmq.conf").write_text(settings + "loopback_users.guest = false\n")
    (place / "plugins").write_text(f"[{plugins}].\n")
    environment = {
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_MNESIA_BASE": str(place / "mnesia"),
        "RABBITMQ_LOG_BASE": str(place / "log"),
        "RABBITMQ_CONFIG_FILE": str(place / "rabbitmq"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "plugins"),
        "RABBITMQ_PID_FILE": str(place / "pid"),
        "RABBITMQ_DIST_PORT": str(distribution),
        "ERL_EPMD_PORT": str(epmd),
        "ERL_EPMD_RELAXED_COMMAND_CHECK": "1",  # it may be stopped while it knows a node
        "HOME": str(place),
    }
    direct = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # the one on the PATH changes the user first
    command = [str(direct) if direct.exists() else program]
    try:
        with server_process(command, port, place, environment=environment, asked=asked) as server:
            yield server
    finally:
        subprocess.run(["epmd", "-kill"], env={**os.environ, **environment}, capture_output=True, check=False)


class RabbitMQ:
    """One node with the stream plugin."""

    name = "RabbitMQ Streams"
    pushes = True

    @contextmanager
    def running(self, place: Path) -> Iterator[Server]:
        """See Peer: streams are written to files and not synced."""
        port, amqp = free_port(), free_port()
        settings = f"stream.listeners.tcp.1 = 127.0.0.1:{port}\nlisteners.tcp.1 = 127.0.0.1:{amqp}\n"
        with node(place, settings, port, plugins="rabbitmq_stream", asked=_greet) as server:
            yield server

    def create(self, address: Address, topic: str) -> None:
        """See Peer."""
        with closing(_greeted(address)) as peer:
            _ask(peer, Key.CREATE, _string(topic) + struct.pack(">I", 0))

    def producer(self, address: Address, topic: str) -> socket.socket:
        """See Peer."""
        peer = _greeted(address)
        _ask(peer, Key.DECLARE_PUBLISHER, b"\0" + _string("") + _string(topic))
        return peer

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """See Peer."""
        records = b"".join(struct.pack(">QI", number, len(value)) + value for number, value in enumerate(values))
        return _frame(Key.PUBLISH, b"\0" + struct.pack(">I", len(values)) + records)

    def confirmations(self) -> Callable[[memoryview], int]:
        """See Peer: a frame confirms several."""
        frames = Frames()

        def count(received: memoryview) -> int:
            found = 0
            for frame in frames.cut(received):
                key, _, _, records = struct.unpack_from(">HHBI", frame)
                if key == Key.PUBLISH_ERROR:
                    raise AssertionError("a record was refused")
                found += records if key == Key.PUBLISH_CONFIRM else 0
            return found

        return count

    def follow(self, address: Address, topic: str) -> tuple[socket.socket, Chunks]:
        """See Peer."""
        peer = _greeted(address)
        first = 1  # offset specification
        peer.sendall(
            _frame(Key.SUBSCRIBE, struct.pack(">IB", 1, 0) + _string(topic) + struct.pack(">HHI", first, CREDIT, 0))
        )
        return peer, Chunks()


class Chunks:
    """Receives chunks that are pushed while there is credit."""

    def __init__(self) -> None:
        self._frames: Final = Frames()

    def take(self, received: memoryview) -> Taken:
        """See Follower."""
        records = chunks = 0
        for frame in self._frames.cut(received):
            if int.from_bytes(frame[:2], "big") == Key.DELIVER:
                records += struct.unpack_from(">I", frame, _RECORDS_AT)[0]
                chunks += 1
        return Taken(records, _frame(Key.CREDIT, struct.pack(">BH", 0, chunks)) if chunks else b"")


def _greet(address: Address) -> None:
    _greeted(address).close()


def _greeted(address: Address) -> socket.socket:
    peer = connect(address)
    _ask(peer, Key.PEER_PROPERTIES, struct.pack(">I", 0))
    _ask(peer, Key.SASL_HANDSHAKE, b"")
    secret = b"\0guest\0guest"
    _ask(peer, Key.SASL_AUTHENTICATE, _string("PLAIN") + struct.pack(">I", len(secret)) + secret, tuned=True)
    peer.sendall(_frame(Key.TUNE, struct.pack(">II", 1 << 20, 0)))
    _ask(peer, Key.OPEN, _string("/"))
    return peer


def _ask(peer: socket.socket, key: Key, body: bytes, *, tuned: bool = False) -> None:
    """Send a request and read its response, and the server's tuning after it."""
    peer.sendall(_frame(key, struct.pack(">I", 1) + body))
    answer = receive_until(peer, lambda found: len(_whole(found)) >= 1 + tuned)
    code = int.from_bytes(_whole(answer)[0][8:10], "big")
    if code != _OK:
        raise AssertionError(f"refused command={key.name} code={code}")


def _whole(received: bytes) -> list[bytes]:
    return [bytes(frame) for frame in Frames().cut(memoryview(received))]


def _frame(key: Key, body: bytes) -> bytes:
    return struct.pack(">IHH", 4 + len(body), key, _VERSION) + body


def _string(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()
