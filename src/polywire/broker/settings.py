"""Every limit and default of the broker, each with its unit and its reason.

Promises: plain values that check themselves. Must not know: wires, files, the log's own settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from polywire.errors import ErrorCode, Invalid
from polywire.records.columns import BATCH_BYTES_MAX, RECORD_BYTES_MAX
from polywire.records.compression import Compression as StoredCompression
from polywire.types import DEFAULT_PARTITION_COUNT, PARTITION_COUNT_MAX, KeyHash, Level

KEEP: Final = 0  # a retention limit of 0 keeps records for ever
SECOND_US: Final = 1_000_000
HOUR_US: Final = 3600 * SECOND_US
DAY_US: Final = 24 * HOUR_US
MEBI: Final = 1024 * 1024
WIRE_OPTIONS_BYTES_MAX: Final = 512 * 1024  # of one topic: Iggy keeps the names of 1,000 groups there
RECORD_ROOM_BYTES: Final = 4096  # of a batch beside the key and value of its only record


class Compression(Enum):
    """How the bodies of a topic's batches are compressed."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True)
class TopicSetting:
    """One setting of a topic, the same for every protocol, command and file that gives it.

    kind: int, bool, or an enumeration whose values are the words. default: of a topic that is created without it; None leaves the choice to
    the broker's settings or to each protocol. meaning: in a few words, for help and reference. allowed: numbers, None for other kinds.
    is_fixed: whether it stays as it is once the topic exists.
    """

    kind: type[int] | type[Enum]
    default: object
    meaning: str
    allowed: range | None = None
    is_fixed: bool = False

    @property
    def spelled(self) -> str:
        """Allowed values, as messages and the reference page spell them."""
        if self.allowed is not None:
            return f"{self.allowed.start} to {self.allowed.stop - 1}"
        return "0 or 1" if self.kind is bool else ", ".join(member.value for member in self._members)

    @property
    def _members(self) -> list[Enum]:
        return list(self.kind) if issubclass(self.kind, Enum) else []

    def read(self, name: str, value: int | str | None) -> object:
        """Return a value as ``TopicSettings`` has it; None stands for the default. Raises Invalid(INVALID_REQUEST)."""
        if value is None:
            return self.default
        if issubclass(self.kind, Enum):
            found = [member for member in self._members if member.value == value]
            if found:
                return found[0]
        elif not isinstance(value, str) and (self.allowed is None or value in self.allowed):
            return self.kind(value)
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"topic setting is invalid: {name} (use {self.spelled}) value={value!r:.100}"
        )

    @staticmethod
    def plain(value: object) -> object:
        """Return a value of ``TopicSettings`` as JSON has it: a number, true or false, a word, or None."""
        return value.value if isinstance(value, Enum) else value


TOPIC_SETTINGS: Final[Mapping[str, TopicSetting]] = {
    "compaction": TopicSetting(bool, False, "keep at least the latest record of each key"),
    "compression": TopicSetting(Compression, Compression.NONE, "compression of stored segments"),
    "key_hash": TopicSetting(
        KeyHash,
        None,
        "hash function that maps keys to partitions on all protocols, so that equal keys go to the same partition; by default each "
        "protocol uses its own",
        is_fixed=True,
    ),
    "replication_factor": TopicSetting(
        int, 1, "replication factor that clients are shown; one broker stores one copy", range(1, 2**31)
    ),
    "retention_age_us": TopicSetting(
        int,
        None,
        "age in microseconds above which records are dropped; 0 for no limit, by default the broker's setting",
        range(2**62 + 1),  # added to a time it fits 64 bits
    ),
    "retention_bytes": TopicSetting(
        int,
        None,
        "size in bytes above which a partition drops its oldest records; 0 for no limit, by default the broker's setting",
        range(2**62 + 1),
    ),
}
"""Settings of a topic that any protocol, command or file may give. A protocol maps its own names to these where they mean the same."""
TOPIC_RANGES: Final[Mapping[str, range]] = {
    name: setting.allowed for name, setting in TOPIC_SETTINGS.items() if setting.allowed is not None
}
RETENTION_HOURS_MAX: Final = (TOPIC_RANGES["retention_age_us"].stop - 1) // HOUR_US
RETENTION_MIB_MAX: Final = (TOPIC_RANGES["retention_bytes"].stop - 1) // MEBI


class Listed(Enum):
    """The two sides of a topic's access list."""

    READERS = "readers"
    WRITERS = "writers"


ANYBODY: Final = "*"  # on an access list: everybody, whether or not they have logged in


@dataclass(frozen=True, slots=True)
class AccessList:
    """Who alone may read a topic, and who alone may write to it, on every wire: names of users, or ``*``. None: it does not say.

    It takes rights away and gives none: who stands on it needs the permission as well.
    """

    readers: tuple[str, ...] | None = None
    writers: tuple[str, ...] | None = None

    def admits(self, side: Listed, name: str | None) -> bool:
        """Whether this user may; None is who has not logged in."""
        names = self.readers if side is Listed.READERS else self.writers
        return names is None or ANYBODY in names or name in names


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """What may be set for one topic; kept as given, because clients ask for it again.

    replication_factor: as the client gave it; one broker keeps one copy.
    key_hash: overrides every wire's own function, so that equal keys meet (concepts: records#keys-and-partitions); None leaves the wire's.
    retention_age_us, retention_bytes: per partition; None takes the broker's default, 0 keeps for ever.
    compaction: keep the newest record of each key only.
    compression: how the bodies of its batches are compressed when they leave the journal.
    idempotent: producers' sequences are to be checked whatever the request says.
    event_sourcing: records are events of aggregates, one aggregate per key; such topics refuse to grow.
    wire_options: what only one wire understands (ids, policies), by wire name, opaque here.
    access: who alone may read and write, whatever wire they use; None restricts nobody.
    """

    replication_factor: int = 1
    key_hash: KeyHash | None = None
    retention_age_us: int | None = None
    retention_bytes: int | None = None
    compaction: bool = False
    compression: Compression = Compression.NONE
    idempotent: bool = False
    event_sourcing: bool = False
    wire_options: Mapping[str, bytes] = field(default_factory=dict)
    access: AccessList | None = None

    @property
    def stored_compression(self) -> StoredCompression | None:
        """How the log compresses bodies, None when it does not."""
        return None if self.compression is Compression.NONE else StoredCompression(self.compression.value)

    @property
    def size(self) -> int:
        """Bytes of what only wires understand."""
        return sum([len(value) for value in self.wire_options.values()])

    def check(self) -> None:
        """Refuse impossible values. Raises Invalid(INVALID_REQUEST)."""
        if self.size > WIRE_OPTIONS_BYTES_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"options of wires are too large bytes={self.size} limit={WIRE_OPTIONS_BYTES_MAX}",
            )
        for name, allowed in TOPIC_RANGES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    f"topic setting is out of range: {name} (use {allowed.start} to {allowed.stop - 1}) value={value}",
                )


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Defaults and limits of one broker.

    auto_create: whether producing to, or reading, a missing topic makes it.
    partition_count, partition_count_max: per topic; the default of every automatic creation and the most one may have.
    topics_max, partitions_max: per broker; a partition costs some 2 KiB of memory, and the whole process stays under 500 MB.
    batch_bytes_max: a batch must fit one journal group; small journal files lower it.
    record_bytes_max: key and value of one record; the longest payload any wire documents is 10 MB (Iggy). Small journal files lower it.
    durability: the least level of any acknowledgement; SYNCED also hides unsynced records from readers.
    retention_age_us, retention_bytes: defaults of topics that set none; 0 keeps for ever, so nothing is lost unasked.
    tombstone_age_us: how long compaction keeps a key's last record when it is null, so that readers learn that the key is gone.
    retention_interval_s: how often limits are looked at.
    retention_partitions_max: partitions looked at per pass, so that a pass stays under a millisecond or two.
    member_timeout_s: a group member not heard of for longer is removed.
    groups_max, members_max: per broker and per group; a change of members writes the whole group.
    members_total_max: in all groups, some 700 bytes each with the longest names.
    group_bytes_max: what members of one classic group may say and be assigned, together: its leader is sent all of it at once.
    session_timeout_min_s, session_timeout_max_s: what a member of a classic group may choose.
    consumer_session_timeout_s: how long a member of a consumer group may be silent, which the broker chooses.
    group_expiry_us: how long a group stays without members and positions, unless it was made for itself; and with none but members that
        were not heard of for so long.
    positions_expiry_us: how long a group without members, positions and a wire's bare name of a group stay when nobody uses them; 0 keeps
        them for ever.
    expiry_interval_s, expiry_count_max: how often is looked for what has ended, and at how many things.
    expiry_grace_s: how long after the start nobody's positions end: who read without storing any was not written down.
    name_bytes_max: longest group, member, consumer or writer name.
    positions_max: stored positions, some 150 bytes each.
    position_owners_max: consumers and groups that have any, counted once per topic, some 700 bytes each with the longest names.
    position_metadata_bytes_max: what may be written beside a position.
    stage_expiry_us: how long staged batches wait to be published; a Spark batch that takes longer starts again.
    staged_bytes_max: bytes that may be staged and unpublished, because nothing else ever frees them.
    producers_max, producer_expiry_us: (partition, producer) pairs whose sequences are remembered, some 500 bytes each, and
        for how long when idle while the broker runs: longer than any client retries. Beyond the count the longest idle is forgotten.
    producer_window: batches per producer whose offsets are remembered; as many as clients keep in flight.
    writers_max, writer_expiry_us: writers whose last published number is remembered. A forgotten writer could publish
        twice, so a new writer is refused when all are younger; 30 days outlive any stopped Spark query one would resume.
    writer_step_max: how far a writer's number may be ahead of its last one. Spark's batches count by one, but who numbers by the clock, in
        milliseconds, may pause for some weeks; a number at the end of the range would leave its writer none.
    bulk_share: of topics, partitions, aggregates, events, bytes of snapshots and staged bytes, what one user or address may have: most
        brokers have one who makes most.
    owner_share: of every limit on what is kept for peers, on counts and on bytes, what one user may have, or one address without a user:
        nobody locks the others out.
    state_bytes_max: bytes of memory that all of it takes, estimated: groups, positions, writers, transactional ids, aggregates,
        wires' own state.
    reserved_count, reserved_bytes: what a user may have of it, whatever the others have used up; users are made by administrators.
    aggregates_max, events_max: aggregates, some 300 bytes each, and events whose offsets are kept for reading streams, 8 bytes each, 16
        where several append to one aggregate.
    aggregate_key_bytes_max: longest key of an aggregate; it is kept in memory.
    aggregate_snapshot_bytes_max, aggregate_snapshots_bytes_max: of one aggregate's snapshot and of all; they are kept in memory.
    transactional_ids_max, transactional_id_expiry_us: transactional ids whose epoch is remembered, some 500 bytes each. A forgotten one
        would let an old holder back in, so a new one is refused when all are younger.
    transaction_batches_max: of one transaction, because the group that publishes it has a header for each; where a wire stages record by
        record, of as many records.
    transaction_partitions_max: that transactions of one epoch write to.
    transaction_positions_max, transaction_scopes_max: that one transaction moves; of so many members, groups and topics.
    wire_state_bytes_max: bytes one value of a wire's own state may have; the journal is no object store.
    wire_state_keys_max: keys of one wire's own state.
    users_max, tokens_max: per broker, and tokens per user; one value of the kept state holds a user with all its tokens.
    logins_waiting_max: logins that wait for their password to be hashed, some 40 ms each; more are asked to come back, first those of the
        address with the most. Ten seconds: who waits longer has given up.
    logins_cached_max: verified logins that are remembered, so that who sends its password again does not wait again.
    """

    auto_create: bool = True
    partition_count: int = DEFAULT_PARTITION_COUNT
    partition_count_max: int = PARTITION_COUNT_MAX
    topics_max: int = 10_000
    partitions_max: int = 50_000
    batch_bytes_max: int = BATCH_BYTES_MAX
    record_bytes_max: int = RECORD_BYTES_MAX
    durability: Level = Level.WRITTEN
    retention_age_us: int = KEEP
    retention_bytes: int = KEEP
    tombstone_age_us: int = DAY_US
    retention_interval_s: float = 10.0
    retention_partitions_max: int = 1_000
    member_timeout_s: float = 10.0
    groups_max: int = 10_000
    members_max: int = 1_000
    members_total_max: int = 50_000
    group_bytes_max: int = 16 * 1024 * 1024
    session_timeout_min_s: float = 6.0
    session_timeout_max_s: float = 1_800.0
    consumer_session_timeout_s: float = 45.0
    group_expiry_us: int = HOUR_US
    positions_expiry_us: int = 7 * DAY_US
    expiry_interval_s: float = 30.0
    expiry_count_max: int = 1_000
    expiry_grace_s: float = 3_600.0
    name_bytes_max: int = 255
    positions_max: int = 500_000
    position_owners_max: int = 100_000
    position_metadata_bytes_max: int = 4096
    stage_expiry_us: int = HOUR_US
    staged_bytes_max: int = 1024**3
    producers_max: int = 100_000
    producer_expiry_us: int = DAY_US
    producer_window: int = 8
    writers_max: int = 100_000
    writer_expiry_us: int = 30 * DAY_US
    writer_step_max: int = 2**32
    bulk_share: float = 0.9
    owner_share: float = 0.5
    state_bytes_max: int = 256 * 1024 * 1024
    reserved_count: int = 100
    reserved_bytes: int = 256 * 1024
    aggregates_max: int = 200_000
    events_max: int = 5_000_000
    aggregate_key_bytes_max: int = 1024
    aggregate_snapshot_bytes_max: int = 1024 * 1024
    aggregate_snapshots_bytes_max: int = 64 * 1024 * 1024
    transactional_ids_max: int = 10_000
    transactional_id_expiry_us: int = 7 * DAY_US
    transaction_batches_max: int = 100_000
    transaction_partitions_max: int = 10_000
    transaction_positions_max: int = 10_000
    transaction_scopes_max: int = 1_000
    wire_state_bytes_max: int = 1024 * 1024
    wire_state_keys_max: int = 100_000
    users_max: int = 10_000
    tokens_max: int = 100
    logins_waiting_max: int = 256
    logins_cached_max: int = 1_000

    def __post_init__(self) -> None:
        if not 1 <= self.partition_count <= self.partition_count_max:
            raise Invalid(
                ErrorCode.INVALID_PARTITION_COUNT,
                f"default partition count is out of range value={self.partition_count}",
            )
        if self.durability is Level.MEMORY:
            raise Invalid(ErrorCode.INVALID_REQUEST, "durability is written or synced: what is committed is written")
        if not 0 < self.owner_share <= 1 or self.state_bytes_max < 1:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"a share is above 0 and at most 1, and of something share={self.owner_share} bytes={self.state_bytes_max}",
            )
        if not 1 <= self.batch_bytes_max <= BATCH_BYTES_MAX:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"batch limit is out of range value={self.batch_bytes_max}")

    def within(self, batch_bytes_max: int) -> BrokerSettings:
        """These settings over a log that takes no longer batches."""
        if batch_bytes_max >= self.batch_bytes_max:
            return self
        record_bytes_max = min(self.record_bytes_max, batch_bytes_max - RECORD_ROOM_BYTES)
        return replace(self, batch_bytes_max=batch_bytes_max, record_bytes_max=record_bytes_max)


def check_name(name: str, bytes_max: int) -> None:
    """Refuse a name of a group, member, consumer or writer that is empty, too long or no UTF-8. Raises Invalid(INVALID_NAME)."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise Invalid(ErrorCode.INVALID_NAME, f"name is not valid text name={name!a}") from None
    if not 1 <= size <= bytes_max:
        raise Invalid(ErrorCode.INVALID_NAME, f"name must have 1 to {bytes_max} bytes got={size}")
