"""Protocol between the processes of one broker: Cursus requests with their context, and responses (decision 0127).

A link opens with ``MAGIC`` and a key that the processes share. Requests and responses are frames::

    u32 size of the rest · u8 kind · u8 dialect · u64 minimum epoch · u8 length, name of the compression · decompressed body
    u32 size of the rest · u8 flags                                                                      · complete frames

Responses arrive in the order of the requests. The frames of a stream follow its response, up to ``STREAM_END``.

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
"""Flag of a response: close the client's connection unless the client soon sends another request."""
STREAM: Final = 2
"""Flag of an empty response: a stream begins."""
_REQUEST: Final = Struct(">IBBQB")
_ANSWER: Final = Struct(">IB")
REQUEST_HEAD_BYTES_MAX: Final = _REQUEST.size + 255


class Kind(IntEnum):
    COMMAND = 0
    """A client's frame, to be executed and answered."""
    CONTEXT = 1
    """The state on which the following commands depend, as JSON. There is no response."""


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """A client's frame that is forwarded.

    ``dialect`` is the dialect of the client's latest unambiguous request. ``packing`` is the name of the frame's
    compression, empty for none. For ``epoch_min`` see ``CursusSession.epoch_min``.
    """

    body: bytes
    dialect: Dialect | None
    packing: str = ""
    epoch_min: int = 0
    kind: Kind = Kind.COMMAND

    def encode(self) -> bytes:
        name = self.packing.encode()
        size = _REQUEST.size - PREFIX_BYTES + len(name) + len(self.body)
        head = _REQUEST.pack(size, self.kind, DIALECTS.index(self.dialect), self.epoch_min, len(name))
        return b"".join((head, name, self.body))


class RequestHead(NamedTuple):
    """The head of a request that was received over a link. ``begin`` is the position of its body."""

    kind: Kind
    dialect: Dialect | None
    epoch_min: int
    packing: str
    begin: int


def decode_head(data: memoryview, at: int) -> RequestHead:
    """Decode the head of a request. It is trusted, because a process of this broker has sent it."""
    _, kind, dialect, epoch_min, size = _REQUEST.unpack_from(data, at)
    begin = at + _REQUEST.size + size
    return RequestHead(
        Kind(kind), DIALECTS[dialect], epoch_min, bytes(data[at + _REQUEST.size : begin]).decode(), begin
    )


def answer_head(size: int, flags: int) -> bytes:
    """Return the bytes before a response whose frames have ``size`` bytes."""
    return _ANSWER.pack(size + 1, flags)


class Context(NamedTuple):
    """The state of a client's connection on which its commands depend.

    ``host`` and ``port`` are the address that the client has used, which responses contain. ``peer`` is the client's
    own address. ``group`` is set by SETGROUP, ``features`` by NEGOTIATE.
    """

    host: str
    port: int
    peer: str
    group: str
    features: frozenset[str]

    def encode(self) -> bytes:
        return json.dumps([self.host, self.port, self.peer, self.group, sorted(self.features)]).encode()


def decode_context(body: memoryview) -> Context:
    host, port, peer, group, features = json.loads(bytes(body))
    return Context(host, port, peer, group, frozenset(features))


class Asked(Protocol):
    """A request over a link that waits for its response."""

    def answered(self, flags: int, frames: bytes) -> None:
        """Handle the response.

        The link notifies its session only after it has passed on all received responses.
        """

    def lost(self) -> None:
        """Handle the loss of the link: no response will arrive."""


class AnswersOwner(LinksOwner, Protocol):
    @property
    def context(self) -> Context: ...

    def answers_came(self) -> None: ...


class Nobody:
    """Ignores the response to a request. Implements ``Asked``."""

    def answered(self, flags: int, frames: bytes) -> None:
        pass

    def lost(self) -> None:
        pass


class CursusLink(AnsweredLink[Asked]):
    """A link to one shard. ``_told`` is the context that was sent last."""

    def __init__(self, shards: Shards, shard: int, owner: AnswersOwner, login: LinkRequest | None) -> None:
        """``login`` is the request with which the client has logged in."""
        super().__init__(shards, shard, owner)
        self._answers: Final = owner
        self._told: Context | None = None
        self.write(MAGIC + shards.key)
        if login is not None:
            self.ask(login, Nobody())

    def ask(self, request: LinkRequest, asked: Asked) -> None:
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
