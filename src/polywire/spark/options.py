"""Options of the source, with the names of Spark's Kafka source.

Every option is checked before any request to a broker. A wrong option raises an error that suggests the right one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from polywire import names
from polywire.client.bulk import RECONNECT_S, TIMEOUT_S
from polywire.client.login import Login
from polywire.errors import ErrorCode, Invalid
from polywire.spark.offsets import PartitionKey
from polywire.spark.option_values import ADDRESSES, LOGIN, addresses, choice, count, known, login, refuse, switch

LATEST_OFFSET: Final = -1  # Kafka's numbers inside startingOffsets and endingOffsets
EARLIEST_OFFSET: Final = -2
ONE_QUERY: Final = "oneQueryPerLoad"  # the value that pushFilters requires
GROUP_BYTES_MAX: Final = 255  # longest name of a group (spec: polywire#limits)
OPTION_BYTES_MAX: Final = 1 << 20  # longest JSON option: some 20,000 partitions

BUCKET_PREFIX: Final = "bucket."
BUCKET: Final = tuple(
    BUCKET_PREFIX + name
    for name in (
        "endpoint", "region", "access_key_id", "secret_access_key", "session_token", "skip_signature",
        "virtual_hosted_style_request",
        "service_account",
        "account_name", "tenant_id", "client_id", "client_secret",
    )
)  # fmt: skip
"""Options for accessing the bucket, for tasks whose environment does not provide it. Names are the library's; Spark
redacts secrets.
"""
OPTIONS: Final = (
    *ADDRESSES, *LOGIN,
    "subscribe", "subscribePattern", "assign",
    "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy",
    "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp",
    "failOnDataLoss", "includeHeaders", "timestampType",
    "minPartitions", "maxRecordsPerPartition",
    "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay",
    "kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs",
    "groupIdPrefix", "kafka.group.id", "commitGroup", "pushFilters", "localSegments",
    *BUCKET,
)  # fmt: skip
_STREAM_ONLY_BATCH: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_SOURCES: Final = ("subscribe", "subscribePattern", "assign")
_DURATION: Final = re.compile(r"(\d+)\s*(ms|s|m|min|h)?")
_DURATION_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class Edge(Enum):
    """One of the two ends of a partition."""

    EARLIEST = "earliest"
    LATEST = "latest"


class MissingTime(Enum):
    """Behaviour if no record is at or after a starting time (startingOffsetsByTimestampStrategy)."""

    ERROR = "error"
    LATEST = "latest"


class Headers(Enum):
    """Which header column a read returns (includeHeaders)."""

    NONE = "false"
    PLAIN = "true"
    TYPED = "typed"


class TimestampType(Enum):
    """Which time becomes a record's timestamp (timestampType). Values are Kafka's. Case is ignored."""

    APPEND = "logappendtime"
    CREATE = "createtime"


class LocalSegments(Enum):
    """Whether tasks read sealed segments directly from the broker's files or bucket (localSegments)."""

    AUTO = "auto"
    OFF = "off"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ByOffset:
    """An offset for every partition. -1 is latest, -2 earliest."""

    offsets: Mapping[PartitionKey, int]


@dataclass(frozen=True, slots=True)
class ByTime:
    """The first record at or after a time (µs): one time for all partitions, or one for each."""

    time_us: int | None
    times_us: Mapping[PartitionKey, int]

    def of(self, key: PartitionKey) -> int | None:
        """Return the time for a partition, or None."""
        return self.time_us if self.time_us is not None else self.times_us.get(key)


OffsetSpec = Edge | ByOffset | ByTime


@dataclass(frozen=True, slots=True)
class Subscription:
    """Topics by name, topics whose full name matches a pattern, or partitions. Exactly one is set."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    partitions: tuple[PartitionKey, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """All options of a read, checked. Counts are numbers of records. None means no limit.

    Attributes:
        group: group for which a stream's offsets are committed, to show its lag.
        timeout_s: longest wait for one response.
        reconnect_s: how long an unreachable broker is retried.
        bucket: options of the library that reads the broker's bucket.
    """

    addresses: tuple[str, ...]
    login: Login | None
    subscription: Subscription
    starting: OffsetSpec
    ending: OffsetSpec
    missing_time: MissingTime
    fail_on_data_loss: bool
    headers: Headers
    timestamp_type: TimestampType
    partitions_min: int | None
    partition_records_max: int | None
    trigger_records_max: int | None
    trigger_bytes_max: int | None
    trigger_records_min: int | None
    trigger_delay_s: float
    timeout_s: float
    reconnect_s: float
    group: str | None
    push_filters: bool
    local_segments: LocalSegments
    bucket: Mapping[str, str] = field(repr=False)


def read_options(given: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Check and convert the options of a read. Names ignore case. Raises Invalid(INVALID_REQUEST)."""
    options = known(given, OPTIONS, topics="subscribe")
    if streaming:
        for name in _STREAM_ONLY_BATCH:
            if name in options:
                refuse(name, "has no meaning in a streaming query: a stream has no end")
    return SourceOptions(
        addresses=addresses(options),
        login=login(options),
        subscription=_subscription(options),
        starting=_starting(options, streaming=streaming),
        ending=_ending(options),
        missing_time=choice(
            options,
            "startingOffsetsByTimestampStrategy",
            MissingTime,
            MissingTime.ERROR,
            among=[strategy.value for strategy in MissingTime],
        ),
        fail_on_data_loss=switch(options, "failOnDataLoss", default=True),
        headers=choice(options, "includeHeaders", Headers, Headers.NONE, among=[kind.value for kind in Headers]),
        timestamp_type=_timestamp_type(options),
        partitions_min=count(options, "minPartitions"),
        partition_records_max=count(options, "maxRecordsPerPartition"),
        trigger_records_max=count(options, "maxOffsetsPerTrigger"),
        trigger_bytes_max=count(options, "maxBytesPerTrigger"),
        trigger_records_min=count(options, "minOffsetsPerTrigger"),
        trigger_delay_s=_duration_s(options, "maxTriggerDelay", default_s=15 * 60.0),
        timeout_s=max(TIMEOUT_S, (count(options, "kafkaConsumer.pollTimeoutMs") or 0) / 1000),
        reconnect_s=_reconnect_s(options),
        group=_group(options),
        push_filters=_push_filters(options),
        local_segments=choice(
            options, "localSegments", LocalSegments, LocalSegments.AUTO, among=[kind.value for kind in LocalSegments]
        ),
        bucket={name.removeprefix(BUCKET_PREFIX): options[name] for name in BUCKET if name in options},
    )


def _reconnect_s(options: Mapping[str, str]) -> float:
    """Return how long to retry, in seconds. Kafka's options can raise the time above the default, not lower it."""
    retries = count(options, "fetchOffset.numRetries", zero=True)
    interval_ms = count(options, "fetchOffset.retryIntervalMs", zero=True)
    return max(RECONNECT_S, (3 if retries is None else retries) * (10 if interval_ms is None else interval_ms) / 1000)


def _group(options: Mapping[str, str]) -> str | None:
    given = [name for name in ("commitGroup", "kafka.group.id") if name in options]
    if len(given) > 1:
        refuse("commitGroup", "is given twice, once as kafka.group.id")
    name = options[given[0]] if given else None
    if name is not None and not 0 < len(name.encode()) <= GROUP_BYTES_MAX:
        refuse(given[0], f"must have 1 to {GROUP_BYTES_MAX} bytes")
    return name


def _timestamp_type(options: Mapping[str, str]) -> TimestampType:
    words = ["LogAppendTime", "CreateTime"]
    chosen = choice(options, "timestampType", TimestampType, TimestampType.APPEND, among=words)
    if chosen is TimestampType.CREATE and "pushFilters" in options:
        refuse(
            "pushFilters",
            "would skip records by append time although timestampType=CreateTime is set: choose one of the two",
        )
    return chosen


def _push_filters(options: Mapping[str, str]) -> bool:
    """Return whether to use the query's filters to skip records.

    Spark 4.3 may apply one query's filters to the next query over the same DataFrame, so the option must have a special
    value.
    """
    text = options.get("pushFilters", "false").strip()
    if text.lower() == "true":
        refuse(
            "pushFilters",
            f"would make later queries over the same DataFrame skip records, because Spark retains the first query's filters; load one for "
            f"each query and set pushFilters={ONE_QUERY}",
        )
    if text.lower() not in ("false", ONE_QUERY.lower()):
        refuse("pushFilters", f"must be false or {ONE_QUERY}, not {text!r}")
    return text.lower() != "false"


def _subscription(options: Mapping[str, str]) -> Subscription:
    given = [name for name in _SOURCES if name in options]
    if len(given) != 1:
        had = ", ".join(given) or "none"
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"exactly one of the options subscribe, subscribePattern, assign is needed given={had}",
        )
    name = given[0]
    text = options[name]
    if name == "subscribe":
        try:
            topics = tuple(sorted({names.unescape(part.strip()) for part in text.split(",") if part.strip()}))
        except Invalid as error:
            refuse(name, error.message)
        if not topics:
            refuse(name, "names no topic")
        return Subscription(topics=topics)
    if name == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            refuse(name, f"is not a regular expression ({error})")
        return Subscription(pattern=text)
    return Subscription(partitions=_assigned(text))


def _assigned(text: str) -> tuple[PartitionKey, ...]:
    example = 'must be JSON such as {"orders":[0,1]}'
    document = _document("assign", text, example)
    keys: set[PartitionKey] = set()
    for topic, numbers in document.items():
        if not isinstance(numbers, list) or not all(_is_whole(number) and number >= 0 for number in numbers):
            refuse("assign", example)
        keys.update(PartitionKey(topic, number) for number in numbers)
    if not keys:
        refuse("assign", "names no partition")
    return tuple(sorted(keys))


def _starting(options: Mapping[str, str], *, streaming: bool) -> OffsetSpec:
    """Return the start of a read.

    Kafka's precedence applies: startingTimestamp, startingOffsetsByTimestamp, startingOffsets.
    """
    timed = _timed(options, "startingTimestamp", "startingOffsetsByTimestamp")
    if timed is not None:
        return timed
    spec = _offset_spec(options, "startingOffsets", Edge.LATEST if streaming else Edge.EARLIEST)
    if not streaming and (
        spec is Edge.LATEST or (isinstance(spec, ByOffset) and LATEST_OFFSET in spec.offsets.values())
    ):
        refuse("startingOffsets", "cannot be latest (-1) in a batch read: nothing would be read")
    return spec


def _ending(options: Mapping[str, str]) -> OffsetSpec:
    timed = _timed(options, "endingTimestamp", "endingOffsetsByTimestamp")
    if timed is not None:
        return timed
    spec = _offset_spec(options, "endingOffsets", Edge.LATEST)
    if spec is Edge.EARLIEST or (isinstance(spec, ByOffset) and EARLIEST_OFFSET in spec.offsets.values()):
        refuse("endingOffsets", "cannot be earliest (-2): nothing would be read")
    return spec


def _offset_spec(options: Mapping[str, str], name: str, default: Edge) -> Edge | ByOffset:
    text = options.get(name)
    if text is None:
        return default
    if text.strip().lower() in ("earliest", "latest"):
        return Edge(text.strip().lower())
    return ByOffset(_by_partition(name, text, lowest=EARLIEST_OFFSET))


def _timed(options: Mapping[str, str], single: str, many: str) -> ByTime | None:
    """Convert times, which Kafka gives in milliseconds."""
    if single in options:
        time_ms = count(options, single, zero=True)
        return ByTime(time_us=(time_ms or 0) * 1000, times_us={})
    if many in options:
        times_ms = _by_partition(many, options[many], lowest=0)
        return ByTime(time_us=None, times_us={key: time_ms * 1000 for key, time_ms in times_ms.items()})
    return None


def _by_partition(name: str, text: str, *, lowest: int) -> dict[PartitionKey, int]:
    example = 'must be JSON such as {"orders":{"0":23,"1":42}}'
    if name in ("startingOffsets", "endingOffsets"):
        example = f"must be earliest, latest, or {example[8:]}"
    document = _document(name, text, example)
    found: dict[PartitionKey, int] = {}
    for topic, entries in document.items():
        if not isinstance(entries, dict):
            refuse(name, example)
        for number, value in entries.items():
            if not number.isdecimal() or not _is_whole(value) or value < lowest:
                refuse(name, f"{example}; wrong at {topic!r} partition {number!r}")
            found[PartitionKey(topic, int(number))] = value
    if not found:
        refuse(name, example)
    return found


def _document(name: str, text: str, example: str) -> dict[str, Any]:
    if len(text) > OPTION_BYTES_MAX:
        refuse(name, f"is longer than {OPTION_BYTES_MAX} characters")
    try:
        document = json.loads(text)
    except ValueError:
        refuse(name, example)
    if not isinstance(document, dict):
        refuse(name, example)
    return document


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _duration_s(options: Mapping[str, str], name: str, *, default_s: float) -> float:
    text = options.get(name)
    if text is None:
        return default_s
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        refuse(name, f"must be a time such as 500ms, 30s or 15m, not {text!r}")
    return int(match[1]) * _DURATION_UNIT_S[match[2] or "ms"]
