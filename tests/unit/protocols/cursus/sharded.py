"""Cursus connections to several processes in memory, and to one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from polywire.broker.broker import Broker
from polywire.protocols.cursus.context import CursusSettings, Places
from polywire.protocols.cursus.factory import CursusFactory
from polywire.protocols.cursus.messages import bodies_of, frame
from polywire.routing.broker import RoutedBroker
from polywire.routing.session import Part, RouterFactory
from tests.unit.protocols import shards_in_memory
from tests.unit.protocols.polywire.peer import CapturedOutput
from tests.unit.protocols.shards_in_memory import KEY, MemoryLink, ShardedConversation

WAIT_S = 60.0


class MemoryShards(shards_in_memory.MemoryShards):
    """Processes that serve the Cursus protocol. ``cursus`` are their factories."""

    def __init__(
        self,
        count: int,
        settings: CursusSettings | None = None,
        places: Callable[[int], Places] | None = None,
        *,
        settled: bool = True,
    ) -> None:
        """settled: whether the processes know each other's topics already."""
        parts: dict[Any, dict[str, Part]] = {}
        executors: dict[Any, dict[str, Any]] = {}

        def opened(broker: Broker) -> RouterFactory:
            shared = executors.setdefault(broker, {}), parts.setdefault(broker, {})
            return RouterFactory(broker, KEY, None, *shared)

        super().__init__(opened, count)
        self.cursus: list[CursusFactory] = []
        for own, broker in enumerate(self.brokers):
            if count == 1:
                self.cursus.append(CursusFactory(broker, settings))
                continue
            routed = RoutedBroker(broker, self.seen_by(own))
            place = None if places is None else places(own)
            factory = CursusFactory(broker, settings, places=place, router=routed)
            self.cursus.append(factory)
            routed.executors[factory.wire] = executors[broker][factory.wire] = factory.executor
            parts[broker] |= {name: Part(name, target, called) for name, target, called in factory.called}
        for _ in range(20 if settled else 0):
            self.loop.run_due()

    def seen_by(self, own: int) -> MemoryShards:
        """Return these shards as one of the processes sees them."""
        seen = type(self).__new__(type(self))
        seen.__dict__.update(self.__dict__, own=own)
        return seen

    def link(self, own: int, shard: int) -> MemoryLink:
        """Return the latest link from one process to another."""
        at = shard - (shard > own)
        return self.links[own * (self.count - 1) + at]


class Conversation(ShardedConversation):
    """One connection to the process of shard ``own``."""

    shards: MemoryShards

    def __init__(self, shards: MemoryShards, own: int = 0) -> None:
        output = CapturedOutput()
        output.local = ("10.0.0.7", 9000)
        super().__init__(shards, shards.cursus[own], output)

    def say(self, *bodies: bytes) -> None:
        self.feed(b"".join(map(frame, bodies)))
        self.pass_by()
        if self._unread:
            self.pass_by(1.0)  # a write waits for its topic

    def heard(self) -> list[bytes]:
        """Return the bodies of the frames that arrived."""
        return bodies_of(self.take())

    def ask(self, text: str) -> str:
        self.say(text.encode())
        (answer,) = self.heard()
        return answer.decode()

    def finally_asked(self, text: str) -> str:
        """The same for requests whose password is verified by a thread."""
        self.say(text.encode())
        end = time.monotonic() + WAIT_S
        while not (found := self.heard()):
            assert time.monotonic() < end
            self.pass_by()
            time.sleep(0.001)
        return found[0].decode()


def three(*topics: str) -> Conversation:
    """Return a connection to three shards that own consecutive topics."""
    conversation = Conversation(MemoryShards(3))
    for topic in topics:
        assert conversation.ask(f"CREATE topic={topic} partitions=1").startswith("OK")
    return conversation
