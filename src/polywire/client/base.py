"""What every client offers, whatever wire it speaks.

Promises: one vocabulary for all wires; what a wire cannot do is declared in ``abilities`` and refused before anything is sent.
Must not know: any one wire's bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from polywire.records.columns import Record
from polywire.types import Assignor, Level


class Ability(Enum):
    """A feature that a protocol may have. The value is its description; the behaviour suite selects scenarios by these."""

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
    IDEMPOTENCE = "idempotent producers"
    STAGING = "staged writes, published atomically"
    LEVELS = "acknowledgement level per request"


@dataclass(frozen=True, slots=True)
class PartitionBounds:
    """Where a partition begins and ends, in offsets: ``first_offset`` inclusive, ``next_offset`` exclusive.

    incarnation: which life of the partition, another one after its topic was deleted and made again. epoch: which start of the broker the
    bounds were told in. Both are 0 on wires that do not tell them.
    """

    partition: int
    incarnation: int
    epoch: int
    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as clients see it; ``name`` is the full name, ``id`` 16 bytes or empty where the wire has none."""

    name: str
    id: bytes
    partition_count: int

    @property
    def partitions(self) -> int:
        """How many partitions the topic has."""
        return self.partition_count


def renamed(partitions: int, partition_count: int | None) -> int:
    """Return the number of partitions, given under its name or its former one, which is deprecated."""
    if partition_count is None:
        return partitions
    warnings.warn("partition_count is deprecated: use partitions", DeprecationWarning, stacklevel=3)
    return partition_count


@dataclass(frozen=True, slots=True)
class Produced:
    """Where a record went."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Membership:
    """A member's place in a group."""

    generation: int
    partitions: tuple[int, ...]


class TopicClient(Protocol):
    """Topics over one wire, and where their partitions begin and end."""

    async def create_topic(self, topic: str, partition_count: int) -> None:
        """Make a topic.

        Args:
            topic: full name, any text without control characters; the first dot ends the stream. Stream and topic have 1 to 255 bytes each.
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
        """Return the topics this peer may see, by name."""

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Return where each partition of a topic begins and ends, by number.

        Args:
            topic: full name.

        Raises:
            Missing: TOPIC_MISSING.
        """

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Return the first offset whose record was appended at a time or after it; the next offset where there is none.

        Args:
            topic: full name.
            partition: its number, from 0.
            time_us: microseconds since 1970.

        Raises:
            Missing: TOPIC_MISSING.
        """


class RecordClient(Protocol):
    """Records over one wire: written and read."""

    async def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records in order, and return where each went, in their order.

        Args:
            topic: full name.
            records: what to append; offset and append time are the broker's to give.
            partition: where all of them go; None: the wire's own function of the key chooses for each.
            level: what the acknowledgement means: MEMORY, WRITTEN (survives the broker) or SYNCED (survives a power loss).

        Raises:
            Invalid: RECORD_TOO_LARGE, or a record holds what the wire cannot carry.
            Missing: PARTITION_MISSING.
            Busy: over a limit, or the disk is full; nothing of the refused request was stored.
            Unavailable: the connection was lost; nobody knows what was stored.
        """

    async def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = 10_000, wait_ms: int = 0
    ) -> list[Record]:
        """Return records from an offset on, in order; none where nothing can be read yet.

        Args:
            topic: full name.
            partition: its number, from 0.
            offset: of the first record wanted; compaction may have left only later ones.
            records_max: most records to return; the default is what the wire hands out at once. Fewer may come although there are more: ask
                again behind the last one.
            wait_ms: how long to wait, in milliseconds, for the first record, where the wire can (``Ability.LONG_POLL``).

        Raises:
            Missing: TOPIC_MISSING, PARTITION_MISSING, or OFFSET_OUT_OF_RANGE: below the first offset or above the next one.
            Corrupt: stored bytes are damaged; the message tells the ``next_offset`` to go on at.
        """


class GroupClient(Protocol):
    """Groups over one wire: their members and their positions."""

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Become a member of a group that shares a topic's partitions, or come back as the same one.

        Args:
            group: the group's name.
            topic: full name.
            member: a name of the caller's choosing, another one for each member.
            assignor: how the group's partitions are dealt out from now on; None: as before, round robin at first.

        Raises:
            Busy: the group has as many members as it may have.
        """

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Stay a member, and return one's place. Members not heard of for ten seconds are dropped.

        Args:
            group: the group's name.
            topic: full name.
            member: the name given to ``join``.
            generation: as the last ``join`` returned it.

        Raises:
            Conflict: GENERATION_STALE: the group has changed, join again.
            Missing: GROUP_MISSING, MEMBER_MISSING: join again.
        """

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Give up one's place in a group; others get its partitions.

        Args:
            group: the group's name.
            topic: full name.
            member: the name given to ``join``.
            generation: as the last ``join`` returned it.

        Raises:
            Conflict: GENERATION_STALE.
            Missing: GROUP_MISSING, MEMBER_MISSING.
        """

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Store a group's position: the next offset to read. It may go back.

        Args:
            group: the group's name.
            topic: full name.
            partition: its number, from 0.
            offset: one more than the offset of the last record that needs not be read again.
            member: who commits; then a commit from before the group's last change is refused. Empty: nothing is checked.
            generation: of that member, as the last ``join`` returned it.

        Raises:
            Conflict: GENERATION_STALE, PARTITION_NOT_ASSIGNED.
            Missing: GROUP_MISSING, MEMBER_MISSING.
        """

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return a group's next offset to read, None when it never committed (0 where the wire cannot tell).

        Args:
            group: the group's name.
            topic: full name.
            partition: its number, from 0.
        """


class WireClient(TopicClient, RecordClient, GroupClient, Protocol):
    """An asynchronous client of one broker over one wire; ``client.connect.connect`` makes one.

    Applications use ``polywire.Client``, which outlives a connection.

    Methods raise the kinds of ``polywire.errors``: Unavailable when the connection is lost (nobody knows then whether what was asked was
    done), Denied without the permission, Invalid(INVALID_REQUEST), before anything is sent, for what the wire cannot do (``abilities``).

    Example:
        client = await connect("127.0.0.1:9555")
        [place] = await client.produce("orders", [Record(b"hello", key=b"a")])
        [record] = await client.fetch("orders", place.partition, place.offset, records_max=1)
    """

    @property
    def abilities(self) -> frozenset[Ability]:
        """What this wire can do."""

    async def close(self) -> None:
        """Close the connection; pending calls fail with Unavailable. Calling it again does nothing."""
