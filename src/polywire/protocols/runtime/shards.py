"""The shards beside a session's own, as sessions that carry requests see them (decision 0072).

Promises: which shard has a topic is known at once; bytes to another shard keep their order. Must not know: any wire's bytes, sockets, how
topics are placed.
"""

from __future__ import annotations

from typing import Final, Protocol

KEY_BYTES: Final = 16


class LinkPeer(Protocol):
    """Who uses a link. Nothing is called from inside a call of the link."""

    def received(self, data: bytes) -> None:
        """Bytes came."""

    def relieved(self) -> None:
        """Much of what was written has left."""

    def lost(self) -> None:
        """The link has ended, or could not be made; nothing comes any more."""


class Link(Protocol):
    """A connection to one shard's own broker, which carries no further."""

    @property
    def backlog(self) -> int:
        """Bytes written that have not left yet."""

    @property
    def backlog_max(self) -> int:
        """Above this its user should write no more, until it is relieved."""

    def write(self, data: bytes) -> None:
        """Send bytes, once the link is made."""

    def pause(self) -> None:
        """Let nothing come for now."""

    def resume(self) -> None:
        """Let bytes come again."""

    def finish(self) -> None:
        """End it once what was written has left; its user is told nothing any more."""

    def close(self) -> None:
        """End it now; its user is told nothing any more."""


class Shards(Protocol):
    """All shards of one data directory; they are numbered from 0 on."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def own(self) -> int:
        """The one that this process has."""

    @property
    def key(self) -> bytes:
        """``KEY_BYTES`` that nobody but the processes of this directory knows, other ones at each start of their parent."""

    def shard_of(self, full_name: str) -> int | None:
        """Where a topic lies; None when there is none of this name that shards share."""

    def home(self, full_name: str) -> int:
        """Where a topic begins that is made because somebody writes to it: every process says the same."""

    def least_loaded(self) -> int:
        """Where a topic begins that somebody asks for."""

    def connect(self, shard: int, peer: LinkPeer) -> Link:
        """A link to a shard, this process's own included."""


class ReachedShards(Shards, Protocol):
    """Shards of processes whose clients can be sent to one of them."""

    def listener_of(self, port: int) -> str:
        """The listener that a client came to who has connected to this port; empty where that cannot be told."""

    def port_of(self, listener: str) -> int:
        """By which clients of this listener reach this process and no other."""
