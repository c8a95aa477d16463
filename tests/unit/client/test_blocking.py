"""The blocking client has the methods of the asynchronous one and behaves the same."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest

import polywire
from polywire.client.base import Produced
from polywire.client.blocking import SyncClient, SyncConsumer, SyncProducer, SyncTransaction, connect_sync
from polywire.client.client import Client, connect
from polywire.client.consumer import Consumer
from polywire.client.producer import Producer
from polywire.client.transaction import Transaction
from polywire.errors import Invalid, Missing, Unavailable
from tests.unit.client.served import Served


@pytest.mark.parametrize(
    ("blocking", "original"),
    [(SyncClient, Client), (SyncProducer, Producer), (SyncConsumer, Consumer), (SyncTransaction, Transaction)],
)
def test_the_methods_are_the_same(blocking: type[Any], original: type[Any]) -> None:
    assert calls(blocking) == {name: call for name, call in calls(original).items() if name != "open"}


def test_both_connect_with_the_same_arguments() -> None:
    assert parameters(connect) == parameters(connect_sync)


def calls(kind: type[Any]) -> dict[str, Any]:
    """Return names of arguments and their defaults, by public name; None for a property."""
    names = [name for name in dir(kind) if not name.startswith("_")]
    found = {name: inspect.getattr_static(kind, name) for name in names}
    return {name: None if isinstance(value, property) else parameters(value) for name, value in found.items()}


def parameters(call: Any) -> list[tuple[str, Any]]:
    return [(name, one.default) for name, one in inspect.signature(call).parameters.items()]


def test_records_are_written_and_read(served: Served) -> None:
    with polywire.connect_sync(served.address) as client:
        assert client.send("t", "a", partition=0) == Produced(0, 0)
        with client.producer() as producer:
            assert producer.send("t", "b", partition=0).result() == Produced(0, 1)
            [stored] = producer.send_many("t", ["c", "d"], partition=0).result()
            assert (stored.base_offset, stored.record_count) == (2, 2)
        with client.consumer("t", group="g") as consumer:
            assert [record.text for record, _ in zip(consumer, range(3), strict=False)] == ["a", "b", "c"]
            consumer.seek("t", 0, 1)
            consumer.commit(next(consumer))
            assert client.position("g", "t", 0) == 2
            assert [record.text for record in consumer.batch(timeout_s=60)] == ["c", "d"]
            assert consumer.positions["t", 0] == 4
            assert consumer.batch(timeout_s=0.01) == ()
        assert client.position("g", "t", 0) == 4
        assert [record.text for record in client.fetch("t", 0, 2)] == ["c", "d"]


def test_records_are_committed_one_by_one_in_a_loop(served: Served) -> None:
    """Records that were fetched already are taken without the client's thread, and count as finished one by one."""
    with polywire.connect_sync(served.address) as client:
        client.create_topic("t", 1)
        with client.producer() as producer:
            producer.send_many("t", [str(n) for n in range(100)])
        with client.consumer("t", group="g", auto_commit=False) as consumer:
            for first, stop in ((0, 1), (1, 2), (2, 58)):
                assert [next(consumer).text for _ in range(first, stop)] == [str(n) for n in range(first, stop)]
                consumer.commit()
                assert client.position("g", "t", 0) == stop
                assert consumer.positions == {("t", 0): stop}
            assert [record.text for record, _ in zip(consumer, range(3), strict=False)] == ["58", "59", "60"]
            assert [record.text for record in consumer.batch(2)] == ["62", "63"]
            assert next(consumer).text == "64"
            consumer.seek("t", 0, 10)
            assert next(consumer).text == "10"
            consumer.pause("t")
            assert consumer.batch(timeout_s=0.01) == ()
            consumer.resume("t")
            assert next(consumer).text == "11"
        with client.consumer("t", group="h", commit_interval_s=0.01) as other:
            assert [next(other).offset for _ in range(31)] == list(range(31))
            while client.position("h", "t", 0) != 30:
                time.sleep(0.01)
        assert client.position("h", "t", 0) == 31


def test_errors_are_raised_at_the_call(served: Served) -> None:
    with polywire.connect_sync(served.address) as client:
        with pytest.raises(Invalid):
            client.consumer("t", start="now")  # type: ignore[arg-type]
        with pytest.raises(Missing), client.consumer("t"):
            pass
        with client.producer(create=False) as producer, pytest.raises(Missing):
            producer.send("t", "v")
    client.close()
    with pytest.raises(Unavailable):
        polywire.connect_sync("127.0.0.1:1")
    with pytest.raises(Invalid):
        polywire.connect_sync(5)  # type: ignore[arg-type]  # what is wanted is said


def test_calls_after_close_are_refused(served: Served) -> None:
    client = polywire.connect_sync(served.address)
    client.close()
    client.close()
    with pytest.raises(Unavailable, match="client was closed"):
        client.topics()


def test_a_forgotten_connect_is_explained() -> None:
    with pytest.raises(
        AttributeError, match=r"'async with polywire\.connect\(\.\.\.\) as client'.* 'topics'.*polywire\.connect_sync"
    ):
        connect("127.0.0.1:1").topics()  # type: ignore[attr-defined]  # so does a type checker
