"""What the connections of the Cursus wire share, its settings, and the port through which requests are let in.

Promises: every setting has a reason; who may do what is asked at one place. Must not know: sessions' insides, sockets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from polywire.broker.access import Principal
from polywire.broker.actions import Action
from polywire.broker.events import Events
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.positions import PositionVerbs
from polywire.broker.producer_verbs import ProducerVerbs
from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.topic_verbs import TopicVerbs
from polywire.broker.topics import Topic
from polywire.broker.transactions import Transactions
from polywire.errors import ErrorCode, Invalid
from polywire.protocols.cursus.compression import algorithm
from polywire.protocols.cursus.messages import FRAME_BYTES_MAX, Dialect, Request
from polywire.protocols.cursus.repeats import Repeats
from polywire.protocols.cursus.scratch import ScratchArrays
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.protocols.runtime.reply_buffers import ReplyBuffers
from polywire.protocols.runtime.session import Output
from polywire.types import TopicName

GroupKey = tuple[str, str]
"""A group's topic and name."""

WIRE: Final = "cursus"
COORDINATOR: Final = "standalone"
PIECE_ROOM_BYTES: Final = 64 * 1024  # of a stored batch beside its messages: header, producer, alignment
PIECE_ROOM_SHARE: Final = 8  # where journal files are small, at most one part of so many of a batch
IDLE_TIMEOUT_S_MAX: Final = 365 * 86_400.0  # a timer cannot wait for longer than some years
REPEATS_S_MAX: Final = 86_400.0  # how long a payload is remembered at most


class CursusBroker(TopicVerbs, RecordVerbs, ProducerVerbs, PositionVerbs, WireBroker, Protocol):
    """What this wire calls of the broker."""

    @property
    def groups(self) -> Coordinator:
        """Groups and their members."""

    @property
    def events(self) -> Events:
        """Event sourcing: versions and snapshots of aggregates."""

    @property
    def transactions(self) -> Transactions:
        """Transactions by their producers' names."""


@dataclass(frozen=True, slots=True)
class CursusSettings:
    """Settings of Cursus.

    frame_bytes_max: longest accepted frame (spec: cursus#frames).
    dialect: the only dialect; None detects it for each frame (spec: cursus#recognising-the-dialect).
    compression: compression of all frames to the broker; empty detects it for each frame (spec: cursus#compression).
    bare_publish: an envelope whose payload is not a command publishes it to its topic (spec: cursus#envelope). Without this, typing errors
    are errors.
    host, port: address in METADATA and FIND_COORDINATOR; by default the one the client connected to.
    idle_timeout_s: how long a connection without a stream may be idle (spec: cursus#connections).
    topic_wait_s: how long a write waits for its topic to appear (spec: cursus#publish).
    keepalive_s: interval of empty frames on a stream (spec: cursus#stream).
    linger_s: how long a connection may stay idle after its stream ended (spec: cursus#stream).
    unused_s: how long a connection may stay idle after a CONSUME that only its end terminates
    (spec: cursus#consume-of-the-legacy-dialect).
    repeats_s: how long payloads of the legacy dialect are remembered, to drop repeated ones of a topic (spec: cursus#repeated-payloads); 0
    drops nothing.
    """

    frame_bytes_max: int = FRAME_BYTES_MAX
    dialect: Dialect | None = None
    compression: str = ""
    bare_publish: bool = True
    host: str = ""
    port: int = 0
    idle_timeout_s: float = 60.0
    topic_wait_s: float = 0.5
    keepalive_s: float = 5.0
    linger_s: float = 10.0
    unused_s: float = 0.5
    repeats_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no connection could be served with. Raises Invalid(INVALID_REQUEST)."""
        if self.compression:
            algorithm(self.compression)
        if not 0 < self.idle_timeout_s <= IDLE_TIMEOUT_S_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"idle timeout is out of range seconds={self.idle_timeout_s} limit={IDLE_TIMEOUT_S_MAX}",
            )
        if not 0 <= self.repeats_s <= REPEATS_S_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"deduplication time is out of range seconds={self.repeats_s} limit={REPEATS_S_MAX}",
            )


class Peer(Protocol):
    """What a guard asks of the connection that a request came over."""

    @property
    def output(self) -> Output:
        """Where it is, and whom its certificate names."""

    @property
    def peer_address(self) -> str:
        """Where its requests come from."""

    @property
    def principal(self) -> Principal | None:
        """Who has logged in by AUTH."""

    @property
    def closed(self) -> bool:
        """Whether it is gone."""

    def identify(self, principal: Principal | None, /) -> None:
        """This is for whom it acts from now on. Raises Busy."""

    def wake(self) -> None:
        """What its request waited for has come: offer it again."""


class Guard(Protocol):
    """Who may do what (spec: cursus#credentials)."""

    def admit(self, peer: Peer, request: Request, actions: Sequence[Action], /) -> None:
        """Whether a command that asks for these actions may begin.

        Raises Refused ``authentication_required``, ``authentication_failed`` or ``NOT_AUTHORIZED_FOR_OPERATION``; NotYet when the guard
        needs time: it calls ``peer.wake()`` later, and is asked again about the same request.
        """

    def prove(self, peer: Peer, request: Request, /) -> None:
        """Find out who sends a request that another process admits and carries out. Raises Refused, NotYet, as ``admit``."""

    def admit_batch(self, peer: Peer, /) -> None:
        """Whether the connection may write batches. Raises Refused, NotYet."""

    def admits_topic(self, peer: Peer, topic: Topic | TopicName, action: Action, /) -> bool:
        """Whether the connection may do this to the topic."""

    def admit_topic(self, peer: Peer, topic: Topic | TopicName, action: Action, /) -> None:
        """Refuse what the connection may not do to the topic. Raises Refused ``NOT_AUTHORIZED_FOR_TOPIC``."""

    def verified(self, peer: Peer, words: tuple[str, str], /) -> Principal | None:
        """Whose name and token these are, None when they are nobody's. Raises Refused, NotYet."""

    @property
    def acting(self) -> Principal | None:
        """Who the request that was admitted last acts for, None where nobody had to log in."""

    def payload(self, request: Request, /) -> bytes | None:
        """The message of the request admitted last, without the words that proved who sent it (spec: cursus#credentials)."""


Where = tuple[str, int]
"""Host and port."""


class Places(Protocol):
    """Where clients find one of several processes, by where they have come to."""

    def lasting(self, at: Where, /) -> Where:
        """An address for as long as the machine serves, whichever of its processes leads what."""

    def alone(self, at: Where, /) -> Where:
        """From such an address: that of this process and no other, if clients may be told it and it lasts as long; the same else."""


class Replaceable(Protocol):
    """A stream that another one may take the place of (spec: cursus#stream)."""

    def replace(self) -> None:
        """Tell the peer, and end."""


class GenerationsUsed:
    """Which generation each member of a group has used last: how a member that was fenced is known when it joins again
    (spec: cursus#joining-again). Forgetting costs at most one more member, which expires.

    Invariant: holds at most as many groups as ``keep`` was told, and of each those who were members when somebody last joined, or since.
    """

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[GroupKey, dict[str, int]] = {}

    def mark(self, group: GroupKey, member: str, generation: int) -> None:
        """A member has used a generation."""
        self._groups.setdefault(group, {})[member] = generation

    def has(self, group: GroupKey, member: str, generation: int) -> bool:
        """Whether a member has used this generation."""
        return self._groups.get(group, {}).get(member) == generation

    def keep(self, group: GroupKey, members: Collection[str], groups_max: int) -> None:
        """Forget those who are no longer members, and the oldest groups when there are too many."""
        known = self._groups.get(group, {})
        for member in known.keys() - set(members):
            del known[member]
        while len(self._groups) > groups_max:
            del self._groups[next(iter(self._groups))]


@dataclass(slots=True)
class CursusState:
    """Shared by all connections of a broker's Cursus wire.

    round_robin: next partition of a keyless record, per topic id. scratch: reused arrays. reply_buffers: of large replies.
    generations_used: by members of groups. repeats: of what the legacy dialect publishes, None when none are dropped.
    streams: by topic, partition and group; one may replace another. stream_count: all that are open.
    off_loop: the queue of long frames. large_scratch: for the messages of the one in hand.
    byte_positions: byte offset and offset where the latest legacy reader stopped, by a partition's incarnation.
    piece_bytes_max: of the messages that are stored as one batch. places: of several processes; None for one.
    """

    broker: CursusBroker
    settings: CursusSettings
    guard: Guard
    off_loop: OffLoopQueue
    places: Places | None = None
    round_robin: dict[bytes, int] = field(default_factory=dict)
    scratch: ScratchArrays = field(default_factory=ScratchArrays)
    streams: dict[tuple[str, int, str], Replaceable] = field(default_factory=dict)
    stream_count: int = 0
    generations_used: GenerationsUsed = field(default_factory=GenerationsUsed)
    reply_buffers: ReplyBuffers = field(default_factory=ReplyBuffers)
    large_scratch: ScratchArrays = field(default_factory=ScratchArrays)
    byte_positions: dict[int, tuple[int, int]] = field(default_factory=dict)
    piece_bytes_max: int = field(init=False)
    repeats: Repeats | None = field(init=False)

    def __post_init__(self) -> None:
        batch_bytes_max = self.broker.settings.batch_bytes_max
        self.piece_bytes_max = batch_bytes_max - min(PIECE_ROOM_BYTES, batch_bytes_max // PIECE_ROOM_SHARE)
        lasting_s = self.settings.repeats_s
        self.repeats = Repeats(lasting_s, self.broker.clock.monotonic) if lasting_s else None
