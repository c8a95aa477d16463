"""The other shards, as sessions that forward requests see them (decision 0126)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from polywire.broker.owners import Caller
from polywire.broker.topics import Topic
from polywire.log.base import Completion

KEY_BYTES: Final = 16
Called = Sequence[tuple[str, object, Sequence[Callable[..., Any]]]]
"""Objects of a protocol that other processes call: their names, the objects, and the functions to be called with them."""


class LinkPeer(Protocol):
    """The receiver of a link's events. Its methods are never called while a method of the link runs."""

    def received(self, data: bytes) -> None:
        """Handle received bytes."""

    def lost(self) -> None:
        """Handle a link that has ended or could not be opened."""


class Link(Protocol):
    """A connection to the broker of a shard, which does not forward requests again.

    Its user limits the bytes on the way.
    """

    def write(self, data: bytes) -> None:
        """Send bytes, when the link is connected."""

    def close(self) -> None:
        """Close immediately. The user gets no further events."""


class Shards(Protocol):
    """All shards of one data directory, numbered from 0."""

    @property
    def count(self) -> int:
        """Number of shards."""

    @property
    def own(self) -> int:
        """The shard of this process."""

    @property
    def key(self) -> bytes:
        """A secret of ``KEY_BYTES`` bytes that the processes of this broker share.

        Each start of their parent creates a new one.
        """

    def shard_of(self, full_name: str) -> int | None:
        """Return the shard of a topic, or None if no shard has it."""

    def home(self, full_name: str) -> int:
        """Return the shard for a topic that is created by a write. It is the same in all processes."""

    def least_loaded(self) -> int:
        """Return the shard for a topic that is created by a request."""

    def connect(self, shard: int, peer: LinkPeer) -> Link:
        """Return a link to a shard, possibly this process's own."""


class Parts(Protocol):
    """The processes of a broker, as a protocol sees them that has an object of its own in each of them."""

    @property
    def local(self) -> Any:
        """The broker of this process."""

    @property
    def shards(self) -> Shards:
        """The shards, and which of them has a topic."""

    def shard_of_topic(self, topic: Topic) -> int:
        """Return the shard of a topic."""

    def next_shard(self) -> int:
        """Return the shard for a topic that is created by a request."""

    def require_reported(self) -> None:
        """Raise Pending until all processes have reported their topics and values, or Unavailable if one does not."""

    def call_part(self, shard: int, part: str, function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Call a function in another process with the object ``part`` of that process as its first argument.

        A function with a completion reports there. The result of another one is returned. Raises Pending until it is
        known.
        """

    def watch_values(self, changed: Callable[[Any], None]) -> None:
        """Call ``changed`` with each value that a protocol has stored in the first shard, or removed.

        It has the fields ``wire``, ``key`` and ``value``.
        """

    def watch_topics(self, changed: Callable[[bytes], None]) -> None:
        """Call ``changed`` with the id of each topic that changes."""


class Router(Protocol):
    """The processes of a broker, as sessions of the `polywire` protocol see them."""

    @property
    def shards(self) -> Shards:
        """The shards, and which of them has a topic."""

    def shard_of_topic(self, topic: Topic) -> int:
        """Return the shard of a topic."""

    @property
    def is_clogged(self) -> bool:
        """Whether a session should wait with its next request, because a shard has many to answer."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when a clogged shard has answered most requests."""

    def forward(
        self, shard: int, by: Caller, frame: bytes, then: Completion[bytes], *, sees_files: bool = False
    ) -> None:
        """Execute a request of the `polywire` protocol, which has one response, in the process of a shard.

        The caller must be authorized to make it. ``then`` gets the frame of the response, which may be an error frame,
        or Unavailable if the process has ended. ``then`` is never called from inside this call.
        """


class ReachedShards(Shards, Protocol):
    """Shards whose processes can be addressed individually by clients."""

    def listener_of(self, port: int) -> str:
        """Return the name of the listener with this port, to which a client connected; empty if unknown."""

    def port_of(self, listener: str) -> int:
        """Return the port at which clients of this listener reach this process and no other."""
