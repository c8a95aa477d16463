"""The changes of the broker's state as they lie in the journal, and the snapshot that sums them up.

Promises: every change says what is true afterwards, never what to compute, and carries its own times, so that
applying it again later gives the same state. A tag is never given a second meaning and fields are only added at the
end, with a default. Must not know: who applies changes, where they lie.

Layout: MessagePack; a change is an array [tag, field, field …], the snapshot is [version, …] of the same arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Final

import msgspec

from polywire.broker.owners import UNOWNED
from polywire.broker.settings import TopicSettings
from polywire.errors import Corrupt, ErrorCode
from polywire.types import Assignor, PositionKind

SNAPSHOT_VERSION: Final = 1
DECIDED_VERSION: Final = 2
"""Of a snapshot with ``decisions``: who does not know them must not go on from it."""
NO_SHARD: Final = -1

TopicKey = bytes | str
"""A topic's id, or its full name while it does not exist."""


def split_key(key: TopicKey | None) -> tuple[bytes, str]:
    """(id, full name) as changes carry them; the one that is not there is empty."""
    return (key, "") if isinstance(key, bytes) else (b"", key or "")


class TopicCreated(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A topic begins; its partitions have consecutive incarnations."""

    id: bytes
    stream: str
    topic: str
    created_at_us: int
    first_incarnation: int
    partition_count: int
    settings: TopicSettings
    owner: int = UNOWNED


class PartitionsAdded(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A topic has further partitions, with consecutive incarnations."""

    id: bytes
    first_incarnation: int
    count: int


class TopicDeleted(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A topic ended, and with it its partitions, positions and groups."""

    id: bytes


class TopicConfigured(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A topic has these settings now."""

    id: bytes
    settings: TopicSettings


class TopicPurged(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A topic was emptied; the trims themselves are the log's entries of the same group."""

    id: bytes
    at_us: int


class PositionStored(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Somebody's next offset in a topic: ``id``, or ``full_name`` while it does not exist and has none. ``at_us``: 0 for not known.

    epoch: of the last record that was read, -1 where that was not said. metadata: what whoever stored it wrote beside it.
    """

    id: bytes
    full_name: str
    partition: int
    kind: PositionKind
    name: str
    offset: int
    generation: int = -1
    owner: int = UNOWNED
    at_us: int = 0
    epoch: int = -1
    metadata: str = ""

    @property
    def topic(self) -> TopicKey:
        """How the table keys the topic."""
        return self.id or self.full_name


class PositionsStored(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """Somebody's next offsets in a topic, by partition number. Else as PositionStored, which is in snapshots and what older brokers wrote.

    notes: epoch and metadata of those partitions that have either.
    """

    id: bytes
    full_name: str
    kind: PositionKind
    name: str
    offsets: dict[int, int]
    generation: int
    owner: int
    at_us: int
    notes: dict[int, tuple[int, str]] = {}

    @property
    def topic(self) -> TopicKey:
        """How the table keys the topic."""
        return self.id or self.full_name


class PositionsDeleted(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Somebody's positions in a topic (as in PositionStored; with neither: in all) and partition (None: in all) are forgotten."""

    kind: PositionKind
    name: str
    id: bytes
    full_name: str
    partition: int | None

    @property
    def topic(self) -> TopicKey | None:
        """How the table keys the topic, None for all."""
        return self.id or self.full_name or None


class MemberStored(msgspec.Struct, frozen=True, array_like=True):
    """A member of a group and the wire it joined over. connected: it lives as long as its connection (not stored by older brokers)."""

    id: str
    wire: str
    connected: bool = False


class GroupStored(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A group as it is now; members in the order in which they joined. When members were last seen is not stored.

    ``kept``: it stays without members and positions, as all did before there was a word for it. ``at_us``: by the elapsed clock.
    ``has_consumers``: its last member to join was a consumer of Kafka's newer protocol.
    """

    topic: str
    name: str
    generation: int
    assignor: Assignor
    partition_count: int
    members: tuple[MemberStored, ...]
    owner: int = UNOWNED
    kept: bool = True
    at_us: int = 0
    has_consumers: bool = False


class GroupDeleted(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """A group ended."""

    topic: str
    name: str


class GroupBound(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """A wire that names groups without their topic means this topic by this name."""

    wire: str
    name: str
    topic: str
    owner: int = UNOWNED
    at_us: int = 0


class Published(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """A writer published staged batches under this number; all its numbers up to it are published."""

    writer: str
    number: int
    at_us: int
    positions: tuple[PositionStored, ...] = ()
    owner: int = UNOWNED


class WireStateSet(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """One wire's own value under a key; None removes it."""

    wire: str
    key: str
    value: bytes | None
    owner: int = UNOWNED


class PartitionsRemoved(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """A topic has only so many partitions left; the others ended, and their positions with them."""

    id: bytes
    partition_count: int


class EventAppended(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """An aggregate has this version now; the event lies at this offset of the partition."""

    incarnation: int
    key: bytes
    version: int
    offset: int
    owner: int = UNOWNED


class SnapshotSaved(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """An aggregate's snapshot as of a version."""

    incarnation: int
    key: bytes
    version: int
    payload: bytes
    owner: int = UNOWNED


class TransactionState(Enum):
    """How the latest transaction of a transactional id stands. Before the first one of an epoch it is empty where the epoch has a
    ``TransactionalProducer``, else it counts as aborted."""

    EMPTY = "empty"
    OPEN = "open"
    SHARED = "shared"
    """Open, and several shards have parts of it."""
    COMMITTED = "committed"
    ABORTED = "aborted"


class TransactionalProducer(msgspec.Struct, frozen=True, array_like=True):
    """Who holds a transactional id, where its wire numbers producers.

    first_epoch: the epoch of the transactional id that is epoch 0 of this number. asked_epoch: the holder of that epoch has asked for the
    present one, -1 where nobody has. timeout_us: how long one transaction may take. synced: whether what it stages is synced before it is
    answered.
    """

    id: int
    first_epoch: int
    asked_epoch: int
    timeout_us: int
    synced: bool = True


class TransactionalIdStored(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """A transactional id has this epoch, and a transaction in this state, which holds nothing; ``token`` is what it stages under. Sequences
    go on as long as epoch and producer stay the same; without a producer they begin anew. home: of a branch, the shard that decides.

    Where it ends a transaction that other shards have branches of, it is the decision that they abort (see ``TransactionDecided``).
    """

    id: str
    epoch: int
    state: TransactionState
    token: bytes
    at_us: int
    owner: int = UNOWNED
    producer: TransactionalProducer | None = None
    home: int = NO_SHARD


class TransactionStaged(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """A transaction holds one more batch, and so many records; the last one has this sequence in this partition."""

    id: str
    incarnation: int
    sequence: int
    messages: int
    at_us: int


class TransactionOffsets(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """A transaction holds these next offsets of a group, by partition number, beside those it had. notes: as in PositionsStored."""

    id: str
    topic: str
    group: str
    member: str
    generation: int
    offsets: dict[int, int]
    notes: dict[int, tuple[int, str]] = {}


class TransactionCommitted(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """A transaction was published, and with it what is ``stored`` and ``others``, or what an older broker stored singly. raised: how the
    transactional id stands now, where the end has begun an epoch. Where other shards have branches of it, it is the decision that they
    commit (see ``TransactionDecided``)."""

    id: str
    at_us: int
    positions: tuple[PositionStored, ...]
    stored: PositionsStored | None = None
    others: tuple[PositionsStored, ...] = ()
    raised: TransactionalIdStored | None = None


class TransactionPartitions(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """An open transaction may stage for these partitions, too."""

    id: str
    incarnations: tuple[int, ...]


class TransactionJoined(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """Further shards may have branches of an open transaction: what is decided is theirs, too."""

    id: str
    shards: tuple[int, ...]


class TransactionSettled(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """All shards have ended their branches of the transaction that staged under this token; where nothing is known of it, nothing changes."""

    token: bytes


class GroupChanged(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """A group that is there has this generation now, without the members gone, and with those joined last in order."""

    topic: str
    name: str
    generation: int
    assignor: Assignor
    partition_count: int
    gone: tuple[str, ...] = ()
    joined: tuple[MemberStored, ...] = ()
    owner: int = UNOWNED
    at_us: int = 0
    has_consumers: bool = False


class ClassicMemberStored(msgspec.Struct, frozen=True, array_like=True):
    """A member of a classic group: what it said when it joined, and what it was assigned. is_known: its wire can write what the broker
    assigns to it."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_s: float
    rebalance_timeout_s: float
    protocols: tuple[tuple[str, bytes], ...]
    topics: tuple[str, ...]
    wire: str
    is_known: bool
    assignment: bytes


class ClassicGroupStored(msgspec.Struct, frozen=True, array_like=True, tag=32):
    """A classic group as its members have settled on it; these in the order in which they came."""

    name: str
    generation: int
    protocol_type: str
    protocol: str
    leader: str
    members: tuple[ClassicMemberStored, ...]
    owner: int = UNOWNED


class ClassicGroupDeleted(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """Members of a classic group have to join anew, or there are none."""

    name: str


class GroupUnbound(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """A wire means no topic by this name of a group any more."""

    wire: str
    name: str


class TransactionalIdDeleted(msgspec.Struct, frozen=True, array_like=True, tag=28):
    """A transactional id is forgotten, and its epoch with it."""

    id: str


class WriterDeleted(msgspec.Struct, frozen=True, array_like=True, tag=29):
    """A writer is forgotten, and the last number it published with it."""

    writer: str


Change = (
    TopicCreated
    | PartitionsAdded
    | TopicDeleted
    | TopicConfigured
    | TopicPurged
    | PositionStored
    | PositionsDeleted
    | GroupStored
    | GroupDeleted
    | GroupBound
    | Published
    | WireStateSet
    | PartitionsRemoved
    | EventAppended
    | SnapshotSaved
    | TransactionalIdStored
    | TransactionStaged
    | TransactionOffsets
    | TransactionCommitted
    | GroupChanged
    | GroupUnbound
    | TransactionalIdDeleted
    | WriterDeleted
    | PositionsStored
    | TransactionPartitions
    | ClassicGroupStored
    | ClassicGroupDeleted
    | TransactionJoined
    | TransactionSettled
)


class TopicState(msgspec.Struct, frozen=True, array_like=True):
    """A topic in a snapshot: incarnations in the order of partition numbers."""

    id: bytes
    stream: str
    topic: str
    created_at_us: int
    settings: TopicSettings
    incarnations: tuple[int, ...]
    owner: int = UNOWNED


class RememberedState(msgspec.Struct, frozen=True, array_like=True):
    """A producer's batch in a snapshot; ``offset`` is -1 when the log had not answered yet."""

    base: int
    last: int
    offset: int


class ProducerState(msgspec.Struct, frozen=True, array_like=True):
    """A producer in a snapshot."""

    incarnation: int
    id: bytes
    epoch: int
    first: int
    last: int
    seen_at_us: int
    window: tuple[RememberedState, ...]
    owner: int = UNOWNED


class AggregateState(msgspec.Struct, frozen=True, array_like=True):
    """An aggregate in a snapshot; ``offsets``: little-endian i64 of its newest events, the last of which is ``version``. ``owner`` began
    it; ``owners``: as many i64, who appended each, empty where that was always the same one."""

    incarnation: int
    key: bytes
    version: int
    offsets: bytes
    owner: int = UNOWNED
    owners: bytes = b""


class TransactionalIdState(msgspec.Struct, frozen=True, array_like=True):
    """A transactional id and its latest transaction in a snapshot. scope, offsets: without a producer, topic, group, member and generation of
    the first positions it holds, and these; others are ``held``. batches, began_at_us: an older broker wrote 0 for as many as records, and
    -1. home, shards: see ``Transaction``."""

    id: str
    epoch: int
    state: TransactionState
    token: bytes
    at_us: int
    messages: int
    sequences: dict[int, int]
    scope: tuple[str, str, str, int]
    offsets: dict[int, int]
    owner: int = UNOWNED
    producer: TransactionalProducer | None = None
    batches: int = 0
    began_at_us: int = -1
    partitions: tuple[int, ...] = ()
    held: tuple[TransactionOffsets, ...] = ()
    home: int = NO_SHARD
    shards: tuple[int, ...] = ()


class TransactionDecided(msgspec.Struct, frozen=True, array_like=True):
    """How a transaction ended of which these shards have branches that may not have ended yet. token: what all of them stage it under."""

    token: bytes
    id: str
    commits: bool
    shards: tuple[int, ...]


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The whole state; lists are in the order in which they must be taken over."""

    version: int
    next_incarnation: int
    topics: tuple[TopicState, ...]
    positions: tuple[PositionStored, ...]
    groups: tuple[GroupStored, ...]
    bindings: tuple[GroupBound, ...]
    writers: tuple[Published, ...]
    wire_state: tuple[WireStateSet, ...]
    producers: tuple[ProducerState, ...]
    aggregates: tuple[AggregateState, ...] = ()
    aggregate_snapshots: tuple[SnapshotSaved, ...] = ()
    transactions: tuple[TransactionalIdState, ...] = ()
    classic_groups: tuple[ClassicGroupStored, ...] = ()
    decisions: tuple[TransactionDecided, ...] = ()


_ENCODER: Final = msgspec.msgpack.Encoder()
_CHANGES: Final[msgspec.msgpack.Decoder[Change]] = msgspec.msgpack.Decoder(Change)
_SNAPSHOTS: Final[msgspec.msgpack.Decoder[Snapshot]] = msgspec.msgpack.Decoder(Snapshot)


def encode(value: Change | Snapshot) -> bytes:
    """The bytes of a change or a snapshot."""
    return _ENCODER.encode(value)


def encoded_head(next_incarnation: int, version: int = SNAPSHOT_VERSION) -> Iterator[bytes]:
    """How an encoded ``Snapshot`` begins: its tables follow, each an array, in the order of the fields."""
    tables = len(Snapshot.__struct_fields__) - 2
    bare = _ENCODER.encode((version, next_incarnation, *[0] * tables))
    yield bare[: len(bare) - tables]


def decode_change(data: bytes) -> Change:
    """A change from its bytes, which verified. Raises Corrupt(NEWER_FORMAT) for what no broker of this version wrote."""
    try:
        return _CHANGES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _newer("a change of the broker's state", f"bytes={len(data)} reason={error}") from error


def decode_snapshot(data: bytes) -> Snapshot:
    """A snapshot from its bytes, which verified. Raises Corrupt(NEWER_FORMAT) for those of a version that is not known."""
    try:
        snapshot = _SNAPSHOTS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _newer("the broker's state", f"bytes={len(data)} reason={error}") from error
    if snapshot.version not in (SNAPSHOT_VERSION, DECIDED_VERSION):
        raise _newer("the broker's state", f"version={snapshot.version}")
    return snapshot


def _newer(what: str, facts: str) -> Corrupt:
    return Corrupt(ErrorCode.NEWER_FORMAT, f"a newer Polywire wrote this, and reads it: {what} {facts}")
