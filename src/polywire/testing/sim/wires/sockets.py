"""Sockets, and the epoll descriptor that watches them, as the readiness driver sees them; the network is at their other end.

Everything a kernel may do is done when chance says so: a send takes a part, or nothing although there is space; what was ready is not when it
is read; a reset comes in between; descriptors are given again as soon as they are free.

Promises: what a socket took arrives, in order, unless it is reset; epoll tells of everything that is ready in the end, and of nothing that it
does not watch. Must not know: connections, wires.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from polywire.server.idle import nothing
from polywire.testing.sim.chance import Chance
from polywire.testing.sim.promises import require
from polywire.testing.sim.schedule import Schedule
from polywire.types import Buffer

KERNEL_BYTES: Final = 8 * 1024  # each way of a link
EPOLL_FD: Final = -1  # below 0: nobody asks the system about it
FIRST_FD: Final = -2
IN: Final = 0x001
OUT: Final = 0x004
ERROR: Final = 0x008
HANG_UP: Final = 0x010
NOT_NOW: Final = 0.05  # of calls


class SimulatedEpoll:
    """Stands where ``select.epoll`` does. Guards: ``_watched`` has sockets that are open only."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._sockets: dict[int, SimulatedSocket] = {}
        self._watched: dict[int, int] = {}

    def fileno(self) -> int:
        """Of no system."""
        return EPOLL_FD

    def opened(self, opened: SimulatedSocket) -> int:
        """A socket has the lowest descriptor that is free."""
        fd = FIRST_FD
        while fd in self._sockets:
            fd -= 1
        self._sockets[fd] = opened
        return fd

    def closed(self, fd: int) -> None:
        """A descriptor is free, and watched no more."""
        del self._sockets[fd]
        require(fd not in self._watched, "a socket is watched as long as it is open", fd=fd)

    def register(self, fd: int, events: int) -> None:
        """Watch a socket."""
        require(fd in self._sockets and fd not in self._watched, "a socket is watched once", fd=fd)
        self._watched[fd] = events

    def modify(self, fd: int, events: int) -> None:
        """Watch it for something else."""
        require(fd in self._watched, "what is watched is changed", fd=fd)
        self._watched[fd] = events

    def unregister(self, fd: int) -> None:
        """Watch it no more."""
        del self._watched[fd]

    def close(self) -> None:
        """Watch nothing."""
        self._watched.clear()

    def _ready(self) -> list[tuple[int, int]]:
        found = []
        for fd, events in self._watched.items():
            is_ready = self._sockets[fd].events & (events | ERROR | HANG_UP)
            if is_ready:
                found.append((fd, is_ready))
        return found

    def begin_pass(self) -> None:
        """Everybody may be read once from now on."""
        for opened in self._sockets.values():
            opened.reads = 0

    @property
    def is_ready(self) -> bool:
        """Whether anything is."""
        return bool(self._ready())

    def poll(self, timeout: float, count_max: int) -> list[tuple[int, int]]:
        """What is ready, in some order, and some of it only the next time."""
        ready = self._ready()
        if not ready:
            return []
        begin = self._chance.below(len(ready))
        return (ready[begin:] + ready[:begin])[: min(count_max, 1 + self._chance.below(2 * len(ready)))]


class SimulatedSocket:
    """What the driver is given of an accepted connection. Guards: ``up`` has arrived and was not read, ``down`` was sent and not taken."""

    def __init__(self, epoll: SimulatedEpoll, chance: Chance, down: bytearray, address: tuple[str, int]) -> None:
        self._epoll = epoll
        self._chance = chance
        self._address = address
        self.up = bytearray()
        self.down = down
        self.is_over = False
        """Whether the peer's end has arrived."""
        self.is_reset = False
        """Whether a reset has arrived."""
        self._was_told = False
        self.reads = 0
        """In this pass."""
        self.is_open = True
        self.left_unread = False
        """Whether it was closed before everything that had arrived was read, so that the peer is reset."""
        self._fd = epoll.opened(self)

    @property
    def events(self) -> int:
        """What it is ready for."""
        if self.is_reset:
            return IN | OUT | ERROR | HANG_UP
        can_read = bool(self.up) or self.is_over
        return IN * can_read | OUT * (len(self.down) < KERNEL_BYTES)

    def fileno(self) -> int:
        """Its descriptor."""
        return self._fd

    def setblocking(self, blocks: bool) -> None:
        """It never does."""

    def getsockname(self) -> tuple[str, int]:
        """Where it was accepted."""
        return self._address

    def _perhaps_not_now(self) -> None:
        if self._chance.happens(NOT_NOW):
            raise self._chance.one_of((BlockingIOError, BlockingIOError, InterruptedError))(errno.EAGAIN, "not now")

    def recv_into(self, memory: memoryview) -> int:
        """Read what has arrived, or a part."""
        require(self.is_open, "a closed socket is not read", fd=self._fd)
        require(len(memory) > 0, "there is memory to read into", fd=self._fd)
        self.reads += 1
        require(self.reads == 1, "nobody is read twice in a pass", fd=self._fd)
        self._perhaps_not_now()
        if not self.up:
            if self.is_reset and not self._was_told:
                self._was_told = True
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
        """Take what fits, or a part."""
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
        """Take what fits of several."""
        return self.send(b"".join(parts))

    def close(self) -> None:
        """Give the descriptor back."""
        require(self.is_open, "a socket is closed once", fd=self._fd)
        self.is_open = False
        self.left_unread = bool(self.up)
        self._epoll.closed(self._fd)


class WatchingLoop:
    """The loop, as far as the driver knows it: it calls back soon after something is ready. Guards: one such call is on its way at most."""

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
        """Call back no more."""
        self.reader = nothing

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What the driver took from a connection is for whoever runs the world."""
        raise context["exception"]

    @property
    def is_waiting(self) -> bool:
        """Whether it would notice that something is ready."""
        return not self._is_called

    def notice(self) -> None:
        """Something is ready."""
        self._is_called = True
        self._loop.call_soon(self._call)

    def _call(self) -> None:
        self._is_called = False
        self.reader()
