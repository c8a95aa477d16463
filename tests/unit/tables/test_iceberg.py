"""Iceberg metadata beside the Delta log, judged by pyiceberg and deltalake, and after crashes at every step."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polywire.client.bulk import PartitionRange, StoredChunk
from polywire.errors import Invalid, Unavailable
from polywire.records.batch import stamp
from polywire.records.columns import Header, Record
from polywire.records.rows import from_records
from polywire.store.base import BlobMissing
from polywire.table_orders import ICEBERG_HINT, ICEBERG_METADATA, iceberg_metadata_name
from polywire.tables import iceberg, writer
from polywire.tables.columns import ARROW_SCHEMA, FIELD_IDS
from polywire.tables.delta_log import CommitConflict, DeltaLog, TableState
from polywire.tables.iceberg import DELTA_VERSION, NEXT_OFFSETS, IcebergMetadata
from polywire.tables.writer import DATA, TopicTable
from polywire.testing.memory_objects import ObjectFault
from tests.unit.tables.rig import Died, MortalObjects, merge, save

StaticTable = pytest.importorskip("pyiceberg.table", reason="pyiceberg is not installed").StaticTable
DeltaTable = pytest.importorskip("deltalake", reason="deltalake is not installed").DeltaTable

TOPIC_ID = b"i" * 16
HOUR_MS = 3_600_000
ORDER = [("partition", "ascending"), ("offset", "ascending")]


@dataclass
class FakeSource:
    """A topic whose partitions are lists of batches."""

    partitions: list[list[list[Record]]] = field(default_factory=lambda: [[], []])
    topic_id: bytes = TOPIC_ID
    sent: int = 0

    def send(self, partition: int = 0, count: int = 3) -> None:
        records = []
        for _ in range(count):
            number, self.sent = self.sent, self.sent + 1
            records.append(
                Record(
                    None if number % 5 == 4 else b"value %d" % number,
                    None if number % 3 == 0 else b"key",
                    (Header(b"h", b"%d" % number),) if number % 2 else (),
                )
            )
        self.partitions[partition].append(records)

    def bounds(self, topics: Sequence[str]) -> list[PartitionRange]:
        return [
            PartitionRange("default.orders", self.topic_id, number, 1, 1, 0, sum(map(len, batches)))
            for number, batches in enumerate(self.partitions)
        ]

    def fetch_range(
        self, topic: str, partition: int, incarnation: int, offset: int, offset_end: int, *, epoch: int
    ) -> Iterator[StoredChunk]:
        at = 0
        for records in self.partitions[partition]:
            end = at + len(records)
            if end > offset:
                batch = from_records(records)
                stamp(batch, 0, 7, 1, at, 0, 1_700_000_000_000_123 + at)
                yield StoredChunk(topic, partition, memoryview(batch), max(at, offset), end, end)
            at = end


class World:
    """A topic, its table's objects in memory, and a clock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.objects = MortalObjects()
        self.source = FakeSource()
        self.time_ms = 1_800_000_000_000
        self.url = f"file://{directory}"

    def now_ms(self) -> int:
        self.time_ms += 1
        return self.time_ms

    def pause(self, seconds: float) -> None:
        self.time_ms += int(seconds * 1000)

    def metadata(self) -> IcebergMetadata:
        return IcebergMetadata(self.objects, self.url, now_ms=self.now_ms, pause=self.pause)

    def table(self, *, with_iceberg: bool = True) -> TopicTable:
        return TopicTable(
            "default.orders",
            self.objects,
            self.source,
            now_ms=self.now_ms,
            pause=self.pause,
            iceberg=self.metadata() if with_iceberg else None,
        )

    def state(self) -> TableState:
        return DeltaLog(self.objects, self.now_ms).load()

    def dump(self) -> Path:
        """Write the objects to disk, for readers, and return the directory of the table."""
        for old in [path for path in self.directory.rglob("*") if path.is_file()]:
            old.unlink()
        return save(self.objects, self.directory)

    def iceberg(self) -> Any:
        return StaticTable.from_metadata(str(self.dump()))

    def newest(self) -> dict[str, Any]:
        version = int(self.objects.read(ICEBERG_HINT).content)
        with pytest.raises(BlobMissing):
            self.objects.read(iceberg_metadata_name(version + 1))
        found: dict[str, Any] = json.loads(self.objects.read(iceberg_metadata_name(version)).content)
        return found

    def operations(self) -> list[str]:
        return [snapshot["summary"]["operation"] for snapshot in self.newest()["snapshots"]]

    def check(self) -> None:
        """Fail unless the Iceberg table, the Delta table and the log have the same rows."""
        table = self.iceberg()
        found = judged(table.scan())
        state = self.state()
        paths = [f"{self.directory}/{path}" for path in state.files]
        assert found == rows(pa.concat_tables([pq.read_table(path) for path in paths]))
        assert found == rows(pa.table(DeltaTable(str(self.directory)).to_pyarrow_table()))
        assert len(found) == state.row_count == sum(len(batch) for own in self.source.partitions for batch in own)
        assert [row["offset"] for row in found if row["partition"] == 0] == [
            *range(sum(map(len, self.source.partitions[0])))
        ]
        summary = table.current_snapshot().summary
        assert int(summary[DELTA_VERSION]) == state.version
        assert json.loads(summary[NEXT_OFFSETS]) == {
            f"{number}/1": sum(map(len, batches)) for number, batches in enumerate(self.source.partitions) if batches
        }


def rows(table: pa.Table) -> list[dict[str, Any]]:
    columns = [table.column(name).cast(ARROW_SCHEMA.field(name).type) for name in ARROW_SCHEMA.names]
    return pa.table(columns, names=ARROW_SCHEMA.names).sort_by(ORDER).to_pylist()  # type: ignore[arg-type]


def judged(scan: Any) -> list[dict[str, Any]]:
    """Return the rows of a scan of pyiceberg, which reads a null list as an empty list. Headers are never empty."""
    return [{**row, "headers": row["headers"] or None} for row in rows(scan.to_arrow())]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def append(world: World, table: TopicTable, count: int = 1) -> None:
    for _ in range(count):
        world.source.send(world.source.sent % 2)
        table.append()


# Readers


def test_pyiceberg_reads_the_rows_of_the_log_after_appends_and_merges(world: World) -> None:
    table = world.table()
    append(world, table, 20)
    world.check()
    merge(table)
    world.check()
    append(world, table)
    world.check()
    assert world.operations() == ["append"] * 20 + ["replace", "append"]


def test_a_snapshot_is_a_version_of_the_delta_log(world: World) -> None:
    append(world, table := world.table(), 17)
    merge(table)
    found = world.iceberg()
    for snapshot in found.snapshots():
        version = int(snapshot.summary[DELTA_VERSION])
        expected = DeltaTable(str(world.directory), version=version).to_pyarrow_table()
        assert judged(found.scan(snapshot_id=snapshot.snapshot_id)) == rows(pa.table(expected))
    assert [int(snapshot.summary[DELTA_VERSION]) for snapshot in found.snapshots()] == [*range(1, 19)]


def test_filters_skip_files(world: World) -> None:
    append(world, world.table(), 10)
    found = world.iceberg()

    def planned(condition: str) -> int:
        return len(list(found.scan(row_filter=condition).plan_files()))

    assert planned("offset >= 0") == 10
    assert planned("offset = 12 and partition = 1") == 1
    assert planned("offset > 14") == 0
    assert planned("timestamp < '2000-01-01T00:00:00+00:00'") == 0
    assert planned("offset is null") == 0


def test_columns_are_found_by_the_ids_in_the_files(world: World) -> None:
    append(world, world.table())
    found = world.iceberg()
    assert {item.name: item.field_id for item in found.schema().fields} == dict(FIELD_IDS)
    renamed = world.newest()
    renamed["schemas"][0]["fields"][5]["name"] = "content"
    path = world.directory / "renamed.metadata.json"
    path.write_text(json.dumps(renamed))
    values = StaticTable.from_metadata(str(path)).scan().to_arrow().column("content").to_pylist()
    assert values == [b"value 0", b"value 1", b"value 2"]


def test_statistics_of_files(world: World) -> None:
    append(world, world.table())
    found = world.iceberg().inspect.files().to_pylist()[0]
    assert found["record_count"] == 3
    assert found["readable_metrics"]["offset"] == {
        "column_size": None, "value_count": 3, "null_value_count": 0, "nan_value_count": None,
        "lower_bound": 0, "upper_bound": 2,
    }  # fmt: skip
    assert found["readable_metrics"]["key"]["null_value_count"] == 1


# Crashes


def is_killed(world: World, action: Callable[[TopicTable], object], writes: int) -> bool:
    """Return whether the writer was killed, because the action needs more writes than this."""
    table = world.table()
    assert table.state.version >= 0
    world.objects.dies_at = world.objects.writes + writes
    try:
        action(table)
    except Died:
        return True
    finally:
        world.objects.dies_at = -1
    return False


def test_a_writer_killed_at_any_write_of_an_append(world: World) -> None:
    def action(table: TopicTable) -> None:
        world.source.send()
        table.append()

    append(world, world.table(), 3)
    writes = 0
    while is_killed(world, action, writes):
        writes += 1
        world.table().append()
        world.check()
    assert writes == 6  # data file, commit, manifest, list of manifests, metadata, hint
    world.check()


def test_a_writer_killed_at_any_write_of_a_merge_and_of_garbage_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def action(table: TopicTable) -> None:
        merge(table)
        table.vacuum(1)

    def prepared(name: int) -> World:
        world = World(tmp_path / str(name))
        append(world, world.table(), 3)
        world.time_ms += HOUR_MS
        return world

    monkeypatch.setattr(writer, "MERGE_COUNT", 2)
    writes = 0
    while is_killed(world := prepared(writes), action, writes):
        writes += 1
        following = world.table()
        following.append()
        files = {task.file.file_path for task in world.iceberg().scan().plan_files()}
        assert files == {f"{world.url}/{path}" for path in world.state().files}
        following.vacuum(0)
        world.check()
    assert writes > 15
    world.check()


def test_versions_without_a_snapshot_become_one(world: World) -> None:
    append(world, world.table(with_iceberg=False), 3)
    append(world, world.table())
    world.check()
    assert world.operations() == ["append"]
    without = world.table(with_iceberg=False)
    append(world, without, 12)
    merge(without)
    append(world, world.table())
    world.check()
    assert world.operations() == ["append", "overwrite"]


def test_a_table_is_projected_without_new_records(world: World) -> None:
    append(world, world.table(with_iceberg=False), 3)
    world.table().append()
    world.check()


@pytest.mark.parametrize("fault", [ObjectFault.LOST_REPLY, ObjectFault.REFUSED, ObjectFault.BUSY])
@pytest.mark.parametrize("call", range(5))
def test_a_request_that_fails_once_is_repeated(world: World, fault: ObjectFault, call: int) -> None:
    append(world, table := world.table())
    world.objects.fail("create", fault, after=call)
    append(world, table)
    world.check()
    assert world.operations() == ["append", "append"]


def test_a_failed_hint_is_written_by_the_next_step(world: World) -> None:
    append(world, table := world.table())
    world.objects.fail("put", ObjectFault.REFUSED)
    with pytest.raises(Unavailable):
        append(world, table)
    table = world.table()
    table.append()
    world.check()


@pytest.mark.parametrize("hint", [b"", b"1", b"999"], ids=["torn", "old", "of deleted metadata"])
def test_a_wrong_hint_is_corrected(world: World, hint: bytes) -> None:
    append(world, world.table(), 5)
    world.objects.put(ICEBERG_HINT, hint)
    append(world, world.table())
    world.check()
    assert len(world.operations()) == 6


# Several writers


def test_a_writer_continues_from_the_metadata_of_another(world: World) -> None:
    append(world, first := world.table(), 2)
    second = world.table()
    append(world, second, 3)
    world.source.send()
    with pytest.raises(CommitConflict):
        first.append()
    first = world.table()
    first.append()
    world.check()
    assert world.operations() == ["append"] * 6


def test_a_writer_reads_metadata_that_another_stored_first(world: World) -> None:
    append(world, world.table(), 2)
    slow = world.metadata()
    slow.project(world.state())
    world.source.send()
    world.table(with_iceberg=False).append()
    old = world.state()
    append(world, world.table())
    slow.project(old)  # the other writer's snapshot has this version
    world.check()
    slow.project(world.state())
    assert world.operations() == ["append"] * 3
    append(world, world.table())
    slow.expire(world.state(), 0)
    assert world.operations() == ["append"] * 4


# Size


def test_old_versions_snapshots_and_manifests_are_removed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg, "SNAPSHOT_BYTES_MAX", 6000)
    table = world.table()
    for _ in range(3):
        append(world, table, 16)
        merge(table)
    newest = world.newest()
    assert 5 <= len(newest["snapshots"]) < 12
    assert sum(len(json.dumps(snapshot)) for snapshot in newest["snapshots"]) < 8000
    assert len(newest["metadata-log"]) == iceberg.PREVIOUS_MAX
    assert sum(name.endswith(".json") for name in world.objects.list(ICEBERG_METADATA)) == iceberg.PREVIOUS_MAX + 1
    assert table.vacuum(HOUR_MS) > 60
    world.check()
    found = world.iceberg()
    for snapshot in found.snapshots():
        found.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
    names = world.objects.list(ICEBERG_METADATA)
    needed = {path.rpartition("/")[2] for path in found.inspect.all_manifests().column("path").to_pylist()}
    assert {name.removeprefix(ICEBERG_METADATA) for name in names if "-files-" in name} == needed
    assert sum("-snapshot-" in name for name in names) == len(found.snapshots())


def test_snapshots_of_the_history_can_be_read(world: World) -> None:
    append(world, table := world.table(), 16)
    merge(table)
    world.time_ms += HOUR_MS
    recent_ms = world.time_ms
    append(world, table, 16)
    merge(table)
    append(world, table)
    table.vacuum(world.time_ms - recent_ms)
    found = world.iceberg()
    assert len(found.snapshots()) == 18
    for snapshot in found.snapshots():
        assert len(found.scan(snapshot_id=snapshot.snapshot_id).to_arrow()) == int(snapshot.summary["total-records"])
    world.time_ms += HOUR_MS
    table.vacuum(0)
    assert len(world.iceberg().snapshots()) == 1
    world.check()
    assert [name for name in world.objects.list(DATA) if name not in world.state().files] == []


def test_manifests_are_merged(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg, "MANIFEST_MERGE", 4)
    append(world, world.table(), 11)
    append(world, world.table(), 12)  # a new writer knows the entries from the manifests
    world.check()
    manifests = world.iceberg().inspect.manifests().to_pylist()
    assert len(manifests) < 8
    assert sum(item["added_data_files_count"] + item["existing_data_files_count"] for item in manifests) == 23
    monkeypatch.setattr(iceberg, "MANIFEST_FILES_MAX", 8)
    append(world, world.table(), 20)
    world.check()
    counts = [
        item["added_data_files_count"] + item["existing_data_files_count"]
        for item in world.iceberg().inspect.manifests().to_pylist()
    ]
    assert max(counts[1:]) <= 9


# Changes of the table


def test_turning_iceberg_off_removes_its_metadata(world: World) -> None:
    append(world, world.table(), 3)
    world.objects.put(f"{ICEBERG_METADATA}notes.txt", b"not ours")
    world.table(with_iceberg=False).vacuum(HOUR_MS)
    assert world.objects.list(ICEBERG_METADATA) == [f"{ICEBERG_METADATA}notes.txt"]
    append(world, world.table())
    world.check()


def test_a_moved_table_gets_new_metadata(world: World, tmp_path: Path) -> None:
    append(world, world.table(), 3)
    identity = world.newest()["table-uuid"]
    world.directory = tmp_path / "mövéd here"
    world.url = f"file://{tmp_path}/m%C3%B6v%C3%A9d%20here"
    world.table().append()
    world.check()
    assert world.operations() == ["append"]
    assert world.newest()["table-uuid"] == identity


def test_changes_of_other_programs_are_replaced(world: World) -> None:
    append(world, world.table(), 3)
    changed = world.newest()
    del changed["snapshots"][-1]["summary"][DELTA_VERSION]
    world.objects.create(iceberg_metadata_name(4), [json.dumps(changed).encode()])
    append(world, world.table())
    world.check()
    world.objects.create(iceberg_metadata_name(6), [b"{"])
    append(world, world.table())
    world.check()
    world.table().vacuum(0)
    world.check()


def test_metadata_with_a_lost_manifest_is_made_again(world: World) -> None:
    append(world, world.table(), 3)
    world.objects.delete(next(name for name in world.objects.list(ICEBERG_METADATA) if "-files-" in name))
    append(world, world.table())
    world.check()


def test_a_new_topic_with_the_same_name(world: World) -> None:
    append(world, table := world.table(), 2)
    world.source = FakeSource(topic_id=b"j" * 16)
    table = world.table()
    table.append()
    assert world.operations() == ["append", "append", "delete"]
    append(world, table)
    world.check()
    found = world.newest()["snapshots"]
    assert found[-1]["summary"]["polywire.topic-id"] == (b"j" * 16).hex()
    assert len({snapshot["sequence-number"] for snapshot in found}) == 4


def test_without_fastavro_the_error_says_what_to_install(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastavro", None)
    with pytest.raises(Invalid, match=r"pip install 'polywire\[tables\]'"):
        append(world, world.table())
