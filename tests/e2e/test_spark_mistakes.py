"""Error messages for mistakes in a query: one line of ours, without the traceback of Spark's worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.e2e.conftest import Served

pytestmark = pytest.mark.spark

NOWHERE = "127.0.0.1:1"


def said(work: Callable[[], object]) -> str:
    """Return Spark's error, which must be one line and its SQLSTATE below."""
    with pytest.raises(PySparkException) as raised:
        work()
    message, state = str(raised.value).strip().splitlines()
    assert "SQLSTATE" in state
    assert "Traceback" not in message
    return message.partition("polywire.errors.")[2]


def test_a_read(spark: SparkSession, served: Served, topic: str) -> None:
    def read(**options: str) -> Callable[[], object]:
        given = {"address": served.address, "subscribe": topic, **options}
        return spark.read.format("polywire").options(**given).load().collect

    served.connection.create_topic(topic, 1)
    assert said(read(startingOfsets="earliest")).startswith("Invalid: unknown option, did you mean 'startingOffsets'?")
    assert said(read(subscribe=f"{topic}s")).startswith(f"Missing: no such topic, did you mean '{topic}'?")
    assert said(read(address=NOWHERE)).startswith("Unavailable: cannot connect: connection refused")


def test_a_write(spark: SparkSession, served: Served, topic: str) -> None:
    def write(rows: str, **options: str) -> Callable[[], object]:
        given = {"address": served.address, "topic": topic, **options}
        return spark.sql(rows).write.format("polywire").options(**given).mode("append").save

    assert said(write("select 'x' value", topc="y")).startswith("Invalid: unknown option, did you mean 'topic'?")
    assert said(write("select 'x' valu")).startswith("Invalid: ")


@pytest.mark.parametrize("header", ["named_struct('key', cast(null as string), 'value', cast('b' as binary))"])
def test_a_header_without_a_key(spark: SparkSession, served: Served, topic: str, header: str) -> None:
    rows = spark.sql(f"select 'x' value, array({header}) headers")
    with pytest.raises(PySparkException, match="header has no key"):
        rows.write.format("polywire").options(address=served.address, topic=topic).mode("append").save()


def test_a_stream(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    rows = spark.readStream.format("polywire").options(address=served.address, subscribe=topic).load()
    query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(PySparkException) as raised:
        query.awaitTermination()
    message = str(raised.value)
    first = message.splitlines()[0]
    assert "polywire.errors.Missing: no such topic" in first
    assert f"topic='{topic}'" in first
    assert "Traceback" not in message


def test_the_traceback_of_a_users_function_stays(spark: SparkSession) -> None:
    from pyspark.sql import functions as f

    def broken(number):  # type: ignore[no-untyped-def]  # Spark takes hints for something else
        raise KeyError("of the user")

    with pytest.raises(PySparkException, match="Traceback"):
        spark.range(1).select(f.udf(broken)("id")).collect()
