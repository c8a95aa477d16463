"""Tables of compacted topics have the latest record of each key: in the files, with the tail, and for other readers."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pytest

import polywire
from polywire.client.bulk import BulkConnection, connect
from polywire.errors import Corrupt
from polywire.records.columns import Record
from polywire.store.file_objects import FileObjects
from polywire.table_columns import column_name
from polywire.table_orders import ICEBERG_HINT, ICEBERG_METADATA, iceberg_metadata_name
from polywire.tables import deletion_vectors, frames, reading, writer
from polywire.tables.columns import ARROW_SCHEMA
from polywire.tables.iceberg import DELTA_VERSION, IcebergMetadata
from polywire.tables.latest import newest
from polywire.tables.writer import TopicTable, merged
from polywire.testing.memory_objects import MemoryObjects
from tests.unit.client.served import Served
from tests.unit.tables.rig import TOPIC, Clock, FakeTopic, Row, check, check_no_garbage, load, merge, table_of
from tests.unit.tables.tabled import READER_NAMES, fill_named, latest_of, produce, rows_of, rows_of_log, write_table

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")
StaticTable = pytest.importorskip("pyiceberg.table", reason="pyiceberg is not installed").StaticTable

KEYS = 12


@pytest.fixture
def topic() -> FakeTopic:
    return FakeTopic(is_latest=True)


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


def change(chance: random.Random, topic: FakeTopic) -> None:
    """Set or delete some keys, or append records without a key."""
    for _ in range(chance.randrange(1, 9)):
        key = chance.choice((None, *(b"key %d" % chance.randrange(KEYS) for _ in range(5))))
        value = None if chance.random() < 0.2 else b"%d" % chance.randrange(1000)
        topic.produce(chance.randrange(2), value, key=key)


def test_the_latest_record_of_a_key_replaces_the_others(topic: FakeTopic, objects: MemoryObjects) -> None:
    table = table_of(topic, objects)
    topic.produce(0, b"1", b"2", key=b"a")
    topic.produce(0, b"3", None, key=b"b")
    topic.produce(1, b"4", key=b"a")
    topic.produce(1, b"5", None, key=None)
    table.append()
    assert check(topic, objects).row_count == 4
    topic.produce(0, b"6", key=b"a")
    topic.produce(1, None, key=b"a")
    table.append()
    state = check(topic, objects)
    assert sorted(file.live_count for file in state.files.values()) == [1, 2]
    assert topic.rows(state) == [(0, 4, b"6"), (1, 1, b"5"), (1, 2, None)]


def test_a_file_without_any_row_is_removed(topic: FakeTopic, objects: MemoryObjects) -> None:
    table = table_of(topic, objects, Clock())
    topic.produce(0, b"1", key=b"a")
    table.append()
    topic.produce(0, None, key=b"a")
    table.append()
    assert check(topic, objects).files == {}
    table.vacuum(0)
    check_no_garbage(objects, load(objects))


def test_a_topic_becomes_compacted_and_is_not_any_more(objects: MemoryObjects) -> None:
    chance, topic = random.Random(1), FakeTopic()
    for _ in range(20):
        change(chance, topic)
        table_of(topic, objects).append()
    everything = len(check(topic, objects).files)
    topic.is_latest = True
    table_of(topic, objects).append()
    state = check(topic, objects)
    assert (state.is_latest, len(state.files) <= everything) == (True, True)
    rows = topic.rows(state)
    topic.is_latest = False
    topic.produce(0, b"x", b"y", key=b"key 1")
    table_of(topic, objects).append()
    state = load(objects)
    assert (state.is_latest, state.row_count) == (False, len(rows) + 2)


def test_rows_deleted_during_a_merge_stay_deleted(
    topic: FakeTopic, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MERGE_COUNT", 4)
    monkeypatch.setattr(writer, "LIVE_MIN", 0)
    table = table_of(topic, objects)
    for number in range(8):
        topic.produce(0, b"old", key=b"%d" % number)
        topic.produce(0, b"old", key=b"%d" % (number // 2))
        topic.produce(0, b"stays", key=b"stays %d" % number)
        table.append()
    plan = table.plan_merge()
    assert plan is not None
    content = merged(plan)
    topic.produce(0, b"new", key=b"6")
    topic.produce(0, None, key=b"7")
    topic.produce(0, None, key=b"stays 3")
    table.append()
    assert table.replace(plan, content)
    state = check(topic, objects)
    assert any(file.deleted is not None for file in state.files.values())
    assert load(objects) == state


def test_a_file_with_few_rows_is_written_again(
    topic: FakeTopic, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(topic, objects, Clock())
    for number in range(10):
        topic.produce(0, b"old", key=b"%d" % number)
    table.append()
    for number in range(6):
        topic.produce(0, b"new", key=b"%d" % number)
    table.append()
    assert merge(table)
    state = check(topic, objects)
    assert [file.deleted for file in state.files.values()] == [None, None]
    table.vacuum(0)
    check_no_garbage(objects, state)


@pytest.mark.parametrize("seed", range(8))
def test_readers_of_other_projects_see_the_latest_records(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MERGE_COUNT", 3)
    monkeypatch.setattr(writer, "CHECKPOINT_COMMITS", 4)
    chance, clock, topic, objects = random.Random(seed), Clock(), FakeTopic(is_latest=True), FileObjects(tmp_path)
    url = tmp_path.as_uri()

    def table() -> TopicTable:
        metadata = IcebergMetadata(objects, url, now_ms=clock.now_ms, pause=lambda _: None)
        return TopicTable(TOPIC, objects, topic, now_ms=clock.now_ms, iceberg=metadata, is_latest=True)

    current, versions = table(), dict[int, list[Row]]()
    for _ in range(30):
        change(chance, topic)
        current.append()
        merge(current)
        versions[current.state.version] = topic.rows(current.state)
        if chance.random() < 0.2:
            current = table()
        if chance.random() < 0.1:
            current.vacuum(3_600_000)
    state = check(topic, objects)
    expected = topic.rows(state)
    assert polars_rows(polars.read_delta(str(tmp_path))) == expected
    assert delta_rows(tmp_path) == expected
    version = int(objects.read(ICEBERG_HINT).content)
    iceberg = StaticTable.from_metadata(f"{url}/{iceberg_metadata_name(version)}")
    assert iceberg_rows(iceberg.scan()) == expected
    for snapshot in iceberg.snapshots():
        number = int(snapshot.summary[DELTA_VERSION])
        if number in versions:
            assert iceberg_rows(iceberg.scan(snapshot_id=snapshot.snapshot_id)) == versions[number]
            assert delta_rows(tmp_path, number) == versions[number]
    current.vacuum(0)
    current.vacuum(0)
    check_no_garbage(objects, state)
    assert iceberg_rows(StaticTable.from_metadata(f"{url}/{newest_metadata(objects)}").scan()) == expected
    vectors = [file for file in state.files.values() if file.deleted is not None]
    assert len([name for name in objects.list(ICEBERG_METADATA) if "-deletes-" in name]) == len(vectors)


def newest_metadata(objects: Any) -> str:
    return iceberg_metadata_name(int(objects.read(ICEBERG_HINT).content))


def polars_rows(frame: Any) -> list[Row]:
    return sorted(frame.select("partition", "offset", "value").rows())


def delta_rows(folder: Path, version: int | None = None) -> list[Row]:
    query = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(str(folder), version=version))
    found = pa.table(query.execute('select partition, "offset", value from t order by 1, 2'))
    return list(zip(*(column.to_pylist() for column in found.columns), strict=True))


def iceberg_rows(scan: Any) -> list[Row]:
    found = scan.to_arrow().select(["partition", "offset", "value"])
    return sorted(zip(*(column.to_pylist() for column in found.columns), strict=True))


def test_a_damaged_deletion_vector_is_an_error(topic: FakeTopic, objects: MemoryObjects) -> None:
    rows = {"a": deletion_vectors.bitmap([1, 5]), "b": deletion_vectors.bitmap(range(0, 200_000, 2))}
    content, vectors = deletion_vectors.encode("data", 7, rows)
    path = vectors["a"].path
    objects.create(path, [content])
    for name, vector in vectors.items():
        assert deletion_vectors.read(objects, vector) == rows[name]
        assert deletion_vectors.DeletionVector.of(vector.descriptor()) == vector
    objects.put(path, content[:20] + b"?" + content[21:])
    with pytest.raises(Corrupt, match="deletion vector cannot be read"):
        deletion_vectors.read(objects, vectors["a"])


def test_the_newest_offsets_are_found_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polywire.tables.latest.ROWS_PENDING", 10)
    schema = pa.schema([ARROW_SCHEMA.field(name) for name in ("partition", "key", "offset")])
    parts = [
        pa.table([[0] * 6, [b"%d" % (n % 4) for n in range(6)], range(first, first + 6)], schema=schema)
        for first in range(0, 60, 6)
    ]
    found = newest(parts)
    assert sorted(found.select(["key", "offset"]).to_pylist(), key=lambda row: row["offset"]) == [
        {"key": b"2", "offset": 56},
        {"key": b"3", "offset": 57},
        {"key": b"0", "offset": 58},
        {"key": b"1", "offset": 59},
    ]


def test_a_replaced_topic_keeps_the_version_of_the_protocol(tmp_path: Path) -> None:
    objects, first = FileObjects(tmp_path), FakeTopic(is_latest=True)
    first.produce(0, b"1", b"2", key=b"a")
    first.produce(0, b"3", key=b"b")
    table_of(first, objects).append()
    second = FakeTopic(topic_id=b"second topic 012")
    second.produce(0, b"4", b"5", key=b"a")
    table_of(second, objects).append()
    assert not check(second, objects).is_latest
    protocol = deltalake.DeltaTable(str(tmp_path)).protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (3, 7)
    assert protocol.reader_features == ["deletionVectors"]
    assert set(protocol.writer_features) == {"deletionVectors", "invariants"}  # delta-spark requires the latter
    assert delta_rows(tmp_path) == [(0, 0, b"4"), (0, 1, b"5")]


# With the tail


def set_keys(connection: BulkConnection, chance: random.Random, count: int) -> None:
    for partition in range(3):
        records = [
            Record(
                None if chance.random() < 0.2 else b'{"n": %d}' % chance.randrange(1000),
                key=chance.choice((None, b"key %d" % chance.randrange(KEYS), b"key %d" % chance.randrange(KEYS))),
            )
            for _ in range(count)
        ]
        if records:
            produce(connection, "states", partition, records)


@pytest.mark.parametrize("columns", ["", "infer"])
@pytest.mark.parametrize(("in_table", "in_tail"), [(None, 30), (0, 0), (30, 0), (30, 30), (30, 1)])
def test_table_and_tail_together_have_the_latest_records(
    tabled: Served, in_table: int | None, in_tail: int, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, chance = tabled.address, random.Random(in_tail)
    with closing(connect(address)) as connection:
        connection.create_topic("states", 3, {"table": "delta", "compaction": 1, "table_columns": columns})
        for _ in range(0 if in_table is None else 3):  # None: before the first commit
            set_keys(connection, chance, in_table or 0)
            write_table(connection, "states")
        set_keys(connection, chance, in_tail)
    expected = latest_of(rows_of_log(address, "states"))
    assert rows_of(polywire.sql("from states", address=address).to_batches()) == expected
    chosen = [row for row in expected if row[1] >= 40]
    condition = polywire.sql('from states where "offset" >= 40', address=address)
    assert rows_of(condition.to_batches()) == chosen
    short = [(row[0], row[1], row[3], row[4]) for row in expected]
    names = ["partition", "offset", "key", "value"]
    lazy = frames.scan_polars(address, "states", table=True)
    assert sorted(lazy.collect().select(names).rows(), key=lambda row: row[:2]) == short
    if columns and in_table:
        numbers = polywire.sql("select value, n from states where value is not null", address=address).to_pylist()
        assert len(numbers) == sum(row[4] is not None for row in expected)
        assert all(json.loads(row["value"])["n"] == row["n"] for row in numbers)
    for is_local in (True, False):
        monkeypatch.setattr(reading.Snapshot, "is_local", is_local)
        found = frames.read_arrow(address, "states", columns=names, table=True)
        assert sorted(map(tuple, (row.values() for row in found.to_pylist())), key=lambda row: row[:2]) == short
        found = frames.read_arrow(address, "states", columns=names, table=True, start=40)
        assert found.num_rows == len(chosen)
    assert rows_of(polywire.sql("from states", address=address).to_batches()) == expected


@pytest.mark.parametrize("has_tail", [False, True])
@pytest.mark.parametrize("more", ["", "File_Row_Number"])
def test_typed_columns_may_have_any_name(tabled: Served, more: str, has_tail: bool) -> None:
    address, fields = tabled.address, (*READER_NAMES, *([more] if more else []))
    with closing(connect(address)) as connection:
        expected = fill_named(connection, "states", fields, has_tail=has_tail)
    columns = [str(column_name(name)) for name in fields]
    quoted = ", ".join(f'"{name}"' for name in columns)
    found = polywire.sql(f"select {quoted} from states", address=address)
    assert sorted(map(tuple, (row.values() for row in found.to_pylist()))) == expected
    assert polywire.sql("from states", address=address).column_names == [*ARROW_SCHEMA.names, "_error", *columns]
    table = frames.read_arrow(address, "states", table=True)
    assert sorted(map(tuple, (row.values() for row in table.select(columns).to_pylist()))) == expected
    lazy = frames.scan_polars(address, "states", table=True).collect()
    assert lazy.columns == table.column_names
    assert sorted(zip(*(lazy.get_column(name).to_list() for name in columns), strict=True)) == expected
