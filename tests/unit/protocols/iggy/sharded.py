"""Iggy connections to several processes in memory, and to one."""

from __future__ import annotations

import time
from struct import pack, unpack_from
from typing import Any, cast

from polywire.errors import PeerError
from polywire.protocols.iggy.context import IggyBroker, IggySettings
from polywire.protocols.iggy.factory import IggyFactory
from polywire.protocols.runtime.shards import LinkPeer
from polywire.routing.broker import RoutedBroker
from polywire.routing.session import Part, RouterFactory
from tests.unit.protocols import shards_in_memory
from tests.unit.protocols.iggy.dialogue import classic, headered
from tests.unit.protocols.polywire.peer import CapturedOutput
from tests.unit.protocols.shards_in_memory import KEY, MemoryLink, ShardedConversation

WAIT_S = 10.0


class MemoryShards(shards_in_memory.MemoryShards):
    """Processes that serve the Iggy protocol. ``iggy`` are their factories. Links to ``silent`` shards have no answers."""

    def __init__(self, count: int, *, dialect: str = "auto") -> None:
        self._parts: dict[Any, dict[str, Part]] = {}
        self.silent: set[int] = set()
        super().__init__(lambda broker: RouterFactory(broker, KEY, parts=self._parts.setdefault(broker, {})), count)
        self._settings = IggySettings(dialect=dialect)
        self.iggy: list[IggyFactory] = []
        for own, broker in enumerate(self.brokers):
            self.iggy.append(IggyFactory(broker, self._settings) if count == 1 else self._routed(own))
        for _ in range(20):
            self.loop.run_due()

    def _routed(self, own: int) -> IggyFactory:
        broker = self.brokers[own]
        routed = RoutedBroker(broker, self.seen_by(own))
        factory = IggyFactory(cast(IggyBroker, routed), self._settings, parts=routed)
        self._parts[broker] |= {name: Part(name, target, called) for name, target, called in factory.called}
        return factory

    def restart(self, own: int) -> None:
        """Let a process forget everything that is not stored. Its links are opened again."""
        self.iggy[own] = self._routed(own)

    def connect(self, shard: int, peer: LinkPeer) -> MemoryLink:
        link = super().connect(shard, peer)
        if shard in self.silent:
            link.pause()
        return link

    def seen_by(self, own: int) -> MemoryShards:
        """Return these shards as one of the processes sees them."""
        seen = type(self).__new__(type(self))
        seen.__dict__.update(self.__dict__, own=own)
        return seen


class Output(CapturedOutput):
    """Records why a connection was closed."""

    failed: PeerError | None = None

    def fail(self, error: PeerError) -> None:
        self.failed = error


class Conversation(ShardedConversation):
    """One connection to the process of shard ``own``."""

    output: Output
    shards: MemoryShards

    def __init__(self, shards: MemoryShards, own: int = 0) -> None:
        output = Output()
        output.peer = f"10.0.0.{own}:{id(self) % 60_000}"
        super().__init__(shards, shards.iggy[own], output)

    def say(self, *frames: bytes) -> None:
        self.feed(b"".join(frames))
        self.pass_by()

    def wait(self) -> bytes:
        """Return what arrives; a password may have to be hashed meanwhile."""
        end = time.monotonic() + WAIT_S
        while not self.output.written:
            assert time.monotonic() < end, "no response arrived"
            time.sleep(0.001)
            self.pass_by()
        return self.take()

    def ask(self, code: int, payload: bytes = b"") -> tuple[int, bytes]:
        """Return the status and payload of the response to a classic request."""
        self.say(classic(code, payload))
        answer = self.wait()
        status, size = unpack_from("<II", answer)
        assert size == len(answer) - 8
        return status, answer[8:]

    def headered(self, operation: int, body: bytes = b"", *, code: int = 0, number: int = 0) -> tuple[int, bytes]:
        """Return the status and body of the response to a request of the headered framing."""
        self.say(headered(operation, body, code=code, number=number))
        answer = self.wait()
        assert answer[60] == 8
        return unpack_from("<I", answer, 216)[0], answer[256:]

    def close(self) -> None:
        self.session.close()
        self.pass_by()


def make_shards(shard_count: int, *, dialect: str = "auto") -> MemoryShards:
    """Create shards that serve the Iggy protocol."""
    return MemoryShards(shard_count, dialect=dialect)


def log_in(conversation: Conversation) -> None:
    """Log in as the default user of an open broker."""
    assert conversation.ask(38, b"\4iggy\4iggy")[0] == 0


def ident(named: int | str) -> bytes:
    """Return the identifier of a stream, topic, group or consumer as requests encode it."""
    if isinstance(named, int):
        return pack("<BBI", 1, 4, named)
    encoded = named.encode()
    return bytes((2, len(encoded))) + encoded
