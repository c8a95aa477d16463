"""Descriptions of groups, for members and for lists (concepts: groups#what-a-group-is)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from polywire.types import Assignor


@dataclass(frozen=True, slots=True)
class Membership:
    """A member's assignment: the generation of the group, and the member's partitions, ascending."""

    generation: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as shown in lists; ``idle_s`` is the time since its last heartbeat or the broker's start."""

    id: str
    wire: str
    idle_s: float
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group as shown in lists; ``changed_at_us`` is None if it has not changed since the broker's start."""

    topic: str
    name: str
    generation: int
    assignor: Assignor
    members: tuple[MemberView, ...]
    partition_count: int = 0
    changed_at_us: int | None = None


@dataclass(frozen=True, slots=True)
class ConsumerView:
    """A member of a group with consumers of Kafka's newer protocol, as shown in lists.

    reading: the partitions it reads now, by topic's full name. target: the partitions of its share. topics, pattern:
    its subscription.
    """

    id: str
    client_id: str
    client_host: str
    reading: Mapping[str, Collection[int]]
    target: Mapping[str, Collection[int]]
    instance_id: str | None = None
    rack_id: str | None = None
    epoch: int = 0
    topics: Collection[str] = ()
    pattern: str = ""
    is_consumer: bool = True


@dataclass(frozen=True, slots=True)
class ConsumerGroupView:
    """A group of Kafka's newer protocol with its members of all protocols.

    It may have no member of that protocol left.
    """

    name: str
    epoch: int
    assignor: Assignor
    is_settled: bool
    members: tuple[ConsumerView, ...]
    has_consumers: bool = True
