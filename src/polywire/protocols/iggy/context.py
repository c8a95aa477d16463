"""What the sessions of one Iggy listener share: the directory, who is connected, reply buffers, settings.

Promises: client numbers are unique among the connections there are; members of groups last as long as their connection.
Must not know: bytes, sockets.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from zlib import crc32

from polywire.broker.groups.positions import PositionVerbs
from polywire.broker.producer_verbs import ProducerVerbs
from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.removal_verbs import RemovalVerbs
from polywire.broker.topic_verbs import TopicVerbs
from polywire.protocols.iggy.dialect import DIALECTS, Dialect
from polywire.protocols.iggy.directory import Directory, DirectoryBroker
from polywire.protocols.iggy.messages import WIRE
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.reply_buffers import ReplyBuffers
from polywire.types import Assignor

if TYPE_CHECKING:
    from polywire.broker.access import Principal
    from polywire.broker.groups.views import Membership
    from polywire.broker.owners import Caller
    from polywire.broker.topics import Topic
    from polywire.errors import BrokerError


class IggyBroker(
    DirectoryBroker, TopicVerbs, RemovalVerbs, RecordVerbs, ProducerVerbs, PositionVerbs, WireBroker, Protocol
):
    """What this wire calls of the broker; its directory keeps the wire's own state."""


@dataclass(frozen=True, slots=True)
class IggySettings:
    """Settings of the Iggy wire.

    dialect: forces one by its name (``0.0``, ``0.1.0``, ``0.1``, ``0.4``, ``0.6``, ``0.7``, ``0.8``, ``0.10``, ``vsr``,
        ``vsr-0.12``, ``vsr-0.12.2``); ``auto`` recognises it.
    reply_bytes_max: bytes of messages in one poll's reply, unless a single message is longer.
    data_dir: where the broker's files are, for GET_STATS.
    """

    dialect: str = "auto"
    reply_bytes_max: int = 8 * 1024 * 1024
    data_dir: Path | None = None


CLIENT_BITS: Final = 26  # of a connection's number, beside its shard


class GroupNumbers(NamedTuple):
    """Which group: numbers as we count."""

    stream: int
    topic: int
    group: int


class Member(Protocol):
    """A connection, as groups see it."""

    @property
    def member_id(self) -> str:
        """How groups know it."""

    @property
    def caller(self) -> Caller:
        """Who asks, for what belongs to somebody."""

    @property
    def members(self) -> MutableMapping[tuple[bytes, str], tuple[Topic, int]]:
        """Groups joined over it, by topic id and group name."""


class Client(Member, Protocol):
    """A connection, as far as the others of its listener see it."""

    @property
    def client_id(self) -> int:
        """Its number."""

    @property
    def peer(self) -> str:
        """Address of the peer."""

    @property
    def principal(self) -> Principal | None:
        """Who has logged in."""

    @property
    def member_count(self) -> int:
        """Of how many groups it is a member."""

    def describe_memberships(self, done: Callable[[list[GroupNumbers] | BrokerError], None]) -> None:
        """Find out the numbers of these groups."""


class Shared:
    """Invariant: ``clients`` are the open sessions by their number, ``links`` those that other processes of this broker have here.

    ``choosing``: topics in the making whose numbers clients have chosen, by the broker's stream and number, for whom.
    ``streams_version``: counts up when streams have ended, or have other names.
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
        """shard: which of several this is."""
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
        self.epochs = int(time())  # a login's number in D3: rising, also over restarts
        self.started_at: Final = time()
        self.reply_buffers: Final = ReplyBuffers()

    def enter(self, session: Client, peer: str) -> int:
        """A number for a new connection: that of its address, as the reference has it, unless it is taken."""
        first, mask = self._client_numbers
        number = first + (crc32(peer.encode()) & mask)
        while number == 0 or number in self.clients:
            number = first + ((number + 1) & mask)
        self.clients[number] = session
        return number

    @property
    def _client_numbers(self) -> tuple[int, int]:
        """The first number of a connection here, and which bits more; those of several shards differ."""
        return (0, 0xFFFFFFFF) if self.shard is None else (self.shard << CLIENT_BITS, (1 << CLIENT_BITS) - 1)

    def forget_members(self, topic_id: bytes, group: str) -> None:
        """A group has ended."""
        for member in (*self.clients.values(), *self.links):
            member.members.pop((topic_id, group), None)

    def leave(self, session: Client) -> None:
        """The connection is gone."""
        self.clients.pop(session.client_id, None)

    def next_epoch(self) -> int:
        """The number of a new login."""
        self.epochs += 1
        return self.epochs

    def membership(self, session: Member, topic: Topic, group: str) -> Membership:
        """A member's place now; it stays one until its connection ends. Raises BrokerError."""
        return self.broker.groups.join(
            group,
            topic.name.full,
            session.member_id,
            wire=WIRE,
            assignor=Assignor.ROUND_ROBIN,
            connected=True,
            by=session.caller,
        )
