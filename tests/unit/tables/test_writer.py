"""A topic's table: appended, merged, vacuumed and replaced, and read by other Delta readers."""

from __future__ import annotations

from pathlib import Path

import deltalake
import polars
import pytest

from polywire.errors import Corrupt
from polywire.tables import delta_log, writer
from polywire.tables.delta_log import NEW, CommitConflict, commit_name
from polywire.tables.writer import DATA, TopicTable, merged
from polywire.testing.memory_objects import MemoryObjects, ObjectFault
from tests.unit.tables.rig import Clock, FakeTopic, check, check_no_garbage, load, merge, rows_of, save, table_of


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def topic() -> FakeTopic:
    return FakeTopic()


def append_all(table: TopicTable) -> int:
    rows = 0
    while True:
        progress = table.append()
        rows += progress.rows
        if not progress.behind:
            return rows


def test_records_are_appended_once(topic: FakeTopic, objects: MemoryObjects) -> None:
    table = table_of(topic, objects)
    topic.produce(0, *[b"%d" % n for n in range(20)])
    topic.produce(1, b"a", None)
    assert append_all(table) == 22
    assert append_all(table) == 0
    topic.produce(1, b"b")
    assert append_all(table) == 1
    assert check(topic, objects).offsets == {topic.key(0): 20, topic.key(1): 3}


def test_another_writer_continues(topic: FakeTopic, objects: MemoryObjects) -> None:
    topic.produce(0, b"a")
    append_all(table_of(topic, objects))
    topic.produce(0, b"b")
    assert append_all(table_of(topic, objects)) == 1
    check(topic, objects)


def test_a_table_with_records_that_a_restored_log_does_not_have_is_reported(
    topic: FakeTopic, objects: MemoryObjects
) -> None:
    topic.produce(0, b"a", b"b", b"c")
    append_all(table_of(topic, objects))
    del topic.values[0][1:], topic.keys[0][1:]
    with pytest.raises(Corrupt, match="partition=0 table_offset=3 log_offset=1"):
        table_of(topic, objects).append()


def test_an_empty_topic_has_an_empty_table(topic: FakeTopic, objects: MemoryObjects, tmp_path: Path) -> None:
    append_all(table_of(topic, objects))
    assert check(topic, objects).version == 0
    assert deltalake.DeltaTable(str(save(objects, tmp_path))).to_pyarrow_table().num_rows == 0


def test_a_large_backlog_is_written_file_by_file(
    topic: FakeTopic, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RAW_BYTES_MAX", 1)
    topic.produce(0, *[b"x"] * 20)
    topic.produce(1, *[b"y"] * 3)
    table = table_of(topic, objects)
    progress = table.append()
    assert (progress.rows, progress.behind) == (7, 16)
    check(topic, objects)
    assert append_all(table) == 16
    assert len(check(topic, objects).files) == 4


def test_records_that_retention_removed_are_counted(topic: FakeTopic, objects: MemoryObjects) -> None:
    topic.produce(0, *[b"x"] * 10)
    topic.first_offsets[0] = 4
    progress = table_of(topic, objects).append()
    assert (progress.rows, progress.skipped) == (6, 4)
    assert [row[1] for row in rows_of(objects, load(objects))] == list(range(4, 10))


def test_a_new_topic_with_the_same_name_replaces_the_rows(topic: FakeTopic, objects: MemoryObjects) -> None:
    topic.produce(0, b"old")
    append_all(table_of(topic, objects))
    replaced = FakeTopic(1, topic_id=b"second topic 012")
    replaced.produce(0, b"new", b"newer")
    assert append_all(table_of(replaced, objects)) == 2
    assert [row[2] for row in rows_of(objects, check(replaced, objects))] == [b"new", b"newer"]


def test_a_new_incarnation_of_a_partition_begins_again(topic: FakeTopic, objects: MemoryObjects) -> None:
    topic.produce(0, b"a", b"b")
    table = table_of(topic, objects)
    append_all(table)
    topic.values[0], topic.keys[0], topic.incarnations[0] = [b"c"], [b"k"], 9
    assert append_all(table) == 1
    assert [row[2] for row in rows_of(objects, load(objects))] == [b"a", b"c", b"b"]


def test_small_files_are_merged_and_deleted(topic: FakeTopic, objects: MemoryObjects, tmp_path: Path) -> None:
    table = table_of(topic, objects, Clock())
    for n in range(writer.MERGE_COUNT):
        topic.produce(n % 2, b"%d" % n)
        append_all(table)
    assert merge(table)
    assert len(check(topic, objects).files) == 1
    version = load(objects).version
    assert len(objects.list(DATA)) == writer.MERGE_COUNT + 1
    path = str(save(objects, tmp_path))
    assert deltalake.DeltaTable(path, version=version - 1).to_pyarrow_table().num_rows == writer.MERGE_COUNT
    assert table.vacuum(0) == writer.MERGE_COUNT
    check_no_garbage(objects, check(topic, objects))


def test_older_versions_stay_readable_for_their_history(topic: FakeTopic, objects: MemoryObjects) -> None:
    clock = Clock()
    table = table_of(topic, objects, clock)
    for _ in range(writer.MERGE_COUNT):
        topic.produce(0, b"x")
        append_all(table)
    merge(table)
    assert table.vacuum(60_000) == 0
    clock.ms += 60_001
    assert table.vacuum(60_000) == writer.MERGE_COUNT


def test_a_merge_is_dropped_if_its_files_are_gone(topic: FakeTopic, objects: MemoryObjects) -> None:
    table = table_of(topic, objects)
    for _ in range(writer.MERGE_COUNT):
        topic.produce(0, b"x")
        append_all(table)
    plan = table.plan_merge()
    assert plan is not None
    content = merged(plan)
    append_all(table_of(FakeTopic(1, topic_id=b"second topic 012"), objects))
    table = table_of(topic, objects)
    assert not table.replace(plan, content)


def test_checkpoints_replace_old_commits(
    topic: FakeTopic, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(writer, "CHECKPOINT_COMMITS", 5)
    table = table_of(topic, objects)
    for n in range(23):
        topic.produce(n % 2, b"%d" % n)
        append_all(table)
    table.vacuum(0)
    names = objects.list(delta_log.LOG)
    assert min(delta_log.version_of(name) for name in names if name.endswith(".json")) > 0
    state = check(topic, objects)
    assert state.version == 23
    path = str(save(objects, tmp_path))
    assert deltalake.DeltaTable(path).version() == 23
    assert polars.read_delta(path).height == 23


def test_writers_that_restart_often_write_checkpoints(
    topic: FakeTopic, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CHECKPOINT_COMMITS", 5)
    for _ in range(11):
        topic.produce(0, b"x")
        append_all(table_of(topic, objects))
    names = [name for name in objects.list(delta_log.LOG) if name.endswith(delta_log.CHECKPOINT)]
    assert [delta_log.version_of(name) for name in names] == [5, 10]


def commit_and_expire(topic: FakeTopic, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write 12 versions with checkpoints at 5 and 10, and delete what only older versions need."""
    monkeypatch.setattr(writer, "CHECKPOINT_COMMITS", 5)
    table = table_of(topic, objects)
    for _ in range(12):
        topic.produce(0, b"x")
        append_all(table)
    table.vacuum(0)


def test_a_torn_pointer_to_the_checkpoint_is_ignored(
    topic: FakeTopic, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_and_expire(topic, objects, monkeypatch)
    objects.put(delta_log.LAST_CHECKPOINT, b'{"vers')
    assert check(topic, objects).version == 12


def test_a_table_without_its_checkpoint_is_not_begun_again(
    topic: FakeTopic, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_and_expire(topic, objects, monkeypatch)
    for name in objects.list(delta_log.LOG):
        if name.endswith(delta_log.CHECKPOINT):
            objects.delete(name)
    with pytest.raises(Corrupt, match="checkpoint before the oldest commit is missing"):
        load(objects)


def test_a_checkpoint_that_is_pending_is_not_named(
    topic: FakeTopic, objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CHECKPOINT_COMMITS", 1)
    table = table_of(topic, objects)
    append_all(table)
    topic.produce(0, b"x")
    objects.fail("create", ObjectFault.BUSY, after=2)  # the data file and the commit come first
    append_all(table)
    assert delta_log.LAST_CHECKPOINT not in objects.list(delta_log.LOG)
    check(topic, objects)


def test_a_damaged_commit_is_reported(topic: FakeTopic, objects: MemoryObjects) -> None:
    append_all(table_of(topic, objects))
    objects.put(commit_name(1), b"{")
    with pytest.raises(Corrupt, match="version=1"):
        load(objects)


def test_a_lost_response_to_a_commit_is_recognized(topic: FakeTopic, objects: MemoryObjects) -> None:
    topic.produce(0, b"a")
    table = table_of(topic, objects)
    assert table.state.version == NEW
    objects.fail("create", ObjectFault.LOST_REPLY, after=2)
    append_all(table)
    topic.produce(0, b"b")
    append_all(table)
    check(topic, objects)


def test_one_of_two_writers_commits_a_version(topic: FakeTopic, objects: MemoryObjects) -> None:
    first, second = table_of(topic, objects), table_of(topic, objects)
    topic.produce(0, b"a")
    append_all(first)
    append_all(second)
    topic.produce(0, b"b")
    append_all(first)
    with pytest.raises(CommitConflict):
        append_all(second)
    check(topic, objects)
    assert len(objects.list(DATA)) == 3
    third = table_of(topic, objects)
    third.vacuum(0)
    check_no_garbage(objects, third.state)


def test_columns_are_those_of_the_records(topic: FakeTopic, objects: MemoryObjects, tmp_path: Path) -> None:
    topic.produce(0, b"a", None)
    append_all(table_of(topic, objects))
    rows = deltalake.DeltaTable(str(save(objects, tmp_path))).to_pyarrow_table().to_pylist()
    assert [(row["partition"], row["offset"], row["key"], row["value"]) for row in rows] == [
        (0, 0, b"k", b"a"),
        (0, 1, b"k", None),
    ]
    assert rows[0]["headers"] is None
    assert rows[0]["timestamp_type"] == 1


def test_statistics_skip_files(topic: FakeTopic, objects: MemoryObjects, tmp_path: Path) -> None:
    table = table_of(topic, objects)
    for _ in range(3):
        topic.produce(0, *[b"x"] * 10)
        append_all(table)
    actions = deltalake.DeltaTable(str(save(objects, tmp_path))).get_add_actions(flatten=True)
    found = {name: actions.column(name).to_pylist() for name in ("num_records", "min.offset", "max.offset")}
    assert sorted(zip(*found.values(), strict=True)) == [(10, 0, 9), (10, 10, 19), (10, 20, 29)]
