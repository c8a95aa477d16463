"""The other shards, as seen by sessions that forward requests (decision 0126)."""

from __future__ import annotations

from typing import Final, Protocol

KEY_BYTES: Final = 16


class LinkPeer(Protocol):
    """Receiver of a link's events. Nothing is called from inside a call of the link."""

    def received(self, data: bytes) -> None:
        """Bytes have arrived."""

    def relieved(self) -> None:
        """Most of the backlog was sent."""

    def lost(self) -> None:
        """The link has ended, or could not be made."""


class Link(Protocol):
    """A connection to a shard's own broker, which does not forward further."""

    @property
    def backlog(self) -> int:
        """Bytes written that were not sent yet."""

    @property
    def backlog_max(self) -> int:
        """Above this its user should pause until it is relieved."""

    def write(self, data: bytes) -> None:
        """Send bytes, once connected."""

    def pause(self) -> None:
        """Stop receiving for now."""

    def resume(self) -> None:
        """Receive again."""

    def finish(self) -> None:
        """Close after sending everything; its user gets no further events."""

    def close(self) -> None:
        """Close now; its user gets no further events."""


class Shards(Protocol):
    """All shards of one data directory, numbered from 0."""

    @property
    def count(self) -> int:
        """Number of shards."""

    @property
    def own(self) -> int:
        """This process's shard."""

    @property
    def key(self) -> bytes:
        """Secret of ``KEY_BYTES`` shared by the processes of this directory; new at each start of their parent."""

    def shard_of(self, full_name: str) -> int | None:
        """Return the shard of a topic, or None if no shard has it."""

    def home(self, full_name: str) -> int:
        """Return the shard for a topic that is created by a write; all processes agree."""

    def least_loaded(self) -> int:
        """Return the shard for a topic that is created by request."""

    def connect(self, shard: int, peer: LinkPeer) -> Link:
        """Return a link to a shard, possibly this process's own."""


class ReachedShards(Shards, Protocol):
    """Shards whose processes clients can address individually."""

    def listener_of(self, port: int) -> str:
        """Return the listener of a port to which a client has connected; empty if unknown."""

    def port_of(self, listener: str) -> int:
        """Return the port by which clients of this listener reach this process and no other."""
