"""The sink's options, columns and routing, without Spark's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from polywire.client.bulk import TopicDetail
from polywire.errors import Conflict, ErrorCode, Invalid, Missing
from polywire.records.partitioner import partitions_of
from polywire.records.rows import to_records
from polywire.spark import sink
from polywire.spark.options import Guarantee, SinkOptions, write_options
from polywire.spark.schema import check_rows
from polywire.spark.sink import RowRouter, Topics, batch_write
from polywire.types import KeyHash, Level

Rows = dict[tuple[str, int], list[bytes | None]]


def options(**given: str) -> SinkOptions:
    return write_options(given, streaming=False)


HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
TYPED_HEADERS = ArrayType(
    StructType(
        [StructField("key", StringType()), StructField("type", StringType()), StructField("value", BinaryType())]
    )
)
KINDS: dict[str, DataType] = {
    "string": StringType(), "binary": BinaryType(), "int": IntegerType(), "bigint": LongType(), "headers": HEADERS,
    "typed": TYPED_HEADERS, "timestamp": TimestampType(), "map": MapType(StringType(), BinaryType()),
}  # fmt: skip


def schema_of(columns: str) -> StructType:
    """Return the schema of ``name kind, …``."""
    pairs = [column.split() for column in columns.split(",")]
    return StructType([StructField(name, KINDS[kind]) for name, kind in pairs])


def test_defaults_and_names() -> None:
    made = options(topic="t")
    assert (made.guarantee, made.create_topics, made.level) == (Guarantee.PUBLISHED, True, Level.SYNCED)
    assert write_options({"KAFKA.ACKS": "1", "EXACTLYONCE": "false"}, streaming=True).level is Level.WRITTEN
    given = {"sinkId": "me", "checkpointLocation": "/x", "kafka.linger.ms": "5"}
    assert write_options(given, streaming=True).sink_id == "me"
    assert options(txnAppId="a", txnVersion="7").transaction == options(txnAppId="a", txnId="7").transaction


@pytest.mark.parametrize(
    ("streaming", "given", "message"),
    [
        (False, {"tpoic": "t"}, "did you mean 'topic'"),
        (False, {"kafka.security.protocol": "SSL"}, "no meaning here"),
        (False, {"kafka.value.serializer": "x"}, "cast the columns"),
        (False, {"path": "t"}, "name topics with the option topic"),
        (False, {"topic": " "}, "is empty"),
        (False, {"exactlyOnce": "maybe"}, "must be true, sequence or false"),
        (False, {"exactlyOnce": "sequence"}, "only with the options txnAppId"),
        (False, {"txnAppId": "a"}, "must be set together"),
        (False, {"txnAppId": "a", "txnId": "-1"}, "whole number"),
        (False, {"sinkId": "a"}, "is for streaming queries"),
        (True, {"txnAppId": "a", "txnId": "1"}, "has the option sinkId"),
        (False, {"acks": "2"}, "must be 0, 1 or all"),
        (False, {"acks": "1", "kafka.acks": "1"}, "given twice"),
    ],
)
def test_errors_suggest_the_intended_option(streaming: bool, given: dict[str, str], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        write_options(given, streaming=streaming)


def test_a_batch_write_has_an_id_from_its_transaction_and_topic() -> None:
    named = {"txnAppId": "app", "txnId": "3"}
    assert batch_write(options(topic="t", **named)) == ("app/t", 3)
    assert batch_write(options(topic="t", **named)) != batch_write(options(topic="u", **named))
    assert batch_write(options(topic="t")) != batch_write(options(topic="t"))
    long = options(topic="t" * 249, txnAppId="a" * 36, txnId="3")
    assert batch_write(long) == batch_write(long)
    assert len(batch_write(long).writer) <= 255


@pytest.mark.parametrize(
    ("columns", "topic", "message"),
    [
        ("key string", "t", "no column value"),
        ("value string", None, "set the option topic"),
        ("value string, other int", "t", "records do not have"),
        ("value bigint", "t", "cast it"),
        ("value string, partition bigint", "t", "cast it"),
        ("value string, headers map", "t", "cast it"),
        ("value string, value string", "t", "several columns have the same name"),
        ("value string, headers headers, typedHeaders typed", "t", "drop one of the two"),
        ("value string, typedHeaders headers", "t", "cast it"),
    ],
)
def test_invalid_columns(columns: str, topic: str | None, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        check_rows(schema_of(columns), topic)


def test_valid_columns() -> None:
    check_rows(schema_of("value binary"), "t")
    every = "key string, value string, topic string, partition int, headers headers"
    check_rows(schema_of(f"{every}, offset bigint, timestamp timestamp, timestampType int"), None)


@dataclass
class FakeBroker:
    """Replaces a bulk connection: topics and their partition counts."""

    counts: dict[str, int]
    key_hash: str | None = None
    described: list[str] = field(default_factory=list)
    raced: bool = False

    def describe(self, name: str) -> TopicDetail:
        self.described.append(name)
        if name not in self.counts:
            raise Missing(ErrorCode.TOPIC_MISSING, "no such topic")
        return TopicDetail(name, b"i" * 16, 0, tuple(range(self.counts[name])), {"key_hash": self.key_hash})

    def create_topic(self, name: str) -> TopicDetail:
        self.counts[name] = 3
        if self.raced:
            raise Conflict(ErrorCode.TOPIC_EXISTS, "there already")
        return self.describe(name)


def routed(broker: FakeBroker, batches: list[pa.RecordBatch], topic: str | None = None, round_robin: int = 0) -> Rows:
    routing = RowRouter(Topics(broker, create=True), topic, round_robin=round_robin)  # type: ignore[arg-type]
    pieces = [piece for batch in batches for piece in routing.add(batch)] + list(routing.rest())
    places: Rows = {}
    for piece in pieces:
        places.setdefault((piece.topic, piece.partition), []).extend(r.value for r in to_records(piece.batch))
    return places


def rows(count: int, **columns: Sequence[object]) -> pa.RecordBatch:
    kinds = {"key": pa.string(), "topic": pa.string(), "partition": pa.int32()}
    made = {name: pa.array(values, kinds[name]) for name, values in columns.items()}
    return pa.record_batch({"value": pa.array([b"%d" % n for n in range(count)], pa.binary()), **made})


@pytest.mark.parametrize("key_hash", [None, "xxh32"])
def test_keys_choose_partitions_by_the_topics_hash(key_hash: str | None) -> None:
    batch = rows(100, key=[f"k{n % 9}" for n in range(100)])
    places = routed(FakeBroker({"t": 5}, key_hash), [batch], "t")
    source = b"".join(b"k%d" % n for n in range(9))
    spans = memoryview(b"".join(n.to_bytes(8, "little") for i in range(9) for n in (2 * i, 2, 0, 0)))
    by_key = partitions_of(source, spans, 5, KeyHash(key_hash or "fnv32"))
    for (_, number), found in places.items():
        assert found == [b"%d" % n for n in range(100) if by_key[n % 9] == number]


def test_rows_without_keys_use_partitions_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "PENDING_BYTES", 1)
    places = routed(FakeBroker({"t": 3}), [rows(4), rows(2, key=[None, None]), rows(1)], "t", round_robin=2)
    assert {place: len(found) for place, found in places.items()} == {("t", 2): 4, ("t", 0): 2, ("t", 1): 1}


def test_a_partition_column_overrides_keys_unless_null() -> None:
    batch = rows(4, key=["a", "b", "a", "c"], partition=[2, None, 0, None])
    places = routed(FakeBroker({"t": 3}), [batch], "t")
    by_key = routed(FakeBroker({"t": 3}), [rows(4, key=["a", "b", "a", "c"])], "t")
    assert b"0" in places["t", 2]
    assert b"2" in places["t", 0]
    for value in (b"1", b"3"):
        assert [p for p, found in places.items() if value in found] == [
            p for p, found in by_key.items() if value in found
        ]
    for wrong in (3, -1):
        with pytest.raises(Invalid, match=f"partition={wrong}"):
            routed(FakeBroker({"t": 3}), [rows(1, partition=[wrong])], "t")


def test_a_topic_column_routes_rows_and_creates_missing_topics() -> None:
    broker = FakeBroker({"a": 1}, raced=True)
    topics = ["a", "b", "a", "b", "c"]
    places = routed(broker, [rows(5, topic=topics, key=["k"] * 5)] * 2)
    by_topic = {topic: found for (topic, _), found in places.items()}
    assert by_topic == {"a": [b"0", b"2"] * 2, "b": [b"1", b"3"] * 2, "c": [b"4"] * 2}
    assert broker.described == ["a", "b", "b", "c", "c"]
    with pytest.raises(Invalid, match="topic is null"):
        routed(broker, [rows(2, topic=["a", None])])


def test_pending_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "PENDING_TOTAL_BYTES", 1)
    routing = RowRouter(Topics(FakeBroker({"a": 1}), create=True), "a", round_robin=0)  # type: ignore[arg-type]
    assert len(list(routing.add(rows(5)))) == 1
    assert list(routing.rest()) == []
