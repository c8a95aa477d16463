"""Several shards in memory on one loop, each of which can end before any call of the loop, by kill or power loss.

A restarted shard has what was written, or only what was synced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.protocols.kafka.context import KafkaSettings
from polywire.protocols.runtime.shards import LinkPeer
from polywire.testing.loop import ManualLoop
from tests.unit.protocols import shards_in_memory
from tests.unit.protocols.kafka.test_processes import Processes, Seen
from tests.unit.protocols.kafka.test_transactions_of_processes import Deaf
from tests.unit.protocols.shards_in_memory import MemoryLink

SHARDS: Final = 3


@pytest.fixture
def interruptible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make shards in memory use a loop that can be interrupted."""
    monkeypatch.setattr(shards_in_memory, "ManualLoop", Interrupted)


class Interrupted(ManualLoop):
    """A loop that runs an action before its n-th call."""

    __slots__ = ("calls", "interrupt_at", "interruption")

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.interrupt_at = -1
        self.interruption: Callable[[], None] = lambda: None

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Any:
        return super().call_soon(self._call, callback, *args)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Any:
        return super().call_later(delay, self._call, callback, *args)

    def _call(self, callback: Callable[..., object], *args: Any) -> None:
        self.calls += 1
        if self.calls == self.interrupt_at:
            self.interruption()
        callback(*args)


class Mortal(Seen):
    """The shards as one process sees them until it is killed; then it reaches no shard."""

    def __init__(self, shards: shards_in_memory.MemoryShards, own: int) -> None:
        super().__init__(shards, own)
        self.links: list[MemoryLink] = []
        self.is_dead = False

    def connect(self, shard: int, peer: LinkPeer) -> MemoryLink:
        if self.is_dead:
            return MemoryLink(self._shards.loop, Deaf(), peer)  # type: ignore[arg-type]  # it takes what comes
        self.links.append(super().connect(shard, peer))
        return self.links[-1]


class Cluster(Processes):
    """Processes that can be killed."""

    def __init__(self, settings: KafkaSettings, *topics: str) -> None:
        self._lives: dict[int, Mortal] = {}
        self._settings = settings
        super().__init__(SHARDS, self._see, settings)
        self.loop: Interrupted
        self.make(*topics)
        self.calm()

    def _see(self, shards: shards_in_memory.MemoryShards, own: int) -> Mortal:
        self._lives[own] = Mortal(shards, own)
        return self._lives[own]

    def calm(self) -> None:
        """Run everything that is due."""
        for _ in range(8):
            for broker in self.shards.brokers:
                broker.commit()
            self.loop.run_due()

    def kill(self, own: int, *, synced_only: bool) -> None:
        """Kill a process and start another in its place."""
        dead, log = self._lives[own], self.shards.brokers[own]._log
        dead.is_dead = True
        self.shards.brokers[own].participants.stop()
        broker = Broker.over(
            lambda replay: log.reopen(replay, synced_only=synced_only),  # type: ignore[attr-defined]  # it is in memory
            settings=BrokerSettings(),
            loop=self.loop,
            clock=self.loop.clock,
        )
        self.shards.brokers[own] = broker
        for link in list(self.shards.links):
            if link._peer is None:
                continue
            if link in dead.links:
                link.close()
            elif link.shard == own:
                link.break_off()
        self.open(own, self._see, self._settings)
