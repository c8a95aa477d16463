"""The broker as the source of a table: sealed records come from its segments, and all others over one connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from polywire.client.arrow import chunk_to_arrow
from polywire.client.bulk import BulkConnection, PartitionRange
from polywire.errors import Conflict, Missing, Unavailable
from polywire.log.segments import compaction
from polywire.tables import sealed, writer
from polywire.tables.sealed import SegmentReader
from polywire.tables.writer import TopicTable
from polywire.testing.memory_objects import MemoryObjects
from tests.unit.client.served import Served
from tests.unit.tables.rig import rows_of
from tests.unit.tables.test_sealed import SCHEMA, SLOTS, TOPIC, Files, Rows

MUCH = 1 << 40


@pytest.fixture(autouse=True)
def small_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "READER_RECORDS_MIN", 1)
    monkeypatch.setattr(sealed, "READER_RUN_BYTES_MIN", 1)
    monkeypatch.setattr(sealed, "REQUEST_BYTES", 50_000)
    monkeypatch.setattr(sealed, "PIECE_BYTES", 40_000)
    monkeypatch.setattr(compaction, "DIRTY_BYTES_MIN", 1)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    with Served(data_dir=tmp_path / "data", log_settings=SLOTS) as served:
        made = Files(served, tmp_path / "data")
        made.make()
        yield made
        made.connection.close()


@pytest.fixture
def reader(files: Files) -> Iterator[SegmentReader]:
    """Yield a reader whose connection cannot be opened again, like that of the process that writes tables."""
    connection = BulkConnection.over(socket.create_connection(("127.0.0.1", files.served.port)))
    yield SegmentReader(connection)
    connection.close()


def read(reader: SegmentReader, bounds: PartitionRange) -> Rows:
    chunks = reader.fetch_range(
        TOPIC, bounds.partition, bounds.incarnation, bounds.first_offset, bounds.next_offset, epoch=bounds.epoch
    )
    return [
        row for chunk in chunks for batch in chunk_to_arrow(chunk, SCHEMA.names, SCHEMA) for row in batch.to_pylist()
    ]


def test_the_rows_are_those_of_the_broker(files: Files, reader: SegmentReader) -> None:
    files.fill(900_000)
    for bounds in reader.bounds([TOPIC]):
        assert read(reader, bounds) == files.read(files.everything(bounds.partition), files=False)[0]
    assert reader.tally.file_bytes > reader.tally.wire_bytes > 0


def test_short_ranges_are_read_from_the_broker(
    files: Files, reader: SegmentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.fill(600_000)
    monkeypatch.setattr(sealed, "READER_RECORDS_MIN", MUCH)
    assert read(reader, reader.bounds([TOPIC])[0]) == files.read(files.everything(), files=False)[0]
    assert reader.tally.file_bytes == 0


def test_small_runs_are_read_from_the_broker(
    files: Files, reader: SegmentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.fill(600_000)
    monkeypatch.setattr(sealed, "READER_RUN_BYTES_MIN", MUCH)
    assert read(reader, reader.bounds([TOPIC])[0]) == files.read(files.everything(), files=False)[0]
    assert reader.tally.file_bytes == 0


@pytest.mark.parametrize("records_min", [1, MUCH], ids=["segments", "broker"])
def test_the_connection_is_usable_wherever_a_read_stops(
    files: Files, reader: SegmentReader, monkeypatch: pytest.MonkeyPatch, records_min: int
) -> None:
    monkeypatch.setattr("polywire.protocols.polywire.fetch.ANSWER_BYTES_MAX", 20_000)  # responses have many frames
    files.fill(900_000)
    monkeypatch.setattr(sealed, "READER_RECORDS_MIN", records_min)
    bounds = reader.bounds([TOPIC])[0]
    for stop in (1, 2, 5, 20):
        chunks = reader.fetch_range(TOPIC, 0, bounds.incarnation, 0, bounds.next_offset, epoch=bounds.epoch)
        for _ in zip(range(stop), chunks, strict=False):
            pass
        chunks.close()  # type: ignore[attr-defined]
        reader.ping()
    assert read(reader, bounds) == files.read(files.everything(), files=False)[0]


def test_a_range_that_ends_early_is_an_error(files: Files, reader: SegmentReader) -> None:
    files.fill(300_000)
    bounds = reader.bounds([TOPIC])[0]
    with pytest.raises((Missing, Conflict)):
        list(reader.fetch_range(TOPIC, 0, bounds.incarnation, 0, bounds.next_offset + 10, epoch=bounds.epoch))
    reader.ping()


def test_a_lost_connection_is_an_error(files: Files, reader: SegmentReader) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(Unavailable):
        SegmentReader(BulkConnection.over(ours)).ping()


def test_a_table_while_its_topic_is_trimmed_compacted_and_created_again(
    files: Files, reader: SegmentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RAW_BYTES_MAX", 200_000)  # most steps end in the middle of a segment
    objects = MemoryObjects()
    table = TopicTable(TOPIC, objects, reader)
    for _ in range(2):
        expected: dict[tuple[int, int], object] = {}
        for turn in range(3):
            files.fill(400_000)
            for number in range(2):
                rows = files.read(files.everything(number), files=False)[0]
                expected |= {(number, int(str(row["offset"]))): row["value"] for row in rows}
            for _ in range(turn + 1):
                table.append()
            tidy(files, turn)
        while table.append().behind:
            pass
        found = rows_of(objects, table.state)
        ends = {key.partition: offset for key, offset in table.state.offsets.items()}
        assert len({row[:2] for row in found}) == len(found), "a row is there twice"
        assert all(expected[number, offset] == value for number, offset, value in found)
        assert ends == {bounds.partition: bounds.next_offset for bounds in reader.bounds([TOPIC])}
        left = [files.read(files.everything(number), files=False)[0] for number in range(2)]
        assert {(number, row["offset"]) for number in range(2) for row in left[number]} <= {row[:2] for row in found}
        files.connection.delete_topic(TOPIC)
        files.make()
    assert reader.tally.file_bytes > 100_000


def tidy(files: Files, turn: int) -> None:
    """Trim a partition, or compact it and merge segments, while the table is behind."""
    incarnation, log = files.incarnation(), files.log
    if turn % 2:
        first = files.everything().offset
        files.served.run(lambda: log.trim(incarnation, first + 100))
    else:
        files.served.run(lambda: log.compact(incarnation, null_age_us=0))
    files.served.run(lambda: log._sealer.tidy(2**61, merging=True))
    files.settle()
