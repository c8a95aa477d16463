"""One trace over three protocols: a record is sent over Kafka, copied over Iggy, and read by Spark."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pyspark.sql import SparkSession

import polywire
from polywire.client import tracing
from tests.broker_process import BrokerProcess

pytestmark = pytest.mark.spark


def test_a_trace_continues_over_kafka_iggy_and_spark(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_found", tracing.Telemetry(provider, MeterProvider()))
    tracer = provider.get_tracer("test")
    with BrokerProcess(tmp_path / "data", wires=["kafka", "iggy", "polywire"]) as broker:
        with tracer.start_as_current_span("request"):
            asyncio.run(send(broker.url("kafka")))
        asyncio.run(copy(broker.url("kafka"), broker.url("iggy")))
        reader = spark.read.format("polywire").options(address=broker.url("polywire"), includeHeaders="true")
        [row] = reader.option("subscribe", "invoices").load().collect()
        with tracer.start_as_current_span("bill", context=polywire.trace_context(row["headers"])):
            assert bytes(row["value"]) == b"pay for 7"
        broker.stop()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    chain = [spans[name] for name in ("request", "send orders", "process orders", "send invoices", "bill")]
    assert len({trace_of(span) for span in chain}) == 1
    assert [parent_of(span) for span in chain] == [None, *[id_of(span) for span in chain[:-1]]]
    systems = [(span.attributes or {}).get("messaging.system") for span in chain[1:4]]
    assert systems == ["kafka", "kafka", "iggy"]
    provider.shutdown()


async def send(url: str) -> None:
    async with polywire.connect(url) as client:
        await client.send("orders", "7")


async def copy(source: str, target: str) -> None:
    async with (
        polywire.connect(source) as client,
        polywire.connect(target) as other,
        client.consumer("orders", group="billing") as consumer,
    ):
        record = await anext(aiter(consumer))
        with consumer.processing(record):
            await other.send("invoices", f"pay for {record.text}", headers=record.headers)


def trace_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.trace_id)


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id
