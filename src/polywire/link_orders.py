"""Definitions of links, and the messages to and from the process that runs them.

The messages are JSON lines over the standard input and output of that process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
LINK_STATES: Final = (STARTING, RUNNING, PAUSED, FAILING)


class LinkStart(Enum):
    """Where a link begins to read a topic that it has not read before."""

    EARLIEST = "earliest"
    LATEST = "latest"


class LinkDefinition(msgspec.Struct, frozen=True):
    """A link, as it is stored. Fields are only added at the end, with a default.

    Attributes:
        source: URL of the broker to read from, with its password.
        topics: names and patterns of the topics to follow.
    """

    name: str
    source: str
    topics: tuple[str, ...]
    start: LinkStart = LinkStart.EARLIEST
    paused: bool = False
    created_at_us: int = 0

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


class LinkOrders(msgspec.Struct, frozen=True):
    """All links to run. It replaces the links of earlier messages."""

    links: tuple[LinkDefinition, ...]


class LinkReport(msgspec.Struct, frozen=True):
    """The state of one topic of a link, or of the link as a whole.

    Attributes:
        topic: full name of the topic; empty for the state of the link.
        partitions: number of partitions.
        copied: records copied since the process was started.
        lag: records of the source that are not copied. Bytes, if the source is Kafka 0.7.
        lag_s: age of the newest record that was copied, in seconds; 0 if there is no lag.
        rate: records per second that were copied lately.
        skipped: records that retention removed at the source before they were copied.
        shifted: partitions in which records have another offset than at the source.
        settings: settings of the source that the topic here does not have, as ``name=value``, separated by commas.
        error: why the last attempt failed; empty if it succeeded.
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
    settings: str = ""


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
    """

    topics: tuple[PlannedTopic, ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = ""
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class LinkView:
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
    def error(self) -> str:
        """The reason why the link, or one of its topics, fails."""
        return next((report.error for _, report in sorted(self.reports.items()) if report.error), "")

    def topics(self) -> Iterator[LinkReport]:
        """Yield the reports on topics, sorted by name."""
        return (report for name, report in sorted(self.reports.items()) if name)
