"""The readiness driver over real sockets, one pass at a time."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polywire.server.connection import Connection
from polywire.server.listener import ReadinessServer
from polywire.server.readiness import PASSES_MAX, READY_MAX, ReadinessDriver, is_available
from polywire.server.scheduling import IdlePoll
from tests.unit.server.peers import FramesWire, Place

pytestmark = pytest.mark.skipif(not is_available(), reason="there is no epoll here")

MUCH = 4 * 1024 * 1024  # more than the kernel buffers for one peer that does not read
READ_BYTES = 1024


class PassLoop:
    """The part of a loop that the driver uses; a test runs its passes."""

    def __init__(self) -> None:
        self.soon: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.later: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.readers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self.reported: list[BaseException] = []

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.soon.append((callback, args))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        self.later.append((callback, args))

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        self.readers[fd] = callback, args

    def remove_reader(self, fd: int) -> bool:
        return self.readers.pop(fd, None) is not None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.reported.append(context["exception"])

    def make_pass(self) -> None:
        """Run one pass: call the readable sockets, then the callbacks scheduled before."""
        ready = select.select(list(self.readers), [], [], 0)[0]
        soon, self.soon = self.soon, []
        for callback, args in [*(self.readers[fd] for fd in ready), *soon]:
            callback(*args)


class Protocol:
    """Records the calls it gets."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.content = bytearray()
        self.notified: list[str] = []
        self.lost: list[Exception | None] = []
        self.memory = memoryview(bytearray(READ_BYTES))
        self.keeps_open = True
        self.when_read: Callable[[], object] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.memory

    def received(self, count: int) -> None:
        self.content += self.memory[:count]
        self.notified.append("bytes")
        if self.when_read is not None:
            self.when_read()

    def eof_received(self) -> bool:
        self.notified.append("end")
        return self.keeps_open

    def pause_writing(self) -> None:
        self.notified.append("full")

    def resume_writing(self) -> None:
        self.notified.append("taken")

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)


class Served:
    """A driver, and peers that it serves."""

    def __init__(self) -> None:
        self.place = Place()
        self.loop = PassLoop()
        self.idle = IdlePoll(self.loop, self.place.clock, limit_us=0)  # type: ignore[arg-type]  # it never polls
        self.place.hub.idle = self.idle  # type: ignore[misc]
        self.driver = ReadinessDriver(self.place.hub, self.loop)
        self.sockets: list[socket.socket] = []

    def connect(self, protocol: Any) -> socket.socket:
        """Return the peer's end of a new socket."""
        peer, accepted = socket.socketpair()
        peer.settimeout(5)
        self.driver.accepted(accepted, ("10.0.0.1", 7), protocol)
        self.sockets += [peer, accepted]
        return peer

    def connected(self) -> tuple[socket.socket, Protocol]:
        protocol = Protocol()
        return self.connect(protocol), protocol

    def passes(self, count: int = 3) -> None:
        for _ in range(count):
            self.loop.make_pass()

    @property
    def is_ready(self) -> bool:
        """Return whether a loop would call the driver again at once."""
        return bool(select.select(list(self.loop.readers), [], [], 0)[0])


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.driver.close()
    made.idle.poll()
    for one in made.sockets:
        one.close()


def test_all_ready_sockets_are_read_before_one_commit(served: Served) -> None:
    peers = [served.connected() for _ in range(5)]
    for number, (peer, _) in enumerate(peers):
        peer.sendall(b"request %d" % number)
    held: list[bool] = []
    for _, protocol in peers:
        protocol.when_read = lambda: held.append(served.place.is_held)
    served.loop.make_pass()
    assert held == [True] * 5, "a commit follows anyway, so none is scheduled"
    assert [bytes(protocol.content) for _, protocol in peers] == [b"request %d" % number for number in range(5)]
    assert served.place.commits == 1
    assert not served.place.is_held


def test_more_sockets_than_fit_in_a_pass_are_all_read(served: Served) -> None:
    peers = [served.connected() for _ in range(READY_MAX + 3)]
    for peer, _ in peers:
        peer.sendall(b"x")
    served.passes(2)
    assert all(protocol.content == b"x" for _, protocol in peers)


def test_a_socket_is_read_once_per_pass(served: Served) -> None:
    (much, greedy), (little, modest) = served.connected(), served.connected()
    much.sendall(bytes(10 * READ_BYTES))
    little.sendall(b"me too")
    served.loop.make_pass()
    assert len(greedy.content) == READ_BYTES
    assert modest.content == b"me too"
    served.passes(9)
    assert len(greedy.content) == 10 * READ_BYTES


def test_unsent_bytes_wait_and_pause_the_connection(served: Served) -> None:
    peer, protocol = served.connected()
    sent = bytes(range(256)) * (MUCH // 256)
    protocol.transport.write(sent)
    assert protocol.notified == ["full"]
    assert 0 < protocol.transport.get_write_buffer_size() < MUCH
    protocol.transport.write(b"behind it")
    protocol.transport.writelines([b"and", b" more"])
    received = bytearray()
    while len(received) < MUCH + 17:
        received += peer.recv(MUCH)
        served.loop.make_pass()
    assert received == sent + b"behind itand more"
    assert protocol.notified == ["full", "taken"]
    assert protocol.transport.get_write_buffer_size() == 0
    assert not served.is_ready, "the socket is writable, but there is nothing to write"


def test_many_parts_are_sent_in_order(served: Served) -> None:
    peer, protocol = served.connected()
    parts = [b"%06d" % number for number in range(3000)]
    protocol.transport.writelines([*parts[:1500], b"", memoryview(b"".join(parts[1500:]))])
    assert peer.recv(1 << 20, socket.MSG_WAITALL | socket.MSG_PEEK)[:18000] == b"".join(parts)
    protocol.transport.writelines([bytes(MUCH), b"last"])
    assert protocol.notified == ["full"]
    protocol.transport.abort()


def test_a_paused_socket_is_not_read_and_does_not_wake_the_loop(served: Served) -> None:
    peer, protocol = served.connected()
    protocol.transport.pause_reading()
    peer.sendall(b"later")
    served.passes()
    assert not protocol.content
    assert not served.is_ready
    protocol.transport.resume_reading()
    served.loop.make_pass()
    assert protocol.content == b"later"


def test_the_end_of_the_stream_is_reported_once_and_responses_are_sent(served: Served) -> None:
    peer, protocol = served.connected()
    peer.sendall(b"last words")
    peer.shutdown(socket.SHUT_WR)
    served.passes()
    assert protocol.notified == ["bytes", "end"]
    assert not served.is_ready
    protocol.transport.write(b"answer")
    protocol.transport.close()
    served.passes()
    assert peer.recv(100) == b"answer"
    assert peer.recv(100) == b""
    assert protocol.lost == [None]


def test_a_connection_that_does_not_stay_open_is_closed_at_the_end(served: Served) -> None:
    peer, protocol = served.connected()
    protocol.keeps_open = False
    peer.shutdown(socket.SHUT_WR)
    served.passes()
    assert protocol.lost == [None]
    assert peer.recv(1) == b""


def test_closing_waits_for_unsent_bytes(served: Served) -> None:
    peer, protocol = served.connected()
    protocol.transport.write(bytes(MUCH))
    protocol.transport.close()
    protocol.transport.write(b"too late")
    count = 0
    while data := peer.recv(MUCH):
        count += len(data)
        served.passes()
    assert count == MUCH
    assert protocol.lost == [None]
    assert not protocol.content


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("owes", [b"", bytes(MUCH)], ids=["nothing", "much"])
def test_a_lost_connection_is_reported_once(served: Served, owes: bytes, is_paused: bool) -> None:
    peer, protocol = served.connected()
    _, bystander = served.connected()
    protocol.transport.write(b"unread" + owes)
    if is_paused:
        protocol.transport.pause_reading()
    peer.close()
    served.passes()
    assert not served.is_ready
    protocol.transport.resume_reading()
    served.passes()
    if not protocol.lost:
        protocol.transport.abort()
        served.passes()
    assert len(protocol.lost) == 1
    assert not served.is_ready
    assert not bystander.lost


def test_a_reset_is_an_error_when_it_is_read(served: Served) -> None:
    protocol = Protocol()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = socket.create_connection(listening.getsockname())
        accepted, name = listening.accept()
    served.driver.accepted(accepted, name, protocol)
    assert protocol.transport.get_extra_info("peername") == peer.getsockname()
    assert protocol.transport.get_extra_info("sockname") == peer.getpeername()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.close()
    served.passes()
    assert [type(error) for error in protocol.lost] == [ConnectionResetError]


def test_a_failing_connection_is_closed_alone(served: Served) -> None:
    (peer, broken), (other, sound) = served.connected(), served.connected()
    broken.when_read = lambda: 1 // 0
    peer.sendall(b"x")
    other.sendall(b"y")
    served.passes()
    assert [type(error) for error in broken.lost] == [ZeroDivisionError]
    assert [type(error) for error in served.loop.reported] == [ZeroDivisionError]
    assert sound.content == b"y"
    assert not sound.lost


def test_a_failing_pass_is_still_committed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit must release the log: while it is held no other commit runs."""

    def report(context: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(served.loop, "call_exception_handler", report)
    broken = Protocol()
    broken.when_read = lambda: 1 / 0
    served.connect(broken).sendall(b"x")
    with pytest.raises(KeyboardInterrupt):
        served.driver.make_pass()
    assert served.place.commits == 1
    assert not served.place.is_held


def test_a_connection_closed_during_a_pass_is_not_read_in_it(served: Served) -> None:
    (first, one), (second, other) = served.connected(), served.connected()
    one.when_read, other.when_read = (lambda: other.transport.abort()), (lambda: one.transport.abort())
    first.sendall(b"x")
    second.sendall(b"y")
    served.passes()
    assert sorted([bytes(one.content), bytes(other.content)]) in ([b"", b"x"], [b"", b"y"])
    assert len(one.lost) + len(other.lost) == 1


def test_a_real_connection_is_served(served: Served) -> None:
    wire = FramesWire()
    peer = served.connect(Connection(served.place.hub, [wire]))
    peer.sendall(b"Frames")
    served.passes()
    session = wire.opened[0]
    assert session.frames == [b"F", b"r", b"a", b"m", b"e", b"s"]
    session.output.write(b"answer")
    assert peer.recv(100) == b"answer"
    peer.close()
    served.passes()
    assert session.finished == b""
    session.output.close()
    served.passes()
    assert session.closed
    assert not served.place.hub.connections


class Listening:
    """A listening socket whose process has no descriptor for another connection."""

    def __init__(self) -> None:
        self.refuses = True
        self.pair = socket.socketpair()

    def fileno(self) -> int:
        return self.pair[0].fileno()

    def listen(self, backlog: int) -> None: ...

    def accept(self) -> tuple[socket.socket, object]:
        if self.refuses:
            raise OSError(errno.EMFILE, "too many open files")
        raise BlockingIOError

    def close(self) -> None:
        for one in self.pair:
            one.close()


def test_without_a_descriptor_accepting_pauses(served: Served) -> None:
    listening = Listening()
    server = ReadinessServer(served.driver, [listening], Protocol, served.loop)  # type: ignore[list-item]
    listening.pair[1].send(b"a connection")
    served.passes()
    assert not served.is_ready, "otherwise the loop would spin"
    listening.refuses = False
    [(again, args)] = served.loop.later
    again(*args)
    assert served.is_ready
    server.close()
    again(*args)
    assert listening.fileno() == -1
    assert not served.is_ready


def test_look_makes_passes_while_sockets_are_ready(served: Served) -> None:
    peer, protocol = served.connected()
    peer.sendall(bytes(3 * READ_BYTES))
    served.idle.poll()
    assert len(protocol.content) == 3 * READ_BYTES
    assert served.place.commits == 3
    served.driver.poll()
    assert served.place.commits == 3, "nothing was ready"


def test_look_returns_to_the_loop(served: Served) -> None:
    peer, protocol = served.connected()
    peer.sendall(bytes((PASSES_MAX + 2) * READ_BYTES))
    served.driver.poll()
    assert len(protocol.content) == PASSES_MAX * READ_BYTES
