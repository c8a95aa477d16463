"""The blocking client over real sockets: ranges, reconnection, reuse of memory, errors."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from polywire.client import bulk
from polywire.client.address import split_address
from polywire.client.arrow import chunk_to_arrow
from polywire.client.bulk import BulkConnection
from polywire.errors import Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import MAGIC, encode_head
from polywire.protocols.polywire.messages import Verb
from polywire.records.allocation import Arena
from polywire.records.batch import walk
from polywire.records.columns import HEADER_BYTES, Record
from polywire.records.rows import from_records, to_records
from polywire.types import Level
from tests.unit.client.served import Served


@pytest.fixture
def connection(served: Served) -> Iterator[BulkConnection]:
    made = BulkConnection("127.0.0.1", served.port, timeout_s=10.0, reconnect_s=2.0)
    yield made
    made.close()


def values_in(connection: BulkConnection, topic: str, partition: int = 0, **options: Any) -> list[bytes | None]:
    found: list[bytes | None] = []
    for chunk in connection.fetch_range(topic, partition, **options):
        wanted = range(chunk.offset, chunk.offset_end)
        records = [record for at in walk(chunk.data) for record in to_records(chunk.data, at)]
        found += [record.value for record in records if record.offset in wanted]
    return found


def batch(*values: bytes) -> bytearray:
    return from_records([Record(value) for value in values])


def test_topics_are_created_found_described_and_deleted(connection: BulkConnection) -> None:
    made = connection.create_topic("orders", 2)
    connection.create_topic("other", 1, {"retention_bytes": 10})
    assert [topic.name for topic in connection.topics("ord.*")] == ["orders"]
    assert connection.describe("orders") == made
    connection.delete_topic("orders")
    with pytest.raises(Missing):
        connection.describe("orders")
    assert connection.describe("other").settings["retention_bytes"] == 10


def test_offsets_are_read_without_bodies(connection: BulkConnection) -> None:
    connection.create_topic("t", 1)
    for first in range(0, 60, 20):
        connection.produce("t", 0, [batch(*[b"x" * 1000] * 20)])
        assert first < 60
    chunks = list(connection.fetch_range("t", 0, offset=5, offset_end=50, bodies=False))
    assert sum(len(chunk.data) for chunk in chunks) == 3 * HEADER_BYTES
    fields: list[tuple[str, pa.DataType]] = [("offset", pa.int64()), ("value", pa.binary())]
    schema = pa.schema(fields)
    tables = [rows for chunk in chunks for rows in chunk_to_arrow(chunk, schema.names, schema)]
    table = pa.Table.from_batches(tables)
    assert table["offset"].to_pylist() == list(range(5, 50))
    assert table["value"].null_count == 45


def test_ranges_are_read_as_requested(connection: BulkConnection) -> None:
    connection.create_topic("t", 1)
    result = connection.produce("t", 0, [batch(b"a", b"b", b"c"), batch(b"d")], Level.SYNCED)
    assert [(a.base_offset, a.record_count) for a in result.appended] == [(0, 3), (3, 1)]
    assert values_in(connection, "t") == [b"a", b"b", b"c", b"d"]
    assert values_in(connection, "t", offset=1, offset_end=3) == [b"b", b"c"]
    assert values_in(connection, "t", offset=4) == []
    [bounds] = connection.bounds(["t"], times_us=[0])
    assert (bounds.first_offset, bounds.next_offset, bounds.time_offsets) == (0, 4, (0,))
    identity = {"incarnation": bounds.incarnation, "epoch": bounds.epoch}
    assert values_in(connection, "t", offset=2, offset_end=4, **identity) == [b"c", b"d"]
    with pytest.raises(Conflict) as caught:
        values_in(connection, "t", incarnation=bounds.incarnation + 1)
    assert caught.value.code is ErrorCode.TOPIC_REPLACED


def test_a_missing_range_is_an_error_and_never_truncated(connection: BulkConnection) -> None:
    connection.create_topic("t", 1)
    connection.produce("t", 0, [batch(b"a")])
    with pytest.raises(Missing) as caught:
        values_in(connection, "t", offset=0, offset_end=5)
    assert "next_offset=1" in caught.value.message
    with pytest.raises(Missing):
        values_in(connection, "t", offset=9)


def test_large_ranges_come_in_chunks_and_their_memory_is_reused(connection: BulkConnection) -> None:
    connection.create_topic("t", 1)
    for number in range(24):
        connection.produce("t", 0, [batch(bytes([number]) * (1 << 20))])
    chunks = 0
    for chunk in connection.fetch_range("t", 0):
        chunks += 1
        assert chunk.data[-1:] is not None
    assert chunks >= 6
    assert connection._arena.block_count <= 2


def test_stopping_in_the_middle_of_a_range_leaves_a_usable_connection(connection: BulkConnection) -> None:
    connection.create_topic("t", 1)
    for _ in range(12):
        connection.produce("t", 0, [batch(b"x" * (1 << 20))])
    chunks = connection.fetch_range("t", 0)
    assert next(iter(chunks)).offset == 0
    chunks.close()  # type: ignore[attr-defined]
    connection.ping()
    assert len(values_in(connection, "t", offset=10)) == 2


def test_reading_resumes_on_a_new_connection(served: Served, connection: BulkConnection) -> None:
    connection.create_topic("t", 1)
    for number in range(12):
        connection.produce("t", 0, [batch(bytes([number]) * (2 << 20))])
    found = []
    for index, chunk in enumerate(connection.fetch_range("t", 0, 0, 0, 12)):
        found += [record.offset for at in walk(chunk.data) for record in to_records(chunk.data, at)]
        if index == 1:
            served.drop_connections()
    assert found == list(range(12))
    served.drop_connections()
    assert connection.describe("t").name == "t"


def test_reading_waits_for_a_broker_that_restarts(served: Served, connection: BulkConnection) -> None:
    connection.create_topic("t", 1)
    served.stop_listening()
    served.drop_connections()
    back = threading.Timer(0.3, served.listen_again)
    back.start()
    assert connection.describe("t").name == "t"
    back.join()


def test_writes_are_not_repeated_when_the_broker_is_gone(served: Served, connection: BulkConnection) -> None:
    connection.create_topic("t", 1)
    served.stop_listening()
    served.drop_connections()
    with pytest.raises(Unavailable):
        connection.produce("t", 0, [batch(b"x")])


def test_produce_all_pipelines_requests(connection: BulkConnection) -> None:
    connection.create_topic("t", 1)
    assert connection.produce_all("t", 0, (batch(b"%d" % n) for n in range(100)), window=7) == 100
    assert values_in(connection, "t") == [b"%d" % n for n in range(100)]


def test_batches_larger_than_a_frame_use_several_requests(connection: BulkConnection) -> None:
    connection.create_topic("t", 2)
    batches = [batch(bytes([n]) * (5 << 20)) for n in range(7)]
    result = connection.produce("t", 1, batches)
    assert [a.base_offset for a in result.appended] == list(range(7))
    assert connection.stage(b"t" * 16, "t", 0, batches) == 7
    connection.publish("w", 1, [b"t" * 16])
    assert values_in(connection, "t", 0) == values_in(connection, "t", 1)


def test_staged_batches_are_published_once(connection: BulkConnection) -> None:
    connection.create_topic("t", 1)
    token = b"t" * 16
    assert connection.stage(token, "t", 0, [batch(b"a", b"b")]) == 2
    assert values_in(connection, "t") == []
    first = connection.publish("query", 0, [token])
    assert (first.duplicate, first.ranges) == (False, (("t", 0, 0, 2),))
    assert connection.publish("query", 0, [token]).duplicate
    for name in ("quer", "quera", "query2"):
        connection.publish(name, 7, [])
    assert [connection.last_publish(name) for name in ("query", "quer", "queryy", "q")] == [0, 7, None, None]
    connection.abandon([token])
    assert values_in(connection, "t") == [b"a", b"b"]


def test_the_connection_stays_usable_after_an_error(connection: BulkConnection) -> None:
    connection.ping()
    [spare] = connection._sockets._spares
    with pytest.raises(Missing):
        connection.describe("gone")
    assert connection._sockets._spares == [spare]


def test_a_port_of_another_protocol_is_detected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(100)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Invalid, match="does not speak"):
            BulkConnection("127.0.0.1", port, reconnect_s=0.0).ping()
        thread.join()


def test_connections_are_cached_per_address(served: Served) -> None:
    kept = bulk.connect(f"polywire://{served.address}")
    assert bulk.connect(served.address) is kept
    kept.ping()
    kept.close()


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:port", "host:²", "host:65536", "host:" + "1" * 5000]
)
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(Invalid):
        split_address(address)


@pytest.mark.parametrize("port", ["0", "65536", "99999", "1" * 5000])
def test_port_numbers_out_of_range_are_reported(port: str) -> None:
    with pytest.raises(Invalid, match="port is not between 1 and 65535 address='host:"):
        split_address(f"host:{port}")


def test_addresses_are_split() -> None:
    assert split_address("polywire://[::1]:9555/") == ("::1", 9555)
    assert split_address("host:1") == ("host", 1)


def test_blocks_are_reused_only_when_no_view_is_left() -> None:
    arena = Arena(block_bytes=4096, blocks_max=2)
    first = arena.take(100)
    first[0] = 7
    part = first[:10]
    del first
    second = arena.take(100)
    second[0] = 9
    assert part[0] == 7
    del second
    assert arena.take(4096)[0] == 9
    assert arena.block_count == 2
    assert len(arena.take(10_000)) == 10_000
    assert arena.block_count == 2


def test_the_search_for_a_free_block_begins_at_the_newest() -> None:
    arena = Arena(block_bytes=4096, blocks_max=3)
    blocks = [arena.take(4096) for _ in range(3)]
    for number, block in enumerate(blocks):
        block[0] = number
    del block
    blocks.clear()
    assert [arena.take(4096)[0] for _ in range(2)] == [2, 2]
    held = [arena.take(4096) for _ in range(3)]
    assert [block[0] for block in held] == [2, 0, 1]


def test_a_client_that_does_not_read_its_range_blocks_no_other_client(
    served: Served, connection: BulkConnection
) -> None:
    connection.create_topic("t", 1)
    for _ in range(30):
        connection.produce("t", 0, [batch(b"x" * (1 << 20))])
    with socket.create_connection(("127.0.0.1", served.port)) as stalled:
        fetch = messages.Fetch("t", 0, 0)
        stalled.sendall(MAGIC + b"".join(encode_head(Verb.FETCH, number, fetch) for number in range(1, 60)))
        assert len(values_in(connection, "t", offset=20)) == 10
        largest = max(served.run(lambda: [peer.backlog for peer in served.connections]))
        assert largest < 8 << 20
        connection.ping()
