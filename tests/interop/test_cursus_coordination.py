"""The unmodified Python SDK of Cursus against a real broker: group members, event store, and transactions."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import BrokerProcess
from tests.interop.test_cursus_client import Consuming, address, broker, produce, sdk, stored, until

__all__ = ["broker", "sdk"]


@pytest.fixture
def newest(sdk: Any) -> Iterator[Any]:
    """Replace the release, which has no transactions, by the SDK's repository version for one test."""
    place = os.environ.get("POLYWIRE_CURSUS_PYTHON_MAIN")
    if place is None or not (Path(place) / "cursus" / "transaction.py").exists():
        pytest.skip(
            "POLYWIRE_CURSUS_PYTHON_MAIN names no sources: Cursus transactions were NOT tried with a real client"
        )
    released = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "cursus"}
    for name in released:
        del sys.modules[name]
    sys.path.insert(0, place)
    try:
        yield importlib.import_module("cursus.transaction")
    finally:
        sys.path.remove(place)
        for name in [name for name in sys.modules if name.partition(".")[0] == "cursus"]:
            del sys.modules[name]
        sys.modules.update(released)


def assigned(consuming: Consuming) -> set[int]:
    return set(consuming.consumer._assignments)


def test_two_consumers_of_one_group_settle_and_share_everything(sdk: Any, broker: BrokerProcess) -> None:
    topic, partitions = "shared", 4
    config = sdk.ProducerConfig(topic=topic, brokers=[address(broker)], partitions=partitions, linger_ms=5)
    options = {"group_id": "g-shared", "heartbeat_interval_ms": 200, "auto_commit_interval_s": 0.3}
    with (
        sdk.Producer(config) as producer,
        Consuming(sdk, broker, topic, "polling", consumer_id="one", **options) as one,
    ):
        until(lambda: assigned(one) == set(range(partitions)), "one owns everything")
        with Consuming(sdk, broker, topic, "polling", consumer_id="two", **options) as two:
            until(lambda: len(assigned(one)) == len(assigned(two)) == 2, "each owns two")
            shares = assigned(one), assigned(two)
            assert shares[0] | shares[1] == set(range(partitions))
            generation = one.consumer._generation
            for number in range(400):
                producer.send(f"value-{number}", key=f"k{number}")
            producer.flush()
            until(lambda: len(one.got) + len(two.got) >= 400, "every record")
            time.sleep(1.5)
            assert one.consumer._generation == two.consumer._generation == generation, "it has settled"
            assert (assigned(one), assigned(two)) == shares
            places = [(message.partition, message.offset) for message in (*one.got, *two.got)]
            assert len(places) == len(set(places)) == 400, "no overlap"
            for got, share in zip((one.got, two.got), shares, strict=True):
                assert {message.partition for message in got} <= share
        until(lambda: assigned(one) == set(range(partitions)), "one owns everything again")


def test_event_store(sdk: Any, broker: BrokerProcess) -> None:
    with sdk.EventStore(address(broker), "store", "svc") as store:
        store.create_topic(2)
        for version, kind in enumerate(("Created", "Paid", "Shipped"), 1):
            done = store.append(
                "order-1", version, sdk.Event(type=kind, payload=f'{{"v": {version}}}', schema_version=2)
            )
            assert (done.version, done.partition) == (version, 1)
        with pytest.raises(Exception, match="version_conflict current=3 expected=3"):
            store.append("order-1", 3, sdk.Event(type="Late", payload="{}"))
        assert store.stream_version("order-1") == 3
        data = store.read_stream("order-1")
        assert data.snapshot is None
        assert [(event.version, event.type, event.schema_version) for event in data.events] == [
            (1, "Created", 2),
            (2, "Paid", 2),
            (3, "Shipped", 2),
        ]
        assert data.events[0].payload == '{"v": 1}'
        assert store.read_snapshot("order-1") is None
        store.save_snapshot("order-1", 2, '{"state": 2}')
        kept = store.read_snapshot("order-1")
        assert (kept.version, kept.payload) == (2, '{"state": 2}')
        data = store.read_stream("order-1")
        assert (data.snapshot.version, [event.version for event in data.events]) == (2, [3])


def test_transactions(newest: Any, sdk: Any, broker: BrokerProcess) -> None:
    produce(sdk, broker, "tx-in", 20)
    produce(sdk, broker, "tx-out", 2)
    before = len(stored(broker, "tx-out", 2))
    with Consuming(sdk, broker, "tx-in", "polling", group_id="g-tx", auto_commit_interval_s=60.0) as consuming:
        until(lambda: len(consuming.got) >= 20, "the input")
        member, generation = consuming.consumer._member_id, consuming.consumer._generation
        producer = newest.TransactionalProducer("tx-main", [address(broker)])
        producer.init_producer_id()
        for number in range(2):  # the reference refuses the second one of an epoch
            producer.begin_transaction()
            for partition in range(2):  # and one that uses two partitions
                producer.publish("tx-out", f"out-{number}", partition=partition)
            producer.send_offsets_to_transaction("tx-in", "g-tx", member, generation, {0: 1 + number, 1: 2 + number})
            assert len(stored(broker, "tx-out", 2)) == before + 2 * number
            producer.commit_transaction()
            producer.commit_transaction()
        producer.begin_transaction()
        producer.publish("tx-out", "never", partition=0)
        producer.abort_transaction()
        second = newest.TransactionalProducer("tx-main", [address(broker)])
        assert second.init_producer_id().epoch == 1
        fenced = importlib.import_module("cursus.errors").ProducerFencedError
        for act in (
            producer.begin_transaction,
            producer.commit_transaction,
            lambda: producer.publish("tx-out", "late"),
        ):
            with pytest.raises(fenced):
                act()
    values = sorted(record.value or b"" for record in stored(broker, "tx-out", 2))[:4]
    assert values == [b"out-0", b"out-0", b"out-1", b"out-1"]
