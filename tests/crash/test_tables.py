"""The table of a topic while its writer, or the broker, is killed; with users, over processes and on a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

import polywire
from polywire.client.bulk import connect
from polywire.server.users import add_user
from polywire.testing.process import BrokerProcess
from tests.histories import tables as history

OPTIONS = ("--table", "delta", "--table-freshness-s", "1")


def send(broker: BrokerProcess, topic: str, count: int) -> None:
    with polywire.connect_sync(broker.url()) as client, client.producer() as producer:
        producer.send_many(topic, [b"%d" % number for number in range(count)])


def test_killed_writers_and_brokers_repeat_and_lose_nothing(tmp_path: Path) -> None:
    counts = history.run(tmp_path, seed=1, faults=6, report=lambda _: None)
    assert counts["rows"] > 0


@pytest.mark.parametrize("where", ["processes", "bucket"])
def test_tables_are_written_everywhere(tmp_path: Path, where: str) -> None:
    options = {"processes": ("--processes", "2"), "bucket": ("--bucket", (tmp_path / "bucket").as_uri())}[where]
    with BrokerProcess(tmp_path / "data", *OPTIONS, *options, wires=["polywire"]) as broker:
        for topic in ("a", "b", "c", "d"):
            connect(broker.url()).create_topic(topic, 2)
            send(broker, topic, 10)
        for topic in ("a", "b", "c", "d"):
            history.wait_for_records(connect(broker.url()).describe(topic).table, 10)


def test_tables_are_written_on_a_broker_with_users(tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "alice", "wonderland", "")
    with BrokerProcess(tmp_path / "data", *OPTIONS, "--users", str(users), wires=["polywire"]) as broker:
        url = f"polywire://alice:wonderland@{broker.address('polywire')}"
        with polywire.connect_sync(url) as client, client.producer() as producer:
            producer.send_many("orders", [b"%d" % number for number in range(10)])
        history.wait_for_records(connect(url).describe("orders").table, 10)
        assert "polywire-tables" not in users.read_text()
