"""A Cursus connection without a socket: bodies in, bodies out, over the broker in memory and a clock that stands still.

Promises: behaves towards the session as ``server.connection`` does: leftovers are offered again, a paused session is resumed, the turn is
committed before bytes are overwritten. Must not know: what the commands mean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from polywire.broker.settings import BrokerSettings
from polywire.errors import PeerError
from polywire.protocols.cursus.factory import CursusFactory
from polywire.protocols.cursus.messages import enveloped, frame
from polywire.protocols.cursus.state import CursusSettings
from polywire.testing.broker import MemoryBroker
from polywire.types import Buffer


class World:
    """A broker in memory that can be restarted, and the Cursus wire over it."""

    def __init__(self, *, broker: BrokerSettings | None = None, cursus: CursusSettings | None = None) -> None:
        self.memory = MemoryBroker(broker)
        self.settings = cursus
        self._open()

    def _open(self) -> None:
        self.factory = CursusFactory(self.memory.broker, self.settings)
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
        self.backlog = 0
        self.backlog_max = 1 << 20
        self.peer = "127.0.0.1:1"
        self.local = ("127.0.0.1", 9000)
        self.on_loopback = True
        self._pending = b""
        self._offering = False
        self.gave_up = False
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
        if self._offering or self.gave_up:
            return
        try:
            self._offer()
        except PeerError:
            self.gave_up = True
            self._offering = False

    def _offer(self) -> None:
        self._offering = True
        buffer = bytearray(self._pending)
        consumed = self.session.receive(memoryview(buffer))
        self._pending = bytes(buffer[consumed:])
        self._offering = False
        self.session.paused()

    def feed(self, data: bytes) -> None:
        """Bytes arrive in one pass of the loop."""
        self._pending += data
        if not self.session.paused():
            self._offer()

    def pass_by(self) -> None:
        """Everything that is due happens, beside the loop too."""
        while True:
            busy = _at_work()
            self.world.memory.run()
            if not busy and not _at_work():
                return
            time.sleep(0.001)

    def finish(self) -> None:
        """The peer closes its side."""
        rest, self._pending = self._pending, b""
        self.session.finish(memoryview(rest))
        self.pass_by()

    def take(self) -> list[bytes]:
        """Bodies of the frames sent since the last call."""
        bodies, at = [], 0
        while at < len(self.sent):
            end = at + 4 + int.from_bytes(self.sent[at : at + 4], "big")
            assert end <= len(self.sent), "half a frame was sent"
            bodies.append(bytes(self.sent[at + 4 : end]))
            at = end
        self.sent.clear()
        return bodies

    def exchange(self, body: bytes) -> list[bytes]:
        """One request body and the bodies of what it is answered with."""
        self.feed(frame(body))
        self.pass_by()
        return self.take()

    def ask(self, text: str | bytes, topic: str | None = None) -> str:
        """A command, raw or in an envelope, and its one answer."""
        body = text.encode() if isinstance(text, str) else text
        answers = self.exchange(body if topic is None else enveloped(topic, body))
        assert len(answers) == 1, answers
        return answers[0].decode()


def _at_work() -> bool:
    return any(thread.name == "polywire-workbench" for thread in threading.enumerate())
