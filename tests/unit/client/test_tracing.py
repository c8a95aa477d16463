"""Traces and metrics of the client, with the SDK of OpenTelemetry and exporters in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import polywire
from polywire import Client, Record
from polywire.client import tracing
from polywire.client.base import Ability
from polywire.client.tracing import Place, Telemetry
from polywire.errors import Invalid, Unavailable
from tests.broker_process import child_environment
from tests.unit.client.served import Play, Served
from tests.unit.client.test_consumer import take

SPARK_HEADERS: Final = [("traceparent", bytearray(b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"))]


class Boom(Exception):
    pass


class Report:
    """The spans and metrics that the providers of a test have received."""

    def __init__(self) -> None:
        self._spans, self._metrics = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meters = MeterProvider([self._metrics])
        self.tracer = self.tracers.get_tracer("test")

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if span.name == name]

    def points(self, name: str) -> list[Any]:
        data = self._metrics.get_metrics_data()
        assert data is not None
        metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics if m.name == name]
        return [point for metric in metrics for point in metric.data.data_points]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    made = Report()
    monkeypatch.setattr(tracing, "_found", Telemetry(made.tracers, made.meters))
    yield made
    made.tracers.shutdown()
    made.meters.shutdown()


def attribute(span: ReadableSpan, name: str) -> Any:
    assert span.attributes is not None
    return span.attributes.get(name)


def id_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def links_of(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def test_a_record_continues_the_trace_through_a_consumer(play: Play, served: Served, report: Report) -> None:
    async def scenario(client: Client) -> None:
        with report.tracer.start_as_current_span("request"):
            await client.send("in", "a", key="k", headers={"n": 7}, partition=0)
        async with client.consumer("in", group="g") as consumer, client.producer() as producer:
            async for record in consumer:
                assert record.headers["n"] == 7
                with consumer.processing(record) as span:
                    assert span is trace.get_current_span()
                    await producer.send_and_wait("out", record.value, headers=record.headers, partition=0)
                break
        [copied] = await client.fetch("out", 0, 0)
        assert polywire.trace_context(copied) is not None

    play(scenario)
    [request], [sent], [polled] = report.spans("request"), report.spans("send in"), report.spans("poll in")
    [processed], [again] = report.spans("process in"), report.spans("send out")
    assert [parent_of(span) for span in (sent, processed, again)] == [id_of(request), id_of(sent), id_of(processed)]
    assert [links_of(span) for span in (polled, processed)] == [[id_of(sent)], [id_of(sent)]]
    assert parent_of(polled) is None
    kinds = [span.kind.name for span in (sent, polled, processed)]
    assert kinds == ["PRODUCER", "CLIENT", "CONSUMER"]
    types = [attribute(span, "messaging.operation.type") for span in (sent, polled, processed)]
    assert types == ["send", "receive", "process"]
    for span in (sent, polled, processed):
        assert attribute(span, "messaging.system") == "polywire"
        assert attribute(span, "messaging.destination.name") == "in"
        assert attribute(span, "messaging.destination.partition.id") == "0"
        assert attribute(span, "server.port") == served.port
    assert attribute(polled, "messaging.consumer.group.name") == "g"
    [consumed] = report.points("messaging.client.consumed.messages")
    assert (consumed.value, consumed.attributes["messaging.consumer.group.name"]) == (1, "g")
    sends = {
        point.attributes["messaging.destination.name"] for point in report.points("messaging.client.sent.messages")
    }
    assert sends == {"in", "out"}
    assert {point.count for point in report.points("messaging.process.duration")} == {1}


def test_many_records_have_one_span(play: Play, report: Report) -> None:
    async def scenario(client: Client) -> None:
        async with client.producer() as producer:
            values: list[Any] = ["a", Record("b", key="k", headers={"n": 1}), "c"]
            await producer.send_many("t", values, partition=0)
            await producer.send_many("t", [], partition=0)
        async with client.consumer("t") as consumer:
            records = await consumer.batch(timeout_s=60)
            assert [record.text for record in records] == ["a", "b", "c"]
            assert [record.headers.get("n") for record in records] == [None, 1, None]
            assert records[1].key == b"k"
            with consumer.processing(records):
                pass

    play(scenario)
    [sent], [polled], [processed] = report.spans("send t"), report.spans("poll t"), report.spans("process t")
    assert attribute(sent, "messaging.batch.message_count") == attribute(polled, "messaging.batch.message_count") == 3
    assert links_of(polled) == links_of(processed) == [id_of(sent)]
    assert parent_of(processed) is None
    [point] = report.points("messaging.client.sent.messages")
    assert point.value == 3


def test_a_copy_without_a_current_span_continues_the_trace_of_its_headers(play: Play, report: Report) -> None:
    async def scenario(client: Client) -> None:
        await client.send("in", "a", partition=0)
        [record] = await client.fetch("in", 0, 0)
        await client.send("out", record.value, headers=record.headers)

    play(scenario)
    [first], [second] = report.spans("send in"), report.spans("send out")
    assert parent_of(second) == id_of(first)


def test_failures_are_errors_of_spans(play: Play, report: Report) -> None:
    async def scenario(client: Client) -> None:
        await client.create_topic("t", 1)
        async with client.producer(create=False, linger_ms=100_000) as producer:
            with pytest.raises(Exception, match="no such topic"):
                await producer.send("gone", "a")
            receipt = await producer.send("t", "a", timeout_s=0.01)
            with pytest.raises(Unavailable):
                await receipt
        await client.send("u", "b")
        async with client.consumer("u") as consumer:
            async for record in consumer:
                with pytest.raises(Boom), consumer.processing(record):
                    raise Boom
                break

    play(scenario)
    for name, kind in [("send gone", "topic_missing"), ("send t", "unreachable"), ("process u", "Boom")]:
        [span] = report.spans(name)
        assert attribute(span, "error.type") == kind
        assert span.status.status_code is trace.StatusCode.ERROR
        assert span.end_time is not None


def test_transactions_send_the_context_and_end_with_the_commit(play: Play, report: Report) -> None:
    async def scenario(client: Client) -> None:
        async with client.transaction("t") as transaction:
            await transaction.send("out", "a", partition=0)
            assert not report.spans("send out")
        with pytest.raises(Boom):  # noqa: PT012 - the block is what fails
            async with client.transaction("t") as transaction:
                await transaction.send("lost", "b")
                raise Boom
        async with client.consumer("out") as consumer:
            assert await take(consumer, 1) == ["a"]

    play(scenario)
    [sent], [polled], [lost] = report.spans("send out"), report.spans("poll out"), report.spans("send lost")
    assert links_of(polled) == [id_of(sent)]
    assert (attribute(sent, "error.type"), attribute(lost, "error.type")) == (None, "CancelledError")


@pytest.mark.parametrize(
    ("url", "system", "address", "port"),
    [
        ("127.0.0.1:1", "polywire", "127.0.0.1", 1),
        ("kafka+tls://n:p@broker.example:9094?mechanism=SCRAM-SHA-256", "kafka", "broker.example", 9094),
        ("iggy://[::1]:8090", "iggy", "::1", 8090),
        ("kafka07://a:1", "kafka", "a", 1),
        ("polywire://a:1,b:2", "polywire", None, None),
        ("memory://x", "polywire", None, None),
    ],
)
def test_the_place_of_a_url(url: str, system: str, address: str | None, port: int | None) -> None:
    found = Place.of(url).attributes
    assert (found["messaging.system"], found.get("server.address"), found.get("server.port")) == (system, address, port)


def test_headers_are_added_over_protocols_that_have_them() -> None:
    from polywire.client import cursus, flux, iggy, kafka, kafka07
    from polywire.client import polywire as native

    able = {"cursus": cursus, "flux": flux, "iggy": iggy, "kafka07": kafka07, "polywire": native}
    for scheme, module in able.items():
        assert (scheme in tracing.CARRIERS) is (Ability.HEADERS in module.ABILITIES), scheme
    assert "kafka" in tracing.CARRIERS  # with bytes as values, so it does not have the ability
    assert Ability.HEADERS not in kafka.ABILITIES
    assert Place.of("kafka://a:1").text is False


def test_a_context_is_read_from_a_row_of_spark() -> None:
    headers: Any
    for headers in (SPARK_HEADERS, dict(SPARK_HEADERS), [("traceparent", "string", SPARK_HEADERS[0][1])]):
        found = trace.get_current_span(polywire.trace_context(headers)).get_span_context()
        assert (f"{found.trace_id:x}", f"{found.span_id:x}") == ("a" * 32, "b" * 16)
    without: list[Any] = [None, [], {"traceparent": b"\xff nonsense"}, {"tracestate": b"a" * 10_000}, {"other": 5}]
    for headers in without:
        assert not trace.get_current_span(polywire.trace_context(headers)).get_span_context().is_valid
    for wrong in (5, "traceparent", [5], [(5, 6)]):
        with pytest.raises(Invalid, match="pairs of name and value"):
            polywire.trace_context(wrong)


IDLE: Final = """
import asyncio, sys, time
import polywire, polywire.client.tracing as tracing

async def main():
    async with polywire.connect("memory://idle") as client:
        await client.send("t", "a")
        async with client.consumer("t") as consumer:
            async for record in consumer:
                assert dict(record.headers) == {}
                with consumer.processing(record) as span:
                    assert span is None
                break

asyncio.run(main())
assert not [name for name in sys.modules if name.startswith("opentelemetry")], "the client imports nothing"
import opentelemetry.trace
asyncio.run(main())
from opentelemetry.sdk.trace import TracerProvider
opentelemetry.trace.set_tracer_provider(TracerProvider())
time.sleep(tracing.CHECK_INTERVAL_S)
assert tracing.active() is not None
"""


def test_nothing_is_imported_or_reported_without_a_provider() -> None:
    subprocess.run([sys.executable, "-c", IDLE], env=child_environment(), check=True, timeout=120)
