"""What every client offers, whatever wire it speaks.

Promises: one vocabulary for all wires; what a wire cannot do is declared in ``abilities`` and refused before anything is sent.
Must not know: any one wire's bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from polywire.records.columns import Record
from polywire.types import Assignor, Level


class Ability(Enum):
    """What a wire can carry or do, in words for people; the behaviour suite picks its scenarios by these."""

    NULL_VALUES = "a record without a value is told from one with an empty value"
    EMPTY_VALUES = "a value may be empty"
    NULL_KEYS = "a record without a key is told from one with an empty key"
    KEYS_READ = "keys come back when reading"
    HEADERS = "typed headers are written and read"
    IDS = "ids of 16 bytes are written and read"
    ORIGIN_TIMES = "times of origin are written and read"
    BINARY_VALUES = "values hold any bytes"
    WHITE_SPACE_VALUES = "values hold blanks and tabs"
    SAME_HASH = "keys go where the wires that hash them with FNV-1a put them"
    CHOOSE_PARTITION = "the writer may choose the partition"
    CREATE_TOPIC = "topics are created with a number of partitions"
    DELETE_TOPIC = "topics are deleted"
    BOUNDS = "first and next offset of a partition are told"
    OFFSET_BY_TIME = "the first offset at or after a time is told"
    GROUPS = "members of a group share the partitions of a topic"
    GENERATIONS = "a group's changes are numbered, and commits under an old number are refused"
    POSITIONS = "positions of groups are stored and told"
    LONG_POLL = "a read waits for the next record"
    IDEMPOTENCE = "a producer that repeats a batch stores it once"
    STAGING = "records are staged, then published together exactly once"
    LEVELS = "each request says what its acknowledgement means"


@dataclass(frozen=True, slots=True)
class PartitionBounds:
    """Where a partition begins and ends. ``next`` is exclusive."""

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


class Client(Protocol):
    """An asynchronous client of one broker over one wire. Methods raise the kinds of ``polywire.errors``."""

    @property
    def abilities(self) -> frozenset[Ability]:
        """What this wire can do."""

    async def close(self) -> None:
        """Close the connection; pending calls fail with Unavailable."""

    async def create_topic(self, topic: str, partition_count: int) -> None: ...

    async def delete_topic(self, topic: str) -> None: ...

    async def topics(self) -> list[TopicInfo]: ...

    async def bounds(self, topic: str) -> list[PartitionBounds]: ...

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int: ...

    async def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records in order; without a partition the wire's own key function chooses. Answers in the records' order."""

    async def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = 10_000, wait_ms: int = 0
    ) -> list[Record]:
        """Records from ``offset`` on; waits up to ``wait_ms`` for the first one where the wire can."""

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership: ...

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Stay a member. Raises Conflict(GENERATION_STALE) when the group has changed: join again."""

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None: ...

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Store the next offset to read; with a member and generation it is fenced."""

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """The group's next offset to read, None when it never committed (0 where the wire cannot tell)."""
