"""Streams, topics and groups with Iggy's numbers and names; a stream may be empty.

* A number stays assigned as long as its stream, topic or group exists, also across restarts.
* A stream or topic that another protocol created gets a number when it is first seen. Numbers count from 0 here.
* A rename over this protocol changes only the name that this protocol shows. The broker's name of the topic, which
  determines where its records are stored, stays.

A stream is stored in the protocol's own state under ``stream.<number>``. A topic's ``wire_options`` contain its number,
name and settings, and the numbers of its groups.

With several shards the first one stores the streams. The directories of other shards contain the streams of their
topics, under negative numbers that are never sent to clients. The number that a directory assigns to a topic identifies
the shard. See ``RoutedDirectory`` for the streams and topics that clients see.

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
from polywire.protocols.iggy.names import is_broker_name, numbered, space_of
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


class StreamKept(msgspec.Struct, frozen=True, array_like=True):
    """A stream as stored.

    ``space`` is the name of its stream in the broker, which a rename over this protocol does not change.
    """

    number: int
    name: str
    space: str
    created_at_us: int


class TopicKept(msgspec.Struct, frozen=True, array_like=True):
    """The protocol's own state of a topic.

    In ``expiry_us``, 0 means never, and None the default. In ``size_max``, 0 means the default.
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

    ``by_number`` and ``by_name`` have the same topics; some may have been deleted in the meantime. All numbers below
    ``free_from`` are used.
    """

    __slots__ = ("by_name", "by_number", "free_from", "kept")

    def __init__(self, kept: StreamKept) -> None:
        self.kept = kept
        self.free_from = 0
        self.by_number: dict[int, Topic] = {}
        self.by_name: dict[str, Topic] = {}

    @property
    def number(self) -> int:
        return self.kept.number


class DirectoryBroker(TopicVerbs, WireStateVerbs, WireBroker, Protocol):
    @property
    def streams(self) -> Streams: ...

    @property
    def groups(self) -> Coordinator: ...


class Directory:
    """All streams.

    ``_by_number`` and ``_by_name`` have the same streams. ``_kept`` caches the decoded settings of topics. The topics
    are those of catalogue version ``_seen_version``. All stream numbers below ``_free_from`` are used.

    ``_waiting`` has the callbacks to call after a scan in slices. ``_given_up_version`` is the catalogue version at
    which a scan failed.
    """

    __slots__ = (
        "_balanced",
        "_broker",
        "_by_name",
        "_by_number",
        "_by_space",
        "_foreign",
        "_free_from",
        "_given_up_version",
        "_kept",
        "_seen_version",
        "_shard",
        "_waiting",
    )

    def __init__(self, broker: DirectoryBroker, shard: int | None = None) -> None:
        self._broker = broker
        self._shard = shard
        self._foreign = -1
        self._by_number: dict[int, Stream] = {}
        self._by_name: dict[str, Stream] = {}
        self._by_space: dict[str, Stream] = {}
        self._kept: dict[bytes, tuple[TopicSettings, TopicKept]] = {}
        self._balanced: dict[bytes, int] = {}
        self._free_from = 0
        self._seen_version = -1
        self._given_up_version = -1
        self._waiting: list[Callable[[], None]] = []
        for key, value in broker.wire_state(WIRE).items():
            if key.startswith(STREAM_KEY):
                self._enter(Stream(STREAMS.decode(value)))
        # not stored, because it always exists; it is listed once it has topics
        if DEFAULT_STREAM not in self._by_space:
            self._enter(
                Stream(StreamKept(DEFAULT_STREAM_NUMBER, DEFAULT_STREAM, DEFAULT_STREAM, broker.clock.now_us()))
            )
        self._refresh()

    # Streams

    def streams(self) -> list[Stream]:
        """Return all streams, sorted by number; the default stream only if it has topics."""
        self._refresh()
        return [
            stream for _, stream in sorted(self._by_number.items()) if stream.by_number or stream.number < NUMBER_MAX
        ]

    def find_stream(self, who: int | str) -> Stream | None:
        """Find a stream by its number (counting from 0), its name, or the name of its stream in the broker."""
        found = self._look_up(who)
        if found is None:
            self._refresh()
            found = self._look_up(who)
        return found

    @property
    def keeps_streams(self) -> bool:
        return self._shard in (None, STREAMS_SHARD)

    def in_space(self, space: str) -> Stream:
        """Return the Iggy stream whose topics are in this stream of the broker.

        A shard that does not store the streams assumes that the stream exists. Raises Refused 1010 if it does not.
        """
        found = self.find_space(space)
        if found is None and self.keeps_streams:
            raise Refused(errors.NO_STREAM_NAME)
        return found or self._enter_space(space, self._broker.clock.now_us())

    def has_topics(self, space: str) -> bool:
        """Return whether a stream of the broker has topics here."""
        stream = self.find_space(space)
        return stream is not None and bool(self.topics(stream))

    def adopt(self, spaces: Collection[str]) -> None:
        """Store streams that other protocols have created in any shard. Raises Busy if there are too many."""
        for space in spaces:
            if self._by_space.get(space) is None:
                self._enter_space(space, self._broker.clock.now_us())

    def forget_space(self, space: str) -> None:
        """Forget a stream that was deleted in the shard that stores it, unless it has topics here."""
        stream = None if self.keeps_streams else self._by_space.get(space)
        if stream is not None and stream.number < 0 and not any(map(self.is_alive, stream.by_number.values())):
            self._leave(stream)

    def _look_up(self, who: int | str) -> Stream | None:
        if isinstance(who, int):
            return self._by_number.get(who)
        return self._by_name.get(who) or self._by_space.get(who)

    def create_stream(self, name: str, number: int | None, by: Caller, then: Completion[StreamKept]) -> None:
        """Create an empty stream. ``then`` gets it when it is stored.

        Raises Refused 1011, 1012 or 1013, and Busy if there are too many streams.
        """
        if number is not None and self.find_stream(number) is not None:
            raise Refused(errors.STREAM_ID_TAKEN)
        self._refresh()
        space = space_of(name)
        if name in self._by_name or space in self._by_space:  # a renamed stream may still have this name in the broker
            raise Refused(errors.STREAM_NAME_TAKEN)
        if name == DEFAULT_STREAM or len(self._by_number) >= STREAMS_MAX or not is_broker_name(name):
            raise Refused(errors.BAD_STREAM_NAME)
        self._admit_stream(by)
        number = self._free_stream() if number is None else number
        stream = Stream(StreamKept(number, name, space, self._broker.clock.now_us()))
        self._keep(stream, partial(_stored, stream.kept, then), by=by)

    def _admit_stream(self, by: Caller) -> None:
        """Raise Busy(BUSY) if the caller already owns ``bulk_share`` of the maximum number of streams."""
        owned = [self._broker.wire_owner(WIRE, f"{STREAM_KEY}{number}") for number in self._by_number]
        if by.owner != UNOWNED and owned.count(by.owner) >= STREAMS_MAX * self._broker.settings.bulk_share:
            raise Busy(ErrorCode.BUSY, "too many streams for one user or address")

    def rename_stream(self, stream: Stream, name: str, done: Completion[int] | None) -> None:
        """Change the name that Iggy clients see. Other protocols see the old name.

        Raises Refused 1012 or 1013.
        """
        other = self.find_stream(name)
        if other is not None and other is not stream:
            raise Refused(errors.STREAM_NAME_TAKEN)
        if stream.number >= NUMBER_MAX or not is_broker_name(name):
            raise Refused(errors.BAD_STREAM_NAME)
        del self._by_name[stream.kept.name]
        stream.kept = msgspec.structs.replace(stream.kept, name=name)
        self._keep(stream, done)

    def delete_stream(self, stream: Stream, done: Completion[int]) -> None:
        """Delete a stream's topics, then the stream.

        Many topics are deleted one after the other. If the broker stops or an error occurs in between, the stream
        remains with the remaining topics. Topics created in the meantime are deleted too, unless there are too many.
        """

        def emptied() -> None:
            if self._by_number.get(stream.number) is not stream:
                return  # another request has deleted the stream
            self._end_few(stream)
            if stream.number >= 0:
                self._broker.set_wire_state(WIRE, f"{STREAM_KEY}{stream.number}", None)
            self._leave(stream)

        self._broker.delete_topics(self.topics(stream), ended=partial(self._forget, stream), then=emptied, done=done)

    def _end_few(self, stream: Stream) -> None:
        """Delete topics that were created while the stream was emptied.

        Raises Busy(BUSY) if there are too many to delete at once.
        """
        left = [topic for topic in stream.by_number.values() if self.is_alive(topic)]
        if sum([1 + len(topic.partitions) for topic in left]) > AT_ONCE_MAX:
            raise Busy(ErrorCode.BUSY, "another request created topics in the stream (retry)")
        for topic in left:
            self._broker.delete_topic(topic)
            self._forget(stream, topic)

    def _forget(self, stream: Stream, topic: Topic) -> None:
        _, kept = self._kept.pop(topic.id, (None, None))
        self._balanced.pop(topic.id, None)
        if kept is None:
            return
        if stream.by_number.get(kept.number) is topic:
            del stream.by_number[kept.number]
            stream.free_from = min(stream.free_from, kept.number)
        if stream.by_name.get(kept.name) is topic:
            del stream.by_name[kept.name]
        if self._seen_version + 1 == self._broker.topics_version:
            self._seen_version += 1  # the deletion is the only change since the last scan

    def _keep(
        self, stream: Stream, done: Completion[int] | None, level: Level = Level.SYNCED, *, by: Caller = ITSELF
    ) -> None:
        value = _ENCODER.encode(stream.kept)
        self._broker.set_wire_state(WIRE, f"{STREAM_KEY}{stream.number}", value, by=by, level=level, done=done)
        self._enter(stream)

    def _enter(self, stream: Stream) -> None:
        self._by_number[stream.number] = stream
        self._by_name[stream.kept.name] = stream
        self._by_space[stream.kept.space] = stream
        self._broker.streams.declare(stream.kept.space)

    def _leave(self, stream: Stream) -> None:
        del self._by_number[stream.number]
        self._free_from = min(self._free_from, stream.number)
        del self._by_name[stream.kept.name]
        del self._by_space[stream.kept.space]
        self._broker.streams.end(stream.kept.space)

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

    def find_topic(self, stream: Stream, who: int | str) -> Topic | None:
        found = stream.by_number.get(who) if isinstance(who, int) else stream.by_name.get(who)
        if found is None or not self.is_alive(found):
            self._refresh()
            found = stream.by_number.get(who) if isinstance(who, int) else stream.by_name.get(who)
        return found

    def stream_of(self, topic: Topic) -> Stream:
        found = self._by_space.get(topic.name.stream)
        if found is None:
            self._refresh()
            found = self._by_space[topic.name.stream]
        return found

    def find_space(self, space: str) -> Stream | None:
        """Return the Iggy stream whose topics are in this stream of the broker, None if there is none."""
        self._refresh()
        return self._by_space.get(space)

    def find_full(self, name: TopicName) -> Topic | None:
        return self._broker.find_topic(name.full)

    def check_topic_name(self, stream: Stream, name: str, *, but: Topic | None = None) -> None:
        """Raise Refused 2013 or 2014 if the name is used, or the broker does not allow it."""
        other = self.find_topic(stream, name)
        if other is not None and other is not but:
            raise Refused(errors.TOPIC_NAME_TAKEN)
        if not is_broker_name(name):
            raise Refused(errors.BAD_TOPIC_NAME)

    def create_topic(
        self,
        stream: Stream,
        kept: TopicKept,
        number: int | None,
        partitions: int,
        settings: TopicSettings,
        by: Caller,
        then: Then,
        done: Completion[int],
    ) -> None:
        """Create a topic, which other protocols see as ``stream.topic``. Call ``then`` with it once it can be used.

        If another topic gets the number or the name while this one is created, this one gets a different number or
        name. Raises Refused 2012, 2013 or 2014, and BrokerError.
        """
        if number is not None and self.find_topic(stream, number) is not None:
            raise Refused(errors.TOPIC_ID_TAKEN)
        self.check_topic_name(stream, kept.name)
        number = self._free_topic(stream) if number is None else number
        kept = msgspec.structs.replace(kept, number=number)
        options = {**settings.wire_options, WIRE: _ENCODER.encode(kept)}
        name = TopicName(stream.kept.space, kept.name)
        if self._broker.find_topic(name.full) is not None:  # the topic with this name was renamed for Iggy clients
            raise Refused(errors.TOPIC_NAME_TAKEN)
        if not name.is_plain:
            raise Refused(errors.BAD_TOPIC_NAME)
        settings = replace(settings, wire_options=options)

        def begun(topic: Topic) -> None:
            self._begun(stream, topic, kept)
            then(topic)

        self._broker.make_topic(name, partitions, settings, partition_count_min=0, by=by, then=begun, done=done)

    def _begun(self, stream: Stream, topic: Topic, kept: TopicKept) -> None:
        if (
            self._by_space.get(topic.name.stream) is not stream
            or self._is_elsewhere(stream, topic, kept)
            or stream.by_name.get(kept.name, topic) is not topic
        ):
            self._number(self._by_space.get(topic.name.stream) or self._adopt(topic), topic)
        else:
            self._enter_topic(stream, topic, kept)
        if self._seen_version + 1 == self._broker.topics_version:
            self._seen_version += 1  # this topic is the only change since the last scan

    def update_topic(
        self, topic: Topic, kept: TopicKept, settings: TopicSettings, done: Completion[int] | None
    ) -> None:
        """Change a topic's settings, and its name for Iggy clients."""
        stream = self.stream_of(topic)
        stream.by_name.pop(self.kept(topic).name, None)
        options = {**settings.wire_options, WIRE: _ENCODER.encode(kept)}
        level = Level.WRITTEN if done is None else Level.SYNCED
        self._broker.configure_topic(topic, replace(settings, wire_options=options), level=level, done=done)
        self._enter_topic(stream, topic, kept)

    def kept(self, topic: Topic) -> TopicKept:
        known = self._kept.get(topic.id)
        if known is not None and known[0] is topic.settings:
            return known[1]
        value = topic.settings.wire_options.get(WIRE)
        if value is None:  # the topic was created over another protocol, or changed by a protocol that drops this state
            self._number(self.stream_of(topic), topic)
            value = topic.settings.wire_options[WIRE]
        kept = TOPICS.decode(value)
        self._kept[topic.id] = (topic.settings, kept)
        return kept

    def is_alive(self, topic: Topic) -> bool:
        return self._broker.topic_of_id(topic.id) is topic

    def _enter_topic(self, stream: Stream, topic: Topic, kept: TopicKept) -> None:
        stream.by_number[kept.number] = topic
        stream.by_name[kept.name] = topic
        self._kept[topic.id] = (topic.settings, kept)

    def _number(self, stream: Stream, topic: Topic) -> None:
        """Assign a number and a name to a topic of another protocol.

        The name is the topic's own, unless another topic of the stream has it.
        """
        known = self._kept.get(topic.id)
        if known is not None:
            kept = known[1]  # another protocol has dropped it
        else:
            number = self._free_topic(stream)
            name = topic.name.topic if topic.name.topic not in stream.by_name else numbered(topic.name.topic, number)
            value = topic.settings.wire_options.get(WIRE)
            was = TopicKept(number, name) if value is None else TOPICS.decode(value)
            kept = msgspec.structs.replace(was, number=number, name=name)
        options = {**topic.settings.wire_options, WIRE: _ENCODER.encode(kept)}
        self._broker.configure_topic(topic, replace(topic.settings, wire_options=options), level=Level.WRITTEN)
        self._enter_topic(stream, topic, kept)

    def refresh(self) -> None:
        """Make sure that all topics are known."""
        self._refresh()

    def _refresh(self) -> None:
        if self._seen_version != self._broker.topics_version:
            deque(self._scan(), maxlen=0)

    @property
    def is_far_behind(self) -> bool:
        """Return whether a scan would delay other connections, because there are too many topics or too many new ones."""
        version = self._broker.topics_version
        unseen = version - self._seen_version
        is_long = unseen > UNSEEN_MAX or (unseen and len(self._kept) > SCANNED_MAX)
        return bool(is_long) and version != self._given_up_version

    def catch_up(self, then: Callable[[], None]) -> None:
        """Scan all topics in slices and call ``then`` at the end."""
        self._waiting.append(then)
        if len(self._waiting) == 1:
            Slices(self._broker, self._steps(), self._caught_up)

    def _steps(self) -> Iterator[None]:
        return self._scan()

    def number_topics(self, then: Callable[[], None]) -> None:
        """Assign numbers to all topics that have none, in slices if they are many. Raises Busy."""
        if self.is_far_behind:
            self.catch_up(then)
            return
        self._refresh()
        for topic in self._broker.topics():
            if WIRE not in topic.settings.wire_options:  # a protocol has dropped it
                self.kept(topic)
        then()

    def _caught_up(self, seen: object) -> None:
        if isinstance(seen, BrokerError):  # the waiting requests scan the topics themselves
            self._given_up_version = self._broker.topics_version
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()

    def _scan(self) -> Iterator[None]:
        """Scan all topics and assign numbers to new ones, one topic per step.

        Topics that are created during the scan are found by the next scan.
        """
        version = self._broker.topics_version
        for stream in list(self._by_number.values()):
            yield from self._forget_ended(stream)
        fresh: list[Topic] = []
        for topic in self._broker.topics():
            yield
            if topic.id in self._kept or not self.is_alive(topic):
                continue
            known = self._stream_in(topic)
            value = topic.settings.wire_options.get(WIRE)
            kept = None if value is None else TOPICS.decode(value)
            if known is None or kept is None or self._is_elsewhere(known, topic, kept):
                fresh.append(topic)
            else:
                self._enter_topic(known, topic, kept)
        if (yield from self._number_all(fresh)):
            self._seen_version = max(self._seen_version, version)

    def _stream_in(self, topic: Topic) -> Stream | None:
        """Return the stream of a topic; None if another process must first assign a number to it."""
        return self._by_space.get(topic.name.stream) or self._adopt(topic)

    def _number_all(self, fresh: Sequence[Topic]) -> Generator[None, None, bool]:
        """Assign numbers to topics. Return whether all of them have one."""
        for topic in fresh:
            yield
            if topic.id not in self._kept and self.is_alive(topic):
                self._number(self._by_space.get(topic.name.stream) or self._adopt(topic), topic)
        return True

    def _forget_ended(self, stream: Stream) -> Iterator[None]:
        for number, topic in list(stream.by_number.items()):
            yield
            if stream.by_number.get(number) is topic and not self.is_alive(topic):
                del stream.by_number[number]
                stream.free_from = min(stream.free_from, number)
                self._kept.pop(topic.id, None)
                self._balanced.pop(topic.id, None)
        for name, topic in list(stream.by_name.items()):
            yield
            if stream.by_name.get(name) is topic and not self.is_alive(topic):
                del stream.by_name[name]

    def _is_elsewhere(self, stream: Stream, topic: Topic, kept: TopicKept) -> bool:
        """Return whether the topic's stored state belongs to another stream.

        An earlier release stored it in ``default``. In that case, the stored name is the full name, or another topic
        uses the number.
        """
        return (kept.name == topic.name.full != topic.name.topic) or stream.by_number.get(
            kept.number, topic
        ) is not topic

    def _adopt(self, topic: Topic) -> Stream:
        return self._enter_space(topic.name.stream, topic.created_at_us)

    def _enter_space(self, space: str, created_at_us: int) -> Stream:
        """Add a stream that exists in the broker but not in this directory."""
        if not self.keeps_streams:
            self._foreign -= 1
            stream = Stream(StreamKept(self._foreign, space, space, created_at_us))
            self._enter(stream)
            return stream
        number = self._free_stream()
        name = space if space not in self._by_name else numbered(space, number)
        stream = Stream(StreamKept(number, name, space, created_at_us))
        self._keep(stream, None, Level.WRITTEN)
        return stream

    def next_balanced(self, topic: Topic) -> int:
        """Return the next partition in round-robin order. After a start, the order begins with the first partition."""
        turn = self._balanced.get(topic.id, 0)
        self._balanced[topic.id] = turn + 1
        return turn % len(topic.partitions)

    # Groups

    def groups(self, topic: Topic) -> dict[int, str]:
        """Return the names of a topic's groups by number.

        Groups of other protocols get a number, and the numbers of deleted groups become free.
        """
        kept = self.kept(topic)
        living = self._broker.groups.names(topic.name.full)
        groups = {number: name for number, name in kept.groups.items() if name in living}
        known = set(groups.values())
        fresh = [name for name in living if name not in known]
        if not fresh and len(groups) == len(kept.groups):
            return kept.groups
        for name in fresh[: max(0, GROUPS_MAX - len(groups))]:
            groups[self._group_number(name, groups)] = name
        self.update_topic(topic, msgspec.structs.replace(kept, groups=groups), topic.settings, None)
        return groups

    def _group_number(self, name: str, taken: dict[int, str]) -> int:
        """Return the number for a new group.

        The documented dialect gives nameless groups a name with a number. If the new group has such a name, it gets
        this number, so that clients of this dialect find the group.
        """
        digits = name.removeprefix(_NAMELESS) if name.startswith(_NAMELESS) else ""
        known = 0 < len(digits) <= _NAMELESS_DIGITS_MAX and consists_of(digits, DIGITS) and digits[0] != "0"
        number = int(digits) - 1 if known else NUMBERS_END
        return number if number < NUMBERS_END and number not in taken else _first_free(taken, 0)

    def find_group(self, topic: Topic, who: int | str) -> tuple[int, str] | None:
        kept = self.kept(topic).groups
        name = kept.get(who) if isinstance(who, int) else who
        if name not in kept.values() or self._broker.groups.view(str(name), topic.name.full) is None:
            kept = self.groups(topic)  # another protocol may have created or deleted the group
        for number, name in kept.items():
            if who == (number if isinstance(who, int) else name):
                return number, name
        return None

    def group(self, topic: Topic, who: int | str) -> tuple[int, str]:
        """Return the number and name of a group. Raises Refused 5000 or 5003 if it does not exist."""
        found = self.find_group(topic, who)
        if found is None:
            raise Refused(errors.NO_GROUP_ID if isinstance(who, int) else errors.NO_GROUP_NAME)
        return found

    def group_number(self, topic: Topic, name: str) -> int | None:
        """Return the number of a group that has been found before; None if it was deleted."""
        return next((number for number, known in self.kept(topic).groups.items() if known == name), None)

    def create_group(self, topic: Topic, name: str, number: int | None, by: Caller, then: Completion[int]) -> None:
        """Create a group without members. ``then`` gets its number when it is stored.

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
        kept = msgspec.structs.replace(self.kept(topic), groups={**groups, number: name})
        self.update_topic(topic, kept, topic.settings, partial(_stored, number, then))

    def delete_group(self, topic: Topic, number: int, by: Caller, done: Completion[int]) -> None:
        """Delete a group with its members and offsets. Raises Missing(GROUP_MISSING), Denied(DENIED)."""
        groups = dict(self.groups(topic))
        self._broker.groups.delete(groups.pop(number), topic.name.full, by=by)
        self.update_topic(topic, msgspec.structs.replace(self.kept(topic), groups=groups), topic.settings, done)


def numbers_from(shard: int) -> int:
    """Return the first topic number of a shard. No two shards assign the same number."""
    return (shard + 1) * CHOSEN_MAX


def _stored(value: _Value, then: Completion[_Value], result: object) -> None:
    """Report a value once it is stored, or the error if it was not stored."""
    then(result if isinstance(result, BrokerError) else value)


def _first_free(taken: Mapping[int, object], number: int) -> int:
    while number in taken:
        number += 1
    return number


_ENCODER: Final = msgspec.msgpack.Encoder()
STREAMS: Final = msgspec.msgpack.Decoder(StreamKept)
TOPICS: Final = msgspec.msgpack.Decoder(TopicKept)
