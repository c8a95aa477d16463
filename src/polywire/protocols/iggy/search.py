"""Find the stream and the shard that a request names (decision 0127).

The first shard stores the streams, and each shard knows its own topics. A stream that another protocol created gets its
number from the first shard when a request first names it. If that shard does not reply, streams are still found by
name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

import msgspec

from polywire.broker.topics import Topic
from polywire.protocols.iggy.context import Shared
from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.directory import STREAMS_SHARD, StreamKept, shard_of_number
from polywire.protocols.iggy.linked import YES
from polywire.protocols.iggy.lookup import who
from polywire.protocols.iggy.messages import Code, Reader
from polywire.protocols.iggy.names import find_named, shortened, space_of
from polywire.protocols.iggy.shard_link import NO_STREAM, Kind, LinkRequest, Reply
from polywire.protocols.runtime.shards import Shards
from polywire.types import TopicName

OF_STREAMS: Final = frozenset(
    {Code.GET_STREAM, Code.UPDATE_STREAM, Code.DELETE_STREAM, Code.PURGE_STREAM, Code.GET_TOPICS, Code.CREATE_TOPIC}
)
HELD: Final = frozenset({Code.POLL_HELD, Code.AWAIT, Code.FETCH})
OF_CONSUMERS: Final = HELD | frozenset({Code.POLL, Code.GET_OFFSET, Code.STORE_OFFSET, Code.DELETE_OFFSET})
OF_TOPICS: Final = OF_CONSUMERS | {
    *(Code.SEND, Code.GET_ROUTE, Code.FLUSH, Code.GET_TOPIC, Code.DELETE_TOPIC, Code.UPDATE_TOPIC, Code.PURGE_TOPIC),
    *(Code.CREATE_PARTITIONS, Code.DELETE_PARTITIONS, Code.DELETE_SEGMENTS),
    *(Code.GET_GROUP, Code.GET_GROUPS, Code.CREATE_GROUP, Code.DELETE_GROUP),
    *(Code.JOIN_GROUP, Code.LEAVE_GROUP, Code.SYNC_GROUP),
}


class Named(NamedTuple):
    """The stream and topic that a request names; numbers count from 0. ``topic`` is None if it names no topic."""

    stream: int | str
    topic: int | str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """The result of a search.

    ``stream`` is None if it was not found. ``shard`` is the shard of the topic, None if no topic was named or found.
    ``lost`` is whether a shard did not reply.
    """

    stream: StreamKept | None = None
    shard: int | None = None
    lost: bool = False


LOST: Final = Place(lost=True)
Replies = Mapping[int, Reply | None]
"""The reply of each shard; None if it did not reply."""


def named_by(code: int, reader: Reader) -> Named | None:
    """Read the stream and topic that a request names; None if it names neither.

    Raises Refused for a malformed request.
    """
    if code in OF_STREAMS:
        return Named(who(reader))
    if code not in OF_TOPICS:
        return None
    if code in OF_CONSUMERS:
        reader.consumer()
    elif code == Code.SEND and reader.dialect.batched:
        reader.u32()
    return Named(who(reader), who(reader))


class Asking(Protocol):
    @property
    def shards(self) -> Shards: ...

    @property
    def shared(self) -> Shared: ...

    def ask_all(self, shards: Iterable[int], request: LinkRequest, done: Callable[[Replies], None]) -> None:
        """Send a request to some shards.

        ``done`` is called when all have replied, or immediately if there are no shards.
        """


class Search:
    """One search. ``done`` is called once, possibly before ``begin`` returns."""

    __slots__ = ("_asking", "_dialect", "_done", "_named")

    def __init__(self, asking: Asking, named: Named, dialect: Dialect, done: Callable[[Place], None]) -> None:
        self._asking: Final = asking
        self._named: Final = named
        self._dialect: Final = dialect
        self._done: Final = done

    def begin(self, kept: StreamKept | None = None) -> None:
        """Start the search. ``kept`` is the stream, if it is known."""
        if kept is not None:
            self._find_topic(kept)
            return
        request = LinkRequest(Kind.FIND_STREAM, _encode(self._named.stream), dialect=self._dialect)
        self._asking.ask_all([STREAMS_SHARD], request, self._stream_reply)

    def _stream_reply(self, replies: Replies) -> None:
        reply, named = replies[STREAMS_SHARD], self._named.stream
        if reply is not None and reply.payload:
            self._find_topic(msgspec.msgpack.decode(reply.payload, type=StreamKept))
        elif reply is not None and isinstance(named, str):
            self._look_for_space(list(self._names(named)))
        # topics are in the stream of this name in the broker, unless the stream was renamed
        elif isinstance(named, str):
            self._find_topic(StreamKept(NO_STREAM, named, space_of(next(iter(self._names(named)))), 0))
        else:
            self._done(LOST if reply is None else Place())

    def _names(self, named: str) -> Iterable[str]:
        return dict.fromkeys([named, shortened(named)] if self._dialect.normalises else [named])

    def _look_for_space(self, names: list[str]) -> None:
        """Request from the shards whether another protocol has created the stream."""
        if not names:
            self._done(Place())
            return
        space = space_of(names[0])

        def reported(replies: Replies) -> None:
            if is_somewhere(replies):
                self._asking.ask_all([STREAMS_SHARD], LinkRequest(Kind.ADOPT, _encode([space])), adopted)
            else:
                self._look_for_space(names[1:])

        def adopted(replies: Replies) -> None:
            reply = replies[STREAMS_SHARD]
            if reply is None or reply.status:
                self._done(LOST)
                return
            for kept in msgspec.msgpack.decode(reply.payload, type=list[StreamKept]):
                if kept.space == space:
                    self._find_topic(kept)
                    return
            self._done(LOST)

        self._asking.ask_all(range(self._asking.shards.count), LinkRequest(Kind.HAS_TOPICS, space=space), reported)

    # The topic

    def _find_topic(self, kept: StreamKept) -> None:
        topic, shards = self._named.topic, self._asking.shards
        if topic is None:
            self._done(Place(kept))
        elif own_topic(self._asking.shared, kept.space, topic, self._dialect) is not None:
            self._done(Place(kept, shards.own))
        else:
            likely = self._likely(kept.space, topic)
            others = [shard for shard in range(shards.count) if shard not in {shards.own, *likely}]
            self._ask_for_topic(kept, likely, others)

    def _likely(self, space: str, topic: int | str) -> list[int]:
        """Return the shards that have the topic if its name and number were never changed."""
        shards = self._asking.shards
        if isinstance(topic, int):
            known = shard_of_number(topic)
            found = set() if known is None or known >= shards.count else {known}
        else:
            places = [shards.shard_of(TopicName(space, name).full) for name in self._names(topic)]
            found = {place for place in places if place is not None}
        return sorted(found - {shards.own})

    def _ask_for_topic(self, kept: StreamKept, shards: list[int], others: list[int] | None) -> None:
        """Request the topic from some shards.

        ``others`` are the shards for a second round, if no shard has it in the first. It is None in the second round.
        """
        if not shards and others is not None:
            shards, others = others, None
        request = LinkRequest(Kind.FIND_TOPIC, _encode(self._named.topic), dialect=self._dialect, space=kept.space)
        self._asking.ask_all(shards, request, partial(self._topic_reply, kept, others))

    def _topic_reply(self, kept: StreamKept, others: list[int] | None, replies: Replies) -> None:
        found = [shard for shard, reply in sorted(replies.items()) if reply is not None and reply.payload == YES]
        if found:
            self._done(Place(kept, found[0]))
        elif None in replies.values() and (others is not None or isinstance(self._named.topic, int)):
            self._done(LOST)
        elif others is not None:
            self._ask_for_topic(kept, others, None)
        else:
            self._done(Place(kept))


def is_somewhere(replies: Replies) -> bool:
    return any(reply is not None and reply.payload == YES for reply in replies.values())


def own_topic(shared: Shared, space: str, named: int | str, dialect: Dialect) -> Topic | None:
    stream = shared.directory.find_space(space)
    return None if stream is None else find_named(partial(shared.directory.find_topic, stream), named, dialect)


def _encode(value: object) -> bytes:
    return msgspec.msgpack.encode(value)
