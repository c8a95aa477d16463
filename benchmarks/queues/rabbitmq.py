"""Quorum queues of RabbitMQ over AMQP 0-9-1, on one node."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.peers.peer import Address, Server, connect, free_port, receive_until
from benchmarks.peers.rabbitmq import node
from benchmarks.queues.peer import Step

_METHOD, _HEADER, _BODY = 1, 2, 3  # types of frames
_END: Final = b"\xce"
_FRAME: Final = struct.Struct(">BHI")
_OPENING: Final = b"AMQP\0\0\x09\x01"
_PERSISTENT: Final = struct.pack(">HB", 0x1000, 2)  # properties of a message: the delivery mode
_DELIVER: Final = struct.pack(">HH", 60, 60)
_ACK: Final = struct.pack(">HH", 60, 80)
_CLOSED: Final = (struct.pack(">HH", 10, 50), struct.pack(">HH", 20, 40), struct.pack(">HH", 60, 120))
_TAG: Final = struct.Struct(">QB")


class RabbitQueue:
    """One node. It syncs records and acknowledgements to the disk together, but does not confirm acknowledgements."""

    name = "RabbitMQ quorum queue"
    confirms = False

    @contextmanager
    def running(self, place: Path) -> Iterator[Server]:
        """See QueuePeer."""
        port = free_port()
        with node(place, f"listeners.tcp.1 = 127.0.0.1:{port}\n", port, plugins="", asked=_greet) as server:
            yield server

    def create(self, address: Address, topic: str) -> None:
        """See QueuePeer."""
        kind = _short("x-queue-type") + b"S" + _long("quorum")
        with closing(_opened(address)) as peer:
            durable = 2
            _ask(peer, 50, 10, struct.pack(">H", 0) + _short(topic) + bytes([durable]) + _long(kind))

    def producer(self, address: Address, topic: str) -> socket.socket:
        """See QueuePeer."""
        peer = _opened(address)
        _ask(peer, 85, 10, b"\0")
        return peer

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """See QueuePeer: one message for each record."""
        publish = _method(60, 40, struct.pack(">H", 0) + _short("") + _short(topic) + b"\0")
        return b"".join(
            publish + _frame(_HEADER, struct.pack(">HHQ", 60, 0, len(value)) + _PERSISTENT) + _frame(_BODY, value)
            for value in values
        )

    def confirmations(self) -> Callable[[memoryview], int]:
        """See QueuePeer: a frame may confirm all messages up to one."""
        frames = _Frames()
        confirmed: set[int] = set()
        first = 1  # lowest number that is not confirmed

        def count(received: memoryview) -> int:
            nonlocal first
            before = first + len(confirmed)
            for _, body in frames.cut(received):
                assert body.startswith(_ACK), f"refused answer={body!r}"
                tag, multiple = _TAG.unpack_from(body, 4)
                if multiple:
                    first = max(first, tag + 1)
                    confirmed.difference_update([number for number in confirmed if number < first])
                else:
                    confirmed.add(tag)
                while first in confirmed:
                    confirmed.remove(first)
                    first += 1
            return first + len(confirmed) - before

        return count

    def worker(
        self, address: Address, topic: str, number: int, *, prefetch: int, single: bool
    ) -> tuple[socket.socket, RabbitWorker]:
        """See QueuePeer."""
        peer = _opened(address)
        _ask(peer, 60, 10, struct.pack(">IHB", 0, prefetch, 0))
        return peer, RabbitWorker(topic)


class RabbitWorker:
    """Consumes, and acknowledges each message with its own frame."""

    def __init__(self, topic: str) -> None:
        self._topic: Final = topic
        self._frames: Final = _Frames()

    def begin(self) -> bytes:
        """See Worker."""
        return _method(60, 20, struct.pack(">H", 0) + _short(self._topic) + _short("c") + b"\0" + _long(b""))

    def take(self, received: memoryview) -> Step:
        """See Worker."""
        acks: list[bytes] = []
        for kind, body in self._frames.cut(received):
            if kind != _METHOD:
                continue
            if body.startswith(_DELIVER):
                (tag,) = struct.unpack_from(">Q", body, 5 + body[4])
                acks.append(_frame(_METHOD, _ACK + _TAG.pack(tag, 0)))
            elif body[:4] in _CLOSED:
                raise AssertionError(f"refused answer={body!r}")
        return Step(len(acks), b"".join(acks))


class _Frames:
    """Splits received bytes into (type, body)."""

    def __init__(self) -> None:
        self._pending = b""

    def cut(self, received: memoryview) -> Iterator[tuple[int, bytes]]:
        data = self._pending + bytes(received)
        at = 0
        while len(data) - at >= _FRAME.size:
            kind, _, size = _FRAME.unpack_from(data, at)
            end = at + _FRAME.size + size + len(_END)
            if end > len(data):
                break
            yield kind, data[at + _FRAME.size : end - len(_END)]
            at = end
        self._pending = data[at:]


def _greet(address: Address) -> None:
    _opened(address).close()


def _opened(address: Address) -> socket.socket:
    """Return a connection with an open channel."""
    peer = connect(address)
    peer.sendall(_OPENING)
    _receive(peer)
    login = _long(b"") + _short("PLAIN") + _long("\0guest\0guest") + _short("en_US")
    peer.sendall(_method(10, 11, login, channel=0))
    tuned = _receive(peer)
    channels, frame_bytes, _ = struct.unpack_from(">HIH", tuned, 4)
    peer.sendall(_method(10, 31, struct.pack(">HIH", channels, frame_bytes, 0), channel=0))
    _ask(peer, 10, 40, _short("/") + b"\0\0", channel=0)
    _ask(peer, 20, 10, b"\0")
    return peer


def _ask(peer: socket.socket, kind: int, method: int, arguments: bytes, *, channel: int = 1) -> None:
    """Call a method. Its response has the next number."""
    peer.sendall(_method(kind, method, arguments, channel=channel))
    answer = _receive(peer)
    if answer[:4] != struct.pack(">HH", kind, method + 1):
        raise AssertionError(f"refused method={kind}.{method} answer={answer!r}")


def _receive(peer: socket.socket) -> bytes:
    """Return the body of one frame."""
    found = receive_until(peer, lambda found: any(_Frames().cut(memoryview(found))))
    return next(iter(_Frames().cut(memoryview(found))))[1]


def _method(kind: int, method: int, arguments: bytes, *, channel: int = 1) -> bytes:
    return _frame(_METHOD, struct.pack(">HH", kind, method) + arguments, channel=channel)


def _frame(kind: int, body: bytes, *, channel: int = 1) -> bytes:
    return _FRAME.pack(kind, channel, len(body)) + body + _END


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _long(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack(">I", len(data)) + data
