"""Iggy commands that several shards answer together, such as lists of streams and clients (decision 0127).

A list equals that of a single broker that has all topics. If one shard refuses or does not reply, the command fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import msgspec

from polywire.broker.access import Principal, Where
from polywire.broker.permissions import Action
from polywire.errors import ErrorCode, Unavailable
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.directory import CHOSEN_MAX, NUMBER_MAX, STREAMS_SHARD, StreamKept
from polywire.protocols.iggy.linked import NO
from polywire.protocols.iggy.messages import U32, Code, Reader, Refused
from polywire.protocols.iggy.names import shortened, space_of
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.search import Asking, Named, Place, Replies, Search, is_somewhere
from polywire.protocols.iggy.server import Totals, stats_bytes
from polywire.protocols.iggy.shard_link import Kind, LinkRequest, Reply
from polywire.protocols.iggy.topics import stream_bytes
from polywire.types import TopicName

GONE: Final = "the responsible process has ended or does not respond: the outcome of the request is unknown"
_decode: Final[Callable[[bytes], Any]] = msgspec.msgpack.decode


class GatheringSession(Asking, Protocol):
    @property
    def principal(self) -> Principal | None: ...

    def authorize(self, action: Action, where: Where = None) -> None: ...

    def permits(self, action: Action, where: Where = None) -> bool: ...


def lost() -> Unavailable:
    return Unavailable(ErrorCode.STOPPING, GONE)


def answer_with(answer: Answer, reply: Reply | None) -> None:
    """Fill a reply slot with the reply of a shard, or with an error if the shard did not reply."""
    if reply is None:
        answer.refuse(lost())
    elif reply.status:
        answer.status(reply.status)
    else:
        answer.ok(reply.payload)


def worst_of(replies: Replies) -> Reply | None:
    """Return a refusal if any shard refused, else None if any did not reply, else any of the replies."""
    return min(replies.values(), key=lambda reply: 1 if reply is None else 0 if reply.status else 2)


class Gathering:
    """One request that is sent to several shards. Its reply is sent once."""

    __slots__ = ("_answer", "_code", "_payload", "_session")

    def __init__(self, session: GatheringSession, answer: Answer, code: int, payload: bytes) -> None:
        self._session: Final = session
        self._answer: Final = answer
        self._code: Final = code
        self._payload: Final = payload

    @property
    def _everywhere(self) -> range:
        return range(self._session.shards.count)

    def _ask(self, request: LinkRequest, then: Callable[[list[Any]], None]) -> None:
        """Send a request to all shards. ``then`` gets their replies if all succeeded."""

        def came(replies: Replies) -> None:
            worst = worst_of(replies)
            if worst is None or worst.status:
                answer_with(self._answer, worst)
            else:
                then([_decode(reply.payload) for _, reply in sorted(replies.items()) if reply is not None])

        self._session.ask_all(self._everywhere, request, came)

    def _command(self, kept: StreamKept | None) -> LinkRequest:
        dialect = self._answer.dialect
        if kept is None:
            return LinkRequest(Kind.COMMAND, self._payload, self._code, dialect)
        return LinkRequest(Kind.COMMAND, self._payload, self._code, dialect, kept.space, kept.number)

    def _ask_one(self, shard: int, request: LinkRequest, then: Callable[[Reply | None], None]) -> None:
        self._session.ask_all([shard], request, lambda replies: then(replies[shard]))

    # Lists

    def streams(self) -> None:
        session, dialect = self._session, self._answer.dialect
        session.shared.broker.access.authorize_somewhere(session.principal, Action.STREAM_LIST)
        figures: dict[str, list[int]] = {}

        def came(shards: list[Any]) -> None:
            for summary in shards:
                for space, *counts in summary:
                    figures[space] = [was + more for was, more in zip(figures.get(space, [0] * 3), counts, strict=True)]
            request = LinkRequest(Kind.ADOPT, msgspec.msgpack.encode(list(figures)))
            self._ask_one(STREAMS_SHARD, request, adopted)

        def adopted(reply: Reply | None) -> None:
            if reply is None or reply.status:
                answer_with(self._answer, reply)
                return
            parts = []
            for kept in msgspec.msgpack.decode(reply.payload, type=list[StreamKept]):
                is_listed = kept.space in figures or kept.number < NUMBER_MAX
                if is_listed and session.permits(Action.STREAM_DESCRIBE, kept.space):
                    parts.append(stream_bytes(kept, dialect, *figures.get(kept.space, (0, 0, 0))))
            self._answer.fill(parts)

        self._ask(LinkRequest(Kind.SUMMARY), came)

    def details(self, kept: StreamKept) -> None:
        answer, is_stream = self._answer, self._code == Code.GET_STREAM
        dialect = answer.dialect
        self._session.authorize(Action.STREAM_DESCRIBE if is_stream else Action.TOPIC_DESCRIBE, kept.space)

        def came(shards: list[Any]) -> None:
            topics = [part for _, part in sorted(topic for _, _, found in shards for topic in found)]
            size, messages = sum(shard[0] for shard in shards), sum(shard[1] for shard in shards)
            if is_stream:
                front = stream_bytes(kept, dialect, len(topics), size, messages)
            else:
                front = U32.pack(len(topics)) if dialect.framed else b""
            answer.fill([front, *topics])

        self._ask(LinkRequest(Kind.TOPICS, dialect=dialect, space=kept.space), came)

    def stats(self) -> None:
        session, dialect = self._session, self._answer.dialect
        session.authorize(Action.SERVER_DESCRIBE)

        def came(shards: list[Any]) -> None:
            spaces = frozenset(space for shard in shards for space in shard[0])
            totals = Totals(spaces, *map(sum, zip(*[shard[1:] for shard in shards], strict=True)))
            self._answer.ok(stats_bytes(session.shared, dialect, totals))

        self._ask(LinkRequest(Kind.TOTALS), came)

    def clients(self) -> None:
        self._session.authorize(Action.SERVER_DESCRIBE)

        def came(shards: list[Any]) -> None:
            self._answer.fill([part for _, part in sorted(client for shard in shards for client in shard)])

        self._ask(LinkRequest(Kind.CLIENTS, dialect=self._answer.dialect), came)

    # Streams

    def create_stream(self, reader: Reader) -> None:
        """Handle CREATE_STREAM. Raises Refused for a malformed request.

        If another protocol has created the stream in some shard, the first shard stores it before it executes the
        command. The reply is then that the stream exists.
        """
        if reader.dialect.chosen_ids:
            reader.u32()
        name = reader.name()
        space = space_of(shortened(name) if reader.dialect.normalises else name)

        def replied(replies: Replies) -> None:
            if is_somewhere(replies):
                request = LinkRequest(Kind.ADOPT, msgspec.msgpack.encode([space]))
                self._ask_one(STREAMS_SHARD, request, lambda _: create())
            else:
                create()

        def create() -> None:
            self._ask_one(STREAMS_SHARD, self._command(None), lambda reply: answer_with(self._answer, reply))

        self._session.ask_all(self._everywhere, LinkRequest(Kind.HAS_TOPICS, space=space), replied)

    def update_stream(self, kept: StreamKept) -> None:
        self._ask_one(STREAMS_SHARD, self._command(kept), self._forget_streams)

    def delete_stream(self, kept: StreamKept) -> None:
        """Handle DELETE_STREAM: delete the stream's topics in all shards, then the stream.

        If a shard does not reply, the stream is not deleted.
        """
        others = [shard for shard in self._everywhere if shard != STREAMS_SHARD]

        def emptied(replies: Replies) -> None:
            worst = worst_of(replies)
            if worst is None or worst.status:
                answer_with(self._answer, worst)
            else:
                self._ask_one(STREAMS_SHARD, self._command(kept), self._forget_streams)

        self._session.ask_all(others, self._command(kept), emptied)

    def _forget_streams(self, reply: Reply | None) -> None:
        def replied(_: Replies) -> None:
            answer_with(self._answer, reply)

        self._session.ask_all(self._everywhere, LinkRequest(Kind.FORGET_STREAMS), replied)

    def purge_stream(self, kept: StreamKept) -> None:
        def purged(replies: Replies) -> None:
            answer_with(self._answer, worst_of(replies))

        self._session.ask_all(self._everywhere, self._command(kept), purged)

    # Topics

    def create_topic(self, kept: StreamKept, reader: Reader) -> None:
        """Handle CREATE_TOPIC in the shard that the topic's name selects.

        The topic is not created if another shard has a topic with this name. Raises Refused for an invalid request.
        """
        chosen = _chosen(reader)
        reader.u32()
        written = reader.topic_fields().name
        name = shortened(written) if reader.dialect.normalises else written

        def found(place: Place) -> None:
            shards = self._session.shards
            shard = place.shard
            if shard is None:
                shard = shards.shard_of(TopicName(kept.space, name).full)
            if place.lost:
                self._answer.refuse(lost())
            elif chosen is None:
                self._create(kept, shards.least_loaded() if shard is None else shard)
            else:
                self._choose(kept, shards.least_loaded() if shard is None else shard, chosen)

        Search(self._session, Named(kept.name, written), self._answer.dialect, found).begin(kept)

    def _create(self, kept: StreamKept, shard: int) -> None:
        self._ask_one(shard, self._command(kept), lambda reply: answer_with(self._answer, reply))

    def _choose(self, kept: StreamKept, shard: int, number: int) -> None:
        """Create a topic under a number that the client has chosen.

        It is not created if another topic has this number or is about to get it.
        """
        payload = msgspec.msgpack.encode(number)

        def kept_for_us(reply: Reply | None) -> None:
            if reply is None or reply.payload == NO:
                answer_with(self._answer, reply and Reply(errors.TOPIC_ID_TAKEN, b""))
                return
            request = LinkRequest(Kind.FIND_TOPIC, payload, dialect=self._answer.dialect, space=kept.space)
            self._session.ask_all(self._everywhere, request, looked)

        def looked(replies: Replies) -> None:
            if is_somewhere(replies):
                over(Reply(errors.TOPIC_ID_TAKEN, b""))
            elif None in replies.values():
                over(None)
            else:
                self._ask_one(shard, self._command(kept), over)

        def over(reply: Reply | None) -> None:
            request = LinkRequest(Kind.CHOSEN, payload, space=kept.space)
            self._ask_one(STREAMS_SHARD, request, lambda _: answer_with(self._answer, reply))

        self._ask_one(STREAMS_SHARD, LinkRequest(Kind.CHOOSE, payload, space=kept.space), kept_for_us)

    def update_topic(self, kept: StreamKept, shard: int, reader: Reader) -> None:
        """Handle UPDATE_TOPIC, unless a topic of another shard has the new name.

        Raises Refused for an invalid request.
        """
        name = reader.topic_fields(is_patch=True).name
        if not name:  # the name does not change
            self._create(kept, shard)
            return

        def found(place: Place) -> None:
            if place.lost:
                self._answer.refuse(lost())
            elif place.shard not in (None, shard):
                self._answer.refuse(Refused(errors.TOPIC_NAME_TAKEN))
            else:
                self._create(kept, shard)

        Search(self._session, Named(kept.name, name), self._answer.dialect, found).begin(kept)


def _chosen(reader: Reader) -> int | None:
    """Return the number that a client has chosen for a topic, None if the broker must choose one.

    Raises Refused for a number from the range of a shard.
    """
    dialect = reader.dialect
    if not dialect.chosen_ids:
        return None
    wanted = reader.u32()
    if wanted == 0:
        return None  # the topic's shard reports the missing number
    if wanted - dialect.base >= CHOSEN_MAX:
        raise Refused(errors.BAD_TOPIC_ID)
    return wanted - dialect.base
