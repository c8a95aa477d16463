"""Topics as tables on real Spark against a real broker."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, SparkSession

from polywire.errors import Invalid, Missing
from polywire.records.columns import Header, HeaderKind, Record
from polywire.spark import table
from polywire.spark.tables import SCHEMA, check_file_system
from tests.e2e.conftest import Served
from tests.unit.tables.tabled import Row, produce, rows_of_log, write_table

pytestmark = pytest.mark.spark


def rows(frame: DataFrame) -> list[Row]:
    """Return the rows sorted by partition and offset, in the form of ``rows_of_log``."""
    assert frame.schema.simpleString() == SCHEMA.simpleString()
    found = frame.toArrow().to_pylist()
    return sorted(
        (
            row["partition"],
            row["offset"],
            row["timestamp"],
            row["key"],
            row["value"],
            row["headers"] and [(pair["key"], pair["value"]) for pair in row["headers"]],
        )
        for row in found
    )


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
