"""Encode changes of the broker's state for the journal, and snapshots of the whole state.

* A change contains the resulting values and its time. Replaying it computes nothing, so replay always gives the same
  state.
* Each kind of change has a number, its tag, which is never reused for another kind. Fields are only added at the end,
  with a default.

The encoding is MessagePack. A change is an array [tag, field, field …]. A snapshot is an array: its version, then
arrays like those of changes.
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
"""Version of a snapshot that contains ``decisions``. Older brokers, which would ignore them, refuse this version."""
SHARED_VERSION: Final = 3
"""Version of a snapshot that contains share groups, for the same reason."""
DELAYED_VERSION: Final = 4
"""Version of a snapshot with share groups for which delayed records wait, for the same reason."""
NO_SHARD: Final = -1

TopicKey = bytes | str
"""A topic's id, or its full name if the topic does not exist yet."""


def split_key(key: TopicKey | None) -> tuple[bytes, str]:
    """Return (id, full name) of a topic, as stored in the journal. One of the two is empty."""
    return (key, "") if isinstance(key, bytes) else (b"", key or "")


class TopicCreated(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A topic was created. Its partitions have consecutive incarnation numbers."""

    id: bytes
    stream: str
    topic: str
    created_at_us: int
    first_incarnation: int
    partition_count: int
    settings: TopicSettings
    owner: int = UNOWNED


class PartitionsAdded(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A topic got more partitions, with consecutive incarnation numbers."""

    id: bytes
    first_incarnation: int
    count: int


class TopicDeleted(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A topic was deleted with its partitions, offsets and groups."""

    id: bytes


class TopicConfigured(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The settings of a topic were replaced."""

    id: bytes
    settings: TopicSettings


class TopicPurged(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """All records of a topic were deleted. The same journal write has the entries that trim its partitions."""

    id: bytes
    at_us: int


class PositionStored(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A consumer or group committed an offset in a topic.

    Attributes:
        id, full_name: the topic's id, or its name if the topic does not exist yet.
        at_us: time of the commit, 0 if unknown.
        epoch: leader epoch of the last record read, -1 if unknown.
        metadata: the text that the client stored with the offset.
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
        """Key by which committed offsets of the topic are stored."""
        return self.id or self.full_name


class PositionsStored(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """A consumer or group committed offsets in a topic, by partition number.

    Fields with the same names as in PositionStored have the same meaning. Snapshots and older brokers use
    PositionStored.

    Attributes:
        notes: leader epoch and metadata by partition number, only where one of them is set.
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
        """Key by which committed offsets of the topic are stored."""
        return self.id or self.full_name

    def one_by_one(self) -> Iterator[PositionStored]:
        """Yield a change for each offset, as in changes that older brokers read, too."""
        place = (self.id, self.full_name)
        for partition, offset in self.offsets.items():
            noted = self.notes.get(partition, (-1, ""))
            yield PositionStored(
                *place, partition, self.kind, self.name, offset, self.generation, self.owner, self.at_us, *noted
            )


class PositionsDeleted(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Committed offsets were deleted: in one topic or all, and in one partition or all (None).

    Attributes:
        id, full_name: as in PositionStored. If both are empty, offsets in all topics were deleted.
    """

    kind: PositionKind
    name: str
    id: bytes
    full_name: str
    partition: int | None

    @property
    def topic(self) -> TopicKey | None:
        """Key by which committed offsets of the topic are stored. None means all topics."""
        return self.id or self.full_name or None


class MemberStored(msgspec.Struct, frozen=True, array_like=True):
    """A member of a group and the protocol over which it joined.

    Attributes:
        connected: the membership ends with the member's connection. Journals of older versions lack this field.
    """

    id: str
    wire: str
    connected: bool = False


class GroupStored(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A group with its members, in the order in which they joined.

    Attributes:
        kept: the group exists even without members and offsets, as all groups did in older versions.
        at_us: time of the change, in microseconds that count only while the broker runs.
        has_consumers: the last member to join used Kafka's consumer group protocol (KIP-848).
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
    """A group was deleted."""

    topic: str
    name: str


class GroupBound(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """A group name was bound to one topic. Only for protocols that name a group without a topic."""

    wire: str
    name: str
    topic: str
    owner: int = UNOWNED
    at_us: int = 0
    version: int = 0


class Published(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """A writer committed batches with this sequence number. Lower numbers of its epoch count as committed, too.

    Attributes:
        positions: offsets that were committed with the batches.
        epoch: epoch of the writer. Each process that takes over a transactional id begins a new one.
    """

    writer: str
    number: int
    at_us: int
    positions: tuple[PositionStored, ...] = ()
    owner: int = UNOWNED
    epoch: int = 0


class WireStateSet(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A protocol stored a value under a key. A value of None removes the key."""

    wire: str
    key: str
    value: bytes | None
    owner: int = UNOWNED


class PartitionsRemoved(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The number of a topic's partitions was reduced. The last partitions were removed with their committed offsets."""

    id: bytes
    partition_count: int


class EventAppended(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """An event was appended to an aggregate, which has a new version."""

    incarnation: int
    key: bytes
    version: int
    offset: int
    owner: int = UNOWNED


class SnapshotSaved(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """A client saved its snapshot of an aggregate as of a version."""

    incarnation: int
    key: bytes
    version: int
    payload: bytes
    owner: int = UNOWNED


class TransactionState(Enum):
    """State of the latest transaction of a transactional id.

    Before the first transaction of an epoch, the state is EMPTY for a producer with a producer id, otherwise ABORTED.
    """

    EMPTY = "empty"
    OPEN = "open"
    SHARED = "shared"
    """Open, with participants in several shards."""
    COMMITTED = "committed"
    ABORTED = "aborted"


class TransactionalProducer(msgspec.Struct, frozen=True, array_like=True):
    """The Kafka producer that uses a transactional id.

    Attributes:
        id: producer id.
        first_epoch: epoch of the transactional id that corresponds to epoch 0 of this producer id.
        asked_epoch: if the producer requested the current epoch as the holder of an earlier one, the earlier one.
            Otherwise -1.
        timeout_us: longest duration of a transaction.
        synced: whether the records of an open transaction are synced before they are acknowledged.
    """

    id: int
    first_epoch: int
    asked_epoch: int
    timeout_us: int
    synced: bool = True


class TransactionalIdStored(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The epoch of a transactional id and the state of its transaction changed.

    Used if no records or offsets become readable, for example when a transaction begins or is aborted. If an ended
    transaction has participants in other shards, this change is the decision to abort it.

    Attributes:
        token: identifies the transaction's uncommitted records.
        home: shard of the coordinator if this shard only participates in the transaction, otherwise NO_SHARD.
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
    """A batch was added to an open transaction.

    Attributes:
        sequence: sequence number of its last record.
        messages: number of its records.
    """

    id: str
    incarnation: int
    sequence: int
    messages: int
    at_us: int


class TransactionOffsets(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """A group's offsets, by partition number, were added to a transaction. They are committed with it.

    They replace offsets that the transaction has for the same group, topic and partitions.

    Attributes:
        notes: as in PositionsStored.
    """

    id: str
    topic: str
    group: str
    member: str
    generation: int
    offsets: dict[int, int]
    notes: dict[int, tuple[int, str]] = {}


class TransactionCommitted(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """A transaction was committed, and the offsets that it contains with it.

    Older brokers stored these offsets separately, in ``positions``. If the transaction has participants in other
    shards, this change is the decision to commit it.

    Attributes:
        raised: new state of the transactional id if the commit began an epoch.
    """

    id: str
    at_us: int
    positions: tuple[PositionStored, ...]
    stored: PositionsStored | None = None
    others: tuple[PositionsStored, ...] = ()
    raised: TransactionalIdStored | None = None


class TransactionPartitions(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """A producer added partitions to its open transaction."""

    id: str
    incarnations: tuple[int, ...]


class TransactionJoined(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """More shards participate in an open transaction, so the coordinator must send them its decision."""

    id: str
    shards: tuple[int, ...]


class TransactionSettled(msgspec.Struct, frozen=True, array_like=True, tag=35):
    """All participating shards have committed or aborted the transaction that this token identifies."""

    token: bytes


class GroupChanged(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """A group has a new generation, with changed members.

    Attributes:
        gone: ids of members that left.
        joined: new members, added after the existing ones.
    """

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
    """A member of a classic group: its last JoinGroup request, and its assignment.

    Attributes:
        is_known: whether the broker can encode assignments for this member's protocol type.
    """

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
    """A classic group reached the state Stable. Its members are in the order in which they joined."""

    name: str
    generation: int
    protocol_type: str
    protocol: str
    leader: str
    members: tuple[ClassicMemberStored, ...]
    owner: int = UNOWNED


class ClassicGroupDeleted(msgspec.Struct, frozen=True, array_like=True, tag=33):
    """The stored generation of a classic group is invalid, because the group has no members or they must rejoin."""

    name: str


class GroupUnbound(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """The binding of a protocol's group name to a topic was removed."""

    wire: str
    name: str


class TransactionalIdDeleted(msgspec.Struct, frozen=True, array_like=True, tag=28):
    """A transactional id and its epoch were deleted."""

    id: str


class WriterDeleted(msgspec.Struct, frozen=True, array_like=True, tag=29):
    """A writer and its last published number were deleted."""

    writer: str


class ShareGroupStored(msgspec.Struct, frozen=True, array_like=True, tag=36):
    """A share group was created, or its settings or owner changed.

    Attributes:
        settings: by name. A missing one has its default.
        has_members: whether a member has ever joined. A group with settings only is not listed.
    """

    name: str
    settings: dict[str, str]
    owner: int = UNOWNED
    has_members: bool = False


class ShareGroupDeleted(msgspec.Struct, frozen=True, array_like=True, tag=37):
    """A share group was deleted, with its progress in all partitions."""

    name: str


class ShareStored(msgspec.Struct, frozen=True, array_like=True, tag=38):
    """The whole progress of a share group in one partition.

    Attributes:
        start: records below this offset are finished.
        end: no record at or above this offset was delivered.
        runs: (first offset, last offset, delivery count) of unfinished records below ``end``, one after another.
        due_ms: system time at which records that were released with a delay are available again, by offset.
        cursor: fields of ``share.DueCursor``. Empty if no delayed record was passed.
    """

    group: str
    incarnation: int
    start: int
    end: int
    runs: tuple[int, ...] = ()
    due_ms: dict[int, int] = {}
    cursor: tuple[int, ...] = ()


class ShareProgressed(msgspec.Struct, frozen=True, array_like=True, tag=39):
    """A share group acquired or finished records of one partition.

    Attributes:
        runs: (first offset, last offset, delivery count) one after another. The count is -1 for finished records.
        due_ms: as in ShareStored, for records that were released with a delay.
    """

    group: str
    incarnation: int
    runs: tuple[int, ...]
    due_ms: dict[int, int] = {}


class ShareDeleted(msgspec.Struct, frozen=True, array_like=True, tag=40):
    """The progress of a share group in some partitions was deleted."""

    group: str
    incarnations: tuple[int, ...]


class ShareCursorMoved(msgspec.Struct, frozen=True, array_like=True, tag=41):
    """A share group passed records that were sent with a delay, or some of them are due now.

    Attributes:
        runs: as in ShareProgressed. Records that are due now have the count 0.
        cursor: fields of ``share.DueCursor``.
    """

    group: str
    incarnation: int
    runs: tuple[int, ...]
    cursor: tuple[int, int, int, int]


SHARE_CHANGES: Final = (
    ShareProgressed,  # first, because it is the most frequent, and each check before it takes as long as the change
    ShareGroupStored,
    ShareGroupDeleted,
    ShareStored,
    ShareDeleted,
    ShareCursorMoved,
)
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
    | ShareGroupStored
    | ShareGroupDeleted
    | ShareStored
    | ShareProgressed
    | ShareDeleted
    | ShareCursorMoved
)


class TopicState(msgspec.Struct, frozen=True, array_like=True):
    """A topic in a snapshot, with the incarnation numbers of its partitions in order."""

    id: bytes
    stream: str
    topic: str
    created_at_us: int
    settings: TopicSettings
    incarnations: tuple[int, ...]
    owner: int = UNOWNED


class RememberedState(msgspec.Struct, frozen=True, array_like=True):
    """A recent batch of a producer, in a snapshot. ``offset`` is -1 if the log had not assigned one yet."""

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
    """An aggregate in a snapshot.

    Attributes:
        offsets: offsets of its newest events as little-endian i64. The last belongs to ``version``.
        owner: the creator.
        owners: the author of each event, also as i64. Empty if all events have the same author.
    """

    incarnation: int
    key: bytes
    version: int
    offsets: bytes
    owner: int = UNOWNED
    owners: bytes = b""


class TransactionalIdState(msgspec.Struct, frozen=True, array_like=True):
    """A transactional id and its latest transaction in a snapshot.

    Attributes:
        scope: topic, group, member and generation of ``offsets``. Only for a transaction without a producer id.
        held: all other offsets to commit.
        batches: number of batches. Older brokers wrote 0, which counts as the number of records.
        began_at_us: older brokers wrote -1.
        shards: shards that participate in the transaction.
        home: shard of the coordinator if this shard only participates, otherwise NO_SHARD.
        firsts: see ``Transaction``. Older brokers wrote none: all numbers since 0 may be of the open transaction.
    """

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
    firsts: dict[int, int] | None = None


class TransactionDecided(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a transaction that some participating shards may not have applied yet.

    Attributes:
        token: identifies the transaction's uncommitted records.
        shards: the participating shards.
    """

    token: bytes
    id: str
    commits: bool
    shards: tuple[int, ...]


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The whole state of the broker. Fields must be loaded in their order, because later ones refer to earlier ones."""

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
    share_groups: tuple[ShareGroupStored, ...] = ()
    shares: tuple[ShareStored, ...] = ()


_ENCODER: Final = msgspec.msgpack.Encoder()
_CHANGES: Final[msgspec.msgpack.Decoder[Change]] = msgspec.msgpack.Decoder(Change)
_SNAPSHOTS: Final[msgspec.msgpack.Decoder[Snapshot]] = msgspec.msgpack.Decoder(Snapshot)


def encode(value: Change | Snapshot) -> bytes:
    return _ENCODER.encode(value)


def encoded_head(next_incarnation: int, version: int = SNAPSHOT_VERSION) -> Iterator[bytes]:
    """Yield the beginning of an encoded ``Snapshot``, up to its tables.

    The caller appends each table as an array, in the order of the fields.
    """
    tables = len(Snapshot.__struct_fields__) - 2
    bare = _ENCODER.encode((version, next_incarnation, *[0] * tables))
    yield bare[: len(bare) - tables]


def decode_change(data: bytes) -> Change:
    """Decode a change from the journal. Raises Corrupt(NEWER_FORMAT) for an unknown tag.

    The caller has verified the checksum.
    """
    try:
        return _CHANGES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _newer("change of the broker's state", f"bytes={len(data)} reason={error}") from error


def decode_snapshot(data: bytes) -> Snapshot:
    """Decode a snapshot. Raises Corrupt(NEWER_FORMAT) for an unknown version.

    The caller has verified the checksum.
    """
    try:
        snapshot = _SNAPSHOTS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _newer("state of the broker", f"bytes={len(data)} reason={error}") from error
    if snapshot.version not in (SNAPSHOT_VERSION, DECIDED_VERSION, SHARED_VERSION, DELAYED_VERSION):
        raise _newer("state of the broker", f"version={snapshot.version}")
    return snapshot


def _newer(what: str, facts: str) -> Corrupt:
    return Corrupt(
        ErrorCode.NEWER_FORMAT, f"a newer version of Polywire wrote this {what} (start that version) {facts}"
    )
