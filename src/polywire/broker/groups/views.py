"""Groups as members and lists see them (concepts: groups#what-a-group-is).

Promises: values. Must not know: how they come about.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from polywire.types import Assignor


@dataclass(frozen=True, slots=True)
class Membership:
    """A member's place: the group's generation and the member's partitions, ascending."""

    generation: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as lists show it; ``idle_s`` is the time since it was last seen, or since the broker started."""

    id: str
    wire: str
    idle_s: float
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group as lists show it; ``changed_at_us`` is when it last changed since the broker started, None when it did not."""

    topic: str
    name: str
    generation: int
    assignor: Assignor
    members: tuple[MemberView, ...]
    partition_count: int = 0
    changed_at_us: int | None = None


@dataclass(frozen=True, slots=True)
class ConsumerView:
    """A member of a group that has consumers, as lists show it. reading: partitions by topic's full name. target: what it should read.
    topics, pattern: how it says what it reads."""

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
    """A group of Kafka's newer protocol, with its members on all wires; its consumers may all be gone."""

    name: str
    epoch: int
    assignor: Assignor
    is_settled: bool
    members: tuple[ConsumerView, ...]
    has_consumers: bool = True
