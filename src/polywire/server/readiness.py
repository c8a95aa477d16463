"""The readiness driver: serves all ready sockets without TLS in one callback of the event loop.

This module is compiled.

All sockets are registered with one epoll descriptor, and the event loop watches only that. The loop still runs timers,
threads and TLS. A pass reads each ready socket once, so no connection can block the others; remaining bytes are read in
the next pass.

* To a connection, the driver looks like an asyncio transport with a write limit of 0.
* An error of one connection closes it and does not affect others.
* No other code runs between asking a connection for memory and reading into it.
* Batches that are appended during a pass are committed at its end, with one journal write.
"""

from __future__ import annotations

import errno
import select
import socket
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

import cython

from polywire.server.scheduling import nothing
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.libc.errno import errno as last_error
    from cython.cimports.polywire.records.memory import Lent, lend, lend_writable
    from cython.cimports.polywire.server.hub import Hub
    from cython.cimports.polywire.server.system_calls import epoll_event, epoll_wait, recv, send
else:
    from polywire.records.memory import Lent, lend, lend_writable
    from polywire.server.hub import Hub

PASSES_MAX: Final = 8  # passes in a row before the event loop runs again
READY_MAX: Final = 256  # sockets read in one pass; more are read in the next pass
PARTS_MAX: Final = 1024  # limit of buffers in one sendmsg call

_IN = cython.declare(cython.uint, 0x001)
_OUT = cython.declare(cython.uint, 0x004)
_BROKEN = cython.declare(cython.uint, 0x018)  # EPOLLERR and EPOLLHUP
_READY_MAX = cython.declare(cython.int, 256)
_LOOKS = cython.declare(
    cython.int, 32
)  # polls of epoll before the event loop runs again; each takes a quarter of a microsecond
_EVENT_BYTES = cython.declare(cython.Py_ssize_t, 16)  # maximum size of a struct epoll_event
_AGAIN = cython.declare(cython.int, errno.EAGAIN)
_INTERRUPTED = cython.declare(cython.int, errno.EINTR)
_NOGIL_BYTES_MIN = cython.declare(
    cython.Py_ssize_t, 65_536
)  # copying this many bytes takes long enough to let other threads run


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _poll_epoll(fd: cython.int, found: cython.p_uchar, polls: cython.int) -> cython.int:
    count: cython.int = 0
    if cython.compiled:
        while count == 0 and polls > 0:
            polls -= 1
            count = epoll_wait(fd, cython.cast(cython.pointer(epoll_event), found), _READY_MAX, 0)
    return count


def is_available() -> bool:
    return hasattr(select, "epoll")


@cython.cclass
class SocketTransport:
    """One accepted socket, with the interface of an asyncio transport.

    A pause changes the epoll registration only when bytes arrive, because most pauses end before that.
    """

    _driver: ReadinessDriver
    _socket: Any
    _fd: cython.int
    _peer_name: Any
    protocol: Any
    _events: cython.uint  # events that epoll reports for the socket; none after ``_is_ended``
    _is_reading: cython.bint
    _is_closing: cython.bint
    _is_ended: cython.bint
    _waiting: deque[Any]  # parts that the kernel has not accepted; the connection is paused while there are any
    _waiting_bytes: cython.Py_ssize_t  # size of all parts in ``_waiting``

    def __init__(self, driver: ReadinessDriver, accepted: socket.socket, peer_name: Any, protocol: Any) -> None:
        self._driver = driver
        self._socket = accepted
        self._fd = accepted.fileno()
        self._peer_name = peer_name
        self.protocol = protocol
        self._events = 0
        self._is_reading = True
        self._is_closing = False
        self._is_ended = False
        self._waiting = deque()
        self._waiting_bytes = 0

    # Called by the connection

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return an address of the socket, or the socket."""
        if name == "peername":
            return self._peer_name
        if name == "sockname":
            return self._socket.getsockname()
        return self._socket if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Accept only the limit 0: the protocol is paused when the kernel does not accept all bytes."""
        assert not high, "only a write limit of 0 is supported"

    def get_write_buffer_size(self) -> int:
        return self._waiting_bytes

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._is_reading = True
            self._watch()

    def write(self, data: Buffer) -> None:
        """Send bytes. Bytes that the kernel does not accept are sent later."""
        if self._is_closing:
            return
        if self._waiting_bytes:
            self._keep(data)
            return
        sent: cython.Py_ssize_t = self._send(data)
        size: cython.Py_ssize_t = len(data)
        if 0 <= sent < size:
            self._keep(memoryview(data)[sent:])
            self._clog()

    def writelines(self, parts: Sequence[Buffer]) -> None:
        if self._is_closing:
            return
        was: cython.Py_ssize_t = self._waiting_bytes
        for part in parts:
            if len(part):
                self._keep(part)
        if not was:
            self._send_waiting()
            if self._waiting_bytes:
                self._clog()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._is_reading = False
            if self._waiting_bytes:
                self._watch()
            else:
                self.end(None)

    def abort(self) -> None:
        if not self._is_ended:
            self.end(None)

    # Sending

    @cython.cfunc
    def _send(self, data: Buffer) -> cython.Py_ssize_t:
        """Send bytes, and return how many the kernel accepted; -1 if the connection is lost."""
        sent: cython.Py_ssize_t
        if cython.compiled and self._fd >= 0:
            lent: Lent = lend(data)
            if lent.size < _NOGIL_BYTES_MIN:
                sent = send(self._fd, lent.p, lent.size, 0)
            else:
                with cython.nogil:
                    sent = send(self._fd, lent.p, lent.size, 0)
            if sent >= 0:
                return sent
            if last_error in (_AGAIN, _INTERRUPTED):
                return 0
            self.end(OSError(last_error, "the peer is gone"))
            return -1
        try:
            return int(self._socket.send(data))
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self.end(error)
            return -1

    @cython.cfunc
    def _keep(self, data: Buffer) -> cython.void:
        self._waiting.append(data)
        self._waiting_bytes += len(data)

    @cython.cfunc
    def _clog(self) -> cython.void:
        self._watch()
        self.protocol.pause_writing()

    @cython.cfunc
    def _send_waiting(self) -> cython.void:
        waiting = self._waiting
        try:
            while waiting:
                sent: cython.Py_ssize_t = self._socket.sendmsg(list(islice(waiting, PARTS_MAX)))
                self._waiting_bytes -= sent
                while waiting and sent >= len(waiting[0]):
                    sent -= len(waiting.popleft())
                if sent:
                    waiting[0] = memoryview(waiting[0])[sent:]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.end(error)

    # Called by the driver

    @cython.cfunc
    def begin(self) -> cython.void:
        """Start serving an accepted socket."""
        self.protocol.connection_made(self)
        self._watch()

    @cython.cfunc
    def serve(self, events: cython.uint) -> cython.void:
        """Write and read once, according to ``events``."""
        if self._waiting_bytes and events & (_OUT | _BROKEN):
            self._send_waiting()
            if not self._waiting_bytes and not self._is_ended:
                if self._is_closing:
                    self.end(None)
                else:
                    self._watch()
                    self.protocol.resume_writing()
        if not events & (_IN | _BROKEN) or self._is_ended:
            return
        if self._is_reading:
            self._read()
        else:
            self._watch()

    @cython.cfunc
    def _read(self) -> cython.void:
        count: cython.Py_ssize_t = self._receive(self.protocol.get_buffer(-1))
        if count > 0:
            self.protocol.received(count)
        elif count == 0:
            self._is_reading = False
            self._watch()
            if not self.protocol.eof_received():
                self.close()

    @cython.cfunc
    def _receive(self, memory: memoryview) -> cython.Py_ssize_t:
        """Read into memory, and return the number of bytes.

        Returns 0 at the end of the stream, and -1 if no bytes are available or the connection is lost.
        """
        count: cython.Py_ssize_t
        if cython.compiled and self._fd >= 0:
            lent: Lent = lend_writable(memory)
            if lent.size < _NOGIL_BYTES_MIN:
                count = recv(self._fd, lent.p, lent.size, 0)
            else:
                with cython.nogil:
                    count = recv(self._fd, lent.p, lent.size, 0)
            if count < 0 and last_error != _AGAIN and last_error != _INTERRUPTED:
                self.end(OSError(last_error, "the peer is gone"))
            return count
        try:
            return int(self._socket.recv_into(memory))
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError as error:
            self.end(error)
            return -1

    @cython.cfunc
    def _watch(self) -> cython.void:
        events: cython.uint = 0
        if not self._is_ended:
            events = (_IN if self._is_reading else 0) | (_OUT if self._waiting_bytes else 0)
        if events == self._events:
            return
        epoll = self._driver.epoll
        if not self._events:
            epoll.register(self._fd, events)
        elif events:
            epoll.modify(self._fd, events)
        else:
            epoll.unregister(self._fd)
        self._events = events

    @cython.cfunc
    def end(self, error: Exception | None) -> cython.void:
        """Stop reading and sending. The event loop calls ``connection_lost`` later."""
        if self._is_ended:
            return
        self._is_closing = self._is_ended = True
        self._is_reading = False
        self._waiting.clear()
        self._waiting_bytes = 0
        self._watch()
        self._driver.loop.call_soon(self._lost, error)

    def _lost(self, error: Exception | None) -> None:
        self._driver.forget(self._fd)
        try:
            self.protocol.connection_lost(error)
        finally:
            self.protocol = None
            self._socket.close()


@cython.cclass
class ReadinessDriver:
    """Reads and writes the sockets of one server with epoll."""

    epoll: Any
    loop: Any
    _hub: Hub
    _transports: dict[int, SocketTransport]
    _found: Lent
    _listed: list[tuple[int, int]]
    _fd: cython.int

    def __init__(self, hub: Hub, loop: Any, epoll: Any = None) -> None:
        """``loop`` must be able to watch descriptors. ``epoll`` replaces the system's epoll in simulations.

        A simulated epoll and its sockets have negative descriptors, and are called through their Python methods.
        """
        self.loop = loop
        self.epoll = select.epoll() if epoll is None else epoll
        self._hub = hub
        self._transports = {}  # by file descriptor
        self._listed = []  # ready sockets, if epoll is called through Python
        self._found = lend_writable(bytearray(_EVENT_BYTES * _READY_MAX))
        self._fd = self.epoll.fileno()
        loop.add_reader(self._fd, self.make_pass)
        if hub.idle is not None:
            hub.idle.poll = self.poll

    def accepted(self, peer: socket.socket, peer_name: Any, protocol: Any) -> None:
        """Start serving an accepted connection."""
        peer.setblocking(False)
        transport = SocketTransport(self, peer, peer_name, protocol)
        self._transports[peer.fileno()] = transport
        try:
            transport.begin()
        except Exception as error:
            self._broken(transport, error)

    def forget(self, fd: int) -> None:
        del self._transports[fd]

    def close(self) -> None:
        if self._hub.idle is not None:
            self._hub.idle.poll = nothing
        self.loop.remove_reader(self._fd)
        self.epoll.close()

    def make_pass(self) -> None:
        self._make_pass(1)

    def poll(self) -> None:
        """Poll epoll again while requests arrive faster than the event loop would report them.

        After serving a socket, poll only once more, because callbacks of the event loop (waiting consumers, for
        example) should run soon.
        """
        polls: cython.int = _LOOKS
        for _ in range(PASSES_MAX):
            if not self._make_pass(polls):
                return
            polls = 1

    @cython.cfunc
    def _make_pass(self, polls: cython.int) -> cython.bint:
        """Serve ready sockets after at most ``polls`` polls, and return whether there were any."""
        hub: Hub = self._hub
        count: cython.int = self._find(polls)
        i: cython.int
        if count <= 0:
            return False
        hub.ingest.hold(True)
        try:
            for i in range(count):
                if cython.compiled and self._fd >= 0:
                    found: cython.pointer(epoll_event) = cython.cast(cython.pointer(epoll_event), self._found.p)
                    self._serve(found[i].data.fd, found[i].events)
                else:
                    fd, events = self._listed[i]
                    self._serve(fd, events)
        finally:
            hub.ingest.hold(False)
            hub.commit()  # always: while commits are on hold, no other code commits
        if hub.idle is not None:
            hub.idle.bytes_arrived()
        return True

    @cython.cfunc
    def _find(self, polls: cython.int) -> cython.int:
        if cython.compiled and self._fd >= 0:
            count: cython.int = _poll_epoll(self._fd, self._found.p, 1)
            if count == 0 and polls > 1:
                with cython.nogil:
                    count = _poll_epoll(self._fd, self._found.p, polls)
            return count
        self._listed = self.epoll.poll(0, READY_MAX)
        return len(self._listed)

    @cython.cfunc
    def _serve(self, fd: cython.int, events: cython.uint) -> cython.void:
        transport: SocketTransport = self._transports[fd]
        try:
            transport.serve(events)
        except Exception as error:
            self._broken(transport, error)

    @cython.cfunc
    def _broken(self, transport: SocketTransport, error: Exception) -> cython.void:
        """Close a connection whose code raised an exception. The event loop's exception handler gets the exception."""
        transport.end(error)
        self.loop.call_exception_handler(
            {"message": "a connection failed", "exception": error, "protocol": transport.protocol}
        )
