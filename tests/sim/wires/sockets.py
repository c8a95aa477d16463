"""Sockets and their epoll descriptor as the readiness driver uses them, with the network at the other end.

It does everything that a kernel may do. A send accepts a part, or nothing despite free space. A ready socket is not
ready when it is read. A reset comes in between. Freed descriptors are reused at once.

Accepted bytes arrive in order unless the connection is reset. Epoll eventually reports everything that is ready and
watched, and nothing else.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from polywire.server.scheduling import nothing
from polywire.types import Buffer
from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.schedule import Schedule

KERNEL_BYTES: Final = 8 * 1024  # each direction of a connection
EPOLL_FD: Final = -1  # below 0: the system must not be called with it
FIRST_FD: Final = -2
IN: Final = 0x001
OUT: Final = 0x004
ERROR: Final = 0x008
HANG_UP: Final = 0x010
NOT_NOW: Final = 0.05  # of calls


class SimulatedEpoll:
    """Replaces ``select.epoll``. Guards: ``_watched`` has only open sockets."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._sockets: dict[int, SimulatedSocket] = {}
        self._watched: dict[int, int] = {}

    def fileno(self) -> int:
        """Return an invalid descriptor."""
        return EPOLL_FD

    def opened(self, opened: SimulatedSocket) -> int:
        """Return the lowest free descriptor for a socket."""
        fd = FIRST_FD
        while fd in self._sockets:
            fd -= 1
        self._sockets[fd] = opened
        return fd

    def closed(self, fd: int) -> None:
        """Free a descriptor and stop watching it."""
        del self._sockets[fd]
        require(fd not in self._watched, "a socket is watched as long as it is open", fd=fd)

    def register(self, fd: int, events: int) -> None:
        """Watch a socket."""
        require(fd in self._sockets and fd not in self._watched, "a socket is watched once", fd=fd)
        self._watched[fd] = events

    def modify(self, fd: int, events: int) -> None:
        """Change the watched events."""
        require(fd in self._watched, "what is watched is changed", fd=fd)
        self._watched[fd] = events

    def unregister(self, fd: int) -> None:
        """Stop watching a socket."""
        del self._watched[fd]

    def close(self) -> None:
        """Stop watching everything."""
        self._watched.clear()

    def _ready(self) -> list[tuple[int, int]]:
        found = []
        for fd, events in self._watched.items():
            is_ready = self._sockets[fd].events & (events | ERROR | HANG_UP)
            if is_ready:
                found.append((fd, is_ready))
        return found

    def begin_pass(self) -> None:
        """Allow one read of each socket."""
        for opened in self._sockets.values():
            opened.reads = 0

    @property
    def is_ready(self) -> bool:
        """Whether anything is ready."""
        return bool(self._ready())

    def poll(self, timeout: float, count_max: int) -> list[tuple[int, int]]:
        """Return what is ready in some order, some of it only the next time."""
        ready = self._ready()
        if not ready:
            return []
        begin = self._chance.below(len(ready))
        return (ready[begin:] + ready[:begin])[: min(count_max, 1 + self._chance.below(2 * len(ready)))]


class SimulatedSocket:
    """An accepted connection. Guards: ``up`` has arrived and is unread, ``down`` was sent and not accepted."""

    def __init__(self, epoll: SimulatedEpoll, chance: Chance, down: bytearray, address: tuple[str, int]) -> None:
        self._epoll = epoll
        self._chance = chance
        self._address = address
        self.up = bytearray()
        self.down = down
        self.is_over = False
        """Whether the client's end has arrived."""
        self.is_reset = False
        """Whether a reset has arrived."""
        self._was_reported = False
        self.reads = 0
        """In this pass."""
        self.is_open = True
        self.left_unread = False
        """Whether it was closed with unread bytes, so that the client is reset."""
        self._fd = epoll.opened(self)

    @property
    def events(self) -> int:
        """The events that are ready."""
        if self.is_reset:
            return IN | OUT | ERROR | HANG_UP
        can_read = bool(self.up) or self.is_over
        return IN * can_read | OUT * (len(self.down) < KERNEL_BYTES)

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._fd

    def setblocking(self, blocks: bool) -> None:
        """Do nothing: it never blocks."""

    def getsockname(self) -> tuple[str, int]:
        """Return the address at which it was accepted."""
        return self._address

    def _perhaps_not_now(self) -> None:
        if self._chance.happens(NOT_NOW):
            raise self._chance.one_of((BlockingIOError, BlockingIOError, InterruptedError))(errno.EAGAIN, "not now")

    def recv_into(self, memory: memoryview) -> int:
        """Read what has arrived, or a part."""
        require(self.is_open, "a closed socket is not read", fd=self._fd)
        require(len(memory) > 0, "there is memory to read into", fd=self._fd)
        self.reads += 1
        require(self.reads == 1, "no socket is read twice in a pass", fd=self._fd)
        self._perhaps_not_now()
        if not self.up:
            if self.is_reset and not self._was_reported:
                self._was_reported = True
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            if self.is_over or self.is_reset:
                return 0
            raise BlockingIOError(errno.EAGAIN, "nothing has arrived")
        most = min(len(self.up), len(memory))
        count = self._chance.one_of((1 + self._chance.below(min(most, 40)), 1 + self._chance.below(most), most, most))
        memory[:count] = self.up[:count]
        del self.up[:count]
        return count

    def send(self, data: Buffer) -> int:
        """Accept what fits, or a part."""
        require(self.is_open, "nothing is sent over a closed socket", fd=self._fd)
        if self.is_reset:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self._perhaps_not_now()
        most = min(KERNEL_BYTES - len(self.down), len(data))
        if most <= 0:
            raise BlockingIOError(errno.EAGAIN, "no space")
        count = self._chance.one_of((most, most, 1 + self._chance.below(most)))
        self.down += memoryview(data)[:count]
        return count

    def sendmsg(self, parts: Sequence[Buffer]) -> int:
        """Accept what fits of several parts."""
        return self.send(b"".join(parts))

    def close(self) -> None:
        """Free the descriptor."""
        require(self.is_open, "a socket is closed once", fd=self._fd)
        self.is_open = False
        self.left_unread = bool(self.up)
        self._epoll.closed(self._fd)


class WatchingLoop:
    """The driver's view of the loop: it calls back soon after something is ready. Guards: one such call is scheduled at
    most.
    """

    def __init__(self, loop: Schedule) -> None:
        self._loop = loop
        self.reader: Callable[[], object] = nothing
        self._is_called = False
        self.call_soon: Final = loop.call_soon

    def add_reader(self, fd: int, callback: Callable[[], object]) -> None:
        """Call back whenever something is ready."""
        assert fd == EPOLL_FD, "there is one"
        self.reader = callback

    def remove_reader(self, fd: int) -> None:
        """Stop to call back."""
        self.reader = nothing

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raise the exception of a connection to the code that runs the world."""
        raise context["exception"]

    @property
    def is_waiting(self) -> bool:
        """Whether it would notice that something is ready."""
        return not self._is_called

    def notice(self) -> None:
        """Note that something is ready."""
        self._is_called = True
        self._loop.call_soon(self._call)

    def _call(self) -> None:
        self._is_called = False
        self.reader()
