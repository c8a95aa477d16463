"""A session that forwards requests to the shards that own the named topics (decision 0127).

Replies are sent in the order of the requests. Requests about one topic stay in order. Nothing is forwarded before
login.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final

import msgspec

from polywire.broker.access import Principal
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Denied, ErrorCode, PeerError
from polywire.protocols.iggy import documented, errors, vsr
from polywire.protocols.iggy.context import CLIENT_BITS, GroupNumbers, Shared
from polywire.protocols.iggy.dialect import D0, Dialect
from polywire.protocols.iggy.directory import STREAMS_SHARD, Stream, StreamKept
from polywire.protocols.iggy.gathering import Gathering, answer_with, lost
from polywire.protocols.iggy.held import Attempt, Offset
from polywire.protocols.iggy.held_polls import is_nothing, wait_us_of
from polywire.protocols.iggy.linked import local_payload
from polywire.protocols.iggy.messages import Code, Reader, Refused
from polywire.protocols.iggy.produce import see_message_head
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.search import HELD, Named, Place, Replies, Search, named_by, own_topic
from polywire.protocols.iggy.session import Command, IggySession
from polywire.protocols.iggy.shard_link import NO_STREAM, Context, IggyLink, Kind, LinkRequest, Reply
from polywire.protocols.runtime.carrying import CarryingSession
from polywire.protocols.runtime.links import Links
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Shards

SEARCHING: Final = 16  # in addition to ``Wait``: a search for the request's shard is in progress
USERS: Final = frozenset(
    {Code.CREATE_USER, Code.DELETE_USER, Code.UPDATE_USER, Code.UPDATE_PERMISSIONS, Code.CHANGE_PASSWORD}
    | {Code.GET_TOKENS, Code.CREATE_TOKEN, Code.DELETE_TOKEN, Code.LOGIN_TOKEN}
)
"""Commands on users.

They are refused if there are several processes, because they would change one process's users only.
"""
OF_ALL: Final = frozenset({Code.GET_STREAMS, Code.GET_STATS, Code.GET_CLIENTS, Code.CREATE_STREAM})
OF_STREAM: Final = frozenset(
    {Code.GET_STREAM, Code.GET_TOPICS, Code.UPDATE_STREAM, Code.DELETE_STREAM, Code.PURGE_STREAM, Code.CREATE_TOPIC}
)
AT_ONCE: Final = frozenset({Kind.FIND_STREAM, Kind.ADOPT, Kind.HAS_TOPICS, Kind.FIND_TOPIC})
_GONE: Final = frozenset({errors.NO_STREAM_ID, errors.NO_STREAM_NAME, errors.NO_TOPIC_ID, errors.NO_TOPIC_NAME})
HELD_PAUSE_S: Final = 0.02  # pause between two polls of another shard, about as long as consumers pause
_PLACES_MAX: Final = 1_000  # topics whose shard one connection remembers


class CarryingIggySession(CarryingSession, IggySession):
    """One connection.

    ``_stream`` is the stream that the current request names. ``_streams`` and ``_places`` are cached lookups, valid for
    stream version ``_version``. ``_found`` is the location of a request that waited for a search and is handled again.
    ``_joined`` has the requests that joined groups in other shards. ``_offered`` is the login in progress, ``_login``
    the current login.
    """

    takes_tokens: ClassVar[bool] = False

    __slots__ = (
        "_found",
        "_joined",
        "_links",
        "_login",
        "_offered",
        "_places",
        "_stream",
        "_streams",
        "_version",
        "shards",
    )

    def __init__(
        self,
        shards: Shards,
        shared: Shared,
        commands: Mapping[int, Command],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(shared, commands, output, resume)
        self.shards: Final = shards
        self._links: Final = Links(self._linked)
        self._login: LinkRequest | None = None
        self._offered: LinkRequest | None = None
        self._stream: StreamKept | None = None
        self._streams: dict[int | str, StreamKept] = {}
        self._places: dict[Named, int] = {}
        self._version = shared.streams_version
        self._found: tuple[Named, Place] | None = None
        self._joined: dict[tuple[str, bytes], tuple[int, LinkRequest]] = {}

    # Routing

    def _begin(
        self, command: Command | None, code: int, payload: memoryview, head: vsr.Head | None, dialect: Dialect
    ) -> bool:
        if command is None:
            return super()._begin(command, code, payload, head, dialect)
        if self.principal is None and code != Code.LOGIN:
            with suppress(Denied):  # the request is refused below
                self._let_in(command)
        if code == Code.LOGIN:
            self._offered = LinkRequest(Kind.COMMAND, bytes(payload), code, dialect)
        elif code in USERS:
            self._slot(head, dialect).refuse(Refused(errors.UNAVAILABLE))
            return True
        elif self.principal is not None:
            return self._route(command, code, payload, head, dialect)
        return super()._begin(command, code, payload, head, dialect)

    def _route(self, command: Command, code: int, payload: memoryview, head: vsr.Head | None, dialect: Dialect) -> bool:
        try:
            reader = documented.reader_of(code, payload) if dialect is D0 else Reader(payload, dialect)
            if code in OF_ALL:
                self._gather(code, payload, self._slot(head, dialect), None, reader)
                return True
            named, owner = named_by(code, reader), self._owner_of(code, reader)
        except Refused:
            return self._here(None, command, code, payload, head, dialect)  # the error is reported there
        if named is None:
            if owner == self.shards.own or owner >= self.shards.count:
                return self._here(None, command, code, payload, head, dialect)
            request = LinkRequest(Kind.COMMAND, bytes(payload), code, dialect)
            answer = self._slot(head, dialect)
            self._links.to(owner).ask(request, lambda reply: answer_with(answer, reply))
            return True
        place = self._place(named, dialect)
        if place is None:
            return False
        if place.lost:
            self._slot(head, dialect).refuse(lost())
        elif place.stream is not None and code in OF_STREAM:
            self._gather(code, payload, self._slot(head, dialect), place, reader)
        elif place.stream is None or place.shard in (None, self.shards.own):
            if not (code == Code.UPDATE_TOPIC and place.shard is not None):
                return self._here(place.stream, command, code, payload, head, dialect)
            self._gather(code, payload, self._slot(head, dialect), place, reader)
        else:
            slot = self._slot_for(command, head, dialect)
            if slot is not None:
                self._carry(named, place, code, payload, slot, reader)
        return True

    def _owner_of(self, code: int, reader: Reader) -> int:
        """Return the shard that answers a request that names no stream. Raises Refused for a malformed payload."""
        if code == Code.GET_CLIENT:
            return reader.u32() >> CLIENT_BITS
        # the user's permissions name streams by number, and only the shard that stores the streams knows the numbers
        return STREAMS_SHARD if code == Code.GET_USER else self.shards.own

    def _here(
        self,
        stream: StreamKept | None,
        command: Command,
        code: int,
        payload: memoryview,
        head: vsr.Head | None,
        dialect: Dialect,
    ) -> bool:
        self._stream = stream
        try:
            return super()._begin(command, code, payload, head, dialect)
        finally:
            self._stream = None

    def _gather(self, code: int, payload: memoryview, answer: Answer, place: Place | None, reader: Reader) -> None:
        gathering = Gathering(self, answer, code, bytes(payload))
        try:
            if place is None or place.stream is None:
                _gather_all(gathering, code, reader)
            elif code == Code.UPDATE_TOPIC:
                assert place.shard is not None, "the search found the topic"
                gathering.update_topic(place.stream, place.shard, reader)
            else:
                _gather_stream(gathering, code, place.stream, reader)
        except (Refused, BrokerError) as error:
            answer.refuse(error)

    # Search

    def _place(self, named: Named, dialect: Dialect) -> Place | None:
        """Return the stream and shard of a request; None while a search for them is in progress."""
        if self._version != self.shared.streams_version:
            self._version = self.shared.streams_version
            self._streams.clear()
            self._places.clear()
        kept = self._streams.get(named.stream)
        if kept is not None:
            if named.topic is None:
                return Place(kept)
            if own_topic(self.shared, kept.space, named.topic, dialect) is not None:
                return Place(kept, self.shards.own)
            shard = self._places.get(named)
            if shard is not None:
                return Place(kept, shard)
        found, self._found = self._found, None
        if found is not None and found[0] == named:
            return found[1]
        Search(self, named, dialect, lambda place: self._search_ended(named, place)).begin(kept)
        if self._found is None:
            self._reasons |= SEARCHING
            return None
        found, self._found = self._found, None
        return found[1]

    def _search_ended(self, named: Named, place: Place) -> None:
        self._found = (named, place)
        self._learn(named, place)
        if self._reasons & SEARCHING:
            self._reasons &= ~SEARCHING
            self._go_on()

    def _learn(self, named: Named, place: Place) -> None:
        if len(self._places) + len(self._streams) >= _PLACES_MAX:
            self._places.clear()
            self._streams.clear()
        if place.stream is not None and place.stream.number != NO_STREAM:
            self._streams[named.stream] = place.stream
            if place.shard is not None and place.shard != self.shards.own:
                self._places[named] = place.shard

    def stream_named(self, named: int | str, dialect: Dialect) -> Stream | None:
        """The stream was found before the request was handled."""
        return None if self._stream is None else self.shared.directory.in_space(self._stream.space)

    def bound(self, attempt: Attempt) -> Attempt:
        """Return ``attempt`` bound to the current request.

        It can then be repeated while another request is current.
        """
        stream = self._stream

        def attempt_later(answer: Answer, reader: Reader, last: bool, /) -> Iterable[Offset] | None:
            before, self._stream = self._stream, stream
            try:
                return attempt(answer, reader, last)
            finally:
                self._stream = before

        return attempt_later

    def stream_number(self, topic: Topic) -> int:
        return NO_STREAM if self._stream is None else self._stream.number

    # Forwarding

    def _carry(
        self, named: Named, place: Place, code: int, payload: memoryview, answer: Answer, reader: Reader
    ) -> None:
        kept, shard = place.stream, place.shard
        assert kept is not None, "the search found the stream"
        assert shard is not None, "the search found the topic"
        if code == Code.UPDATE_TOPIC:
            self._gather(code, payload, answer, place, reader)
            return
        if code == Code.SEND and reader.dialect.batched and not reader.dialect.framed:
            with suppress(Refused):  # the topic's shard reports the error
                see_message_head(self, reader)
        incarnation = self.named_incarnation(answer)
        request = LinkRequest(
            Kind.COMMAND, bytes(payload), code, answer.dialect, kept.space, kept.number, incarnation=incarnation
        )

        until = self._held_until(code, payload, answer)

        def came(reply: Reply | None) -> None:
            if until and self._holds(code, reply, answer, until, ask):
                return
            if reply is None and code == Code.SEND:  # clients resend unacknowledged messages after a disconnect
                self.output.fail(PeerError("the process that owns a topic has exited", fatal=True))
                return
            if reply is not None and reply.status in _GONE:
                self._places.pop(named, None)
            elif reply is not None and not reply.status:
                self._note_membership(code, shard, request)
            answer_with(answer, reply)

        def ask() -> None:
            self._links.to(shard).ask(request, came)

        ask()

    def _held_until(self, code: int, payload: memoryview, answer: Answer) -> float:
        """Return the time until which a request may be held; 0 if it must not be held."""
        if code not in HELD:
            return 0.0
        try:
            wait_us = wait_us_of(code, Reader(payload, answer.dialect))
        except Refused:  # the topic's shard reports the error
            return 0.0
        now: float = self.broker.clock.monotonic()
        return now + wait_us / 1_000_000

    def _holds(self, code: int, reply: Reply | None, answer: Answer, until: float, ask: Callable[[], None]) -> bool:
        """Return whether a held request must be sent again later, because there are no messages yet.

        Other shards reply at once, so this shard does the waiting.
        """
        left_s = until - self.broker.clock.monotonic()
        if reply is None or reply.status or left_s <= 0 or self.closed or not is_nothing(code, reply.payload):
            return False
        timer = self.broker.loop.call_later(min(HELD_PAUSE_S, left_s), self._ask_again, answer, ask)
        answer.cancel = timer.cancel
        return True

    def _ask_again(self, answer: Answer, ask: Callable[[], None]) -> None:
        answer.cancel = None
        ask()

    def _note_membership(self, code: int, shard: int, request: LinkRequest) -> None:
        """Store a group membership.

        It lasts as long as the client's connection, even if a link to a shard closes.
        """
        if code in (Code.JOIN_GROUP, Code.LEAVE_GROUP):
            key = request.space, request.payload
            self._joined.pop(key, None)
            if code == Code.JOIN_GROUP:
                self._joined[key] = shard, request

    def ask_all(self, shards: Iterable[int], request: LinkRequest, done: Callable[[Replies], None]) -> None:
        replies: dict[int, Reply | None] = {}
        asked = list(shards)

        def came(shard: int, reply: Reply | None) -> None:
            replies[shard] = reply
            if len(replies) == len(asked):
                done(replies)

        for shard in asked:
            if shard == self.shards.own and request.kind in AT_ONCE:
                came(shard, self._local_reply(request))
            else:
                self._links.to(shard).ask(request, partial(came, shard))
        if not asked:
            done(replies)

    def _local_reply(self, request: LinkRequest) -> Reply:
        try:
            payload = local_payload(self.shared, request.kind, request.space, request.payload, request.dialect)
        except BrokerError as error:
            return Reply(errors.number_of(error, request.dialect), b"")
        return Reply(0, payload)

    def _linked(self, shard: int) -> IggyLink:
        link = IggyLink(self.shards, shard, self)
        if self._login is not None:
            link.ask(self._login, _ignore)
        for place, request in self._joined.values():
            if place == shard:
                link.ask(request, _ignore)
        return link

    @property
    def context(self) -> Context:
        return Context(self.peer, self.client_id)

    # Logins

    def logged_in(self, principal: Principal) -> None:
        """Set the authenticated user, and close the links of the previous login.

        Raises Busy if there are too many connections, and Denied for a user that other processes do not know.
        """
        user = self.broker.access.find_user(principal.user_id)
        if user is None or not user.configured:
            raise Denied(
                ErrorCode.LOGIN_FAILED,
                f"with several processes, users must be in the users file user={principal.name!r}",
            )
        is_other = self.principal is not None and self.principal != principal
        super().logged_in(principal)
        if is_other:
            self._joined.clear()
        self._links.close()
        self._login = self._offered

    def logged_out(self) -> None:
        super().logged_out()
        self._joined.clear()
        self._links.close()
        self._login = None

    @property
    def member_count(self) -> int:
        return super().member_count + len(self._joined)

    def describe_memberships(self, done: Callable[[list[GroupNumbers] | BrokerError], None]) -> None:
        directory = self.shared.directory
        own = [
            (topic.name.stream, directory.kept(topic).number, directory.group(topic, group)[0])
            for topic, group in self.joined()
        ]

        def replied(replies: Replies) -> None:
            found: list[Any] = list(own)
            for reply in replies.values():
                if reply is not None and not reply.status:
                    found += msgspec.msgpack.decode(reply.payload)
            request = LinkRequest(Kind.ADOPT, msgspec.msgpack.encode([space for space, _, _ in found]))
            self.ask_all([STREAMS_SHARD], request, lambda named: numbered(found, named[STREAMS_SHARD]))

        def numbered(found: list[Any], reply: Reply | None) -> None:
            if reply is None or reply.status:
                done(lost())
                return
            kept = msgspec.msgpack.decode(reply.payload, type=list[StreamKept])
            numbers = {stream.space: stream.number for stream in kept}
            done([GroupNumbers(numbers[space], topic, group) for space, topic, group in found])

        self.ask_all({shard for shard, _ in self._joined.values()}, LinkRequest(Kind.MEMBERSHIPS), replied)

    # End of the connection

    def close(self) -> None:
        super().close()
        self._links.close()


def _gather_all(gathering: Gathering, code: int, reader: Reader) -> None:
    """Execute a command that names no stream, in all shards. Raises Refused or Denied."""
    match code:
        case Code.GET_STREAMS | Code.GET_STATS | Code.GET_CLIENTS if reader.left:
            raise Refused(errors.UNKNOWN_COMMAND)
        case Code.GET_STREAMS:
            gathering.streams()
        case Code.GET_STATS:
            gathering.stats()
        case Code.GET_CLIENTS:
            gathering.clients()
        case _:
            gathering.create_stream(reader)


def _gather_stream(gathering: Gathering, code: int, kept: StreamKept, reader: Reader) -> None:
    """Execute a command on a stream in all shards. Raises Refused or Denied."""
    match code:
        case Code.UPDATE_STREAM:
            gathering.update_stream(kept)
        case Code.DELETE_STREAM:
            gathering.delete_stream(kept)
        case Code.PURGE_STREAM:
            gathering.purge_stream(kept)
        case Code.CREATE_TOPIC:
            gathering.create_topic(kept, reader)
        case _:
            gathering.details(kept)


def _ignore(reply: Reply | None) -> None:
    pass
