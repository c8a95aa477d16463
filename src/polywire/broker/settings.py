"""All limits of the broker, with defaults, units and reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Literal, TypeAlias

import msgspec

from polywire.broker.client_quotas import Quota
from polywire.errors import ErrorCode, Invalid
from polywire.records.columns import BATCH_BYTES_MAX, RECORD_BYTES_MAX
from polywire.records.compression import Compression as StoredCompression
from polywire.table_columns import parse_columns
from polywire.types import DEFAULT_PARTITION_COUNT, PARTITION_COUNT_MAX, KeyHash, Level

KEEP: Final = 0  # a retention limit of 0 retains records forever
SECOND_US: Final = 1_000_000
HOUR_US: Final = 3600 * SECOND_US
DAY_US: Final = 24 * HOUR_US
MEBI: Final = 1024 * 1024
WIRE_OPTIONS_BYTES_MAX: Final = 512 * 1024  # options of one topic: Iggy stores the names of up to 1,000 groups there
RECORD_ROOM_BYTES: Final = 4096  # maximum size of a batch with one record, apart from its key and value


class Compression(Enum):
    """Compression of a topic's batches."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"


class TableFormat(Enum):
    """Formats of a topic's table. The Delta log always exists, because its commits decide which rows the table has."""

    NONE = "none"
    DELTA = "delta"
    DELTA_AND_ICEBERG = "delta,iceberg"


TableFormats: TypeAlias = Literal["none", "delta", "delta,iceberg"]
"""The values of ``TableFormat``, as users write them."""


class TopicSetting(msgspec.Struct, frozen=True):
    """One setting of a topic, the same for every protocol, command and file.

    Attributes:
        kind: int, bool, str, or an enumeration whose values are the words that a user writes.
        default: the value for a new topic; None leaves the choice to the broker's settings or to each protocol.
        meaning: short text for help and reference.
        allowed: range of numbers, None for other kinds.
        is_fixed: whether it cannot be changed once the topic exists.
        check: raises Invalid for an invalid text; None for other kinds.
        form: description of the allowed texts, for the reference page.
    """

    kind: type[int] | type[str] | type[Enum]
    default: object
    meaning: str
    allowed: range | None = None
    is_fixed: bool = False
    check: Callable[[str], object] | None = None
    form: str = ""

    @property
    def spelled(self) -> str:
        """The allowed values, as text for messages and the reference page."""
        if self.allowed is not None:
            return f"{self.allowed.start} to {self.allowed.stop - 1}"
        if self.form:
            return self.form
        return "0 or 1" if self.kind is bool else ", ".join(member.value for member in self._members)

    @property
    def choices(self) -> list[object] | None:
        """The allowed values if they can be listed, otherwise None."""
        if self.kind is bool:
            return [False, True]
        return [member.value for member in self._members] or None

    @property
    def _members(self) -> list[Enum]:
        return list(self.kind) if issubclass(self.kind, Enum) else []

    def read(self, name: str, value: int | str | None) -> object:
        """Convert a client's value into a value of ``TopicSettings``. None is converted to the default.

        Raises Invalid(INVALID_REQUEST).
        """
        if value is None:
            return self.default
        if self.check is not None:
            if isinstance(value, str):
                self.check(value)
                return value
        elif issubclass(self.kind, Enum):
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
        """Convert a value of ``TopicSettings`` for JSON."""
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
        range(2**62 + 1),  # the result fits into 64 bits when it is added to a time
    ),
    "retention_bytes": TopicSetting(
        int,
        None,
        "size in bytes above which a partition drops its oldest records; 0 for no limit, by default the broker's setting",
        range(2**62 + 1),
    ),
    "table": TopicSetting(
        TableFormat,
        None,
        "formats of the table that the broker writes from the topic's records; by default the broker's setting",
    ),
    "table_columns": TopicSetting(
        str,
        "",
        'columns that the table gets from fields of JSON values: "infer", or names and types, such as "id long, total double"; '
        "by default none",
        check=parse_columns,
        form="text",
    ),
    "table_freshness_s": TopicSetting(
        int,
        None,
        "maximum seconds until a record is in the table; by default the broker's setting",
        range(1, 86_401),
    ),
    "table_history_hours": TopicSetting(
        int,
        None,
        "hours for which older versions of the table can be read; by default the broker's setting",
        range(8_761),
    ),
}
"""Settings of a topic that any protocol, command or file may set. Protocols map their own names to these if the meaning
is the same.
"""
TOPIC_RANGES: Final[Mapping[str, range]] = {
    name: setting.allowed for name, setting in TOPIC_SETTINGS.items() if setting.allowed is not None
}
RETENTION_HOURS_MAX: Final = (TOPIC_RANGES["retention_age_us"].stop - 1) // HOUR_US
RETENTION_MIB_MAX: Final = (TOPIC_RANGES["retention_bytes"].stop - 1) // MEBI


class Listed(Enum):
    """The two parts of a topic's access list: readers and writers."""

    READERS = "readers"
    WRITERS = "writers"


ANYBODY: Final = "*"  # on an access list: everyone, logged in or not


class AccessList(msgspec.Struct, frozen=True):
    """Which users may read a topic, and which may write to it, over any protocol.

    Each list has user names, or ``*`` for everyone. None means no restriction. A listed user also needs the permission.
    """

    readers: tuple[str, ...] | None = None
    writers: tuple[str, ...] | None = None

    def admits(self, side: Listed, name: str | None) -> bool:
        """Return whether a user may read (or write) the topic. The name None stands for an unauthenticated client."""
        names = self.readers if side is Listed.READERS else self.writers
        return names is None or ANYBODY in names or name in names


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """Settings of one topic, stored as the client sent them, because clients read them back.

    Attributes:
        replication_factor: stored for clients only; one broker stores one copy.
        key_hash: hash function for all protocols, so that equal keys get the same partition (concepts:
            records#keys-and-partitions); None lets each protocol use its own.
        retention_age_us: age limit of each partition's records; None uses the broker's default, 0 retains records
            forever.
        retention_bytes: size limit of each partition, with the same special values.
        compaction: retain only the newest record of each key.
        compression: compression of batches when they move from the journal to segments.
        table: formats of the topic's table (concepts: tables); None uses the broker's default.
        table_columns: typed columns of the table (concepts: tables#typed-columns); empty for none.
        table_freshness_s: maximum seconds until a record is in the table; None uses the broker's default.
        table_history_hours: hours for which older versions of the table can be read; None uses the broker's default.
        idempotent: check producers' sequences even if a request does not ask for it.
        event_sourcing: records are events of aggregates, one aggregate per key; such topics cannot grow.
        wire_options: options of single protocols (ids, policies), by protocol; the broker does not interpret them.
        access: access list for all protocols; None means no restriction.
        link: name of the link that writes the topic. While it is set, no other client may write to it (concepts:
            links).
    """

    replication_factor: int = 1
    key_hash: KeyHash | None = None
    retention_age_us: int | None = None
    retention_bytes: int | None = None
    compaction: bool = False
    compression: Compression = Compression.NONE
    table: TableFormat | None = None
    table_columns: str = ""
    table_freshness_s: int | None = None
    table_history_hours: int | None = None
    idempotent: bool = False
    event_sourcing: bool = False
    wire_options: Mapping[str, bytes] = field(default_factory=dict)
    access: AccessList | None = None
    link: str = ""

    @property
    def stored_compression(self) -> StoredCompression | None:
        """The compression of the topic's batches in segment files, or None if they are stored uncompressed."""
        return None if self.compression is Compression.NONE else StoredCompression(self.compression.value)

    @property
    def size(self) -> int:
        """The size of the protocols' options in bytes."""
        return sum([len(value) for value in self.wire_options.values()])

    def check(self) -> None:
        """Raise Invalid(INVALID_REQUEST) for values out of range."""
        if self.size > WIRE_OPTIONS_BYTES_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"protocol options of the topic are too large bytes={self.size} limit={WIRE_OPTIONS_BYTES_MAX}",
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

    auto_create: create missing topics when a client produces to them or reads them.
    partition_count: partitions of a topic that is created without a partition count.
    partition_count_max: partitions of one topic.
    topics_max: topics of the broker.
    partitions_max: partitions of the broker; one costs about 2 KiB of memory.
    batch_bytes_max: size of a batch, which must fit one journal write; small journal files lower it.
    record_bytes_max: key and value of one record; the largest payload that a protocol documents is 10 MB (Iggy). Small
        journal files lower it.
    durability: minimum level of every acknowledgement. With SYNCED, consumers see synced records only.
    retention_age_us: retention time of topics without their own setting; 0 retains records forever.
    retention_bytes: retention size of each partition of topics without their own setting; 0 for no limit.
    tombstone_age_us: how long compaction retains a null value, so that consumers learn of the deletion.
    tables_url: URL below which tables are written; empty if the broker writes none.
    table: formats of the tables of topics without their own setting.
    table_freshness_s: freshness of tables of topics without their own setting.
    table_history_hours: history of tables of topics without their own setting.
    retention_interval_s: interval at which retention runs.
    retention_partitions_max: partitions checked per run, so that a run takes at most two milliseconds.
    member_timeout_s: a group member without a heartbeat for this long is removed.
    groups_max: groups of the broker.
    members_max: members of one group.
    members_total_max: members of all groups, about 700 bytes each.
    group_bytes_max: metadata and assignments of one classic group together; its leader receives them in one response.
    session_timeout_min_s: shortest session timeout that a member of a classic group may choose.
    session_timeout_max_s: longest session timeout that a member of a classic group may choose.
    consumer_session_timeout_s: session timeout of members of consumer groups.
    group_expiry_us: age at which a group without members and offsets is deleted, unless it was created explicitly.
    positions_expiry_us: age at which unused offsets of a group without members are deleted; 0 never deletes them.
    expiry_interval_s: interval at which the broker searches for expired state.
    expiry_count_max: objects checked per search.
    expiry_grace_s: no offsets expire for this long after a start, because reads of offsets are not stored.
    name_bytes_max: length of the name of a group, member, consumer or writer.
    positions_max: committed offsets, about 150 bytes each.
    position_owners_max: consumers and groups with offsets, counted per topic, about 700 bytes each.
    position_metadata_bytes_max: metadata of one committed offset.
    stage_expiry_us: age at which batches that were stored for a publish, but not published, are deleted; a Spark batch
        that takes longer is repeated.
    staged_bytes_max: bytes of batches that are stored for a publish and not published yet.
    producers_max: pairs of partition and idempotent producer, about 500 bytes each. Above it, the producer that was
        idle for longest is forgotten.
    producer_expiry_us: time after which an idle producer is forgotten; longer than any client retries.
    producer_window: latest batches per producer whose offsets are remembered, as many as clients keep in flight.
    writers_max: writers with a remembered sequence number. A forgotten writer could publish twice, so at the limit new
        writers are rejected.
    writer_expiry_us: time after which an unused writer is forgotten; a Spark query is seldom stopped for so long.
    writer_step_max: how far a sequence number may be above the last one of its writer. After a jump to the highest
        number, no numbers would remain.
    bulk_share: share of topics, partitions, aggregates, events, snapshot bytes and unpublished bytes that one user or
        address may use.
    owner_share: share of every other limit on state that one user, or one address without a user, may use.
    state_bytes_max: memory for groups, offsets, writers, transactional ids, aggregates and protocol state, estimated.
    reserved_count: objects of each kind that every user may have even if others have used up the limits.
    reserved_bytes: bytes of state that every user may have even if others have used up the limits.
    aggregates_max: aggregates, about 300 bytes each.
    events_max: events with remembered offsets, 8 to 16 bytes each.
    aggregate_key_bytes_max: key of an aggregate.
    aggregate_snapshot_bytes_max: snapshot of one aggregate; snapshots are in memory.
    aggregate_snapshots_bytes_max: snapshots of all aggregates.
    transactional_ids_max: remembered transactional ids, about 500 bytes each. At the limit new ids are rejected,
        because forgetting an id would unfence an old producer.
    transactional_id_expiry_us: time after which an unused transactional id is forgotten.
    transaction_batches_max: batches of one transaction; records, if the protocol stages them one by one.
    transaction_partitions_max: partitions that transactions of one epoch write to.
    transaction_positions_max: offsets that one transaction commits.
    transaction_scopes_max: pairs of group and topic for which one transaction commits offsets.
    wire_state_bytes_max: size of one value of a protocol's own state.
    wire_state_keys_max: keys of one protocol's own state.
    quotas: quotas of users and client ids that were not changed at run time.
    users_max: users of the broker.
    tokens_max: access tokens of one user.
    logins_waiting_max: logins that wait for their password to be hashed, about 40 ms each. If more wait, logins of the
        address with the most waiting logins get ``busy`` first.
    logins_cached_max: verified logins that are remembered, so that the same password need not be hashed again.
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
    tables_url: str = ""
    table: TableFormat = TableFormat.NONE
    table_freshness_s: int = 60
    table_history_hours: int = 168
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
    quotas: tuple[Quota, ...] = ()
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
            raise Invalid(ErrorCode.INVALID_REQUEST, "durability is invalid (use written or synced)")
        if not 0 < self.owner_share <= 1 or self.state_bytes_max < 1:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "owner share must be above 0 and at most 1, and state_bytes_max above 0"
                f" share={self.owner_share} bytes={self.state_bytes_max}",
            )
        if not 1 <= self.batch_bytes_max <= BATCH_BYTES_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"batch_bytes_max must be from 1 to {BATCH_BYTES_MAX} value={self.batch_bytes_max}",
            )

    def within(self, batch_bytes_max: int) -> BrokerSettings:
        """Return these settings with the limits of batches and records lowered to what the log can store."""
        if batch_bytes_max >= self.batch_bytes_max:
            return self
        record_bytes_max = min(self.record_bytes_max, batch_bytes_max - RECORD_ROOM_BYTES)
        return replace(self, batch_bytes_max=batch_bytes_max, record_bytes_max=record_bytes_max)


def check_name(name: str, bytes_max: int) -> None:
    """Raise Invalid(INVALID_NAME) if the name of a group, member or writer is empty, too long or not UTF-8."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise Invalid(ErrorCode.INVALID_NAME, f"name is not valid text name={name!a}") from None
    if not 1 <= size <= bytes_max:
        raise Invalid(ErrorCode.INVALID_NAME, f"name must have 1 to {bytes_max} bytes got={size}")
