"""Bare sockets that die in every way, and a polite client that must be served meanwhile. All waits are limited."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from enum import Enum
from types import TracebackType
from typing import Final

from tests.broker_process import BrokerProcess
from tests.processor import loop_seconds

ANSWER_S_MAX: Final = 60.0  # far above what anything takes; a busy machine may take some of it
_LINGER_NOT: Final = struct.pack("ii", 1, 0)


class End(Enum):
    """How a client's socket ends."""

    FIN = "fin"
    """Everything sent is delivered; the kernel answers later bytes of the broker with a reset."""
    RST = "rst"
    """At once, whatever is unread or unsent."""


def connect(broker: BrokerProcess, wire: str) -> socket.socket:
    """Connect; sending and receiving time out."""
    return socket.create_connection(broker.addresses[wire], timeout=ANSWER_S_MAX)


def hang_up(peer: socket.socket, end: End) -> None:
    """Close a connection."""
    if end is End.RST:
        with suppress(OSError):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    peer.close()


def push(peer: socket.socket, data: bytes) -> None:
    """Send as much as the broker accepts without waiting; it may have closed the connection."""
    peer.setblocking(False)
    with suppress(OSError):
        peer.send(data)


class PoliteClient:
    """One FLUX connection that stays open and is served, whatever other clients do."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._socket = connect(broker, "flux")
        self._number = 0
        self._broker = broker
        self.times: list[float] = []
        """Seconds per response."""
        self.held_s = 0.0
        """Maximal processor time of the broker's loop from a request to its response."""

    def produce(self) -> None:
        """Produce a record and read its response."""
        self._number += 1
        begun, used = time.monotonic(), loop_seconds(self._broker)
        self._socket.sendall(b"V1|%d|PRODUCE|polite key:value acks=1\n" % self._number)
        answer = b""
        while not answer.endswith(b"\n"):
            part = self._socket.recv(4096)
            assert part, "the broker closed the connection"
            answer += part
        self.times.append(time.monotonic() - begun)
        self.held_s = max(self.held_s, loop_seconds(self._broker) - used)
        assert answer.startswith(b"V1|%d|OK" % self._number), answer

    def __enter__(self) -> PoliteClient:
        self.produce()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
