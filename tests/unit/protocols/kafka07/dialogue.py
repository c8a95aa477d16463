"""A Kafka 0.7 connection without a socket: bytes in, bytes out, over the broker in memory and a clock that stands still.

Promises: behaves towards the session as ``server.connection`` does: leftovers are offered again, a paused session is resumed, the turn is
committed before bytes are overwritten, a PeerError closes. Must not know: what the frames mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from polywire.broker.settings import BrokerSettings
from polywire.errors import PeerError
from polywire.protocols.kafka07.factory import Kafka07Factory
from polywire.testing.broker import MemoryBroker
from polywire.types import Buffer


class World:
    """A broker in memory that can be restarted, and the Kafka 0.7 wire over it."""

    def __init__(self, broker: BrokerSettings | None = None) -> None:
        self.memory = MemoryBroker(broker)
        self._open()

    def _open(self) -> None:
        self.factory = Kafka07Factory(self.memory.broker)
        self.memory.run()

    def restart(self) -> None:
        """Kill and start the broker; connections are gone."""
        self.memory.restart()
        self._open()

    def connect(self) -> Dialogue:
        """A new connection."""
        return Dialogue(self)


class Dialogue:
    """One connection; implements ``protocols.base.Output``."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sent = bytearray()
        self.closed = False
        self.pins = 0
        self.gave_up = False
        self.backlog = 0
        self.backlog_max = 1 << 20
        self.peer = "127.0.0.1:1"
        self.local = ("127.0.0.1", 9093)
        self.on_loopback = True
        self._pending = b""
        self._offering = False
        self.session = world.factory.open(self, self._resumed)

    def write(self, data: Buffer) -> None:
        assert not self.closed
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
        self.gave_up = self.closed = True

    def pin(self) -> Callable[[], None]:
        self.pins += 1
        return self._unpin

    def _unpin(self) -> None:
        self.pins -= 1

    def _resumed(self) -> None:
        if not self._offering:
            self._offer()

    def _offer(self) -> None:
        buffer = bytearray(self._pending)
        self._offering = True
        try:
            consumed = self.session.receive(memoryview(buffer))
            self._pending = bytes(buffer[consumed:])
        except PeerError:
            self.world.memory.broker.commit()
            self._pending = b""
            self.closed = True
            self.session.close()
        finally:
            self._offering = False
        self.world.memory.broker.commit()
        if not self.pins:
            buffer[:] = b"\xee" * len(buffer)
        self.session.paused()

    def feed(self, data: bytes) -> None:
        """Bytes arrive in one pass of the loop."""
        if self.closed:
            return
        self._pending += data
        if not self.session.paused():
            self._offer()
        self._settle()

    def _settle(self) -> None:
        """What is prepared beside the loop gets done."""
        while self.pins:
            time.sleep(0.001)
            self.world.memory.run()

    def finish(self) -> None:
        """The peer closes its side."""
        if self.closed:
            return
        rest, self._pending = self._pending, b""
        self.session.finish(memoryview(rest))
        self.world.memory.run()
        self._settle()

    def take(self) -> bytes:
        """What was sent since the last call."""
        sent = bytes(self.sent)
        self.sent.clear()
        return sent

    def ask(self, frame: bytes) -> bytes:
        """One request, and its answer with its length."""
        self.feed(frame)
        self.world.memory.run()
        return self.take()
