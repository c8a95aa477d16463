"""Test doubles of a transport with limited capacity, and of sessions that record their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from socket import socket

from polywire.protocols.runtime.session import Output
from polywire.server.config import HTTP, OFF, WIRES, ServeConfig
from polywire.server.connection import Connection
from polywire.server.hub import ConnectionLimits, Hub
from polywire.server.memory import CHUNK_BYTES
from polywire.testing.loop import SimulatedClock

SILENT = ServeConfig(**dict.fromkeys((*WIRES, HTTP), OFF))  # type: ignore[arg-type]  # each wire is a field of text


class Wire:
    """A transport like asyncio's and uvloop's with a write limit of 0: unsent bytes are reported and buffered."""

    def __init__(self, connection: Connection, host: str = "127.0.0.1") -> None:
        self.connection = connection
        self.host = host
        self.socket: socket | None = None
        self.sent = bytearray()
        self.kept = bytearray()
        self.takes = True
        self.reading = True
        self.closing = False
        self.aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return len(self.kept)

    def get_extra_info(self, name: str) -> object:
        return self.socket if name == "socket" else (self.host, 5)

    def is_closing(self) -> bool:
        return self.closing

    def set_protocol(self, protocol: object) -> None:
        assert protocol is self.connection

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: bytes) -> None:
        self.writelines([data])

    def writelines(self, parts: Sequence[bytes]) -> None:
        if self.takes and not self.kept:
            self.sent += b"".join(parts)
            return
        was = len(self.kept)
        self.kept += b"".join(parts)
        if not was:
            self.connection.pause_writing()

    def take(self) -> None:
        """Let the peer read everything."""
        self.takes = True
        self.sent += self.kept
        self.kept.clear()
        self.connection.resume_writing()
        if self.closing:
            self.connection.connection_lost(None)

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            if not self.kept:
                self.connection.connection_lost(None)

    def abort(self) -> None:
        self.aborted = True
        if not self.closing or self.kept:
            self.closing = True
            self.kept.clear()
            self.connection.connection_lost(None)


class Frames:
    """A session whose frames begin with one byte: their length."""

    frame_bytes_max = 4 * 1024 * 1024

    def __init__(self, output: Output, resume: Callable[[], None]) -> None:
        self.output = output
        self.resume = resume
        self.frames: list[bytes] = []
        self.views: list[memoryview] = []
        self.size = 1
        self.need = 0
        self.blocked = False
        self.owing = False
        self.finished: bytes | None = None
        self.closed = False
        self.drained_count = 0
        self.fails: Exception | None = None
        self.on_receive: Callable[[], None] | None = None

    def receive(self, data: memoryview) -> int:
        if self.on_receive is not None:
            self.on_receive()
        if self.fails is not None:
            raise self.fails
        at = 0
        while len(data) - at >= self.size and not self.blocked:
            self.frames.append(bytes(data[at : at + self.size]))
            at += self.size
            self.blocked = self.frames[-1] == b"!" * self.size
        return at

    @property
    def spoken_dialect(self) -> str:
        return ""

    @property
    def requests(self) -> int:
        return len(self.frames)

    def wanted(self) -> int:
        return self.need

    def paused(self) -> bool:
        return self.blocked

    def owes(self) -> bool:
        return self.blocked or self.owing

    def drained(self) -> None:
        self.drained_count += 1

    def finish(self, data: memoryview) -> None:
        self.finished = bytes(data)

    def close(self) -> None:
        self.closed = True


class FramesWire:
    """A protocol whose connections begin with ``F``."""

    wire = "frames"

    def __init__(self) -> None:
        self.opened: list[Frames] = []

    def recognise(self, prefix: bytes) -> bool | None:
        return prefix.startswith(b"F") if prefix else None

    def open(self, output: Output, resume: Callable[[], None]) -> Frames:
        session = Frames(output, resume)
        self.opened.append(session)
        return session


class LongWire(FramesWire):
    """A protocol whose connections begin with ``Frame``, recognized only when all of it has arrived."""

    wire = "long"

    def recognise(self, prefix: bytes) -> bool | None:
        if len(prefix) < 5:
            return None if b"Frame".startswith(prefix) else False
        return prefix.startswith(b"Frame")


class Place:
    """A server without sockets."""

    def __init__(self, *wires: FramesWire, limits: ConnectionLimits | None = None) -> None:
        self.commits = 0
        self.is_held = False
        self.congested = False
        self.pressure = self
        self.viewed = False
        self.when_asked: Callable[[], None] | None = None
        self.relief: list[Callable[[], None]] = []
        self.wires = wires or (FramesWire(),)
        self.soon: list[Callable[[], None]] = []
        self.clock = SimulatedClock()
        self.hub = Hub(self, limits, soon=self.soon.append, clock=self.clock)

    @property
    def appended(self) -> int:
        """Behave as if every frame produced a record."""
        return sum(len(session.frames) for wire in self.wires for session in wire.opened)

    @property
    def uncommitted(self) -> bool:
        """Return whether a write batch may view received bytes; connections ask while they look for memory."""
        if self.when_asked is not None:
            self.when_asked()
        return self.viewed

    def on_relief(self, callback: Callable[[], None]) -> None:
        self.relief.append(callback)

    def hold(self, holding: bool, /) -> None:
        self.is_held = holding

    def commit(self) -> None:
        self.commits += 1
        self.viewed = False

    def connect(self, host: str = "127.0.0.1") -> Wire:
        connection = Connection(self.hub, self.wires)
        transport = Wire(connection, host)
        connection.connection_made(transport)  # type: ignore[arg-type]
        return transport

    def run_pass(self) -> None:
        """Run the callbacks of the loop's next pass."""
        called, self.soon[:] = list(self.soon), []
        for call in called:
            call()

    @property
    def session(self) -> Frames:
        """Return the only session that was opened."""
        (session,) = [session for wire in self.wires for session in wire.opened]
        return session


def send(transport: Wire, data: bytes) -> None:
    """Deliver bytes in as many reads as the buffers need; a paused connection reads nothing."""
    at = 0
    while at < len(data):
        assert transport.reading, "nothing is read while reading is paused"
        view = transport.connection.get_buffer(-1)
        size = min(len(view), len(data) - at)
        assert size > 0, "the buffer has no capacity"
        view[:size] = data[at : at + size]
        at += size
        transport.connection.buffer_updated(size)


def stalled(place: Place, size: int) -> Wire:
    """Return a connection in the middle of a frame of this size."""
    transport = place.connect()
    session = place.wires[0].opened[-1]
    session.size = session.need = size
    send(transport, b"x" * (size // 2))
    return transport


def taken(place: Place) -> int:
    """Return the size of the buffers that connections hold."""
    return place.hub.memory.arena.out_bytes - CHUNK_BYTES


__all__ = ["Frames", "FramesWire", "LongWire", "Place", "Wire", "send", "stalled", "taken"]
