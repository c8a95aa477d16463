"""Traces and metrics with OpenTelemetry, by its semantic conventions for messaging.

* Until the application sets a provider of OpenTelemetry, nothing is imported or reported.
* A record that is sent gets a span, whose context (W3C ``traceparent``) becomes a header of the record. The span ends when
  the record is acknowledged or has failed.
* A span of a consumer links to the spans that sent its records. With a single record, the span that sent it is also the parent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from polywire.build_info import VERSION
from polywire.client.address import SCHEME_SUFFIX, split_address, split_brokers, split_login
from polywire.client.connect import DEFAULT_SCHEME
from polywire.client.record import Record, valid_record
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.extras import required

if TYPE_CHECKING:
    import asyncio

    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Link, Span, SpanKind, TracerProvider

API: Final = "opentelemetry.trace"
LINKS_MAX: Final = 128  # of one span; the SDK keeps as many by default
METERED: Final = (
    "messaging.system",
    "messaging.operation.name",
    "messaging.operation.type",
    "messaging.destination.name",
    "messaging.consumer.group.name",
    "server.address",
    "server.port",
)
"""Attributes of metrics. Those with too many values, such as partitions, are attributes of spans only."""
SYSTEMS: Final = {"kafka07": "kafka", "memory": "polywire"}
"""Names of messaging systems by scheme, where they differ."""
CARRIERS: Final = frozenset({"polywire", "memory", "kafka", "iggy"})
"""Schemes of protocols whose records have headers."""
CHECK_INTERVAL_S: Final = 0.1  # asking for the providers takes some microseconds, too long for each record
CONTEXT_BYTES_MAX: Final = 8192  # of a header with a context, as for baggage by W3C; longer ones are ignored
CONTEXT_HEADERS: Final = ("traceparent", "tracestate", "baggage")


@dataclass(frozen=True, slots=True)
class Place:
    """A broker as spans and metrics name it.

    Attributes:
        attributes: system, and address and port if there is a single broker.
        carries: whether the protocol has headers.
        text: whether it has headers with text. Values are bytes otherwise.
    """

    attributes: Mapping[str, Any]
    carries: bool
    text: bool

    @classmethod
    def of(cls, url: str) -> Place:
        """Return the place of a URL, as for ``polywire.connect``."""
        scheme = url.partition("://")[0].removesuffix(SCHEME_SUFFIX) if "://" in url else DEFAULT_SCHEME
        attributes: dict[str, Any] = {"messaging.system": SYSTEMS.get(scheme, scheme)}
        try:
            [broker] = split_brokers(url)
            host, port = split_address(split_login(broker)[1].rpartition("://")[2].partition("?")[0])
            attributes |= {"server.address": host, "server.port": port}
        except (ValueError, BrokerError):
            pass  # several brokers, or a broker in this process
        return cls(attributes, scheme in CARRIERS, scheme != "kafka")


class Telemetry:
    """Reports to the providers of the application."""

    def __init__(self, tracers: TracerProvider, meters: MeterProvider) -> None:
        from opentelemetry import context, propagate, trace

        self.trace: Final = trace
        self.context: Final = context
        self.propagate: Final = propagate
        self.tracer: Final = tracers.get_tracer("polywire", VERSION)
        meter = meters.get_meter("polywire", VERSION)
        self.sent: Final = meter.create_counter(
            "messaging.client.sent.messages", unit="{message}", description="records that were sent"
        )
        self.consumed: Final = meter.create_counter(
            "messaging.client.consumed.messages",
            unit="{message}",
            description="records that were returned to the application",
        )
        self.duration: Final = meter.create_histogram(
            "messaging.client.operation.duration", unit="s", description="duration of sends, receives and commits"
        )
        self.process_duration: Final = meter.create_histogram(
            "messaging.process.duration", unit="s", description="duration of the processing of records"
        )

    def sending(
        self, place: Place, topic: str, headers: Mapping[str, Any], *, count: int = 1, name: str = "send"
    ) -> Sending:
        """Begin the span of records to send.

        The parent is the current span or, without one, the span in the headers, so that a copy of a record continues its
        trace.
        """
        current = self.context.get_current()
        if not self.trace.get_current_span(current).get_span_context().is_valid and headers:
            current = self.extracted(headers, current)
        attributes = _attributes(place, topic, name, "create" if name == "create" else "send")
        if count > 1:
            attributes["messaging.batch.message_count"] = count
        return Sending(self, place, self.begin(f"{name} {topic}", "PRODUCER", attributes, current), attributes, count)

    def begin(
        self,
        name: str,
        kind: str,
        attributes: Mapping[str, Any],
        context: Context | None = None,
        *,
        links: Sequence[Link] = (),
        start_ns: int | None = None,
    ) -> Span:
        """Begin a span."""
        kinds: SpanKind = self.trace.SpanKind[kind]
        return self.tracer.start_span(name, context, kinds, attributes, links, start_ns)

    def end(self, span: Span, attributes: Mapping[str, Any], begun: float, error: BaseException | None = None) -> None:
        """End a span, and add its duration to the metrics."""
        metered = _metered(attributes)
        if error is not None:
            kind = error.code.value if isinstance(error, BrokerError) else type(error).__qualname__
            span.set_attribute("error.type", kind)
            span.set_status(self.trace.StatusCode.ERROR, str(error))
            metered["error.type"] = kind
        span.end()
        is_process = attributes["messaging.operation.type"] == "process"
        (self.process_duration if is_process else self.duration).record(time.monotonic() - begun, metered)

    def extracted(self, headers: object, context: Context) -> Context:
        """Return a context with the span in the headers, or the given context if the headers have no span."""
        found: Context = self.propagate.extract(_carrier(headers), context)
        return found

    def links(self, records: Iterable[Record]) -> list[Link]:
        """Return links to the spans that sent the records."""
        found: dict[tuple[int, int], Link] = {}
        empty = self.context.Context()
        for record in records:
            if record.headers and len(found) < LINKS_MAX:
                sent = self.trace.get_current_span(self.extracted(record.headers, empty)).get_span_context()
                if sent.is_valid:
                    found[sent.trace_id, sent.span_id] = self.trace.Link(sent)
        return list(found.values())

    def received(self, place: Place, group: str | None, records: Sequence[Record], begun: float) -> None:
        """Report records of one partition that were returned to the application."""
        topic = records[0].topic
        attributes = _attributes(place, topic, "poll", "receive", group, records[0].partition)
        attributes["messaging.batch.message_count"] = len(records)
        start_ns = time.time_ns() - int((time.monotonic() - begun) * 1e9)
        span = self.begin(f"poll {topic}", "CLIENT", attributes, links=self.links(records), start_ns=start_ns)
        self.end(span, attributes, begun)
        self.consumed.add(len(records), _metered(attributes))

    @contextmanager
    def processing(self, place: Place, group: str | None, records: Record | Sequence[Record]) -> Iterator[Span]:
        """Make a span of the processing of records the current one. See ``Consumer.processing``."""
        several: Sequence[Record] = (records,) if isinstance(records, Record) else records
        topic = several[0].topic if several else ""
        attributes = _attributes(place, topic, "process", "process", group)
        context = None
        if isinstance(records, Record):
            attributes["messaging.destination.partition.id"] = str(records.partition)
            attributes["messaging.polywire.offset"] = records.offset
            context = self.extracted(records.headers, self.context.get_current()) if records.headers else None
        else:
            attributes["messaging.batch.message_count"] = len(several)
        begun = time.monotonic()
        span = self.begin(f"process {topic}", "CONSUMER", attributes, context, links=self.links(several))
        has_failed = True
        try:
            with self.trace.use_span(span, record_exception=True, set_status_on_exception=False):
                yield span
            has_failed = False
        finally:
            self.end(span, attributes, begun, sys.exc_info()[1] if has_failed else None)


class Sending:
    """The span of one record or several that are sent together."""

    __slots__ = ("_attributes", "_begun", "_context", "_count", "_is_ended", "_left", "_span", "_telemetry")

    def __init__(
        self, telemetry: Telemetry, place: Place, span: Span, attributes: Mapping[str, Any], count: int
    ) -> None:
        self._telemetry: Final = telemetry
        self._span: Final = span
        self._attributes: Final = attributes
        self._count: Final = count
        self._begun: Final = time.monotonic()
        self._context: dict[str, Any] = {}
        self._left = 0
        self._is_ended = False
        if place.carries:
            telemetry.propagate.inject(self._context, telemetry.trace.set_span_in_context(span))
            if not place.text:
                self._context = {name: value.encode() for name, value in self._context.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """End the span if the records could not be queued."""
        if error is not None:
            self.end(error)

    @property
    def has_context(self) -> bool:
        """Whether records get headers with the context of the span."""
        return bool(self._context)

    def traced(self, record: Record) -> Record:
        """Return a record whose headers have the context of the span."""
        if not self._context:
            return record
        if not record.headers and record.origin_time_us is None:
            return self.traced_value(record.value, record.key)
        headers = {name: value for name, value in record.headers.items() if name not in CONTEXT_HEADERS}
        return Record(record.value, record.key, headers | self._context, origin_time_us=record.origin_time_us)

    def traced_value(self, value: bytes | None, key: bytes | None) -> Record:
        """Return a record with a value, a key, and the context of the span as its headers."""
        return valid_record(value, key, self._context)

    def wait_for(self, outcomes: Sequence[asyncio.Future[Any]]) -> None:
        """End the span once all outcomes are there. Each is a ``Delivery``."""
        self._left = len(outcomes)
        if not outcomes:
            self.end(None)
        for outcome in outcomes:
            outcome.add_done_callback(self._completed)

    def _completed(self, outcome: asyncio.Future[Any]) -> None:
        if outcome.cancelled():
            return
        self._left -= 1
        delivery = outcome.result()
        if delivery.error is not None:
            self.end(delivery.error)
        elif not self._left:
            if self._count == 1 and delivery.partition >= 0:
                self._span.set_attribute("messaging.destination.partition.id", str(delivery.partition))
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """End the span. A second call does nothing."""
        if not self._is_ended:
            self._is_ended = True
            self._telemetry.end(self._span, self._attributes, self._begun, error)
            self._telemetry.sent.add(self._count, _metered(self._attributes))


def active() -> Telemetry | None:
    """Return what reports to OpenTelemetry, or None if the application has set no provider."""
    if _found is None and API in sys.modules and time.monotonic() >= _check_at:
        _find()
    return _found


_found: Telemetry | None = None
_check_at = 0.0


def _find() -> None:
    global _check_at, _found
    from opentelemetry import metrics, trace

    tracers, meters = trace.get_tracer_provider(), metrics.get_meter_provider()
    _check_at = time.monotonic() + CHECK_INTERVAL_S
    if not (_is_proxy(tracers) and _is_proxy(meters)):
        _found = Telemetry(tracers, meters)


def _is_proxy(provider: object) -> bool:
    """Return whether this stands for a provider that the application has not set yet."""
    return type(provider).__name__.lstrip("_").startswith("Proxy")


def trace_context(source: object) -> Context:
    """Return the OpenTelemetry context that a record was sent with, for spans in programs that process it.

    If the record has no context, return the current context. Needs ``pip install 'polywire[otel]'``.

    Args:
        source: a ``Record``, its headers, or the column ``headers`` of a row of Spark.

    Example:
        for row in frame.collect():
            with tracer.start_as_current_span("bill", context=polywire.trace_context(row.headers)):
                bill(row.value)
    """
    need = "trace_context needs opentelemetry-api"
    propagate, context = (required(f"opentelemetry.{name}", need, "otel") for name in ("propagate", "context"))
    headers = source.headers if isinstance(source, Record) else source
    found: Context = propagate.extract(_carrier(headers), context.get_current())
    return found


def _carrier(headers: object) -> dict[str, str]:
    """Return the headers of the context as text. Headers are a mapping, or pairs of name and value, as in Spark.

    The names of W3C are compared without regard to case, because some clients write ``Traceparent``.
    """
    pairs: Iterable[Any] = headers.items() if isinstance(headers, Mapping) else headers or ()  # type: ignore[assignment]
    found: dict[str, str] = {}
    try:
        for name, *_, value in pairs:
            if name.lower() in CONTEXT_HEADERS and value is not None and len(value) <= CONTEXT_BYTES_MAX:
                found[name.lower()] = value if isinstance(value, str) else bytes(value).decode("ascii", "replace")
    except (AttributeError, TypeError, ValueError):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"headers must be a mapping, or pairs of name and value got={type(headers).__name__}",
        ) from None
    return found


def _metered(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: attributes[name] for name in METERED if name in attributes}


def _attributes(
    place: Place, topic: str, name: str, kind: str, group: str | None = None, partition: int | None = None
) -> dict[str, Any]:
    found = {
        **place.attributes,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": topic,
    }
    if group is not None:
        found["messaging.consumer.group.name"] = group
    if partition is not None:
        found["messaging.destination.partition.id"] = str(partition)
    return found
