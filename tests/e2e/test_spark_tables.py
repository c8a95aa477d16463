"""Topics as tables on real Spark against a real broker."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from polywire.errors import Conflict, Invalid, Missing
from polywire.records.columns import Header, HeaderKind, Record
from polywire.spark import stream_table, table
from polywire.spark.tables import SCHEMA, check_file_system
from polywire.table_columns import column_name
from tests.e2e.conftest import Served
from tests.unit.tables.tabled import (
    READER_NAMES,
    Row,
    configure,
    fill_named,
    latest_of,
    produce,
    rows_of,
    rows_of_log,
    write_table,
)

pytestmark = pytest.mark.spark


def rows(frame: DataFrame) -> list[Row]:
    """Return the rows sorted by partition and offset, in the form of ``rows_of_log``."""
    assert frame.schema.simpleString() == SCHEMA.simpleString()
    return rows_of([frame.toArrow()])


def fill(served: Served, topic: str, first: int) -> None:
    header = Header(b"n", b"1", value_kind=HeaderKind.STRING)
    for partition in range(3):
        records = [
            Record(
                None if number % 5 == 4 else b"value %d" % number,
                key=None if number % 3 == 2 else b"key",
                headers=(header,) if number % 2 else (),
            )
            for number in range(first, first + 20)
        ]
        produce(served.connection, topic, partition, records)


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("has_tail", [False, True])
def test_table_and_tail_have_each_record_once(
    spark: SparkSession, served: Served, topic: str, has_table: bool, has_tail: bool
) -> None:
    served.connection.create_topic(topic, 3, {"table": "delta"})
    if has_table:
        fill(served, topic, 0)
        write_table(served.connection, topic)
    if has_tail:
        fill(served, topic, 100)
    frame = table(spark, topic, address=served.address)
    expected = rows_of_log(served.address, topic)
    assert len(expected) == 60 * (has_table + has_tail)
    fill(served, topic, 200)
    write_table(served.connection, topic)
    assert rows(frame) == expected  # records that came later are not in it
    assert rows(table(spark, topic, address=served.address)) == rows_of_log(served.address, topic)
    complete = table(spark, topic, address=served.address, tail=False)
    assert rows(complete) == rows_of_log(served.address, topic)


@pytest.mark.parametrize("has_tail", [False, True])
def test_a_compacted_topic_has_the_latest_record_of_each_key(
    spark: SparkSession, served: Served, topic: str, has_tail: bool
) -> None:
    served.connection.create_topic(topic, 3, {"table": "delta", "compaction": 1})
    for first in (0, 100, 140):
        fill(served, topic, first)
        write_table(served.connection, topic)
    if has_tail:
        fill(served, topic, 200)
    expected = latest_of(rows_of_log(served.address, topic))
    assert len(expected) < 100
    frame = table(spark, topic, address=served.address)
    assert rows(frame) == expected
    assert frame.where("partition = 1").count() == sum(row[0] == 1 for row in expected)


def test_typed_columns_may_have_any_name(spark: SparkSession, served: Served, topic: str) -> None:
    columns = [str(column_name(name)) for name in READER_NAMES]
    for has_tail in (False, True):
        name = f"{topic}.{has_tail}"
        expected = fill_named(served.connection, name, READER_NAMES, has_tail=has_tail)
        found = table(spark, name, address=served.address).toArrow()
        assert found.column_names == [*SCHEMA.names, "_error", *columns]
        assert sorted(map(tuple, (row.values() for row in found.select(columns).to_pylist()))) == expected


def test_filters_and_columns_reach_the_files(spark: SparkSession, served: Served, topic: str) -> None:
    served.connection.create_topic(topic, 3, {"table": "delta"})
    fill(served, topic, 0)
    write_table(served.connection, topic)
    fill(served, topic, 100)
    frame = table(spark, topic, address=served.address).where("partition = 1 and offset >= 15").select("value")
    plan = frame._jdf.queryExecution().executedPlan().toString()
    assert "ReadSchema: struct<partition:int,offset:bigint,value:binary>" in plan
    pushed = plan.partition("PushedFilters: ")[2]
    assert "EqualTo(partition,1)" in pushed
    assert "GreaterThanOrEqual(offset,15)" in pushed
    assert frame.count() == 25


def test_a_topic_that_was_created_again_has_only_new_rows(spark: SparkSession, served: Served, topic: str) -> None:
    for _ in range(2):
        served.connection.create_topic(topic, 3, {"table": "delta"})
        fill(served, topic, 0)
        write_table(served.connection, topic)
        assert rows(table(spark, topic, address=served.address)) == rows_of_log(served.address, topic)
        served.connection.delete_topic(topic)
    served.connection.create_topic(topic, 3, {"table": "delta"})
    fill(served, topic, 300)
    assert rows(table(spark, topic, address=served.address)) == rows_of_log(served.address, topic)


def test_errors_name_the_setting(spark: SparkSession, served: Served, topic: str) -> None:
    served.connection.create_topic(topic, 1)
    with pytest.raises(Invalid, match=f"polywire topic alter {topic} --table delta"):
        table(spark, topic, address=served.address)
    with pytest.raises(Missing):
        table(spark, f"{topic}-missing", address=served.address)
    check_file_system(spark, "file", "file:///tables")
    with pytest.raises(Invalid, match=r"add org\.apache\.hadoop:hadoop-aws .* scheme='s3a' table=s3://bucket/t"):
        check_file_system(spark, "s3a", "s3://bucket/t")


def in_order(batches: list[list[Row]]) -> list[Row]:
    return sorted((row for batch in batches for row in batch), key=lambda row: row[:2])


class Interrupted(Exception):
    """Raised by a test in place of a crash."""


def test_a_stream_begins_with_the_table_and_reads_each_record_once(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    served.connection.create_topic(topic, 3, {"table": "delta"})
    fill(served, topic, 0)
    write_table(served.connection, topic)
    fill(served, topic, 100)
    batches: dict[int, list[Row]] = {}
    failing = {0}

    def save(frame: DataFrame, number: int) -> None:
        batches[number] = rows(frame)
        if number in failing:
            failing.remove(number)
            raise Interrupted

    def run() -> None:
        options: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "trigger": {"availableNow": True}}
        query = stream_table(spark, topic, save, address=served.address, **options)
        query.awaitTermination()

    with pytest.raises(Interrupted):
        run()
    first = batches.pop(0)
    assert len(first) >= 60
    fill(served, topic, 200)
    write_table(served.connection, topic)
    run()
    assert batches.pop(0) == first
    assert len(first) + len(batches[1]) == 180
    fill(served, topic, 300)
    write_table(served.connection, topic)
    run()
    assert sorted(batches) == [1, 2]
    fill(served, topic, 400)
    failing.add(3)
    with pytest.raises(PySparkException, match="Interrupted"):
        run()
    run()
    assert sorted(batches) == [1, 2, 3]
    assert in_order([first, *batches.values()]) == rows_of_log(served.address, topic)
    served.connection.delete_topic(topic)
    served.connection.create_topic(topic, 3, {"table": "delta"})
    with pytest.raises(Conflict, match="start the query with a new checkpoint"):
        run()


def test_a_stream_of_a_topic_without_rows_begins_with_an_empty_frame(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    served.connection.create_topic(topic, 1, {"table": "delta"})
    counts: dict[int, int] = {}

    def count(frame: DataFrame, number: int) -> None:
        counts[number] = frame.count()

    query = stream_table(
        spark,
        topic,
        count,
        address=served.address,
        checkpoint=str(tmp_path / "checkpoint"),
        trigger={"availableNow": True},
    )
    query.awaitTermination()
    assert counts[0] == 0
    assert not any(counts.values())


LISTED = "id long, total decimal(10,2), who string, at timestamp, day date, b boolean, f float, d double, i int"
VALUES = [
    b'{"id":1,"total":1.5,"who":"a","at":"2026-11-27T03:00:00Z","day":"2026-11-27","b":true,"f":0.5,"d":2,"i":3}',
    b'{"id":"x","who":{"n":[1]}}',
    None,
    b"no JSON",
]


def typed(frame: DataFrame) -> list[tuple[Any, ...]]:
    found = frame.toArrow().to_pylist()
    return [tuple(row.values()) for row in sorted(found, key=lambda row: (row["partition"], row["offset"]))]


def produce_values(served: Served, topic: str) -> None:
    for partition in range(3):
        produce(served.connection, topic, partition, [Record(value) for value in VALUES])


def test_typed_columns_of_table_and_tail(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    served.connection.create_topic(topic, 3, {"table": "delta"})
    produce_values(served, topic)
    write_table(served.connection, topic)  # without typed columns
    configure(served.address, topic, LISTED)
    older = columns_of_older_rows(spark, served, topic)
    produce_values(served, topic)
    tail = table(spark, topic, address=served.address)
    seen: list[tuple[Any, ...]] = []
    query = stream_table(
        spark,
        topic,
        lambda frame, _: seen.extend(typed(frame)),
        checkpoint=str(tmp_path / "checkpoint"),
        address=served.address,
        trigger={"availableNow": True},
    )
    query.awaitTermination()
    before = typed(tail.where("offset >= 4"))
    assert sorted([row for row in seen if row[1] >= 4], key=lambda row: row[:2]) == before
    write_table(served.connection, topic)
    complete = table(spark, topic, address=served.address, tail=False)
    assert typed(complete.where("offset >= 4")) == before
    assert len(before) == 12
    assert before[1][-10:] == ('id: expected long, found string "x"', None, None, '{"n":[1]}', *[None] * 6)
    filtered = complete.where("id = 1 and offset >= 4").select("total")
    assert "EqualTo(id,1)" in filtered._jdf.queryExecution().executedPlan().toString()
    assert filtered.count() == 3
    assert older == [row[5:] for row in before]


def columns_of_older_rows(spark: SparkSession, served: Served, topic: str) -> list[tuple[Any, ...]]:
    """Return them when the broker has added columns to these rows. Until then, it may write new rows without them."""
    end = time.monotonic() + 60
    while True:
        rows = [row[5:] for row in typed(table(spark, topic, address=served.address, tail=False))]
        if all(row[-9] == 1 for row in rows if row[0] == VALUES[0]):
            return rows
        assert time.monotonic() < end
