"""The asynchronous client of the Iggy wire, in its documented dialect.

Promises: requests are pipelined on one connection and answered in order; what the wire cannot carry is refused before anything is sent; the
places told of records are found by their ids, because the wire does not tell them. Must not know: the broker's insides, other wires.
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
from polywire.client.connection import PipelinedConnection, Scope
from polywire.client.cursors import beyond, from_offset
from polywire.client.opening import open_connection
from polywire.client.refusals import cannot
from polywire.errors import BrokerError, Conflict, Denied, ErrorCode, Invalid, Missing, PeerError, Unavailable
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.client_codec import ident, request
from polywire.protocols.iggy.messages import HEAD, U32, U64, Code, Consumer, Refused
from polywire.records.columns import Record
from polywire.records.partitioner import xxh32
from polywire.types import DEFAULT_PARTITION_COUNT, DEFAULT_STREAM, Assignor, Level, TopicName

WIRE: Final = "documented Iggy"  # in what is refused
OPEN_TIMEOUT_S: Final = 10.0
REPLY_BYTES_MAX: Final = 256 * 1024 * 1024  # what a broker may send in one reply
SEND_RECORDS: Final = 1_000  # of one request
FETCH_RECORDS: Final = 1_000  # asked for at a time: the wire counts them, however large they are
SEND_BYTES: Final = 4 * 1024 * 1024  # of one request's payloads, well below the 10 MiB that the wire allows
LOOK_BACK_RECORDS: Final = 1_000  # read at a time when others wrote between a send and the look for its records
CREATE_TRIES_MAX: Final = 8  # numbers are chosen by clients here, so that two may choose the same
READER: Final = Consumer(group=False, who=1)  # stores nothing, so any number will do

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
    """What a status means in our words."""
    message = f"the broker refused status={status}"
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
    """Write or read something; what the wire refuses becomes an error of ours."""
    try:
        return make(*args, **kwargs)
    except Refused as error:
        raise failure(error.number) from None


def _checked(make: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    return checked_as(failure_of, make, *args, **kwargs)


class Asking(Protocol):
    """A connection, in whatever dialect."""

    async def ask(self, code: Code, body: bytes = b"") -> bytes:
        """Send one request; returns its reply's payload. Raises BrokerError."""

    def fail(self, error: BrokerError) -> None:
        """End the connection."""


class _Connection(PipelinedConnection[tuple[int, bytes]]):
    """Requests out and replies in: a status, a length and a payload."""

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
        """Send one request; returns its reply's payload. Raises BrokerError."""
        [(status, payload)] = await self.exchange(request(code, body), 1)
        if status:
            raise failure_of(status)
        return payload


class IggyClient(Scope):
    """A broker over the documented dialect; made by ``open``. Implements ``WireClient`` as far as the wire goes.

    A topic's full name up to its first dot is the stream, without a dot it lies in ``default``. A record's key chooses the partition and
    never comes back; one without goes to the partitions in turn. A group called ``group-<n>`` is the wire's group n, any other name is made
    into such a number. Each member is a connection of its own, and generations, which the wire has not, are 0.
    """

    __slots__ = ("_another", "_connection", "_members", "_partitions", "_round_robin")

    def __init__(self, connection: Asking, another: Callable[[], Awaitable[Asking]]) -> None:
        """another: opens a further connection to the same broker, as this one was opened."""
        self._connection: Final = connection
        self._another: Final = another
        self._members: dict[tuple[str, str, str], Asking] = {}
        self._partitions: dict[str, int] = {}
        self._round_robin = 0

    @classmethod
    async def open(
        cls, host: str, port: int, *, timeout_s: float = OPEN_TIMEOUT_S, tls: ssl.SSLContext | None = None
    ) -> IggyClient:
        """Connect.

        Args:
            host: name or address of the broker.
            port: where its Iggy wire listens.
            timeout_s: longest wait, in seconds, for this and each further connection.
            tls: how to verify the broker (``client.tls.client_context``); None: without TLS.

        Raises:
            Unavailable: nobody answers.
        """
        another = partial(open_connection, _Connection, host, port, timeout_s=timeout_s, tls=tls)
        return cls(await another(), another)

    @property
    def abilities(self) -> frozenset[Ability]:
        """What the Iggy wire of 2023 can do."""
        return ABILITIES

    async def close(self) -> None:
        """Close all connections, which makes their members leave; pending calls fail with Unavailable."""
        for connection in (self._connection, *self._members.values()):
            connection.fail(Unavailable(ErrorCode.STOPPING, "client was closed"))
        self._members.clear()

    # Topics

    async def create_topic(self, topic: str, partition_count: int) -> None:
        """Make a topic, and its stream when that is missing; both get the lowest number that is free."""
        stream, short = split_name(topic)
        if stream != DEFAULT_STREAM:
            streams = _checked(client_codec.read_streams, await self._connection.ask(Code.GET_STREAMS))
            if stream not in {seen.name for seen in streams}:
                number = _lowest_free({seen.id for seen in streams})
                await self._connection.ask(Code.CREATE_STREAM, U32.pack(number) + client_codec.name(stream))
        payload = await self._connection.ask(Code.GET_TOPICS, _checked(ident, stream))
        number = _lowest_free({seen.id for seen in _checked(client_codec.read_topics, payload)})
        numbers = b"".join(map(U32.pack, (number, partition_count, 0)))
        await self._connection.ask(Code.CREATE_TOPIC, ident(stream) + numbers + _checked(client_codec.name, short))
        self._partitions.pop(topic, None)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records. Raises Missing(TOPIC_MISSING)."""
        self._partitions.pop(topic, None)
        await self._connection.ask(Code.DELETE_TOPIC, topic_ident(topic))

    async def topics(self) -> list[TopicInfo]:
        """Return the topics of all streams, by full name; ``id`` is empty."""
        found: list[TopicInfo] = []
        for stream in _checked(client_codec.read_streams, await self._connection.ask(Code.GET_STREAMS)):
            payload = await self._connection.ask(Code.GET_TOPICS, ident(stream.id))
            prefix = "" if stream.name == DEFAULT_STREAM else f"{stream.name}."
            topics = _checked(client_codec.read_topics, payload)
            found += [TopicInfo(prefix + topic.name, b"", topic.partition_count) for topic in topics]
        return sorted(found, key=lambda info: info.name)

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Refuse with Invalid(INVALID_REQUEST): the wire cannot tell the epoch of a partition."""
        raise cannot(WIRE, "tell the epoch of a partition")

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Return the first offset appended at a time (microseconds since 1970) or after it, else the next offset."""
        polled = await self._poll(topic, partition, 2, max(time_us, 0), 1)
        return polled.records[0].offset if polled.records else (await self.extent(topic, partition))[1]

    async def extent(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the offset of the first record and the one behind the last, 0 and 0 where there are none."""
        first = await self._poll(topic, partition, 3, 0, 1)
        last = await self._poll(topic, partition, 4, 0, 1)
        return first.records[0].offset if first.records else 0, last.records[0].offset + 1 if last.records else 0

    # Records

    async def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records, and return where each went; see ``WireClient``. A missing topic is made, with three partitions.

        Each record goes out with an id, its own or a new one, by which it is found again. Raises Invalid(INVALID_REQUEST) for
        ``Level.SYNCED``, null and empty values, times of origin and events, which the wire cannot carry.
        """
        if level is Level.SYNCED:
            raise cannot(WIRE, "ask for synced records")
        if any(record.origin_time_us is not None or record.event is not None for record in records):
            raise cannot(WIRE, "carry times of origin or events")
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
        places: list[Produced | None] = [None] * len(parts)
        for number in dict.fromkeys(chosen):
            own = [index for index, other in enumerate(chosen) if other == number]
            offsets = await self._find(topic, number, [(parts[index][0].id or b"", len(parts[index])) for index in own])
            for index, offset in zip(own, offsets, strict=True):
                places[index] = (
                    await self._elsewhere(topic, number, parts[index]) if offset < 0 else Produced(number, offset)
                )
        return [
            Produced(place.partition, place.offset + number)
            for place, part in zip(places, parts, strict=True)
            if place is not None
            for number in range(len(part))
        ]

    def _choose_partition(self, record: Record, count: int) -> int:
        """Where the broker puts a key unless its topic has another function, or whose turn it is."""
        if record.key:
            return xxh32(record.key) % count
        self._round_robin += 1
        return self._round_robin % count

    async def _partition_count(self, topic: str) -> int:
        """Partitions of a topic, which is made when it is missing; asked for once."""
        known = self._partitions.get(topic)
        for _ in range(CREATE_TRIES_MAX):
            if known is not None:
                break
            try:
                payload = await self._connection.ask(Code.GET_TOPIC, topic_ident(topic))
                known = self._partitions[topic] = _checked(client_codec.read_topic, payload)[0].partition_count
            except Missing:
                with suppress(Conflict):  # somebody else made it, or took the number
                    await self.create_topic(topic, DEFAULT_PARTITION_COUNT)
        if not known:
            raise Missing(ErrorCode.PARTITION_MISSING, f"topic has no partitions name={topic!r}")
        return known

    async def _find(self, topic: str, partition: int, sent: Sequence[tuple[bytes, int]]) -> list[int]:
        """Return offsets of requests, by first id and number of records, that this connection has sent to a partition in this order.

        -1 for one that is not there. The newest is looked at first: unless somebody else writes, a look per request is enough.
        """
        newest = await self._poll(topic, partition, 4, 0, 1)
        end = newest.records[0].offset + 1 if newest.records else 0
        at = max(end - sum(count for _, count in sent), 0)
        offsets: list[int] = []
        for first_id, count in sent:
            offset = await self._scan(topic, partition, first_id, at, at + 1)
            if offset < 0:
                offset = await self._scan(topic, partition, first_id, at, end)
            back = at if not offsets else 0  # what precedes our first is searched backwards, until it is found
            while offset < 0 and back > 0:
                start = max(back - LOOK_BACK_RECORDS, 0)
                offset = await self._scan(topic, partition, first_id, start, back)
                back = start
            offsets.append(offset)
            at = offset + count if offset >= 0 else at
        return offsets

    async def _scan(self, topic: str, partition: int, first_id: bytes, start: int, end: int) -> int:
        """The offset of the record with this id in ``start <= offset < end``, -1 when it is not there."""
        while start < end:
            seen = (await self._poll(topic, partition, 1, start, min(end - start, LOOK_BACK_RECORDS))).records
            for record in seen:
                if record.id == first_id:
                    return record.offset
            if not seen:
                break
            start = beyond(start, seen[-1].offset + 1, "offset")
        return -1

    async def _elsewhere(self, topic: str, chosen: int, part: Sequence[Record]) -> Produced:
        """Where a request went whose key the topic has a function of its own for."""
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
        """Return records from an offset on; see ``WireClient``. Without keys, and at once, whatever ``wait_ms``: the wire cannot wait."""
        if offset < 0:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"an offset must not be negative offset={offset}")
        return from_offset(list((await self._poll(topic, partition, 1, offset, records_max)).records), offset)

    # Groups

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Become a member of a group, over a connection of its own; see ``WireClient``. A missing group, or topic, is made."""
        if assignor is Assignor.RANGE:
            raise cannot(WIRE, "choose how partitions are dealt out")
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
        """Return one's place in a group, of which one stays a member as long as the connection lives."""
        connection = self._member(group, topic, member)
        return await self._membership(connection, topic_ident(topic) + U32.pack(_group_number(group)))

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Give up one's place in a group, and close the member's connection. Raises Missing(MEMBER_MISSING)."""
        connection = self._member(group, topic, member)
        await connection.ask(Code.LEAVE_GROUP, topic_ident(topic) + U32.pack(_group_number(group)))
        del self._members[group, topic, member]
        connection.fail(Unavailable(ErrorCode.STOPPING, "the member has left"))

    async def group_names(self, topic: str) -> list[str]:
        """Return the names of a topic's groups; a dialect without names numbers them: ``group-1``."""
        payload = await self._connection.ask(Code.GET_GROUPS, topic_ident(topic))
        return [f"group-{number}" for number in _checked(client_codec.read_groups, payload)]

    def _member(self, group: str, topic: str, member: str) -> Asking:
        connection = self._members.get((group, topic, member))
        if connection is None:
            raise Missing(ErrorCode.MEMBER_MISSING, f"this client has not joined group={group!r} member={member!r}")
        return connection

    async def _membership(self, connection: Asking, body: bytes) -> Membership:
        own = _checked(client_codec.read_client_id, await connection.ask(Code.GET_ME))
        _, _, members = _checked(client_codec.read_group, await connection.ask(Code.GET_GROUP, body))
        for member in members:
            if member.id == own:
                return Membership(0, tuple(number - 1 for number in member.partitions))
        raise Missing(ErrorCode.MEMBER_MISSING, "this connection is not a member of the group")

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Store the next offset; the wire knows the last one consumed only, so 0 cannot be stored, nor one beyond the newest record."""
        if offset < 1:
            raise cannot(WIRE, "store that nothing was consumed")
        at = client_codec.place(Consumer(group=True, who=_group_number(group)), topic_ident(topic), partition + 1)
        connection = self._members.get((group, topic, member), self._connection)
        await connection.ask(Code.STORE_OFFSET, at + U64.pack(offset - 1))

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """None for a group that does not exist, 0 when nothing, or one record, was ever consumed: the wire cannot tell these apart."""
        at = client_codec.place(Consumer(group=True, who=_group_number(group)), topic_ident(topic), partition + 1)
        try:
            payload = await self._connection.ask(Code.GET_OFFSET, at)
        except Missing as error:
            if error.code is ErrorCode.GROUP_MISSING:
                return None
            raise
        stored = _checked(client_codec.read_offset, payload)[2]
        return stored + 1 if stored else 0


def parts_of(records: Sequence[Record]) -> list[list[Record]]:
    """Runs of records of one key that fit one request; each begins with a record that has an id."""
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
    """The record's key, or a partition when that was chosen or there is no key."""
    return (
        client_codec.to_partition(number + 1) if chosen or not record.key else _checked(client_codec.by_key, record.key)
    )


def _named(record: Record) -> Record:
    if record.id is not None:
        return record
    return Record(record.value, record.key, record.headers, id=uuid4().bytes)


def split_name(topic: str) -> tuple[str, str]:
    """Stream and topic of a full name."""
    name = TopicName.parse(topic)
    return name.stream, name.topic


def topic_ident(topic: str) -> bytes:
    """Stream and topic of a full name, as requests name them. Raises Invalid."""
    return b"".join(_checked(ident, part) for part in split_name(topic))


def _group_number(group: str) -> int:
    """The wire's number of a group, which has no name in this dialect."""
    number = group.removeprefix("group-")
    if number != group and number.isascii() and number.isdigit() and 0 < int(number) < 2**32 - 32:
        return int(number)
    return zlib.crc32(group.encode("utf-8", "surrogateescape")) % (2**32 - 64) + 1


def _lowest_free(taken: set[int]) -> int:
    return next(number for number in range(1, len(taken) + 2) if number not in taken)
