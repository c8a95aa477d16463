"""The receiving end of a link: a session for another process, which forwards the requests of one client (decision
0127).

The client is authenticated again over the link. Its group memberships last as long as the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Final, Literal

import msgspec

from polywire.broker.topics import Topic
from polywire.errors import BrokerError
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.context import Shared
from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.directory import Stream
from polywire.protocols.iggy.names import find_named
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.server import client_bytes, count_all
from polywire.protocols.iggy.session import FRAME_BYTES_MAX, Command, IggySession
from polywire.protocols.iggy.shard_link import (
    MAGIC,
    REQUEST_HEAD_BYTES_MAX,
    Context,
    Kind,
    RequestHead,
    decode_head,
)
from polywire.protocols.iggy.topics import bytes_of, messages_of, topic_bytes
from polywire.protocols.runtime import carrying
from polywire.protocols.runtime.links import check_opening
from polywire.protocols.runtime.session import Output

YES: Final = b"\1"
NO: Final = b"\0"
LINK_FRAME_BYTES_MAX: Final = FRAME_BYTES_MAX + REQUEST_HEAD_BYTES_MAX
_encode: Final[Callable[[object], bytes]] = msgspec.msgpack.encode
_decode: Final[Callable[[bytes], Any]] = msgspec.msgpack.decode


class LinkedAnswer(Answer):
    """A reply to a forwarded request. Only the sending process may close the client's connection."""

    __slots__ = ()

    def evict(self, reason: int, protocols: tuple[int, int] = (0, 0)) -> None:
        """Refuse the login and the requests after it. The sending process then closes the client's connection."""
        del reason, protocols
        self.status(errors.NOT_LOGGED_IN)


class LinkedSession(carrying.LinkedSession, IggySession):
    """One link. ``_head`` is the head of the current request."""

    byte_order: ClassVar[Literal["big", "little"]] = "little"
    answer_type: ClassVar[type[Answer]] = LinkedAnswer

    __slots__ = ("_context", "_head", "_opening")

    def __init__(
        self,
        key: bytes,
        shared: Shared,
        commands: Mapping[int, Command],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(shared, commands, output, resume)
        self._opening = MAGIC + key
        self._context = Context("", 0)
        self._head: RequestHead | None = None

    # Called by the driver

    @property
    def frame_bytes_max(self) -> int:
        """The sending process has checked the client's limit, and has proved that it knows the shared key."""
        return LINK_FRAME_BYTES_MAX

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        if self._opening:
            check_opening(bytes(data[at:end]), self._opening)
            self._opening = b""
            return True
        head = self._head = decode_head(data, at)
        payload = data[head.begin : end]
        if head.kind is Kind.COMMAND:
            return self._handle(head.code, payload, None)
        if head.kind is Kind.CONTEXT:
            self._context = msgspec.msgpack.decode(payload, type=Context)
            self.client_id = self._context.client_id
            return True
        if self._is_overlooked(0):
            return False
        answer = self._slot(None, head.dialect, blocking=False)
        try:
            self._tell(head, bytes(payload), answer)
        except BrokerError as error:
            answer.refuse(error)
        return True

    # The client of the request

    @property
    def peer(self) -> str:
        return self._context.peer

    def _enter_shared(self) -> int:
        self.shared.links.add(self)
        return 0

    def _leave_shared(self) -> None:
        shared = self.shared
        shared.links.discard(self)
        for place in [place for place, session in shared.choosing.items() if session is self]:
            del shared.choosing[place]

    def _dialect_of(self, code: int, payload: memoryview) -> Dialect:
        assert self._head is not None, "a request has a head"
        return self._head.dialect

    def named_incarnation(self, answer: Answer) -> int:
        """Return the partition history that the current request names; 0 if it names none."""
        del answer
        assert self._head is not None, "a request has a head"
        return self._head.incarnation

    def stream_named(self, named: int | str, dialect: Dialect) -> Stream | None:
        """The sending process has looked up the stream for the current request."""
        assert self._head is not None, "a request has a head"
        return self.shared.directory.in_space(self._head.space) if self._head.space else None

    def stream_number(self, topic: Topic) -> int:
        assert self._head is not None, "a request has a head"
        return self._head.number

    # Requests between processes

    def _tell(self, head: RequestHead, payload: bytes, answer: Answer) -> None:
        """Reply to a request that only processes of this broker send.

        Raises BrokerError, whose number is then the reply.
        """
        shared, space = self.shared, head.space
        match head.kind:
            case Kind.SUMMARY:
                answer.make(_summary(shared))
            case Kind.TOPICS:
                answer.make(_topics(self, space, head.dialect))
            case Kind.TOTALS:
                answer.make(_totals(shared))
            case Kind.CLIENTS:
                answer.make(_clients(shared, head.dialect))
            case Kind.MEMBERSHIPS:
                answer.ok(_encode(self._memberships()))
            case Kind.CHOOSE:
                kept = shared.choosing.setdefault((space, _decode(payload)), self)
                answer.ok(YES if kept is self else NO)
            case Kind.CHOSEN:
                if shared.choosing.get(place := (space, _decode(payload))) is self:
                    del shared.choosing[place]
                answer.ok()
            case Kind.FORGET_STREAMS:
                shared.streams_version += 1
                answer.ok()
            case _:
                answer.ok(local_payload(shared, head.kind, space, payload, head.dialect))

    def _memberships(self) -> list[tuple[str, int, int]]:
        directory = self.shared.directory
        return [
            (topic.name.stream, directory.kept(topic).number, directory.group(topic, group)[0])
            for topic, group in self.joined()
        ]


def local_payload(shared: Shared, kind: Kind, space: str, payload: bytes, dialect: Dialect) -> bytes:
    """Return this process's reply to a request about its streams and topics.

    Raises Busy if there are too many streams.
    """
    directory = shared.directory
    stream = None if kind in (Kind.FIND_STREAM, Kind.ADOPT) else directory.find_space(space)
    match kind:
        case Kind.FIND_STREAM:
            found = find_named(directory.find_stream, _decode(payload), dialect)
            return b"" if found is None else _encode(found.kept)
        case Kind.ADOPT:
            directory.adopt(_decode(payload))
            return _encode(directory.kept_streams())
        case Kind.HAS_TOPICS:
            return YES if stream is not None and directory.topics(stream) else NO
        case Kind.FIND_TOPIC:
            if stream is None:
                return NO
            topic = find_named(partial(directory.find_topic, stream), _decode(payload), dialect)
            return NO if topic is None else YES
        case _:
            raise AssertionError(f"the request comes from another release kind={kind}")


def _summary(shared: Shared) -> Iterator[bytes]:
    """Yield topics, bytes and messages of each stream that has topics."""
    directory, found = shared.directory, []
    for stream in directory.streams():
        topics = directory.topics(stream)
        size = messages = 0
        for topic in topics:
            size += bytes_of(topic)
            messages += messages_of(topic)
            yield b""
        if topics:
            found.append((stream.kept.space, len(topics), size, messages))
    yield _encode(found)


def _topics(session: IggySession, space: str, dialect: Dialect) -> Iterator[bytes]:
    """Yield bytes and messages of a stream's topics, then each topic with its number."""
    directory = session.shared.directory
    stream = directory.find_space(space)
    size = messages = 0
    found = []
    for topic in [] if stream is None else directory.topics(stream):
        size += bytes_of(topic)
        messages += messages_of(topic)
        found.append((directory.kept(topic).number, topic_bytes(session, topic, dialect)))
        yield b""
    yield _encode((size, messages, found))


def _totals(shared: Shared) -> Iterator[bytes]:
    for totals in count_all(shared):
        yield b"" if totals is None else _encode((sorted(totals.spaces), *totals[1:]))


def _clients(shared: Shared, dialect: Dialect) -> Iterator[bytes]:
    found = []
    for number, client in sorted(shared.clients.items()):
        found.append((number, client_bytes(client, dialect, client.member_count)))
        yield b""
    yield _encode(found)
