"""The links of one session to the shards that it carries requests to, and what makes such sessions (decision 0076).

Promises: a session has one link to a shard at most, whose bytes keep their order; where a shard takes none, or the peer does not read,
all of them stop; who asked is told once, in the order of requests. Must not know: any wire's bytes, sockets, how topics are placed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from hmac import compare_digest
from typing import ClassVar, Final, Generic, Protocol, TypeVar

from polywire.errors import PeerError
from polywire.protocols.runtime.session import Output, Session, SessionFactory
from polywire.protocols.runtime.shards import Link, Shards

_Factory = TypeVar("_Factory", bound=SessionFactory)


class CarryingFactory(ABC, Generic[_Factory]):
    """Implements ``SessionFactory`` over another one: its sessions carry requests to the shards that have what they name."""

    __slots__ = ("_inside", "_shards")

    def __init__(self, inside: _Factory, shards: Shards) -> None:
        """inside: makes the sessions of our own shard."""
        self._inside: Final = inside
        self._shards: Final = shards

    @property
    def wire(self) -> str:
        """Name of the wire."""
        return self._inside.wire

    def recognise(self, prefix: bytes) -> bool | None:
        """As every factory of this wire."""
        return self._inside.recognise(prefix)

    @abstractmethod
    def open(self, output: Output, resume: Callable[[], None]) -> Session:
        """A session for a new connection."""


class LinkFactory(ABC, Generic[_Factory]):
    """Implements ``SessionFactory`` for what other processes of this broker carry here. ``magic``: how a link of the wire opens."""

    __slots__ = ("_inside", "_key")

    magic: ClassVar[bytes]

    def __init__(self, inside: _Factory, key: bytes) -> None:
        """inside: makes the sessions of our own shard, which share everything with those. key: see ``Shards``."""
        self._inside: Final = inside
        self._key: Final = key

    @property
    def wire(self) -> str:
        """Name of the wire."""
        return self._inside.wire

    def recognise(self, prefix: bytes) -> bool | None:
        """Whether the opening of a link stands there."""
        if prefix[: len(self.magic)] != self.magic[: len(prefix)]:
            return False
        return True if len(prefix) >= len(self.magic) else None

    @abstractmethod
    def open(self, output: Output, resume: Callable[[], None]) -> Session:
        """A session for a link."""


def check_opening(opening: bytes, expected: bytes) -> None:
    """Let in who has the key that only processes of this broker know. Raises PeerError."""
    if not compare_digest(opening, expected):
        raise PeerError("only processes of this broker can connect here", fatal=True)


class LinksOwner(Protocol):
    """Whom a link tells what became of it."""

    def link_lost(self, shard: int) -> None:
        """The process at the other end has gone, or could not be reached: it answers nothing any more."""

    def relieved(self) -> None:
        """A shard takes more again."""


class WireLink(ABC):
    """Implements ``LinkPeer`` as every wire does; a wire says what its bytes are. It has no slots: those of two bases would not fit."""

    def __init__(self, shards: Shards, shard: int, owner: LinksOwner) -> None:
        self._owner: Final = owner
        self.shard: Final = shard
        self._link: Final[Link] = shards.connect(shard, self)

    @property
    def is_clogged(self) -> bool:
        """Whether the shard takes less than is sent."""
        return self._link.backlog > self._link.backlog_max

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self._link.write(data)

    def pause(self) -> None:
        """The peer takes nothing for now."""
        self._link.pause()

    def resume(self) -> None:
        """The peer takes answers again."""
        self._link.resume()

    def finish(self) -> None:
        """Nobody waits for answers any more, but what was sent is to be carried out."""
        self._link.finish()

    def close(self) -> None:
        """Nobody waits for answers any more."""
        self._link.close()

    @abstractmethod
    def received(self, data: bytes) -> None:
        """See ``LinkPeer``."""

    def relieved(self) -> None:
        """See ``LinkPeer``."""
        self._owner.relieved()

    def lost(self) -> None:
        """See ``LinkPeer``."""
        self._owner.link_lost(self.shard)


_Asked = TypeVar("_Asked")


class AnsweredLink(WireLink, Generic[_Asked]):
    """A link whose answers come in the order of its requests. Guards: ``_asked`` are those who wait for one, in that order."""

    def __init__(self, shards: Shards, shard: int, owner: LinksOwner) -> None:
        super().__init__(shards, shard, owner)
        self._asked: deque[_Asked] = deque()
        self._received = bytearray()

    @abstractmethod
    def _take_answer(self, received: bytearray, at: int) -> int:
        """Hand the answer at ``at`` to who is first in ``_asked``; returns where it ends, 0 while not all of it is there."""

    @abstractmethod
    def _not_answered(self, asked: _Asked) -> None:
        """Tell that no answer comes any more."""

    def _handed_on(self) -> None:
        """All whole answers among what came were handed on."""

    def received(self, data: bytes) -> None:
        """See ``LinkPeer``."""
        received = self._received
        received += data
        at = 0
        while self._asked and (end := self._take_answer(received, at)):
            at = end
        del received[:at]
        if at:
            self._handed_on()

    def lost(self) -> None:
        """See ``LinkPeer``."""
        super().lost()
        asked, self._asked = self._asked, deque()
        for waiting in asked:
            self._not_answered(waiting)


_Link = TypeVar("_Link", bound=WireLink)


class Links(Generic[_Link]):
    """Guards: a link that is lost is forgotten before anybody is told, so that the next request makes another."""

    __slots__ = ("_by_shard", "_make")

    def __init__(self, make: Callable[[int], _Link]) -> None:
        """make: a link to a shard."""
        self._make: Final = make
        self._by_shard: dict[int, _Link] = {}

    def __iter__(self) -> Iterator[_Link]:
        return iter(list(self._by_shard.values()))

    def to(self, shard: int) -> _Link:
        """The link to a shard, made now where there is none."""
        link = self._by_shard.get(shard)
        if link is None:
            link = self._by_shard[shard] = self._make(shard)
        return link

    def forget(self, shard: int) -> _Link | None:
        """The link to a shard is of no more use; returns it."""
        return self._by_shard.pop(shard, None)

    @property
    def are_clogged(self) -> bool:
        """Whether one of the shards takes less than is sent."""
        return any(link.is_clogged for link in self._by_shard.values())

    def pause(self) -> None:
        """The peer takes nothing for now."""
        for link in self._by_shard.values():
            link.pause()

    def resume(self) -> None:
        """The peer takes answers again."""
        for link in self._by_shard.values():
            link.resume()

    def close(self) -> None:
        """End all."""
        by_shard, self._by_shard = self._by_shard, {}
        for link in by_shard.values():
            link.close()
