"""``SyncProducer.send`` hands records over to the client's thread, and returns without waiting for it."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

import polywire
from polywire.client import blocking
from polywire.client.base import Produced
from polywire.client.blocking import SyncClient, SyncProducer
from polywire.client.lane import Delivery
from polywire.client.producer import Producer
from polywire.errors import ErrorCode, Missing, Unavailable
from tests.unit.client.served import Served

COUNT = 3_000


def texts(client: SyncClient) -> list[str]:
    found: list[str] = []
    while records := client.fetch("t", 0, len(found)):
        found += [record.text for record in records]
    return found


def begun(client: SyncClient, **options: Any) -> SyncProducer:
    """Return a producer that knows the topic, so that further records are handed over."""
    client.create_topic("t", 1)
    producer = client.producer(**options)
    producer.send("t", "first")
    return producer


def test_records_keep_their_order_whatever_sends_them(served: Served) -> None:
    with polywire.connect_sync(served.address) as client, begun(client) as producer:
        receipts = [producer.send("t", str(number)) for number in range(COUNT)]
        assert producer.send_and_wait("t", "alone") == Produced(0, COUNT + 1)
        producer.send("t", "before many")
        assert producer.send_many("t", ["many"] * 2).result()[0].base_offset == COUNT + 3
        producer.send("t", "before a limit")
        producer.send("t", "with a limit", timeout_s=60)
        last = producer.send("t", "last")
        assert last.result() == last.result() == Produced(0, COUNT + 7)
        assert last.done
        producer.flush()
        assert producer.buffered_bytes == 0
        assert [receipt.result().offset for receipt in receipts] == list(range(1, COUNT + 1))
        assert texts(client) == [
            "first",
            *map(str, range(COUNT)),
            *("alone", "before many", "many", "many", "before a limit", "with a limit", "last"),
        ]


def test_threads_share_a_producer(served: Served) -> None:
    with (
        polywire.connect_sync(served.address) as client,
        begun(client, batch_bytes=5_000, buffer_bytes=50_000) as producer,
    ):

        def send(name: str) -> None:
            for number in range(COUNT):
                producer.send("t", f"{name} {number}")

        threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        producer.flush()
        found = texts(client)
    for name in "abc":
        assert [text for text in found if text.startswith(name)] == [f"{name} {number}" for number in range(COUNT)]


def test_what_is_handed_over_has_a_limit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "HANDED_BYTES_MAX", 500)
    with polywire.connect_sync(served.address) as client, begun(client) as producer:
        highest = 0
        for number in range(COUNT):
            producer.send("t", str(number))
            highest = max(highest, producer._handed_bytes)
        producer.flush()
        assert 0 < highest <= 500
        assert texts(client) == ["first", *map(str, range(COUNT))]


def test_the_thread_does_other_work_between_records(served: Served) -> None:
    async def block() -> None:
        blocked.wait()

    async def look() -> int:
        return len(producer._handed)

    blocked = threading.Event()
    with polywire.connect_sync(served.address) as client, begun(client) as producer:
        client._thread.begin(block())
        for number in range(5 * blocking.HANDED_AT_ONCE):
            producer.send("t", str(number))
        seen = client._thread.begin(look())
        blocked.set()
        assert 0 < seen.result() < 5 * blocking.HANDED_AT_ONCE
        producer.flush()
        assert texts(client) == ["first", *map(str, range(5 * blocking.HANDED_AT_ONCE))]


def test_an_error_is_raised_by_the_receipt_or_by_flush(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with polywire.connect_sync(served.address) as client, begun(client) as producer:
        lost = producer.send("t", "to no partition", partition=9)
        with pytest.raises(Missing):
            lost.result()
        producer.flush()

        async def gone(*_: object) -> None:
            raise Unavailable(ErrorCode.UNREACHABLE, "no broker")

        with monkeypatch.context() as patch:
            patch.setattr(Producer, "_topic", gone)
            refused, silent = producer.send("t", "a"), producer.send("t", "b")
            with pytest.raises(Unavailable, match="no broker"):
                refused.result()
        producer.send("t", "c")
        with pytest.raises(Unavailable, match="no broker"):
            producer.flush()
        assert silent.done
        assert texts(client) == ["first", "c"]


def test_closing_without_a_flush_fails_what_was_not_sent(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "polywire.client")  # tests of commands leave it at ERROR
    begin = threading.Event()

    async def wait(*_: object) -> None:
        begin.set()
        await asyncio.sleep(1e6)

    with polywire.connect_sync(served.address) as client:
        producer = begun(client)
        producer.flush()
        monkeypatch.setattr(Producer, "_capacity", wait)
        receipts = [producer.send("t", str(number)) for number in range(5)]
        begin.wait()
        assert producer.buffered_bytes
        producer.close(flush=False)
        for receipt in receipts:
            with pytest.raises(Unavailable, match="was not sent"):
                receipt.result()
        assert producer.buffered_bytes == 0
        with pytest.raises(Unavailable, match="closed"):
            producer.send("t", "late")
        assert texts(client) == ["first"]
    assert [record.args for record in caplog.records if "may not be stored" in record.message] == [(5,)]


def test_a_callback_may_send(served: Served) -> None:
    with polywire.connect_sync(served.address) as client:

        def copy(delivery: Delivery) -> None:
            if delivery.base_offset < 3:
                producer.send("t", f"after {delivery.base_offset}")

        producer = begun(client, on_delivery=copy)
        producer.flush()
        while len(texts(client)) < 4:
            producer.flush()
        producer.close()
        assert texts(client) == ["first", "after 0", "after 1", "after 2"]
