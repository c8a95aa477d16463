"""The unmodified Python SDK of FLUX against a real broker: raw client, producer, consumers that come and go, a restart.

The SDK is not part of this project. ``POLYWIRE_FLUX_SDK`` names the directory of the package ``flux_sdk``, or its
parent.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.three_brokers import Brokers, one_or_three

WAIT_S = 20.0
SOAK_S = 60.0  # the runtime's loop, for as long as the protocol's checklist asks


@pytest.fixture(scope="module")
def sdk() -> Any:
    place = os.environ.get("POLYWIRE_FLUX_SDK")
    if place is None:
        pytest.skip("POLYWIRE_FLUX_SDK is not set: the FLUX wire was NOT tried with its real SDK")
    folder = Path(place)
    parent = folder.parent if (folder / "client.py").exists() else folder
    sys.path.insert(0, str(parent))
    try:
        yield importlib.import_module("flux_sdk")
    finally:
        sys.path.remove(str(parent))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Brokers]:
    with one_or_three(tmp_path) as process:
        yield process


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"did not happen in {WAIT_S} s: {what}"
        time.sleep(0.02)


def connected(sdk: Any, broker: Brokers) -> Any:
    host, port = broker.addresses["flux"]
    client = sdk.FLUXClient(host=host, port=port)
    client.connect()
    return client


def test_raw_client(sdk: Any, broker: Brokers) -> None:
    client = connected(sdk, broker)
    created = client.admin_create_topic("audit", 4, 2)
    assert (created.topic, created.partitions, created.replication_factor, created.term) == ("audit", 4, 2, 1)
    first = client.produce("audit", "order-1", "created", acks="1")
    assert (first.partition, first.offset, first.high_watermark) == (1, 0, 0)
    client.produce("audit", "order-1", 'p|q:{"id":7}', acks="0")
    assert [(m.offset, m.value) for m in client.consume("audit", 1, 0)] == [(0, "created"), (1, 'p|q:{"id":7}')]
    assert client.consume("audit", 1, 2) == []
    with pytest.raises(sdk.FLUXProtocolError) as refused:
        client.produce("audit", "order-1", "x", acks="all")
    assert refused.value.code == "REPLICATION_TIMEOUT"
    fetched = client.replica_fetch("audit", 1, 1, 2)
    assert (fetched.acked_offset, fetched.high_watermark, fetched.isr, fetched.under_replicated) == (
        2,
        2,
        [0, 1],
        False,
    )
    assert client.set_partition_role("audit", 1, "follower").role == "follower"
    with pytest.raises(sdk.FLUXProtocolError) as refused:
        client.produce("audit", "order-1", "x")
    assert refused.value.code == "NOT_LEADER"
    assert client.set_partition_role("audit", 1, "leader").high_watermark == 2
    assert client.admin_register_broker(1, "10.0.0.2", 9093).port == 9093
    assert client.admin_broker_heartbeat(1).heartbeat_ok
    assert client.admin_set_partition_leader("audit", 0, 0, [0, 1]).isr == [0, 1]
    assert client.admin_get_metadata().topics == ["audit"]
    assert client.admin_get_metadata().brokers == [0, 1]
    client.close()


def test_groups_of_the_raw_client(sdk: Any, broker: Brokers) -> None:
    client = connected(sdk, broker)
    client.produce("metrics", "host-a", "cpu=41")
    assert (joined := client.join("alerts", "metrics", "w1")).generation == 2
    assert joined.assigned == [0, 1, 2]
    assert client.join("alerts", "metrics", "w2").assigned == [1]
    with pytest.raises(sdk.FLUXProtocolError) as stale:
        client.heartbeat("alerts", "metrics", "w1", 2)
    assert stale.value.code == "GENERATION_MISMATCH"
    assert client.sync("alerts", "metrics", "w1", 3).assigned == [0, 2]
    assert client.commit("alerts", "metrics", "w1", 3, 2, 1)
    assert client.offset("alerts", "metrics", 2) == 1
    assert client.leave("alerts", "metrics", "w2", 3)
    assert client.join("alerts", "metrics", "w1", "range").generation == 5
    client.close()


class Member:
    """A consumer of the SDK's runtime in its own thread."""

    def __init__(self, sdk: Any, broker: Brokers, name: str) -> None:
        host, port = broker.addresses["flux"]
        self.values: list[str] = []
        self.assigned: list[int] = []
        self.crashes: list[Exception] = []
        self.consumer = sdk.FLUXRuntime(host=host, port=port).consumer(
            group_id="workers",
            consumer_id=name,
            heartbeat_interval_ms=50,
            poll_interval_ms=20,
            max_retries=0,
            on_assign=self._assign,
            on_crash=self.crashes.append,
        )
        self.consumer.subscribe("orders")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _assign(self, partitions: list[int]) -> None:
        self.assigned = sorted(partitions)

    def _run(self) -> None:
        try:
            self.consumer.run(lambda context: self.values.append(context.message.value))
        except Exception as error:
            if not self.crashes:
                self.crashes.append(error)

    def leave(self) -> None:
        self.consumer.disconnect()
        self._thread.join(5)


def send(sdk: Any, broker: Brokers, first: int, count: int) -> None:
    host, port = broker.addresses["flux"]
    messages = [sdk.ProducerMessage(f"order-{n}", f"value-{n}") for n in range(first, first + count)]
    sdk.FLUXRuntime(host=host, port=port).producer().send(sdk.ProducerSendParams("orders", messages))


def test_members_join_and_leave_and_the_broker_restarts(sdk: Any, broker: Brokers) -> None:
    send(sdk, broker, 0, 300)
    first = Member(sdk, broker, "w1")
    until(lambda: len(first.values) >= 300, "the first member reads everything")
    second = Member(sdk, broker, "w2")
    until(lambda: first.assigned == [0, 2] and second.assigned == [1], "two members share the partitions")
    send(sdk, broker, 300, 300)
    until(lambda: len(first.values) + len(second.values) >= 600, "both members read")
    assert second.values
    second.leave()
    until(lambda: first.assigned == [0, 1, 2], "the first member takes all partitions over")
    send(sdk, broker, 600, 100)
    until(lambda: len(first.values) + len(second.values) >= 700, "the rest is read")
    assert not first.crashes
    assert broker.stop() == 0
    until(lambda: bool(first.crashes), "a restart ends the SDK's consumer")
    first.leave()
    broker.start()
    again = Member(sdk, broker, "w1")
    until(lambda: again.assigned == [0, 1, 2], "the member is back")
    send(sdk, broker, 700, 100)
    until(lambda: len(again.values) >= 100, "positions outlived the broker")
    again.leave()
    assert {*first.values, *second.values, *again.values} == {f"value-{n}" for n in range(800)}


@pytest.mark.slow
def test_a_minute_of_members_that_come_and_go(sdk: Any, broker: Brokers) -> None:
    """One member stays and another comes and goes under a steady producer: offsets only advance."""
    send(sdk, broker, 0, 3)
    members, sent, visits = [Member(sdk, broker, "w1")], 3, 0

    def tended() -> bool:
        """Restart the permanent member: the SDK fails if a generation passes between its JOIN and SYNC."""
        if members[0].crashes:
            assert [getattr(error, "code", repr(error)) for error in members[0].crashes] == ["GENERATION_MISMATCH"]
            members[0].leave()
            members.insert(0, Member(sdk, broker, "w1"))
        return True

    until(lambda: members[0].assigned == [0, 1, 2], "the first member has everything")
    end = time.monotonic() + SOAK_S
    while time.monotonic() < end:
        tended()
        guest = Member(sdk, broker, f"w{visits + 2}")
        members.append(guest)
        send(sdk, broker, sent, 200)
        until(lambda guest=guest: guest.values or guest.crashes, "a guest reads")  # type: ignore[misc]
        guest.leave()
        send(sdk, broker, sent + 200, 100)
        sent, visits = sent + 300, visits + 1
    wanted = {f"value-{n}" for n in range(sent)}
    until(lambda: tended() and {value for member in members for value in member.values} >= wanted, "everything is read")
    members[0].leave()
    read = [value for member in members for value in member.values]
    assert set(read) == wanted
    print(f"{sent} records, {visits} guests, {len(read) - sent} read twice, {len(members) - visits - 1} restarts")


def test_a_producer_continues_with_the_next_broker(sdk: Any, broker: Brokers) -> None:
    address = broker.addresses["flux"]
    runtime = sdk.FLUXRuntime(brokers=[("127.0.0.1", 1), address])
    runtime.producer(max_retries=0).send(sdk.ProducerSendParams("orders", [sdk.ProducerMessage("k", "v")]))
    client = connected(sdk, broker)
    assert [len(client.consume("orders", partition, 0)) for partition in range(3)].count(1) == 1
    client.close()
