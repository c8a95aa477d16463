"""The Iggy streams, topics and groups of all processes of a broker (decision 0130).

* The first shard stores the streams. Each process knows them, and the topics of all processes.
* Only the process that owns a topic changes the topic, its number and those of its groups. Other processes call the
  functions in ``FUNCTIONS`` there; the argument ``local`` is the called process's directory.
* A topic's number determines its shard. If a client chooses the number of a new topic, the topic is created in that
  shard, so that two topics never get the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from polywire.broker.api import Pending
from polywire.broker.owners import Caller
from polywire.broker.settings import TopicSettings
from polywire.broker.topic_verbs import Then
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, ErrorCode, Unavailable
from polywire.log.base import Completion, Handle
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.directory import (
    CHOSEN_MAX,
    STREAM_KEY,
    STREAMS,
    STREAMS_SHARD,
    TOPICS,
    Directory,
    DirectoryBroker,
    StoredStream,
    StoredTopic,
    Stream,
)
from polywire.protocols.iggy.messages import WIRE, Refused
from polywire.protocols.runtime.shards import Parts
from polywire.types import TopicName

SKIPPED_S: Final = 1.0  # pause before topics whose process has not assigned a number are requested again


class Results:
    """Collects the results of several calls. Implements ``Handle``.

    ``then`` is called with the results or errors in the order of the calls, in a later pass of the event loop.
    """

    __slots__ = ("_broker", "_count", "_results", "_then")

    def __init__(
        self,
        broker: DirectoryBroker,
        calls: Sequence[Callable[[Completion[Any]], object]],
        then: Callable[[list[Any]], object],
    ) -> None:
        self._broker: Final = broker
        self._then = then
        self._count: Final = len(calls)
        self._results: Final[dict[int, Any]] = {}
        for number, call in enumerate(calls):
            try:
                call(partial(self._add_result, number))
            except BrokerError as error:
                self._add_result(number, error)
        if not calls:
            broker.loop.call_soon(self._complete)

    def _add_result(self, number: int, result: object) -> None:
        self._results[number] = result
        if len(self._results) == self._count:
            self._broker.loop.call_soon(self._complete)

    def _complete(self) -> None:
        self._then([result for _, result in sorted(self._results.items())])

    def cancel(self) -> None:
        """Do not call ``then``."""
        self._then = _ignore


def _ignore(_: object) -> None:
    pass


class RoutedDirectory(Directory):
    """The streams, topics and groups of all processes, as sessions see them."""

    __slots__ = ("_changed", "_local", "_parts", "_skipped", "_skipped_until")

    def __init__(self, broker: DirectoryBroker, parts: Parts, local: Directory) -> None:
        """``local`` is the directory of this process."""
        self._parts: Final = parts
        self._local: Final = local
        self._changed: Final[set[bytes]] = set()  # topics whose settings may have changed
        self._skipped: frozenset[bytes] = frozenset()  # topics that got no number when it was requested
        self._skipped_until = 0.0  # when their numbers are requested again
        with suppress(Pending):  # the first request finds other processes' topics
            super().__init__(broker)
        parts.watch_values(self._value_changed)
        parts.watch_topics(self._topic_changed)

    def _call(self, at: int | Topic, function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Call a function with the directory of a shard, or of the shard that stores a topic.

        Raises Pending and BrokerError.
        """
        shard = at if isinstance(at, int) else self._parts.shard_of_topic(at)
        if shard == self._parts.shards.own:
            return function(self._local, *values, **options)
        return self._parts.call_part(shard, WIRE, function, *values, **options)

    # Streams

    def _value_changed(self, change: Any) -> None:
        if change.wire != WIRE or not change.key.startswith(STREAM_KEY):
            return
        stream = self._by_number.get(int(change.key.removeprefix(STREAM_KEY)))
        stored = None if change.value is None else STREAMS.decode(change.value)
        if stream is not None and stored is not None and stream.stored.namespace == stored.namespace:
            self._by_name.pop(stream.stored.name, None)
            stream.stored = stored
            self._add(stream)
            return
        if stream is not None:
            self._remove(stream)
        if stored is not None:
            self._add(Stream(stored))

    def _remove(self, stream: Stream) -> None:
        super()._remove(stream)
        for topic in stream.by_number.values():
            self._topics.pop(topic.id, None)
        if stream.by_number:
            self._seen_version = min(self._seen_version, self._broker.topics_version - 1)
        self._local.forget_namespace(stream.stored.namespace)

    def streams(self) -> list[Stream]:
        self._parts.require_latest()
        self.refresh()
        return super().streams()

    def find_stream(self, identifier: int | str) -> Stream | None:
        found = super().find_stream(identifier)
        if found is None:
            self._parts.require_latest()
        return found

    def create_stream(self, name: str, number: int | None, by: Caller, then: Completion[StoredStream]) -> None:
        self.refresh()
        self._call(STREAMS_SHARD, Directory.create_stream, name, number, by, then=then)

    def rename_stream(self, stream: Stream, name: str, done: Completion[int] | None) -> None:
        self.refresh()
        self._call(STREAMS_SHARD, rename_namespace, stream.stored.namespace, name, done=done)

    def delete_stream(self, stream: Stream, done: Completion[int]) -> None:
        """Delete a stream's topics in all processes, then the stream.

        If a process does not respond, the stream remains.
        """

        def emptied(result: int | BrokerError) -> None:
            try:
                if isinstance(result, BrokerError):
                    raise result
                self._call(STREAMS_SHARD, delete_namespace, stream.stored.namespace, done=done)
            except BrokerError as error:
                done(error)

        self.refresh()
        self._broker.delete_topics(self.topics(stream), ended=_ignore, then=_nothing, done=emptied)

    # Topics

    def _topic_changed(self, topic_id: bytes) -> None:
        if topic_id in self._topics:
            self._changed.add(topic_id)

    def _see_changes(self) -> None:
        """Update topics whose names have changed."""
        while self._changed:
            topic_id = self._changed.pop()
            topic, known = self._broker.topic_of_id(topic_id), self._topics.get(topic_id)
            stream = None if topic is None else self._by_namespace.get(topic.name.stream)
            if topic is None or stream is None or known is None or WIRE not in topic.settings.wire_options:
                continue
            _, was = known
            if stream.by_name.get(was.name) is topic:
                del stream.by_name[was.name]
            if stream.by_number.get(was.number) is topic:
                del stream.by_number[was.number]
            self._add_topic(stream, topic, TOPICS.decode(topic.settings.wire_options[WIRE]))

    def refresh(self) -> None:
        """Scan the topics if some were created or deleted since the last scan.

        Raises Pending while other processes have not reported their topics, or Unavailable.
        """
        super().refresh()
        self._parts.require_reported()

    def _refresh(self) -> None:
        self._see_changes()
        super()._refresh()

    def topics(self, stream: Stream) -> list[Topic]:
        """Return the topics of a stream. Topics without a number are omitted."""
        with suppress(Pending, BrokerError):
            return super().topics(stream)
        return [topic for _, topic in sorted(stream.by_number.items())]

    def stream_of(self, topic: Topic) -> Stream:
        found = self._by_namespace.get(topic.name.stream)
        if found is None:
            raise Unavailable(ErrorCode.STOPPING, "the stream of a topic was deleted")
        return found

    def find_topic(self, stream: Stream, identifier: int | str) -> Topic | None:
        self._see_changes()
        found = super().find_topic(stream, identifier)
        if found is None:
            self._parts.require_latest()
        return found

    def stored(self, topic: Topic) -> StoredTopic:
        known, value = self._topics.get(topic.id), topic.settings.wire_options.get(WIRE)
        if known is not None:
            return known[1] if value is None else super().stored(topic)  # a protocol may have dropped this state
        if value is not None:
            return TOPICS.decode(value)  # not cached, because the scan skips cached topics
        self._require([topic])
        raise Unavailable(ErrorCode.STOPPING, "the process of this topic has not assigned a number to it")

    def _stream_in(self, topic: Topic) -> Stream | None:
        return self._by_namespace.get(topic.name.stream)

    def _steps(self) -> Iterator[None]:
        try:
            yield from self._scan()
        except Pending:  # the waiting requests raise it, too
            self._failed_version = self._broker.topics_version

    def scan_in_slices(self, then: Callable[[], None]) -> None:
        self._request_numbers((), partial(super().scan_in_slices, then))

    def _number_all(self, new_topics: Sequence[Topic]) -> Generator[None, None, bool]:
        yield from ()
        self._require(new_topics)
        return not new_topics

    def _require(self, new_topics: Sequence[Topic]) -> None:
        """Raise Pending if other processes must assign numbers to these topics first.

        Topics for which that has failed are not requested again for ``SKIPPED_S``.
        """
        if not self._skipped.issuperset([topic.id for topic in new_topics]) or (
            new_topics and self._broker.clock.monotonic() >= self._skipped_until
        ):
            raise Pending("numbers of topics", partial(self._request_numbers, new_topics))

    def _request_numbers(self, new_topics: Sequence[Topic], then: Callable[[], None]) -> Handle:
        """Have all processes assign numbers to their topics, and the first shard to the streams of these topics."""
        namespaces = sorted({topic.name.stream for topic in self._broker.topics()} - self._by_namespace.keys())

        def numbered(found: list[list[str] | BrokerError]) -> None:
            living = sorted({namespace for some in found if not isinstance(some, BrokerError) for namespace in some})
            Results(self._broker, [partial(self._add_unknown, living)] if living else [], completed)

        def completed(_: list[Any]) -> None:
            self._skipped = frozenset([topic.id for topic in new_topics])
            self._skipped_until = self._broker.clock.monotonic() + SKIPPED_S
            then()

        calls = [partial(self._number_topics, shard, namespaces) for shard in range(self._parts.shards.count)]
        return Results(self._broker, calls, numbered)

    def _number_topics(self, shard: int, namespaces: list[str], then: Completion[list[str]]) -> None:
        self._call(shard, number_topics, namespaces, then=then)

    def _add_unknown(self, namespaces: list[str], then: Completion[int]) -> None:
        self._call(STREAMS_SHARD, add_namespaces, namespaces, then=then)

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
        """Create a topic, in the shard that the topic's number or name determines.

        Arguments as in ``Directory.create_topic``. Raises Refused 2016 for reserved numbers.
        """
        if number is not None and number >= CHOSEN_MAX:
            raise Refused(errors.BAD_TOPIC_ID)
        if number is not None and self.find_topic(stream, number) is not None:
            raise Refused(errors.TOPIC_ID_TAKEN)
        self.check_topic_name(stream, stored.name)
        shards, namespace = self._parts.shards, stream.stored.namespace
        shard = shards.shard_of(TopicName(namespace, stored.name).full)
        if shard is None:
            shard = self._parts.next_shard() if number is None else number % shards.count

        def created(result: bytes | BrokerError) -> None:
            topic = None if isinstance(result, BrokerError) else self._broker.topic_of_id(result)
            if topic is not None:
                then(topic)
            done(result if isinstance(result, BrokerError) else 0)

        self._call(shard, create_topic, namespace, stored, number, partitions, settings, by, then=created)

    def update_topic(
        self, topic: Topic, stored: StoredTopic, settings: TopicSettings, done: Completion[int] | None
    ) -> None:
        self._call(topic, change_topic, topic, stored, settings, done=done)

    # Groups

    def groups(self, topic: Topic) -> dict[int, str]:
        found: dict[int, str] = self._call(topic, Directory.groups, topic)
        return found

    def find_group(self, topic: Topic, identifier: int | str) -> tuple[int, str] | None:
        found: tuple[int, str] | None = self._call(topic, Directory.find_group, topic, identifier)
        return found

    def create_group(self, topic: Topic, name: str, number: int | None, by: Caller, then: Completion[int]) -> None:
        self._call(topic, Directory.create_group, topic, name, number, by, then=then)

    def delete_group(self, topic: Topic, number: int, by: Caller, done: Completion[int]) -> None:
        self._call(topic, Directory.delete_group, topic, number, by, done=done)


def _nothing() -> None:
    pass


# Functions that other processes call


def rename_namespace(local: Directory, namespace: str, name: str, done: Completion[int] | None) -> None:
    local.rename_stream(local.in_namespace(namespace), name, done)


def delete_namespace(local: Directory, namespace: str, done: Completion[int]) -> None:
    local.delete_stream(local.in_namespace(namespace), done)


def add_namespaces(local: Directory, namespaces: list[str], then: Completion[int]) -> None:
    local.add_unknown(namespaces)
    then(0)


def number_topics(local: Directory, namespaces: list[str], then: Completion[list[str]]) -> None:
    """Assign numbers to all topics that have none.

    ``then`` is called with those of ``namespaces`` that have topics here.
    """
    local.number_topics(lambda: then([namespace for namespace in namespaces if local.has_topics(namespace)]))


def create_topic(
    local: Directory,
    namespace: str,
    stored: StoredTopic,
    number: int | None,
    partitions: int,
    settings: TopicSettings,
    by: Caller,
    then: Completion[bytes],
) -> None:
    """Create a topic. ``then`` is called with its id when it is stored."""
    created: list[Topic] = []

    def done(result: int | BrokerError) -> None:
        then(result if isinstance(result, BrokerError) else created[0].id)

    local.create_topic(local.in_namespace(namespace), stored, number, partitions, settings, by, created.append, done)


def change_topic(
    local: Directory, topic: Topic, stored: StoredTopic, settings: TopicSettings, done: Completion[int] | None
) -> None:
    """Change a topic's settings and name, but keep its numbers and protocol options, which the caller may not know."""
    was = local.stored(topic)
    stored = msgspec.structs.replace(stored, number=was.number, groups=was.groups)
    settings = replace(settings, wire_options=topic.settings.wire_options)
    local.update_topic(topic, stored, settings, done)


FUNCTIONS: Final[Sequence[Callable[..., Any]]] = (
    rename_namespace,
    delete_namespace,
    add_namespaces,
    number_topics,
    create_topic,
    change_topic,
    Directory.create_stream,
    Directory.groups,
    Directory.find_group,
    Directory.create_group,
    Directory.delete_group,
)
