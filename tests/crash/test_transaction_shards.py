"""One of several shards ends at any moment of a transaction that lies in all of them, by a kill or a power loss: all of it is there, or none.

The shards are brokers in memory on one loop, which is interrupted before one of its calls; what was written, or only what was synced, is
there when the shard starts again. The same client counts on as with real processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.protocols.kafka.context import KafkaSettings
from polywire.protocols.kafka.factory import KafkaFactory, KafkaLinkFactory
from polywire.protocols.kafka.messages import Api
from polywire.protocols.runtime.shards import LinkPeer
from polywire.testing.loop import ManualLoop
from polywire.types import Level
from tests.crash import kafka_transactor
from tests.crash.kafka_transactor import COUNTING, Counting, Failed, Transactor, nothing
from tests.unit.protocols import shards_in_memory
from tests.unit.protocols.kafka.test_carrying import Client, Processes, Seen
from tests.unit.protocols.kafka.test_transaction_homes import Deaf, decisions, everywhere
from tests.unit.protocols.shards_in_memory import MemoryLink

TOPICS: Final = ["a", "bb", "ccc"]  # of shards 1, 2 and 0
ID: Final = "TTT"  # at home in shard 0
SHARDS: Final = 3
STEP_S, WAIT_S = 0.02, 10.0
TIMEOUT_S: Final = 60.0  # of its transactions
STRIDE: Final = 1  # calls of the loop from one interruption to the next


class Interrupted(ManualLoop):
    """A loop that has something done before its n-th call."""

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
    """The shards as one life of a process sees them; a dead one reaches nobody."""

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

    def __init__(self, settings: KafkaSettings) -> None:
        self._lives: dict[int, Mortal] = {}
        self._settings = settings
        super().__init__(SHARDS, self._see, settings)
        self.loop: Interrupted
        self.make(*TOPICS)
        self.calm()

    def _see(self, shards: shards_in_memory.MemoryShards, own: int) -> Mortal:
        self._lives[own] = Mortal(shards, own)
        return self._lives[own]

    def calm(self) -> None:
        """Let everything happen that is due."""
        for _ in range(8):
            for broker in self.shards.brokers:
                broker.commit()
            self.loop.run_due()

    def kill(self, own: int, *, synced_only: bool) -> None:
        """End a process, and start another in its place."""
        dead, log = self._lives[own], self.shards.brokers[own]._log
        dead.is_dead = True
        self.shards.brokers[own].branches.stop()
        broker = Broker.over(
            lambda replay: log.reopen(replay, synced_only=synced_only),  # type: ignore[attr-defined]  # it is in memory
            settings=BrokerSettings(),
            loop=self.loop,
            clock=self.loop.clock,
        )
        was, self.shards.brokers[own] = self.outside[own], broker
        self.outside[own] = KafkaFactory(broker, self._settings, shards=self._see(self.shards, own))
        self.shards.factories[own] = KafkaLinkFactory(self.outside[own], self.shards.key)
        for link in list(self.shards.links):
            if link._peer is None:
                continue
            if link in dead.links:
                link.close()
            elif link._session.shared is was.shared:  # type: ignore[attr-defined]
                link.break_off()


class InMemory(Transactor):
    """The client that counts, without sockets: it finds out that a process has ended when it asks again."""

    def __init__(self, cluster: Cluster, dialect: int) -> None:
        super().__init__(("", 0), ID, dialect)
        self._cluster = cluster
        self._clients: dict[int, Client] = {}

    def close(self) -> None:
        self._clients.clear()

    def coordinator(self, key: str, kind: int) -> tuple[str, int]:
        del kind
        return "", self._cluster.shards.home(key)

    def leader(self, topic: str) -> tuple[str, int]:
        return "", self._cluster.shards.home(topic)

    def _client(self, shard: int) -> Client:
        client = self._clients.get(shard)
        if client is None:
            client = self._clients[shard] = Client(self._cluster, shard)
        elif client.session.shared is not self._cluster.outside[shard].shared:
            raise ConnectionResetError("the process has ended")
        return client

    def tell(self, at: tuple[str, int], api: Api, version: int, /, **fields: Any) -> None:
        self._cluster.loop.advance(STEP_S)
        self._client(at[1]).tell(api, version, **fields)

    def hear(self, at: tuple[str, int], api: Api, version: int) -> Any:
        client = self._client(at[1])
        for _ in range(int(WAIT_S / STEP_S)):
            body = client.hear(api, version)
            if self._client(at[1]) is client and body is not None:
                if getattr(body, "error", 0):
                    raise Failed(api, body.error)
                return body
            self._cluster.loop.advance(STEP_S)
        raise TimeoutError("no answer")


@pytest.fixture(autouse=True)
def interruptible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_in_memory, "ManualLoop", Interrupted)
    monkeypatch.setattr(kafka_transactor, "PAUSE_S", 0.0)


def counted(dialect: int, level: Level, victim: int, interrupt_at: int, *, synced_only: bool) -> int:
    """Let a client count while a process ends before this call of the loop; how many calls there were before the last transaction."""
    cluster = Cluster(KafkaSettings(acks_all=level))
    counting = Counting(InMemory(cluster, dialect), TOPICS)
    counting.one(nothing)
    cluster.loop.calls = 0
    cluster.loop.interrupt_at = interrupt_at
    cluster.loop.interruption = lambda: cluster.kill(victim, synced_only=synced_only)
    counting.one(nothing)
    calls = cluster.loop.calls
    counting.one(nothing)
    cluster.loop.advance(2 * TIMEOUT_S)  # it may have begun one more
    cluster.calm()
    found = everywhere(cluster)
    count = len(found[0])
    assert found[0] == [b"%d" % number for number in range(1, count + 1)], "each once, none left out"
    assert count in (counting.done, counting.done + 1), "what was acknowledged, and one that nobody was told of"
    assert found[0] == found[1] == found[2]
    held = cluster.broker(TOPICS[0]).classic.positions(COUNTING, TOPICS[0])
    assert held[0].offset == count
    assert decisions(cluster) == 0
    assert not any(known.is_open for broker in cluster.shards.brokers for known in broker._state.transactions)
    return calls


@pytest.mark.parametrize("synced_only", [False, True], ids=["killed", "without power"])
@pytest.mark.parametrize("victim", range(SHARDS))
@pytest.mark.parametrize("dialect", [1, 2])
def test_a_shard_ends_at_any_moment(dialect: int, victim: int, synced_only: bool) -> None:
    at, calls = 1 + victim, 1
    while at <= calls:
        calls = counted(dialect, Level.SYNCED, victim, at, synced_only=synced_only)
        at += STRIDE


@pytest.mark.parametrize("victim", range(SHARDS))
def test_with_less_than_synced_what_several_shards_have_is_synced_all_the_same(victim: int) -> None:
    at, calls = 1 + victim, 1
    while at <= calls:
        calls = counted(2, Level.WRITTEN, victim, at, synced_only=True)
        at += 2 * STRIDE
