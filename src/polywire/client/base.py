"""The interface that the clients of all protocols share.

A client's ``abilities`` list the operations that its protocol supports. It rejects calls of other operations without
sending anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from polywire.errors import BrokerError
from polywire.records.columns import Record
from polywire.types import Assignor, Level

TURNS_MS: Final = 100  # how long a request waits for the long polls of all partitions
TURN_MS_MIN: Final = 10


class Ability(Enum):
    """A feature that a protocol may have. The value is its description.

    Behaviour tests run a scenario only over protocols that have the features it needs.
    """

    NULL_VALUES = "distinguishes null and empty values"
    EMPTY_VALUES = "empty values"
    NULL_KEYS = "distinguishes null and empty keys"
    KEYS_READ = "keys can be read"
    HEADERS = "typed headers"
    IDS = "record ids (16 bytes)"
    ORIGIN_TIMES = "timestamps of origin"
    BINARY_VALUES = "binary values"
    WHITE_SPACE_VALUES = "white space in values"
    SAME_HASH = "partitions keys by FNV-1a"
    CHOOSE_PARTITION = "writers can choose the partition"
    CREATE_TOPIC = "create topics with a partition count"
    DELETE_TOPIC = "delete topics"
    BOUNDS = "first and next offset of a partition"
    OFFSET_BY_TIME = "offset lookup by time"
    GROUPS = "consumer groups"
    GENERATIONS = "commits fenced by generation"
    AT_ONCE = "immediate rebalance, without waiting for the previous owner"
    POSITIONS = "committed offsets"
    LONG_POLL = "long polling"
    CONCURRENT_POLLS = "several long polls at the same time"
    IDEMPOTENCE = "idempotent producers"
    STAGING = "staged writes, published atomically"
    LEVELS = "acknowledgement level per request"
    QUEUES = "work queues"


def fetch_wait_ms(abilities: Collection[Ability], partition_count: int, longest_ms: int) -> int:
    """Return how long a fetch should wait for records if each of several partitions is fetched.

    It is 0 if the protocol has no long polls; the caller then pauses between fetches. If responses have the order of the
    requests, all other requests of the connection wait for a long poll, so it is short.
    """
    if Ability.LONG_POLL not in abilities:
        return 0
    if Ability.CONCURRENT_POLLS in abilities:
        return longest_ms
    return min(max(TURNS_MS // max(partition_count, 1), TURN_MS_MIN), longest_ms)


@dataclass(frozen=True, slots=True)
class PartitionBounds:
    """The offsets of a partition.

    Attributes:
        partition: number of the partition.
        first_offset: offset of the first record.
        next_offset: offset of the next record.
        incarnation: id of the partition. A topic that is deleted and created again gets new ones; 0 if the protocol
            does not report it.
        epoch: number of the broker's start during which the offsets were reported; 0 if the protocol does not report
            it.
    """

    partition: int
    incarnation: int
    epoch: int
    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic.

    Attributes:
        name: full name.
        id: 16 bytes, or empty if the protocol has none.
        link: name of the link that writes the topic. Only the ``polywire`` protocol has it.
    """

    name: str
    id: bytes
    partition_count: int
    link: str = ""

    @property
    def partitions(self) -> int:
        """The number of partitions."""
        return self.partition_count


def renamed(partitions: int, partition_count: int | None) -> int:
    """Return the number of partitions. Warn if the caller used the deprecated name ``partition_count``."""
    if partition_count is None:
        return partitions
    warnings.warn("partition_count is deprecated: use partitions", DeprecationWarning, stacklevel=3)
    return partition_count


@dataclass(frozen=True, slots=True)
class Produced:
    """The partition and offset at which a record was stored."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Membership:
    """The generation of a group, and the partitions assigned to one member."""

    generation: int
    partitions: tuple[int, ...]


class TopicClient(Protocol):
    """Operations on topics, over one protocol."""

    async def create_topic(self, topic: str, partition_count: int) -> None:
        """Create a topic.

        Args:
            topic: full name, without control characters. The part before the first dot is the stream. Stream and topic
                have 1 to 255 bytes each.
            partition_count: 1 or more.

        Raises:
            Conflict: TOPIC_EXISTS.
            Invalid: INVALID_TOPIC, INVALID_PARTITION_COUNT.
        """

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records.

        Args:
            topic: full name.

        Raises:
            Missing: TOPIC_MISSING.
        """

    async def topics(self) -> list[TopicInfo]:
        """Return the topics that this user may see, in order of their names."""

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Return the first and next offset of each partition, in order of their numbers.

        Args:
            topic: full name.

        Raises:
            Missing: TOPIC_MISSING.
        """

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Return the offset of the first record that was appended at or after a time, or the next offset if there is none.

        Args:
            topic: full name.
            partition: number of the partition, from 0.
            time_us: microseconds since 1970.

        Raises:
            Missing: TOPIC_MISSING.
        """


class RecordClient(Protocol):
    """Operations on records, over one protocol."""

    async def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records in order, and return the partition and offset of each.

        Args:
            topic: full name.
            records: records to append; the broker sets offset and append time.
            partition: partition for all records. With None, the key of each record selects its partition, by the
                protocol's hash.
            level: durability of the acknowledgement: MEMORY, WRITTEN (survives a crash of the broker) or SYNCED
                (survives power loss).

        Raises:
            Invalid: RECORD_TOO_LARGE, or a record has content that the protocol does not support.
            Missing: PARTITION_MISSING.
            Busy: a limit is reached or the disk is full; nothing was stored.
            Unavailable: the connection was lost; some or all records may be stored.
        """

    async def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = 10_000, wait_ms: int = 0
    ) -> list[Record]:
        """Return records from an offset on, in order. Return an empty list if there are none yet.

        Args:
            topic: full name.
            partition: number of the partition, from 0.
            offset: offset of the first record. If compaction removed that record, the next later one is returned first.
            records_max: maximum number of records. The result can have fewer records although there are more: fetch
                again after the last one.
            wait_ms: milliseconds to wait for the first record, if the protocol supports it (``Ability.LONG_POLL``).

        Raises:
            Missing: TOPIC_MISSING or PARTITION_MISSING, or OFFSET_OUT_OF_RANGE if the offset is below the first or
                above the next offset.
            Corrupt: stored data is damaged. To skip it, continue at the ``next_offset`` in the message.
        """


class GroupClient(Protocol):
    """Operations on consumer groups, over one protocol."""

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Join a group that shares the partitions of a topic, or rejoin it as the same member.

        Args:
            group: name of the group.
            topic: full name.
            member: unique name of the member.
            assignor: how the group assigns partitions from now on. None does not change it; a new group uses round
                robin.

        Raises:
            Busy: the group has the maximum number of members.
        """

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Send a heartbeat and return the assignment. The broker removes members after ten seconds of silence.

        Args:
            group: name of the group.
            topic: full name.
            member: name passed to ``join``.
            generation: generation returned by the last ``join``.

        Raises:
            Conflict: GENERATION_STALE: the group has changed, join again.
            Missing: GROUP_MISSING, MEMBER_MISSING: join again.
        """

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Leave a group. The other members get this member's partitions.

        Args:
            group: name of the group.
            topic: full name.
            member: name passed to ``join``.
            generation: generation returned by the last ``join``.

        Raises:
            Conflict: GENERATION_STALE.
            Missing: GROUP_MISSING, MEMBER_MISSING.
        """

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Commit an offset of a group: the next offset to read. It may be lower than before.

        Args:
            group: name of the group.
            topic: full name.
            partition: number of the partition, from 0.
            offset: next offset to read.
            member: member that commits. The broker rejects the commit if its generation is stale. If empty, nothing is
                checked.
            generation: generation returned by the last ``join`` of that member.

        Raises:
            Conflict: GENERATION_STALE, PARTITION_NOT_ASSIGNED.
            Missing: GROUP_MISSING, MEMBER_MISSING.
        """

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return the committed offset of a group, or None if nothing was committed.

        Some protocols report 0 instead of None.

        Args:
            group: name of the group.
            topic: full name.
            partition: number of the partition, from 0.
        """


class WireClient(TopicClient, RecordClient, GroupClient, Protocol):
    """An asynchronous client of one broker over one protocol. ``client.connect.connect`` creates one.

    It does not reconnect. Applications use ``polywire.Client``, which does.

    Methods raise the exceptions of ``polywire.errors``:

    * Unavailable if the connection is lost. Whether the request was executed is unknown.
    * Denied if the user lacks the permission.
    * Invalid(INVALID_REQUEST) if the protocol does not support the operation. Nothing is sent.

    Example:
        client = await connect("127.0.0.1:9555")
        [stored] = await client.produce("orders", [Record(b"hello", key=b"a")])
        [record] = await client.fetch("orders", stored.partition, stored.offset, records_max=1)
    """

    @property
    def abilities(self) -> frozenset[Ability]:
        """Features that the protocol supports."""

    @property
    def loss(self) -> BrokerError | None:
        """Why every call fails without sending anything; None while the connection can be used."""

    async def close(self) -> None:
        """Close the connection. Pending calls fail with Unavailable. A second call does nothing."""
