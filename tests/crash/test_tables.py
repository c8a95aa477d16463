"""The table of a topic while its writer, or the broker, is killed; with users, over processes and on a bucket.

Records of full journal files are read from segments, while these are deleted by retention, compaction and the deletion
of the topic.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

import polywire
from polywire.client.bulk import BulkConnection, connect
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.server.users import add_user
from tests.broker_process import BrokerProcess
from tests.histories import tables as history

OPTIONS = ("--table", "delta", "--table-freshness-s", "1")
SMALL_FILES = ("--slot-mib", "17")  # the smallest journal files
BATCH = 1000
VALUE_BYTES = 1000


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
    add_user(users, "alice", "wonderland", "all")
    with BrokerProcess(tmp_path / "data", *OPTIONS, "--users", str(users), wires=["polywire"]) as broker:
        url = f"polywire://alice:wonderland@{broker.address('polywire')}"
        with polywire.connect_sync(url) as client, client.producer() as producer:
            producer.send_many("orders", [b"%d" % number for number in range(10)])
        history.wait_for_records(connect(url).describe("orders").table, 10)
        assert "polywire-tables" not in users.read_text()


# Segments

Values = dict[tuple[int, int], bytes]
"""Values by partition and offset."""


def produce(connection: BulkConnection, topic: str, batches: int, first: int = 0) -> Values:
    """Send unique values with 500 keys to both partitions, and return what was acknowledged."""
    sent: Values = {}
    for number in range(first, first + batches):
        values = [b"%0*d" % (VALUE_BYTES, number * BATCH + at) for at in range(BATCH)]
        batch = from_records([Record(value, b"%d" % (at % 500)) for at, value in enumerate(values)])
        (appended,) = connection.produce(topic, number % 2, [batch]).appended
        sent |= {(appended.partition, appended.base_offset + at): value for at, value in enumerate(values)}
    return sent


def rows(connection: BulkConnection, topic: str) -> Values:
    """Return the rows of a table, each of which must be there once."""
    path = connection.describe(topic).table.removeprefix("file://")
    query = deltalake.QueryBuilder().register("rows", deltalake.DeltaTable(path))
    table = pa.table(query.execute('select partition, "offset", value from rows'))
    found = [table.column(name).to_pylist() for name in ("partition", "offset", "value")]
    made = {(partition, offset): value for partition, offset, value in zip(*found, strict=True)}
    assert len(made) == table.num_rows, "a row is there twice"
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="counts the bytes that a process reads in /proc")
@pytest.mark.parametrize("where", ["open", "users", "bucket"])
def test_segments_are_read_without_the_broker(tmp_path: Path, where: str) -> None:
    options: tuple[str, ...] = SMALL_FILES
    login = ""
    if where == "users":
        add_user(tmp_path / "users", "alice", "wonderland", "all")
        options, login = (*options, "--users", str(tmp_path / "users")), "alice:wonderland@"
    elif where == "bucket":
        options = (*options, "--bucket", (tmp_path / "bucket").as_uri())
    with BrokerProcess(tmp_path / "data", *OPTIONS, *options, wires=["polywire"]) as broker:
        connection = connect(f"polywire://{login}{broker.address('polywire')}")
        connection.create_topic("first", 2)
        history.wait_for_records(connection.describe("first").table, len(produce(connection, "first", 1)))
        before = segment_bytes(broker)  # of modules
        connection.create_topic("orders", 2, {"table_freshness_s": 4})  # until then, most records are in segments
        sent = produce(connection, "orders", 100)
        history.wait_for_records(connection.describe("orders").table, len(sent))
        assert rows(connection, "orders") == sent
        assert segment_bytes(broker) - before > 8 << 20


def segment_bytes(broker: BrokerProcess) -> int:
    """Return the bytes that the process that writes tables has read from files. Sockets do not count."""
    (pid,) = history.writers(broker)
    (line,) = [line for line in Path(f"/proc/{pid}/io").read_text().splitlines() if line.startswith("rchar")]
    return int(line.split()[1])


def created_again(connection: BulkConnection, topic: str) -> AbstractContextManager[None]:
    """Delete a topic and create it again, while it is written and read, until the block ends."""

    def churn(ending: threading.Event) -> None:
        for number in count():
            connection.create_topic(topic, 2)
            if ending.wait(0.7):
                return
            produce(connection, topic, 6, number * 100)
            connection.delete_topic(topic)

    return history.in_background(churn)


def test_segments_are_deleted_while_a_table_is_written(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", *OPTIONS, *SMALL_FILES, wires=["polywire"]) as broker:
        connection = connect(broker.url())
        connection.create_topic("retained", 2, {"retention_bytes": 12 << 20})
        connection.create_topic("compacted", 2, {"compaction": 1})
        sent: dict[str, Values] = {"retained": {}, "compacted": {}}
        with created_again(connection, "recreated"):
            for number in range(0, 120, 10):
                sent["retained"] |= produce(connection, "retained", 10, number)
                sent["compacted"] |= produce(connection, "compacted", 10, number)
        sent["recreated"] = produce(connection, "recreated", 40)
        for topic in sent:
            wait_for_end(connection, topic)
        assert rows(connection, "recreated") == sent["recreated"]
        retained = rows(connection, "retained")
        assert retained.items() <= sent["retained"].items()
        assert offsets(connection, "retained") <= retained.keys()
        assert rows(connection, "compacted") == newest(sent["compacted"])
        assert "has ended" not in broker.log_text()


def offsets(connection: BulkConnection, topic: str) -> set[tuple[int, int]]:
    """Return the partitions and offsets of the records that the log has."""
    return {
        (bounds.partition, offset)
        for bounds in connection.bounds([topic])
        for offset in range(bounds.first_offset, bounds.next_offset)
    }


def newest(sent: Values) -> Values:
    """Return the newest value of each key and partition."""
    found = {}
    for (partition, offset), value in sorted(sent.items()):
        found[partition, int(value) % BATCH % 500] = offset
    return {(partition, offset): sent[partition, offset] for (partition, _), offset in found.items()}


def wait_for_end(connection: BulkConnection, topic: str) -> None:
    """Wait until a table has reached the end of its topic."""
    ends = {bounds.partition: bounds.next_offset for bounds in connection.bounds([topic])}
    history.wait_for_offsets(connection.describe(topic).table, ends)
