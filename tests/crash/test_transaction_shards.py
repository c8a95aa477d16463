"""One of several shards ends at any moment of a transaction over all of them, by kill or power loss: all or nothing.

The shards are brokers in memory on one loop, which is interrupted before one of its calls. A restarted shard has what
was written, or only what was synced. The client is the one of the tests with real processes.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from polywire.protocols.kafka.context import KafkaSettings
from polywire.protocols.kafka.messages import Api
from polywire.types import Level
from tests.crash import kafka_transactor
from tests.crash.kafka_transactor import COUNTING, Counting, Failed, Transactor, nothing
from tests.crash.mortal_shards import SHARDS, Cluster, interruptible
from tests.unit.protocols.kafka.test_processes import Client
from tests.unit.protocols.kafka.test_transactions_of_processes import decisions, everywhere

__all__ = ["interruptible"]

TOPICS: Final = ["a", "bb", "ccc"]  # of shards 1, 2 and 0
ID: Final = "TTT"  # coordinated by shard 0
STEP_S, WAIT_S = 0.02, 10.0
TIMEOUT_S: Final = 60.0  # of its transactions
STRIDE: Final = 1  # calls of the loop from one interruption to the next


class InMemory(Transactor):
    """The counting client without sockets: it notices an ended process at its next request."""

    def __init__(self, cluster: Cluster, dialect: int) -> None:
        super().__init__(("", 0), ID, dialect)
        self._cluster = cluster
        self._clients: dict[int, Client] = {}

    def close(self) -> None:
        self._clients.clear()

    def coordinator(self, key: str, kind: int) -> tuple[str, int]:
        del kind
        return "", self._cluster.shards.shard_by_hash(key)

    def leader(self, topic: str) -> tuple[str, int]:
        return "", self._cluster.shards.shard_by_hash(topic)

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
def at_once(interruptible: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_transactor, "PAUSE_S", 0.0)


def counted(dialect: int, level: Level, victim: int, interrupt_at: int, *, synced_only: bool) -> int:
    """Count while a process ends before this call of the loop; return the calls before the last transaction."""
    cluster = Cluster(KafkaSettings(acks_all=level), *TOPICS)
    counting = Counting(InMemory(cluster, dialect), TOPICS)
    counting.one(nothing)
    cluster.loop.calls = 0
    cluster.loop.interrupt_at = interrupt_at
    cluster.loop.interruption = lambda: cluster.kill(victim, synced_only=synced_only)
    counting.one(nothing)
    calls = cluster.loop.calls
    counting.one(nothing)
    cluster.loop.advance(2 * TIMEOUT_S)  # it may have started one more
    cluster.calm()
    found = everywhere(cluster)
    count = len(found[0])
    assert found[0] == [b"%d" % number for number in range(1, count + 1)], "each once, none missing"
    assert count in (counting.done, counting.done + 1), "the acknowledged ones, and one unacknowledged"
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
def test_below_synced_durability_decisions_over_several_shards_are_still_synced(victim: int) -> None:
    at, calls = 1 + victim, 1
    while at <= calls:
        calls = counted(2, Level.WRITTEN, victim, at, synced_only=True)
        at += 2 * STRIDE
