"""The columns of Kafka's source, and pruning by a schema."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from polywire.errors import Invalid
from polywire.spark.options import Headers
from polywire.spark.schema import arrow_schema, check_schema, source_schema


def test_the_columns_match_kafkas() -> None:
    kafka = (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,timestampType:int>"
    )
    assert source_schema(Headers.NONE).simpleString() == kafka
    with_headers = kafka[:-1] + ",headers:array<struct<key:string,value:binary>>>"
    assert source_schema(Headers.PLAIN).simpleString() == with_headers
    typed = kafka[:-1] + ",typedHeaders:array<struct<key:string,type:string,value:binary>>>"
    assert source_schema(Headers.TYPED).simpleString() == typed


def test_arrow_types_match_the_spark_types() -> None:
    schema = arrow_schema(source_schema(Headers.PLAIN))
    assert schema.field("timestamp").type == pa.timestamp("us", tz="UTC")
    assert schema.field("value").type == pa.binary()
    assert schema.field("topic").type == pa.string()
    assert schema.field("headers").type.value_type.field("key").type == pa.string()


def test_a_schema_selects_columns_in_any_order() -> None:
    check_schema(
        StructType([StructField("offset", LongType()), StructField("partition", IntegerType(), nullable=False)])
    )
    check_schema(source_schema(Headers.PLAIN))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (StructType([]), "has no columns"),
        (StructType([StructField("ofset", LongType())]), "did you mean 'offset'"),
        (StructType([StructField("zzz", LongType())]), "no such column column='zzz'"),
        (
            StructType([StructField("value", StringType())]),
            r"cast it after loading\) column='value' given=string expected=binary",
        ),
    ],
)
def test_unknown_columns_are_refused(schema: StructType, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        check_schema(schema)
