"""The heads of the `polywire` wire's frames as values (docs/protocols/polywire.md §4).

Promises: one msgpack array per struct, elements in the order of the page; elements missing at the end take the page's defaults.
Must not know: frames, sockets, the broker.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

NO_OFFSET: Final = -1
ANY_INCARNATION: Final = 0
ANY_EPOCH: Final = -1
BY_KEY: Final = -1

SettingValue = int | str | None


class Verb(IntEnum):
    """What a frame asks for or answers."""

    HELLO = 1
    PING = 2
    CANCEL = 3
    TOPICS = 16
    CREATE_TOPIC = 17
    DESCRIBE = 18
    GROW_TOPIC = 19
    PURGE_TOPIC = 20
    DELETE_TOPIC = 21
    BOUNDS = 32
    FETCH = 33
    PRODUCE = 34
    STAGE = 35
    PUBLISH = 36
    ABANDON = 37
    COMMIT = 48
    POSITION = 49
    JOIN = 64
    SYNC = 65
    HEARTBEAT = 66
    LEAVE = 67


class Head(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all heads; itself the empty head."""


class Limits(Head, frozen=True):
    """What the broker tells on opening (§3)."""

    broker: str
    frame_bytes_max: int
    batch_bytes_max: int
    answer_bytes_max: int
    requests_max: int
    wait_ms_max: int
    stage_expiry_ms: int


class Cancel(Head, frozen=True):
    correlation: int


class ListTopics(Head, frozen=True):
    internal: bool = False


class TopicEntry(Head, frozen=True):
    name: str
    id: bytes
    partition_count: int


class TopicList(Head, frozen=True):
    topics: list[TopicEntry]


class CreateTopic(Head, frozen=True):
    name: str
    partition_count: int | None = None
    stream: str = "default"
    level: int = 2
    settings: dict[str, SettingValue] = msgspec.field(default_factory=dict)


class Describe(Head, frozen=True):
    name: str


class TopicDescription(Head, frozen=True):
    name: str
    id: bytes
    created_at_us: int
    incarnations: list[int]
    settings: dict[str, SettingValue]


class GrowTopic(Head, frozen=True):
    name: str
    partition_count: int
    level: int = 2


class PurgeTopic(Head, frozen=True):
    name: str
    level: int = 2


class DeleteTopic(Head, frozen=True):
    name: str
    level: int = 2


class AskBounds(Head, frozen=True):
    names: list[str]
    times_us: list[int] = []


class PartitionEntry(Head, frozen=True):
    """Bounds of one partition; ``offsets`` answers the request's times in their order."""

    partition: int
    incarnation: int
    epoch: int
    first_offset: int
    next_offset: int
    offsets: list[int]


class TopicBounds(Head, frozen=True):
    name: str
    id: bytes
    partitions: list[PartitionEntry]


class BoundsList(Head, frozen=True):
    topics: list[TopicBounds]


class Fetch(Head, frozen=True):
    name: str
    partition: int
    offset: int
    offset_end: int = NO_OFFSET
    incarnation: int = ANY_INCARNATION
    epoch: int = ANY_EPOCH
    bytes_max: int = -1
    wait_ms: int = 0


class Fetched(Head, frozen=True):
    next_offset: int
    readable_offset: int


class Produce(Head, frozen=True):
    name: str
    partition: int
    level: int = 1
    create: bool = False


class Appended(Head, frozen=True):
    partition: int
    base_offset: int
    record_count: int


class Produced(Head, frozen=True):
    appended: list[Appended]


class Stage(Head, frozen=True):
    token: bytes
    name: str
    partition: int
    level: int = 1


class Staged(Head, frozen=True):
    record_count: int


class Publish(Head, frozen=True):
    writer: str
    number: int
    tokens: list[bytes]


class PublishedRange(Head, frozen=True):
    name: str
    partition: int
    first_offset: int
    next_offset: int


class Published(Head, frozen=True):
    duplicate: bool
    ranges: list[PublishedRange]


class Abandon(Head, frozen=True):
    tokens: list[bytes]


class Commit(Head, frozen=True):
    name: str
    partition: int
    kind: int
    owner: str
    offset: int
    level: int = 1
    member: str = ""
    generation: int = -1


class AskPosition(Head, frozen=True):
    name: str
    partition: int
    kind: int
    owner: str


class Position(Head, frozen=True):
    offset: int | None


class Join(Head, frozen=True):
    group: str
    name: str
    member: str
    assignor: str | None = None


class Member(Head, frozen=True):
    """Head of SYNC, HEARTBEAT and LEAVE."""

    group: str
    name: str
    member: str
    generation: int


class Membership(Head, frozen=True):
    generation: int
    partitions: list[int]


class Failure(Head, frozen=True):
    """Head of a frame with the flag ERROR (§5)."""

    code: int
    kind: int
    message: str
    retry: int
    retry_after_ms: int | None = None


REQUESTS: Final[dict[int, type[Head]]] = {
    Verb.PING: Head,
    Verb.CANCEL: Cancel,
    Verb.TOPICS: ListTopics,
    Verb.CREATE_TOPIC: CreateTopic,
    Verb.DESCRIBE: Describe,
    Verb.GROW_TOPIC: GrowTopic,
    Verb.PURGE_TOPIC: PurgeTopic,
    Verb.DELETE_TOPIC: DeleteTopic,
    Verb.BOUNDS: AskBounds,
    Verb.FETCH: Fetch,
    Verb.PRODUCE: Produce,
    Verb.STAGE: Stage,
    Verb.PUBLISH: Publish,
    Verb.ABANDON: Abandon,
    Verb.COMMIT: Commit,
    Verb.POSITION: AskPosition,
    Verb.JOIN: Join,
    Verb.SYNC: Member,
    Verb.HEARTBEAT: Member,
    Verb.LEAVE: Member,
}
