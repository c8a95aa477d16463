"""The interface through which sessions forward requests to other shards (decision 0126)."""

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
    """Receives a link's events. Its methods are never called inside a method of the link."""

    def received(self, data: bytes) -> None:
        """Handle received bytes."""

    def lost(self) -> None:
        """Handle the end of the link. It was closed by the other end, or could not be opened."""


class Link(Protocol):
    """A connection to the process of a shard. That process executes requests itself and never forwards them.

    The number of unanswered bytes is not limited here: the caller must do it.
    """

    def write(self, data: bytes) -> None:
        """Send bytes now, or as soon as the link is connected."""

    def close(self) -> None:
        """Close immediately. The peer gets no further events."""


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
        """A secret of ``KEY_BYTES`` bytes that the processes of this broker share. It is new after each start."""

    def shard_of(self, full_name: str) -> int | None:
        """Return the shard of the topic with this name, or None if the topic does not exist."""

    def shard_by_hash(self, full_name: str) -> int:
        """Return the shard in which a topic is created by a write to it. All processes return the same shard."""

    def least_loaded(self) -> int:
        """Return the shard in which a topic is created by a request to create it."""

    def connect(self, shard: int, peer: LinkPeer) -> Link:
        """Return a link to the process of a shard, which may be this process."""


class Parts(Protocol):
    """The processes of a broker, for a protocol that has state in each of them.

    An object with state is a part. It has a name, and each process has one of that name.
    """

    @property
    def local(self) -> Any:
        """The broker of this process."""

    @property
    def shards(self) -> Shards:
        """The shards, and which of them has a topic."""

    def shard_of_topic(self, topic: Topic) -> int:
        """Return the shard of a topic."""

    def next_shard(self) -> int:
        """Return the shard in which a topic is created by a request to create it."""

    def require_reported(self) -> None:
        """Raise Pending until all processes have reported their topics and values, or Unavailable if one does not."""

    def call_part(self, shard: int, part: str, function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Call a function in another process. Its first argument is the object named ``part`` of that process.

        If the function takes a completion, the completion gets the result. Otherwise, the result is returned; Pending
        is raised until it is known.
        """

    def watch_values(self, changed: Callable[[Any], None]) -> None:
        """Call ``changed`` when a protocol stores or removes a value in the first shard.

        The argument has the fields ``wire`` (name of the protocol), ``key`` and ``value``.
        """

    def watch_topics(self, changed: Callable[[bytes], None]) -> None:
        """Call ``changed`` with the topic's id when a topic is created, changed or deleted."""


class Router(Protocol):
    """The processes of a broker, as sessions of the `polywire` protocol see them."""

    @property
    def shards(self) -> Shards:
        """The shards, and which of them has a topic."""

    def shard_of_topic(self, topic: Topic) -> int:
        """Return the shard of a topic."""

    @property
    def is_clogged(self) -> bool:
        """Whether sessions should delay their next request, because a shard has too many unanswered ones."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when the shard has answered most requests."""

    def forward(
        self, shard: int, by: Caller, frame: bytes, then: Completion[bytes], *, sees_files: bool = False
    ) -> None:
        """Execute a request of the `polywire` protocol in the process of a shard, without checking permissions.

        ``then`` gets the frame of the response, which may be an error frame, or Unavailable if the process has ended.
        It is never called inside this call.
        """


class ReachedShards(Shards, Protocol):
    """Shards whose processes can be addressed individually by clients."""

    def listener_of(self, port: int) -> str:
        """Return the name of the listener with this port, to which a client connected; empty if unknown."""

    def port_of(self, listener: str) -> int:
        """Return the port at which clients of this listener reach this process and no other."""
