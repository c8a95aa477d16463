"""Options of the source and of the sink, with the names of Spark's Kafka source and sink, and of Delta's idempotent writes.

Every option is checked before any request to a broker. A wrong name or value raises an error that suggests the right
option.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NoReturn, TypeVar

from polywire import names
from polywire.choices import did_you_mean
from polywire.client.address import PASSWORD_VARIABLE, Login, login_of
from polywire.client.bulk import RECONNECT_S, TIMEOUT_S
from polywire.errors import ErrorCode, Invalid
from polywire.spark.offsets import PartitionKey
from polywire.types import Level

ADDRESS_DEFAULT: Final = "127.0.0.1:9555"  # default of `polywire serve` for the polywire protocol
ADDRESSES: Final = ("address", "kafka.bootstrap.servers", "bootstrap.servers")
LOGIN: Final = ("user", "password")

# Spark's Kafka source and sink refuse these, too. The text says what to do instead.
_CAST_COLUMNS: Final = "is not supported: keys and values are binary here; cast the columns in the query"
_REFUSED_AS_BY_KAFKA: Final = {
    "group.id": "is not supported: a query keeps its positions in its checkpoint; set commitGroup to show them as a group",
    "auto.offset.reset": "is not supported: set startingOffsets",
    "enable.auto.commit": "is not supported: a query keeps its positions in its checkpoint; remove it",
    "interceptor.classes": "is not supported; remove it",
    "key.deserializer": _CAST_COLUMNS,
    "value.deserializer": _CAST_COLUMNS,
    "key.serializer": _CAST_COLUMNS,
    "value.serializer": _CAST_COLUMNS,
}

_T = TypeVar("_T")
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
SOURCE_OPTIONS: Final = (
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
# Settings of Kafka's producer without a counterpart here: accepted without effect, so that existing code runs.
WITHOUT_EFFECT: Final = (
    "includeHeaders",
    "kafka.batch.size", "kafka.buffer.memory", "kafka.client.id", "kafka.compression.type",
    "kafka.enable.idempotence", "kafka.linger.ms", "kafka.max.block.ms", "kafka.max.in.flight.requests.per.connection",
    "kafka.max.request.size", "kafka.retries",
)  # fmt: skip
# Spark also passes its own options of a query to the sink.
OF_SPARK: Final = ("checkpointLocation", "queryName", "outputMode")
SINK_OPTIONS: Final = (
    *ADDRESSES, *LOGIN,
    "topic", "createTopics", "exactlyOnce", "sinkId", "txnAppId", "txnId", "txnVersion", "acks", "kafka.acks",
    "kafka.delivery.timeout.ms", "kafka.request.timeout.ms",
    *WITHOUT_EFFECT, *OF_SPARK,
)  # fmt: skip
NUMBER_MAX: Final = 2**63 - 1
_LEVELS: Final = {"0": Level.MEMORY, "1": Level.WRITTEN, "all": Level.SYNCED, "-1": Level.SYNCED}


def known(given: Mapping[str, str], names: Sequence[str], *, topics: str) -> dict[str, str]:
    """Return the options with their names spelled as in ``names``. The case of a name is ignored.

    ``topics`` is the name of the option that selects topics. Raises Invalid(INVALID_REQUEST) for any other name.
    """
    by_lower = {name.lower(): name for name in names}
    options: dict[str, str] = {}
    for key, value in given.items():
        name = by_lower.get(key.lower())
        if name is None:
            _refuse_unknown(key, by_lower, topics)
        options[name] = value
    return options


def _refuse_unknown(key: str, by_lower: Mapping[str, str], topics: str) -> NoReturn:
    if key.lower() == "path":
        refuse("path", f"is not used; name topics with the option {topics}")
    for ending, why in _REFUSED_AS_BY_KAFKA.items():
        if key.lower().removeprefix("kafka.") == ending:
            refuse(key, why)
    if key.lower().startswith("kafka."):
        refuse(key, "configures Kafka's own client and has no meaning here; remove it")
    raise Invalid(
        ErrorCode.INVALID_REQUEST, f"unknown option{did_you_mean(key, sorted(by_lower.values()))} option={key!r}"
    )


def refuse(name: str, why: str) -> NoReturn:
    """Raise Invalid(INVALID_REQUEST) for an option."""
    raise Invalid(ErrorCode.INVALID_REQUEST, f"the option {name} {why}")


def addresses(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the brokers' addresses (``host:port``) from the one of three options that is set."""
    given = [name for name in ADDRESSES if name in options]
    if not given:
        return (ADDRESS_DEFAULT,)
    if len(given) > 1:
        refuse("address", f"is given more than once, under the names {', '.join(given)}")
    found = tuple(_without_name(given[0], part.strip()) for part in options[given[0]].split(",") if part.strip())
    for address in found:
        host, colon, port = address.removeprefix("polywire+tls://").removeprefix("polywire://").rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            refuse(given[0], f"must be host:port, or several separated by commas, not {address!r}")
    if not found:
        refuse(given[0], "is empty")
    return found


def _without_name(option: str, address: str) -> str:
    scheme, separator, rest = address.rpartition("://")
    name, _, host = rest.rpartition("@")
    if ":" in name:
        refuse(option, "must not contain a password, because Spark shows it: set the options user and password")
    return f"{scheme}{separator}{host}"


def login(options: Mapping[str, str]) -> Login | None:
    """Return the login from the options user and password, or from the name before an address.

    The password may also come from the environment.
    """
    named = [options[name].rpartition("://")[2].rpartition("@")[0] for name in ADDRESSES if name in options]
    user, password = options.get("user", "").strip() or next(iter(named), ""), options.get("password")
    if not user:
        if password is not None:
            refuse("password", "needs the option user")
        return None
    try:
        return login_of(user, password)
    except Invalid:
        refuse("user", f"needs the option password, or the variable {PASSWORD_VARIABLE} where the query is started")


def switch(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Convert ``true`` or ``false`` to bool."""
    text = options.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        refuse(name, f"must be true or false, not {text!r}")
    return text == "true"


def count(options: Mapping[str, str], name: str, *, zero: bool = False) -> int | None:
    """Convert a whole number above 0 (with ``zero``, at least 0). Return None if the option is absent."""
    text = options.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or (int(text) == 0 and not zero):
        refuse(name, f"must be a whole number {'of 0 or more' if zero else 'above 0'}, not {text!r}")
    return int(text)


def choice(
    options: Mapping[str, str], name: str, kind: Callable[[str], _T], default: _T, *, among: Sequence[str]
) -> _T:
    """Convert one of the words in ``among`` with ``kind``, an enum with these values."""
    text = options.get(name)
    if text is None:
        return default
    try:
        return kind(text.strip().lower())
    except ValueError:
        refuse(name, f"must be {', '.join(among[:-1])} or {among[-1]}, not {text!r}")


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
    """Whether tasks read segment files directly from the broker's directory or bucket (localSegments)."""

    AUTO = "auto"
    OFF = "off"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ByOffset:
    """An offset for every partition. -1 is latest, -2 earliest."""

    offsets: Mapping[PartitionKey, int]


@dataclass(frozen=True, slots=True)
class ByTime:
    """Start at the first record at or after a time in µs, which is one for all partitions or one for each."""

    time_us: int | None
    times_us: Mapping[PartitionKey, int]

    def of(self, key: PartitionKey) -> int | None:
        """Return the time for a partition, or None."""
        return self.time_us if self.time_us is not None else self.times_us.get(key)


OffsetSpec = Edge | ByOffset | ByTime


@dataclass(frozen=True, slots=True)
class Subscription:
    """The topics to read: topics by name, topics whose full name matches a pattern, or partitions.

    Exactly one of them is set.
    """

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
    options = known(given, SOURCE_OPTIONS, topics="subscribe")
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
    """Return how many seconds to retry. Kafka's options can raise the default, but not lower it."""
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
    """Return whether records that the query's filters exclude may be skipped.

    Spark 4.3 can apply the filters of one query to a later query over the same DataFrame. Therefore the option does not
    accept ``true``, but only a value that states the condition.
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
    """Return where a read starts.

    As with Kafka, startingTimestamp has precedence over startingOffsetsByTimestamp, which has it over startingOffsets.
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
    """Return times in µs. Kafka's options have milliseconds."""
    if single in options:
        time_ms = count(options, single, zero=True)
        return ByTime(time_us=_us(time_ms or 0), times_us={})
    if many in options:
        times_ms = _by_partition(many, options[many], lowest=0)
        return ByTime(time_us=None, times_us={key: _us(time_ms) for key, time_ms in times_ms.items()})
    return None


def _us(time_ms: int) -> int:
    """Return a time in µs. Times that do not fit 64 bits are after all records, like the last one that does."""
    return min(time_ms * 1000, NUMBER_MAX)


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


class Guarantee(Enum):
    """Whether each row is stored exactly once or at least once (exactlyOnce)."""

    PUBLISHED = "true"  # staged by tasks and published by the driver: stored once
    # appended directly, with sequences: stored once if a repeated batch is divided into the same tasks
    SEQUENCE = "sequence"
    AT_LEAST_ONCE = "false"


@dataclass(frozen=True, slots=True)
class Transaction:
    """Id of a batch write (txnAppId, txnId). A second write with the same id has no effect."""

    application: str
    number: int


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """All options of a write, checked.

    Attributes:
        topic: topic of every row; None uses the column topic.
        sink_id: identifies a streaming query to the broker, instead of the id in its checkpoint.
        level: durability level of appends without ``exactlyOnce``.
        timeout_s: longest wait for one response.
        reconnect_s: how long an unreachable broker is retried.
    """

    addresses: tuple[str, ...]
    login: Login | None
    topic: str | None
    create_topics: bool
    guarantee: Guarantee
    sink_id: str | None
    transaction: Transaction | None
    level: Level
    timeout_s: float
    reconnect_s: float


def write_options(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Check and convert the options of a write. Names ignore case. Raises Invalid(INVALID_REQUEST)."""
    options = known(given, SINK_OPTIONS, topics="topic")
    guarantee = choice(
        options, "exactlyOnce", Guarantee, Guarantee.PUBLISHED, among=[guarantee.value for guarantee in Guarantee]
    )
    transaction = _transaction(options)
    if streaming and transaction is not None:
        refuse("txnAppId", "is for batch writes inside foreachBatch; a streaming query has the option sinkId")
    if not streaming and "sinkId" in options:
        refuse("sinkId", "is for streaming queries; a batch write has the options txnAppId and txnId")
    if guarantee is Guarantee.SEQUENCE and not streaming and transaction is None:
        refuse("exactlyOnce", "can be sequence in a batch write only with the options txnAppId and txnId")
    return SinkOptions(
        addresses=addresses(options),
        login=login(options),
        topic=_name(options, "topic"),
        create_topics=switch(options, "createTopics", default=True),
        guarantee=guarantee,
        sink_id=_name(options, "sinkId"),
        transaction=transaction,
        level=_level(options),
        timeout_s=max(TIMEOUT_S, (count(options, "kafka.request.timeout.ms") or 0) / 1000),
        reconnect_s=max(RECONNECT_S, (count(options, "kafka.delivery.timeout.ms") or 0) / 1000),
    )


def _name(options: Mapping[str, str], name: str) -> str | None:
    text = options.get(name)
    if text is not None and not text.strip():
        refuse(name, "is empty")
    return text


def _transaction(options: Mapping[str, str]) -> Transaction | None:
    application = _name(options, "txnAppId")
    numbers = [name for name in ("txnId", "txnVersion") if name in options]
    if application is None and not numbers:
        return None
    if application is None or len(numbers) != 1:
        refuse(
            "txnAppId",
            "must be set together with exactly one of txnId and txnVersion (a number that increases with each write)",
        )
    text = options[numbers[0]].strip()
    if not text.isdecimal() or int(text) > NUMBER_MAX:
        refuse(numbers[0], f"must be a whole number of 0 or more, not {text!r}")
    return Transaction(application, int(text))


def _level(options: Mapping[str, str]) -> Level:
    given = [name for name in ("acks", "kafka.acks") if name in options]
    if not given:
        return Level.SYNCED
    if len(given) > 1:
        refuse("acks", "is given twice, once as kafka.acks")
    level = _LEVELS.get(options[given[0]].strip().lower())
    if level is None:
        refuse(given[0], f"must be 0, 1 or all, not {options[given[0]]!r}")
    return level
