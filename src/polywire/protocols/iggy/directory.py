"""The streams, topics and groups that Iggy clients see, with their numbers and names.

* A number remains assigned as long as its stream, topic or group exists, even across restarts. Numbers begin with 0
  here.
* A stream or topic that another protocol created gets a number when it is first seen.
* A rename changes only the name that Iggy clients see; the broker's name of a topic never changes. In this module, the
  broker's name of a stream is called its namespace.

A stream is stored in the protocol's state under ``stream.<number>``. The number, name and settings of a topic, and the
numbers of its groups, are stored in the topic's ``wire_options``.

With several shards, the first one stores the streams. Each shard has a directory of its own topics, in which streams
have negative numbers that are never sent to clients. The shard of a topic can be computed from the topic's number.
Sessions use a ``RoutedDirectory``, which has the topics of all shards.

(spec: iggy#between-dialects)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, TypeVar

import msgspec

from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.owners import ITSELF, UNOWNED, Caller
from polywire.broker.settings import TopicSettings
from polywire.broker.state import WireStateVerbs
from polywire.broker.topic_verbs import AT_ONCE_MAX, Then, TopicVerbs
from polywire.broker.topics import Streams, Topic
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import Completion
from polywire.matching import DIGITS, consists_of
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.messages import WIRE, Refused
from polywire.protocols.iggy.names import is_broker_name, namespace_of, numbered
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.slices import Slices
from polywire.types import DEFAULT_STREAM, Level, TopicName

NUMBER_MAX: Final = 2**32 - 32  # limit for streams: higher numbers are reserved for the default stream and for "none"
NUMBERS_END: Final = 2**32 - 1  # limit for topics and groups, because dialects that count from 1 add one
DEFAULT_STREAM_NUMBER: Final = 2**32 - 16
STREAMS_MAX: Final = 10_000  # each stream is a value of the protocol's own state
GROUPS_MAX: Final = 1_000  # groups per topic, which are stored in the topic's settings
SCANNED_MAX: Final = 1_000  # limit for topics that are scanned while a request waits, some 2 ms
# limit for topics of other protocols that get a number while a request waits, a few milliseconds
UNSEEN_MAX: Final = 64
STREAMS_SHARD: Final = 0  # the shard that stores the streams
CHOSEN_MAX: Final = 2**25  # topic numbers below this were chosen by clients, or assigned when there was only one shard
STREAM_KEY: Final = "stream."
_Value = TypeVar("_Value")
# prefix of the name that a group without a name gets; a number of at most ten digits without a leading 0 follows
_NAMELESS: Final = "group-"
_NAMELESS_DIGITS_MAX: Final = 10


class StoredStream(msgspec.Struct, frozen=True, array_like=True):
    """A stream as it is stored.

    Attributes:
        name: the name for Iggy clients.
        namespace: the broker's name of the stream, which never changes.
    """

    number: int
    name: str
    namespace: str
    created_at_us: int


class StoredTopic(msgspec.Struct, frozen=True, array_like=True):
    """Stored state of a topic for the Iggy protocol.

    Attributes:
        expiry_us: 0 means never, None the default.
        size_max: 0 means the default.
        options: the options that were set, as ``options`` encodes them.
        groups: names of groups by number.
    """

    number: int
    name: str
    expiry_us: int | None = None
    size_max: int = 0
    compression: int = 1
    options: bytes = b""
    groups: dict[int, str] = {}


class Stream:
    """A stream and its topics.

    Attributes:
        by_number, by_name: its topics. Some may have been deleted since the last scan.
        free_from: all lower numbers are used.
    """

    __slots__ = ("by_name", "by_number", "free_from", "stored")

    def __init__(self, stored: StoredStream) -> None:
        self.stored = stored
        self.free_from = 0
        self.by_number: dict[int, Topic] = {}
        self.by_name: dict[str, Topic] = {}

    @property
    def number(self) -> int:
        return self.stored.number


class DirectoryBroker(TopicVerbs, WireStateVerbs, WireBroker, Protocol):
    @property
    def streams(self) -> Streams: ...

    @property
    def groups(self) -> Coordinator: ...


class Directory:
    """The numbers and names of all streams and topics for Iggy clients.

    Other protocols create topics without numbers. After each such change, a scan assigns them.
    """

    __slots__ = (
        "_balanced",
        "_broker",
        "_by_name",
        "_by_namespace",
        "_by_number",
        "_failed_version",
        "_free_from",
        "_last_foreign",
        "_seen_version",
        "_shard",
        "_topics",
        "_waiting",
    )

    def __init__(self, broker: DirectoryBroker, shard: int | None = None) -> None:
        """``shard`` is given if the broker has only the topics of that shard, not those of all processes."""
        self._broker = broker
        self._shard = shard
        self._last_foreign = -1  # number of the last stream that another shard stores
        self._by_number: dict[int, Stream] = {}
        self._by_name: dict[str, Stream] = {}
        self._by_namespace: dict[str, Stream] = {}
        self._topics: dict[bytes, tuple[TopicSettings, StoredTopic]] = {}  # known topics, with their decoded state
        self._balanced: dict[bytes, int] = {}
        self._free_from = 0  # all lower stream numbers are used
        self._seen_version = -1  # version of the broker's topics at the last scan
        self._failed_version = -1  # the same, at a scan in slices that failed
        self._waiting: list[Callable[[], None]] = []  # called after the scan in slices
        for key, value in broker.wire_state(WIRE).items():
            if key.startswith(STREAM_KEY):
                self._add(Stream(STREAMS.decode(value)))
        # not stored, because it always exists; it is listed once it has topics
        if DEFAULT_STREAM not in self._by_namespace:
            self._add(
                Stream(StoredStream(DEFAULT_STREAM_NUMBER, DEFAULT_STREAM, DEFAULT_STREAM, broker.clock.now_us()))
            )
        self._refresh()

    # Streams

    def streams(self) -> list[Stream]:
        """Return all streams, sorted by number, without the default stream if it is empty."""
        self._refresh()
        return [
            stream for _, stream in sorted(self._by_number.items()) if stream.by_number or stream.number < NUMBER_MAX
        ]

    def find_stream(self, identifier: int | str) -> Stream | None:
        """Find a stream by number, by name, or by the name that other protocols use (namespace)."""
        found = self._look_up(identifier)
        if found is None:
            self._refresh()
            found = self._look_up(identifier)
        return found

    @property
    def stores_streams(self) -> bool:
        return self._shard in (None, STREAMS_SHARD)

    def in_namespace(self, namespace: str) -> Stream:
        """Return the stream that other protocols know under this name.

        If another shard stores the streams, a missing stream is added, because it may exist there. Otherwise, raises
        Refused 1010.
        """
        found = self.find_namespace(namespace)
        if found is None and self.stores_streams:
            raise Refused(errors.NO_STREAM_NAME)
        return found or self._add_namespace(namespace, self._broker.clock.now_us())

    def has_topics(self, namespace: str) -> bool:
        """Return whether this shard has topics in a stream. ``namespace`` is the stream's name in other protocols."""
        stream = self.find_namespace(namespace)
        return stream is not None and bool(self.topics(stream))

    def add_unknown(self, namespaces: Collection[str]) -> None:
        """Store streams that other protocols have created. Raises Busy if there are too many."""
        for namespace in namespaces:
            if self._by_namespace.get(namespace) is None:
                self._add_namespace(namespace, self._broker.clock.now_us())

    def forget_namespace(self, namespace: str) -> None:
        """Remove a stream that was deleted in another shard, unless it has topics here."""
        stream = None if self.stores_streams else self._by_namespace.get(namespace)
        if stream is not None and stream.number < 0 and not any(map(self.is_alive, stream.by_number.values())):
            self._remove(stream)

    def _look_up(self, identifier: int | str) -> Stream | None:
        if isinstance(identifier, int):
            return self._by_number.get(identifier)
        return self._by_name.get(identifier) or self._by_namespace.get(identifier)

    def create_stream(self, name: str, number: int | None, by: Caller, then: Completion[StoredStream]) -> None:
        """Create an empty stream. ``then`` is called with the stream when it is stored.

        Raises Refused 1011, 1012 or 1013, and Busy if there are too many streams.
        """
        if number is not None and self.find_stream(number) is not None:
            raise Refused(errors.STREAM_ID_TAKEN)
        self._refresh()
        namespace = namespace_of(name)
        if (
            name in self._by_name or namespace in self._by_namespace
        ):  # a renamed stream may still have this name in the broker
            raise Refused(errors.STREAM_NAME_TAKEN)
        if name == DEFAULT_STREAM or len(self._by_number) >= STREAMS_MAX or not is_broker_name(name):
            raise Refused(errors.BAD_STREAM_NAME)
        self._admit_stream(by)
        number = self._free_stream() if number is None else number
        stream = Stream(StoredStream(number, name, namespace, self._broker.clock.now_us()))
        self._store(stream, partial(_stored, stream.stored, then), by=by)

    def _admit_stream(self, by: Caller) -> None:
        """Raise Busy if the caller already owns as many streams as one user may (``bulk_share`` of ``STREAMS_MAX``)."""
        owned = [self._broker.wire_owner(WIRE, f"{STREAM_KEY}{number}") for number in self._by_number]
        if by.owner != UNOWNED and owned.count(by.owner) >= STREAMS_MAX * self._broker.settings.bulk_share:
            raise Busy(ErrorCode.BUSY, "too many streams for one user or address")

    def rename_stream(self, stream: Stream, name: str, done: Completion[int] | None) -> None:
        """Change the name for Iggy clients. Clients of other protocols see the old name.

        Raises Refused 1012 or 1013.
        """
        other = self.find_stream(name)
        if other is not None and other is not stream:
            raise Refused(errors.STREAM_NAME_TAKEN)
        if stream.number >= NUMBER_MAX or not is_broker_name(name):
            raise Refused(errors.BAD_STREAM_NAME)
        del self._by_name[stream.stored.name]
        stream.stored = msgspec.structs.replace(stream.stored, name=name)
        self._store(stream, done)

    def delete_stream(self, stream: Stream, done: Completion[int]) -> None:
        """Delete a stream's topics, one after the other if they are many, then the stream.

        If the broker stops or an error occurs, the stream and its remaining topics still exist. Topics that are created
        meanwhile are deleted, too. It is an error if these have too many partitions to be deleted at once.
        """

        def emptied() -> None:
            if self._by_number.get(stream.number) is not stream:
                return  # another request has deleted the stream
            self._delete_new_topics(stream)
            if stream.number >= 0:
                self._broker.set_wire_state(WIRE, f"{STREAM_KEY}{stream.number}", None)
            self._remove(stream)

        self._broker.delete_topics(self.topics(stream), ended=partial(self._forget, stream), then=emptied, done=done)

    def _delete_new_topics(self, stream: Stream) -> None:
        """Delete topics that were created while the stream's topics were deleted.

        Raises Busy(BUSY) if there are too many.
        """
        left = [topic for topic in stream.by_number.values() if self.is_alive(topic)]
        if sum([1 + len(topic.partitions) for topic in left]) > AT_ONCE_MAX:
            raise Busy(ErrorCode.BUSY, "another request created topics in the stream (retry)")
        for topic in left:
            self._broker.delete_topic(topic)
            self._forget(stream, topic)

    def _forget(self, stream: Stream, topic: Topic) -> None:
        _, stored = self._topics.pop(topic.id, (None, None))
        self._balanced.pop(topic.id, None)
        if stored is None:
            return
        if stream.by_number.get(stored.number) is topic:
            del stream.by_number[stored.number]
            stream.free_from = min(stream.free_from, stored.number)
        if stream.by_name.get(stored.name) is topic:
            del stream.by_name[stored.name]
        if self._seen_version + 1 == self._broker.topics_version:
            self._seen_version += 1  # the deletion is the only change since the last scan

    def _store(
        self, stream: Stream, done: Completion[int] | None, level: Level = Level.SYNCED, *, by: Caller = ITSELF
    ) -> None:
        value = _ENCODER.encode(stream.stored)
        self._broker.set_wire_state(WIRE, f"{STREAM_KEY}{stream.number}", value, by=by, level=level, done=done)
        self._add(stream)

    def _add(self, stream: Stream) -> None:
        self._by_number[stream.number] = stream
        self._by_name[stream.stored.name] = stream
        self._by_namespace[stream.stored.namespace] = stream
        self._broker.streams.declare(stream.stored.namespace)

    def _remove(self, stream: Stream) -> None:
        del self._by_number[stream.number]
        self._free_from = min(self._free_from, stream.number)
        del self._by_name[stream.stored.name]
        del self._by_namespace[stream.stored.namespace]
        self._broker.streams.end(stream.stored.namespace)

    def _free_stream(self) -> int:
        self._free_from = _first_free(self._by_number, self._free_from)
        return self._free_from

    def _free_topic(self, stream: Stream) -> int:
        lowest = 0 if self._shard is None else numbers_from(self._shard)
        stream.free_from = _first_free(stream.by_number, max(stream.free_from, lowest))
        return stream.free_from

    # Topics

    def topics(self, stream: Stream) -> list[Topic]:
        self._refresh()
        return [topic for _, topic in sorted(stream.by_number.items())]

    def find_topic(self, stream: Stream, identifier: int | str) -> Topic | None:
        found = stream.by_number.get(identifier) if isinstance(identifier, int) else stream.by_name.get(identifier)
        if found is None or not self.is_alive(found):
            self._refresh()
            found = stream.by_number.get(identifier) if isinstance(identifier, int) else stream.by_name.get(identifier)
        return found

    def stream_of(self, topic: Topic) -> Stream:
        found = self._by_namespace.get(topic.name.stream)
        if found is None:
            self._refresh()
            found = self._by_namespace[topic.name.stream]
        return found

    def find_namespace(self, namespace: str) -> Stream | None:
        """Return the stream that other protocols know under this name, or None."""
        self._refresh()
        return self._by_namespace.get(namespace)

    def find_full(self, name: TopicName) -> Topic | None:
        return self._broker.find_topic(name.full)

    def check_topic_name(self, stream: Stream, name: str, *, but: Topic | None = None) -> None:
        """Raise Refused 2013 if another topic has the name, or Refused 2014 if the broker does not allow the name.

        Args:
            but: a topic that may have the name.
        """
        other = self.find_topic(stream, name)
        if other is not None and other is not but:
            raise Refused(errors.TOPIC_NAME_TAKEN)
        if not is_broker_name(name):
            raise Refused(errors.BAD_TOPIC_NAME)

    def create_topic(
        self,
        stream: Stream,
        stored: StoredTopic,
        number: int | None,
        partitions: int,
        settings: TopicSettings,
        by: Caller,
        then: Then,
        done: Completion[int],
    ) -> None:
        """Create a topic, which clients of other protocols see as ``stream.topic``.

        ``then`` is called with the topic when it can be used, and ``done`` when it is stored. If another topic gets the
        number or the name in the meantime, this one gets a different number or name. Raises Refused 2012, 2013 or 2014,
        and BrokerError.
        """
        if number is not None and self.find_topic(stream, number) is not None:
            raise Refused(errors.TOPIC_ID_TAKEN)
        self.check_topic_name(stream, stored.name)
        number = self._free_topic(stream) if number is None else number
        stored = msgspec.structs.replace(stored, number=number)
        options = {**settings.wire_options, WIRE: _ENCODER.encode(stored)}
        name = TopicName(stream.stored.namespace, stored.name)
        if self._broker.find_topic(name.full) is not None:  # the topic with this name was renamed for Iggy clients
            raise Refused(errors.TOPIC_NAME_TAKEN)
        if not name.is_plain:
            raise Refused(errors.BAD_TOPIC_NAME)
        settings = replace(settings, wire_options=options)

        def created(topic: Topic) -> None:
            self._topic_created(stream, topic, stored)
            then(topic)

        self._broker.make_topic(name, partitions, settings, partition_count_min=0, by=by, then=created, done=done)

    def _topic_created(self, stream: Stream, topic: Topic, stored: StoredTopic) -> None:
        if (
            self._by_namespace.get(topic.name.stream) is not stream
            or self._belongs_to_another_stream(stream, topic, stored)
            or stream.by_name.get(stored.name, topic) is not topic
        ):
            self._number(self._by_namespace.get(topic.name.stream) or self._add_stream_of(topic), topic)
        else:
            self._add_topic(stream, topic, stored)
        if self._seen_version + 1 == self._broker.topics_version:
            self._seen_version += 1  # this topic is the only change since the last scan

    def update_topic(
        self, topic: Topic, stored: StoredTopic, settings: TopicSettings, done: Completion[int] | None
    ) -> None:
        """Change a topic's settings and its name for Iggy clients."""
        stream = self.stream_of(topic)
        stream.by_name.pop(self.stored(topic).name, None)
        options = {**settings.wire_options, WIRE: _ENCODER.encode(stored)}
        level = Level.WRITTEN if done is None else Level.SYNCED
        self._broker.configure_topic(topic, replace(settings, wire_options=options), level=level, done=done)
        self._add_topic(stream, topic, stored)

    def stored(self, topic: Topic) -> StoredTopic:
        """Return the stored state of a topic for the Iggy protocol."""
        known = self._topics.get(topic.id)
        if known is not None and known[0] is topic.settings:
            return known[1]
        value = topic.settings.wire_options.get(WIRE)
        if value is None:  # the topic was created over another protocol, or changed by a protocol that drops this state
            self._number(self.stream_of(topic), topic)
            value = topic.settings.wire_options[WIRE]
        stored = TOPICS.decode(value)
        self._topics[topic.id] = (topic.settings, stored)
        return stored

    def is_alive(self, topic: Topic) -> bool:
        return self._broker.topic_of_id(topic.id) is topic

    def _add_topic(self, stream: Stream, topic: Topic, stored: StoredTopic) -> None:
        stream.by_number[stored.number] = topic
        stream.by_name[stored.name] = topic
        self._topics[topic.id] = (topic.settings, stored)

    def _number(self, stream: Stream, topic: Topic) -> None:
        """Assign a number and a name for Iggy clients to a topic of another protocol.

        The topic keeps its name, unless another topic has that name.
        """
        known = self._topics.get(topic.id)
        if known is not None:
            stored = known[1]  # another protocol has dropped it
        else:
            number = self._free_topic(stream)
            name = topic.name.topic if topic.name.topic not in stream.by_name else numbered(topic.name.topic, number)
            value = topic.settings.wire_options.get(WIRE)
            before = StoredTopic(number, name) if value is None else TOPICS.decode(value)
            stored = msgspec.structs.replace(before, number=number, name=name)
        options = {**topic.settings.wire_options, WIRE: _ENCODER.encode(stored)}
        self._broker.configure_topic(topic, replace(topic.settings, wire_options=options), level=Level.WRITTEN)
        self._add_topic(stream, topic, stored)

    def refresh(self) -> None:
        """Scan the topics if some were created or deleted since the last scan."""
        self._refresh()

    def _refresh(self) -> None:
        if self._seen_version != self._broker.topics_version:
            deque(self._scan(), maxlen=0)

    @property
    def needs_long_scan(self) -> bool:
        """Whether a scan of the topics would delay other connections, because there are too many of them."""
        version = self._broker.topics_version
        unseen = version - self._seen_version
        is_long = unseen > UNSEEN_MAX or (unseen and len(self._topics) > SCANNED_MAX)
        return bool(is_long) and version != self._failed_version

    def scan_in_slices(self, then: Callable[[], None]) -> None:
        """Scan all topics in several passes of the loop, then call ``then``."""
        self._waiting.append(then)
        if len(self._waiting) == 1:
            Slices(self._broker, self._steps(), self._scanned)

    def _steps(self) -> Iterator[None]:
        return self._scan()

    def number_topics(self, then: Callable[[], None]) -> None:
        """Assign numbers to all topics that have none, then call ``then``.

        With many topics, this takes several passes of the loop. Raises Busy.
        """
        if self.needs_long_scan:
            self.scan_in_slices(then)
            return
        self._refresh()
        for topic in self._broker.topics():
            if WIRE not in topic.settings.wire_options:  # a protocol has dropped it
                self.stored(topic)
        then()

    def _scanned(self, seen: object) -> None:
        if isinstance(seen, BrokerError):  # the waiting requests scan the topics themselves
            self._failed_version = self._broker.topics_version
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def _scan(self) -> Iterator[None]:
        """Add new topics and assign numbers to them. Yields after each topic.

        Topics that are created during the scan are found by the next one.
        """
        version = self._broker.topics_version
        for stream in list(self._by_number.values()):
            yield from self._forget_ended(stream)
        new_topics: list[Topic] = []
        for topic in self._broker.topics():
            yield
            if topic.id in self._topics or not self.is_alive(topic):
                continue
            known = self._stream_in(topic)
            value = topic.settings.wire_options.get(WIRE)
            stored = None if value is None else TOPICS.decode(value)
            if known is None or stored is None or self._belongs_to_another_stream(known, topic, stored):
                new_topics.append(topic)
            else:
                self._add_topic(known, topic, stored)
        if (yield from self._number_all(new_topics)):
            self._seen_version = max(self._seen_version, version)

    def _stream_in(self, topic: Topic) -> Stream | None:
        """Return the stream of a topic; None if another process must assign a number to the stream first."""
        return self._by_namespace.get(topic.name.stream) or self._add_stream_of(topic)

    def _number_all(self, new_topics: Sequence[Topic]) -> Generator[None, None, bool]:
        """Assign numbers to topics. Return whether all of them have one."""
        for topic in new_topics:
            yield
            if topic.id not in self._topics and self.is_alive(topic):
                self._number(self._by_namespace.get(topic.name.stream) or self._add_stream_of(topic), topic)
        return True

    def _forget_ended(self, stream: Stream) -> Iterator[None]:
        for number, topic in list(stream.by_number.items()):
            yield
            if stream.by_number.get(number) is topic and not self.is_alive(topic):
                del stream.by_number[number]
                stream.free_from = min(stream.free_from, number)
                self._topics.pop(topic.id, None)
                self._balanced.pop(topic.id, None)
        for name, topic in list(stream.by_name.items()):
            yield
            if stream.by_name.get(name) is topic and not self.is_alive(topic):
                del stream.by_name[name]

    def _belongs_to_another_stream(self, stream: Stream, topic: Topic, stored: StoredTopic) -> bool:
        """Return whether the stored data of a topic belongs to another stream than ``stream``.

        That is so if an earlier release stored the topic in ``default``: the stored name is then the full name, or
        another topic has the number.
        """
        return (stored.name == topic.name.full != topic.name.topic) or stream.by_number.get(
            stored.number, topic
        ) is not topic

    def _add_stream_of(self, topic: Topic) -> Stream:
        return self._add_namespace(topic.name.stream, topic.created_at_us)

    def _add_namespace(self, namespace: str, created_at_us: int) -> Stream:
        """Add a stream that exists in the broker but not in this directory."""
        if not self.stores_streams:
            self._last_foreign -= 1
            stream = Stream(StoredStream(self._last_foreign, namespace, namespace, created_at_us))
            self._add(stream)
            return stream
        number = self._free_stream()
        name = namespace if namespace not in self._by_name else numbered(namespace, number)
        stream = Stream(StoredStream(number, name, namespace, created_at_us))
        self._store(stream, None, Level.WRITTEN)
        return stream

    def next_balanced(self, topic: Topic) -> int:
        """Return the next partition number in round-robin order."""
        turn = self._balanced.get(topic.id, 0)
        self._balanced[topic.id] = turn + 1
        return turn % len(topic.partitions)

    # Groups

    def groups(self, topic: Topic) -> dict[int, str]:
        """Return the names of a topic's groups by number.

        Groups of other protocols get a number first, and numbers of deleted groups become free.
        """
        stored = self.stored(topic)
        living = self._broker.groups.names(topic.name.full)
        groups = {number: name for number, name in stored.groups.items() if name in living}
        known = set(groups.values())
        new_topics = [name for name in living if name not in known]
        if not new_topics and len(groups) == len(stored.groups):
            return stored.groups
        for name in new_topics[: max(0, GROUPS_MAX - len(groups))]:
            groups[self._group_number(name, groups)] = name
        self.update_topic(topic, msgspec.structs.replace(stored, groups=groups), topic.settings, None)
        return groups

    def _group_number(self, name: str, taken: dict[int, str]) -> int:
        """Return the number for a new group.

        The oldest clients (D0) address a group by number only. If the new group's name is a number, it gets that
        number.
        """
        digits = name.removeprefix(_NAMELESS) if name.startswith(_NAMELESS) else ""
        known = 0 < len(digits) <= _NAMELESS_DIGITS_MAX and consists_of(digits, DIGITS) and digits[0] != "0"
        number = int(digits) - 1 if known else NUMBERS_END
        return number if number < NUMBERS_END and number not in taken else _first_free(taken, 0)

    def find_group(self, topic: Topic, identifier: int | str) -> tuple[int, str] | None:
        stored = self.stored(topic).groups
        name = stored.get(identifier) if isinstance(identifier, int) else identifier
        if name not in stored.values() or self._broker.groups.view(str(name), topic.name.full) is None:
            stored = self.groups(topic)  # another protocol may have created or deleted the group
        for number, name in stored.items():
            if identifier == (number if isinstance(identifier, int) else name):
                return number, name
        return None

    def group(self, topic: Topic, identifier: int | str) -> tuple[int, str]:
        """Return the number and name of a group. Raises Refused 5000 or 5003 if it does not exist."""
        found = self.find_group(topic, identifier)
        if found is None:
            raise Refused(errors.NO_GROUP_ID if isinstance(identifier, int) else errors.NO_GROUP_NAME)
        return found

    def group_number(self, topic: Topic, name: str) -> int | None:
        """Return the number that ``groups`` has assigned to a group; None if the group was deleted meanwhile."""
        return next((number for number, known in self.stored(topic).groups.items() if known == name), None)

    def create_group(self, topic: Topic, name: str, number: int | None, by: Caller, then: Completion[int]) -> None:
        """Create a group without members. ``then`` is called with its number when it is stored.

        Raises Refused 5001, 5004 or 5005.
        """
        groups = self.groups(topic)
        if number is not None and number in groups:
            raise Refused(errors.GROUP_ID_TAKEN)
        if name in groups.values():
            raise Refused(errors.GROUP_NAME_TAKEN)
        if len(groups) >= GROUPS_MAX:
            raise Refused(errors.BAD_GROUP_NAME)
        self._broker.groups.create(name, topic.name.full, by=by)
        number = self._group_number(name, groups) if number is None else number
        stored = msgspec.structs.replace(self.stored(topic), groups={**groups, number: name})
        self.update_topic(topic, stored, topic.settings, partial(_stored, number, then))

    def delete_group(self, topic: Topic, number: int, by: Caller, done: Completion[int]) -> None:
        """Delete a group with its members and committed offsets. Raises Missing(GROUP_MISSING), Denied(DENIED)."""
        groups = dict(self.groups(topic))
        self._broker.groups.delete(groups.pop(number), topic.name.full, by=by)
        self.update_topic(topic, msgspec.structs.replace(self.stored(topic), groups=groups), topic.settings, done)


def numbers_from(shard: int) -> int:
    """Return the first topic number that a shard assigns. Shards assign different numbers."""
    return (shard + 1) * CHOSEN_MAX


def _stored(value: _Value, then: Completion[_Value], result: object) -> None:
    """Call ``then`` with the value if ``result`` is not an error, otherwise with the error."""
    then(result if isinstance(result, BrokerError) else value)


def _first_free(taken: Mapping[int, object], number: int) -> int:
    while number in taken:
        number += 1
    return number


_ENCODER: Final = msgspec.msgpack.Encoder()
STREAMS: Final = msgspec.msgpack.Decoder(StoredStream)
TOPICS: Final = msgspec.msgpack.Decoder(StoredTopic)
