"""The unmodified Python SDK of Cursus with topics in several processes.

Its producers look up leaders once; its consumers look them up again.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from polywire.server.processes import PORTS_EACH
from polywire.testing.process import lasting_port
from tests.broker_process import BrokerProcess
from tests.crash.test_processes import pid_of
from tests.crash.test_shards import SHARDS, TOPICS, leaders, machine, url_of
from tests.crash.test_standby import _cluster
from tests.interop.test_cursus_client import Consuming, address, sdk, until

__all__ = ["sdk"]

NAMES = [name for names in TOPICS.values() for name in names]
COUNT = 20

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="several processes share addresses on Linux only")


def producer_of(sdk: Any, broker: BrokerProcess, topic: str) -> Any:
    return sdk.Producer(sdk.ProducerConfig(topic=topic, brokers=[address(broker)], partitions=2, linger_ms=5))


def send(producers: list[Any], first: int) -> None:
    """Send more records to every topic; all are acknowledged."""
    for producer in producers:
        for number in range(first, first + COUNT):
            producer.send(f"m{number}", key=f"k{number}")
    until(lambda: all(one.unique_ack_count == first + COUNT for one in producers), "everything is acknowledged")


def ports_of(producers: list[Any]) -> set[int]:
    """Return the ports they connect to."""
    return {int(at.rpartition(":")[2]) for producer in producers for at in producer._partition_leaders.values()}


def first_port() -> int:
    """Return the first of as many free consecutive ports as the processes may use."""
    ports = [lasting_port()]
    while len(ports) < SHARDS * PORTS_EACH:
        port = lasting_port()
        ports = [*ports, port] if port == ports[-1] + 1 else [port]
    return ports[0]


def test_producers_survive_a_change_of_the_leader_they_looked_up(sdk: Any, tmp_path: Path) -> None:
    """The shared address of a machine exists as long as the machine; a process's own only while it leads."""
    url, options = url_of(tmp_path), ("--processes", str(SHARDS), "--balance-s", "0")
    with machine(tmp_path, "one", *options) as one, machine(tmp_path, "two", *options) as two:
        assert leaders(url) == ["one-0000", "one-0001"]
        producers = [producer_of(sdk, broker, name) for name, broker in zip(NAMES, (one, two) * 2, strict=True)]
        assert ports_of(producers) <= {broker.addresses["cursus"][1] for broker in (one, two)}
        send(producers, 0)
        for shard in range(SHARDS):
            _cluster("takeover", url, "--shard", str(shard), "--node", "two")
        send(producers, COUNT)
        for producer in producers:
            producer.close()
        assert one.stop() == 0, one.log_text()
        assert two.stop() == 0, two.log_text()


def test_clients_connect_to_the_process_that_owns_a_topic_if_it_has_a_stable_port(sdk: Any, tmp_path: Path) -> None:
    """And continue when it is killed, and when all are restarted."""
    first = first_port()
    options = "--processes", str(SHARDS), "--shard-port", str(first)
    own = {first + PORTS_EACH * shard + 2 for shard in range(SHARDS)}
    with BrokerProcess(tmp_path / "data", *options, "--any", "127.0.0.1:0", wires=("cursus", "kafka")) as broker:
        producers = [producer_of(sdk, broker, name) for name in NAMES]
        assert ports_of(producers) == own, "topics are in both"
        send(producers, 0)
        consuming = [Consuming(sdk, broker, name, "polling", consumer_id=name, group_id=name) for name in NAMES]
        for one in consuming:
            with one:
                until(lambda one=one: len(one.got) == COUNT, "everything is there")  # type: ignore[misc]
                assert {at.rpartition(":")[2] for at in one.consumer._partition_leaders.values()} <= set(map(str, own))
        victim = pid_of(tmp_path / "data", 1)
        os.kill(victim, signal.SIGKILL)
        send(producers, COUNT)
        assert pid_of(tmp_path / "data", 1) != victim
        for producer in producers:
            producer.close()
        assert broker.stop() == 0, broker.log_text()
