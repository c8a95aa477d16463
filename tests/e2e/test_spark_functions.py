"""Values as columns on real Spark: every record becomes a row, whatever it contains."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f

import polywire
from polywire.client import sync
from polywire.client.arrow import arrow_to_batches
from polywire.errors import Invalid
from polywire.records.columns import Header, HeaderKind, Record
from polywire.spark import functions
from tests.e2e.conftest import Served

pytestmark = pytest.mark.spark

LEG = {"type": "record", "name": "Leg", "fields": [{"name": "km", "type": "int"}]}
AVRO = json.dumps(
    {
        "type": "record",
        "name": "Flight",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "carrier", "type": ["null", "string"]},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            {"name": "legs", "type": {"type": "array", "items": LEG}},
        ],
    }
)  # fmt: skip


def put(served: Served, topic: str, values: list[bytes | None]) -> None:
    served.connection.create_topic(topic, 1)
    for batch in arrow_to_batches(pa.record_batch({"value": pa.array(values, pa.binary())})):
        served.connection.produce(topic, 0, [batch])


def read(spark: SparkSession, served: Served, topic: str) -> DataFrame:
    reader = spark.read.format("polywire").options(address=served.address, subscribe=topic, includeHeaders="true")
    return reader.load()


def in_order(frame: DataFrame) -> list[Row]:
    return frame.orderBy("_offset").collect()


def test_json_becomes_columns_and_nothing_is_dropped(spark: SparkSession, served: Served, topic: str) -> None:
    values = [
        b'{"id": 1, "carrier": "AA", "more": 3}', b'{"id": 2}', b'{"id": "no number"}', b"{broken", b"[1]", b"null", b"", b'{"id": 1}\xff',
        None, b"{}",
    ]  # fmt: skip
    put(served, topic, values)
    parsed = functions.parse_json(read(spark, served, topic), "id long, carrier string")
    rows = in_order(parsed)
    assert [row["_value"] for row in rows] == [None if value is None else bytearray(value) for value in values]
    assert [(row["id"], row["carrier"]) for row in rows[:2]] == [(1, "AA"), (2, None)]
    assert [row["_corrupt"] is None for row in rows] == [True, True, *[False] * 6, True, True]
    assert all(row["id"] is None for row in rows[2:])
    assert rows[7]["_corrupt"] == "not UTF-8"
    assert functions.sound(parsed).count() == 4
    assert functions.corrupt(parsed).count() == 6
    kept = in_order(functions.table_columns(parsed))
    assert [row["_value"] is None for row in kept] == [True, True, *[False] * 6, True, True]


def test_avro_with_a_given_schema(spark: SparkSession, served: Served, topic: str) -> None:
    fastavro = pytest.importorskip("fastavro", reason="Avro was NOT tried: fastavro is not installed")
    parsed_schema = fastavro.parse_schema(json.loads(AVRO))
    flight = {"id": 7, "carrier": None, "at": 1_700_000_000_000_001, "legs": [{"km": 3}]}

    def written(values: dict[str, Any]) -> bytes:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed_schema, values)
        return stream.getvalue()

    bare = written(flight)
    canonical = fastavro.schema.to_parsing_canonical_form(json.loads(AVRO))
    mark = bytes.fromhex(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO"))
    values = [
        bare,
        b"\xc3\x01" + mark + bare,
        b"\0\0\0\0\x07" + bare,
        bare + b"more",
        bare[:-2],
        b"\xc3\x01" + bytes(8) + bare,
        None,
    ]
    put(served, topic, [*values, written({**flight, "carrier": "UA"})])
    rows = in_order(functions.parse_avro(read(spark, served, topic), AVRO))
    for row in rows[:3]:
        assert (row["id"], row["carrier"], row["legs"], row["_corrupt"]) == (7, None, [Row(km=3)], None)
        assert row["at"].timestamp() == pytest.approx(1_700_000_000.000001)
    assert [row["_corrupt"] is None for row in rows[3:]] == [False, False, False, True, True]
    assert "bytes follow" in rows[3]["_corrupt"]
    assert "another Avro schema" in rows[5]["_corrupt"]
    assert rows[7]["carrier"] == "UA"


def test_complete_avro_files_include_their_schema(spark: SparkSession, served: Served, topic: str) -> None:
    fastavro = pytest.importorskip("fastavro", reason="Avro was NOT tried: fastavro is not installed")
    older = {"type": "record", "name": "N", "fields": [{"name": "id", "type": "int"}]}
    wanted = {
        **older,
        "fields": [{"name": "id", "type": "long"}, {"name": "note", "type": "string", "default": "none"}],
    }
    stream = io.BytesIO()
    fastavro.writer(stream, older, [{"id": 1}, {"id": 2}])
    put(served, topic, [stream.getvalue(), b"no file", None])
    parsed = functions.parse_avro_files(read(spark, served, topic), json.dumps(wanted))
    rows = parsed.orderBy("_offset", "_part").collect()
    assert [(row["id"], row["note"], row["_part"]) for row in rows] == [
        (1, "none", 0),
        (2, "none", 1),
        (None, None, 0),
        (None, None, 0),
    ]
    assert [row["_corrupt"] is None for row in rows] == [True, True, False, True]


def test_headers_become_columns(spark: SparkSession, served: Served, topic: str) -> None:
    headers = (
        Header(b"event.type", b"Paid"), Header(b"event.schema_version", b"2"), Header(b"event.aggregate_version", b"5"),
        Header(b"n", (-7).to_bytes(4, "little", signed=True), value_kind=HeaderKind.INT32),
        Header(b"x", struct.pack("<d", 2.5), value_kind=HeaderKind.FLOAT64),
    )  # fmt: skip
    with sync.connect(f"polywire://{served.address}") as client:
        client.create_topic(topic, 1)
        client.produce(
            topic, [Record(value=b'{"amount": 3}', key=b"a", headers=headers), Record(value=b'{"amount": 4}')]
        )
    records = read(spark, served, topic)
    events = in_order(functions.parse_events(records, "amount long"))
    first = events[0]
    assert (first["amount"], first["_type"], first["_schema_version"], first["_version"]) == (3, "Paid", 2, 5)
    assert events[1]["_corrupt"] == "no event.aggregate_version"
    numbers = records.select(
        functions.header_number("headers", "n", "int32"), functions.header_number("headers", "x", "float64"),
        functions.header_number("headers", "x", "int32"),
    )  # fmt: skip
    assert [tuple(row) for row in numbers.collect()] == [(-7, 2.5, None), (None, None, None)]
    with pytest.raises(Invalid, match="unknown numeric header type"):
        functions.header_number("headers", "n", "int7")


def test_dead_letters_of_queues_pipelines_and_applications_become_columns(
    spark: SparkSession, served: Served, topic: str
) -> None:
    def dead(**headers: bytes) -> tuple[Header, ...]:
        return tuple(Header(f"dead.{name}".encode(), value) for name, value in headers.items())

    with polywire.connect_sync(served.address) as client:
        client.create_topic(topic, 1)
        client.send(topic, '{"id": 1}')
        with client.queue(topic, group="g", attempts=2, dead_letters=f"{topic}.dead") as queue:
            for _ in range(2):
                job = next(iter(queue))
                job.retry(reason="no such customer")
        own: dict[str, str | int] = {
            "dead.reason": "boom",
            "dead.topic": topic,
            "dead.partition": 2,
            "dead.offset": 70_000,
        }
        client.send(f"{topic}.dead", '{"id": 2}', headers=own, partition=0)
        client.send(f"{topic}.dead", '{"id": 3}', partition=0)
    with sync.connect(f"polywire://{served.address}") as wire:
        values = [
            dead(reason=b"not JSON", topic=b"t", partition=b"3", offset=b"123456789012"),
            dead(reason=b"", partition=b"x", offset=b"1e3", deliveries=b"99999999999"),
            dead(reason=b"\xff", partition=b"\xff" * 8, offset=b"\xff" * 9),
        ]
        for number, headers in enumerate(values, 4):
            record = Record(b'{"id": %d}' % number, headers=headers)
            wire.produce(f"{topic}.dead", [record], partition=0)
    records = read(spark, served, f"{topic}.dead")
    shown = records.select("value", functions.dead_letter("headers").alias("dead")).select("value", "dead.*")
    assert shown.columns == ["value", "reason", "attempts", "group", "topic", "partition", "offset"]
    rows = {bytes(row["value"])[-2:-1].decode(): tuple(row)[1:] for row in shown.collect()}
    assert rows == {
        "1": ("no such customer", 2, "g", topic, 0, 0),
        "2": ("boom", None, None, topic, 2, 70_000),
        "3": (None, None, None, None, None, None),
        "4": ("not JSON", None, None, "t", 3, 123_456_789_012),
        "5": ("", None, None, None, None, None),
        "6": ("\ufffd", None, None, None, None, None),
    }
    parsed = functions.parse_json(records, "id long").withColumn("dead", functions.dead_letter("_headers"))
    assert parsed.where("dead.topic = 't'").select("id").first() == Row(id=4)
    typed = spark.read.format("polywire").options(
        address=served.address, subscribe=f"{topic}.dead", includeHeaders="typed"
    )
    assert (
        typed.load().select(functions.dead_letter("typedHeaders").alias("dead")).where("dead.offset > 0").count() == 2
    )


def test_text_and_parsers_by_name(spark: SparkSession, served: Served, topic: str) -> None:
    put(served, topic, [b"hello", b"\xff"])
    records = read(spark, served, topic)
    texts = in_order(functions.parser("text")(records))
    assert [(row["text"], row["_corrupt"]) for row in texts] == [("hello", None), (None, "not UTF-8")]
    assert functions.parser("json:id int")(records).where(f.col("_corrupt").isNotNull()).count() == 2
    assert functions.parser("polywire.spark.functions:parse_text")(records).columns == texts[0].__fields__
    for text, reason in (
        ("json:_a int", "reserved"),
        ("nothing:here", "cannot import"),
        ("avro:/no/such/file", "cannot read"),
        ("json:?", "schema"),
    ):
        with pytest.raises(Invalid, match=reason):
            functions.parser(text)(records)
