"""Settings and state that all Cursus connections share, and the broker's methods that they call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from polywire.broker.access import Principal
from polywire.broker.events import Events
from polywire.broker.groups.commits import PositionVerbs
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.owners import Caller
from polywire.broker.participants import Latest, Participants
from polywire.broker.permissions import Action
from polywire.broker.record_verbs import ProducerVerbs, RecordVerbs
from polywire.broker.topic_verbs import TopicVerbs
from polywire.broker.topics import Partition, Topic
from polywire.broker.transactions import Transactions
from polywire.errors import ErrorCode, Invalid
from polywire.log.base import Completion
from polywire.protocols.cursus.compression import algorithm
from polywire.protocols.cursus.idempotence import CheckedAppends
from polywire.protocols.cursus.messages import FRAME_BYTES_MAX, Dialect, Request
from polywire.protocols.cursus.repeats import Repeats
from polywire.protocols.cursus.scratch import ScratchArrays
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.protocols.runtime.reply_buffers import ReplyBuffers
from polywire.protocols.runtime.session import Output
from polywire.protocols.runtime.shards import Parts
from polywire.types import TopicName

GroupKey = tuple[str, str]
"""    Topic and name of a group."""
StreamKey = tuple[str, int, str]
"""    Topic, partition number, and name of the group."""
ReadLocation = tuple[bytes, int, int]
"""    Id of a topic, number of a partition, and its incarnation."""

WIRE: Final = "cursus"
STREAMS: Final = "cursus_streams"
TRANSACTIONS: Final = "cursus_transactions"
COORDINATOR: Final = "standalone"
PIECE_OVERHEAD_BYTES: Final = 64 * 1024  # bytes of a stored batch besides its messages: header, producer, alignment
PIECE_OVERHEAD_SHARE: Final = 8  # divisor: with small journal files, this overhead is at most an eighth of a batch
IDLE_TIMEOUT_S_MAX: Final = 365 * 86_400.0  # a timer cannot wait longer than a few years
REPEATS_S_MAX: Final = 86_400.0  # longest time for which payloads are remembered


class CursusBroker(TopicVerbs, RecordVerbs, ProducerVerbs, PositionVerbs, WireBroker, Protocol):
    @property
    def groups(self) -> Coordinator: ...

    @property
    def events(self) -> Events:
        """Appends and reads events of aggregates."""

    @property
    def transactions(self) -> Transactions: ...

    @property
    def participants(self) -> Participants: ...


class CursusParts(Parts, Protocol):
    """The processes of a broker."""

    def join_epoch(self, id_: str, epoch: int, *, by: Caller) -> Latest | None:
        """Let this shard participate in a transaction that another shard coordinates.

        Returns the transactional id's latest transaction, or None if there is none. Raises Pending until the
        coordinator has responded.
        """


@dataclass(frozen=True, slots=True)
class CursusSettings:
    """Settings of Cursus.

    frame_bytes_max: longest accepted frame (spec: cursus#frames).
    dialect: the only dialect; None detects it for each frame (spec: cursus#recognising-the-dialect).
    compression: compression of all frames to the broker; empty detects it for each frame (spec: cursus#compression).
    bare_publish: publish an envelope's payload to the envelope's topic if the payload is not a command (spec: cursus#envelope). If unset,
        a mistyped command is an error instead.
    host: host in METADATA and FIND_COORDINATOR; by default the one that the client connected to.
    port: port in METADATA and FIND_COORDINATOR; by default the one that the client connected to.
    idle_timeout_s: how long a connection without a stream may be idle (spec: cursus#connections).
    topic_wait_s: how long a write waits for its topic to be created (spec: cursus#publish).
    keepalive_s: interval of empty frames on a stream (spec: cursus#stream).
    linger_s: how long a connection may stay idle after its stream ended (spec: cursus#stream).
    unused_s: how long a connection may stay idle after a CONSUME of the legacy dialect, whose response ends with the connection (spec:
        cursus#consume-of-the-legacy-dialect).
    repeats_s: how long payloads of the legacy dialect are remembered, to drop repeated payloads in a topic (spec: cursus#repeated-payloads);
        0 drops nothing.
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
        """Raise Invalid(INVALID_REQUEST) for settings that no connection could use."""
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
    """The connection of a request, for permission checks."""

    @property
    def output(self) -> Output:
        """The connection's output, which has the client's address and certificate."""

    @property
    def peer_address(self) -> str: ...

    @property
    def principal(self) -> Principal | None: ...

    @property
    def closed(self) -> bool: ...

    def identify(self, principal: Principal | None, /) -> None:
        """Set the connection's user. Raises Busy if there are too many connections."""


class Guard(Protocol):
    """Checks permissions of requests (spec: cursus#credentials)."""

    def admit(self, peer: Peer, request: Request, actions: Sequence[Action], /) -> None:
        """Check whether the client may execute a command that needs permission for ``actions``.

        Raises Refused ``authentication_required``, ``authentication_failed`` or ``NOT_AUTHORIZED_FOR_OPERATION``.
        Raises Pending if that takes time; the session then calls ``admit`` again with the same request.
        """

    def prove(self, peer: Peer, request: Request, /) -> None:
        """Authenticate the client of a request that another process authorizes and executes.

        Raises Refused or Pending like ``admit``.
        """

    def admit_batch(self, peer: Peer, /) -> None:
        """Raise Refused if the connection may not write batches. Raises Pending if that takes time."""

    def admits_topic(self, peer: Peer, topic: Topic | TopicName, action: Action, /) -> bool: ...

    def admit_topic(self, peer: Peer, topic: Topic | TopicName, action: Action, /) -> None:
        """Raise Refused ``NOT_AUTHORIZED_FOR_TOPIC`` if the connection may not perform this action on the topic."""

    def verified(self, peer: Peer, words: tuple[str, str], /) -> Principal | None:
        """Return the user with this name and token; None if they are wrong.

        Raises Pending while they are verified, and Refused if too many logins wait.
        """

    @property
    def acting(self) -> Principal | None:
        """The user of the last request that was admitted; None if it needed no login."""

    def payload(self, request: Request, /) -> bytes | None:
        """Return the message of the last request that was admitted, without credentials (spec: cursus#credentials)."""


Where = tuple[str, int]
"""A host and a port."""


class Places(Protocol):
    """Addresses of brokers in responses to clients, in a cluster. ``at`` is the address that the client has used."""

    def lasting(self, at: Where, /) -> Where:
        """Return an address that remains valid if another process becomes the leader."""

    def alone(self, at: Where, /) -> Where:
        """Return the address of this process, if it has one that clients may use; otherwise ``at``."""


class Forwards(Protocol):
    """Executes requests in other processes."""

    def __call__(self, session: Any, command: Any, request: Request, body: memoryview, /) -> bool: ...

    def client(self, session: Any, /) -> Any: ...

    def store(self, session: Any, client: Any, answer: Any, partition: Partition, body: bytes, /) -> None: ...


class Replaceable(Protocol):
    """A stream that ends when its group opens a newer one for the same partition (spec: cursus#stream)."""

    def replace(self) -> None: ...


class OpenStreams:
    """The push streams of this process by group. A stream pushes one partition's records to a client.

    In all processes together, a group has one stream of a partition: the newest.
    """

    __slots__ = ("_broker", "_opened_us", "_parts", "_streams")

    def __init__(self, broker: WireBroker, parts: Parts | None) -> None:
        self._broker: Final = broker
        self._parts: Final = parts
        self._streams: Final[dict[StreamKey, Replaceable]] = {}
        self._opened_us: Final[dict[StreamKey, int]] = {}

    def open(self, key: StreamKey, stream: Replaceable) -> None:
        """Register a stream, and end older ones of the group for this partition."""
        now_us = self._broker.clock.now_us()
        if self._parts is not None:
            shards = self._parts.shards
            for shard in range(shards.count):
                if shard != shards.own:
                    self._parts.call_part(shard, STREAMS, OpenStreams.replace, *key, now_us, shards.own, done=None)
        earlier = self._streams.get(key)
        if earlier is not None:
            earlier.replace()
        self._streams[key], self._opened_us[key] = stream, now_us

    def replace(
        self, topic: str, partition: int, group: str, opened_us: int, shard: int, done: Completion[int] | None
    ) -> None:
        """End the stream of a group if it is older than the one that another process has opened."""
        key = topic, partition, group
        stream, parts = self._streams.get(key), self._parts
        assert parts is not None, "this broker has other processes"
        if stream is not None and (self._opened_us[key], parts.shards.own) < (opened_us, shard):
            stream.replace()
        if done is not None:
            done(0)

    def close(self, key: StreamKey, stream: Replaceable) -> None:
        """Remove a stream that has ended."""
        if self._streams.get(key) is stream:
            del self._streams[key], self._opened_us[key]


class GenerationsUsed:
    """The last generation in which each member of a group has sent a request.

    It serves to detect fenced members that rejoin (spec: cursus#joining-again). If an entry is missing, at worst a
    member joins twice, and the old membership expires.
    """

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[GroupKey, dict[str, int]] = {}

    def mark(self, group: GroupKey, member: str, generation: int) -> None:
        self._groups.setdefault(group, {})[member] = generation

    def has(self, group: GroupKey, member: str, generation: int) -> bool:
        return self._groups.get(group, {}).get(member) == generation

    def retain(self, group: GroupKey, members: Collection[str], groups_max: int) -> None:
        """Remove all but these members of a group, and the oldest groups if there are more than ``groups_max``."""
        known = self._groups.get(group, {})
        for member in known.keys() - set(members):
            del known[member]
        while len(self._groups) > groups_max:
            del self._groups[next(iter(self._groups))]


@dataclass(slots=True)
class CursusState:
    """State shared by all Cursus connections of a broker.

    Attributes:
        broker: the topics of all processes.
        local: the topics of this process.
        parts: all processes; None if there is only one.
        forward: executes requests in other processes; None if there is only one.
        places: addresses of the brokers of a cluster; None without one.
        round_robin: next partition for a record without a key, by topic id.
        scratch: reusable arrays.
        reply_buffers: reusable buffers for large responses.
        generations_used: last generation in which each member of a group has sent a request.
        repeats: digests of recently published payloads, to drop duplicates; None if duplicates are stored.
        streams, stream_count: the streams of groups, and the number of all open streams.
        off_loop: queue in which long frames are decompressed in a thread.
        large_scratch: arrays for the messages of the current long frame.
        byte_positions: by partition, where the last read of the legacy dialect ended: byte offset and record offset.
        piece_bytes_max: size limit for messages that are stored as one batch.
        checked: appends batches of idempotent producers that other processes have forwarded.
    """

    broker: CursusBroker
    local: CursusBroker
    settings: CursusSettings
    guard: Guard
    off_loop: OffLoopQueue
    places: Places | None = None
    forward: Forwards | None = None
    parts: CursusParts | None = None
    checked: CheckedAppends = field(init=False)
    round_robin: dict[bytes, int] = field(default_factory=dict)
    scratch: ScratchArrays = field(default_factory=ScratchArrays)
    streams: OpenStreams = field(init=False)
    stream_count: int = 0
    generations_used: GenerationsUsed = field(default_factory=GenerationsUsed)
    reply_buffers: ReplyBuffers = field(init=False)
    large_scratch: ScratchArrays = field(default_factory=ScratchArrays)
    byte_positions: dict[ReadLocation, tuple[int, int]] = field(default_factory=dict)
    piece_bytes_max: int = field(init=False)
    repeats: Repeats | None = field(init=False)

    def require_latest(self) -> None:
        """Raise Pending until the topics of all processes are known. See ``shards.Parts``."""
        if self.parts is not None:
            self.parts.require_latest()

    def __post_init__(self) -> None:
        self.checked = CheckedAppends(self.local)
        self.reply_buffers = ReplyBuffers(self.broker.loop)
        self.streams = OpenStreams(self.local, self.parts)
        batch_bytes_max = self.broker.settings.batch_bytes_max
        self.piece_bytes_max = batch_bytes_max - min(PIECE_OVERHEAD_BYTES, batch_bytes_max // PIECE_OVERHEAD_SHARE)
        lasting_s = self.settings.repeats_s
        self.repeats = Repeats(lasting_s, self.broker.clock.monotonic) if lasting_s else None
