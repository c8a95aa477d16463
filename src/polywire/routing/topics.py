"""The topics and partitions of other processes, as those processes last reported them.

Offsets of a partition are those in the latest response about it. ``RoutedBroker.when_current`` requests them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, cast

from polywire.broker.changes import TopicState
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.log.base import Completion, Handle, PartitionLog, Read
from polywire.log.partition.reader import NO_PIN
from polywire.protocols.runtime.shards import Shards
from polywire.records.compression import Compression
from polywire.routing.link import ShardLink
from polywire.routing.messages import (
    AllBounds,
    Appended,
    Bounds,
    By,
    Empty,
    Fetch,
    Fetched,
    Key,
    LookUp,
    PartitionId,
    PartitionIds,
    Produce,
    Topics,
    Verb,
    Wait,
    decode,
)
from polywire.types import Buffer, Level, TopicName

UNKNOWN: Final = Bounds(0, 0, 0, 0, 0)
REFRESHED_MAX: Final = 500  # limit of partitions in one ALL_BOUNDS request, which takes about a millisecond


class RemoteLog:
    """A partition that another process stores. Implements ``PartitionView``."""

    __slots__ = ("bounds", "compression", "incarnation", "link", "number", "topic_id")

    def __init__(self, link: ShardLink, topic_id: bytes, number: int, incarnation: int) -> None:
        self.link: Final = link
        self.topic_id: Final = topic_id
        self.number: Final = number
        self.bounds = UNKNOWN
        self.incarnation: Final = incarnation
        self.compression: Compression | None = None

    @property
    def first_offset(self) -> int:
        return self.bounds.first_offset

    @property
    def next_offset(self) -> int:
        return self.bounds.next_offset

    @property
    def readable_offset(self) -> int:
        return self.bounds.readable_offset

    @property
    def next_address(self) -> int:
        return self.bounds.next_address

    @property
    def stored_bytes(self) -> int:
        return self.bounds.stored_bytes

    def epoch_at(self, offset: int) -> int:
        """Return the current leader epoch of the other process. ``offset`` must be the end of the partition."""
        del offset
        return self.link.epoch

    def append(self, batch: Buffer, by: By, level: Level, done: Completion[int] | None) -> None:
        """Append a batch. ``done`` is called with the offset of its first record, or an error. Raises Busy(BUSY)."""
        head = Produce(self.topic_id, self.number, level, by)
        self.link.call(Verb.PRODUCE, head, Appended, partial(_offset, done), batch)

    def read(self, offset: int, *, bytes_max: int, then: Completion[Read], offset_end: int | None = None) -> Handle:
        """Read batches from ``offset`` on, and pass them to ``then``.

        An invalid offset is an error that ``then`` gets.
        """

        def received(received: bytes, payload: memoryview) -> None:
            head = decode(received, Fetched)
            self.bounds = head.bounds
            then(Read([payload] if len(payload) else [], head.next_offset, head.readable_offset, NO_PIN))

        head = Fetch(self.topic_id, self.number, offset, bytes_max, offset_end)
        return self.link.send(Verb.FETCH, head, received, then)

    def wait(self, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` when the record at an offset can be read, or earlier.

        It is also called if the connection is lost.
        """

        def woken(_: object) -> None:
            wake()

        return self.link.call(Verb.WAIT, Wait(self.topic_id, self.number, offset), Empty, woken)

    def find_epoch_end(self, epoch: int, then: Completion[int]) -> Handle:
        """Request the offset after the last record of a leader epoch."""
        return self._look_up(Key.EPOCH, epoch, then)

    def refresh(self, then: Completion[None]) -> Handle:
        """Request the current offsets, and call ``then`` when they are set."""

        def received(bounds: Bounds | BrokerError) -> None:
            if isinstance(bounds, BrokerError):
                then(bounds)
            else:
                self.bounds = bounds
                then(None)

        return self.link.call(Verb.BOUNDS, PartitionId(self.topic_id, self.number), Bounds, received)

    def offset_at(self, time_us: int, then: Completion[int]) -> Handle:
        return self._look_up(Key.TIME, time_us, then)

    def offset_of_address(self, address: int, then: Completion[int], *, covering: bool = False) -> Handle:
        return self._look_up(Key.COVERED_ADDRESS if covering else Key.ADDRESS, address, then)

    def address_of_offset(self, offset: int, then: Completion[int]) -> Handle:
        return self._look_up(Key.OFFSET, offset, then)

    def _look_up(self, key: Key, value: int, then: Completion[int]) -> Handle:
        head = LookUp(self.topic_id, self.number, key, value)
        return self.link.call(Verb.LOOK_UP, head, Appended, partial(_offset, then))


def _offset(done: Completion[int] | None, result: Appended | BrokerError) -> None:
    if done is not None:
        done(result if isinstance(result, BrokerError) else result.offset)


class Refresh:
    """Requests the current offsets of many partitions, from all their processes at once. Implements ``Handle``.

    ``then`` is called once all processes have responded, with the first error or None.
    """

    __slots__ = ("_calls", "_error", "_left", "_then")

    def __init__(self, logs: Iterable[RemoteLog], then: Completion[None]) -> None:
        self._then: Final = then
        self._calls: Final[dict[ShardLink, Handle]] = {}
        self._error: BrokerError | None = None
        self._left: Final[dict[ShardLink, list[RemoteLog]]] = {}
        for log in logs:
            self._left.setdefault(log.link, []).append(log)
        for link in list(self._left):
            self._request(link)

    def _request(self, link: ShardLink) -> None:
        logs = self._left[link]
        requested = logs[-REFRESHED_MAX:]
        del logs[-REFRESHED_MAX:]
        ids = PartitionIds(tuple([PartitionId(log.topic_id, log.number) for log in requested]))
        self._calls[link] = link.call(Verb.ALL_BOUNDS, ids, AllBounds, partial(self._received, link, requested))

    def _received(self, link: ShardLink, requested: Sequence[RemoteLog], result: AllBounds | BrokerError) -> None:
        if isinstance(result, BrokerError):
            self._error = self._error or result
            self._left[link].clear()
        else:
            for log, bounds in zip(requested, result.bounds, strict=True):
                log.bounds = bounds or log.bounds
        if self._left[link]:
            self._request(link)
            return
        del self._left[link]
        if not self._left:
            self._then(self._error)

    def cancel(self) -> None:
        """Cancel the requests. ``then`` is not called any more."""
        for call in self._calls.values():
            call.cancel()


class RemoteTopics:
    """The topics of other processes. They remain known while a connection is lost. Implements ``RemoteTopicLookup``.

    Attributes:
        version: number that increases whenever a topic is created or deleted.
        watchers: functions that are called with the id of each topic that changes.
        known: shards that have reported all their topics at least once.
        when_known: functions to call when a shard is added to ``known``.
    """

    __slots__ = ("_by_id", "_by_name", "_names", "_reported", "_shards", "known", "version", "watchers", "when_known")

    def __init__(self, names: Shards) -> None:
        """``names`` maps the names of topics to shards."""
        self._names: Final = names
        self.version = 0
        self.watchers: Final[list[Callable[[bytes], None]]] = []
        self.known: Final[set[int]] = set()
        self.when_known: list[Callable[[], None]] = []
        self._by_id: Final[dict[bytes, Topic]] = {}
        self._by_name: Final[dict[str, Topic]] = {}
        self._shards: Final[dict[bytes, int]] = {}
        # ids of the topics that were reported since ``Topics.begins``, by shard; removed at ``Topics.ends``
        self._reported: Final[dict[int, set[bytes]]] = {}

    def find(self, full_name: str) -> Topic | None:
        """Return the topic with this full name."""
        return self._by_name.get(full_name)

    def find_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with this id."""
        return self._by_id.get(topic_id)

    def has(self, full_name: str) -> bool:
        """Return whether another shard has a topic of this name, even if its state was not reported yet."""
        return self._names.shard_of(full_name) not in (None, self._names.own)

    def all(self) -> Iterator[Topic]:
        """Return the topics in no particular order."""
        return iter(self._by_name.values())

    def shard_of(self, topic: Topic) -> int | None:
        """Return the shard of a topic; None if it is a topic of this process."""
        return self._shards.get(topic.id)

    def apply(self, link: ShardLink, update: Topics) -> None:
        """Add, change or remove topics as another process has reported."""
        shard = link.shard
        if update.begins:
            self._reported[shard] = set()
        if shard in self._reported:
            self._reported[shard].update(state.id for state in update.topics)
        if update.ends:
            reported = self._reported.pop(shard, set())
            for topic_id in [id_ for id_, owner in self._shards.items() if owner == shard and id_ not in reported]:
                self._delete(topic_id)
        for topic_id in update.deleted:
            self._delete(topic_id)
        for state in update.topics:
            self._put(link, state)
        if update.ends:
            self.known.add(shard)
            waiting, self.when_known = self.when_known, []
            for callback in waiting:
                callback()

    def _delete(self, topic_id: bytes) -> None:
        topic = self._by_id.pop(topic_id, None)
        if topic is None:
            return
        self.version += 1
        del self._shards[topic_id]
        for partition in topic.partitions:
            partition.ended = True
        if self._by_name.get(topic.name.full) is topic:
            del self._by_name[topic.name.full]

    def _put(self, link: ShardLink, state: TopicState) -> None:
        topic = self._by_id.get(state.id)
        if topic is None:
            name = TopicName(state.stream, state.topic)
            topic = Topic(name, state.id, state.settings, state.created_at_us, state.owner)
            self._by_id[topic.id] = self._by_name[name.full] = topic
            self._shards[topic.id] = link.shard
            self.version += 1
        topic.settings = state.settings
        for watcher in self.watchers:
            watcher(topic.id)
        for partition in topic.partitions[len(state.incarnations) :]:
            partition.ended = True
        del topic.partitions[len(state.incarnations) :]
        for partition in topic.partitions:
            partition.configure()
        for number in range(len(topic.partitions), len(state.incarnations)):
            partition = Partition(topic, number, state.incarnations[number])
            view = RemoteLog(link, topic.id, number, partition.incarnation)
            partition.attach(cast(PartitionLog, view))  # protocols that the router serves use views only
            topic.partitions.append(partition)
