"""Log messages of the client, and callbacks of the application."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

import polywire
from polywire import Rebalance
from polywire.client import notices
from polywire.client.consumer import Consumer
from polywire.errors import BrokerError, ErrorCode, Unavailable
from polywire.testing.process import lasting_port
from polywire.testing.thread import BrokerThread

GONE = Unavailable(ErrorCode.UNREACHABLE, "connection was lost")


@pytest.fixture(autouse=True)
def all_levels() -> None:
    """Undo what commands have set that ran in this process before."""
    notices.log.setLevel(logging.NOTSET)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("polywire.client.notices.time.monotonic", lambda: self.now)


def levels(caplog: pytest.LogCaptureFixture) -> list[int]:
    found = [record.levelno for record in caplog.records if record.name == "polywire.client"]
    caplog.clear()
    return found


def test_warnings_begin_after_a_second_and_have_an_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    reports = notices.ConnectionNotices("polywire://name:secret@host:9555", None, None)
    with caplog.at_level(logging.DEBUG, "polywire.client"):
        reports.connected()
        reports.lost(GONE)
        clock.now = 0.9
        reports.failed(GONE)
        assert levels(caplog) == [logging.INFO, logging.INFO, logging.DEBUG, logging.DEBUG]
        clock.now = 1.1
        reports.failed(GONE)
        assert "no broker for 1 s: trying again" in caplog.text
        assert "connection was lost" in caplog.text
        assert "secret" not in caplog.text
        assert levels(caplog) == [logging.WARNING]
        clock.now = 10.0
        reports.failed(GONE)
        clock.now = 11.2
        reports.failed(GONE)
        assert levels(caplog) == [logging.DEBUG, logging.WARNING]
        reports.responded()
        assert "the broker responds again after 11.2 s" in caplog.text
        assert levels(caplog) == [logging.WARNING]


def test_a_short_interruption_is_no_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    reports = notices.ConnectionNotices("host:9555", None, None)
    with caplog.at_level(logging.INFO, "polywire.client"):
        for _ in range(3):
            reports.lost(GONE)
            clock.now += 0.5
            reports.responded()
            clock.now += 60
        assert levels(caplog) == [logging.INFO] * 6


def test_an_absent_broker_is_reported_without_any_configuration() -> None:
    """Without handlers, Python prints warnings to standard error."""
    address = f"127.0.0.1:{lasting_port()}"
    program = f"import polywire\npolywire.connect_sync({address!r}, connect_s=4)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    first, *rest = done.stderr.splitlines()
    assert re.match(rf"no broker for [1-4] s: trying again address={address} reason=cannot connect", first)
    assert rest[0].startswith("Traceback")
    assert rest[-1].startswith("polywire.errors.Unavailable")


def test_callbacks_of_a_client_are_those_of_its_consumers(caplog: pytest.LogCaptureFixture) -> None:
    connected: list[str] = []
    lost: list[tuple[str, BrokerError]] = []
    changes: list[Rebalance] = []

    def broken(_address: str) -> None:
        connected.append(_address)
        raise ValueError("a mistake of the application")

    async def scenario(broker: BrokerThread) -> None:
        async with polywire.connect(
            broker.url(), on_connect=broken, on_disconnect=lambda *found: lost.append(found)
        ) as client:
            await client.create_topic("orders", 2)
            async with client.consumer("orders", group="g", on_rebalance=changes.append) as consumer:
                assert changes == [Rebalance((("orders", 0), ("orders", 1)), (), (("orders", 0), ("orders", 1)))]
                async with client.consumer("orders", group="g") as other:
                    await _until(lambda: len(changes) == 2)
                    (kept,) = consumer.positions
                    (given,) = other.positions
                    assert changes[1] == Rebalance((), (given,), (kept,))
                assert len(connected) == 3
                broker.kill()
                broker.start()
                await client.send("orders", "after")
                await consumer.batch()

    with BrokerThread(wires=["polywire"]) as broker:
        asyncio.run(asyncio.wait_for(scenario(broker), 60))
        address = broker.url()
    assert {where for where, _ in lost} == set(connected) == {address}
    assert len(lost) >= 1
    assert "a mistake of the application" in caplog.text


def test_a_consumer_can_have_its_own_callback() -> None:
    of_client: list[str] = []
    of_consumer: list[str] = []

    async def scenario(url: str) -> None:
        async with polywire.connect(url, on_connect=of_client.append) as client:
            await client.create_topic("orders", 1)
            async with client.consumer("orders", on_connect=of_consumer.append) as consumer:
                assert isinstance(consumer, Consumer)

    with BrokerThread(wires=["polywire"]) as broker:
        asyncio.run(scenario(broker.url()))
    assert len(of_client) == len(of_consumer) == 1


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the caller's timeout ends it
        await asyncio.sleep(0.01)


def test_a_full_buffer_is_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polywire.client.producer.WARN_AFTER_S", 0.0)

    async def scenario(url: str) -> None:
        async with polywire.connect(url) as client:
            await client.create_topic("orders", 1)
            async with client.producer(batch_bytes=1000, buffer_bytes=1000, linger_ms=1000) as producer:
                for _ in range(5):
                    await producer.send("orders", b"x" * 900)

    with BrokerThread(wires=["polywire"]) as broker:
        asyncio.run(scenario(broker.url()))
    assert caplog.text.count("for space in the buffer") == 1
