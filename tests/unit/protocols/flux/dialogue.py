"""A FLUX connection without a socket: lines in, lines out, over the broker in memory and a clock that stands still.

Promises: behaves towards the session as ``server.connection`` does: leftovers are offered again, a paused session is resumed, the turn is
committed before bytes are overwritten. Must not know: what the lines mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polywire.broker.settings import BrokerSettings
from polywire.errors import PeerError
from polywire.protocols.flux.factory import FluxFactory
from polywire.protocols.flux.metadata import FluxSettings
from polywire.testing.broker import MemoryBroker
from polywire.types import Buffer


class World:
    """A broker in memory that can be restarted, and the FLUX wire over it."""

    def __init__(self, *, broker: BrokerSettings | None = None, flux: FluxSettings | None = None) -> None:
        self.memory = MemoryBroker(broker)
        self.flux_settings = flux
        self._open()

    def _open(self) -> None:
        self.factory = FluxFactory(self.memory.broker, self.flux_settings)
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
        self.backlog = 0
        self.backlog_max = 1 << 20
        self.peer = "127.0.0.1:1"
        self.on_loopback = True
        self.local = ("127.0.0.1", 1)
        self._pending = b""
        self._eof = False
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
        raise error

    def pin(self) -> Callable[[], None]:
        raise AssertionError("no request of this wire is prepared beside the loop")

    def _resumed(self) -> None:
        self._offer()

    def _offer(self) -> None:
        buffer = bytearray(self._pending)
        consumed = self.session.receive(memoryview(buffer))
        self._pending = bytes(buffer[consumed:])
        self.session.paused()

    def feed(self, data: bytes) -> None:
        """Bytes arrive in one pass of the loop."""
        self._pending += data
        if not self.session.paused():
            self._offer()

    def pass_by(self) -> None:
        """Everything that is due happens."""
        self.world.memory.run()

    def finish(self) -> None:
        """The peer closes its side."""
        rest, self._pending = self._pending, b""
        self.session.finish(memoryview(rest))
        self.pass_by()

    def take(self) -> bytes:
        """What was sent since the last call."""
        sent = bytes(self.sent)
        self.sent.clear()
        return sent

    def ask(self, line: str | bytes) -> str:
        """One request and its answer, without line endings."""
        self.feed((line if isinstance(line, bytes) else line.encode()) + b"\n")
        self.pass_by()
        return self.take().decode("utf-8", "surrogateescape").removesuffix("\n")
