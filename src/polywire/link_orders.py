"""Definitions of links, and the messages to and from the process that runs them.

The messages are JSON lines over the standard input and output of that process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from hashlib import blake2b
from typing import Final
from urllib.parse import unquote

import msgspec

WRITER_PREFIX: Final = "link/"
"""Writers of links begin with this. The number of their last publish is the position of the link at the source."""

PAUSED: Final = "paused"
STARTING: Final = "starting"
RUNNING: Final = "running"
FAILING: Final = "failing"
REVERSIBLE: Final = ("kafka", "polywire")
"""Protocols over which a link can write each record once to its source."""
LINK_STATES: Final = (STARTING, RUNNING, PAUSED, FAILING)

EVERY_GROUP: Final = "*"
QUIET_MS: Final = 300
QUIET_MS_MAX: Final = 60_000


class Phase(Enum):
    """The state of one topic of a link.

    Attributes:
        FOLLOWING: the link copies the topic, which is read-only for other clients.
        WAITING: as ``FOLLOWING``, and a cut-over waits until everything is copied.
        CUT_OVER: the link has ended the copy, and clients may write to the topic.
        REVERSED: as ``CUT_OVER``, and the link copies new records to the source, so that clients can go back.
    """

    FOLLOWING = "following"
    WAITING = "waiting"
    CUT_OVER = "cut-over"
    REVERSED = "reversed"


class LinkStart(Enum):
    """Where a link begins to read a topic that it has not read before."""

    EARLIEST = "earliest"
    LATEST = "latest"


class CutOver(msgspec.Struct, frozen=True):
    """The end of the copy of one topic. After it, clients write to the topic here.

    Attributes:
        topic: full name.
        ends: by partition, the location at the source after the last record that was copied.
        here: by partition, the offset here after that record.
        at_us: when it was stored.
        reverse: whether later records are copied to the source.
        producer: id of the producer that copies them, if the source is Kafka.
    """

    topic: str
    ends: tuple[int, ...]
    here: tuple[int, ...]
    at_us: int = 0
    reverse: bool = False
    producer: int = -1


class LinkDefinition(msgspec.Struct, frozen=True):
    """A link, as it is stored. Fields are only added at the end, with a default.

    Attributes:
        source: URL of the broker to read from, with its password.
        topics: names and patterns of the topics to follow.
        groups: names and patterns of the consumer groups whose offsets are carried.
        cut_overs: topics that were cut over.
    """

    name: str
    source: str
    topics: tuple[str, ...]
    start: LinkStart = LinkStart.EARLIEST
    paused: bool = False
    created_at_us: int = 0
    groups: tuple[str, ...] = (EVERY_GROUP,)
    cut_overs: tuple[CutOver, ...] = ()

    def cut_over(self, topic: str) -> CutOver | None:
        """Return the cut-over of a topic, or None if the topic is followed."""
        return next((found for found in self.cut_overs if found.topic == topic), None)

    @property
    def address(self) -> str:
        """The URL of the source without the login."""
        scheme, separator, rest = self.source.rpartition("://")
        return f"{scheme}{separator}{rest.rpartition('@')[2]}"

    @property
    def user(self) -> str:
        """The name in the login of the source; empty if it has none."""
        return unquote(self.source.rpartition("://")[2].rpartition("@")[0].partition(":")[0])

    @property
    def writer_prefix(self) -> str:
        """The beginning of the names of this link's writers.

        It contains the address, because positions of one source are wrong for another.
        """
        digest = blake2b(self.address.encode("utf-8", "replace"), digest_size=6).hexdigest()
        return f"{WRITER_PREFIX}{self.name}/{digest}/"


class Closing(msgspec.Struct, frozen=True):
    """A requested cut-over of one topic, or a requested fall-back, which ends a cut-over.

    Attributes:
        number: identifies the request.
        quiet_ms: milliseconds for which nothing must be written before it.
        reverse: whether later records are copied to the source.
        is_held: it is being stored. The topic must not be copied until the broker has decided.
    """

    number: int
    quiet_ms: int
    is_held: bool = False
    reverse: bool = False


class LinkOrders(msgspec.Struct, frozen=True):
    """All links. They replace the links of earlier messages.

    Attributes:
        closing: requested cut-overs and fall-backs, by link and topic.
    """

    links: tuple[LinkDefinition, ...]
    closing: dict[str, dict[str, Closing]] = {}


class GroupReport(msgspec.Struct, frozen=True):
    """A consumer group on one topic, with its offsets at both ends.

    Attributes:
        source: sum of the offsets that it has committed at the source.
        here: sum of the offsets that it has committed here.
        active: where it has members: ``source``, ``here``, ``both``, or empty.
        skipped: partitions whose offsets cannot be carried, because records have other offsets here.
        error: why its offsets were not carried.
    """

    group: str
    topic: str
    source: int = 0
    here: int = 0
    active: str = ""
    skipped: int = 0
    error: str = ""


class LinkReport(msgspec.Struct, frozen=True):
    """The state of one topic of a link, or of the link as a whole.

    Attributes:
        topic: full name of the topic; empty for the state of the link.
        partitions: number of partitions.
        copied: records copied since the process was started.
        lag: records of the source that are not copied. Bytes, if the source is Kafka 0.7.
        lag_s: age of the newest record that was copied, in seconds; 0 if there is no lag.
        rate: records per second that were copied in the last seconds.
        skipped: records that retention removed at the source before they were copied.
        shifted: partitions in which records have another offset than at the source.
        settings: settings of the source that the topic here does not have, as ``name=value``, separated by commas.
        error: why the last attempt failed; empty if it succeeded.
        late: records that were written at the source after the cut-over. They are not copied.
        late_command: command that shows the first of them.
        pause_s: seconds from the last record at the source until clients could write here, after a cut-over.
        settled: the cut-over that is possible now, for the request ``closing``. The process does not copy the topic until
            that request has ended.
        groups: the groups whose offsets the link carries, in reports without a topic.
        group_error: why the offsets of groups are not carried.
        topics: number of topics that the link has found, in reports without a topic; -1 before it has searched for them.
    """

    link: str
    topic: str = ""
    partitions: int = 0
    copied: int = 0
    lag: int = 0
    lag_s: float = 0.0
    rate: float = 0.0
    skipped: int = 0
    shifted: int = 0
    error: str = ""
    phase: Phase = Phase.FOLLOWING
    late: int = 0
    late_command: str = ""
    pause_s: float = 0.0
    settled: CutOver | None = None
    closing: int = 0
    groups: tuple[GroupReport, ...] = ()
    group_error: str = ""
    settings: str = ""
    topics: int = -1


class PlannedTopic(msgspec.Struct, frozen=True):
    """The effect that a link would have on one topic.

    Attributes:
        records: records to copy now.
        creates: whether the topic does not exist here yet.
        offsets: ``same`` or ``differ``: whether records get the offsets that they have at the source, provided that the
            source has no gaps.
        error: why the topic cannot be followed.
        settings: settings that the topic gets if it is created.
        other_settings: settings of the source that do not exist here, as ``name=value``.
    """

    topic: str
    partitions: int = 0
    records: int = 0
    creates: bool = False
    offsets: str = "same"
    error: str = ""
    settings: dict[str, int | str | None] = {}
    other_settings: list[str] = []


class LinkPlan(msgspec.Struct, frozen=True):
    """The result of checking a link. If ``code`` is not empty, it is the error that the check raised.

    Attributes:
        kind: name of the error's class.
        code: value of the error's code.
        notes: what the source's protocol cannot provide.
        groups: names of the groups whose offsets the link would carry.
    """

    topics: tuple[PlannedTopic, ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = ""
    code: str = ""
    message: str = ""
    groups: tuple[str, ...] = ()


class LinkView(msgspec.Struct, frozen=True):
    """A link and the last reports on it, by topic. The report without a topic is about the connection."""

    link: LinkDefinition
    reports: Mapping[str, LinkReport]

    @property
    def state(self) -> str:
        if self.link.paused:
            return PAUSED
        if not self.reports:
            return STARTING
        return FAILING if self.error else RUNNING

    @property
    def is_complete(self) -> bool:
        """Whether each topic that the link has found has a report, so that ``reports`` has all topics."""
        return "" in self.reports and 0 <= self.reports[""].topics <= len(self.reports) - 1

    @property
    def error(self) -> str:
        """The reason why the link, or one of its topics, fails."""
        return next((report.error for _, report in sorted(self.reports.items()) if report.error), "")

    @property
    def groups(self) -> tuple[GroupReport, ...]:
        """The groups whose offsets the link carries."""
        return self.reports[""].groups if "" in self.reports else ()

    @property
    def group_error(self) -> str:
        """Why the offsets of groups are not carried, for the link as a whole or for one group."""
        whole = self.reports[""].group_error if "" in self.reports else ""
        return whole or next((group.error for group in self.groups if group.error), "")

    def knows_lag(self, report: LinkReport) -> bool:
        """Whether the lag of a topic is current. While a topic cannot be copied, its source may have more records."""
        whole = self.reports.get("")
        return not report.error and (whole is None or not whole.error)

    def topics(self) -> Iterator[LinkReport]:
        """Yield the reports on topics, sorted by name."""
        return (report for name, report in sorted(self.reports.items()) if name)
