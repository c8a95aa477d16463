"""How one process of a broker asks another over the Iggy wire: requests with what they rest on, and answers (decision 0127).

A link opens with ``MAGIC`` and the key of the directory's processes. Numbers are little-endian::

    u32 size of all that follows · u8 kind · u8 dialect · u32 stream's number · u32 code · u64 incarnation · u8 length, stream · payload
    u32 status · u32 size                                                                                                      · payload

The stream is the broker's, which the session that was asked has found: the payload names it as the peer did. Answers come in the order of
requests and begin as those of the classic framing do.

Promises: an answer is handed on when all of it is there; the peer is logged in there as it is here. Must not know: sockets, what is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple, Protocol

import msgspec

from polywire.protocols.iggy.dialect import D3, DIALECTS, Dialect
from polywire.protocols.iggy.messages import HEAD
from polywire.protocols.runtime.carrying import SIZE_BYTES
from polywire.protocols.runtime.links import AnsweredLink, LinksOwner
from polywire.protocols.runtime.shards import Shards

MAGIC: Final = b"\xf3IGGY\0\2"
NO_STREAM: Final = 2**32 - 1  # the number of a stream that is not known
_REQUEST: Final = Struct("<IBBIIQB")
REQUEST_HEAD_BYTES_MAX: Final = _REQUEST.size + 255


class Kind(IntEnum):
    """What a request over a link is."""

    COMMAND = 0
    """A request of the wire, to be carried out."""
    CONTEXT = 1
    """Who asks, before anything else; there is no answer."""
    FIND_STREAM = 2
    """A stream by its name or number; nothing where there is none."""
    ADOPT = 3
    """Streams of the broker that are somewhere get numbers; all streams are told."""
    HAS_TOPICS = 4
    """Whether there are topics in a stream of the broker, 0 or 1."""
    FIND_TOPIC = 5
    """Whether there is a topic of this name or number, 0 or 1."""
    SUMMARY = 6
    """What the topics of each stream come to."""
    TOPICS = 7
    """The topics of a stream, as details of it have them."""
    TOTALS = 8
    """What there is of everything."""
    CLIENTS = 9
    """Who is connected, as lists of clients have them."""
    MEMBERSHIPS = 10
    """Of which groups the peer is a member here."""
    CHOOSE = 11
    """Keep a number of a topic for who makes it, 0 where somebody else is about to have it."""
    CHOSEN = 12
    """It is made, or not."""
    FORGET_STREAMS = 13
    """Streams have ended, or have other names."""


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """What is asked. space: the stream that the request names, in the broker's words; number: its number, or ``NO_STREAM``.
    incarnation: of the partition that the peer means, or 0."""

    kind: Kind
    payload: bytes = b""
    code: int = 0
    dialect: Dialect = D3
    space: str = ""
    number: int = NO_STREAM
    incarnation: int = 0

    def encode(self) -> bytes:
        """Its bytes."""
        space = self.space.encode()
        size = _REQUEST.size - SIZE_BYTES + len(space) + len(self.payload)
        dialect = DIALECTS.index(self.dialect)
        head = _REQUEST.pack(size, self.kind, dialect, self.number, self.code, self.incarnation, len(space))
        return b"".join((head, space, self.payload))


class RequestHead(NamedTuple):
    """The head of a request that came over a link. begin: where its payload begins."""

    kind: Kind
    code: int
    dialect: Dialect
    space: str
    number: int
    incarnation: int
    begin: int


def decode_head(data: memoryview, at: int) -> RequestHead:
    """The head of a request; who wrote it is this broker."""
    _, kind, dialect, number, code, incarnation, size = _REQUEST.unpack_from(data, at)
    begin = at + _REQUEST.size + size
    space = str(data[at + _REQUEST.size : begin], "utf-8")
    return RequestHead(Kind(kind), code, DIALECTS[dialect], space, number, incarnation, begin)


class Context(msgspec.Struct, frozen=True, array_like=True):
    """Who asks over a link: the peer's address and the number of its connection."""

    peer: str
    client_id: int


class Reply(NamedTuple):
    """What came over a link. status: 0, or the error number that the dialect has."""

    status: int
    payload: bytes


Asked = Callable[[Reply | None], None]
"""Who waits for an answer over a link; None: it does not come any more."""


class AnswersOwner(LinksOwner, Protocol):
    """What a link asks of its session."""

    @property
    def context(self) -> Context:
        """Who asks."""

    def answers_came(self) -> None:
        """Answers were handed on."""


class IggyLink(AnsweredLink[Asked]):
    """A link to one shard."""

    def __init__(self, shards: Shards, shard: int, owner: AnswersOwner) -> None:
        super().__init__(shards, shard, owner)
        self._answers: Final = owner
        self.write(MAGIC + shards.key)
        self.write(LinkRequest(Kind.CONTEXT, msgspec.msgpack.encode(owner.context)).encode())

    def ask(self, request: LinkRequest, asked: Asked) -> None:
        """Have a request carried out there."""
        self._asked.append(asked)
        self.write(request.encode())

    def _take_answer(self, received: bytearray, at: int) -> int:
        begin = at + HEAD.size
        if len(received) < begin:
            return 0
        status, size = HEAD.unpack_from(received, at)
        end: int = begin + size
        if end > len(received):
            return 0
        self._asked.popleft()(Reply(status, bytes(memoryview(received)[begin:end])))
        return end

    def _not_answered(self, asked: Asked) -> None:
        asked(None)

    def _handed_on(self) -> None:
        self._answers.answers_came()
