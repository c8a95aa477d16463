"""Spark with a broker that has users: source, sink and pipelines log in, and the password is never shown."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from polywire.client import bulk
from polywire.client.address import PASSWORD_VARIABLE
from polywire.server.users import add_user
from polywire.spark.pipelines.bridge import bridge
from tests.broker_process import BrokerProcess
from tests.e2e.conftest import fill

pytestmark = pytest.mark.spark

PASSWORD = "looking-glass-7"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    users = tmp_path / "users"
    add_user(users, "spark", PASSWORD, "consume,produce,manage_topics")
    with BrokerProcess(tmp_path / "data", "--users", str(users)) as process:
        yield process


@pytest.fixture
def place(broker: BrokerProcess) -> str:
    host, port = broker.addresses["polywire"]
    return f"{host}:{port}"


@pytest.fixture
def orders(place: str) -> bulk.BulkConnection:
    """Return a logged-in connection to a broker with a topic of records."""
    connection = bulk.connect(f"spark:{PASSWORD}@{place}")
    fill(connection, "orders", [30, 20])
    return connection


def options(place: str, **more: str) -> dict[str, str]:
    return {"address": place, "user": "spark", "password": PASSWORD, **more}


def read(spark: SparkSession, place: str, **more: str) -> DataFrame:
    return spark.read.format("polywire").options(**options(place, subscribe="orders", **more)).load()


def explained(frame: DataFrame) -> str:
    reported = io.StringIO()
    with contextlib.redirect_stdout(reported):
        frame.explain(mode="extended")
        frame.explain(mode="formatted")
    return reported.getvalue()


def test_source_sink_and_pipelines_log_in(
    spark: SparkSession, place: str, orders: bulk.BulkConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = read(spark, place)
    assert rows.count() == 50
    rows.select("key", "value").write.format("polywire").mode("append").options(**options(place, topic="copy")).save()
    assert sum(bounds.next_offset for bounds in orders.bounds(["copy"])) == 50
    stream = spark.readStream.format("polywire").options(**options(place, subscribe="orders")).load()
    writer = stream.select("key", "value").writeStream.format("polywire").trigger(availableNow=True)
    writer = writer.options(address=f"spark@{place}", password=PASSWORD, topic="streamed")
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    ran = bridge(spark, f"spark@{place}", "orders", "bridged", str(tmp_path / "bridge"))
    assert ran.records == 50
    assert sum(bounds.next_offset for bounds in orders.bounds(["bridged"])) == 50


def test_a_password_is_never_shown(
    spark: SparkSession,
    place: str,
    orders: bulk.BulkConnection,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    del orders
    shown: list[Any] = []
    rows = read(spark, place, startingOffsets="earliest")
    shown += [explained(rows), explained(rows.groupBy("partition").count()), repr(rows), str(rows.schema)]
    stream = spark.readStream.format("polywire").options(
        **options(place, subscribe="orders", startingOffsets="earliest")
    )
    query = (
        stream.load()
        .select("key", "value")
        .writeStream.format("polywire")
        .options(**options(place, topic="copy", checkpointLocation=str(tmp_path / "checkpoint")))
        .start()
    )
    query.processAllAvailable()
    with contextlib.redirect_stdout(io.StringIO()) as reported:
        query.explain(extended=True)
    shown += [reported.getvalue(), str(query.lastProgress and query.lastProgress.json), query.status]
    query.stop()
    with pytest.raises(Exception, match="wrong user or password") as wrong:
        read(spark, place, password=PASSWORD + "!").count()
    shown.append(str(wrong.value))
    with pytest.raises(Exception, match="did you mean 'commitGroup'") as misspelt:
        read(spark, place, commitGrp="g").count()
    shown.append(str(misspelt.value))
    checkpoint = [path.read_bytes() for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    out, err = capfd.readouterr()
    sys.stderr.write(err)
    assert PASSWORD not in json.dumps([str(part) for part in [*shown, out, err]])
    assert not [content for content in checkpoint if PASSWORD.encode() in content]


def test_a_missing_login_is_explained(spark: SparkSession, place: str, orders: bulk.BulkConnection) -> None:
    del orders
    with pytest.raises(Exception, match="options user and password"):
        spark.read.format("polywire").options(address=place, subscribe="orders").load().count()
