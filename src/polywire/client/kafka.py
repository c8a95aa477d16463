"""The asynchronous client of the Kafka protocol.

* Requests are pipelined. There is one connection per broker.
* Records that the protocol does not support are rejected before anything is sent.
* Kafka brokers since 2.8 support all request versions that this client sends, except for groups, which need 4.0.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from typing import Any, ClassVar, Final

from polywire.client.base import Ability, Membership, PartitionBounds, Produced, TopicInfo
from polywire.client.connection import FramedConnection, Scope, understood
from polywire.client.failures import cannot, makes_no_sense
from polywire.client.kafka_errors import check
from polywire.client.kafka_groups import Groups
from polywire.client.kafka_leaders import Leaders
from polywire.client.kafka_login import log_in, mechanism_for
from polywire.client.listings import GroupInfo
from polywire.client.login import Login
from polywire.client.opening import open_connection
from polywire.errors import BrokerError, ErrorCode, Invalid, PeerError, Unavailable
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import decode_batches, encode_batch
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api, WireError
from polywire.records.columns import Record
from polywire.types import Assignor, Level, spell_address

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
WIRE: Final = "Kafka"  # the protocol's name in error messages
OPEN_TIMEOUT_S: Final = 10.0
REPLY_BYTES_MAX: Final = 256 * 1024 * 1024
FETCH_BYTES: Final = 1024 * 1024  # bytes per request; a longer batch is returned as a whole
# records per response; in practice bytes limit a response, so all decoded records are returned
FETCH_RECORDS: Final = 1_000_000
# limit for the records of one batch, because brokers accept 1 MiB; a larger record is sent alone
BATCH_BYTES: Final = 900_000
RECORD_ROOM_BYTES: Final = 64  # upper bound for the size of a record without key and value
TIMEOUT_MS: Final = 30_000
LATEST: Final = -1
EARLIEST: Final = -2
_VERSIONS: Final = {
    Api.PRODUCE: 9,
    Api.FETCH: 12,
    Api.LIST_OFFSETS: 6,
    Api.METADATA: 10,
    Api.CREATE_TOPICS: 5,
    Api.DELETE_TOPICS: 4,
    Api.OFFSET_COMMIT: 9,
    Api.OFFSET_FETCH: 8,
    Api.DESCRIBE_GROUPS: 5,
    Api.LIST_GROUPS: 5,
    Api.SASL_HANDSHAKE: 1,
    Api.SASL_AUTHENTICATE: 2,
    Api.CONSUMER_GROUP_HEARTBEAT: 1,
    Api.CONSUMER_GROUP_DESCRIBE: 0,
}
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
    }
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


class _Connection(FramedConnection):
    """A connection of frames. Responses arrive in the order of the requests."""

    BODY_BYTES_MIN: ClassVar[int] = 4
    BODY_BYTES_MAX: ClassVar[int] = REPLY_BYTES_MAX
    MAY_WANT: ClassVar[str] = "whether it requires a login (kafka://name:password@host:port),"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._numbers = count(1)

    async def ask(self, api: Api, /, **fields: Any) -> Any:
        """Send one request, and return the body of its response.

        Raises Unavailable, and Invalid for text that cannot be encoded.
        """
        version, number = _VERSIONS[api], next(self._numbers)
        try:
            request = encode_request(api, version, number, schema.request(api)(**fields), client_id="polywire")
        except UnicodeEncodeError:
            raise Invalid(ErrorCode.INVALID_TOPIC, "Kafka does not support this name") from None
        was_answered = self._is_answered
        (frame,) = await self.exchange(request, 1)
        try:
            return decode_response(api, version, frame)[1]
        except PeerError as error:
            raise makes_no_sense(error, self._address, is_answered=was_answered) from None


async def _dial(
    host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None, login: Login | None, mechanism: str | None
) -> _Connection:
    """Connect to one broker and log in. Raises Unavailable, Denied(LOGIN_FAILED)."""
    connection = await open_connection(_Connection, host, port, timeout_s=timeout_s, tls=tls)
    if login is not None:
        mechanism = mechanism or mechanism_for(host, is_secret=tls is not None)
        try:
            async with asyncio.timeout(timeout_s):
                await log_in(connection.ask, login, mechanism)
        except TimeoutError:
            connection.fail(Unavailable(ErrorCode.UNREACHABLE, "the login took too long"))
            raise Unavailable(
                ErrorCode.UNREACHABLE, f"the server does not respond to the login address={spell_address(host, port)}"
            ) from None
        except (BrokerError, asyncio.CancelledError):
            connection.fail(Unavailable(ErrorCode.STOPPING, "the login was rejected or cancelled"))
            raise
    return connection


class KafkaClient(Scope):
    """A client of a Kafka cluster: one connection to the first broker, and one to each leader of its topics.

    It implements ``WireClient`` as far as the protocol supports it. Create one with ``open``.

    ``Level.MEMORY`` is sent as ``Level.WRITTEN``, because a broker returns no offsets for unacknowledged records.
    """

    __slots__ = ("_connection", "_counts", "_groups", "_leaders", "_next")

    def __init__(self, connection: _Connection, dial: Callable[[str, int], Awaitable[_Connection]]) -> None:
        """Use ``connection``, and call ``dial`` to connect to other brokers of the cluster."""
        self._connection: Final = connection
        self._leaders: Final = Leaders(connection, dial)
        self._groups: Final = Groups(connection.ask, self._describe)
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
            tls: how to verify the broker (``client.tls.client_context``); None connects without TLS.
            login: the user; None connects without a login.
            mechanism: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512. None chooses PLAIN with TLS or if the broker is on this
                machine, and SCRAM-SHA-512 otherwise.

        Raises:
            Unavailable: the broker did not respond in time.
            Denied: LOGIN_FAILED.
        """

        async def dial(host: str, port: int) -> _Connection:
            return await _dial(host, port, timeout_s, tls, login, mechanism)

        return cls(await dial(host, port), dial)

    @property
    def abilities(self) -> frozenset[Ability]:
        """The features that this client supports over the Kafka protocol."""
        return ABILITIES

    async def close(self) -> None:
        """Close all connections. Pending calls fail with Unavailable."""
        closed = Unavailable(ErrorCode.STOPPING, "client was closed")
        self._leaders.fail(closed)
        self._connection.fail(closed)

    # Topics

    async def create_topic(self, topic: str, partition_count: int) -> None:
        """Create a topic. See ``WireClient``. Raises Invalid(INVALID_TOPIC) for a name that Kafka does not support."""
        topic_type = schema.request(Api.CREATE_TOPICS).Topics
        topics = [topic_type(name=topic, num_partitions=partition_count, replication_factor=-1)]
        answer = await self._connection.ask(Api.CREATE_TOPICS, topics=topics, timeout_ms=TIMEOUT_MS)
        check(answer.topics[0])

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records."""
        self._counts.pop(topic, None)
        answer = await self._connection.ask(Api.DELETE_TOPICS, topic_names=[topic], timeout_ms=TIMEOUT_MS)
        check(answer.responses[0], missing=ErrorCode.TOPIC_MISSING)

    async def topics(self) -> list[TopicInfo]:
        """Return the topics that this user may see, sorted by name."""
        answer = await self._connection.ask(Api.METADATA, topics=None, may_create=False)
        found = [TopicInfo(topic.name, topic.topic_id, len(topic.partitions)) for topic in answer.topics]
        return sorted(found, key=lambda topic: topic.name)

    async def _describe(self, topic: str, *, may_create: bool = False) -> Any:
        """Return the metadata of one topic. Raises BrokerError."""
        topics = [schema.request(Api.METADATA).Topics(name=topic)]
        answer = await self._connection.ask(Api.METADATA, topics=topics, may_create=may_create)
        check(answer.topics[0], missing=ErrorCode.TOPIC_MISSING)
        return answer.topics[0]

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Return the first and next offset of each partition. See ``WireClient``. The incarnation is 0."""
        partitions = (await self._describe(topic)).partitions
        epochs = {partition.index: partition.leader_epoch for partition in partitions}
        first = await self._list(topic, sorted(epochs), EARLIEST)
        ends = await self._list(topic, sorted(epochs), LATEST)
        return [PartitionBounds(number, 0, epochs[number], first[number], ends[number]) for number in sorted(epochs)]

    async def _list(self, topic: str, partitions: Sequence[int], time_ms: int) -> dict[int, int]:
        """Return the offsets that the broker lists for this time, by partition number. Raises BrokerError."""
        topic_type = schema.request(Api.LIST_OFFSETS).Topics
        entries = [topic_type.Partitions(index=number, timestamp=time_ms) for number in partitions]
        topics = [topic_type(name=topic, partitions=entries)]
        answer = await self._leaders.ask(topic, _partition_entries, Api.LIST_OFFSETS, replica_id=-1, topics=topics)
        for entry in answer.topics[0].partitions:
            check(entry)
        return {entry.index: entry.offset for entry in answer.topics[0].partitions}

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
        places = [self._place(topic, record, partition) for record in records]
        self._next += 1
        produced: list[Produced | None] = [None] * len(records)
        for number in dict.fromkeys(places):
            rows = [row for row, place in enumerate(places) if place == number]
            for part in _batches(rows, records):
                offset = await self._append(topic, number, [records[row] for row in part], level)
                for index, row in enumerate(part):
                    produced[row] = Produced(number, offset + index)
        return [place for place in produced if place is not None]

    def _place(self, topic: str, record: Record, partition: int | None) -> int:
        if partition is not None:
            return partition
        size = self._counts[topic]
        return self._next % size if record.key is None else partition_of_key(record.key, size)

    async def _append(self, topic: str, partition: int, records: Sequence[Record], level: Level) -> int:
        """Append one batch, and return the offset of its first record. Raises BrokerError."""
        topic_type = schema.request(Api.PRODUCE).Topics
        entries = [topic_type.Partitions(index=partition, records=encode_batch(records))]
        topics = [topic_type(name=topic, partitions=entries)]
        answer = await self._leaders.ask(
            topic, _answered, Api.PRODUCE, acks=_ACKS[level], timeout_ms=TIMEOUT_MS, topics=topics
        )
        entry = answer.responses[0].partitions[0]
        if entry.error == WireError.UNKNOWN_TOPIC_OR_PARTITION:
            self._counts.pop(topic, None)
        check(entry)
        offset: int = entry.base_offset
        return offset

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
        topic_type = schema.request(Api.FETCH).Topics
        entries = [topic_type.Partitions(partition=partition, fetch_offset=offset, partition_max_bytes=FETCH_BYTES)]
        answer = await self._leaders.ask(
            topic,
            _answered,
            Api.FETCH,
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=FETCH_BYTES,
            topics=[topic_type(topic=topic, partitions=entries)],
        )
        entry = answer.responses[0].partitions[0]
        if entry.error == WireError.UNKNOWN_TOPIC_OR_PARTITION:
            await self._describe(topic)  # raises if the topic is missing
        check(entry)
        return understood(decode_batches, entry.records or b"", offset=offset)[:records_max]

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

        ``group`` limits the result to one name.

        ``MemberInfo.wire`` is the member's client id. For members of Polywire's other protocols, it is the name of the
        protocol. The protocol does not report a group's owner, when members were last seen, or which topics a group of
        another protocol reads.
        """
        return await self._groups.groups(group)


def _partition_entries(answer: Any) -> Iterator[Any]:
    return (entry for topic in answer.topics for entry in topic.partitions)


def _answered(answer: Any) -> Iterator[Any]:
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
