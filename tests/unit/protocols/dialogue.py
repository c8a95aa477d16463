"""A connection without a socket over a broker in memory and a manual clock, for the protocols' own dialogues.

It behaves like ``server.connection``: leftover bytes are offered again, paused sessions are resumed, and the turn is
committed before unpinned bytes are overwritten. A PeerError ends the connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, Self, TypeVar

from polywire.broker.access import Principal
from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.errors import PeerError
from polywire.protocols.runtime.session import SessionFactory
from polywire.testing.loop import ManualLoop, SimulatedClock
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Buffer
from tests.unit.protocols.unmetered import Unmetered

_Factory = TypeVar("_Factory", bound=SessionFactory, covariant=True)
THREAD_S: Final = 0.001  # a test that only polls takes the interpreter's lock from the thread at each call of zlib


class World(Generic[_Factory]):
    """A broker in memory that can be restarted, with one protocol."""

    def __init__(
        self, make: Callable[[Broker], _Factory], broker: BrokerSettings | None = None, *, now_us: int | None = None
    ) -> None:
        clock = SimulatedClock() if now_us is None else SimulatedClock(now_us)
        self.memory = MemoryBroker(broker, loop=ManualLoop(clock), clock=clock)
        self.connected = 0
        self._make = make
        self._open()

    def _open(self) -> None:
        self.factory = self._make(self.memory.broker)
        self.memory.run()

    def restart(self) -> None:
        """Kill and restart the broker; connections are lost."""
        self.memory.restart()
        self._open()


class Dialogue(Unmetered):
    """One connection; implements ``protocols.base.Output``. ``gave_up``: the PeerError that ended it."""

    backlog = 0
    backlog_max = 1 << 20
    on_loopback = True
    certified: Principal | None = None
    local = ("127.0.0.1", 1)

    def __init__(self, world: World[SessionFactory]) -> None:
        self.world = world
        world.connected += 1
        self.peer = f"127.0.0.1:{world.connected}"
        self.sent = bytearray()
        self.closed = False
        self.gave_up: PeerError | None = None
        self.pins = 0
        self.principal: Principal | None = None
        self._pending = b""
        self._offering = False
        self.session = world.factory.open(self, self._resumed)

    def beside(self) -> Self:
        """Open another connection to the same broker."""
        return type(self)(self.world)

    # Calls of the session

    def write(self, data: Buffer) -> None:
        assert self.gave_up or not self.closed, "a session must not write after its end"
        self.sent += data

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        for part in parts:
            self.write(part)
        if released is not None:
            released()

    def close(self) -> None:
        self.closed = True

    def fail(self, error: PeerError) -> None:
        assert error.fatal
        self.gave_up = error
        self.closed = True

    def identified(self, principal: Principal | None) -> None:
        self.principal = principal

    def pin(self) -> Callable[[], None]:
        self.pins += 1
        return self._unpin

    def _unpin(self) -> None:
        self.pins -= 1

    def _resumed(self) -> None:
        if not self._offering and not self.closed:
            self._offer()

    def _offer(self) -> None:
        buffer = bytearray(self._pending)
        self._offering = True
        try:
            self._pending = bytes(buffer[self.session.receive(memoryview(buffer)) :])
        except PeerError as error:
            self._pending = b""
            self.fail(error)
        self._offering = False
        self.session.paused()
        self.world.memory.broker.commit()
        if not self.pins:
            buffer[:] = b"\xee" * len(buffer)

    # Actions of the client

    def feed(self, data: bytes) -> None:
        """Deliver bytes in one pass of the loop."""
        self._pending += data
        if not self.closed and not self.session.paused():
            self._offer()

    def pass_by(self) -> None:
        """Run everything that is due, including work off the event loop."""
        busy = True
        while busy:
            busy = _wait_for_work()
            self.world.memory.run()
            busy = busy or _wait_for_work()

    def finish(self) -> None:
        """Close the client's sending side."""
        if not self.closed:
            rest, self._pending = self._pending, b""
            self.session.finish(memoryview(rest))
            self.pass_by()

    def take(self) -> bytes:
        """Return the bytes sent since the last call."""
        sent = bytes(self.sent)
        self.sent.clear()
        return sent

    def exchange(self, data: bytes) -> bytes:
        """Send bytes and return the immediate response."""
        self.feed(data)
        self.pass_by()
        return self.take()


def _wait_for_work() -> bool:
    """Return whether there is work off the event loop, after leaving the interpreter to it for a moment."""
    working = [thread for thread in threading.enumerate() if thread.name == "polywire-off-loop"]
    for thread in working:
        thread.join(THREAD_S)
    return bool(working)
