"""The asynchronous client of the Iggy protocol, in its documented dialect of 2023.

* Requests are pipelined over one connection.
* Records that the protocol does not support are rejected before anything is sent.
* The protocol does not report the offsets of sent records. This client finds sent records by their ids.
"""

from __future__ import annotations

import asyncio
import ssl
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Final, ParamSpec, Protocol, TypeVar
from uuid import uuid4

from polywire.client.base import Ability, Membership, PartitionBounds, Produced, TopicInfo
from polywire.client.connection import PipelinedConnection, Scope, open_connection
from polywire.client.failures import beyond, cannot, from_offset
from polywire.errors import BrokerError, Conflict, Denied, ErrorCode, Invalid, Missing, PeerError, Unavailable
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.client_codec import ident, request
from polywire.protocols.iggy.messages import HEAD, U32, U64, Code, Consumer, Refused
from polywire.records.columns import Record
from polywire.records.partitioner import xxh32
from polywire.types import DEFAULT_PARTITION_COUNT, DEFAULT_STREAM, Assignor, Level, TopicName

WIRE: Final = "documented Iggy"  # the protocol's name in error messages
OPEN_TIMEOUT_S: Final = 10.0
REPLY_BYTES_MAX: Final = 256 * 1024 * 1024  # bytes per reply
SEND_RECORDS: Final = 1_000  # records per request
FETCH_RECORDS: Final = 1_000  # records per request; the protocol limits records, not bytes
SEND_BYTES: Final = 4 * 1024 * 1024  # payload bytes per request, well below the protocol's limit of 10 MiB
# records per read when searching for a sent record among records that other clients wrote in the meantime
LOOK_BACK_RECORDS: Final = 1_000
CREATE_TRIES_MAX: Final = 8  # in this dialect, clients choose the numbers of topics, so two clients can choose the same
SECOND_US: Final = 1_000_000
READER: Final = Consumer(group=False, identifier=1)  # reads store no offset, so any consumer number works

ABILITIES: Final = frozenset(
    {
        Ability.HEADERS,
        Ability.IDS,
        Ability.BINARY_VALUES,
        Ability.WHITE_SPACE_VALUES,
        Ability.CHOOSE_PARTITION,
        Ability.CREATE_TOPIC,
        Ability.DELETE_TOPIC,
        Ability.OFFSET_BY_TIME,
        Ability.GROUPS,
        Ability.AT_ONCE,
        Ability.POSITIONS,
    }
)

_MISSING: Final = {
    1009: ErrorCode.TOPIC_MISSING,
    1010: ErrorCode.TOPIC_MISSING,
    2010: ErrorCode.TOPIC_MISSING,
    2011: ErrorCode.TOPIC_MISSING,
    3007: ErrorCode.PARTITION_MISSING,
    3008: ErrorCode.PARTITION_MISSING,
    5000: ErrorCode.GROUP_MISSING,
    5002: ErrorCode.MEMBER_MISSING,
}
_CONFLICTS: Final = {
    1011: ErrorCode.TOPIC_EXISTS,
    1012: ErrorCode.TOPIC_EXISTS,
    2012: ErrorCode.TOPIC_EXISTS,
    2013: ErrorCode.TOPIC_EXISTS,
    5001: ErrorCode.GROUP_EXISTS,
}
_INVALID: Final = {
    1013: ErrorCode.INVALID_TOPIC,
    2014: ErrorCode.INVALID_TOPIC,
    2015: ErrorCode.INVALID_PARTITION_COUNT,
    4022: ErrorCode.RECORD_TOO_LARGE,
}

_DENIED: Final = {
    40: (ErrorCode.LOGIN_REQUIRED, "log in first, as in iggy://name:password@host:port"),
    41: (ErrorCode.DENIED, "not allowed"),
}

_P = ParamSpec("_P")
_T = TypeVar("_T")


def failure_of(status: int) -> BrokerError:
    """Return the error for a status."""
    message = f"the broker rejected the request status={status}"
    if status in _MISSING:
        return Missing(_MISSING[status], message)
    if status in _CONFLICTS:
        return Conflict(_CONFLICTS[status], message)
    if status in _DENIED:
        code, cause = _DENIED[status]
        return Denied(code, f"{cause} status={status}")
    if status in (1, 5):
        return Unavailable(ErrorCode.STOPPING, message)
    return Invalid(_INVALID.get(status, ErrorCode.INVALID_REQUEST), message)


def checked_as(
    failure: Callable[[int], BrokerError], make: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Call an encoder or decoder. If it raises a protocol error, raise ``failure`` of the error's number instead."""
    try:
        return make(*args, **kwargs)
    except Refused as error:
        raise failure(error.number) from None


def _checked(make: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    return checked_as(failure_of, make, *args, **kwargs)


class BrokerConnection(Protocol):
    """A connection to an Iggy broker, in any version of the protocol."""

    @property
    def loss(self) -> BrokerError | None:
        """Why every call fails without sending anything; None while the connection can be used."""

    async def ask(self, code: Code, body: bytes = b"") -> bytes:
        """Send one request, and return the payload of its reply. Raises BrokerError."""

    def fail(self, error: BrokerError) -> None:
        """Close the connection."""


class _Connection(PipelinedConnection[tuple[int, bytes]]):
    """A connection. A reply has a status, a length and a payload."""

    def _end_of(self, data: bytearray, at: int) -> int:
        if len(data) - at < HEAD.size:
            return 0
        status, size = HEAD.unpack_from(data, at)
        if size > REPLY_BYTES_MAX:
            raise PeerError(f"invalid response status={status} bytes={size}", fatal=True)
        return int(at + HEAD.size + size)

    def _reply(self, data: bytearray, at: int, end: int) -> tuple[int, bytes]:
        return HEAD.unpack_from(data, at)[0], bytes(memoryview(data)[at + HEAD.size : end])

    async def ask(self, code: Code, body: bytes = b"") -> bytes:
        """Send one request, and return the payload of its reply. Raises BrokerError."""
        [(status, payload)] = await self.exchange(request(code, body), 1)
        if status:
            raise failure_of(status)
        return payload


class IggyClient(Scope):
    """A client of the protocol version of 2023. It implements ``WireClient`` as far as that version supports it.

    Create one with ``open``.

    The part of a topic's full name before the first dot is the stream. Without a dot, the stream is ``default``. A
    record's key chooses the partition and is not stored. Records without a key are distributed round-robin. The group
    named ``group-7`` has the number 7 in the protocol. Other names are hashed to a number. Each member of a group uses
    its own connection. The protocol has no generations, so ``generation`` is 0.
    """

    __slots__ = ("_another", "_connection", "_members", "_partitions", "_round_robin")

    def __init__(self, connection: BrokerConnection, another: Callable[[], Awaitable[BrokerConnection]]) -> None:
        """``connection`` is used for requests. ``another`` opens further connections to the same broker."""
        self._connection: BrokerConnection = connection
        self._another: Final = another
        self._members: dict[tuple[str, str, str], BrokerConnection] = {}
        self._partitions: dict[str, int] = {}
        self._round_robin = 0

    @classmethod
    async def open(
        cls, host: str, port: int, *, timeout_s: float = OPEN_TIMEOUT_S, tls: ssl.SSLContext | None = None
    ) -> IggyClient:
        """Connect.

        Args:
            host: name or address of the broker.
            port: port of its Iggy listener.
            timeout_s: time limit for this and each further connection, in seconds.
            tls: how to verify the broker (``client.address.client_context``); None connects without TLS.

        Raises:
            Unavailable: the broker is not reachable.
        """
        another = partial(open_connection, _Connection, host, port, timeout_s=timeout_s, tls=tls)
        return cls(await another(), another)

    @property
    def abilities(self) -> frozenset[Ability]:
        """The features of the Iggy protocol of 2023."""
        return ABILITIES

    async def close(self) -> None:
        """Close all connections, which removes their members from groups. Pending calls fail with Unavailable."""
        for connection in (self._connection, *self._members.values()):
            connection.fail(Unavailable(ErrorCode.STOPPING, "client was closed"))
        self._members.clear()

    # Topics

    async def create_topic(self, topic: str, partition_count: int) -> None:
        """Create a topic, and its stream if it is missing. Each gets the lowest free number."""
        stream, short = split_name(topic)
        for number_of_tries in range(1, CREATE_TRIES_MAX + 1):
            try:
                await self._create_topic(stream, short, partition_count)
                break
            except Conflict:  # another client may have taken the number, or created the stream
                if number_of_tries == CREATE_TRIES_MAX or await self._has_topic(topic):
                    raise
        self._partitions.pop(topic, None)

    async def _create_topic(self, stream: str, short: str, partition_count: int) -> None:
        if stream != DEFAULT_STREAM:
            streams = _checked(client_codec.read_streams, await self._connection.ask(Code.GET_STREAMS))
            if stream not in {seen.name for seen in streams}:
                number = _lowest_free({seen.id for seen in streams})
                await self._connection.ask(Code.CREATE_STREAM, U32.pack(number) + client_codec.name(stream))
        payload = await self._connection.ask(Code.GET_TOPICS, _checked(ident, stream))
        number = _lowest_free({seen.id for seen in _checked(client_codec.read_topics, payload)})
        numbers = b"".join(map(U32.pack, (number, partition_count, 0)))
        await self._connection.ask(Code.CREATE_TOPIC, ident(stream) + numbers + _checked(client_codec.name, short))

    async def _has_topic(self, topic: str) -> bool:
        try:
            await self._connection.ask(Code.GET_TOPIC, topic_ident(topic))
        except Missing:
            return False
        return True

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records. Raises Missing(TOPIC_MISSING)."""
        self._partitions.pop(topic, None)
        await self._connection.ask(Code.DELETE_TOPIC, topic_ident(topic))

    async def topics(self) -> list[TopicInfo]:
        """Return the topics of all streams, in order of their full names. ``id`` is empty."""
        found: list[TopicInfo] = []
        for stream in _checked(client_codec.read_streams, await self._connection.ask(Code.GET_STREAMS)):
            payload = await self._connection.ask(Code.GET_TOPICS, ident(stream.id))
            prefix = "" if stream.name == DEFAULT_STREAM else f"{stream.name}."
            topics = _checked(client_codec.read_topics, payload)
            found += [TopicInfo(prefix + topic.name, b"", topic.partition_count) for topic in topics]
        return sorted(found, key=lambda info: info.name)

    async def topic_options(self, topic: str) -> client_codec.TopicLimits:
        """Return the limits of a topic. Raises Missing(TOPIC_MISSING)."""
        payload = await self._connection.ask(Code.GET_TOPIC, topic_ident(topic))
        seen, _ = _checked(client_codec.read_topic, payload)
        return client_codec.TopicLimits(seen.partition_count, seen.expiry_s * SECOND_US, 0, ())

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Raise Invalid(INVALID_REQUEST): the protocol does not report first offsets and epochs of partitions."""
        raise cannot("Iggy", "report the first offsets of a topic (use the broker's polywire:// address)")

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Return the offset of the first record appended at or after a time, or the next offset if there is none.

        The time is in microseconds since 1970.
        """
        polled = await self._poll(topic, partition, 2, max(time_us, 0), 1)
        return polled.records[0].offset if polled.records else (await self.extent(topic, partition))[1]

    async def extent(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the offset of the first record and the next offset. Both are 0 if the partition is empty."""
        first = await self._poll(topic, partition, 3, 0, 1)
        last = await self._poll(topic, partition, 4, 0, 1)
        return first.records[0].offset if first.records else 0, last.records[0].offset + 1 if last.records else 0

    # Records

    async def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records, and return their offsets. See ``WireClient``.

        A missing topic is created with three partitions.

        A record without an id gets a random one, so that its offset can be found afterwards. Raises
        Invalid(INVALID_REQUEST) for ``Level.SYNCED``, null and empty values, times of origin and events, which the
        protocol does not support.
        """
        if level is Level.SYNCED:
            raise cannot(WIRE, "ask for synced records")
        if any(record.origin_time_us is not None or record.event is not None for record in records):
            raise cannot(WIRE, "send times of origin or events")
        count = await self._partition_count(topic)
        parts = parts_of(records)
        chosen = [self._choose_partition(part[0], count) if partition is None else partition for part in parts]
        bodies = [
            topic_ident(topic)
            + _partitioning(part[0], number, chosen=partition is not None)
            + _checked(client_codec.messages, part)
            for part, number in zip(parts, chosen, strict=True)
        ]
        sends = [self._connection.ask(Code.SEND, body) for body in bodies]
        await asyncio.gather(*sends)
        produced: list[Produced | None] = [None] * len(parts)
        for number in dict.fromkeys(chosen):
            indexes = [index for index, other in enumerate(chosen) if other == number]
            offsets = await self._find(
                topic, number, [(parts[index][0].id or b"", len(parts[index])) for index in indexes]
            )
            for index, offset in zip(indexes, offsets, strict=True):
                produced[index] = (
                    await self._find_in_others(topic, number, parts[index]) if offset < 0 else Produced(number, offset)
                )
        return [
            Produced(first.partition, first.offset + number)
            for first, part in zip(produced, parts, strict=True)
            if first is not None
            for number in range(len(part))
        ]

    def _choose_partition(self, record: Record, count: int) -> int:
        if record.key:
            return xxh32(record.key) % count
        self._round_robin += 1
        return self._round_robin % count

    async def _partition_count(self, topic: str) -> int:
        """Return the number of partitions, which is cached. A missing topic is created."""
        known = self._partitions.get(topic)
        for _ in range(2):  # a missing topic is created after the first request
            if known is not None:
                break
            try:
                payload = await self._connection.ask(Code.GET_TOPIC, topic_ident(topic))
                known = self._partitions[topic] = _checked(client_codec.read_topic, payload)[0].partition_count
            except Missing:
                with suppress(Conflict):  # another client created the topic
                    await self.create_topic(topic, DEFAULT_PARTITION_COUNT)
        if not known:
            raise Missing(ErrorCode.PARTITION_MISSING, f"topic has no partitions name={topic!r}")
        return known

    async def _find(self, topic: str, partition: int, sent: Sequence[tuple[bytes, int]]) -> list[int]:
        """Return the offset of the first record of each request, or -1 if it is not found.

        ``sent`` has, for each request of this connection in order, the id of its first record and its number of
        records. The newest records are searched first, so one read per request is enough unless other clients also
        write.
        """
        newest = await self._poll(topic, partition, 4, 0, 1)
        end = newest.records[0].offset + 1 if newest.records else 0
        at = max(end - sum(count for _, count in sent), 0)
        offsets: list[int] = []
        for first_id, count in sent:
            offset = await self._scan(topic, partition, first_id, at, at + 1)
            if offset < 0:
                offset = await self._scan(topic, partition, first_id, at, end)
            back = at if not offsets else 0  # only for the first request: search backwards until it is found
            while offset < 0 and back > 0:
                start = max(back - LOOK_BACK_RECORDS, 0)
                offset = await self._scan(topic, partition, first_id, start, back)
                back = start
            offsets.append(offset)
            at = offset + count if offset >= 0 else at
        return offsets

    async def _scan(self, topic: str, partition: int, first_id: bytes, start: int, end: int) -> int:
        """Return the offset of the record with this id in the range from ``start`` to ``end`` (exclusive), or -1."""
        while start < end:
            seen = (await self._poll(topic, partition, 1, start, min(end - start, LOOK_BACK_RECORDS))).records
            for record in seen:
                if record.id == first_id:
                    return record.offset
            if not seen:
                break
            start = beyond(start, seen[-1].offset + 1, "offset")
        return -1

    async def _find_in_others(self, topic: str, chosen: int, part: Sequence[Record]) -> Produced:
        """Find sent records in partitions other than ``chosen``, because the topic may use another hash of the key."""
        for number in range(await self._partition_count(topic)):
            if number != chosen:
                (offset,) = await self._find(topic, number, [(part[0].id or b"", len(part))])
                if offset >= 0:
                    return Produced(number, offset)
        raise Unavailable(ErrorCode.STOPPING, "acknowledged records cannot be found")

    async def _poll(self, topic: str, partition: int, kind: int, value: int, count: int) -> client_codec.Polled:
        at = client_codec.place(READER, topic_ident(topic), partition + 1)
        return _checked(
            client_codec.read_polled, await self._connection.ask(Code.POLL, client_codec.poll(at, kind, value, count))
        )

    async def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = FETCH_RECORDS, wait_ms: int = 0
    ) -> list[Record]:
        """Return records from an offset on, without keys. See ``WireClient``.

        The protocol cannot wait, so ``wait_ms`` is ignored.
        """
        if offset < 0:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"an offset must not be negative offset={offset}")
        return from_offset(list((await self._poll(topic, partition, 1, offset, records_max)).records), offset)

    # Groups

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Join a group over its own connection. See ``WireClient``. A missing group or topic is created."""
        if assignor is Assignor.RANGE:
            raise cannot(WIRE, "choose an assignor")
        await self._partition_count(topic)
        body = topic_ident(topic) + U32.pack(_group_number(group))
        key = (group, topic, member)
        connection = self._members.get(key)
        if connection is None:
            connection = self._members[key] = await self._another()
        try:
            await connection.ask(Code.JOIN_GROUP, body)
        except Missing as error:
            if error.code is not ErrorCode.GROUP_MISSING:
                raise
            await connection.ask(Code.CREATE_GROUP, body)
            await connection.ask(Code.JOIN_GROUP, body)
        return await self._membership(connection, body)

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Return the member's assignment. A member stays in the group until its connection is closed."""
        connection = self._member(group, topic, member)
        return await self._membership(connection, topic_ident(topic) + U32.pack(_group_number(group)))

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Leave a group, and close the member's connection. Raises Missing(MEMBER_MISSING)."""
        connection = self._member(group, topic, member)
        await connection.ask(Code.LEAVE_GROUP, topic_ident(topic) + U32.pack(_group_number(group)))
        del self._members[group, topic, member]
        connection.fail(Unavailable(ErrorCode.STOPPING, "the member has left"))

    async def group_members(self, topic: str) -> dict[str, int]:
        """Return how many members each group of a topic has.

        In this version, groups only have numbers. The name of group 1 is ``group-1``.
        """
        payload = await self._connection.ask(Code.GET_GROUPS, topic_ident(topic))
        return {f"group-{number}": count for number, count in _checked(client_codec.read_groups, payload).items()}

    def _member(self, group: str, topic: str, member: str) -> BrokerConnection:
        connection = self._members.get((group, topic, member))
        if connection is None:
            raise Missing(ErrorCode.MEMBER_MISSING, f"this client has not joined group={group!r} member={member!r}")
        return connection

    async def _membership(self, connection: BrokerConnection, body: bytes) -> Membership:
        indexes = _checked(client_codec.read_client_id, await connection.ask(Code.GET_ME))
        _, _, members = _checked(client_codec.read_group, await connection.ask(Code.GET_GROUP, body))
        for member in members:
            if member.id == indexes:
                return Membership(0, tuple(number - 1 for number in member.partitions))
        raise Missing(ErrorCode.MEMBER_MISSING, "this connection is not a member of the group")

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Commit the next offset to read.

        The protocol stores the last consumed offset, so offset 0 cannot be committed. An offset above the next one is
        rejected, too.
        """
        if offset < 1:
            raise cannot(WIRE, "store offset 0")
        at = client_codec.place(
            Consumer(group=True, identifier=_group_number(group)), topic_ident(topic), partition + 1
        )
        connection = self._members.get((group, topic, member), self._connection)
        await connection.ask(Code.STORE_OFFSET, at + U64.pack(offset - 1))

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return the next offset to read, or None if the group does not exist.

        The result is 0 if nothing, or only the record at offset 0, was consumed: the protocol does not distinguish
        these cases.
        """
        at = client_codec.place(
            Consumer(group=True, identifier=_group_number(group)), topic_ident(topic), partition + 1
        )
        try:
            payload = await self._connection.ask(Code.GET_OFFSET, at)
        except Missing as error:
            if error.code is ErrorCode.GROUP_MISSING:
                return None
            raise
        stored = _checked(client_codec.read_offset, payload)[2]
        return stored + 1 if stored else 0


def parts_of(records: Sequence[Record]) -> list[list[Record]]:
    """Split records into requests: records of the same key, of limited size.

    The first record of each part gets an id, by which its offset can be found.
    """
    parts: list[list[Record]] = []
    for _, run in groupby(records, key=lambda record: record.key or None):
        size = SEND_BYTES + 1
        for record in run:
            size += len(record.value or b"")
            if size > SEND_BYTES or len(parts[-1]) >= SEND_RECORDS:
                parts.append([])
                size = len(record.value or b"")
            parts[-1].append(_named(record))
    return parts


def _partitioning(record: Record, number: int, *, chosen: bool) -> bytes:
    """Encode how the broker chooses the partition: by number if ``chosen`` or there is no key, otherwise by the key."""
    return (
        client_codec.to_partition(number + 1) if chosen or not record.key else _checked(client_codec.by_key, record.key)
    )


def _named(record: Record) -> Record:
    if record.id is not None:
        return record
    return Record(record.value, record.key, record.headers, id=uuid4().bytes)


def split_name(topic: str) -> tuple[str, str]:
    """Return stream and topic of a full name."""
    name = TopicName.parse(topic)
    return name.stream, name.topic


def topic_ident(topic: str) -> bytes:
    """Encode stream and topic of a full name. Raises Invalid."""
    return b"".join(_checked(ident, part) for part in split_name(topic))


def _group_number(group: str) -> int:
    """Return the number of a group. In this version, groups have no names."""
    number = group.removeprefix("group-")
    if number != group and number.isascii() and number.isdigit() and 0 < int(number) < 2**32 - 32:
        return int(number)
    return zlib.crc32(group.encode("utf-8", "surrogateescape")) % (2**32 - 64) + 1


def _lowest_free(taken: set[int]) -> int:
    return next(number for number in range(1, len(taken) + 2) if number not in taken)
