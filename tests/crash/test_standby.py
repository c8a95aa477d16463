"""Two brokers on one bucket: the standby forwards connections to the leader, and takes over when it stops."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from csv import DictReader
from http.client import HTTPConnection
from io import StringIO
from pathlib import Path

import pytest

import polywire
from polywire.client.connect import connect
from polywire.cluster.nodes import Node, Nodes
from polywire.records.columns import Record
from polywire.server.standby import FORWARDING
from polywire.store.url import open_bucket
from polywire.types import NODE_TIMEOUT_S_MIN, Level
from tests import fork_server
from tests.broker_process import BrokerProcess, child_environment
from tests.crash.test_broker_kill import Producer, check, end

KILLS = 3
WAIT_S = 60.0  # for what takes seconds on a quiet machine
WIRES = ("polywire", "cursus", "iggy")


def broker_of(tmp_path: Path, node: str) -> BrokerProcess:
    wires = (*WIRES, "http")
    return BrokerProcess(tmp_path / node, "--bucket", f"file://{tmp_path / 'bucket'}", "--node", node, wires=wires)


def ask(broker: BrokerProcess, path: str) -> tuple[int, bytes]:
    host, port = broker.addresses["http"]
    connection = HTTPConnection(host, port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < end, "the condition was not reached in time"
        time.sleep(0.05)


def leads(broker: BrokerProcess, times: int) -> bool:
    return broker.log_text().count("leading the shard") >= times


def is_standby(broker: BrokerProcess, times: int) -> bool:
    return broker.log_text().count("standby: forwarding connections") >= times


def test_the_standby_takes_over_and_nothing_is_lost(tmp_path: Path) -> None:
    """Every producer stays with one broker, whichever leads."""
    with broker_of(tmp_path, "one") as one, broker_of(tmp_path, "two") as two:
        brokers = [one, two]
        producers = [
            Producer(lambda broker=broker, wire=wire: broker.url(wire), name.encode(), Level.WRITTEN, batch=batch)  # type: ignore[misc]
            for name, broker, wire, batch in (
                ("a", one, "polywire", 1),
                ("b", two, "polywire", 20),
                ("c", one, "cursus", 3),
                ("d", two, "iggy", 3),
            )
        ]
        asyncio.run(_produce_and_kill_leaders(brokers, producers))
        for broker in brokers:
            assert asyncio.run(check(broker.url("polywire"), producers)) > 0
        for broker in brokers:
            assert broker.stop() == 0, broker.log_text()


async def _produce_and_kill_leaders(brokers: Sequence[BrokerProcess], producers: Sequence[Producer]) -> None:
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    chance = random.Random(7)
    led = {id(broker): 0 for broker in brokers}
    led[id(brokers[0])] = 1
    leader, other = brokers
    for _ in range(KILLS):
        await asyncio.sleep(1 + chance.random())
        leader.kill()
        led[id(other)] += 1
        await asyncio.to_thread(until, lambda other=other: leads(other, led[id(other)]))  # type: ignore[misc]
        await asyncio.to_thread(leader.start)
        leader, other = other, leader
    await end(producers, tasks, beyond=5)


def test_one_of_two_standbys_takes_over(tmp_path: Path) -> None:
    """The other one detects that there is a leader, although the killed leader is not forgotten yet."""
    with broker_of(tmp_path, "one") as one, broker_of(tmp_path, "two") as two, broker_of(tmp_path, "three") as three:
        asyncio.run(_produce(one, b"before"))
        one.kill()
        until(lambda: leads(two, 1) or leads(three, 1))
        time.sleep(3)
        led = [broker.log_text().count("leading the shard") for broker in (one, two, three)]
        assert sorted(led) == [0, 1, 1], "the first leader, and one other"
        for broker in (two, three):
            assert broker.stop() == 0, broker.log_text()


def test_clients_that_connect_without_a_leader_wait(tmp_path: Path) -> None:
    """A client that connects to the standby right after the leader's death finds it leading."""

    async def first(url: str) -> list[str]:
        async with polywire.connect(url, connect_s=WAIT_S, reconnect_s=WAIT_S) as client:
            return [topic.name for topic in await client.topics()]

    async def killed() -> list[list[str]]:
        await _produce(one, b"before")
        await asyncio.to_thread(one.kill)
        return await asyncio.gather(*(first(two.url(wire)) for wire in WIRES))

    with broker_of(tmp_path, "one") as one, broker_of(tmp_path, "two") as two:
        assert asyncio.run(killed()) == [["topic"]] * len(WIRES)
        assert two.stop() == 0, two.log_text()


def test_a_suspended_leader_becomes_a_standby(tmp_path: Path) -> None:
    with broker_of(tmp_path, "one") as one, broker_of(tmp_path, "two") as two:
        asyncio.run(_produce(one, b"before"))
        os.kill(one.pid, signal.SIGSTOP)
        until(lambda: leads(two, 1))
        os.kill(one.pid, signal.SIGCONT)
        until(lambda: is_standby(one, 1))
        assert ask(one, "/readyz") == (200, FORWARDING.encode())
        assert ask(one, "/livez") == ask(two, "/livez") == (200, b"alive\n")
        assert ask(two, "/readyz") == (200, b"ready\n")
        for broker, leading in ((one, 0), (two, 1)):
            status, reported = ask(broker, "/metrics")
            assert status == 200
            assert b'polywire_bucket_leads{shard="0000"} %d' % leading in reported
        assert ask(one, "/api/v1/overview")[0] == 503
        asyncio.run(_produce(two, b"after"))
        assert asyncio.run(_values(one)) == [b"before", b"after"]
        assert one.stop() == 0, one.log_text()
        assert two.stop() == 0, two.log_text()


def test_two_brokers_of_the_same_name_are_refused(tmp_path: Path) -> None:
    with broker_of(tmp_path, "one"):
        other = BrokerProcess(
            tmp_path / "other", "--bucket", f"file://{tmp_path / 'bucket'}", "--node", "one", wires=WIRES
        )
        with pytest.raises(AssertionError, match="another broker with this name is the leader"):
            other.start()


def test_a_broker_that_was_killed_while_taking_over_starts_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    Nodes(open_bucket(url)).put(Node("one", "killed", {}, start=-1, timeout_s=NODE_TIMEOUT_S_MIN))
    with broker_of(tmp_path, "one") as one:
        asyncio.run(_produce(one, b"value"))
        assert one.stop() == 0, one.log_text()


def test_a_requested_takeover(tmp_path: Path) -> None:
    """And what the command line reports about the brokers."""
    url = f"file://{tmp_path / 'bucket'}"
    assert "the bucket has no log" in _cluster("status", url, code=1)
    _cluster("init", url)
    with broker_of(tmp_path, "one") as one, broker_of(tmp_path, "two") as two:
        asyncio.run(_produce(one, b"before"))
        assert _states(url) == {"one": ("leads", 1), "two": ("standby", None)}
        assert "the broker is already the leader" in _cluster("takeover", url, "--node", "one", code=1)
        assert "two is now the leader start=2" in _cluster("takeover", url)
        until(lambda: is_standby(one, 1))
        assert _states(url) == {"one": ("standby", None), "two": ("leads", 2)}
        asyncio.run(_produce(one, b"after"))
        assert asyncio.run(_values(two)) == [b"before", b"after"]
        os.kill(one.pid, signal.SIGSTOP)
        assert _states(url)["one"][0] == "silent"
        assert "there is no standby" in _cluster("takeover", url, code=1)
        os.kill(one.pid, signal.SIGCONT)
        assert one.stop() == 0, one.log_text()
        assert _states(url) == {"two": ("leads", 2)}, "a stopped broker is forgotten"
        (row,) = DictReader(StringIO(_cluster("status", url, "-o", "csv")))
        assert row["node"] == "two"
        table = _cluster("status", url)
        assert all(word in table for word in ("two", "leads", "polywire=127.0.0.1:", "log id="))


def _states(url: str) -> dict[str, tuple[str, int | None]]:
    rows = json.loads(_cluster("status", url, "-o", "json"))
    return {row["node"]: (row["state"], row["start"]) for row in rows}


def _cluster(*words: str, code: int = 0) -> str:
    """Return the output of ``polywire cluster``."""
    command = [sys.executable, "-m", "polywire", "cluster", *words]
    found = fork_server.run(command, env=child_environment(), text=True)
    printed: str = found.stdout + found.stderr
    assert found.returncode == code, printed
    return printed


async def _produce(broker: BrokerProcess, value: bytes) -> None:
    client = await connect(broker.url())
    await client.produce("topic", [Record(value=value, key=b"k")])
    await client.close()


async def _values(broker: BrokerProcess) -> list[bytes | None]:
    client = await connect(broker.url())
    try:
        found = []
        for partition in range(3):
            page = await client.fetch("topic", partition, 0)
            found += [record.value for record in page]
        return found
    finally:
        await client.close()
