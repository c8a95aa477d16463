"""Pipelines that write topics on real Spark, exactly once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from polywire.client import sync
from polywire.errors import Invalid
from polywire.records.columns import Header, Record
from polywire.spark.pipelines.bridge import bridge
from polywire.spark.pipelines.compact import compact
from polywire.spark.pipelines.queries import Ran, sendable
from polywire.spark.pipelines.refine import refine
from polywire.spark.pipelines.replay import replay
from polywire.spark.pipelines.state import state
from polywire.spark.pipelines.windows import windows
from polywire.spark.progress import BatchProgress
from tests.e2e.conftest import Served, fill, start_broker, stop_broker
from tests.e2e.test_pipelines import put

pytestmark = pytest.mark.spark


def produce(served: Served, topic: str, records: list[Record]) -> None:
    with sync.connect(f"polywire://{served.address}") as client:
        if topic not in {known.name for known in client.topics()}:
            client.create_topic(topic, 2)
        client.produce(topic, records)


def contents(served: Served, topic: str) -> list[Record]:
    """Return the records of a topic, by partition."""
    with sync.connect(f"polywire://{served.address}") as client:
        return [record for part in client.bounds(topic) for record in client.fetch(topic, part.partition, 0)]


def headers(record: Record) -> dict[str, str]:
    return {header.key.decode(): (header.value or b"").decode() for header in record.headers}


def documents(served: Served, topic: str) -> list[Any]:
    return [json.loads(record.value or b"null") for record in contents(served, topic)]


def test_refine_splits_a_topic_and_drops_duplicates(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    def run() -> Ran:
        return refine(spark, served.address, topic, f"{topic}.good", tmp_path, "json:id long, n int", id="id")

    mark = (Header(b"from", b"test"),)
    good = [
        Record(key=b"k", value=json.dumps({"id": n % 10, "n": n, "more": "kept"}).encode(), headers=mark)
        for n in range(12)
    ]
    produce(
        served,
        topic,
        [*good, Record(key=b"b", value=b"broken", headers=mark), Record(key=b"d", value=None), Record(value=b"broken")],
    )
    assert run().records == 15
    produce(served, topic, [good[3], Record(key=b"k", value=b'{"id": 10}')])
    assert run().left_out == 0
    refined = contents(served, f"{topic}.good")
    ids = sorted(json.loads(record.value)["id"] for record in refined if record.value)
    assert ids == list(range(11))
    assert sum(record.value is None for record in refined) == 1
    first = next(record for record in refined if record.value == good[0].value)
    assert (first.key, headers(first)) == (b"k", {"from": "test"})
    dead = contents(served, f"{topic}.good.dead")
    assert [record.value for record in dead] == [b"broken", b"broken"]
    reported = next(headers(record) for record in dead if record.key == b"b")
    assert (reported["from"], reported["dead.reason"], reported["dead.topic"]) == ("test", "not a JSON object", topic)


def test_windows_into_a_topic_write_the_latest_count(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    for hour in ("10", "11"):
        put(served, topic, [{"at": f"2026-01-01T{hour}:{minute:02}:00Z"} for minute in range(60)] + [b"broken"])
        ran = windows(
            spark, served.address, topic, tmp_path, "json:at timestamp", length="2 hours", time="at", delay="2 hours", output=f"{topic}.w",
        )  # fmt: skip
        assert (ran.left_out, ran.corrupt) == (1, 1)
    last: dict[bytes | None, Any] = {
        record.key: json.loads(record.value or b"") for record in contents(served, f"{topic}.w")
    }
    assert sum(window["records"] for window in last.values()) == 120


def event(key: bytes, version: int, **fields: Any) -> Record:
    reported = (Header(b"event.type", b"Set"), Header(b"event.aggregate_version", str(version).encode()))
    return Record(key=key, value=json.dumps(fields).encode(), headers=reported)


def total(state: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """Fold events into a sum that depends on each event being applied once."""
    return {"sum": state.get("sum", 0) + event["n"], "last": event["_type"]}


def test_state_folds_events_and_starts_from_snapshots(
    spark: SparkSession, served: Served, topic: str, tmp_path: Path
) -> None:
    def run(checkpoint: str) -> dict[bytes | None, tuple[Any, str]]:
        state(
            spark, served.address, topic, f"{topic}.s", tmp_path / checkpoint, "events:n long",
            fold="tests.e2e.test_pipelines_to_topics:total",
        )  # fmt: skip
        return {
            r.key: (json.loads(r.value or b""), headers(r)["state.version"]) for r in contents(served, f"{topic}.s")
        }

    produce(
        served,
        topic,
        [event(b"a", 1, n=5), event(b"b", 1, n=1), event(b"a", 2, n=7), event(b"a", 1, n=5), Record(value=b"x")],
    )
    assert run("first") == {b"a": ({"sum": 12, "last": "Set"}, "2"), b"b": ({"sum": 1, "last": "Set"}, "1")}
    produce(served, topic, [event(b"a", 3, n=1), event(b"b", 3, n=100)])
    reported = run("first")
    assert reported[b"a"] == ({"sum": 13, "last": "Set"}, "3")
    assert reported[b"b"][1] == "1"
    produce(served, topic, [event(b"a", 4, n=1)])
    assert run("second")[b"a"] == ({"sum": 14, "last": "Set"}, "4")
    letters = {(found := headers(record))["dead.reason"]: found for record in contents(served, f"{topic}.s.dead")}
    assert any("JSON object" in reason for reason in letters)
    missing = letters["versions are missing expected=2 got=3"]
    assert (missing["dead.topic"], missing["dead.partition"], missing["dead.offset"]) == (topic, "1", "2")


def test_a_json_null_sets_a_field_of_the_state(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [{"email": "a@x", "n": 1}, {"email": None, "n": 2}, {"email": None}]
    produce(served, topic, [event(b"k", version, **fields) for version, fields in enumerate(events[:2], start=1)])
    produce(served, topic, [event(b"l", version, **fields) for version, fields in enumerate(events[::2], start=1)])
    state(spark, served.address, topic, f"{topic}.s", tmp_path / "checkpoint", "events:email string, n long, more int")
    states = {record.key: json.loads(record.value or b"") for record in contents(served, f"{topic}.s")}
    kept = {"_type": "Set", "email": None}
    assert states == {b"k": {**kept, "n": 2}, b"l": {**kept, "n": 1}}


def test_records_without_headers_are_sent_without_headers(spark: SparkSession) -> None:
    kinds = "array<struct<key: string, value: binary>>"
    rows = spark.sql(
        f"select 'v' as value, cast(if(id = 0, null, array(struct('k', x'01'))) as {kinds}) as headers from range(2)"
    )
    sent = sendable(rows).orderBy("headers").collect()
    assert [[(pair["key"], bytes(pair["value"])) for pair in row["headers"]] for row in sent] == [[], [("k", b"\x01")]]
    assert sendable(rows.select("value")).columns == ["value"]


def test_bridge_between_brokers(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    other = start_broker(tmp_path / "broker")
    try:
        fill(served.connection, topic, [300, 20], headers=True)
        fill(served.connection, topic, [10, 200])
        other.connection.create_topic(topic, 2)
        # In separate threads, which start without the session in which Spark looks up sinks.
        with ThreadPoolExecutor(1) as thread:
            for _ in range(2):
                copying = thread.submit(
                    bridge, spark, served.address, topic, topic, tmp_path / "checkpoint", target=other.address, keep_partitions=True,
                    batch_records_max=100,
                )  # fmt: skip
                copying.result()
        for there, here in zip(contents(other, topic), contents(served, topic), strict=True):
            assert (there.key, there.value, headers(there)) == (here.key, here.value, headers(here))
    finally:
        stop_broker(other)


def test_compact_writes_the_last_record_of_each_key(spark: SparkSession, served: Served, topic: str) -> None:
    produce(served, topic, [Record(key=f"k{n % 5}".encode(), value=str(n).encode()) for n in range(50)])
    produce(served, topic, [Record(key=b"k0", value=None), Record(value=b"no key")])
    ran = [compact(spark, served.address, topic, f"{topic}.c", name=topic) for _ in range(2)]
    assert [(each.records, each.batches) for each in ran] == [(4, 1), (0, 0)]  # the second run writes nothing
    found = {record.key: record.value for record in contents(served, f"{topic}.c")}
    assert found == {b"k1": b"46", b"k2": b"47", b"k3": b"48", b"k4": b"49"}
    assert len(contents(served, f"{topic}.c")) == 4


class Killed(Exception):
    """Simulates ``kill -9`` between two slices."""


def test_replay_keeps_the_order_and_resumes(spark: SparkSession, served: Served, topic: str, tmp_path: Path) -> None:
    spark.range(30).selectExpr("id", "timestamp_seconds(1700000000 + id) as at").write.parquet(str(tmp_path / "table"))

    def run(reported: Any = None, slice_seconds: float = 10.0, output: str = topic) -> Ran:
        return replay(
            spark, tmp_path / "table", served.address, output, tmp_path / "checkpoint", time_column="at",
            key="cast(id % 2 as string)", speed=20.0, slice_seconds=slice_seconds, on_progress=reported,
        )  # fmt: skip

    def kill(batch: BatchProgress) -> None:
        if batch.batch_id == 1:
            raise Killed

    served.connection.create_topic(topic, 1)
    with pytest.raises(Killed):
        run(kill)
    assert run().records == 10
    assert [document["id"] for document in documents(served, topic)] == list(range(30))
    with pytest.raises(Invalid, match="another table"):
        run(slice_seconds=5.0)
    with pytest.raises(Invalid, match=f"another topic .*checkpoint='{topic}' requested='{topic}-other'"):
        run(output=f"{topic}-other")
    served.connection.delete_topic(topic)
    with pytest.raises(Invalid, match="the output topic was created again"):
        run()
