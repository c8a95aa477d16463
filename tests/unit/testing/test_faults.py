"""Faults and time of a broker in a thread."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import polywire
from polywire.errors import Busy, PeerError, Unavailable
from polywire.testing import broker
from polywire.testing.thread import BrokerThread

WIRES = ("polywire", "kafka", "iggy", "cursus", "flux", "kafka07")
DAY_S = 24 * 3600.0
DELAY_S = 0.5


@pytest.fixture
def running() -> Iterator[BrokerThread]:
    with broker() as started:
        yield started


def stored(running: BrokerThread) -> int:
    with polywire.connect_sync(running.url()) as client:
        return sum(part.next_offset for part in client.bounds("orders"))


def test_a_disconnected_client_connects_again(running: BrokerThread) -> None:
    with polywire.connect_sync(running.url()) as client:
        client.send("orders", "a")
        running.disconnect()
        client.send("orders", "b")
    assert stored(running) == 2


@pytest.mark.parametrize("wire", WIRES)
def test_a_lost_acknowledgement_breaks_the_connection_after_the_records_are_stored(
    running: BrokerThread, wire: str
) -> None:
    with polywire.connect_sync(running.url(wire), reconnect_s=0.5) as client:
        client.send("orders", "a")
        running.lose_acknowledgement()
        producer = client.producer(reconnect_s=0.0)
        with pytest.raises((Unavailable, PeerError)), producer:
            producer.send_and_wait("orders", "b")
        assert stored(running) == 2
        client.send("orders", "c")
    assert stored(running) == 3


def test_a_producer_writes_a_record_once_if_its_acknowledgement_is_lost(running: BrokerThread) -> None:
    with polywire.connect_sync(running.url()) as client:
        client.send("orders", "a")
        running.lose_acknowledgement()
        client.send("orders", "b")
    assert stored(running) == 2


@pytest.mark.parametrize("wire", WIRES)
def test_a_delay_applies_to_each_request(running: BrokerThread, wire: str) -> None:
    with polywire.connect_sync(running.url(wire)) as client:
        client.send("orders", "a")
        begun = time.monotonic()
        with running.delay(DELAY_S):
            client.send("orders", "b")
        assert time.monotonic() - begun >= DELAY_S
    assert stored(running) == 2


def test_a_client_that_leaves_while_it_waits_is_forgotten(running: BrokerThread) -> None:
    with running.delay(60.0), pytest.raises(Unavailable):
        polywire.connect_sync(running.url(), connect_s=0.2)
    assert stored_after_creation(running) == 0


def stored_after_creation(running: BrokerThread) -> int:
    with polywire.connect_sync(running.url()) as client:
        client.create_topic("orders", 1)
    return stored(running)


def test_a_full_disk_rejects_records_until_there_is_space(running: BrokerThread) -> None:
    with polywire.connect_sync(running.url()) as client:
        client.send("orders", "a")
        producer = client.producer(reconnect_s=0.2)
        with running.disk_full(), pytest.raises(Busy, match="disk is full"), producer:
            producer.send_and_wait("orders", "b")
        client.send("orders", "c")
    assert stored(running) == 2


def test_time_that_is_advanced_expires_members(running: BrokerThread) -> None:
    with polywire.connect_sync(running.url()) as client:
        client.send("orders", "a")
        silent = client.consumer("orders", group="billing", start="earliest", auto_commit=False)
        assert [record.text for record in silent.batch(timeout_s=30)] == ["a"]
        running.advance(DAY_S)
        with client.consumer("orders", group="billing", start="earliest") as other:
            assert [record.text for record in other.batch(timeout_s=30)] == ["a"]
        silent.close()


def test_time_that_is_advanced_stamps_records(running: BrokerThread) -> None:
    with polywire.connect_sync(running.url()) as client:
        client.create_topic("orders", 1)
        client.send("orders", "a")
        running.advance(DAY_S)
        client.send("orders", "b")
        first, second = client.fetch("orders", 0, 0)
    assert second.append_time_us - first.append_time_us >= DAY_S * 1e6


def test_retention_removes_records_after_their_time(running: BrokerThread) -> None:
    with polywire.connect_sync(running.url()) as client:
        client.create_topic("orders", 1)
        client.alter_topic("orders", settings={"retention_age_us": 3_600_000_000})
        client.send("orders", "a")
        running.advance(2 * DAY_S)
        end = time.monotonic() + 30
        while client.bounds("orders")[0].first_offset == 0:
            assert time.monotonic() < end
            time.sleep(0.01)
