"""Requests about topics and their offset ranges (spec: polywire#verbs, polywire#bounds-and-fetch).

The bounds of a partition are its first and next readable offset. They are returned when all records between them are
synced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from polywire.broker.settings import TOPIC_SETTINGS, TopicSettings, check_name
from polywire.choices import unknown
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.log.base import Completion
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.arguments import TOPICS_MAX, find_partition, level_of
from polywire.protocols.polywire.auth import created_name
from polywire.protocols.polywire.messages import Head, SettingValue, Verb
from polywire.protocols.polywire.replies import LongAnswer, ReplyOwner

if TYPE_CHECKING:
    from polywire.broker.record_verbs import Bounds
    from polywire.broker.topics import Partition, Topic
    from polywire.protocols.polywire.context import PolywireBroker

TIMES_MAX: Final = 16
# limit for partitions × (1 + times) in one request; about a tenth of a second of work, in slices
BOUNDS_MAX: Final = 100_000


def list_topics(session: ReplyOwner, correlation: int, request: messages.ListTopics, _: memoryview) -> None:
    session.broker.require_latest()
    topics = session.broker.topics(internal=request.internal)
    LongAnswer(session, Verb.TOPICS, correlation).make(_entries(session, topics), messages.TopicList)


def _entries(session: ReplyOwner, topics: Sequence[Topic]) -> Iterator[messages.TopicEntry | None]:
    sees = session.admission.sees
    for topic in topics:
        seen = sees(topic)
        yield (
            messages.TopicEntry(topic.name.full, topic.id, len(topic.partitions), topic.settings.link) if seen else None
        )


def create(session: ReplyOwner, correlation: int, request: messages.CreateTopic, _: memoryview) -> None:
    change = _Change(session, Verb.CREATE_TOPIC, correlation)
    name, settings = created_name(request), settings_of(request.settings)
    accepted = session.broker.make_topic(
        name,
        request.partition_count,
        settings,
        by=session.admission.caller,
        level=level_of(request.level),
        then=change.set_topic,
        done=change.done,
    )
    change.accepted(accepted)


def describe(session: ReplyOwner, correlation: int, request: messages.Describe, _: memoryview) -> None:
    session.answer(Verb.DESCRIBE, correlation, description_of(session, session.broker.topic(request.name)))


def grow(session: ReplyOwner, correlation: int, request: messages.GrowTopic, _: memoryview) -> None:
    topic, level = session.broker.topic(request.name), level_of(request.level)
    change = _Change(session, Verb.GROW_TOPIC, correlation)
    change.accepted(
        session.broker.grow_topic(
            topic, request.partition_count, by=session.admission.caller, level=level, done=change.done
        )
    )


def configure(session: ReplyOwner, correlation: int, request: messages.ConfigureTopic, _: memoryview) -> None:
    """CONFIGURE_TOPIC: change only the settings that the request names.

    Raises BrokerError if it is rejected immediately.
    """
    topic, level = session.broker.topic(request.name), level_of(request.level)
    given = values_of(request.settings)
    for name in given:
        if TOPIC_SETTINGS[name].is_fixed:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"{name} cannot be changed: existing records keep their partition")
    settings = replace(topic.settings, **given)
    settings.check()
    change = _Change(session, Verb.CONFIGURE_TOPIC, correlation)
    session.broker.configure_topic(topic, settings, level=level, done=change.done)
    change.accepted(True)


def link(session: ReplyOwner, correlation: int, request: messages.LinkTopic, _: memoryview) -> None:
    """LINK_TOPIC: make a link the only writer of a topic, or let all clients write to it again. Raises BrokerError."""
    topic, level = session.broker.topic(request.name), level_of(request.level)
    if request.link:
        check_name(request.link, session.broker.settings.name_bytes_max)
    change = _Change(session, Verb.LINK_TOPIC, correlation)
    session.broker.link_topic(topic, request.link, level=level, done=change.done)
    change.accepted(True)


def purge(session: ReplyOwner, correlation: int, request: messages.PurgeTopic, _: memoryview) -> None:
    topic, level = session.broker.topic(request.name), level_of(request.level)
    change = _Change(session, Verb.PURGE_TOPIC, correlation)
    change.accepted(session.broker.purge_topic(topic, level=level, done=change.done))


def begin(session: ReplyOwner, correlation: int, request: messages.BeginPartition, _: memoryview) -> None:
    """BEGIN_PARTITION: set the offset of the next record of an empty partition.

    Raises BrokerError if it is rejected immediately.
    """
    partition = find_partition(session.broker, request.name, request.partition)
    level = level_of(request.level)
    change = _Change(session, Verb.BEGIN_PARTITION, correlation)
    by = session.admission.caller
    session.broker.begin_partition(partition, request.offset, by=by, level=level, done=change.done)
    change.accepted(True)


def delete(session: ReplyOwner, correlation: int, request: messages.DeleteTopic, _: memoryview) -> None:
    topic, level = session.broker.topic(request.name), level_of(request.level)
    change = _Change(session, Verb.DELETE_TOPIC, correlation)
    session.broker.delete_topic(topic, level=level, done=change.done)
    change.accepted(True)


def ask_bounds(session: ReplyOwner, correlation: int, request: messages.AskBounds, _: memoryview) -> None:
    """BOUNDS: return the first and end offsets of partitions, and their offsets at given times.

    Raises Invalid for an invalid time, and Missing for an unknown topic.
    """
    broker = session.broker
    if len(request.names) > TOPICS_MAX or len(request.times_us) > TIMES_MAX:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"too many names or times names={len(request.names)} limit={TOPICS_MAX} "
            f"times={len(request.times_us)} limit={TIMES_MAX}",
        )
    topics = [broker.topic(name) for name in dict.fromkeys(request.names)]
    count = sum([len(topic.partitions) for topic in topics]) * (1 + len(request.times_us))
    if count > BOUNDS_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"too many bounds in one request count={count} limit={BOUNDS_MAX}")
    # Earlier requests of this connection must be included. If there are none, a commit costs almost nothing.
    broker.commit()
    answer = LongAnswer(session, Verb.BOUNDS, correlation)
    _BoundsAnswer(answer, topics, request.times_us).ask(broker)


class _Change:
    """The response to a change of a topic.

    If the change is not complete immediately, later requests wait for it, so that they see the changed topic.
    """

    __slots__ = ("_correlation", "_holds", "_session", "_topic", "_verb")

    def __init__(self, session: ReplyOwner, verb: Verb, correlation: int) -> None:
        self._session: Final = session
        self._verb: Final = verb
        self._correlation: Final = correlation
        self._holds = False
        self._topic: Topic | None = None

    def set_topic(self, topic: Topic) -> None:
        self._topic = topic

    def accepted(self, is_complete: bool) -> None:
        """Record that the broker has accepted the change. ``is_complete``: whether ``done`` is called immediately."""
        self._holds = not is_complete
        if self._holds:
            self._session.hold()
        else:
            self._session.owe()

    def done(self, result: int | BrokerError) -> None:
        if self._holds:  # not inside a callback of the log, because the session then handles further requests
            self._session.broker.loop.call_soon(self._end, result)
        else:
            self._respond(result)

    def _end(self, result: int | BrokerError) -> None:
        self._session.release()
        self._respond(result)

    def _respond(self, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            self._session.respond_error(self._verb, self._correlation, result)
        else:
            description = Head() if self._topic is None else description_of(self._session, self._topic)
            self._session.respond(self._verb, self._correlation, description)


class _BoundsAnswer:
    """The response to BOUNDS.

    After an error, no further look-up starts. The error is sent when the pending look-ups have ended.
    """

    __slots__ = ("_answer", "_broker", "_error", "_next", "_outstanding", "_results", "_times_us", "_topics")

    def __init__(self, answer: LongAnswer, topics: Sequence[Topic], times_us: Sequence[int]) -> None:
        self._answer: Final = answer
        self._topics: Final = [(topic, list(topic.partitions)) for topic in topics]
        self._times_us: Final = times_us
        self._results: list[tuple[Partition, Bounds, list[int]]] = []  # with the offsets for the times
        self._error: BrokerError | None = None
        self._next = 0  # the next partition to look up
        self._outstanding = 1

    def ask(self, broker: PolywireBroker) -> None:
        self._broker = broker
        broker.many_bounds([one for _, partitions in self._topics for one in partitions], then=self._bounded)

    def _bounded(self, found: list[Bounds] | BrokerError) -> None:
        if isinstance(found, BrokerError):
            self._answer.refuse(found)
            return
        partitions = [one for _, partitions in self._topics for one in partitions]
        count = len(self._times_us)
        self._results = [
            (partition, bounds, [bounds.next_offset] * count)
            for partition, bounds in zip(partitions, found, strict=True)
        ]
        self._broker.sliced.put(self._look_up_slice)

    def _look_up_slice(self, end: float) -> bool:
        now = self._broker.clock.monotonic
        while self._times_us and self._next < len(self._results):
            partition, _, offsets = self._results[self._next]
            self._next += 1
            self._outstanding += len(offsets)
            for index, time_us in enumerate(self._times_us):
                self._look_up(partition, time_us, partial(self._found_at, offsets, index))
            if now() >= end:
                return True
        self._count_down()
        return False

    def _look_up(self, partition: Partition, time_us: int, then: Completion[int]) -> None:
        try:
            found = partition.log.offset_at(time_us, then)
        except BrokerError as error:
            then(error)
            return
        if isinstance(found, int):
            then(found)

    def _found_at(self, offsets: list[int], index: int, found: int | BrokerError) -> None:
        """Keep the offset that was found for a time in the response, but not above the end offset that is there already."""
        if isinstance(found, BrokerError):
            self._error = self._error or found
        else:
            offsets[index] = min(found, offsets[index])
        self._count_down()

    def _count_down(self) -> None:
        self._outstanding -= 1
        if self._outstanding:
            return
        if self._error is not None:
            self._answer.refuse(self._error)
        else:
            self._answer.make(self._entries(), self._list)

    def _entries(self) -> Iterator[messages.PartitionEntry]:
        for partition, bounds, offsets in self._results:
            yield messages.PartitionEntry(
                partition.number, partition.incarnation, bounds.epoch, bounds.first_offset, bounds.next_offset, offsets
            )

    def _list(self, entries: list[messages.PartitionEntry]) -> messages.BoundsList:
        topics, at = [], 0
        for topic, partitions in self._topics:
            topics.append(messages.TopicBounds(topic.name.full, topic.id, entries[at : at + len(partitions)]))
            at += len(partitions)
        return messages.BoundsList(topics)


def description_of(session: ReplyOwner, topic: Topic) -> messages.TopicDescription:
    """Return a topic with the URL of its table, unless the client may not get the paths of files."""
    settings: dict[str, SettingValue] = {}
    for name, setting in TOPIC_SETTINGS.items():
        value = setting.plain(getattr(topic.settings, name))
        assert value is None or isinstance(value, int | str), "a setting is a number or a word"
        settings[name] = int(value) if isinstance(value, bool) else value
    incarnations = [partition.incarnation for partition in topic.partitions]
    url = topic.table_url(session.broker.settings)
    may_get = not url.startswith("file:") or session.admission.sees_files()
    return messages.TopicDescription(
        topic.name.full,
        topic.id,
        topic.created_at_us,
        incarnations,
        settings,
        url if may_get else "",
        topic.settings.link,
    )


def settings_of(given: Mapping[str, SettingValue]) -> TopicSettings:
    """Return the settings of a new topic, from names and values in a request.

    Raises Invalid(INVALID_REQUEST) for an unknown name or an invalid value.
    """
    settings = TopicSettings(**values_of(given))
    settings.check()
    return settings


def values_of(given: Mapping[str, SettingValue]) -> dict[str, Any]:
    """Return values for fields of ``TopicSettings``, by name, from names and values in a request.

    Raises Invalid(INVALID_REQUEST) for an unknown name or an invalid value.
    """
    if wrong := sorted(given.keys() - TOPIC_SETTINGS.keys()):
        raise unknown("topic setting", wrong[0], TOPIC_SETTINGS)
    return {name: TOPIC_SETTINGS[name].read(name, value) for name, value in given.items()}
