"""State shared by the sessions of one Iggy listener: the directory, connected clients, reply buffers and settings.

Client numbers are unique among open connections. Group memberships end with their connection.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from zlib import crc32

from polywire.broker.groups.commits import PositionVerbs
from polywire.broker.record_verbs import ProducerVerbs, RecordVerbs
from polywire.broker.topic_verbs import RemovalVerbs, TopicVerbs
from polywire.protocols.iggy.dialect import DIALECTS, Dialect
from polywire.protocols.iggy.directory import Directory, DirectoryBroker
from polywire.protocols.iggy.messages import WIRE
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.reply_buffers import ReplyBuffers
from polywire.types import Assignor

if TYPE_CHECKING:
    from polywire.broker.access import Principal
    from polywire.broker.groups.group import Membership
    from polywire.broker.owners import Caller
    from polywire.broker.topics import Topic
    from polywire.errors import BrokerError


class IggyBroker(
    DirectoryBroker, TopicVerbs, RemovalVerbs, RecordVerbs, ProducerVerbs, PositionVerbs, WireBroker, Protocol
):
    """The operations of the broker that this protocol uses, including those that store the protocol's own state."""


@dataclass(frozen=True, slots=True)
class IggySettings:
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
    """The numbers that identify a group. They count from 0."""

    stream: int
    topic: int
    group: int


class Member(Protocol):
    """A connection that can be a member of groups."""

    @property
    def member_id(self) -> str: ...

    @property
    def caller(self) -> Caller:
        """The caller that owns the resources which this connection creates."""

    @property
    def members(self) -> MutableMapping[tuple[bytes, str], tuple[Topic, int]]: ...


class Client(Member, Protocol):
    """A connection as other connections of the listener see it."""

    @property
    def client_id(self) -> int: ...

    @property
    def peer(self) -> str: ...

    @property
    def principal(self) -> Principal | None: ...

    @property
    def member_count(self) -> int: ...

    def describe_memberships(self, done: Callable[[list[GroupNumbers] | BrokerError], None]) -> None:
        """Call ``done`` with the numbers of the groups that the client is a member of."""


class Shared:
    """State shared by all sessions of one listener.

    Attributes:
        clients: open sessions by client number.
        links: sessions of other processes of this broker.
        choosing: the sessions that are creating a topic with a number chosen by their client. The key is the stream's
            name in the broker and this number.
        streams_version: incremented when a stream is deleted or renamed.
    """

    __slots__ = (
        "broker",
        "choosing",
        "clients",
        "directory",
        "epochs",
        "forced",
        "links",
        "reply_buffers",
        "settings",
        "shard",
        "started_at",
        "streams_version",
    )

    def __init__(self, broker: IggyBroker, settings: IggySettings, shard: int | None = None) -> None:
        self.broker: Final = broker
        self.settings: Final = settings
        self.directory: Final = Directory(broker, shard)
        named = [dialect for dialect in DIALECTS if dialect.name == settings.dialect]
        self.forced: Final[Dialect | None] = named[0] if named else None
        self.shard: Final = shard
        self.clients: Final[dict[int, Client]] = {}
        self.links: Final[set[Member]] = set()
        self.choosing: Final[dict[tuple[str, int], Member]] = {}
        self.streams_version = 0
        # the number of the last login in D3; it begins with the time, so that it increases across restarts
        self.epochs = int(time())
        self.started_at: Final = time()
        self.reply_buffers: Final = ReplyBuffers()

    def enter(self, session: Client, peer: str) -> int:
        """Assign a client number: the hash of the address, as Iggy's own server does, or the next free number."""
        first, mask = self._client_numbers
        number = first + (crc32(peer.encode()) & mask)
        while number == 0 or number in self.clients:
            number = first + ((number + 1) & mask)
        self.clients[number] = session
        return number

    @property
    def _client_numbers(self) -> tuple[int, int]:
        """Return the first client number of this shard, and a mask of the bits that vary within the shard."""
        return (0, 0xFFFFFFFF) if self.shard is None else (self.shard << CLIENT_BITS, (1 << CLIENT_BITS) - 1)

    def forget_members(self, topic_id: bytes, group: str) -> None:
        """Remove a deleted group from the memberships of every connection."""
        for member in (*self.clients.values(), *self.links):
            member.members.pop((topic_id, group), None)

    def leave(self, session: Client) -> None:
        self.clients.pop(session.client_id, None)

    def next_epoch(self) -> int:
        self.epochs += 1
        return self.epochs

    def membership(self, session: Member, topic: Topic, group: str) -> Membership:
        """Return the membership of a connection in a group. The connection joins the group if necessary.

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
