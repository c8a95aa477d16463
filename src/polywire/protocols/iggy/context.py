"""State shared by the sessions of one Iggy listener: streams and topics, connected clients, buffers and settings.

Client numbers are unique among open connections. Group memberships end with their connection.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from zlib import crc32

import msgspec

from polywire.broker.groups.commits import PositionVerbs
from polywire.broker.record_verbs import ProducerVerbs, RecordVerbs
from polywire.broker.topic_verbs import RemovalVerbs, TopicVerbs
from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.protocols.iggy.dialect import DIALECTS, Dialect
from polywire.protocols.iggy.directory import Directory, DirectoryBroker
from polywire.protocols.iggy.messages import WIRE
from polywire.protocols.iggy.routed import Results, RoutedDirectory
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.reply_buffers import ReplyBuffers
from polywire.protocols.runtime.shards import Parts
from polywire.protocols.runtime.slices import Slices
from polywire.types import Assignor

if TYPE_CHECKING:
    from polywire.broker.access import Where
    from polywire.broker.groups.group import Membership
    from polywire.broker.owners import Caller
    from polywire.broker.permissions import Action
    from polywire.broker.topics import Topic


class IggyBroker(
    DirectoryBroker, TopicVerbs, RemovalVerbs, RecordVerbs, ProducerVerbs, PositionVerbs, WireBroker, Protocol
):
    """The methods of the broker that the Iggy protocol uses."""


class IggySettings(msgspec.Struct, frozen=True):
    """Settings of the Iggy protocol.

    Attributes:
        dialect: a dialect to force, by name (``0.0``, ``0.1.0``, ``0.1``, ``0.4``, ``0.6``, ``0.7``, ``0.8``, ``0.10``,
            ``vsr``, ``vsr-0.12``, ``vsr-0.12.2``); ``auto`` recognises the client's dialect.
        reply_bytes_max: bytes of messages in the reply to one poll; a single longer message is still returned.
        data_dir: directory of the broker's files, reported by GET_STATS.
    """

    dialect: str = "auto"
    reply_bytes_max: int = 8 * 1024 * 1024
    data_dir: Path | None = None


CLIENT_BITS: Final = 26  # bits of a client number that count connections; the bits above hold the shard


class GroupNumbers(NamedTuple):
    """The stream, topic and group of a membership, by number. Numbers count from 0."""

    stream: int
    topic: int
    group: int


class ClientState(msgspec.Struct, frozen=True, array_like=True):
    """A connection, as replies to GET_CLIENTS describe it. It may belong to another process."""

    number: int
    user_id: int | None
    peer: str
    groups: list[GroupNumbers]


class Poller(Protocol):
    """The client that sent a poll: a session, or a client of another process."""

    @property
    def shared(self) -> Shared: ...

    @property
    def broker(self) -> IggyBroker: ...

    @property
    def member_id(self) -> str: ...

    @property
    def caller(self) -> Caller:
        """The client's user, against whose quota the groups that the client creates count."""

    @property
    def members(self) -> MutableMapping[tuple[bytes, str], tuple[Topic, int]]: ...

    @property
    def poll_counts(self) -> MutableMapping[tuple[bytes, str], int]: ...

    def authorize(self, action: Action, where: Where = None) -> None: ...

    def named_incarnation(self, answer: Any) -> int:
        """Return the partition's incarnation number in the current request; 0 if it has none."""


class Client(Poller, Protocol):
    """The methods of a session that other sessions of this process call."""

    @property
    def client_id(self) -> int: ...

    def describe(self) -> ClientState: ...


class Shared:
    """State shared by the sessions of one listener.

    Attributes:
        clients: open sessions by client id.
        directory: the streams, topics and groups of all processes.
        inside: the state for requests that other processes send; it has only the topics of this process.
        parts: all processes; None if there is only one.
    """

    __slots__ = (
        "broker",
        "clients",
        "directory",
        "epochs",
        "forced",
        "inside",
        "parts",
        "reply_buffers",
        "settings",
        "started_at",
    )

    def __init__(
        self, broker: IggyBroker, settings: IggySettings, parts: Parts | None = None, *, shard: int | None = None
    ) -> None:
        """Create the state.

        ``shard`` is given if the broker has only the topics of that shard, not those of all processes.
        """
        self.broker: Final = broker
        self.settings: Final = settings
        self.parts: Final = parts
        self.inside: Shared = self
        self.directory: Directory
        if parts is None:
            self.directory = Directory(broker, shard)
        else:
            self.inside = Shared(parts.local, settings, shard=parts.shards.own)
            self.directory = RoutedDirectory(broker, parts, self.inside.directory)
        named = [dialect for dialect in DIALECTS if dialect.name == settings.dialect]
        self.forced: Final[Dialect | None] = named[0] if named else None
        self.clients: Final[dict[int, Client]] = {}
        # the number of the last login in D3; it begins with the time, so that it increases across restarts
        self.epochs = int(time())
        self.started_at: Final = time()
        self.reply_buffers: Final = ReplyBuffers(broker.loop)

    def enter(self, session: Client, peer: str) -> int:
        """Assign a client id to a session: the hash of the address, as in Iggy's server, or the next free id."""
        first, mask = self._client_numbers
        number = first + (crc32(peer.encode()) & mask)
        while number == 0 or number in self.clients:
            number = first + ((number + 1) & mask)
        self.clients[number] = session
        return number

    @property
    def _client_numbers(self) -> tuple[int, int]:
        """Return (lowest client id of this shard, mask of the bits that may vary within the shard)."""
        if self.parts is None:
            return 0, 0xFFFFFFFF
        return self.parts.shards.own << CLIENT_BITS, (1 << CLIENT_BITS) - 1

    def forget_members(self, topic_id: bytes, group: str) -> None:
        """Remove a deleted group from the memberships of all connections."""
        for client in self.clients.values():
            client.members.pop((topic_id, group), None)

    def leave(self, session: Client) -> None:
        self.clients.pop(session.client_id, None)

    def next_epoch(self) -> int:
        self.epochs += 1
        return self.epochs

    def membership(self, session: Poller, topic: Topic, group: str) -> Membership:
        """Return a client's membership in a group. The client joins the group if it is not a member.

        Raises BrokerError if it cannot join.
        """
        return self.broker.groups.join(
            group,
            topic.name.full,
            session.member_id,
            wire=WIRE,
            assignor=Assignor.ROUND_ROBIN,
            connected=True,
            by=session.caller,
        )

    # All processes

    def owns(self, topic: Topic) -> bool:
        return self.parts is None or self.parts.shard_of_topic(topic) == self.parts.shards.own

    def list_clients(self, then: Completion[list[ClientState]]) -> None:
        """Describe the clients of this process, sorted by client id, in several passes of the loop."""
        clients = sorted(self.clients.items())
        Slices(self.broker, (client.describe() for number, client in clients if number in self.clients), then)

    def count(self, then: Completion[tuple[int, int]]) -> None:
        """Count the clients of this process, and the groups of its topics, in several passes of the loop."""
        directory = self.inside.directory
        topics = [topic for stream in directory.streams() for topic in directory.topics(stream)]

        def counted(groups: list[int] | BrokerError) -> None:
            then(groups if isinstance(groups, BrokerError) else (len(self.clients), sum(groups)))

        Slices(self.broker, (len(directory.groups(topic)) for topic in topics if directory.is_alive(topic)), counted)

    def call_for(self, topic: Topic, function: Callable[..., Any], /, *values: Any, **options: Any) -> None:
        """Call a function in the process that owns a topic, with the ``Shared`` of that process as first argument."""
        assert self.parts is not None, "the topic is in another process"
        self.parts.call_part(self.parts.shard_of_topic(topic), CLIENTS_PART, function, *values, **options)

    def call_all(self, function: Callable[[Shared, Completion[Any]], None], then: Completion[list[Any]]) -> None:
        """Call a function in all processes. ``then`` is called with the results, or with an error if one has failed."""
        parts = self.parts
        if parts is None:
            function(self, lambda result: then(result if isinstance(result, BrokerError) else [result]))
            return

        def ask(shard: int, done: Completion[Any]) -> None:
            if shard == parts.shards.own:
                function(self, done)
            else:
                parts.call_part(shard, CLIENTS_PART, function, then=done)

        def combine(results: list[Any]) -> None:
            then(next((result for result in results if isinstance(result, BrokerError)), results))

        Results(self.broker, [partial(ask, shard) for shard in range(parts.shards.count)], combine)


CLIENTS_PART: Final = "iggy_clients"  # name of ``Shared`` for other processes
