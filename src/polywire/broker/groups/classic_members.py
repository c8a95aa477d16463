"""What members of a classic group say, what they are answered, and what is kept of each (concepts: groups#classic-groups).

Promises: values; a member's bytes are what it wrote, unread. Must not know: the group and its phases, clocks, wires.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

from polywire.errors import BrokerError

NUMBER_BYTES: Final = 36  # of memory, of each partition that a member keeps
NEW_MEMBER_S: Final = 300.0  # how long a rebalance keeps somebody who joined for the first time and may be gone again


@dataclass(frozen=True, slots=True)
class Limits:
    """members_max: of one group, with those that were only given an id. bytes_max: of all that its members wrote and were assigned."""

    members_max: int
    bytes_max: int


class Writing(Protocol):
    """How members write what is assigned, where the broker can do it for them."""

    def encode(self, partitions: Mapping[str, Collection[int]]) -> bytes:
        """An assignment of partitions by topic's full name."""

    def decode(self, assignment: bytes) -> Mapping[str, Collection[int]]:
        """The partitions of an assignment; none where it cannot be read."""


@dataclass(frozen=True, slots=True)
class Join:
    """What somebody says who wants to be a member, or to stay one.

    member_id: empty for who has none yet. instance_id: of a static member, which keeps its place while it is away. protocols: ways to share
    the work that it knows, by preference, each with what it has to say. topics: full names of those it will read, as far as that is known.
    id_first: a dynamic member without an id is given one and has to come back with it, so that nobody becomes a member twice.
    may_skip: as the leader of a group that need not rebalance it can be told so.
    writing: None where only members know what they write. kept: partitions by topic's full name that it goes on reading while it joins.
    """

    member_id: str
    session_timeout_s: float
    rebalance_timeout_s: float
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topics: frozenset[str] = frozenset()
    id_first: bool = True
    may_skip: bool = False
    wire: str = ""
    writing: Writing | None = None
    kept: Mapping[str, Collection[int]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes that a group keeps of it."""
        names = len(self.client_id) + len(self.client_host) + len(self.instance_id or "") + sum(map(len, self.topics))
        kept = NUMBER_BYTES * sum(map(len, self.kept.values()))
        return names + kept + sum(len(name) + len(metadata) for name, metadata in self.protocols)


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as others see it: what it wrote for the protocol in use, and what it was assigned."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class IdGiven:
    """Join again with this id."""

    member_id: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A generation begins, or goes on.

    member_id: whom it is told. members: for its leader only. skip_assignment: the leader is to leave everything as it was.
    """

    member_id: str
    generation: int
    protocol_type: str
    protocol: str
    leader: str
    members: tuple[MemberView, ...] = ()
    skip_assignment: bool = False


@dataclass(frozen=True, slots=True)
class Synced:
    """What the leader assigned to a member."""

    protocol_type: str
    protocol: str
    assignment: bytes


class Asked(Enum):
    """The two things that a member may have to wait for."""

    JOIN = "join"
    SYNC = "sync"


class Answer(NamedTuple):
    """What a member waited for."""

    member_id: str
    asked: Asked
    answer: IdGiven | Joined | Synced | BrokerError


@dataclass(slots=True)
class Member:
    """A member. Invariant: ``heard_at`` counts only while it waits for nothing; ``is_new`` until its first generation."""

    id: str
    join: Join
    heard_at: float
    assignment: bytes = b""
    is_new: bool = True
    is_joining: bool = False
    is_syncing: bool = False
    has_synced: bool = False
    metadata: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metadata = dict(self.join.protocols)

    @property
    def seat(self) -> str:
        """What the coordinator knows it by, where it shares with members of other wires."""
        return self.join.instance_id or self.id

    @property
    def reading(self) -> Mapping[str, Collection[int]]:
        """What it reads now, as far as the broker can read it."""
        if self.is_joining or not self.assignment or self.join.writing is None:
            return self.join.kept
        return self.join.writing.decode(self.assignment)

    @property
    def is_static(self) -> bool:
        return self.join.instance_id is not None

    @property
    def size(self) -> int:
        return len(self.id) + self.join.size + len(self.assignment)

    @property
    def gone_at(self) -> float:
        """When it is no member any more unless it is heard of."""
        if self.is_joining:
            return self.heard_at + NEW_MEMBER_S if self.is_new else math.inf
        return math.inf if self.is_syncing else self.heard_at + self.join.session_timeout_s
