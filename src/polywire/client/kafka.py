"""The asynchronous client of the Kafka protocol, with consumer groups (spec: kafka#consumer-groups, decision 0118).

* Requests are pipelined. There is one connection per broker. Requests about groups are sent to their coordinators.
* Records that the protocol does not support are rejected before anything is sent.
* Kafka brokers since 2.8 support all request versions that this client sends, except for groups, which need 4.0.
* Groups use the ``consumer`` protocol (KIP-848), in which the broker assigns partitions. A revoked partition is
  released at the broker only when the caller joins again, because the caller may still read it. A caller that joins
  again is the same member.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from polywire.client.address import Login
from polywire.client.base import Ability, Membership, PartitionBounds, Produced, TopicInfo
from polywire.client.connection import Scope, understood
from polywire.client.failures import cannot
from polywire.client.kafka_connection import BrokerConnection, Cluster, alone, check, connect
from polywire.client.listings import GroupInfo, MemberInfo
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Missing, PeerError, Unavailable
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import decode_batches, decode_pieces, encode_batch
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.subscription import WRITING
from polywire.records.columns import Record
from polywire.records.pieces import Piece
from polywire.types import Assignor, Level

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        ConsumerGroupDescribeResponse,
        ConsumerGroupHeartbeatResponse,
        CreateTopicsResponse,
        DeleteTopicsResponse,
        DescribeGroupsResponse,
        FetchResponse,
        ListGroupsResponse,
        ListOffsetsResponse,
        MetadataResponse,
        OffsetCommitResponse,
        OffsetFetchResponse,
        ProduceResponse,
    )

Describe = Callable[[str], Awaitable["MetadataResponse.Topics"]]

JOINING: Final = 0  # the epoch in the heartbeat of a member that joins
LEAVING: Final = -1
REBALANCE_TIMEOUT_MS: Final = 45_000  # how long a member may take to release partitions; the default of Kafka's clients
BEATS_MAX: Final = 4  # heartbeats in one join; each releases the partitions that the previous response revoked
CONSUMER: Final = "consumer"  # the type of groups whose partitions the broker assigns
DEAD: Final = "Dead"  # the state of a classic group that does not exist
NO_GENERATION: Final = -1
_ASSIGNORS: Final = {Assignor.ROUND_ROBIN: "uniform", Assignor.RANGE: "range"}
_NOT_A_MEMBER: Final = (ErrorCode.MEMBER_MISSING, ErrorCode.GENERATION_STALE)

_Partitions = frozenset[int]
_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
WIRE: Final = "Kafka"  # the protocol's name in error messages
OPEN_TIMEOUT_S: Final = 10.0
FETCH_BYTES: Final = 1024 * 1024  # bytes per request; a longer batch is returned as a whole
PIECES_BYTES: Final = 4 << 20  # bytes per request of stored batches
PIECES_WAIT_MS: Final = 500  # only if the broker reads from remote storage, because callers ask for existing records
READ_COMMITTED: Final = 1
# records per response; in practice bytes limit a response, so all decoded records are returned
FETCH_RECORDS: Final = 1_000_000
# limit for the records of one batch, because brokers accept 1 MiB; a larger record is sent alone
BATCH_BYTES: Final = 900_000
RECORD_ROOM_BYTES: Final = 64  # upper bound for the size of a record without key and value
TIMEOUT_MS: Final = 30_000
SEQUENCES: Final = 1 << 31
LATEST: Final = -1
EARLIEST: Final = -2
_ACKS: Final = {Level.MEMORY: 1, Level.WRITTEN: 1, Level.SYNCED: -1}
ABILITIES: Final = frozenset(
    {
        Ability.NULL_VALUES,
        Ability.EMPTY_VALUES,
        Ability.NULL_KEYS,
        Ability.KEYS_READ,
        Ability.BINARY_VALUES,
        Ability.WHITE_SPACE_VALUES,
        Ability.CHOOSE_PARTITION,
        Ability.CREATE_TOPIC,
        Ability.DELETE_TOPIC,
        Ability.BOUNDS,
        Ability.GROUPS,
        Ability.GENERATIONS,
        Ability.POSITIONS,
        Ability.LONG_POLL,
        Ability.LEVELS,
        Ability.QUEUES,
    }
)


@dataclass(slots=True)
class _Topic:
    """A topic that a member has joined for.

    Attributes:
        id: id of the topic.
        generation: epoch of the assignment that the caller has.
        owned: partitions that the caller has.
        assigned: partitions in the broker's last response.
    """

    id: bytes
    generation: int = NO_GENERATION
    owned: _Partitions = frozenset()
    assigned: _Partitions = frozenset()


@dataclass(slots=True)
class _Member:
    group: str
    name: str
    epoch: int = JOINING
    topics: dict[str, _Topic] = field(default_factory=dict)


class Groups:
    """The group members of one client, and the committed offsets of any group."""

    __slots__ = ("_cluster", "_describe", "_members")

    def __init__(self, cluster: Cluster, describe: Describe) -> None:
        """``describe`` returns the metadata of a topic."""
        self._cluster: Final = cluster
        self._describe: Final = describe
        self._members: Final[dict[tuple[str, str], _Member]] = {}

    # Members

    async def join(self, group: str, topic: str, name: str, assignor: Assignor | None) -> Membership:
        """Join the group, or accept a new assignment.

        Before the call, the caller must stop reading all partitions that are revoked.
        """
        id_ = (await self._describe(topic)).topic_id
        member = self._members.setdefault((group, name), _Member(group, name))
        if topic not in member.topics or member.topics[topic].id != id_:
            member.topics[topic] = _Topic(id_)
        joined = member.topics[topic]
        try:
            for _ in range(BEATS_MAX):
                joined.owned = joined.assigned
                await self._whole_beat(member, assignor)
                if joined.owned <= joined.assigned:
                    break
        except BrokerError:
            if joined.generation == NO_GENERATION:
                self._forget(member, topic)
            raise
        joined.owned, joined.generation = joined.assigned, member.epoch
        return Membership(joined.generation, tuple(sorted(joined.owned)))

    async def heartbeat(self, group: str, topic: str, name: str, generation: int) -> Membership:
        """Send a heartbeat. Raises Conflict(GENERATION_STALE) if the assignment has changed."""
        member, joined = self._joined(group, topic, name)
        if generation == joined.generation:
            await self._beat(member)
        if generation != joined.generation or joined.assigned != joined.owned:
            raise Conflict(ErrorCode.GENERATION_STALE, f"the group is rebalancing (join again) group={group!r}")
        return Membership(joined.generation, tuple(sorted(joined.owned)))

    async def leave(self, group: str, topic: str, name: str) -> None:
        """Leave the group for this topic. With its last topic, the member leaves the group itself."""
        member, _ = self._joined(group, topic, name)
        self._forget(member, topic)
        if member.topics:
            await self._whole_beat(member, None)
        else:
            member.epoch = LEAVING
            await self._beat(member)

    def _forget(self, member: _Member, topic: str) -> None:
        del member.topics[topic]
        if not member.topics:
            self._members.pop((member.group, member.name), None)

    def _joined(self, group: str, topic: str, name: str) -> tuple[_Member, _Topic]:
        member = self._members.get((group, name))
        joined = None if member is None else member.topics.get(topic)
        if member is None or joined is None:
            raise Missing(ErrorCode.MEMBER_MISSING, f"this client has not joined group={group!r} member={name!r}")
        return member, joined

    async def _whole_beat(self, member: _Member, assignor: Assignor | None) -> None:
        """Send a heartbeat with all fields, to which the broker responds with the complete assignment.

        If the broker does not know the member, join again.
        """
        try:
            await self._beat(member, **_everything(member, assignor))
        except (Missing, Conflict) as error:
            if error.code not in _NOT_A_MEMBER or member.epoch == JOINING:
                raise
            member.epoch = JOINING
            for joined in member.topics.values():
                joined.assigned = joined.owned = frozenset()
            await self._beat(member, **_everything(member, assignor))

    async def _beat(self, member: _Member, **fields: Any) -> None:
        """Send a heartbeat. Raises Missing(MEMBER_MISSING), Conflict(GENERATION_STALE)."""
        response: ConsumerGroupHeartbeatResponse = await self._cluster.ask_coordinator(
            member.group,
            alone,
            Api.CONSUMER_GROUP_HEARTBEAT,
            group_id=member.group,
            member_id=member.name,
            member_epoch=member.epoch,
            **fields,
        )
        check(response)
        member.epoch = response.member_epoch
        if response.assignment is not None:
            assigned = {entry.topic_id: frozenset(entry.partitions) for entry in response.assignment.topic_partitions}
            for joined in member.topics.values():
                joined.assigned = assigned.get(joined.id, frozenset())

    # Positions

    async def commit(self, group: str, topic: str, partition: int, offset: int, name: str, generation: int) -> None:
        """Commit an offset, for a member with its current epoch unless the caller passes an older generation."""
        epoch = generation
        if name:
            member, joined = self._joined(group, topic, name)
            epoch = member.epoch if generation == joined.generation else generation
        topic_type = schema.request(Api.OFFSET_COMMIT).Topics
        entries = [topic_type.Partitions(index=partition, offset=offset)]
        answer: OffsetCommitResponse = await self._cluster.ask_coordinator(
            group,
            _partition_entries,
            Api.OFFSET_COMMIT,
            group_id=group,
            generation=epoch,
            member_id=name,
            topics=[topic_type(name=topic, partitions=entries)],
        )
        check(answer.topics[0].partitions[0])

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return the next offset to read, or None if nothing was committed."""
        group_type = schema.request(Api.OFFSET_FETCH).Groups
        request = group_type(group_id=group, topics=[group_type.Topics(name=topic, indexes=[partition])])
        answer: OffsetFetchResponse = await self._cluster.ask_coordinator(
            group, _group_entries, Api.OFFSET_FETCH, groups=[request]
        )
        check(answer.groups[0])
        entry = answer.groups[0].topics[0].partitions[0]
        check(entry)
        return entry.offset if entry.offset >= 0 else None

    # Lists

    async def groups(self, group: str | None) -> list[GroupInfo]:
        """Return groups with their members and committed offsets, sorted by topic and name."""
        types = await self._types() if group is None else {group: None}
        found: list[GroupInfo] = []
        for name, type_ in types.items():
            description = await self._description(name, type_)
            if description is not None:
                found += _infos(name, description, await self._positions(name))
        return sorted(found, key=lambda info: (info.topic, info.name))

    async def _types(self) -> dict[str, str | None]:
        """Return the names and types of all groups. Each broker lists the groups that it coordinates."""
        types: dict[str, str | None] = {}
        answer: ListGroupsResponse
        for answer in await self._cluster.ask_all(Api.LIST_GROUPS):
            check(answer)
            types.update((entry.group_id, entry.group_type.casefold()) for entry in answer.groups)
        return types

    async def _positions(self, group: str) -> dict[str, dict[int, int]]:
        group_type = schema.request(Api.OFFSET_FETCH).Groups
        answer: OffsetFetchResponse = await self._cluster.ask_coordinator(
            group, _group_entries, Api.OFFSET_FETCH, groups=[group_type(group_id=group, topics=None)]
        )
        check(answer.groups[0])
        return {
            topic.name: {entry.index: entry.offset for entry in topic.partitions if entry.offset >= 0}
            for topic in answer.groups[0].topics
        }

    async def _description(self, group: str, type_: str | None) -> _Description | None:
        """Describe a group. Return None if it does not exist. If the type is None, it is not known."""
        description = await self._consumers(group) if type_ in (None, CONSUMER) else None
        return await self._classic(group) if description is None and type_ != CONSUMER else description

    async def _consumers(self, group: str) -> _Description | None:
        """Describe a group of type ``consumer``. Return None if there is none of that type."""
        answer: ConsumerGroupDescribeResponse = await self._cluster.ask_coordinator(
            group, _group_entries, Api.CONSUMER_GROUP_DESCRIBE, group_ids=[group]
        )
        response = answer.groups[0]
        if response.error == WireError.GROUP_ID_NOT_FOUND:
            return None
        check(response)
        members = [
            (
                member.member_id,
                member.client_id,
                {at.topic_name: at.partitions for at in member.assignment.topic_partitions},
            )
            for member in response.members
        ]
        return _Description(response.group_epoch, response.assignor_name or None, members)

    async def _classic(self, group: str) -> _Description | None:
        answer: DescribeGroupsResponse = await self._cluster.ask_coordinator(
            group, _group_entries, Api.DESCRIBE_GROUPS, groups=[group]
        )
        response = answer.groups[0]
        check(response)
        if response.group_state == DEAD:
            return None
        members = [
            (member.member_id, member.client_id, dict(WRITING.decode(bytes(member.member_assignment))))
            for member in response.members
        ]
        return _Description(NO_GENERATION, response.protocol_data or None, members)


@dataclass(frozen=True, slots=True)
class _Description:
    """A group as described by the broker.

    Attributes:
        generation: its generation or epoch.
        assignor: name of the assignor.
        members: member id, client id, and partitions by topic, of each member.
    """

    generation: int
    assignor: str | None
    members: Sequence[tuple[str, str, Mapping[str, Collection[int]]]]


def _everything(member: _Member, assignor: Assignor | None) -> dict[str, Any]:
    """Return all fields of a heartbeat, including the partitions that the caller owns."""
    entry_of = schema.request(Api.CONSUMER_GROUP_HEARTBEAT).TopicPartitions
    return {
        "rebalance_timeout_ms": REBALANCE_TIMEOUT_MS,
        "subscribed_topic_names": sorted(member.topics),
        "server_assignor": None if assignor is None else _ASSIGNORS[assignor],
        "topic_partitions": [
            entry_of(topic_id=joined.id, partitions=sorted(joined.owned))
            for joined in member.topics.values()
            if joined.owned
        ],
    }


def _infos(name: str, description: _Description, positions: Mapping[str, Mapping[int, int]]) -> Iterator[GroupInfo]:
    """Yield the group once for each topic that it reads or has committed offsets in.

    The protocol does not report the owner of a group, nor when a member was last seen.
    """
    for topic in {*positions, *(topic for _, _, held in description.members for topic in held)}:
        members = [
            MemberInfo(id_, client, 0, tuple(sorted(held[topic])))
            for id_, client, held in description.members
            if topic in held
        ]
        yield GroupInfo(
            topic, name, description.generation, description.assignor, tuple(members), positions.get(topic, {})
        )


def murmur2(key: bytes) -> int:
    """Return the unsigned hash of a key."""
    mixed = (_SEED ^ len(key)) & _MASK
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * _M & _MASK
        word = (word ^ word >> 24) * _M & _MASK
        mixed = (mixed * _M & _MASK) ^ word
    if whole < len(key):
        mixed = (mixed ^ int.from_bytes(key[whole:], "little")) * _M & _MASK
    mixed = (mixed ^ mixed >> 13) * _M & _MASK
    return mixed ^ mixed >> 15


def partition_of_key(key: bytes, partition_count: int) -> int:
    """Return the partition of a key."""
    return (murmur2(key) & 0x7FFFFFFF) % partition_count


class KafkaClient(Scope):
    """A client of a Kafka cluster: one connection to the first broker, and one to each leader and coordinator.

    It implements ``WireClient`` as far as the protocol supports it. Create one with ``open``.

    ``Level.MEMORY`` is sent as ``Level.WRITTEN``, because a broker returns no offsets for unacknowledged records.
    """

    __slots__ = ("_cluster", "_connection", "_counts", "_groups", "_next")

    def __init__(self, connection: BrokerConnection, dial: Callable[[str, int], Awaitable[BrokerConnection]]) -> None:
        """``connection`` is the connection to the first broker. ``dial`` connects to another broker of the cluster."""
        self._connection: BrokerConnection = connection
        self._cluster: Final = Cluster(connection, dial)
        self._groups: Final = Groups(self._cluster, self._describe)
        self._counts: Final[dict[str, int]] = {}  # partition counts of topics that this client has written to
        self._next = 0

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        timeout_s: float = OPEN_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
        login: Login | None = None,
        mechanism: str | None = None,
    ) -> KafkaClient:
        """Connect and log in.

        Args:
            host: name or address of the broker.
            port: port of its Kafka listener.
            timeout_s: time limit for connection and login, in seconds.
            tls: how to verify the broker (``client.address.client_context``); None connects without TLS.
            login: the user; None connects without a login.
            mechanism: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512. None chooses PLAIN with TLS or if the broker is on this
                machine, and SCRAM-SHA-512 otherwise.

        Raises:
            Unavailable: the broker did not respond in time.
            Denied: LOGIN_FAILED.
        """

        async def dial(host: str, port: int) -> BrokerConnection:
            return await connect(host, port, timeout_s, tls, login, mechanism)

        return cls(await dial(host, port), dial)

    @property
    def abilities(self) -> frozenset[Ability]:
        """The features that this client supports over the Kafka protocol."""
        return ABILITIES

    async def close(self) -> None:
        """Close all connections. Pending calls fail with Unavailable."""
        closed = Unavailable(ErrorCode.STOPPING, "client was closed")
        self._cluster.fail(closed)
        self._connection.fail(closed)

    async def ask(self, api: Api, /, **fields: Any) -> Any:
        """Send a request that any broker of the cluster answers. Return the response."""
        return await self._connection.ask(api, **fields)

    @property
    def cluster(self) -> Cluster:
        """The connections to the brokers."""
        return self._cluster

    # Topics

    async def create_topic(self, topic: str, partition_count: int) -> None:
        """Create a topic. See ``WireClient``. Raises Invalid(INVALID_TOPIC) for a name that Kafka does not support."""
        topic_type = schema.request(Api.CREATE_TOPICS).Topics
        topics = [topic_type(name=topic, num_partitions=partition_count, replication_factor=-1)]
        answer: CreateTopicsResponse = await self._connection.ask(
            Api.CREATE_TOPICS, topics=topics, timeout_ms=TIMEOUT_MS
        )
        check(answer.topics[0])

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records."""
        self._counts.pop(topic, None)
        answer: DeleteTopicsResponse = await self._connection.ask(
            Api.DELETE_TOPICS, topic_names=[topic], timeout_ms=TIMEOUT_MS
        )
        check(answer.responses[0], missing=ErrorCode.TOPIC_MISSING)

    async def topics(self) -> list[TopicInfo]:
        """Return the topics that this user may see, sorted by name."""
        answer: MetadataResponse = await self._connection.ask(Api.METADATA, topics=None, may_create=False)
        found = [
            TopicInfo(topic.name, topic.topic_id, len(topic.partitions))
            for topic in answer.topics
            if topic.name is not None  # it is null only in responses to requests by id
        ]
        return sorted(found, key=lambda topic: topic.name)

    async def _describe(self, topic: str, *, may_create: bool = False) -> MetadataResponse.Topics:
        """Return the metadata of one topic. Raises BrokerError."""
        topics = [schema.request(Api.METADATA).Topics(name=topic)]
        answer: MetadataResponse = await self._connection.ask(Api.METADATA, topics=topics, may_create=may_create)
        check(answer.topics[0], missing=ErrorCode.TOPIC_MISSING)
        return answer.topics[0]

    async def topic_id(self, topic: str) -> bytes:
        """Return the id of a topic, which changes if it is created again. Raises Missing(TOPIC_MISSING)."""
        return bytes((await self._describe(topic)).topic_id)

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Return the first and next offset of each partition. See ``WireClient``.

        The next offset is the last stable offset (``read_committed``). Kafka has no incarnations, so they are 0.
        """
        partitions = (await self._describe(topic)).partitions
        epochs = {partition.index: partition.leader_epoch for partition in partitions}
        first = await self._list(topic, sorted(epochs), EARLIEST)
        ends = await self._list(topic, sorted(epochs), LATEST)
        return [PartitionBounds(number, 0, epochs[number], first[number], ends[number]) for number in sorted(epochs)]

    async def _list(self, topic: str, partitions: Sequence[int], time_ms: int) -> dict[int, int]:
        """Return the offset for a time in each of these partitions. Raises BrokerError."""
        topic_type = schema.request(Api.LIST_OFFSETS).Topics

        def fields(numbers: list[int]) -> dict[str, Any]:
            entries = [topic_type.Partitions(index=number, timestamp=time_ms) for number in numbers]
            topics = [topic_type(name=topic, partitions=entries)]
            return {"replica_id": -1, "isolation_level": READ_COMMITTED, "topics": topics}

        found: list[ListOffsetsResponse.Topics.Partitions] = await self._cluster.ask_leaders(
            topic, partitions, _partition_entries, Api.LIST_OFFSETS, fields
        )
        for entry in found:
            check(entry)
        offsets = {entry.index: entry.offset for entry in found}
        if offsets.keys() != set(partitions):
            raise Unavailable(ErrorCode.UNREACHABLE, f"invalid response: partitions are missing topic={topic!r}")
        return offsets

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Raise Invalid(INVALID_REQUEST): the protocol can find records by create time, but not by append time."""
        raise cannot(WIRE, "look records up by the time of their append")

    # Records

    async def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records, and return their offsets. See ``WireClient``.

        A missing topic is created if the broker is configured to create topics.

        Keys select partitions with the hash of Kafka's Java client. All records of one call that have no key go to the
        same partition. The next call uses the next partition.
        """
        for record in records:
            _check_record(record)
        if topic not in self._counts:
            described = await self._describe(topic, may_create=True)
            self._counts[topic] = len(described.partitions)
        partitions = [self._joined(topic, record, partition) for record in records]
        self._next += 1
        produced: list[Produced | None] = [None] * len(records)
        for number in dict.fromkeys(partitions):
            rows = [row for row, joined in enumerate(partitions) if joined == number]
            for part in _batches(rows, records):
                offset = await self._append(topic, number, [records[row] for row in part], level)
                for index, row in enumerate(part):
                    produced[row] = Produced(number, offset + index)
        return [stored for stored in produced if stored is not None]

    def _joined(self, topic: str, record: Record, partition: int | None) -> int:
        if partition is not None:
            return partition
        size = self._counts[topic]
        return self._next % size if record.key is None else partition_of_key(record.key, size)

    async def _append(self, topic: str, partition: int, records: Sequence[Record], level: Level) -> int:
        """Append one batch, and return the offset of its first record. Raises BrokerError."""
        return await self._append_batch(topic, partition, encode_batch(records), level)

    async def _append_batch(self, topic: str, partition: int, batch: bytes, level: Level) -> int:
        topic_type = schema.request(Api.PRODUCE).Topics
        entries = [topic_type.Partitions(index=partition, records=batch)]
        topics = [topic_type(name=topic, partitions=entries)]
        answer: ProduceResponse = await self._cluster.ask_leader(
            topic,
            partition,
            _partition_entries_of,
            Api.PRODUCE,
            acks=_ACKS[level],
            timeout_ms=TIMEOUT_MS,
            topics=topics,
        )
        entry = answer.responses[0].partitions[0]
        if entry.error == WireError.UNKNOWN_TOPIC_OR_PARTITION:
            self._counts.pop(topic, None)
        check(entry)
        return entry.base_offset

    async def new_producer(self) -> int:
        """Return an unused producer id, whose epoch is 0."""
        answers = await self._cluster.ask_all(
            Api.INIT_PRODUCER_ID, transactional_id=None, transaction_timeout_ms=TIMEOUT_MS
        )
        for answer in answers:
            check(answer)
        return int(answers[0].producer_id)

    async def append_next(
        self, topic: str, partition: int, records: Sequence[Record], *, producer: int, sequence: int
    ) -> list[Produced]:
        """Append records only if their sequence numbers follow the producer's last one in the partition.

        Batches that were appended before are not appended again. Raises Invalid(SEQUENCE_GAP).

        Args:
            topic: full name.
            partition: number of the partition, from 0.
            records: records to append.
            producer: as returned by ``new_producer``.
            sequence: number of the first record. Numbers start again at 0 after 2^31 - 1.
        """
        produced: list[Produced] = []
        for part in _batches(range(len(records)), records):
            at = (sequence + part[0]) % SEQUENCES
            batch = encode_batch(
                [records[row] for row in part], producer_id=producer, producer_epoch=0, base_sequence=at
            )
            offset = await self._append_batch(topic, partition, batch, Level.SYNCED)
            produced += [Produced(partition, offset + index) for index in range(len(part))]
        return produced

    async def stored_at_us(self, topic: str, partition: int, offset: int) -> int | None:
        """Return the timestamp of the first record from an offset on.

        It is an append time or a create time, depending on the topic's configuration.
        """
        records = await self.fetch(topic, partition, offset, records_max=1)
        return (records[0].append_time_us or records[0].origin_time_us) if records else None

    async def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = FETCH_RECORDS, wait_ms: int = 0
    ) -> list[Record]:
        """Return records from an offset on. See ``WireClient``."""
        entry = await self._fetch(topic, partition, offset, bytes_max=FETCH_BYTES, wait_ms=wait_ms)
        return understood(decode_batches, entry.records or b"", offset=offset)[:records_max]

    async def fetch_pieces(self, topic: str, partition: int, offset: int) -> tuple[list[Piece], int]:
        """Return committed records from an offset on, and the offset to continue at.

        Raises Invalid(INVALID_BATCH) if the response is malformed.
        """
        entry = await self._fetch(
            topic, partition, offset, bytes_max=PIECES_BYTES, wait_ms=PIECES_WAIT_MS, isolation_level=READ_COMMITTED
        )
        aborted = [(one.producer_id, one.first_offset) for one in entry.aborted_transactions or ()]
        try:
            return decode_pieces(entry.records or b"", offset=offset, aborted=aborted)
        except PeerError as error:
            facts = f"topic={topic!r} partition={partition} offset={offset}"
            raise Invalid(
                ErrorCode.INVALID_BATCH, f"the source returned invalid records: {error.message} {facts}"
            ) from None

    async def _fetch(
        self, topic: str, partition: int, offset: int, *, bytes_max: int, wait_ms: int, isolation_level: int = 0
    ) -> FetchResponse.Responses.Partitions:
        """Fetch from one partition. Raises BrokerError."""
        topic_type = schema.request(Api.FETCH).Topics
        entries = [topic_type.Partitions(partition=partition, fetch_offset=offset, partition_max_bytes=bytes_max)]
        answer: FetchResponse = await self._cluster.ask_leader(
            topic,
            partition,
            _partition_entries_of,
            Api.FETCH,
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=bytes_max,
            isolation_level=isolation_level,
            topics=[topic_type(topic=topic, partitions=entries)],
        )
        if not answer.responses or not answer.responses[0].partitions:
            raise Unavailable(ErrorCode.UNREACHABLE, f"invalid response: the partition is missing topic={topic!r}")
        entry = answer.responses[0].partitions[0]
        if entry.error == WireError.UNKNOWN_TOPIC_OR_PARTITION:
            await self._describe(topic)  # raises if the topic is missing
        check(entry)
        return entry

    # Groups

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Join a group, or accept a new assignment. See ``WireClient``. Needs Kafka 4.0.

        A member gets free partitions at once. It gets partitions of other members when these have released them by
        joining again. ``heartbeat`` reports that. Raises Missing(TOPIC_MISSING).
        """
        return await self._groups.join(group, topic, member, assignor)

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Send a heartbeat. See ``WireClient``.

        A change of the group is reported only if this member's assignment changes.
        """
        return await self._groups.heartbeat(group, topic, member, generation)

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Leave a group. See ``WireClient``. The generation is not checked."""
        await self._groups.leave(group, topic, member)

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Commit a group's offset. See ``WireClient``.

        Without ``member``, brokers reject the commit while the group has members.
        """
        await self._groups.commit(group, topic, partition, offset, member, generation)

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return a group's next offset to read, or None if it never committed one."""
        return await self._groups.position(group, topic, partition)

    async def groups(self, group: str | None = None) -> list[GroupInfo]:
        """Return the groups that have members or committed offsets, sorted by topic and name.

        ``group`` limits the result to one name. Without it, every broker of the cluster is asked. The client's list of
        brokers is at most five minutes old.

        ``MemberInfo.wire`` is the member's client id. For members of Polywire's other protocols, it is the name of the
        protocol. The protocol does not report a group's owner, when members were last seen, or which topics a group of
        another protocol reads.
        """
        return await self._groups.groups(group)


def _group_entries(
    answer: OffsetFetchResponse | ConsumerGroupDescribeResponse | DescribeGroupsResponse,
) -> Iterable[OffsetFetchResponse.Groups | ConsumerGroupDescribeResponse.Groups | DescribeGroupsResponse.Groups]:
    return answer.groups


def _partition_entries(
    answer: ListOffsetsResponse | OffsetCommitResponse,
) -> Iterator[ListOffsetsResponse.Topics.Partitions | OffsetCommitResponse.Topics.Partitions]:
    return (entry for topic in answer.topics for entry in topic.partitions)


def _partition_entries_of(
    answer: ProduceResponse | FetchResponse,
) -> Iterator[ProduceResponse.Responses.Partitions | FetchResponse.Responses.Partitions]:
    return (entry for topic in answer.responses for entry in topic.partitions)


def _check_record(record: Record) -> None:
    if record.id is not None or record.event is not None:
        raise cannot(WIRE, "send ids or events")


def _batches(rows: Sequence[int], records: Sequence[Record]) -> list[list[int]]:
    parts: list[list[int]] = []
    room = 0
    for row in rows:
        record = records[row]
        size = RECORD_ROOM_BYTES + len(record.value or b"") + len(record.key or b"")
        size += sum(RECORD_ROOM_BYTES + len(header.key) + len(header.value or b"") for header in record.headers)
        if not parts or size > room:
            parts.append([])
            room = BATCH_BYTES
        parts[-1].append(row)
        room -= size
    return parts
