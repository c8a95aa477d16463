"""The topics of a broker and their partitions: look-up by name, and changes.

* A full name is unique over all streams and identifies one stream and topic (decision 0116).
* Incarnation numbers increase and are never reused, even after a restart.
* A change is first checked (``check_*``). Applying it (``apply_*``) then cannot fail.
* Earlier releases stored access lists as options of the Cursus protocol. These lists also apply to all protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec

from polywire.broker.changes import (
    PartitionsAdded,
    PartitionsRemoved,
    TopicConfigured,
    TopicCreated,
    TopicDeleted,
    TopicState,
)
from polywire.broker.owners import UNOWNED
from polywire.broker.quotas import Kind, Usage
from polywire.broker.settings import AccessList, BrokerSettings, TableFormat, TopicSettings
from polywire.broker.view import Views, encoded
from polywire.errors import Busy, Conflict, ErrorCode, Invalid, Missing
from polywire.log.base import PartitionLog
from polywire.names import table_directory
from polywire.types import DEFAULT_STREAM, TopicName, check_topic_name

INTERNAL_PREFIX = "__"  # topics with such a name belong to the broker and are not listed (concepts: records#names)
ACCESS_OPTIONS: Final = "cursus"  # the options under which earlier releases stored an access list


class Partition:
    """One partition of a topic.

    Attributes:
        log: the partition's records. Only recovery sees a partition before this is set.
        ended: whether the topic or the partition was deleted.
        link: name of the link that writes the topic, or empty.
    """

    __slots__ = ("ended", "incarnation", "link", "log", "number", "topic")

    log: PartitionLog

    def __init__(self, topic: Topic, number: int, incarnation: int) -> None:
        self.topic = topic
        self.number = number
        self.incarnation = incarnation
        self.ended = False
        self.link = topic.settings.link

    def attach(self, log: PartitionLog) -> None:
        """Set the partition's log and apply the topic's settings to it."""
        self.log = log
        self.configure()

    def configure(self) -> None:
        """Apply the topic's settings, after they changed."""
        self.link = self.topic.settings.link
        self.log.compression = self.topic.settings.stored_compression

    def __repr__(self) -> str:
        return f"Partition({self.topic.name.full!r}, {self.number}, incarnation={self.incarnation})"


class TableSettings(NamedTuple):
    """How a topic's table is written (concepts: tables)."""

    formats: TableFormat
    freshness_s: int
    history_hours: int
    columns: str = ""


class Topic:
    """One topic.

    Attributes:
        id: 16 random bytes. A new topic with the name of a deleted one has another id.
        owner: user who created it, and against whose quota it counts. Permissions do not depend on it.
    """

    __slots__ = ("created_at_us", "id", "name", "owner", "partitions", "settings")

    def __init__(
        self,
        name: TopicName,
        topic_id: bytes,
        settings: TopicSettings,
        created_at_us: int,
        owner: int = UNOWNED,
    ) -> None:
        self.owner = owner
        self.name = name
        self.id = topic_id
        self.partitions: list[Partition] = []
        self.settings = settings
        self.created_at_us = created_at_us

    def written_to(self) -> list[Partition]:
        """Return the partitions that can be written. Raises Missing(PARTITION_MISSING) if there are none."""
        if not self.partitions:
            raise Missing(ErrorCode.PARTITION_MISSING, f"topic has no partitions name={self.name.full!r}")
        return self.partitions

    def table_settings(self, defaults: BrokerSettings) -> TableSettings | None:
        """Return how to write the topic's table, or None if it has none.

        Internal topics have no table. If ``tables_url`` is not set, no topic has a table.
        """
        own = self.settings
        formats = own.table if own.table is not None else defaults.table
        if formats is TableFormat.NONE or not defaults.tables_url or is_internal(self.name):
            return None
        freshness_s, history_hours = own.table_freshness_s, own.table_history_hours
        return TableSettings(
            formats,
            defaults.table_freshness_s if freshness_s is None else freshness_s,
            defaults.table_history_hours if history_hours is None else history_hours,
            own.table_columns,
        )

    def table_url(self, defaults: BrokerSettings) -> str:
        """Return the URL of the topic's table, or an empty string if it has none."""
        if self.table_settings(defaults) is None:
            return ""
        return f"{defaults.tables_url}/{table_directory(self.name.stream, self.name.topic)}"

    def state(self) -> TopicState:
        """Return the topic as snapshots store it."""
        return TopicState(
            id=self.id,
            stream=self.name.stream,
            topic=self.name.topic,
            created_at_us=self.created_at_us,
            settings=self.settings,
            incarnations=tuple([partition.incarnation for partition in self.partitions]),
            owner=self.owner,
        )

    def __repr__(self) -> str:
        return f"Topic({self.name.full!r}, partitions={len(self.partitions)})"


def check_unlinked(topic: Topic) -> None:
    """Raise Conflict(TOPIC_LINKED) if a link writes the topic."""
    if topic.settings.link:
        raise linked(topic)


def linked(topic: Topic) -> Conflict:
    """Return the error for a change of a topic that a link writes."""
    name = topic.settings.link
    return Conflict(
        ErrorCode.TOPIC_LINKED,
        f"the topic is a copy that a link writes: cut it over first (polywire link cut-over {name}), or delete the link"
        f" topic={topic.name.full!r} link={name!r}",
    )


def is_internal(name: TopicName) -> bool:
    """Return whether the name is reserved for the broker."""
    return name.stream.startswith(INTERNAL_PREFIX) or name.topic.startswith(INTERNAL_PREFIX)


def missing(full_name: str) -> Missing:
    """Return the error for a topic that does not exist."""
    return Missing(ErrorCode.TOPIC_MISSING, f"no such topic name={full_name!r}")


class Streams:
    """Existing streams. A stream is a namespace of topics.

    A stream exists if it has topics, is named ``default``, or was created explicitly by a protocol such as Iggy.
    """

    __slots__ = ("_declared", "_topics")

    def __init__(self) -> None:
        # number of topics of each stream that has any
        self._topics: dict[str, int] = {}
        self._declared = {DEFAULT_STREAM}

    def exists(self, stream: str) -> bool:
        return stream in self._topics or stream in self._declared

    def declare(self, stream: str) -> None:
        """Create a stream without topics. It exists until ``end`` is called and it has no topics.

        The creation is not stored: the caller must store it, and repeat the call after a restart.
        """
        self._declared.add(stream)

    def end(self, stream: str) -> None:
        """Undo ``declare``. Afterwards the stream exists only while it has topics."""
        if stream != DEFAULT_STREAM:
            self._declared.discard(stream)

    def count(self, stream: str, added: int) -> None:
        self._topics[stream] = self._topics.get(stream, 0) + added
        if not self._topics[stream]:
            del self._topics[stream]


class Catalog:
    """All topics of this broker.

    Attributes:
        find: returns a topic by full name, or None. It is the dictionary's own method, because every request uses it.
        next_incarnation: incarnation number of the next partition, above that of every existing or deleted one.
        leaving: number of deleted partitions that the log has not dropped yet. They count towards the limit.
        version: increases whenever a topic is created or deleted.
        watchers: called with the id of each topic that is about to be created, changed or deleted.
    """

    __slots__ = (
        "_by_id",
        "_by_name",
        "_listed",
        "_partitions",
        "_settings",
        "_usage",
        "_views",
        "find",
        "leaving",
        "next_incarnation",
        "streams",
        "version",
        "watchers",
    )

    def __init__(self, settings: BrokerSettings, usage: Usage) -> None:
        self._settings = settings
        self._usage = usage
        self._by_name: Final[dict[str, Topic]] = {}
        self.find: Final[Callable[[str], Topic | None]] = self._by_name.get
        self._by_id: dict[bytes, Topic] = {}
        self._partitions: dict[int, Partition] = {}
        self._views: Final = Views(self._stored)
        self.streams: Final = Streams()
        self.next_incarnation = 1  # a batch header with incarnation 0 has no incarnation yet
        self.leaving = 0
        self.version = 0  # increases whenever a topic is created or deleted
        self.watchers: Final[list[Callable[[bytes], None]]] = []
        # cached until the version changes, because sorting thousands of topics takes milliseconds
        self._listed: tuple[int, dict[bool, list[Topic]]] = -1, {}

    def name_of(self, full_name: str) -> TopicName:
        """Split a full name into stream and topic, whether or not the topic exists."""
        topic = self._by_name.get(full_name)
        return TopicName.parse(full_name) if topic is None else topic.name

    def find_id(self, topic_id: bytes) -> Topic | None:
        return self._by_id.get(topic_id)

    def find_partition(self, incarnation: int) -> Partition | None:
        return self._partitions.get(incarnation)

    def partition_name(self, incarnation: int) -> tuple[str, int] | None:
        """Return full name of the topic and number of a partition; None if it does not exist."""
        found = self._partitions.get(incarnation)
        return None if found is None else (found.topic.name.full, found.number)

    def topics(self, *, internal: bool) -> list[Topic]:
        """Return the topics, sorted by full name. ``internal``: include the broker's own topics."""
        version, listed = self._listed
        if version != self.version:
            every = [topic for _, topic in sorted(self._by_name.items())]
            listed = {True: every, False: [topic for topic in every if not is_internal(topic.name)]}
            self._listed = self.version, listed
        return list(listed[internal])

    def partitions(self) -> Iterator[Partition]:
        return iter(self._partitions.values())

    def incarnations(self) -> list[int]:
        """Return the incarnation numbers of all existing partitions, oldest first."""
        return list(self._partitions)

    def take_incarnations(self, count: int) -> int:
        """Reserve ``count`` consecutive incarnation numbers for new partitions. Return the first."""
        first = self.next_incarnation
        self.next_incarnation += count
        return first

    def check_new(self, name: TopicName, partition_count: int, *, internal: bool, count_min: int = 1) -> None:
        """Check that a topic with this name and partition count may be created.

        Raises Invalid(INVALID_TOPIC, INVALID_PARTITION_COUNT), Conflict(TOPIC_EXISTS), and Busy(BUSY) if there are too
        many topics or partitions.

        Args:
            count_min: minimum partition count.
        """
        check_topic_name(name)
        if not name.is_plain:
            meant = TopicName.parse(name.full)
            raise Invalid(
                ErrorCode.INVALID_TOPIC,
                "topic name is ambiguous: in a full name, the stream ends at the first dot"
                f" name={name.full!r} stream={name.stream!r} meant={meant.stream!r}",
            )
        if is_internal(name) and not internal:
            raise Invalid(
                ErrorCode.INVALID_TOPIC,
                f"topic names that begin with __ are reserved (use another one) name={name.full!r}",
            )
        if name.full in self._by_name:
            raise Conflict(ErrorCode.TOPIC_EXISTS, f"topic exists name={name.full!r}")
        if len(self._by_name) >= self._settings.topics_max:
            raise Busy(ErrorCode.BUSY, f"too many topics limit={self._settings.topics_max}")
        self._check_count(partition_count, added=partition_count, count_min=count_min)

    def check_growth(self, topic: Topic, partition_count: int) -> int:
        """Return how many partitions must be added to reach this count.

        Raises Missing(TOPIC_MISSING), Busy(BUSY), and Invalid(INVALID_PARTITION_COUNT) if the count is below the
        current one or above the limit, or the topic must not grow.
        """
        self.check_alive(topic)
        added = partition_count - len(topic.partitions)
        if added < 0:
            raise Invalid(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"partition count must not decrease name={topic.name.full!r} from={len(topic.partitions)} to={partition_count}",
            )
        if added and topic.settings.event_sourcing:
            raise Invalid(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"an event-sourced topic cannot get more partitions, because keys would move name={topic.name.full!r}",
            )
        self._check_count(partition_count, added=added)
        return added

    def check_alive(self, topic: Topic) -> None:
        """Raise Missing(TOPIC_MISSING) if the topic was deleted meanwhile."""
        if self._by_id.get(topic.id) is not topic:
            raise Missing(ErrorCode.TOPIC_MISSING, f"topic was deleted name={topic.name.full!r}")

    def check_shrinking(self, topic: Topic, partition_count: int) -> list[Partition]:
        """Return the partitions that must be removed to reach this count, highest number first.

        Raises Missing(TOPIC_MISSING), and Invalid(INVALID_PARTITION_COUNT) if the count is above the current one, or if
        the topic is event-sourced, because its keys would change their partition.
        """
        self.check_alive(topic)
        if not 0 <= partition_count <= len(topic.partitions):
            raise Invalid(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"partition count must decrease name={topic.name.full!r} from={len(topic.partitions)} to={partition_count}",
            )
        ended = topic.partitions[partition_count:]
        if ended and topic.settings.event_sourcing:
            raise Invalid(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"an event-sourced topic cannot lose partitions, because keys would move name={topic.name.full!r}",
            )
        return ended[::-1]

    def _check_count(self, partition_count: int, *, added: int, count_min: int = 1) -> None:
        if not count_min <= partition_count <= self._settings.partition_count_max:
            raise Invalid(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"partition count is out of range count={partition_count} limit={self._settings.partition_count_max}",
            )
        if len(self._partitions) + self.leaving + added > self._settings.partitions_max:
            raise Busy(ErrorCode.BUSY, f"too many partitions limit={self._settings.partitions_max}")

    def apply_created(self, change: TopicCreated) -> Topic:
        """Apply the journaled creation of a topic. The caller must set the logs of its partitions."""
        incarnations = range(change.first_incarnation, change.first_incarnation + change.partition_count)
        state = TopicState(
            id=change.id,
            stream=change.stream,
            topic=change.topic,
            created_at_us=change.created_at_us,
            settings=change.settings,
            incarnations=tuple(incarnations),
            owner=change.owner,
        )
        return self.restore_topic(state)

    def apply_added(self, change: PartitionsAdded) -> None:
        """Add partitions to a topic, as journaled. The caller must set their logs."""
        self._changing(change.id)
        topic = self._by_id[change.id]
        self._add(topic, range(change.first_incarnation, change.first_incarnation + change.count))

    def apply_removed(self, change: PartitionsRemoved) -> list[int]:
        """Remove partitions from a topic, as journaled. Return their incarnation numbers."""
        self._changing(change.id)
        topic = self._by_id[change.id]
        ended = topic.partitions[change.partition_count :]
        del topic.partitions[change.partition_count :]
        for partition in ended:
            partition.ended = True
            del self._partitions[partition.incarnation]
        self._usage.charge(Kind.PARTITIONS, topic.owner, -len(ended), 0)
        return [partition.incarnation for partition in ended]

    def apply_configured(self, change: TopicConfigured) -> None:
        self._changing(change.id)
        topic, settings = self._by_id[change.id], upgraded(change.settings)
        self._usage.charge(Kind.TOPICS, topic.owner, 0, settings.size - topic.settings.size)
        topic.settings = settings

    def apply_deleted(self, change: TopicDeleted) -> Topic:
        self._changing(change.id)
        topic = self._by_id.pop(change.id)
        self.version += 1
        del self._by_name[topic.name.full]
        self.streams.count(topic.name.stream, -1)
        for partition in topic.partitions:
            partition.ended = True
            del self._partitions[partition.incarnation]
        self._usage.charge(Kind.TOPICS, topic.owner, -1, -topic.settings.size)
        self._usage.charge(Kind.PARTITIONS, topic.owner, -len(topic.partitions), 0)
        return topic

    def restore_topic(self, state: TopicState) -> Topic:
        """Load a topic from a snapshot. The caller must set the logs of its partitions."""
        self._changing(state.id)
        name = TopicName(state.stream, state.topic)
        meant = TopicName.parse(name.full)
        if name.stream == DEFAULT_STREAM and not is_internal(meant):
            name = meant  # earlier releases put every topic into the default stream
        topic = Topic(name, state.id, upgraded(state.settings), state.created_at_us, state.owner)
        self._usage.charge(Kind.TOPICS, topic.owner, 1, topic.settings.size)
        self._by_name[topic.name.full] = topic
        self.streams.count(name.stream, 1)
        self.version += 1
        self._by_id[topic.id] = topic
        self._add(topic, state.incarnations)
        return topic

    def _changing(self, topic_id: bytes) -> None:
        self._views.changing(topic_id)
        for watcher in self.watchers:
            watcher(topic_id)

    def _add(self, topic: Topic, incarnations: range | tuple[int, ...]) -> None:
        self._usage.charge(Kind.PARTITIONS, topic.owner, len(incarnations), 0)
        for incarnation in incarnations:
            partition = Partition(topic, len(topic.partitions), incarnation)
            topic.partitions.append(partition)
            self._partitions[incarnation] = partition
            self.next_incarnation = max(self.next_incarnation, incarnation + 1)

    def encoded_topics(self) -> Iterator[bytes]:
        """Yield all topics as they are at the time of the call, encoded in pieces."""
        return encoded(
            len(self._by_id), self._views.open(list(self._by_id)), lambda topic: len(topic.incarnations) // 8
        )

    def _stored(self, id_: bytes) -> Sequence[TopicState]:
        topic = self._by_id.get(id_)
        return () if topic is None else (topic.state(),)


class _Policy(msgspec.Struct):
    auth_policy: str = "open"
    read_acl: str = ""
    write_acl: str = ""


def access_list(auth_policy: str, read_acl: str, write_acl: str) -> AccessList | None:
    """Return the access list for a policy of the ``cursus`` protocol, or None if it restricts nothing.

    An unknown policy denies everyone.
    """
    match auth_policy:
        case "open":
            return None
        case "deny_read":
            return AccessList(readers=())
        case "deny_write":
            return AccessList(writers=())
        case "acl":
            return AccessList(tuple(read_acl.split(",")), tuple(write_acl.split(",")))
        case _:
            return AccessList((), ())


def upgraded(settings: TopicSettings) -> TopicSettings:
    """Return the settings of a topic from an earlier release, with its access list moved to ``access``.

    Earlier releases stored the list in ``wire_options``. If it cannot be parsed, everyone is denied.
    """
    stored = settings.wire_options.get(ACCESS_OPTIONS)
    if settings.access is not None or not stored:
        return settings
    try:
        kept = msgspec.json.decode(stored, type=_Policy)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return replace(settings, access=AccessList((), ()))
    found = access_list(kept.auth_policy, kept.read_acl, kept.write_acl)
    return settings if found is None else replace(settings, access=found)
