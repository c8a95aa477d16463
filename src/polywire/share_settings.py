"""The settings of a share group. Names and defaults are those of Apache Kafka 4.3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from polywire.errors import ErrorCode, Invalid
from polywire.types import TopicName, check_topic_name

AUTO_OFFSET_RESET: Final = "share.auto.offset.reset"
ISOLATION_LEVEL: Final = "share.isolation.level"
RENEW_ENABLED: Final = "share.renew.acknowledge.enable"
SESSION_TIMEOUT: Final = "share.session.timeout.ms"
HEARTBEAT_INTERVAL: Final = "share.heartbeat.interval.ms"
LOCK_DURATION: Final = "share.record.lock.duration.ms"
DELIVERIES: Final = "share.delivery.count.limit"
UNFINISHED: Final = "share.partition.max.record.locks"
ORDER: Final = "share.order"  # Apache Kafka does not have it
DEAD_LETTERS: Final = "errors.deadletterqueue.topic.name"  # KIP-1191; Apache Kafka 4.3 does not have it yet

MS: Final = 1000
_HOUR_MS: Final = 3_600_000


class Number(NamedTuple):
    """A numeric setting: its default and its limits, both included."""

    default: int
    min: int
    max: int


class Setting(NamedTuple):
    """The meaning of a setting, and its values if there are only a few."""

    meaning: str
    choices: tuple[str, ...] = ()


NUMBERS: Final[Mapping[str, Number]] = {
    SESSION_TIMEOUT: Number(45_000, 1_000, _HOUR_MS),
    HEARTBEAT_INTERVAL: Number(5_000, 100, 60_000),
    LOCK_DURATION: Number(30_000, 1_000, 12 * _HOUR_MS),
    DELIVERIES: Number(5, 1, 1_000),
    UNFINISHED: Number(2_000, 100, 10_000),
}
"""Kafka limits the lock duration to 15 to 60 s, the deliveries to 2 to 10 and the record locks to 100 to 4,000."""

TEXTS: Final[Mapping[str, str]] = {
    AUTO_OFFSET_RESET: "latest",
    ISOLATION_LEVEL: "read_uncommitted",
    RENEW_ENABLED: "true",
    DEAD_LETTERS: "",
    ORDER: "none",
}

DEFAULTS: Final[Mapping[str, str]] = {**{name: str(number.default) for name, number in NUMBERS.items()}, **TEXTS}

SETTINGS: Final[Mapping[str, Setting]] = {
    DELIVERIES: Setting("Deliveries of a record, after which it is rejected instead of released."),
    LOCK_DURATION: Setting("How long a worker may hold a record without renewing its lock, in milliseconds."),
    DEAD_LETTERS: Setting("Topic for rejected records; without one they are only counted."),
    AUTO_OFFSET_RESET: Setting("Where a new queue begins in a partition."),
    ORDER: Setting("Whether records with the same key are given to workers one at a time, in order.", ("none", "key")),
    UNFINISHED: Setting("Unfinished records of a partition, above which further ones wait."),
    RENEW_ENABLED: Setting("Whether workers may renew locks.", ("true", "false")),
    ISOLATION_LEVEL: Setting(
        "Has no effect: workers never get records of open or aborted transactions.",
        ("read_uncommitted", "read_committed"),
    ),
    SESSION_TIMEOUT: Setting("A Kafka member without a heartbeat for this long is removed, in milliseconds."),
    HEARTBEAT_INTERVAL: Setting("Interval of the heartbeats of Kafka members, in milliseconds."),
}
"""All settings, those that are changed most first."""
# an ISO 8601 duration of days, hours, minutes and seconds, as Kafka accepts it
_DURATION: Final = r"P(?=.)(?:(\d+)D)?(?:T(?=.)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d{1,9})?)S)?)?"
_BY_DURATION: Final = "by_duration:"
_DIGITS_MAX: Final = 40  # length limit of a duration's text


class ShareSettings(NamedTuple):
    """Settings of a share group, decoded.

    Attributes:
        start_age_us: a new group begins with records that are at most this old. 0 for the end of the partition, None
            for its beginning.
        session_timeout_s: a member without a heartbeat for this long is removed.
        lock_s: how long a member may hold a record without renewing it.
        deliveries_max: a record is rejected when it was delivered this often and is released.
        unfinished_max: acquired and released records of one partition; records beyond them wait.
        dead_letters: full name of the topic for rejected records, or empty.
        by_key: records with the same key are delivered one at a time.
    """

    start_age_us: int | None
    session_timeout_s: float
    heartbeat_interval_ms: int
    lock_s: float
    deliveries_max: int
    unfinished_max: int
    renews: bool
    dead_letters: str
    by_key: bool

    @property
    def lock_ms(self) -> int:
        return round(self.lock_s * MS)


def check(name: str, value: str) -> None:
    """Check one setting.

    Raises Invalid(INVALID_REQUEST) for an unknown name or an invalid value.
    """
    number = NUMBERS.get(name)
    if number is not None:
        if not re.fullmatch(r"\d{1,18}", value) or not number.min <= int(value) <= number.max:
            raise _invalid(name, value)
    elif name in (ISOLATION_LEVEL, RENEW_ENABLED, ORDER):
        if value.lower() not in SETTINGS[name].choices:
            raise _invalid(name, value)
    elif name == AUTO_OFFSET_RESET:
        if value.lower() not in ("earliest", "latest") and _duration_us(value) is None:
            raise _invalid(name, value)
    elif name == DEAD_LETTERS:
        if value:
            check_topic_name(TopicName.parse(value))
    else:
        known = ", ".join(sorted(DEFAULTS))
        raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown setting of a share group: {name!r} (use one of {known})")


def spelled(name: str) -> str:
    """Return which values a setting has, as text."""
    number = NUMBERS.get(name)
    if number is not None:
        return f"a number from {number.min} to {number.max}"
    if name == AUTO_OFFSET_RESET:
        return "earliest, latest or by_duration:P7D"
    return " or ".join(SETTINGS[name].choices) or "name of a topic"


def _invalid(name: str, value: str) -> Invalid:
    return Invalid(ErrorCode.INVALID_REQUEST, f"invalid value of {name} (use {spelled(name)}) value={value!r}")


def _duration_us(value: str) -> int | None:
    if not value.lower().startswith(_BY_DURATION) or len(value) > _DIGITS_MAX:
        return None
    found = re.fullmatch(_DURATION, value[len(_BY_DURATION) :].upper())
    if found is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return int((days * 86_400 + hours * 3_600 + minutes * 60 + seconds) * 1_000_000)


def decoded(settings: Mapping[str, str]) -> ShareSettings:
    """Return checked settings, with defaults for missing ones."""

    def number(name: str) -> int:
        return int(settings.get(name, NUMBERS[name].default))

    reset = settings.get(AUTO_OFFSET_RESET, TEXTS[AUTO_OFFSET_RESET])
    return ShareSettings(
        start_age_us=0 if reset.lower() == "latest" else _duration_us(reset),
        session_timeout_s=number(SESSION_TIMEOUT) / MS,
        heartbeat_interval_ms=number(HEARTBEAT_INTERVAL),
        lock_s=number(LOCK_DURATION) / MS,
        deliveries_max=number(DELIVERIES),
        unfinished_max=number(UNFINISHED),
        renews=settings.get(RENEW_ENABLED, "true").lower() == "true",
        dead_letters=settings.get(DEAD_LETTERS, ""),
        by_key=settings.get(ORDER, "").lower() == "key",
    )


DEFAULT_SETTINGS: Final = decoded({})
