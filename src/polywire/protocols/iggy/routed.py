"""The streams, topics and groups of all processes of a broker (decision 0130).

* The first shard stores the streams. Each process knows them, and the topics of all processes, with numbers and names.
* Only the directory of a topic's own process (``own`` there) assigns numbers to the topic and its groups, and changes
  them. It also creates the topic. Other processes call the functions in ``FUNCTIONS`` for this.
* A topic with a number that its client has chosen is created in the shard that the number selects, so that two topics
  never get the same one.
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
    Stream,
    StreamKept,
    TopicKept,
)
from polywire.protocols.iggy.messages import WIRE, Refused
from polywire.protocols.runtime.shards import Parts
from polywire.types import TopicName

SKIPPED_S: Final = 1.0  # pause before topics whose process has not assigned a number are requested again


class Answers:
    """The results of several calls. Implements ``Handle``.

    ``then`` gets them, or errors, in the order of the calls, in a later pass of the loop.
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
                call(partial(self._came, number))
            except BrokerError as error:
                self._came(number, error)
        if not calls:
            broker.loop.call_soon(self._complete)

    def _came(self, number: int, result: object) -> None:
        self._results[number] = result
        if len(self._results) == self._count:
            self._broker.loop.call_soon(self._complete)

    def _complete(self) -> None:
        self._then([result for _, result in sorted(self._results.items())])

    def cancel(self) -> None:
        """Ignore the results."""
        self._then = _ignore


def _ignore(_: object) -> None:
    pass


class RoutedDirectory(Directory):
    """The streams of all processes, with their topics and groups, as sessions use them.

    ``_changed`` are known topics whose settings may have changed. ``_skipped`` are topics without a number that were
    requested from their processes in vain; they are requested again after ``_skipped_until``.
    """

    __slots__ = ("_changed", "_own", "_parts", "_skipped", "_skipped_until")

    def __init__(self, broker: DirectoryBroker, parts: Parts, own: Directory) -> None:
        """``own`` is the directory of this process."""
        self._parts: Final = parts
        self._own: Final = own
        self._changed: Final[set[bytes]] = set()
        self._skipped: frozenset[bytes] = frozenset()
        self._skipped_until = 0.0
        with suppress(Pending):  # the first request finds other processes' topics
            super().__init__(broker)
        parts.watch_values(self._value_changed)
        parts.watch_topics(self._topic_changed)

    def _call(self, at: int | Topic, function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Call a function of the directory in a shard, or in the shard of a topic. Raises Pending and BrokerError."""
        shard = at if isinstance(at, int) else self._parts.shard_of_topic(at)
        if shard == self._parts.shards.own:
            return function(self._own, *values, **options)
        return self._parts.call_part(shard, WIRE, function, *values, **options)

    # Streams

    def _value_changed(self, change: Any) -> None:
        if change.wire != WIRE or not change.key.startswith(STREAM_KEY):
            return
        stream = self._by_number.get(int(change.key.removeprefix(STREAM_KEY)))
        kept = None if change.value is None else STREAMS.decode(change.value)
        if stream is not None and kept is not None and stream.kept.space == kept.space:
            self._by_name.pop(stream.kept.name, None)
            stream.kept = kept
            self._enter(stream)
            return
        if stream is not None:
            self._leave(stream)
        if kept is not None:
            self._enter(Stream(kept))

    def _leave(self, stream: Stream) -> None:
        super()._leave(stream)
        for topic in stream.by_number.values():
            self._kept.pop(topic.id, None)
        if stream.by_number:
            self._seen_version = min(self._seen_version, self._broker.topics_version - 1)
        self._own.forget_space(stream.kept.space)

    def streams(self) -> list[Stream]:
        self.refresh()
        return super().streams()

    def find_stream(self, who: int | str) -> Stream | None:
        found = super().find_stream(who)
        if found is None:
            self._parts.require_reported()
        return found

    def create_stream(self, name: str, number: int | None, by: Caller, then: Completion[StreamKept]) -> None:
        self.refresh()
        self._call(STREAMS_SHARD, Directory.create_stream, name, number, by, then=then)

    def rename_stream(self, stream: Stream, name: str, done: Completion[int] | None) -> None:
        self.refresh()
        self._call(STREAMS_SHARD, rename_space, stream.kept.space, name, done=done)

    def delete_stream(self, stream: Stream, done: Completion[int]) -> None:
        """Delete a stream's topics in all processes, then the stream. If a process does not respond, the stream remains."""

        def emptied(result: int | BrokerError) -> None:
            try:
                if isinstance(result, BrokerError):
                    raise result
                self._call(STREAMS_SHARD, end_space, stream.kept.space, done=done)
            except BrokerError as error:
                done(error)

        self.refresh()
        self._broker.delete_topics(self.topics(stream), ended=_ignore, then=_nothing, done=emptied)

    # Topics

    def _topic_changed(self, topic_id: bytes) -> None:
        if topic_id in self._kept:
            self._changed.add(topic_id)

    def _see_changes(self) -> None:
        """Enter topics under their new names."""
        while self._changed:
            topic_id = self._changed.pop()
            topic, known = self._broker.topic_of_id(topic_id), self._kept.get(topic_id)
            stream = None if topic is None else self._by_space.get(topic.name.stream)
            if topic is None or stream is None or known is None or WIRE not in topic.settings.wire_options:
                continue
            _, was = known
            if stream.by_name.get(was.name) is topic:
                del stream.by_name[was.name]
            if stream.by_number.get(was.number) is topic:
                del stream.by_number[was.number]
            self._enter_topic(stream, topic, TOPICS.decode(topic.settings.wire_options[WIRE]))

    def refresh(self) -> None:
        """See ``Directory.refresh``. Raises Pending if another process must respond first, or Unavailable."""
        super().refresh()
        self._parts.require_reported()

    def _refresh(self) -> None:
        self._see_changes()
        super()._refresh()

    def topics(self, stream: Stream) -> list[Topic]:
        """See ``Directory.topics``. Topics without a number are skipped."""
        with suppress(Pending, BrokerError):
            return super().topics(stream)
        return [topic for _, topic in sorted(stream.by_number.items())]

    def stream_of(self, topic: Topic) -> Stream:
        found = self._by_space.get(topic.name.stream)
        if found is None:
            raise Unavailable(ErrorCode.STOPPING, "the stream of a topic was deleted")
        return found

    def find_topic(self, stream: Stream, who: int | str) -> Topic | None:
        self._see_changes()
        found = super().find_topic(stream, who)
        if found is None:
            self._parts.require_reported()
        return found

    def kept(self, topic: Topic) -> TopicKept:
        known, value = self._kept.get(topic.id), topic.settings.wire_options.get(WIRE)
        if known is not None:
            return known[1] if value is None else super().kept(topic)  # a protocol may have dropped this state
        if value is not None:
            return TOPICS.decode(value)  # not cached, because the scan skips cached topics
        self._require([topic])
        raise Unavailable(ErrorCode.STOPPING, "the process of this topic has not assigned a number to it")

    def _stream_in(self, topic: Topic) -> Stream | None:
        return self._by_space.get(topic.name.stream)

    def _steps(self) -> Iterator[None]:
        try:
            yield from self._scan()
        except Pending:  # the waiting requests raise it, too
            self._given_up_version = self._broker.topics_version

    def catch_up(self, then: Callable[[], None]) -> None:
        self._request_numbers((), partial(super().catch_up, then))

    def _number_all(self, fresh: Sequence[Topic]) -> Generator[None, None, bool]:
        yield from ()
        self._require(fresh)
        return not fresh

    def _require(self, fresh: Sequence[Topic]) -> None:
        """Raise Pending if the numbers of topics should be requested."""
        if not self._skipped.issuperset([topic.id for topic in fresh]) or (
            fresh and self._broker.clock.monotonic() >= self._skipped_until
        ):
            raise Pending("numbers of topics", partial(self._request_numbers, fresh))

    def _request_numbers(self, fresh: Sequence[Topic], then: Callable[[], None]) -> Handle:
        """Let all processes assign numbers to their topics, then the first shard to the streams of these topics."""
        spaces = sorted({topic.name.stream for topic in self._broker.topics()} - self._by_space.keys())

        def numbered(found: list[list[str] | BrokerError]) -> None:
            living = sorted({space for some in found if not isinstance(some, BrokerError) for space in some})
            Answers(self._broker, [partial(self._adopted, living)] if living else [], answered)

        def answered(_: list[Any]) -> None:
            self._skipped = frozenset([topic.id for topic in fresh])
            self._skipped_until = self._broker.clock.monotonic() + SKIPPED_S
            then()

        calls = [partial(self._numbered_in, shard, spaces) for shard in range(self._parts.shards.count)]
        return Answers(self._broker, calls, numbered)

    def _numbered_in(self, shard: int, spaces: list[str], then: Completion[list[str]]) -> None:
        self._call(shard, number_topics, spaces, then=then)

    def _adopted(self, spaces: list[str], then: Completion[int]) -> None:
        self._call(STREAMS_SHARD, adopt_spaces, spaces, then=then)

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
        """See ``Directory.create_topic``. Raises Refused 2016 for a chosen number from the range of a shard."""
        if number is not None and number >= CHOSEN_MAX:
            raise Refused(errors.BAD_TOPIC_ID)
        if number is not None and self.find_topic(stream, number) is not None:
            raise Refused(errors.TOPIC_ID_TAKEN)
        self.check_topic_name(stream, kept.name)
        shards, space = self._parts.shards, stream.kept.space
        shard = shards.shard_of(TopicName(space, kept.name).full)
        if shard is None:
            shard = self._parts.next_shard() if number is None else number % shards.count

        def created(result: bytes | BrokerError) -> None:
            topic = None if isinstance(result, BrokerError) else self._broker.topic_of_id(result)
            if topic is not None:
                then(topic)
            done(result if isinstance(result, BrokerError) else 0)

        self._call(shard, create_topic, space, kept, number, partitions, settings, by, then=created)

    def update_topic(
        self, topic: Topic, kept: TopicKept, settings: TopicSettings, done: Completion[int] | None
    ) -> None:
        self._call(topic, change_topic, topic, kept, settings, done=done)

    # Groups

    def groups(self, topic: Topic) -> dict[int, str]:
        found: dict[int, str] = self._call(topic, Directory.groups, topic)
        return found

    def find_group(self, topic: Topic, who: int | str) -> tuple[int, str] | None:
        found: tuple[int, str] | None = self._call(topic, Directory.find_group, topic, who)
        return found

    def create_group(self, topic: Topic, name: str, number: int | None, by: Caller, then: Completion[int]) -> None:
        self._call(topic, Directory.create_group, topic, name, number, by, then=then)

    def delete_group(self, topic: Topic, number: int, by: Caller, done: Completion[int]) -> None:
        self._call(topic, Directory.delete_group, topic, number, by, done=done)


def _nothing() -> None:
    pass


# Functions that other processes call


def rename_space(own: Directory, space: str, name: str, done: Completion[int] | None) -> None:
    own.rename_stream(own.in_space(space), name, done)


def end_space(own: Directory, space: str, done: Completion[int]) -> None:
    own.delete_stream(own.in_space(space), done)


def adopt_spaces(own: Directory, spaces: list[str], then: Completion[int]) -> None:
    own.adopt(spaces)
    then(0)


def number_topics(own: Directory, spaces: list[str], then: Completion[list[str]]) -> None:
    """Assign numbers to all topics that have none, and report which of these streams have topics."""
    own.number_topics(lambda: then([space for space in spaces if own.has_topics(space)]))


def create_topic(
    own: Directory,
    space: str,
    kept: TopicKept,
    number: int | None,
    partitions: int,
    settings: TopicSettings,
    by: Caller,
    then: Completion[bytes],
) -> None:
    """Create a topic, and report its id once it is stored."""
    created: list[Topic] = []

    def done(result: int | BrokerError) -> None:
        then(result if isinstance(result, BrokerError) else created[0].id)

    own.create_topic(own.in_space(space), kept, number, partitions, settings, by, created.append, done)


def change_topic(
    own: Directory, topic: Topic, kept: TopicKept, settings: TopicSettings, done: Completion[int] | None
) -> None:
    """Change a topic's settings and name, but not the numbers and options that the caller may not know yet."""
    was = own.kept(topic)
    kept = msgspec.structs.replace(kept, number=was.number, groups=was.groups)
    settings = replace(settings, wire_options=topic.settings.wire_options)
    own.update_topic(topic, kept, settings, done)


FUNCTIONS: Final[Sequence[Callable[..., Any]]] = (
    rename_space,
    end_space,
    adopt_spaces,
    number_topics,
    create_topic,
    change_topic,
    Directory.create_stream,
    Directory.groups,
    Directory.find_group,
    Directory.create_group,
    Directory.delete_group,
)
