"""Read-only copies and their cut-over: all protocols, several processes, crashes, and the command."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import polywire
from polywire.cli.admin import AdminApi
from polywire.cli.output import Failed
from polywire.client.copying import connected
from polywire.errors import BrokerError
from polywire.records.columns import Record
from polywire.server.links import LEASE_S
from tests.broker_process import WIRES, BrokerProcess
from tests.e2e.test_links import WAIT_S, command
from tests.histories import cut_overs
from tests.histories import links as histories

TOPICS = ("orders", "payments")
PAUSE_MAX_S = 20.0  # a third of a second on an idle machine


@pytest.fixture
def source(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "source", wires=["polywire", "kafka"]) as broker:
        with polywire.connect_sync(broker.url()) as client:
            for topic in TOPICS:
                client.create_topic(topic, 2)
        for topic in TOPICS:
            write(broker.url(), topic, b"first")
        yield broker


def follow(broker: BrokerProcess, source: BrokerProcess) -> None:
    AdminApi(broker.url("http")).request("POST", "links/old", {"source": source.url(), "topics": ["*"]})
    wait_until(lambda: all(row["copied"] for row in rows(broker).values()) and len(rows(broker)) == len(TOPICS))


def rows(broker: BrokerProcess) -> dict[str, dict[str, object]]:
    found = AdminApi(broker.url("http")).request("GET", "links/old")
    return {row["topic"]: row for row in found["topic_reports"]}


def wait_until(condition: object) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


def write(url: str, topic: str, value: bytes = b"here") -> None:
    async def run() -> None:
        async with connected(url) as client:
            await client.produce(topic, [Record(value, b"key")])

    asyncio.run(run())


def values(broker: BrokerProcess, topic: str) -> list[bytes | None]:
    async def run() -> list[bytes | None]:
        async with connected(broker.url()) as client:
            return [
                record.value
                for part in await client.bounds(topic)
                for record in await client.fetch(topic, part.partition, part.first_offset)
            ]

    return sorted(asyncio.run(run()), key=str)


@contextmanager
def producing(broker: BrokerProcess, topic: str) -> Iterator[None]:
    ending = threading.Event()

    def run() -> None:
        while not ending.is_set():
            write(broker.url(), topic, b"more")
            time.sleep(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


@pytest.mark.parametrize("processes", [1, 2])
def test_no_other_client_writes_a_copy_until_it_is_cut_over(
    source: BrokerProcess, tmp_path: Path, processes: int
) -> None:
    options = ("--processes", "2") if processes > 1 else ()
    with BrokerProcess(tmp_path / "data", *options, wires=[*WIRES, "http"]) as broker:
        follow(broker, source)
        for topic in TOPICS:
            assert not [wire for wire in WIRES if is_writable(broker, topic, wire)]
            with pytest.raises(Failed, match="cut it over first"):
                AdminApi(broker.url("http")).request("POST", f"topics/{topic}/records", {"value": "here"})
            code, text = command("record", "copy", f"{source.url()}/{topic}", f"{broker.url()}/{topic}", at=broker)
            assert (code, "cut it over first" in text) == (1, True), text
        if processes == 1:
            broker.kill()
            broker.start()
            with pytest.raises(BrokerError, match="a copy that a link writes"):
                write(broker.url(), "orders")
        code, text = command("link", "cut-over", "old", "--topics", "ord*", at=broker)
        assert (code, "cut over link=old topics=1" in text) == (0, True), text
        for wire in WIRES:
            write(broker.url(wire), "orders")
        with pytest.raises(BrokerError, match="a copy that a link writes"):
            write(broker.url(), "payments")
        assert values(broker, "orders") == [b"first"] + [b"here"] * len(WIRES)
        assert command("link", "delete", "old", at=broker)[0] == 0
        wait_until(lambda: is_writable(broker, "payments"))


def is_writable(broker: BrokerProcess, topic: str, wire: str = "polywire") -> bool:
    try:
        write(broker.url(wire), topic)
    except BrokerError:
        return False
    return True


def test_a_cut_over_waits_for_the_producers(source: BrokerProcess, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire", "http"]) as broker:
        follow(broker, source)
        code, text = command("link", "cut-over", "old", "--topics", "none", at=broker)
        assert (code, "known=orders,payments" in text) == (1, True), text
        code, text = command("link", "cut-over", "old", "--timeout", "soon", at=broker)
        assert (code, "timeout is invalid" in text) == (1, True), text
        with producing(source, "orders"):
            code, text = command("link", "cut-over", "old", "--topics", "orders", "--timeout", "1s", at=broker)
            assert (code, "stop the producers there" in text) == (1, True), text
            assert not is_writable(broker, "orders")
        wait_until(lambda: values(broker, "orders") == values(source, "orders"))
        assert not is_writable(broker, "orders")  # the link follows as before
        code, text = command("link", "cut-over", "old", "--topics", "orders", at=broker)
        assert code == 0, text
        assert values(broker, "orders") == values(source, "orders")
        # records that arrive at the source now are reported, not copied
        write(source.url(), "orders", b"late")
        wait_until(lambda: rows(broker)["orders"]["late"] == 1)
        assert b"late" not in values(broker, "orders")
        assert "records were written at the source after the cut-over" in broker.log_text()
        assert command("link", "pause", "old", at=broker)[0] == 0
        code, text = command("link", "cut-over", "old", at=broker)
        assert (code, "paused" in text) == (1, True), text


def test_an_interrupted_cut_over_leaves_the_link_as_it_was(source: BrokerProcess, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire", "http"]) as broker:
        follow(broker, source)
        admin = AdminApi(broker.url("http"))
        body = {"topics": ["orders"], "quiet_ms": 30_000}  # the producer pauses for less, also on a busy machine
        with producing(source, "orders"):
            for _ in range(2):  # a client that is killed does not cancel
                assert admin.request("POST", "links/old/cut-over", body)["topics"]
            time.sleep(LEASE_S + 1)
        wait_until(lambda: values(broker, "orders") == values(source, "orders"))
        time.sleep(0.5)
        assert not is_writable(broker, "orders")
        wait_until(lambda: rows(broker)["orders"]["phase"] == "following")


def test_a_cut_over_that_is_stored_ends_after_a_crash(source: BrokerProcess, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire", "http"]) as broker:
        follow(broker, source)
        admin, ended = AdminApi(broker.url("http")), threading.Event()

        def ask() -> None:
            while not ended.is_set():
                try:
                    admin.request("POST", "links/old/cut-over", {"topics": ["orders"], "quiet_ms": 0})
                except (Failed, BrokerError):
                    time.sleep(0.01)

        thread = threading.Thread(target=ask)
        thread.start()
        for pid in histories.workers(broker):
            os.kill(pid, signal.SIGKILL)
        broker.kill()
        broker.start()
        wait_until(lambda: is_writable(broker, "orders"))
        ended.set()
        thread.join()
        assert values(broker, "orders") == [b"first", b"here"]
        source.kill()
        broker.kill()
        broker.start()
        assert is_writable(broker, "orders")


@pytest.mark.parametrize("wire", ["polywire", "kafka"])
def test_clients_can_go_back(source: BrokerProcess, tmp_path: Path, wire: str) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire", "http"]) as broker:
        AdminApi(broker.url("http")).request("POST", "links/old", {"source": source.url(wire), "topics": ["orders"]})
        wait_until(lambda: rows(broker).get("orders", {}).get("copied"))
        for number in range(2):
            code, text = command("link", "cut-over", "old", "--reverse", at=broker)
            assert code == 0, text
            write(broker.url(), "orders", b"here %d" % number)
            for pid in histories.workers(broker):
                os.kill(pid, signal.SIGKILL)
            write(broker.url(), "orders", b"here, later %d" % number)
            wait_until(lambda: records(source, "orders") == records(broker, "orders"))
            code, text = command("link", "fall-back", "old", at=broker)
            assert (code, "fallen back" in text) == (0, True), text
            assert not is_writable(broker, "orders")
            write(source.url(), "orders", b"there %d" % number)
            wait_until(lambda: records(source, "orders") == records(broker, "orders"))
        assert len(values(source, "orders")) == 7


def records(broker: BrokerProcess, topic: str) -> list[tuple[int, int, bytes | None, bytes | None]]:
    async def run() -> list[tuple[int, int, bytes | None, bytes | None]]:
        async with connected(broker.url()) as client:
            return [
                (part.partition, record.offset, record.key, record.value)
                for part in await client.bounds(topic)
                for record in await client.fetch(topic, part.partition, part.first_offset)
            ]

    return asyncio.run(run())


def test_a_fall_back_needs_a_reversed_cut_over(source: BrokerProcess, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire", "http"]) as broker:
        follow(broker, source)
        assert command("link", "cut-over", "old", "--topics", "orders", at=broker)[0] == 0
        code, text = command("link", "fall-back", "old", "--topics", "orders", at=broker)
        assert (code, "without --reverse" in text) == (1, True), text
        code, text = command("link", "cut-over", "old", "--reverse", "--topics", "payments", at=broker)
        assert code == 0, text
        with producing(broker, "payments"):
            code, text = command("link", "fall-back", "old", "--topics", "payments", "--timeout", "1s", at=broker)
            assert (code, "stop the producers" in text) == (1, True), text
        wait_until(lambda: is_writable(broker, "payments"))  # a fall-back that fails changes nothing


def test_records_of_others_at_a_kafka_source_are_found(source: BrokerProcess, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire", "http"]) as broker:
        AdminApi(broker.url("http")).request("POST", "links/old", {"source": source.url("kafka"), "topics": ["orders"]})
        wait_until(lambda: rows(broker).get("orders", {}).get("copied"))
        assert command("link", "cut-over", "old", "--reverse", at=broker)[0] == 0
        write(source.url(), "orders", b"of another client")
        write(broker.url(), "orders")
        wait_until(lambda: "other clients have written" in str(rows(broker)["orders"]["error"]))
        code, text = command("link", "cut-over", "old", "--topics", "orders", at=broker)
        assert (code, "cut over link=old topics=1" in text) == (0, True), text
        wait_until(
            lambda: (rows(broker)["orders"]["phase"], rows(broker)["orders"]["late"]) == ("cut-over", 2)
        )  # with that of the link
        assert rows(broker)["orders"]["error"] == ""
        assert is_writable(broker, "orders")
        code, text = command("link", "fall-back", "old", at=broker)
        assert (code, "without --reverse" in text) == (1, True), text


async def commit(url: str, offset: int) -> None:
    async with connected(url) as client:
        await client.commit("billing", "orders", 0, offset)
        await client.commit("billing", "orders", 1, offset)


async def position(url: str) -> int:
    async with connected(url) as client:
        return sum([await client.position("billing", "orders", number) or 0 for number in range(2)])


@pytest.mark.parametrize("wire", ["polywire", "kafka"])
def test_groups_are_carried_before_a_fall_back_ends(source: BrokerProcess, tmp_path: Path, wire: str) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire", "http"]) as broker:
        asyncio.run(commit(source.url(), 0))
        admin = AdminApi(broker.url("http"))
        admin.request("POST", "links/old", {"source": source.url(wire), "topics": ["orders"]})
        wait_until(lambda: rows(broker).get("orders", {}).get("copied"))
        for number in range(2, 6):  # the key's partition has a record already
            assert command("link", "cut-over", "old", "--reverse", "--quiet-ms", "0", at=broker)[0] == 0
            write(broker.url(), "orders")
            asyncio.run(commit(broker.url(), number))
            assert command("link", "fall-back", "old", "--quiet-ms", "0", at=broker)[0] == 0
            assert asyncio.run(position(source.url())) == number


def test_groups_are_carried_before_a_cut_over_ends(source: BrokerProcess, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire", "http"]) as broker:
        asyncio.run(commit(source.url(), 0))
        new = ("link", "create", "old", "--from", source.url(), "--topics", "*", "--groups")
        code, text = command(*new, "biling", at=broker)
        assert (code, "did you mean 'billing'" in text) == (1, True), text
        code, text = command(*new, "bill*", at=broker)
        assert (code, "groups=1" in text) == (0, True), text
        wait_until(lambda: len(rows(broker)) == len(TOPICS))
        asyncio.run(commit(source.url(), 1))
        assert command("link", "cut-over", "old", at=broker)[0] == 0
        assert asyncio.run(position(broker.url())) == 1  # one partition has a record, and one has none
        code, text = command("link", "status", "old", "--groups", at=broker)
        assert (code, "billing" in text) == (0, True), text


def test_a_history_of_cut_overs(tmp_path: Path) -> None:
    world = cut_overs.run(tmp_path, seed=4, rounds=2, report=lambda _: None)
    assert world.faults
    assert world.calm_pauses[0] < PAUSE_MAX_S
