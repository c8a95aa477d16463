"""The options of the source, under the names of Spark's Kafka source.

Promises: every option is checked before anything is asked of a broker; a wrong one is an error that names the option meant, so no typo
is ignored. Must not know: Spark, sockets.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NoReturn, TypeVar

from polywire.errors import ErrorCode, Invalid
from polywire.spark.offsets import PartitionKey

LATEST_OFFSET: Final = -1  # Kafka's numbers inside startingOffsets and endingOffsets
EARLIEST_OFFSET: Final = -2
ADDRESS_DEFAULT: Final = "127.0.0.1:9555"  # where `polywire serve` listens for the polywire wire unless told otherwise
OPTION_BYTES_MAX: Final = 1 << 20  # of one JSON option: some 20,000 partitions

_T = TypeVar("_T")

OPTIONS: Final = (
    "address", "bootstrap.servers", "kafka.bootstrap.servers",
    "subscribe", "subscribePattern", "assign",
    "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy",
    "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp",
    "failOnDataLoss", "includeHeaders",
    "minPartitions", "maxRecordsPerPartition",
    "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay",
    "kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs",
    "groupIdPrefix", "kafka.group.id",
)  # fmt: skip
_STREAM_ONLY_BATCH: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_SOURCES: Final = ("subscribe", "subscribePattern", "assign")
_ADDRESSES: Final = ("address", "kafka.bootstrap.servers", "bootstrap.servers")
_DURATION: Final = re.compile(r"(\d+)\s*(ms|s|m|min|h)?")
_DURATION_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class Edge(Enum):
    """One of the two ends of a partition."""

    EARLIEST = "earliest"
    LATEST = "latest"


class MissingTime(Enum):
    """What to do where no record is at or after a starting time (startingOffsetsByTimestampStrategy)."""

    ERROR = "error"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class ByOffset:
    """An offset for every partition; -1 is latest, -2 earliest."""

    offsets: Mapping[PartitionKey, int]


@dataclass(frozen=True, slots=True)
class ByTime:
    """The first record at or after a time (µs): one for all partitions, or one for each."""

    time_us: int | None
    times_us: Mapping[PartitionKey, int]

    def of(self, key: PartitionKey) -> int | None:
        """The time that applies to a partition; None where none was given."""
        return self.time_us if self.time_us is not None else self.times_us.get(key)


Place = Edge | ByOffset | ByTime


@dataclass(frozen=True, slots=True)
class Subscription:
    """What to read: named topics, topics whose full name a pattern matches, or chosen partitions. Exactly one is set."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    partitions: tuple[PartitionKey, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """All options of a read, checked. Counts are records, None is no limit. ``group`` is told a stream's positions, to show its lag."""

    addresses: tuple[str, ...]
    subscription: Subscription
    starting: Place
    ending: Place
    missing_time: MissingTime
    fail_on_data_loss: bool
    include_headers: bool
    partitions_min: int | None
    partition_records_max: int | None
    trigger_records_max: int | None
    trigger_bytes_max: int | None
    trigger_records_min: int | None
    trigger_delay_s: float
    group: str | None


def read_options(given: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Check and type the options of a read. Keys are compared without case. Raises Invalid(INVALID_REQUEST)."""
    options = _known(given)
    if streaming:
        for name in _STREAM_ONLY_BATCH:
            if name in options:
                _refuse(name, "has no meaning in a streaming query: a stream has no end")
    return SourceOptions(
        addresses=_addresses(options),
        subscription=_subscription(options),
        starting=_starting(options, streaming=streaming),
        ending=_ending(options),
        missing_time=_choice(options, "startingOffsetsByTimestampStrategy", MissingTime, MissingTime.ERROR),
        fail_on_data_loss=_switch(options, "failOnDataLoss", default=True),
        include_headers=_switch(options, "includeHeaders", default=False),
        partitions_min=_count(options, "minPartitions"),
        partition_records_max=_count(options, "maxRecordsPerPartition"),
        trigger_records_max=_count(options, "maxOffsetsPerTrigger"),
        trigger_bytes_max=_count(options, "maxBytesPerTrigger"),
        trigger_records_min=_count(options, "minOffsetsPerTrigger"),
        trigger_delay_s=_duration_s(options, "maxTriggerDelay", default_s=15 * 60.0),
        group=options.get("kafka.group.id"),
    )


def _known(given: Mapping[str, str]) -> dict[str, str]:
    by_lower = {name.lower(): name for name in OPTIONS}
    options: dict[str, str] = {}
    for key, value in given.items():
        name = by_lower.get(key.lower())
        if name is None:
            _refuse_unknown(key, by_lower)
        options[name] = value
    return options


def _refuse_unknown(key: str, by_lower: Mapping[str, str]) -> NoReturn:
    if key.lower() == "path":
        _refuse("path", "is not used; name topics with the option subscribe")
    if key.lower().startswith("kafka."):
        _refuse(key, "configures Kafka's own consumer and has no meaning here; remove it")
    near = difflib.get_close_matches(key.lower(), by_lower, n=1, cutoff=0.6)
    meant = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
    raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown option{meant} option={key!r}")


def _refuse(name: str, why: str) -> NoReturn:
    raise Invalid(ErrorCode.INVALID_REQUEST, f"the option {name} {why} option={name!r}")


def _addresses(options: Mapping[str, str]) -> tuple[str, ...]:
    given = [name for name in _ADDRESSES if name in options]
    if not given:
        return (ADDRESS_DEFAULT,)
    if len(given) > 1:
        _refuse("address", f"is given more than once, under the names {', '.join(given)}")
    addresses = tuple(part.strip() for part in options[given[0]].split(",") if part.strip())
    for address in addresses:
        host, colon, port = address.removeprefix("polywire://").rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
            _refuse(given[0], f"must be host:port, or several with commas between, not {address!r}")
    if not addresses:
        _refuse(given[0], "is empty")
    return addresses


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
        topics = tuple(sorted({part.strip() for part in text.split(",") if part.strip()}))
        if not topics:
            _refuse(name, "names no topic")
        return Subscription(topics=topics)
    if name == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            _refuse(name, f"is not a regular expression ({error})")
        return Subscription(pattern=text)
    return Subscription(partitions=_assigned(text))


def _assigned(text: str) -> tuple[PartitionKey, ...]:
    example = 'must be JSON such as {"orders":[0,1]}'
    document = _document("assign", text, example)
    keys: set[PartitionKey] = set()
    for topic, numbers in document.items():
        if not isinstance(numbers, list) or not all(_is_whole(number) and number >= 0 for number in numbers):
            _refuse("assign", example)
        keys.update(PartitionKey(topic, number) for number in numbers)
    if not keys:
        _refuse("assign", "names no partition")
    return tuple(sorted(keys))


def _starting(options: Mapping[str, str], *, streaming: bool) -> Place:
    """Kafka's precedence: startingTimestamp, startingOffsetsByTimestamp, startingOffsets."""
    timed = _timed(options, "startingTimestamp", "startingOffsetsByTimestamp")
    if timed is not None:
        return timed
    place = _place(options, "startingOffsets", Edge.LATEST if streaming else Edge.EARLIEST)
    if not streaming and (
        place is Edge.LATEST or (isinstance(place, ByOffset) and LATEST_OFFSET in place.offsets.values())
    ):
        _refuse("startingOffsets", "cannot be latest (-1) in a batch read: nothing would be read")
    return place


def _ending(options: Mapping[str, str]) -> Place:
    timed = _timed(options, "endingTimestamp", "endingOffsetsByTimestamp")
    if timed is not None:
        return timed
    place = _place(options, "endingOffsets", Edge.LATEST)
    if place is Edge.EARLIEST or (isinstance(place, ByOffset) and EARLIEST_OFFSET in place.offsets.values()):
        _refuse("endingOffsets", "cannot be earliest (-2): nothing would be read")
    return place


def _place(options: Mapping[str, str], name: str, default: Edge) -> Edge | ByOffset:
    text = options.get(name)
    if text is None:
        return default
    if text.strip().lower() in ("earliest", "latest"):
        return Edge(text.strip().lower())
    return ByOffset(_by_partition(name, text, lowest=EARLIEST_OFFSET))


def _timed(options: Mapping[str, str], single: str, many: str) -> ByTime | None:
    """Kafka gives times in milliseconds."""
    if single in options:
        time_ms = _count(options, single, zero=True)
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
            _refuse(name, example)
        for number, value in entries.items():
            if not number.isdecimal() or not _is_whole(value) or value < lowest:
                _refuse(name, f"{example}; wrong at {topic!r} partition {number!r}")
            found[PartitionKey(topic, int(number))] = value
    if not found:
        _refuse(name, example)
    return found


def _document(name: str, text: str, example: str) -> dict[str, Any]:
    if len(text) > OPTION_BYTES_MAX:
        _refuse(name, f"is longer than {OPTION_BYTES_MAX} characters")
    try:
        document = json.loads(text)
    except ValueError:
        _refuse(name, example)
    if not isinstance(document, dict):
        _refuse(name, example)
    return document


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _switch(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        _refuse(name, f"must be true or false, not {text!r}")
    return text == "true"


def _count(options: Mapping[str, str], name: str, *, zero: bool = False) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or (int(text) == 0 and not zero):
        _refuse(name, f"must be a whole number {'of 0 or more' if zero else 'above 0'}, not {text!r}")
    return int(text)


def _duration_s(options: Mapping[str, str], name: str, *, default_s: float) -> float:
    text = options.get(name)
    if text is None:
        return default_s
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        _refuse(name, f"must be a time such as 500ms, 30s or 15m, not {text!r}")
    return int(match[1]) * _DURATION_UNIT_S[match[2] or "ms"]


def _choice(options: Mapping[str, str], name: str, kind: Callable[[str], _T], default: _T) -> _T:
    text = options.get(name)
    if text is None:
        return default
    try:
        return kind(text.strip().lower())
    except ValueError:
        _refuse(name, f"must be error or latest, not {text!r}")
