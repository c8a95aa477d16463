"""Brokers in memory that share topics, linked by sessions of each other without sockets, and connections to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.protocols.runtime.session import Output, Session, SessionFactory
from polywire.protocols.runtime.shards import KEY_BYTES, LinkPeer
from polywire.server.placement import INTERNAL
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_log import MemoryLog
from polywire.types import Buffer
from tests.unit.protocols.polywire.peer import CapturedOutput

KEY: Final = bytes(range(KEY_BYTES))
PINNED_PAUSE_S: Final = 0.001


class LinkOutput(CapturedOutput):
    """Notifies of writes."""

    def __init__(self, on_written: Callable[[], None]) -> None:
        super().__init__()
        self._on_written = on_written

    def write(self, data: Buffer) -> None:
        super().write(data)
        self._on_written()

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        super().write_many(parts, released)
        self._on_written()


class MemoryLink:
    """A session of another shard's broker, whose output arrives in the loop's next pass."""

    def __init__(self, loop: ManualLoop, factory: SessionFactory, peer: LinkPeer, shard: int = 0) -> None:
        self.shard = shard
        self._loop = loop
        self._peer: LinkPeer | None = peer
        self._output = LinkOutput(self._deliver_soon)
        self._session: Session = factory.open(self._output, self._pump_soon)
        self._received = bytearray()
        self.is_paused = False

    def write(self, data: bytes) -> None:
        self._received += data
        self._pump_soon()

    def _deliver_soon(self) -> None:
        self._loop.call_soon(self._deliver)

    def _pump_soon(self) -> None:
        self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        if self._peer is None:
            return
        if self._received:
            taken = self._session.receive(memoryview(bytearray(self._received)))
            del self._received[:taken]
            self._session.paused()  # a waiting session must be resumed

    def _deliver(self) -> None:
        if self._peer is not None and not self.is_paused and self._output.written:
            data = bytes(self._output.written)
            self._output.written.clear()
            for at in range(0, len(data), 7):  # frames arrive in pieces
                if self._peer is not None:
                    self._peer.received(data[at : at + 7])

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self._loop.call_soon(self._deliver)

    def close(self) -> None:
        self._peer = None
        self._session.close()

    def break_off(self) -> None:
        """Lose the link, as if the other process had ended."""
        peer, self._peer = self._peer, None
        assert peer is not None
        self._session.close()
        peer.lost()


class Either:
    """Opens sessions of the first factory that recognises the bytes of a link. Implements ``SessionFactory``."""

    wire: Final = "links"

    def __init__(self) -> None:
        self.factories: list[SessionFactory] = []

    def recognise(self, prefix: bytes) -> bool | None:
        return True

    def open(self, output: Output, resume: Callable[[], None]) -> Session:
        return EitherSession(self.factories, output, resume)


class EitherSession:
    """The session of a link whose first bytes have yet to arrive."""

    def __init__(self, factories: Sequence[SessionFactory], output: Output, resume: Callable[[], None]) -> None:
        self._factories = factories
        self._output = output
        self._resume = resume
        self._session: Session | None = None

    def receive(self, data: memoryview) -> int:
        if self._session is None:
            factory = next(factory for factory in self._factories if factory.recognise(bytes(data)))
            self._session = factory.open(self._output, self._resume)
        return self._session.receive(data)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class MemoryShards:
    """Shards of brokers in memory, as one of them sees them."""

    def __init__(self, make_factory: Callable[[Broker], SessionFactory], count: int, own: int = 0) -> None:
        """make_factory: of sessions that forward nothing."""
        self.count = count
        self.own = own
        self.key = KEY
        self.loop = ManualLoop()
        self.brokers = [
            Broker.over(
                lambda replay: MemoryLog(self.loop, self.loop.clock, replay),
                settings=BrokerSettings(),
                loop=self.loop,
                clock=self.loop.clock,
            )
            for _ in range(count)
        ]
        self.factories = [make_factory(broker) for broker in self.brokers]
        self.links: list[MemoryLink] = []

    def shard_of(self, full_name: str) -> int | None:
        if full_name.startswith(INTERNAL):
            return None
        return next((number for number, one in enumerate(self.brokers) if one.find_topic(full_name)), None)

    def shard_by_hash(self, full_name: str) -> int:
        return len(full_name) % self.count

    def least_loaded(self) -> int:
        return min(range(self.count), key=lambda number: len(self.brokers[number].topics()))

    def connect(self, shard: int, peer: LinkPeer) -> MemoryLink:
        self.links.append(MemoryLink(self.loop, self.factories[shard], peer, shard))
        return self.links[-1]


class ShardedConversation:
    """One connection to one of the processes of these shards."""

    def __init__(self, shards: MemoryShards, factory: SessionFactory, output: CapturedOutput | None = None) -> None:
        self.shards = shards
        self.output = output or CapturedOutput()
        self.resumes = 0
        self.session: Session = factory.open(self.output, self._resume)
        self._unread = bytearray()

    def _resume(self) -> None:
        self.resumes += 1

    def feed(self, data: bytes) -> None:
        """Deliver bytes without running the loop."""
        self._unread += data
        if not self.session.paused():
            taken = self.session.receive(memoryview(bytearray(self._unread)))
            del self._unread[:taken]

    def finish(self, data: bytes = b"") -> None:
        """Deliver the last bytes of the client."""
        self.session.finish(memoryview(bytes(self._unread) + data))

    def pass_by(self, seconds: float = 0) -> None:
        """Run everything that is due, and offer waiting bytes again."""
        self.shards.loop.clock.advance(seconds)
        for _ in range(10_000):
            before = len(self._unread), self.resumes, len(self.output.written)
            self.feed(b"")
            self.session.paused()
            self.shards.loop.run_due()
            if before != (len(self._unread), self.resumes, len(self.output.written)):
                continue
            if not self.output.pins:
                return
            time.sleep(PINNED_PAUSE_S)  # for the thread that parses the pinned bytes of a long request

    def take(self) -> bytes:
        """Return what has arrived since the last call."""
        data = bytes(self.output.written)
        self.output.written.clear()
        return data
