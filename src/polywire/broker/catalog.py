"""The catalogue: which topics and partitions exist.

Promises: full names are unique over all streams, and mean one stream and topic (decision 0027); incarnations count up and are never used
again, also after a restart. Changes are checked before they are made (``check_*``) and applied without failing (``apply_*``).
Must not know: the journal, positions, groups, wires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from polywire.broker.access_lists import upgraded
from polywire.broker.changes import (
    PartitionsAdded,
    PartitionsRemoved,
    TopicConfigured,
    TopicCreated,
    TopicDeleted,
    TopicState,
)
from polywire.broker.quotas import Kind, Usage
from polywire.broker.settings import BrokerSettings
from polywire.broker.topics import Partition, Topic
from polywire.broker.view import Views, encoded
from polywire.errors import Busy, Conflict, ErrorCode, Invalid, Missing
from polywire.types import DEFAULT_STREAM, TopicName, check_topic_name

INTERNAL_PREFIX = "__"  # names that begin so are the broker's own and not listed (concepts: records#names)


def is_internal(name: TopicName) -> bool:
    """Whether the name is reserved for the broker itself."""
    return name.stream.startswith(INTERNAL_PREFIX) or name.topic.startswith(INTERNAL_PREFIX)


class Streams:
    """Which streams there are: those with topics, ``default``, and those that a wire has declared.

    Invariant: ``_topics`` counts the topics of every stream that has any.
    """

    __slots__ = ("_declared", "_topics")

    def __init__(self) -> None:
        self._topics: dict[str, int] = {}
        self._declared = {DEFAULT_STREAM}

    def exists(self, stream: str) -> bool:
        """Whether there is such a stream."""
        return stream in self._topics or stream in self._declared

    def declare(self, stream: str) -> None:
        """A stream is there whether or not it has topics, until it is ended; the wire that says so keeps it over restarts."""
        self._declared.add(stream)

    def end(self, stream: str) -> None:
        """A declared stream is there no longer than its topics."""
        if stream != DEFAULT_STREAM:
            self._declared.discard(stream)

    def count(self, stream: str, added: int) -> None:
        """A topic begins or ends."""
        self._topics[stream] = self._topics.get(stream, 0) + added
        if not self._topics[stream]:
            del self._topics[stream]


class Catalog:
    """All topics of this broker.

    Invariant: ``next_incarnation`` is above every incarnation that any change ever named.
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
    )

    def __init__(self, settings: BrokerSettings, usage: Usage) -> None:
        self._settings = settings
        self._usage = usage
        self._by_name: Final[dict[str, Topic]] = {}
        self.find: Final[Callable[[str], Topic | None]] = self._by_name.get
        """The topic of a full name: the look-up itself, since every request asks."""
        self._by_id: dict[bytes, Topic] = {}
        self._partitions: dict[int, Partition] = {}
        self._views: Final = Views(self._stored)
        self.streams: Final = Streams()
        self.next_incarnation = 1  # 0 in a batch header means: not numbered yet
        self.leaving = 0
        """Partitions that have ended and that the log still has to drop: they count for the limit."""
        self.version = 0  # goes up by one with every topic that begins or ends
        self._listed: tuple[int, dict[bool, list[Topic]]] = -1, {}  # of a version: sorting thousands takes milliseconds

    def name_of(self, full_name: str) -> TopicName:
        """Stream and topic of a full name, whether or not there is such a topic."""
        topic = self._by_name.get(full_name)
        return TopicName.parse(full_name) if topic is None else topic.name

    def find_id(self, topic_id: bytes) -> Topic | None:
        """The topic of this id."""
        return self._by_id.get(topic_id)

    def find_partition(self, incarnation: int) -> Partition | None:
        """The living partition of this incarnation."""
        return self._partitions.get(incarnation)

    def topics(self, *, internal: bool) -> list[Topic]:
        """Topics by full name; those of the broker itself only when asked for."""
        version, listed = self._listed
        if version != self.version:
            every = [topic for _, topic in sorted(self._by_name.items())]
            listed = {True: every, False: [topic for topic in every if not is_internal(topic.name)]}
            self._listed = self.version, listed
        return list(listed[internal])

    def partitions(self) -> Iterator[Partition]:
        """All living partitions."""
        return iter(self._partitions.values())

    def incarnations(self) -> list[int]:
        """Incarnations of all living partitions, oldest first."""
        return list(self._partitions)

    def take_incarnations(self, count: int) -> int:
        """The first of so many numbers that nobody else is given, for partitions in the making."""
        first = self.next_incarnation
        self.next_incarnation += count
        return first

    def check_new(self, name: TopicName, partition_count: int, *, internal: bool, count_min: int = 1) -> None:
        """Refuse a topic that may not be made, or has fewer partitions than ``count_min``.

        Raises Invalid(INVALID_TOPIC, INVALID_PARTITION_COUNT), Conflict(TOPIC_EXISTS), Busy(BUSY) when there are too many.
        """
        check_topic_name(name)
        if not name.is_plain:
            meant = TopicName.parse(name.full)
            raise Invalid(
                ErrorCode.INVALID_TOPIC,
                f"the first dot of a full name ends its stream name={name.full!r} stream={name.stream!r} meant={meant.stream!r}",
            )
        if is_internal(name) and not internal:
            raise Invalid(ErrorCode.INVALID_TOPIC, f"names that begin with __ are reserved name={name.full!r}")
        if name.full in self._by_name:
            raise Conflict(ErrorCode.TOPIC_EXISTS, f"topic exists name={name.full!r}")
        if len(self._by_name) >= self._settings.topics_max:
            raise Busy(ErrorCode.BUSY, f"too many topics limit={self._settings.topics_max}")
        self._check_count(partition_count, added=partition_count, count_min=count_min)

    def check_growth(self, topic: Topic, partition_count: int) -> int:
        """How many partitions growing to this count adds.

        Raises Missing(TOPIC_MISSING), Invalid(INVALID_PARTITION_COUNT) when the topic would shrink, may not grow or would pass the
        limit, Busy(BUSY).
        """
        self.check_alive(topic)
        added = partition_count - len(topic.partitions)
        if added < 0:
            raise Invalid(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"a topic cannot shrink name={topic.name.full!r} from={len(topic.partitions)} to={partition_count}",
            )
        if added and topic.settings.event_sourcing:
            raise Invalid(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"a topic of events cannot grow: keys would move name={topic.name.full!r}",
            )
        self._check_count(partition_count, added=added)
        return added

    def check_alive(self, topic: Topic) -> None:
        """Refuse a topic that was deleted meanwhile. Raises Missing(TOPIC_MISSING)."""
        if self._by_id.get(topic.id) is not topic:
            raise Missing(ErrorCode.TOPIC_MISSING, f"topic was deleted name={topic.name.full!r}")

    def check_shrinking(self, topic: Topic, partition_count: int) -> list[Partition]:
        """The partitions that shrinking to this count ends, highest first.

        Raises Missing(TOPIC_MISSING), Invalid(INVALID_PARTITION_COUNT) when the topic would grow, or holds events, whose keys would move.
        """
        self.check_alive(topic)
        if not 0 <= partition_count <= len(topic.partitions):
            raise Invalid(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"a topic cannot shrink to more name={topic.name.full!r} from={len(topic.partitions)} to={partition_count}",
            )
        ended = topic.partitions[partition_count:]
        if ended and topic.settings.event_sourcing:
            raise Invalid(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"a topic of events cannot shrink: keys would move name={topic.name.full!r}",
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
        """A topic begins; its partitions have no log yet."""
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
        """A topic has further partitions; they have no log yet."""
        self._views.changing(change.id)
        topic = self._by_id[change.id]
        self._add(topic, range(change.first_incarnation, change.first_incarnation + change.count))

    def apply_removed(self, change: PartitionsRemoved) -> list[int]:
        """A topic has fewer partitions; returns the incarnations of those that ended."""
        self._views.changing(change.id)
        topic = self._by_id[change.id]
        ended = topic.partitions[change.partition_count :]
        del topic.partitions[change.partition_count :]
        for partition in ended:
            partition.ended = True
            del self._partitions[partition.incarnation]
        self._usage.charge(Kind.PARTITIONS, topic.owner, -len(ended), 0)
        return [partition.incarnation for partition in ended]

    def apply_configured(self, change: TopicConfigured) -> None:
        """A topic has other settings."""
        self._views.changing(change.id)
        topic, settings = self._by_id[change.id], upgraded(change.settings)
        self._usage.charge(Kind.TOPICS, topic.owner, 0, settings.size - topic.settings.size)
        topic.settings = settings

    def apply_deleted(self, change: TopicDeleted) -> Topic:
        """A topic ends, and all its partitions with it."""
        self._views.changing(change.id)
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
        """Take over a topic as it was; its partitions have no log yet."""
        name = TopicName(state.stream, state.topic)
        meant = TopicName.parse(name.full)
        if name.stream == DEFAULT_STREAM and not is_internal(meant):
            name = meant  # earlier releases put every full name into the default stream
        topic = Topic(name, state.id, upgraded(state.settings), state.created_at_us, state.owner)
        self._usage.charge(Kind.TOPICS, topic.owner, 1, topic.settings.size)
        self._by_name[topic.name.full] = topic
        self.streams.count(name.stream, 1)
        self.version += 1
        self._by_id[topic.id] = topic
        self._add(topic, state.incarnations)
        return topic

    def _add(self, topic: Topic, incarnations: range | tuple[int, ...]) -> None:
        self._usage.charge(Kind.PARTITIONS, topic.owner, len(incarnations), 0)
        for incarnation in incarnations:
            partition = Partition(topic, len(topic.partitions), incarnation)
            topic.partitions.append(partition)
            self._partitions[incarnation] = partition
            self.next_incarnation = max(self.next_incarnation, incarnation + 1)

    def encoded_topics(self) -> Iterator[bytes]:
        """All topics as they are now, encoded in pieces."""
        return encoded(
            len(self._by_id), self._views.open(list(self._by_id)), lambda topic: len(topic.incarnations) // 8
        )

    def _stored(self, id_: bytes) -> Sequence[TopicState]:
        topic = self._by_id.get(id_)
        if topic is None:
            return ()
        return (
            TopicState(
                id=topic.id,
                stream=topic.name.stream,
                topic=topic.name.topic,
                created_at_us=topic.created_at_us,
                settings=topic.settings,
                incarnations=tuple([partition.incarnation for partition in topic.partitions]),
                owner=topic.owner,
            ),
        )
