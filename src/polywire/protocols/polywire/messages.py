"""Requests and responses of the `polywire` protocol as Python values (spec: polywire#verbs).

Each struct is encoded as one MessagePack array, with elements in the order of the specification. Elements that are
missing at the end get their defaults.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Final, Generic, TypeVar

import msgspec

NO_OFFSET: Final = -1
ANY_INCARNATION: Final = 0
ANY_EPOCH: Final = -1
BY_KEY: Final = -1

# MessagePack allows numbers up to 2^64 - 1. In this protocol, a head with a number above 2^63 - 1 is invalid (spec:
# polywire#frames).
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
SettingValue = Int | str | None


class Verb(IntEnum):
    """Number of the type of a request or response."""

    HELLO = 1
    PING = 2
    CANCEL = 3
    LOGIN = 4
    TOPICS = 16
    CREATE_TOPIC = 17
    DESCRIBE = 18
    GROW_TOPIC = 19
    PURGE_TOPIC = 20
    DELETE_TOPIC = 21
    CONFIGURE_TOPIC = 22
    BEGIN_PARTITION = 23
    LINK_TOPIC = 24
    BOUNDS = 32
    FETCH = 33
    PRODUCE = 34
    STAGE = 35
    PUBLISH = 36
    ABANDON = 37
    LOCATE = 38
    BEGIN_EPOCH = 39
    COMMIT = 48
    POSITION = 49
    JOIN = 64
    SYNC = 65
    HEARTBEAT = 66
    LEAVE = 67
    GROUPS = 68
    DELETE_GROUP = 69
    ACQUIRE = 70
    ACKNOWLEDGE = 71
    QUEUES = 72
    CONFIGURE_QUEUE = 73
    RESET_QUEUE = 74
    DELETE_QUEUE = 75
    TRANSACTIONS = 80
    DELETE_TRANSACTION = 81
    WRITERS = 82
    DELETE_WRITER = 83


class Head(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base class of the headers of all frames. Without fields, it is the header of responses without content."""


class Limits(Head, frozen=True):
    """The broker's limits, sent when a connection opens (spec: polywire#limits)."""

    broker: str
    frame_bytes_max: Int
    batch_bytes_max: Int
    answer_bytes_max: Int
    requests_max: Int
    wait_ms_max: Int
    stage_expiry_ms: Int


class Cancel(Head, frozen=True):
    correlation: Int


class LogIn(Head, frozen=True):
    name: str
    password: str


class ListTopics(Head, frozen=True):
    internal: bool = False


class TopicEntry(Head, frozen=True):
    name: str
    id: bytes
    partition_count: Int
    link: str = ""


class TopicList(Head, frozen=True):
    topics: list[TopicEntry]


class CreateTopic(Head, frozen=True):
    name: str
    partition_count: Int | None = None
    stream: str = "default"
    level: Int = 2
    settings: dict[str, SettingValue] = msgspec.field(default_factory=dict)


class Describe(Head, frozen=True):
    name: str


class TopicDescription(Head, frozen=True):
    """A topic.

    Attributes:
        table: URL of the topic's table (concepts: tables); empty if it has none, or if the client may not get paths.
        link: name of the link that writes the topic; empty if there is none.
    """

    name: str
    id: bytes
    created_at_us: Int
    incarnations: list[Int]
    settings: dict[str, SettingValue]
    table: str = ""
    link: str = ""


class GrowTopic(Head, frozen=True):
    name: str
    partition_count: Int
    level: Int = 2


class ConfigureTopic(Head, frozen=True):
    name: str
    settings: dict[str, SettingValue]
    level: Int = 2


class LinkTopic(Head, frozen=True):
    name: str
    link: str
    level: Int = 2


class PurgeTopic(Head, frozen=True):
    name: str
    level: Int = 2


class DeleteTopic(Head, frozen=True):
    name: str
    level: Int = 2


class BeginPartition(Head, frozen=True):
    name: str
    partition: Int
    offset: Int
    level: Int = 2


class AskBounds(Head, frozen=True):
    names: list[str]
    times_us: list[Int] = []


class PartitionEntry(Head, frozen=True):
    """First and end offset of one partition.

    Attributes:
        offsets: an offset for each requested time, in order.
    """

    partition: Int
    incarnation: Int
    epoch: Int
    first_offset: Int
    next_offset: Int
    offsets: list[Int]


class TopicBounds(Head, frozen=True):
    name: str
    id: bytes
    partitions: list[PartitionEntry]


class BoundsList(Head, frozen=True):
    topics: list[TopicBounds]


class OffsetRange(Head, frozen=True):
    """Range of offsets of a partition, for FETCH and LOCATE.

    Attributes:
        incarnation: incarnation number of the partition, as the client knows it.
        epoch: leader epoch in which the client received the offsets.
    """

    name: str
    partition: Int
    offset: Int
    offset_end: Int = NO_OFFSET
    incarnation: Int = ANY_INCARNATION
    epoch: Int = ANY_EPOCH


class Fetch(OffsetRange, frozen=True):
    bytes_max: Int = -1
    wait_ms: Int = 0
    bodies: bool = True


class Fetched(Head, frozen=True):
    next_offset: Int
    readable_offset: Int


class Locate(OffsetRange, frozen=True):
    pass


class SealedRange(Head, frozen=True):
    """Location of the records [first_offset, next_offset): complete batches in the bytes [start, stop) of a segment
    file.
    """

    blob: str
    start: Int
    stop: Int
    first_offset: Int
    next_offset: Int


class Located(Head, frozen=True):
    """Locations of records in segment files.

    Attributes:
        address: a directory, or the URL of a bucket; empty if clients can read the records only from the broker.
    """

    address: str
    mark: bytes
    runs: list[SealedRange]
    more: bool


class Produce(Head, frozen=True):
    name: str
    partition: Int
    level: Int = 1
    create: bool = False


class Appended(Head, frozen=True):
    partition: Int
    base_offset: Int
    record_count: Int


class Produced(Head, frozen=True):
    appended: list[Appended]


class Stage(Head, frozen=True):
    token: bytes
    name: str
    partition: Int
    level: Int = 1
    writer: str = ""
    number: Int = 0


class Staged(Head, frozen=True):
    record_count: Int


class GroupOffsets(Head, frozen=True):
    """Next offsets of a group in a topic, by partition.

    Attributes:
        member, generation: member that has read the records, and its generation. For an empty member, nothing is
            checked.
    """

    name: str
    group: str
    member: str
    generation: Int
    offsets: dict[Int, Int]


class Publish(Head, frozen=True):
    writer: str
    number: Int
    tokens: list[bytes]
    groups: list[GroupOffsets] = []
    epoch: Int = 0


class PublishedRange(Head, frozen=True):
    name: str
    partition: Int
    first_offset: Int
    next_offset: Int


class Published(Head, frozen=True):
    duplicate: bool
    ranges: list[PublishedRange]


class BeginEpoch(Head, frozen=True):
    """Header of BEGIN_EPOCH. ``epoch_min`` is the lowest epoch to begin."""

    writer: str
    epoch_min: Int = 0


class EpochBegun(Head, frozen=True):
    epoch: Int


class Abandon(Head, frozen=True):
    tokens: list[bytes]


class Commit(Head, frozen=True):
    name: str
    partition: Int
    kind: Int
    owner: str
    offset: Int
    level: Int = 1
    member: str = ""
    generation: Int = -1


class AskPosition(Head, frozen=True):
    name: str
    partition: Int
    kind: Int
    owner: str


class Position(Head, frozen=True):
    offset: Int | None


class Join(Head, frozen=True):
    group: str
    name: str
    member: str
    assignor: str | None = None


class Member(Head, frozen=True):
    """Header of SYNC, HEARTBEAT and LEAVE."""

    group: str
    name: str
    member: str
    generation: Int


class Membership(Head, frozen=True):
    generation: Int
    partitions: list[Int]


class AskGroups(Head, frozen=True):
    """Header of GROUPS.

    Attributes:
        after: topic and group of the last entry of the previous page; empty for the first page.
    """

    group: str | None = None
    after: list[str] = []


class MemberEntry(Head, frozen=True):
    member: str
    wire: str
    idle_ms: Int
    partitions: list[Int]


class GroupEntry(Head, frozen=True):
    """A group of one topic.

    Attributes:
        generation, assignor: -1 and None if the group has committed offsets but no members.
        positions: pairs of partition and committed offset.
    """

    name: str
    group: str
    generation: Int
    assignor: str | None
    members: list[MemberEntry]
    positions: list[list[Int]]
    owner: str = ""


class GroupList(Head, frozen=True):
    groups: list[GroupEntry]
    more: bool


class DeleteGroup(Head, frozen=True):
    """Header of DELETE_GROUP, which deletes a group of a topic with its members and offsets."""

    group: str
    name: str


class Failure(Head, frozen=True):
    """Header of an error response (spec: polywire#errors)."""

    code: Int
    kind: Int
    message: str
    retry: Int
    retry_after_ms: Int | None = None


class AcknowledgedRun(Head, frozen=True):
    """Consecutive records with the same outcome (spec: polywire#queues).

    Attributes:
        reason: why the records could not be processed, for the header of dead letters.
    """

    partition: Int
    first: Int
    last: Int
    outcome: Int
    delay_ms: Int = 0
    reason: str = ""


class Acquire(Head, frozen=True):
    """Header of ACQUIRE, which acquires records of a topic for a member of a share group.

    Attributes:
        bytes_max: size of the records; a single record may be larger. -1 stands for the largest response.
        runs: acknowledgements, which take effect first. With any, the request does not wait for records.
    """

    group: str
    name: str
    member: str
    records_max: Int = 500
    bytes_max: Int = -1
    wait_ms: Int = 0
    runs: list[AcknowledgedRun] = []


class AcquiredPartition(Head, frozen=True):
    """Acquired records of one partition. Their batches are in the payload, after those of earlier partitions.

    Attributes:
        runs: (first offset, last offset, delivery count) of consecutive records.
        payload_bytes: total size of the batches.
    """

    partition: Int
    runs: list[tuple[Int, Int, Int]]
    payload_bytes: Int


class Acquired(Head, frozen=True):
    """The response to ACQUIRE. A record that is not acknowledged or renewed within ``lock_ms`` is available again.

    Attributes:
        refused: the index and the error of each refused acknowledgement of the request. None if the broker is too old to
            execute acknowledgements with ACQUIRE.
    """

    lock_ms: Int
    partitions: list[AcquiredPartition]
    refused: list[tuple[Int, Failure]] | None = None


class Acknowledge(Head, frozen=True):
    """Header of ACKNOWLEDGE. Each entry takes effect or is refused as a whole."""

    group: str
    name: str
    member: str
    runs: list[AcknowledgedRun]


class Acknowledged(Head, frozen=True):
    """The response to ACKNOWLEDGE: the index and the error of each refused entry."""

    refused: list[tuple[Int, Failure]]


class AskQueues(Head, frozen=True):
    """Header of QUEUES.

    Attributes:
        after: topic and group of the last entry of the previous page; empty for the first page.
    """

    group: str | None = None
    after: list[str] = []


class QueuePartition(Head, frozen=True):
    """Progress of a share group in one partition.

    Attributes:
        start: all records below this offset are finished.
        end: no record from this offset on was delivered.
        next_offset: offset of the topic's next record.
        available: unfinished records below ``end`` that can be acquired now.
        delayed: records below ``end`` that are not due yet, or are copied to the dead-letter topic.
        held: unfinished records that members hold.
        next_due_ms: when the next record is due that was sent with a delay, in milliseconds since 1970. 0 if unknown.
    """

    partition: Int
    start: Int
    end: Int
    next_offset: Int
    available: Int
    delayed: Int
    held: Int
    next_due_ms: Int = 0


class QueueEntry(Head, frozen=True):
    """A share group of one topic.

    Attributes:
        acquired: number of records that each member holds now.
        settings: settings of the group that differ from the defaults.
    """

    name: str
    group: str
    acquired: dict[str, Int]
    partitions: list[QueuePartition]
    settings: dict[str, str]
    owner: str = ""


class QueueList(Head, frozen=True):
    queues: list[QueueEntry]
    more: bool


class ConfigureQueue(Head, frozen=True):
    """Header of CONFIGURE_QUEUE, which creates a share group or changes its settings. None restores a default."""

    group: str
    name: str
    settings: dict[str, str | None] = msgspec.field(default_factory=dict)


class ResetQueue(Head, frozen=True):
    """Header of RESET_QUEUE.

    Attributes:
        offsets: by partition number, the offset at which the partition continues. If empty, all partitions continue at
            their ends.
    """

    group: str
    name: str
    offsets: dict[Int, Int] = msgspec.field(default_factory=dict)


class DeleteQueue(Head, frozen=True):
    """Header of DELETE_QUEUE. If the share group has no other topic, its settings are deleted, too."""

    group: str
    name: str


class ListEntries(Head, frozen=True):
    """Header of TRANSACTIONS and WRITERS, which return lists page by page.

    Attributes:
        after: name of the last entry of the previous page; empty for the first page.
    """

    after: str = ""


class DeleteEntry(Head, frozen=True):
    name: str


class ListedEntry(Head, frozen=True):
    """Common fields of the entries of TRANSACTIONS and WRITERS."""

    name: str


class TransactionEntry(ListedEntry, frozen=True):
    """A transactional id and the state of its latest transaction.

    Attributes:
        owner: name of a user, or empty.
    """

    epoch: Int
    state: str
    messages: Int
    positions: Int
    idle_ms: Int
    owner: str


class WriterEntry(ListedEntry, frozen=True):
    """A writer, its epoch, and the sequence number of its last publish in that epoch."""

    number: Int
    idle_ms: Int
    owner: str
    epoch: Int = 0


_Entry = TypeVar("_Entry", bound=ListedEntry)


class EntryList(Head, Generic[_Entry], frozen=True):
    """One page of the response to TRANSACTIONS or WRITERS."""

    entries: list[_Entry]
    more: bool


REQUESTS: Final[dict[int, type[Head]]] = {
    Verb.PING: Head,
    Verb.CANCEL: Cancel,
    Verb.LOGIN: LogIn,
    Verb.TOPICS: ListTopics,
    Verb.CREATE_TOPIC: CreateTopic,
    Verb.DESCRIBE: Describe,
    Verb.GROW_TOPIC: GrowTopic,
    Verb.CONFIGURE_TOPIC: ConfigureTopic,
    Verb.LINK_TOPIC: LinkTopic,
    Verb.PURGE_TOPIC: PurgeTopic,
    Verb.DELETE_TOPIC: DeleteTopic,
    Verb.BEGIN_PARTITION: BeginPartition,
    Verb.BOUNDS: AskBounds,
    Verb.FETCH: Fetch,
    Verb.PRODUCE: Produce,
    Verb.STAGE: Stage,
    Verb.PUBLISH: Publish,
    Verb.ABANDON: Abandon,
    Verb.BEGIN_EPOCH: BeginEpoch,
    Verb.LOCATE: Locate,
    Verb.COMMIT: Commit,
    Verb.POSITION: AskPosition,
    Verb.JOIN: Join,
    Verb.SYNC: Member,
    Verb.HEARTBEAT: Member,
    Verb.LEAVE: Member,
    Verb.GROUPS: AskGroups,
    Verb.DELETE_GROUP: DeleteGroup,
    Verb.ACQUIRE: Acquire,
    Verb.ACKNOWLEDGE: Acknowledge,
    Verb.QUEUES: AskQueues,
    Verb.CONFIGURE_QUEUE: ConfigureQueue,
    Verb.RESET_QUEUE: ResetQueue,
    Verb.DELETE_QUEUE: DeleteQueue,
    Verb.TRANSACTIONS: ListEntries,
    Verb.DELETE_TRANSACTION: DeleteEntry,
    Verb.WRITERS: ListEntries,
    Verb.DELETE_WRITER: DeleteEntry,
}
