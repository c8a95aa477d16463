"""Pipelines that read topics into tables and reports, on real Spark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from polywire.cli import main
from polywire.cli.usage import EXIT_DONE, EXIT_FAILED
from polywire.client.arrow import arrow_to_batches
from polywire.errors import Invalid
from polywire.spark.functions import CORRUPT, PLACE
from polywire.spark.pipelines import tables
from polywire.spark.pipelines.expectations import Expectations
from polywire.spark.pipelines.land import land
from polywire.spark.pipelines.quality import quality
from polywire.spark.pipelines.queries import QUERY_ID, parsed, topic_rows
from polywire.spark.pipelines.refine import refine
from polywire.spark.pipelines.state import state
from polywire.spark.pipelines.tables import TableFormat, listed_files
from polywire.spark.pipelines.windows import aggregate, windows
from polywire.spark.progress import BatchProgress
from tests.e2e.conftest import Served, fill

pytestmark = pytest.mark.spark


def put(served: Served, topic: str, documents: Sequence[object], partition: int = 0) -> None:
    """Append documents as JSON; bytes are appended unchanged, and None as a record without a value."""
    if topic not in {known.name for known in served.connection.topics()}:
        served.connection.create_topic(topic, 2)
    values = [
        document if document is None or isinstance(document, bytes) else json.dumps(document).encode()
        for document in documents
    ]
    for batch in arrow_to_batches(pa.record_batch({"value": pa.array(values, pa.binary())})):
        served.connection.produce(topic, partition, [batch])


def test_land_stores_unreadable_records_and_accepts_new_columns(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    table, checkpoint = tmp_path / "table", tmp_path / "checkpoint"
    put(served, topic, [{"id": 1, "day": "a"}, b"broken", {"id": 2, "day": "b"}, {"id": 3, "day": "a"}])
    land(spark, served.address, topic, table, checkpoint, ["day"], parse="json:id int, day string", files_max=1)
    assert len(listed_files(table) or ()) == 3  # a, b and the rows without a day
    put(served, topic, [{"id": 4, "day": "a", "note": "new"}], partition=1)
    land(
        spark,
        served.address,
        topic,
        table,
        checkpoint,
        ["day"],
        parse="json:id int, day string, note string",
        files_max=1,
    )
    rows = spark.read.option("mergeSchema", "true").parquet(str(table)).orderBy("_partition", "_offset").collect()
    assert [(row["id"], row["note"]) for row in rows] == [(1, None), (None, None), (2, None), (3, None), (4, "new")]
    assert [row["_value"] for row in rows] == [None, bytearray(b"broken"), None, None, None]
    assert rows[1]["_corrupt"] == "not a JSON object"


def test_land_into_delta_is_exactly_once(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="Delta was NOT tried: deltalake is not installed")
    put(served, topic, [{"id": number} for number in range(30)])
    table = tables.Table(tmp_path / "table", TableFormat.DELTA, ("_partition",))
    for parse in ("json:id int", "json:id int, note string"):
        land(
            spark, served.address, topic, table.path, tmp_path / "checkpoint", ["_partition"], parse=parse,
            table_format=TableFormat.DELTA, batch_records_max=10,
        )  # fmt: skip
        put(served, topic, [{"id": 30, "note": "new"}], partition=1)
    rows = deltalake.DeltaTable(str(table.path)).to_pyarrow_table().sort_by("id").to_pylist()
    assert [row["id"] for row in rows] == list(range(31))
    assert [row["note"] for row in rows] == [None] * 30 + ["new"]
    # Repeat a micro-batch, as Spark does after a crash.
    batch = spark.createDataFrame([(99,)], "id int")
    spark.sparkContext.setLocalProperty(QUERY_ID, "a-query")
    for number in (0, 1, 1, 0):
        tables.write_delta(batch, number, tables.Table(tmp_path / "again", TableFormat.DELTA))
    assert deltalake.DeltaTable(str(tmp_path / "again")).to_pyarrow_table().num_rows == 2


def test_rows_that_do_not_meet_an_expectation_are_kept_or_dropped(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    put(served, topic, [{"id": 1, "n": 5}, {"id": 2, "n": -5}, {"id": 3}, {"n": 7}, b"broken"])
    ran = land(
        spark,
        served.address,
        topic,
        tmp_path / "table",
        tmp_path / "checkpoint",
        parse="json:id int, n int",
        expect="small: n < 6",
        expect_or_drop={"identified": "id IS NOT NULL"},
    )
    assert (ran.unmet, ran.corrupt) == ({"small": 2, "identified": 1}, 1)
    assert "2 rows do not meet the expectation 'small'" in ran.problems
    rows = spark.read.parquet(str(tmp_path / "table")).orderBy("_offset").collect()
    assert [(row["id"], row["_corrupt"]) for row in rows] == [
        (1, None),
        (2, None),
        (3, None),
        (None, "not a JSON object"),
    ]


def test_a_job_fails_at_the_first_row_that_does_not_meet_an_expectation(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    put(served, topic, [{"n": 5}, b"broken", {"n": -5}])
    places = served.address, topic, tmp_path / "table", tmp_path / "checkpoint"
    with pytest.raises(PySparkException, match=f"'positive' is not met: n > 0 topic={topic} partition=0 offset=2"):
        land(spark, *places, parse="json:n int", expect_or_fail="positive: n > 0")
    assert not listed_files(tmp_path / "table")


def test_refined_records_that_do_not_meet_an_expectation_are_dead_letters(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    put(served, topic, [{"n": 5}, {"n": -5}, b"broken", None])
    ran = refine(
        spark,
        served.address,
        topic,
        f"{topic}-out",
        tmp_path / "checkpoint",
        "json:n int",
        dead=f"{topic}-dead",
        expect_or_drop="positive: n > 0",
        expect_or_fail="known: n IS NOT NULL",
    )
    assert (ran.unmet, ran.corrupt) == ({"positive": 1, "known": 0}, 1)
    letters = topic_rows(spark, served.address, f"{topic}-dead", headers=True).orderBy("offset").collect()
    reasons = [bytes(dict(row["headers"])["dead.reason"]) for row in letters]
    assert sorted(reasons) == [b"not a JSON object", b"the expectation 'positive' is not met: n > 0"]
    rows = topic_rows(spark, served.address, f"{topic}-out").orderBy("offset").collect()
    assert [row["value"] for row in rows] == [bytearray(b'{"n": 5}'), None]  # the latter is a deletion


@pytest.mark.parametrize(
    "text", ["positive", "positive:", ": n > 0", "a: n > 0; a: n < 9", "; ".join(f"n{n}: true" for n in range(101))]
)
def test_expectations_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(Invalid, match=r"another form|the same name|too many"):
        Expectations(text)
    with pytest.raises(Invalid, match="the same name"):
        Expectations({"a": "n > 0"}, "a: n < 9")


def test_land_merges_by_columns(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")

    def landed(**more: object) -> list[tuple[object, ...]]:
        ran = land(
            spark,
            served.address,
            topic,
            tmp_path / "table",
            tmp_path / "checkpoint",
            parse="json:id int, n int",
            table_format="delta",
            merge_by=["_key"],
            expect_or_drop="small: n < 9",
        )
        assert sum(ran.unmet.values()) == more["dropped"]
        assert ran.records == more["records"]
        rows = deltalake.DeltaTable(str(tmp_path / "table")).to_pyarrow_table().to_pylist()
        assert all(
            row.keys() == {"id", "n", "_corrupt", *(f"_{name}" for name in PLACE if name != "headers")} for row in rows
        )
        return sorted((row["_key"], row["n"], row["_corrupt"]) for row in rows)

    def put_keyed(*records: tuple[bytes | None, bytes | None]) -> None:
        keys, values = zip(*records, strict=True)
        columns = {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
        for batch in arrow_to_batches(pa.record_batch(columns)):
            served.connection.produce(topic, 0, [batch])

    served.connection.create_topic(topic, 1)
    put_keyed((b"a", b'{"n": 1}'), (b"b", b'{"n": 1}'), (b"a", b'{"n": 2}'), (b"c", None))
    assert landed(records=4, dropped=0) == [(b"a", 2, None), (b"b", 1, None)]
    put_keyed(
        (b"a", None),
        (b"b", b'{"n": 3}'),
        (b"d", b"broken"),
        (b"b", b'{"n": 4}'),
        (b"e", b'{"n": 5}'),
        (b"b", b'{"n": 9}'),
    )
    assert landed(records=6, dropped=1) == [(b"b", 4, None), (b"d", None, "not a JSON object"), (b"e", 5, None)]
    assert landed(records=0, dropped=0) == [(b"b", 4, None), (b"d", None, "not a JSON object"), (b"e", 5, None)]


@pytest.mark.parametrize(("kind", "columns"), [("parquet", ["_key"]), ("delta", ["nothing"])])
def test_a_merge_that_cannot_be_done_is_refused(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path, kind: str, columns: list[str]
) -> None:
    pytest.importorskip("deltalake")
    put(served, topic, [{"n": 5}])
    places = served.address, topic, tmp_path / "table", tmp_path / "checkpoint"
    with pytest.raises(Invalid, match=r"table_format=delta|no such column"):
        land(spark, *places, parse="json:n int", table_format=kind, merge_by=columns)


def test_a_table_format_that_cannot_be_written_is_refused(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    put(served, topic, [{}])
    with pytest.raises(Invalid, match=r"spark\.jars"):
        land(spark, served.address, topic, tmp_path / "t", tmp_path / "c", table_format=TableFormat.ICEBERG)


def test_windows_count_each_record_once_and_report_late_ones(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    def run() -> tuple[int, list[BatchProgress]]:
        reported: list[BatchProgress] = []
        ran = windows(
            spark, served.address, topic, tmp_path / "checkpoint", "json:at timestamp, kind string, n int",
            length="10 minutes", time="at", delay="30 minutes", group_by=["kind"], measures=["sum(n) as total"],
            path=tmp_path / "table", on_progress=reported.append,
        )  # fmt: skip
        return ran.left_out, reported

    events = [
        {"at": f"2026-01-01T10:{minute:02}:00Z", "kind": "a" if minute % 2 else "b", "n": minute}
        for minute in range(60)
    ]
    put(served, topic, events)
    assert run()[0] == 0
    put(served, topic, [{"at": "2026-01-01T14:00:00Z", "kind": "a", "n": 1}])
    run()
    put(served, topic, [{"at": "2026-01-01T10:00:00Z", "kind": "a", "n": 1}])
    late, reported = run()
    assert late == 1
    assert reported[-1].watermark is not None
    rows = spark.read.parquet(str(tmp_path / "table")).orderBy("window_start", "kind").collect()
    assert [(row["kind"], row["records"]) for row in rows] == [("a", 5), ("b", 5)] * 6
    assert sum(row["total"] for row in rows) == sum(range(60))


def test_fields_may_have_the_names_of_added_columns(spark: SparkSession) -> None:
    rows = spark.sql(
        "select timestamp_seconds(n * 60) as at, 'w' as window, n as _time, n % 3 as _rank, n as _deleted, n as offset, "
        "0 as partition, timestamp_seconds(0) as timestamp from (select explode(sequence(0, 9)) as n)"
    )
    found = aggregate(
        rows, time="at", delay="1 minute", length="5 minutes", group_by=["window"], measures=["sum(_time * 1.5)"]
    )
    counted = [tuple(row)[2:] for row in found.orderBy("window_start").collect()]
    assert [(window, count, float(total)) for window, count, total in counted] == [("w", 5, 15.0), ("w", 5, 52.5)]
    for group_by, measure in (["window_start"], "sum(n)"), ([], "sum(n) as Records"):
        with pytest.raises(Invalid, match="two columns of a window have the same name"):
            aggregate(
                rows.selectExpr("at", "_time as n", "at as window_start"), time="at", delay="1 minute", length="5 minutes",
                group_by=group_by, measures=[measure],
            )  # fmt: skip
    table = tables.Table(Path("table"), TableFormat.DELTA, merge_by=("_rank",))
    latest = tables._latest(rows, table).orderBy("_rank").collect()
    assert [(row["_rank"], row["_deleted"]) for row in latest] == [(0, 9), (1, 7), (2, 8)]


def test_quality_detects_gaps_and_duplicates(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    put(served, topic, [{"p": "x", "n": n} for n in range(50)])
    put(served, topic, [{"p": "y", "n": n} for n in (0, 1, 1, 3)], partition=1)
    page = tmp_path / "report.html"
    asked = {"address": served.address, "topic": topic, "parse": "json:p string, n long", "producer": "p"}
    found = quality(spark, **asked, sequence="n", expected=55, report=page)  # type: ignore[arg-type]
    assert [(one.producer, one.records, one.missing, one.repeated) for one in found.producers] == [
        ("x", 50, 0, 0),
        ("y", 4, 1, 1),
    ]
    assert [(part.records, part.missing, part.repeated) for part in found.partitions] == [(50, 0, 0), (4, 0, 0)]
    assert len(found.problems) == 3
    assert "problems were found" in page.read_text(encoding="utf-8")
    land(spark, served.address, topic, tmp_path / "table", tmp_path / "checkpoint", parse="json:p string, n long")
    again = quality(spark, path=tmp_path / "table")
    assert again.sound
    assert again.records == 54
    with pytest.raises(Invalid, match="address and topic, or path"):
        quality(spark, topic=topic)


@pytest.mark.parametrize("new", ["id string", "id int, day int"])
def test_a_column_keeps_its_type(spark: SparkSession, served: Served, topic: str, tmp_path: Path, new: str) -> None:
    table, checkpoint = tmp_path / "table", tmp_path / "checkpoint"
    put(served, topic, [{"id": 1, "day": "a"}])
    land(spark, served.address, topic, table, checkpoint, parse="json:id int, day string")
    with pytest.raises(Invalid, match=r"another type in the table.* old=(int new=string|string new=int)"):
        land(spark, served.address, topic, table, checkpoint, parse=f"json:{new}")
    land(spark, served.address, topic, table, checkpoint, parse="json:id int, day string, more long")


def test_the_error_names_the_field(spark: SparkSession, served: Served, topic: str) -> None:
    put(
        served,
        topic,
        [
            {"id": 1, "n": 2},
            {"id": 1, "n": "two"},
            {"id": {}, "n": 2},
            '{"é": yes}'.encode(),
            b'{"id": [1}',
            {"id": None},
            {},
        ],
    )
    rows = parsed(topic_rows(spark, served.address, topic), "json:id int, n long").orderBy("_offset").collect()
    reasons = [row[CORRUPT] for row in rows]
    assert reasons == [
        None,
        "the field 'n' must be bigint, not two",
        "the field 'id' must be int, not {}",
        "not JSON at byte 7",
        "not JSON: brackets, commas or colons do not match",
        None,
        None,
    ]


def test_state_needs_versions(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    put(served, topic, [{"amount": 1}])
    with pytest.raises(Invalid, match=r"use parse=events:.*, or set version to SQL of a field\) fields=amount"):
        state(spark, served.address, topic, f"{topic}-states", tmp_path, "json:amount long")


def test_quality_of_a_table_of_raw_records(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    fill(served.connection, topic, [10, 4])
    put(served, topic, [b"\xff\x00"], partition=1)  # Avro, for instance
    found = quality(spark, address=served.address, topic=topic, expected=15)
    assert (found.sound, [part.records for part in found.partitions]) == (True, [10, 5])
    land(spark, served.address, topic, tmp_path / "table", tmp_path / "checkpoint")
    found = quality(spark, path=tmp_path / "table", expected=15)
    assert (found.sound, [part.records for part in found.partitions]) == (True, [10, 5])


@pytest.mark.parametrize("parse", [None, "text"])
def test_quality_of_a_table_of_two_topics(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path, parse: str | None
) -> None:
    for name, count in ((f"{topic}-a", 10), (f"{topic}-b", 5)):
        fill(served.connection, name, [count])
    land(spark, served.address, f"{topic}-a,{topic}-b", tmp_path / "table", tmp_path / "checkpoint", parse=parse)
    found = quality(spark, path=tmp_path / "table", expected=15)
    assert found.sound, found.problems
    assert [(part.topic, part.records) for part in found.partitions] == [(f"{topic}-a", 10), (f"{topic}-b", 5)]
    assert {place for _, place, _ in found.rate} == {0, 1}


def test_the_command_runs_a_pipeline(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(served, topic, [{"id": 1}, b"broken"])
    places = [f"path={tmp_path / 'table'}", f"checkpoint={tmp_path / 'checkpoint'}", "parse=json:id int"]
    settings = [f"--set={setting}" for setting in (f"address={served.address}", f"topic={topic}", *places)]
    assert main.run(["pipeline", "run", "land", *settings]) == EXIT_FAILED, "the page says 1"
    reported = capsys.readouterr().err
    assert "ran pipeline=land records=2 batches=1 corrupt=1" in reported
    assert "warning: 1 values could not be read" in reported
    assert main.run(["pipeline", "run", "land", *settings]) == EXIT_DONE, "nothing is left to read"
    asked = [f"--set=path={tmp_path / 'table'}", "--set=expected=3"]
    assert main.run(["pipeline", "run", "quality", *asked]) == EXIT_FAILED
    assert "3 records were expected, 2 exist" in capsys.readouterr().err
    assert spark.range(1).count() == 1  # the existing session still works
