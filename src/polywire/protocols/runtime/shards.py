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
    """A connection to the process of a shard. That process executes the requests itself and never forwards them.

    The number of unanswered bytes is not limited here: the caller must limit it.
    """

    def write(self, data: bytes) -> None:
        """Send bytes now, or as soon as the link is connected."""

    def close(self) -> None:
        """Close immediately. The peer gets no further events."""


class Shards(Protocol):
    """All shards of one data directory, numbered from 0. Each belongs to one process."""

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
        """Return the shard for a topic that is created because a client writes to it.

        All processes return the same shard.
        """

    def least_loaded(self) -> int:
        """Return the shard for a topic that a client creates explicitly."""

    def connect(self, shard: int, peer: LinkPeer) -> Link:
        """Return a link to the process of a shard, which may be this process."""


class Parts(Protocol):
    """The processes of a broker, for a protocol that has state in each of them.

    Each process has objects with such state, called parts. The name of a part is the same in each process.
    """

    @property
    def local(self) -> Any:
        """The broker of this process."""

    @property
    def shards(self) -> Shards:
        """The shards, and which of them has a topic."""

    def shard_of_topic(self, topic: Topic) -> int:
        """Return the shard that stores a topic."""

    def next_shard(self) -> int:
        """Return the shard for a topic that a client creates explicitly."""

    def require_reported(self) -> None:
        """Raise Pending until all processes have reported their topics and values, or Unavailable if one does not."""

    def require_latest(self) -> None:
        """Raise Pending until this process knows the topics and values that others have at the time of the call.

        Requests for lists and for names that seem to be missing need this. If a process does not respond within a
        second, its last report is used. Raises Unavailable like ``require_reported``.
        """

    def call_part(self, shard: int, part: str, function: Callable[..., Any], *values: Any, **options: Any) -> Any:
        """Call a function in another process, with that process's object named ``part`` as the first argument.

        If the function has a completion parameter, the completion is called with the result. Otherwise, Pending is
        raised. Once the result has arrived, a repeated call returns it.
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
        """Return the shard that stores a topic."""

    @property
    def is_clogged(self) -> bool:
        """Whether sessions should delay their next request, because a shard has too many unanswered ones."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when ``is_clogged`` becomes False."""

    def forward(
        self, shard: int, by: Caller, frame: bytes, then: Completion[bytes], *, sees_files: bool = False
    ) -> None:
        """Execute a request of the ``polywire`` protocol in the process of a shard, without checking permissions.

        ``then`` is called with the frame of the response, which may be an error frame, or with Unavailable if the
        process has ended. It is never called inside this call.
        """


class ReachedShards(Shards, Protocol):
    """Shards whose processes clients can address individually."""

    def listener_of(self, port: int) -> str:
        """Return the name of the listener with this port, to which a client connected; empty if unknown."""

    def port_of(self, listener: str) -> int:
        """Return the port at which clients of this listener reach this process and no other."""
