"""Protocol between the processes of one broker: Iggy requests with their context, and replies (decision 0127).

A link opens with ``MAGIC`` and a key that the processes share. Numbers are little-endian::

    u32 size of all that follows · u8 kind · u8 dialect · u32 stream's number · u32 code · u64 incarnation · u8 length, stream · payload
    u32 status · u32 size                                                                                                      · payload

``stream`` is the name, in the broker, of the stream that the sending session has looked up. The payload contains the
client's name for it. Replies arrive in the order of the requests and begin as in the classic framing. A reply is
delivered when it has arrived completely.
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
NO_STREAM: Final = 2**32 - 1  # the number of an unknown stream
_REQUEST: Final = Struct("<IBBIIQB")
REQUEST_HEAD_BYTES_MAX: Final = _REQUEST.size + 255


class Kind(IntEnum):
    COMMAND = 0
    """A client's request."""
    CONTEXT = 1
    """Sent first on a link: the client for which it is used. There is no reply."""
    FIND_STREAM = 2
    """Find a stream by name or number; the reply is empty if it does not exist."""
    ADOPT = 3
    """Assign numbers to streams of the broker; the reply lists all streams."""
    HAS_TOPICS = 4
    """Ask whether a stream of the broker has topics; the reply is 0 or 1."""
    FIND_TOPIC = 5
    """Ask whether a topic with this name or number exists; the reply is 0 or 1."""
    SUMMARY = 6
    """Request the totals of each stream's topics."""
    TOPICS = 7
    """Request the topics of a stream, encoded as in the stream's details."""
    TOTALS = 8
    """Request the totals of this process."""
    CLIENTS = 9
    """Request the connected clients, encoded as in a list of clients."""
    MEMBERSHIPS = 10
    """Request the client's group memberships in this process."""
    CHOOSE = 11
    """Reserve a topic number for the client; the reply is 0 if another client has reserved it."""
    CHOSEN = 12
    """Release the reserved number."""
    FORGET_STREAMS = 13
    """Report that streams were deleted or renamed."""


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """A request over a link.

    ``space`` is the name of the stream in the broker. ``number`` is the number of the stream, or ``NO_STREAM``.
    ``incarnation`` is the partition history that the request names, or 0.
    """

    kind: Kind
    payload: bytes = b""
    code: int = 0
    dialect: Dialect = D3
    space: str = ""
    number: int = NO_STREAM
    incarnation: int = 0

    def encode(self) -> bytes:
        space = self.space.encode()
        size = _REQUEST.size - SIZE_BYTES + len(space) + len(self.payload)
        dialect = DIALECTS.index(self.dialect)
        head = _REQUEST.pack(size, self.kind, dialect, self.number, self.code, self.incarnation, len(space))
        return b"".join((head, space, self.payload))


class RequestHead(NamedTuple):
    """The head of a received request. ``begin`` is the position of its payload."""

    kind: Kind
    code: int
    dialect: Dialect
    space: str
    number: int
    incarnation: int
    begin: int


def decode_head(data: memoryview, at: int) -> RequestHead:
    """Decode the head of a request. The bytes are trusted, because the sender is a process of this broker."""
    _, kind, dialect, number, code, incarnation, size = _REQUEST.unpack_from(data, at)
    begin = at + _REQUEST.size + size
    space = str(data[at + _REQUEST.size : begin], "utf-8")
    return RequestHead(Kind(kind), code, DIALECTS[dialect], space, number, incarnation, begin)


class Context(msgspec.Struct, frozen=True, array_like=True):
    """The client for which a link is used: its address, and the number of its connection."""

    peer: str
    client_id: int


class Reply(NamedTuple):
    """A reply over a link. ``status`` is 0 or an error number of the dialect."""

    status: int
    payload: bytes


Asked = Callable[[Reply | None], None]
"""Callback that gets the reply to a request; None if the link closed without one."""


class AnswersOwner(LinksOwner, Protocol):
    @property
    def context(self) -> Context: ...

    def answers_came(self) -> None:
        """Continue after replies were delivered."""


class IggyLink(AnsweredLink[Asked]):
    """A link to one shard."""

    def __init__(self, shards: Shards, shard: int, owner: AnswersOwner) -> None:
        super().__init__(shards, shard, owner)
        self._answers: Final = owner
        self.write(MAGIC + shards.key)
        self.write(LinkRequest(Kind.CONTEXT, msgspec.msgpack.encode(owner.context)).encode())

    def ask(self, request: LinkRequest, asked: Asked) -> None:
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
