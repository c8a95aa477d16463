"""Protocol between the processes of one broker: Cursus requests with their context, and responses (decision 0127).

A link opens with ``MAGIC`` and the key of the directory's processes. The frame of a request, and the bytes before each
response::

    u32 size of all that follows · u8 kind · u8 dialect · u64 least epoch · u8 length, name of the compression · body, expanded
    u32 size of all that follows · u8 flags                                                                     · whole frames

Responses have the order of the requests. A stream's frames follow in place of a response, up to ``STREAM_END``.

* A response is delivered when it is complete.
* The client is logged in at the other process as it is in this one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple, Protocol

from polywire.protocols.cursus.messages import PREFIX_BYTES, Dialect
from polywire.protocols.runtime.links import AnsweredLink, LinksOwner
from polywire.protocols.runtime.shards import Shards

MAGIC: Final = b"\xf3CURSUS\1"
STREAM_END: Final = b"\xff\xff\xff\xff"
DIALECTS: Final = (None, *Dialect)
UNUSED: Final = 1
"""Flag of an answer: the connection closes unless something further is asked."""
STREAM: Final = 2
"""Flag of an answer: it is none, a stream begins."""
_REQUEST: Final = Struct(">IBBQB")
_ANSWER: Final = Struct(">IB")
REQUEST_HEAD_BYTES_MAX: Final = _REQUEST.size + 255


class Kind(IntEnum):
    """What a request frame is."""

    COMMAND = 0
    """A frame of the wire, to be carried out and answered."""
    CONTEXT = 1
    """What commands that follow rest on, as JSON; there is no answer."""


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """A frame of the wire that is carried.

    dialect: what the peer has spoken so far. packing: name of the compression that the frame came with, empty for none. epoch_min: see
    ``CursusSession.epoch_min``.
    """

    body: bytes
    dialect: Dialect | None
    packing: str = ""
    epoch_min: int = 0
    kind: Kind = Kind.COMMAND

    def encode(self) -> bytes:
        """The request's bytes."""
        name = self.packing.encode()
        size = _REQUEST.size - PREFIX_BYTES + len(name) + len(self.body)
        head = _REQUEST.pack(size, self.kind, DIALECTS.index(self.dialect), self.epoch_min, len(name))
        return b"".join((head, name, self.body))


class RequestHead(NamedTuple):
    """The head of a request that came over a link. begin: where its body begins."""

    kind: Kind
    dialect: Dialect | None
    epoch_min: int
    packing: str
    begin: int


def decode_head(data: memoryview, at: int) -> RequestHead:
    """The head of a request; who wrote it is this broker."""
    _, kind, dialect, epoch_min, size = _REQUEST.unpack_from(data, at)
    begin = at + _REQUEST.size + size
    return RequestHead(
        Kind(kind), DIALECTS[dialect], epoch_min, bytes(data[at + _REQUEST.size : begin]).decode(), begin
    )


def answer_head(size: int, flags: int) -> bytes:
    """What stands in front of an answer whose frames have so many bytes."""
    return _ANSWER.pack(size + 1, flags)


class Context(NamedTuple):
    """What a connection's commands rest on beside their words: the address that clients are sent to, its own, the group it has set, the
    features that it has negotiated."""

    host: str
    port: int
    peer: str
    group: str
    features: frozenset[str]

    def encode(self) -> bytes:
        """Its bytes."""
        return json.dumps([self.host, self.port, self.peer, self.group, sorted(self.features)]).encode()


def decode_context(body: memoryview) -> Context:
    """The other direction of ``Context.encode``."""
    host, port, peer, group, features = json.loads(bytes(body))
    return Context(host, port, peer, group, frozenset(features))


class Asked(Protocol):
    """Who waits for an answer over a link."""

    def answered(self, flags: int, frames: bytes) -> None:
        """It came. The session is told itself, once all that came has been handed on."""

    def lost(self) -> None:
        """It does not come any more."""


class AnswersOwner(LinksOwner, Protocol):
    """What a link asks of its session."""

    @property
    def context(self) -> Context: ...

    def answers_came(self) -> None: ...


class Nobody:
    """Implements ``Asked`` for what is not waited for."""

    def answered(self, flags: int, frames: bytes) -> None:
        """See ``Asked``."""

    def lost(self) -> None:
        """See ``Asked``."""


class CursusLink(AnsweredLink[Asked]):
    """A link to one shard. Guards: ``_told`` is the context as the shard knows it."""

    def __init__(self, shards: Shards, shard: int, owner: AnswersOwner, login: LinkRequest | None) -> None:
        """login: the request by which the peer has logged in."""
        super().__init__(shards, shard, owner)
        self._answers: Final = owner
        self._told: Context | None = None
        self.write(MAGIC + shards.key)
        if login is not None:
            self.ask(login, Nobody())

    def ask(self, request: LinkRequest, asked: Asked) -> None:
        """Have a request carried out there."""
        context = self._answers.context
        if context != self._told:
            self._told = context
            self.write(LinkRequest(context.encode(), None, kind=Kind.CONTEXT).encode())
        self._asked.append(asked)
        self.write(request.encode())

    def _take_answer(self, received: bytearray, at: int) -> int:
        if len(received) - at < _ANSWER.size:
            return 0
        size, flags = _ANSWER.unpack_from(received, at)
        end: int = at + PREFIX_BYTES + size
        if end > len(received):
            return 0
        self._asked.popleft().answered(flags, bytes(memoryview(received)[at + _ANSWER.size : end]))
        return end

    def _not_answered(self, asked: Asked) -> None:
        asked.lost()

    def _handed_on(self) -> None:
        self._answers.answers_came()
