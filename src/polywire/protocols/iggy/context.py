"""What the sessions of one Iggy listener share: the directory, who is connected, reply buffers, settings.

Promises: client numbers are unique among the connections there are; members of groups last as long as their connection.
Must not know: bytes, sockets.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Final, Protocol
from zlib import crc32

from polywire.broker.groups.positions import PositionVerbs
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


class IggyBroker(DirectoryBroker, TopicVerbs, RemovalVerbs, RecordVerbs, PositionVerbs, WireBroker, Protocol):
    """What this wire calls of the broker; its directory keeps the wire's own state."""


@dataclass(frozen=True, slots=True)
class IggySettings:
    """Settings of the Iggy wire.

    dialect: forces one by its name (``0.0``, ``0.1.0``, ``0.1``, ``0.4``, ``0.6``, ``0.7``, ``0.8``, ``0.10``, ``vsr``); ``auto``
        recognises it.
    reply_bytes_max: bytes of messages in one poll's reply, unless a single message is longer.
    data_dir: where the broker's files are, for GET_STATS.
    """

    dialect: str = "auto"
    reply_bytes_max: int = 8 * 1024 * 1024
    data_dir: Path | None = None


class Client(Protocol):
    """A connection, as far as the others of its listener see it."""

    @property
    def client_id(self) -> int:
        """Its number."""

    @property
    def member_id(self) -> str:
        """How groups know it."""

    @property
    def peer(self) -> str:
        """Address of the peer."""

    @property
    def principal(self) -> Principal | None:
        """Who has logged in."""

    @property
    def caller(self) -> Caller:
        """Who asks, for what belongs to somebody."""

    @property
    def members(self) -> MutableMapping[tuple[bytes, str], tuple[Topic, int]]:
        """Groups joined over it, by topic id and group name."""

    def joined(self) -> Sequence[tuple[Topic, str]]:
        """Topic and name of every group it is a member of."""


class Shared:
    """Invariant: ``clients`` are the open sessions by their number."""

    __slots__ = (
        "broker",
        "clients",
        "directory",
        "epochs",
        "forced",
        "reply_buffers",
        "settings",
        "started_at",
    )

    def __init__(self, broker: IggyBroker, settings: IggySettings) -> None:
        self.broker: Final = broker
        self.settings: Final = settings
        self.directory: Final = Directory(broker)
        named = [dialect for dialect in DIALECTS if dialect.name == settings.dialect]
        self.forced: Final[Dialect | None] = named[0] if named else None
        self.clients: Final[dict[int, Client]] = {}
        self.epochs = int(time())  # a login's number in D3: rising, also over restarts
        self.started_at: Final = time()
        self.reply_buffers: Final = ReplyBuffers()

    def enter(self, session: Client, peer: str) -> int:
        """A number for a new connection: that of its address, as the reference has it, unless it is taken."""
        number = crc32(peer.encode())
        while number == 0 or number in self.clients:
            number = (number + 1) & 0xFFFFFFFF
        self.clients[number] = session
        return number

    def leave(self, session: Client) -> None:
        """The connection is gone."""
        self.clients.pop(session.client_id, None)

    def next_epoch(self) -> int:
        """The number of a new login."""
        self.epochs += 1
        return self.epochs

    def membership(self, session: Client, topic: Topic, group: str) -> Membership:
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
