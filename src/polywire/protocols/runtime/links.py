"""A session's links to the shards that it forwards requests to, and factories of such sessions (decision 0127)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from hmac import compare_digest
from typing import Final, Generic, Protocol, TypeVar

from polywire.errors import PeerError
from polywire.protocols.runtime.session import Output, Session, SessionFactory
from polywire.protocols.runtime.shards import Link, Shards

_Factory = TypeVar("_Factory", bound=SessionFactory)


class CarryingFactory(ABC, Generic[_Factory]):
    """A session factory whose sessions forward requests to other shards. Implements ``SessionFactory``."""

    __slots__ = ("_inside", "_shards")

    def __init__(self, inside: _Factory, shards: Shards) -> None:
        """``inside`` creates the sessions of this shard."""
        self._inside: Final = inside
        self._shards: Final = shards

    @property
    def wire(self) -> str:
        return self._inside.wire

    def recognise(self, prefix: bytes) -> bool | None:
        return self._inside.recognise(prefix)

    @abstractmethod
    def open(self, output: Output, resume: Callable[[], None]) -> Session: ...


def check_opening(opening: bytes, expected: bytes) -> None:
    """Raise PeerError if the beginning of a link does not have the shared key.

    Only processes of this broker know the key.
    """
    if not compare_digest(opening, expected):
        raise PeerError("only processes of this broker can connect here", fatal=True)


class LinksOwner(Protocol):
    """Receiver of a link's events."""

    def link_lost(self, shard: int) -> None:
        """Handle the loss of a link: the other process has ended or is not reachable, and will not respond."""

    def relieved(self) -> None: ...


class WireLink(ABC):
    """The part of a link that all protocols share. Implements ``LinkPeer``.

    The class has no ``__slots__``, because Python allows only one base class with slots.
    """

    def __init__(self, shards: Shards, shard: int, owner: LinksOwner) -> None:
        self._owner: Final = owner
        self.shard: Final = shard
        self._link: Final[Link] = shards.connect(shard, self)

    @property
    def is_clogged(self) -> bool:
        """Whether the shard accepts fewer bytes than are sent."""
        return self._link.backlog > self._link.backlog_max

    def write(self, data: bytes) -> None:
        self._link.write(data)

    def pause(self) -> None:
        self._link.pause()

    def resume(self) -> None:
        self._link.resume()

    def finish(self) -> None:
        """Send everything, then close. Responses are ignored."""
        self._link.finish()

    def close(self) -> None:
        """Close immediately. Responses are ignored."""
        self._link.close()

    @abstractmethod
    def received(self, data: bytes) -> None: ...

    def relieved(self) -> None:
        self._owner.relieved()

    def lost(self) -> None:
        self._owner.link_lost(self.shard)


_Link = TypeVar("_Link", bound=WireLink)


class Links(Generic[_Link]):
    """Links by shard.

    A lost link is removed before its loss is reported, so that the next request creates a new one.
    """

    __slots__ = ("_by_shard", "_make")

    def __init__(self, make: Callable[[int], _Link]) -> None:
        """``make`` creates a link to a shard."""
        self._make: Final = make
        self._by_shard: dict[int, _Link] = {}

    def __iter__(self) -> Iterator[_Link]:
        return iter(list(self._by_shard.values()))

    def to(self, shard: int) -> _Link:
        """Return the link to a shard. It is created if necessary."""
        link = self._by_shard.get(shard)
        if link is None:
            link = self._by_shard[shard] = self._make(shard)
        return link

    def forget(self, shard: int) -> _Link | None:
        return self._by_shard.pop(shard, None)

    @property
    def are_clogged(self) -> bool:
        """Whether a shard accepts fewer bytes than are sent."""
        return any(link.is_clogged for link in self._by_shard.values())

    def close(self) -> None:
        by_shard, self._by_shard = self._by_shard, {}
        for link in by_shard.values():
            link.close()
