"""Links between two brokers: the command line, restarts, users, and several processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import polywire
from polywire.client import bulk
from polywire.client.arrow import chunk_to_arrow
from polywire.client.sync import connect
from polywire.records.columns import Record
from tests import fork_server
from tests.broker_process import BrokerProcess, child_environment
from tests.histories import links as histories
from tests.unit.links.hostile_kafka import TOPIC, HostileKafka, batch_at

RECORDS = 500
WAIT_S = 120.0


@pytest.fixture
def source(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "source", wires=["polywire", "kafka"]) as broker:
        with polywire.connect_sync(broker.url()) as client:
            client.create_topic("orders", 3)
            client.create_topic("other", 1)
        fill(broker)
        yield broker


def fill(broker: BrokerProcess) -> None:
    with polywire.connect_sync(broker.url()) as client, client.producer() as producer:
        producer.send_many("orders", [b"%d" % number for number in range(RECORDS)])


def command(*words: str, at: BrokerProcess) -> tuple[int, str]:
    environment = {**child_environment(), "POLYWIRE_HTTP": at.url("http")}
    found = fork_server.run([sys.executable, "-m", "polywire", *words], env=environment, text=True)
    return found.returncode, found.stdout + found.stderr


def wait_for(broker: BrokerProcess, count: int) -> None:
    """Wait until the topic has that many records."""
    end = time.monotonic() + WAIT_S
    found = 0
    while time.monotonic() < end:
        with polywire.connect_sync(broker.url()) as client:
            if "orders" in [topic.name for topic in client.topics()]:
                found = sum(part.next_offset for part in client.bounds("orders"))
        if found == count:
            return
        time.sleep(0.1)
    raise AssertionError(f"found={found} expected={count}\n{broker.log_text()}")


def test_the_commands_and_a_restart(source: BrokerProcess, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=["polywire", "http"]) as broker:
        new = ("link", "create", "old", "--from", source.url("kafka"), "--topics")
        code, text = command(*new, "ordrs", at=broker)
        assert (code, "did you mean 'orders'" in text) == (1, True), text
        code, text = command(*new, "none*", at=broker)
        assert (code, "known=orders,other" in text) == (1, True), text
        code, text = command(*new, "ord*", "--dry-run", at=broker)
        assert (code, f"would create link=old topics=1 records={RECORDS}" in text) == (0, True), text
        assert "old" not in command("link", "list", at=broker)[1]
        code, text = command(*new, "ord*", at=broker)
        assert code == 0, text
        wait_for(broker, RECORDS)
        for pid in histories.workers(broker):
            os.kill(pid, signal.SIGKILL)
        fill(source)
        wait_for(broker, 2 * RECORDS)
        code, text = command("link", "compare", "old", "--address", broker.url(), at=broker)
        assert (code, f"equal topics=1 partitions=3 records={2 * RECORDS} missing=0" in text) == (0, True), text
        code, text = command("link", "compare", "old", "--topics", "ordrs", "--address", broker.url(), at=broker)
        assert (code, "did you mean 'orders'" in text) == (1, True), text
        code, text = command("link", "compare", "odl", "--address", broker.url(), at=broker)
        assert (code, "did you mean 'old'" in text) == (1, True), text
        assert command("link", "pause", "old", at=broker)[0] == 0
        broker.kill()
        broker.start()
        fill(source)
        assert "state=paused" in command("link", "status", "old", at=broker)[1]
        assert command("link", "resume", "old", at=broker)[0] == 0
        wait_for(broker, 3 * RECORDS)
        assert command("link", "delete", "old", at=broker)[0] == 0
        code, text = command("link", "status", "old", at=broker)
        assert (code, "no such link" in text) == (1, True), text
        # a link with the same name continues
        fill(source)
        assert command(*new, "ord*", at=broker)[0] == 0
        wait_for(broker, 4 * RECORDS)


def test_a_broker_of_several_processes(source: BrokerProcess, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", "--processes", "2", wires=["polywire", "http"]) as broker:
        code, text = command("link", "create", "old", "--from", source.url(), "--topics", "*", at=broker)
        assert code == 0, text
        wait_for(broker, RECORDS)
        fill(source)
        wait_for(broker, 2 * RECORDS)
        for _ in range(4):  # whichever process answers
            assert "state=running" in command("link", "status", "old", at=broker)[1]


def test_a_history_of_kills(tmp_path: Path) -> None:
    counts = histories.run(tmp_path, seed=3, faults=5, report=lambda _: None)
    assert counts["records"]


GAPS = (100, 101, 150, 151, 152, 70_000, 70_001)
GAPS_END = 70_100
FIELDS: list[Any] = [("offset", pa.int64()), ("value", pa.binary())]
ARROW = pa.schema(FIELDS)


@contextmanager
def source_with_gaps() -> Iterator[str]:
    """Run a server that has records at ``GAPS``, and yield its URL."""
    server, loop, ready = HostileKafka(), asyncio.new_event_loop(), Future[str]()
    server.first, server.end = GAPS[0], GAPS_END
    batches = [(100, 2, 139), (150, 3, 199), (70_000, 2, GAPS_END - 1)]

    def records(offset: int) -> bytes:
        found = [
            batch_at(first, [b"%d" % (first + row) for row in range(count)], last_delta=last - first)
            for first, count, last in batches
            if last >= offset
        ]
        return b"".join(found)

    async def run() -> None:
        server.records = records
        try:
            ready.set_result(await server.start())
            await asyncio.get_running_loop().create_future()
        finally:
            await server.stop()

    task = loop.create_task(run())
    thread = threading.Thread(target=loop.run_until_complete, args=(asyncio.wait([task]),))
    thread.start()
    try:
        yield ready.result(30)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_offsets_without_records_in_files_and_tables(tmp_path: Path, processes: int) -> None:
    deltalake = pytest.importorskip("deltalake", reason="gaps in tables were NOT tried: deltalake is not installed")
    options = ("--table", "delta", "--table-freshness-s", "1", "--processes", str(processes))
    wires = ["polywire", "kafka", "http"]
    with source_with_gaps() as url, BrokerProcess(tmp_path / "data", *options, wires=wires) as broker:
        code, text = command("link", "create", "old", "--from", url, "--topics", TOPIC, at=broker)
        assert code == 0, text
        wait_until(lambda: bounds_of(broker) == (GAPS[0], GAPS_END), broker)
        for _ in range(2):
            check_gaps(broker)
            broker.kill()
            broker.start()
        with closing(bulk.connect(broker.url())) as connection:
            table = connection.describe(TOPIC).table.removeprefix("file://")
        wait_until(lambda: any(Path(table, "_delta_log").glob("*.json")), broker)
        wait_until(lambda: deltalake.DeltaTable(table).to_pyarrow_table().num_rows == len(GAPS), broker)
        rows = deltalake.DeltaTable(table).to_pyarrow_table().to_pylist()
        assert sorted((row["offset"], row["value"]) for row in rows) == [(one, b"%d" % one) for one in GAPS]


def bounds_of(broker: BrokerProcess) -> tuple[int, int]:
    with polywire.connect_sync(broker.url()) as client:
        if TOPIC not in [topic.name for topic in client.topics()]:
            return -1, -1
        [part] = client.bounds(TOPIC)
        return part.first_offset, part.next_offset


def wait_until(holds: Callable[[], bool], broker: BrokerProcess) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, broker.log_text()
        time.sleep(0.1)


def check_gaps(broker: BrokerProcess) -> None:
    """Read the copy in every way that this protocol and Kafka's have."""
    expected = [(one, b"%d" % one) for one in GAPS]
    for wire in ("polywire", "kafka"):
        with closing(connect(broker.url(wire))) as client:
            found: list[Record] = []
            while records := client.fetch(TOPIC, 0, found[-1].offset + 1 if found else GAPS[0]):
                found += records
            assert [(one.offset, one.value) for one in found] == expected, wire
            for offset in (120, 139, 151, 200, 69_999):
                following = next(one for one in GAPS if one >= offset)
                assert client.fetch(TOPIC, 0, offset)[0].offset == following, (wire, offset)
    with closing(connect(broker.url())) as client:
        assert client.offset_at(TOPIC, 0, 0) == GAPS[0]
        assert client.offset_at(TOPIC, 0, int(1e6 * (time.time() + 1000))) == GAPS_END
        consumed = client.consume(TOPIC)
        assert [next(consumed).record.offset for _ in GAPS] == list(GAPS)
    with closing(bulk.connect(broker.url())) as connection:
        [part] = connection.bounds([TOPIC])
        rows = []
        for chunk in connection.fetch_range(TOPIC, 0, offset=part.first_offset, offset_end=part.next_offset):
            for one in chunk_to_arrow(chunk, ["offset", "value"], ARROW):
                rows += one.to_pylist()
        assert [(row["offset"], row["value"]) for row in rows] == expected
