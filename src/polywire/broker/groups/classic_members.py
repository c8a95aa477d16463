"""Requests, responses and state of members of classic groups (concepts: groups#classic-groups).

This module does not interpret the metadata of members.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Final, NamedTuple, Protocol

import msgspec

from polywire.errors import BrokerError

NUMBER_BYTES: Final = 36  # bytes of memory for each partition number that a member keeps while it rejoins
NEW_MEMBER_S: Final = 300.0  # longest time that a new member waits in a rebalance, because its client may be gone


class Limits(msgspec.Struct, frozen=True):
    """Limits of one group.

    Attributes:
        members_max: number of members, including ids assigned to new members.
        bytes_max: total size of the metadata and assignments of all members.
    """

    members_max: int
    bytes_max: int


class Writing(Protocol):
    """Encodes the assignments of one protocol's members."""

    def encode(self, partitions: Mapping[str, Collection[int]]) -> bytes:
        """Encode an assignment, which is given as partitions by full name of the topic."""

    def decode(self, assignment: bytes) -> Mapping[str, Collection[int]]:
        """Decode the partitions of an assignment. An invalid assignment has none."""


class Join(msgspec.Struct, frozen=True):
    """A JoinGroup request.

    Attributes:
        member_id: empty for a new member.
        instance_id: id of a static member, which remains a member while it is disconnected.
        protocols: the member's metadata by assignment protocol, in order of preference.
        topics: full names of the topics it subscribes to, if known.
        id_first: whether a new dynamic member gets an id first and must join again with it, so that a retry does not
            add a second member.
        may_skip: whether a leader that rejoins a stable group may skip the assignment.
        writing: encodes the member's assignment. None if the broker does not know the format.
        kept: partitions, by full name of the topic, that the member still owns while it rejoins.
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
    kept: Mapping[str, Collection[int]] = msgspec.field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of bytes that a group stores for the member."""
        names = len(self.client_id) + len(self.client_host) + len(self.instance_id or "") + sum(map(len, self.topics))
        kept = NUMBER_BYTES * sum(map(len, self.kept.values()))
        return names + kept + sum(len(name) + len(metadata) for name, metadata in self.protocols)


class MemberView(msgspec.Struct, frozen=True):
    """A member as shown to clients.

    Attributes:
        metadata: its metadata for the assignment protocol in use.
        assignment: its encoded assignment.
    """

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


class IdGiven(msgspec.Struct, frozen=True):
    """The response to a first JoinGroup request: the client must join again with this id."""

    member_id: str


class Joined(msgspec.Struct, frozen=True):
    """The response to a JoinGroup request: a generation has begun, or continues.

    Attributes:
        member_id: member to which the response is sent.
        members: all members, only for the leader.
        skip_assignment: whether the assignments stay the same, so that the leader must not assign.
    """

    member_id: str
    generation: int
    protocol_type: str
    protocol: str
    leader: str
    members: tuple[MemberView, ...] = ()
    skip_assignment: bool = False


class Synced(msgspec.Struct, frozen=True):
    """The response to a SyncGroup request: the member's assignment."""

    protocol_type: str
    protocol: str
    assignment: bytes


class WaitingCall(Enum):
    JOIN = "join"
    SYNC = "sync"


class Answer(NamedTuple):
    """The response to a waiting request of a member."""

    member_id: str
    call: WaitingCall
    answer: IdGiven | Joined | Synced | BrokerError


class Member(msgspec.Struct):
    """A member of a classic group.

    Attributes:
        heard_at: time of its last request. While one of its requests waits, its session does not time out.
        is_new: whether its first generation has not begun yet. A new member waits at most ``NEW_MEMBER_S``.
    """

    id: str
    join: Join
    heard_at: float
    assignment: bytes = b""
    is_new: bool = True
    is_joining: bool = False
    is_syncing: bool = False
    has_synced: bool = False
    metadata: dict[str, bytes] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metadata = dict(self.join.protocols)

    @property
    def membership_id(self) -> str:
        """The id under which the member joins when the broker assigns the partitions."""
        return self.join.instance_id or self.id

    @property
    def reading(self) -> Mapping[str, Collection[int]]:
        """Partitions that the member reads: those in its assignment or, while it rejoins, those that it has reported."""
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
        """Time at which the session times out unless another request arrives."""
        if self.is_joining:
            return self.heard_at + NEW_MEMBER_S if self.is_new else math.inf
        return math.inf if self.is_syncing else self.heard_at + self.join.session_timeout_s
