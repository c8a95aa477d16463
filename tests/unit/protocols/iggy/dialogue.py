"""An Iggy connection without a socket: frames in, frames out, over the broker in memory and a clock that stands still.

Promises: behaves towards the session as ``server.connection`` does: leftovers are offered again, a paused session is resumed, the turn is
committed before bytes are overwritten. Must not know: what the frames mean beyond their length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from struct import pack_into, unpack_from

from polywire.broker.settings import BrokerSettings
from polywire.errors import PeerError
from polywire.protocols.iggy.factory import IggyFactory
from polywire.protocols.iggy.shared import IggySettings
from polywire.testing.broker import MemoryBroker
from polywire.testing.clock import SimulatedClock
from polywire.testing.loop import ManualLoop
from polywire.types import Buffer

WAIT_S_MAX = 10.0
T_US = 1_693_440_000_000_000  # the T of the dossier's examples
CLIENT = bytes.fromhex("22110000000000000000000000000000")


class World:
    """A broker in memory that can be restarted, and the Iggy wire over it; its clock starts at the dossier's T."""

    def __init__(self, *, broker: BrokerSettings | None = None, iggy: IggySettings | None = None) -> None:
        self.clock = SimulatedClock(T_US)
        self.memory = MemoryBroker(broker, loop=ManualLoop(self.clock), clock=self.clock)
        self.settings = iggy
        self.ports = 0
        self._open()

    def _open(self) -> None:
        self.factory = IggyFactory(self.memory.broker, self.settings)
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
        world.ports += 1
        self.peer = f"127.0.0.1:{world.ports}"
        self.on_loopback = True
        self.local = ("127.0.0.1", 8090)
        self._pending = b""
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
        try:
            consumed = self.session.receive(memoryview(buffer))
        except PeerError:
            self.world.memory.broker.commit()
            self._pending = b""
            self.closed = True
            return
        self._pending = bytes(buffer[consumed:])
        self.session.paused()

    def feed(self, data: bytes) -> None:
        """Bytes arrive in one pass of the loop."""
        self._pending += data
        if not self.closed and not self.session.paused():
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

    def ask(self, frame: bytes) -> bytes:
        """One request and its answer, as they are; a password may have to be hashed meanwhile."""
        self.feed(frame)
        deadline = time.monotonic() + WAIT_S_MAX
        self.pass_by()
        while not self.sent and not self.closed:
            assert time.monotonic() < deadline, "nobody answered"
            time.sleep(0.001)
            self.pass_by()
        return self.take()

    def classic(self, code: int, payload: bytes = b"") -> tuple[int, bytes]:
        """Status and payload of the answer to a request of the classic framing."""
        answer = self.ask(classic(code, payload))
        status, size = unpack_from("<II", answer)
        assert size == len(answer) - 8
        return status, answer[8:]

    def headered(self, operation: int, body: bytes = b"", *, code: int = 0, number: int = 0) -> tuple[int, bytes]:
        """Status and body of the answer to a request of the headered framing; the reason, negative, of an eviction."""
        answer = self.ask(headered(operation, body, code=code, number=number))
        if answer[60] == 13:
            assert self.closed
            return -answer[255], b""
        assert answer[60] == 8
        assert unpack_from("<I", answer, 48)[0] == len(answer)
        return unpack_from("<I", answer, 216)[0], answer[256:]


def classic(code: int, payload: bytes = b"") -> bytes:
    """A request frame of the classic framing."""
    return (4 + len(payload)).to_bytes(4, "little") + code.to_bytes(4, "little") + payload


def headered(operation: int, body: bytes = b"", *, code: int = 0, number: int = 0, epoch: int = 0) -> bytes:
    """A request frame of the headered framing."""
    head = bytearray(256)
    pack_into("<I", head, 48, 256 + len(body))
    head[60] = 5
    head[128:144] = CLIENT
    pack_into("<Q", head, 168, number)
    head[176] = operation
    pack_into("<Q", head, 184, epoch)
    pack_into("<I", head, 196, code)
    return bytes(head) + body
