"""The asynchronous client of the `polywire` wire.

Promises: requests may be made concurrently, each gets its own answer; when the connection is lost every call under way fails with
Unavailable. Must not know: the broker's insides, other wires.
"""

from __future__ import annotations

import asyncio
import ssl
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, TypeVar

import msgspec

from polywire.client.base import Ability, Membership, PartitionBounds, Produced, TopicInfo
from polywire.client.connection import Scope
from polywire.client.consume import EARLIEST, Delivered, Start, consume
from polywire.client.cursors import beyond
from polywire.client.group_info import GroupInfo, MemberInfo
from polywire.client.kept_info import TransactionInfo, WriterInfo
from polywire.client.login import Login
from polywire.client.polywire_connection import PolywireConnection
from polywire.client.tls import secured
from polywire.client.unreachable import cannot_connect
from polywire.errors import BrokerError, ErrorCode, Invalid, PeerError, Unavailable
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import (
    decode_answer,
)
from polywire.protocols.polywire.messages import BY_KEY, Head, Verb
from polywire.records.batch import read_header, walk
from polywire.records.columns import Record
from polywire.records.compression import expand_body
from polywire.records.fields import header_fields
from polywire.records.rows import from_records, to_records
from polywire.types import Assignor, Buffer, Level, PositionKind

OPEN_TIMEOUT_S: Final = 10.0
FETCH_BYTES_MAX: Final = 4 << 20  # of one fetch into Python records: some 10 MB of objects per MiB are enough at a time
EXPANDED_BYTES_MAX: Final = 64 << 20  # a compressed body may not grow beyond this
BATCH_BYTES: Final = 1 << 20  # records of one call are cut into batches of about this size
RECORD_OVERHEAD_BYTES: Final = 64  # what a record may cost beside its key and value

ABILITIES: Final = frozenset(Ability)

_H = TypeVar("_H", bound=Head)
_E = TypeVar("_E", bound=messages.KeptEntry)
_I = TypeVar("_I", TransactionInfo, WriterInfo)
_flags: Final = header_fields("flags")


class PolywireClient(Scope):
    """One connection to a broker; made by ``open``. Implements ``WireClient`` and what only this wire can do.

    Calls may be made concurrently. ``limits`` are those the broker told when the connection was opened (sizes in bytes, times in ms).

    Example:
        async with await PolywireClient.open("127.0.0.1", 9555) as client:
            async for delivered in client.consume("orders", group="billing"):
                print(delivered.value)
    """

    __slots__ = ("_connection", "limits")

    def __init__(self, connection: PolywireConnection, limits: messages.Limits) -> None:
        self._connection: Final = connection
        self.limits: Final = limits

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        timeout_s: float = OPEN_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
        login: Login | None = None,
    ) -> PolywireClient:
        """Connect, exchange the opening, and log in.

        Args:
            host: name or address of the broker.
            port: where its `polywire` wire listens.
            timeout_s: longest wait, in seconds, until all of it is done.
            tls: how to verify the broker (``client.tls.client_context``); None: without TLS.
            login: who logs in; None: nobody.

        Raises:
            Unavailable: nobody answers in time, or what answers does not speak this wire.
            Denied: LOGIN_FAILED.
            Busy: the broker has too many logins to check; come back later.
        """
        loop = asyncio.get_running_loop()
        connection = PolywireConnection(loop)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: connection, host, port, **secured(tls, host))
                limits = decode_answer(await connection.greeted, messages.Limits)
                if login is not None:
                    await connection.ask(Verb.LOGIN, messages.LogIn(login.name, login.password))
        except (OSError, TimeoutError, PeerError) as error:
            failure = cannot_connect(error, host, port)
            connection.fail(failure)
            raise failure from None
        except (BrokerError, asyncio.CancelledError):
            connection.fail(Unavailable(ErrorCode.STOPPING, "the login was rejected or cancelled"))
            raise
        return cls(connection, limits)

    @property
    def abilities(self) -> frozenset[Ability]:
        """What this wire can do: everything."""
        return ABILITIES

    async def close(self) -> None:
        """Close the connection; pending calls fail with Unavailable."""
        self._connection.fail(Unavailable(ErrorCode.STOPPING, "client was closed"))

    async def ping(self) -> None:
        """Return when the broker answers. Raises Unavailable."""
        await self._ask(Verb.PING, Head(), Head)

    async def create_topic(
        self, topic: str, partition_count: int | None = None, *, settings: dict[str, int | str | None] | None = None
    ) -> None:
        """Make a topic.

        Args:
            topic: full name, as for ``WireClient.create_topic``.
            partition_count: None: the broker's default.
            settings: by name: ``retention_age_us`` (microseconds), ``retention_bytes`` (of each partition), ``compaction`` (1: keep the
            newest
                record of each key), ``compression`` (none, lz4 or zstd), ``key_hash`` (fnv32, fnv64, xxh32 or murmur3). What is absent is the
                broker's default.

        Raises:
            Conflict: TOPIC_EXISTS.
            Invalid: INVALID_TOPIC, INVALID_PARTITION_COUNT, or INVALID_REQUEST for a setting there is not.
        """
        head = messages.CreateTopic(topic, partition_count, settings=settings or {})
        await self._ask(Verb.CREATE_TOPIC, head, messages.TopicDescription)

    async def describe(self, topic: str) -> messages.TopicDescription:
        """Return id, incarnations and settings of a topic. Raises Missing(TOPIC_MISSING)."""
        return await self._ask(Verb.DESCRIBE, messages.Describe(topic), messages.TopicDescription)

    async def grow_topic(self, topic: str, partition_count: int) -> None:
        """Add partitions to a topic until it has as many as this.

        Args:
            topic: full name.
            partition_count: how many there shall be; there are never fewer than before. Keys go to other partitions from then on.

        Raises:
            Missing: TOPIC_MISSING.
            Invalid: INVALID_PARTITION_COUNT.
            Busy: others changed the topic meanwhile.
        """
        await self._ask(Verb.GROW_TOPIC, messages.GrowTopic(topic, partition_count), Head)

    async def configure_topic(self, topic: str, settings: dict[str, int | str | None]) -> None:
        """Change settings of a topic; what is absent stays as it is.

        Args:
            topic: full name.
            settings: as for ``create_topic``, without ``key_hash``: records stay where they are. None: the broker's default.

        Raises:
            Missing: TOPIC_MISSING.
            Invalid: INVALID_REQUEST for a setting there is not, or that cannot be changed.
        """
        await self._ask(Verb.CONFIGURE_TOPIC, messages.ConfigureTopic(topic, settings), Head)

    async def purge_topic(self, topic: str) -> None:
        """Remove all records of a topic; offsets go on where they were. Raises Missing(TOPIC_MISSING).

        After another error some partitions are purged and others not: ask again.
        """
        await self._ask(Verb.PURGE_TOPIC, messages.PurgeTopic(topic), Head)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records. Raises Missing(TOPIC_MISSING)."""
        await self._ask(Verb.DELETE_TOPIC, messages.DeleteTopic(topic), Head)

    async def topics(self) -> list[TopicInfo]:
        """Return the topics this user may produce to or consume from, by name."""
        answer = await self._ask(Verb.TOPICS, messages.ListTopics(), messages.TopicList)
        return [TopicInfo(entry.name, entry.id, entry.partition_count) for entry in answer.topics]

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Return where each partition of a topic begins and ends, by number. Raises Missing(TOPIC_MISSING).

        What is told has been synced to the disk before.
        """
        answer = await self._ask(Verb.BOUNDS, messages.AskBounds([topic]), messages.BoundsList)
        return [
            PartitionBounds(entry.partition, entry.incarnation, entry.epoch, entry.first_offset, entry.next_offset)
            for entry in answer.topics[0].partitions
        ]

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Return the first offset appended at a time (microseconds since 1970) or after it, else the next offset; see ``WireClient``.

        Raises Missing(TOPIC_MISSING), Invalid(INVALID_REQUEST) for a partition there is not.
        """
        answer = await self._ask(Verb.BOUNDS, messages.AskBounds([topic], [time_us]), messages.BoundsList)
        partitions = answer.topics[0].partitions
        if not 0 <= partition < len(partitions):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"no such partition topic={topic} partition={partition}")
        return partitions[partition].offsets[0]

    async def produce(
        self,
        topic: str,
        records: Sequence[Record],
        *,
        partition: int | None = None,
        level: Level = Level.WRITTEN,
        create: bool = True,
    ) -> list[Produced]:
        """Append records in order, and return where each went; see ``WireClient``.

        Args:
            topic: full name.
            records: what to append.
            partition: where all go; None: by key. Records without any key go to one partition together.
            level: what the acknowledgement means.
            create: whether a missing topic is made, with the broker's default settings.

        Raises:
            Missing: TOPIC_MISSING where ``create`` is false, PARTITION_MISSING.
            Invalid: RECORD_TOO_LARGE, INVALID_BATCH. Records before the one that is meant may have been stored.
            Busy: over a limit, or DISK_FULL.
            Unavailable: the connection was lost; nobody knows what was stored.
        """
        places: list[Produced] = []
        for group in _cut(records):
            number = BY_KEY if partition is None else partition
            places += await self.produce_batch(topic, number, from_records(group), level=level, create=create)
        return places

    async def produce_batch(
        self, topic: str, partition: int, batch: Buffer, *, level: Level = Level.WRITTEN, create: bool = False
    ) -> list[Produced]:
        """Append one stored batch (``records.rows.from_records`` makes one), and return where each record went.

        Args:
            topic: full name.
            partition: its number; -1: the partition of each record's key.
            batch: at most ``limits.batch_bytes_max`` bytes. One that names a producer is stored once, however often it is sent.
            level: what the acknowledgement means.
            create: whether a missing topic is made.

        Raises:
            Invalid: INVALID_BATCH, or SEQUENCE_GAP of its producer.
            Conflict: PRODUCER_FENCED.
            Missing: TOPIC_MISSING, PARTITION_MISSING.
        """
        head = messages.Produce(topic, partition, int(level), create)
        answered, parts = await self._connection.ask(Verb.PRODUCE, head, [batch])
        return _places(_decode(answered, messages.Produced), b"".join(parts))

    async def append_batch(self, topic: str, partition: int, batch: Buffer, *, level: Level = Level.WRITTEN) -> int:
        """Append one stored batch to a partition, and return the offset of its first record. The rest as for ``produce_batch``."""
        answered, _ = await self._connection.ask(Verb.PRODUCE, messages.Produce(topic, partition, int(level)), [batch])
        return _decode(answered, messages.Produced).appended[0].base_offset

    async def fetch_batches(
        self, topic: str, partition: int, offset: int, *, bytes_max: int, wait_ms: int = 0
    ) -> tuple[list[bytes], int]:
        """Return whole stored batches from an offset on, and the next offset behind them; the first may begin below ``offset``.

        Args:
            topic: full name.
            partition: its number, from 0.
            offset: of the first record wanted.
            bytes_max: ends it, after one batch at least.
            wait_ms: how long to wait, in milliseconds, for the first record.

        Raises:
            Missing: TOPIC_MISSING, PARTITION_MISSING, or OFFSET_OUT_OF_RANGE.
        """
        head = messages.Fetch(topic, partition, offset, bytes_max=bytes_max, wait_ms=wait_ms)
        answered, parts = await self._connection.ask(Verb.FETCH, head)
        following = _decode(answered, messages.Fetched).next_offset
        return parts, beyond(offset, following, "offset") if any(parts) else max(offset, following)

    async def stored_at_us(self, topic: str, partition: int, offset: int) -> int | None:
        """Return when the first record from an offset on was stored; its batch is not decoded."""
        batches, _ = await self.fetch_batches(topic, partition, offset, bytes_max=1)
        return read_header(batches[0]).append_time_us if batches else None

    async def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = 10_000, wait_ms: int = 0
    ) -> list[Record]:
        """Return records from an offset on; see ``WireClient``. Waits at most ``limits.wait_ms_max``, whatever ``wait_ms``.

        Reads some 4 MiB at a time, so fewer than ``records_max`` may come although there are more.
        """
        at, wait = offset, wait_ms
        while True:
            head = messages.Fetch(
                topic, partition, at, offset_end=at + records_max, bytes_max=FETCH_BYTES_MAX, wait_ms=wait
            )
            answered, parts = await self._connection.ask(Verb.FETCH, head)
            records = [record for part in parts for record in _records(part) if record.offset >= offset]
            fetched = _decode(answered, messages.Fetched)
            if records or not at < fetched.next_offset < fetched.readable_offset:
                return records[:records_max]
            at, wait = (
                fetched.next_offset,
                0,
            )  # compaction left nothing of what was asked for: only more of it, or the end, is an answer

    async def stage(
        self, token: bytes, topic: str, partition: int, batch: Buffer, *, level: Level = Level.WRITTEN
    ) -> int:
        """Store a batch invisibly, for ``publish``; return how many records it has.

        Args:
            token: 16 random bytes of the caller's choosing. What is staged under it waits ``limits.stage_expiry_ms`` after the last call.
            topic: full name.
            partition: its number, or -1: by key.
            batch: a stored batch, as for ``produce_batch``.
            level: what the acknowledgement means.

        Raises:
            Busy: STAGE_FULL: the broker holds as much staged data as it may.
            Missing: TOPIC_MISSING, PARTITION_MISSING.
            Denied: another user has used this token.
        """
        head = messages.Stage(token, topic, partition, int(level))
        answered, _ = await self._connection.ask(Verb.STAGE, head, [batch])
        return _decode(answered, messages.Staged).record_count

    async def publish(self, writer: str, number: int, tokens: Sequence[bytes]) -> messages.Published:
        """Make everything staged under these tokens visible at once, once for each (writer, number), synced to the disk.

        Asking again is safe: a number not above the writer's last one is answered as ``duplicate``, and changes nothing.

        Args:
            writer: who publishes, at most 255 bytes.
            number: grows from publish to publish of one writer.
            tokens: at most 10,000.

        Raises:
            Missing: STAGE_MISSING: a token is unknown or expired; nothing was published.
            Invalid: SEQUENCE_GAP: the number is more than 2^32 above the last one.
            Denied: another user's writer or token.
        """
        return await self._ask(Verb.PUBLISH, messages.Publish(writer, number, list(tokens)), messages.Published)

    async def abandon(self, tokens: Sequence[bytes]) -> None:
        """Drop what was staged under these tokens; unknown ones are ignored."""
        await self._ask(Verb.ABANDON, messages.Abandon(list(tokens)), Head)

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Become a member of a group; see ``WireClient``. Raises Denied for a group of another user."""
        head = messages.Join(group, topic, member, None if assignor is None else assignor.value)
        return _membership(await self._ask(Verb.JOIN, head, messages.Membership))

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Stay a member, and return one's place; see ``WireClient``."""
        head = messages.Member(group, topic, member, generation)
        return _membership(await self._ask(Verb.HEARTBEAT, head, messages.Membership))

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Give up one's place in a group; see ``WireClient``."""
        await self._ask(Verb.LEAVE, messages.Member(group, topic, member, generation), Head)

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Store a group's next offset to read; see ``WireClient``. Raises Denied for a group of another user."""
        head = messages.Commit(topic, partition, 1, group, offset, member=member, generation=generation)
        await self._ask(Verb.COMMIT, head, Head)

    async def position(
        self, group: str, topic: str, partition: int, *, kind: PositionKind = PositionKind.GROUP
    ) -> int | None:
        """Return the next offset to read, None when nothing was ever committed.

        Args:
            group: the group's name, or a consumer's.
            topic: full name.
            partition: its number, from 0.
            kind: whether the name is a group's or a consumer's.
        """
        number = 1 if kind is PositionKind.GROUP else 0
        head = messages.AskPosition(topic, partition, number, group)
        return (await self._ask(Verb.POSITION, head, messages.Position)).offset

    async def groups(self, group: str | None = None) -> list[GroupInfo]:
        """Return groups that have members or positions, by topic and name; with ``group`` those of this name."""
        found: list[GroupInfo] = []
        after, more = ("", ""), True
        while more:
            asked = list(after) if found else []
            answer = await self._ask(Verb.GROUPS, messages.AskGroups(group, asked), messages.GroupList)
            found += [_group(entry) for entry in answer.groups]
            more = answer.more and bool(answer.groups)
            if more:
                after = beyond(after, (found[-1].topic, found[-1].name), "group")
        return found

    async def delete_group(self, group: str, topic: str) -> None:
        """End a group of a topic, its members and its positions. Raises Missing(GROUP_MISSING), Denied for another user's."""
        await self._ask(Verb.DELETE_GROUP, messages.DeleteGroup(group, topic), Head)

    async def transactions(self) -> list[TransactionInfo]:
        """Return transactional ids by name: one's own, and for administrators everybody's."""
        return await self._kept(Verb.TRANSACTIONS, messages.KeptList[messages.TransactionEntry], TransactionInfo)

    async def delete_transaction(self, transactional_id: str) -> None:
        """Forget a transactional id; its open transaction is aborted. Raises Missing(TRANSACTION_MISSING), Denied for another user's."""
        await self._ask(Verb.DELETE_TRANSACTION, messages.DeleteKept(transactional_id), Head)

    async def writers(self) -> list[WriterInfo]:
        """Return writers and their last numbers, by name: one's own, and for administrators everybody's."""
        return await self._kept(Verb.WRITERS, messages.KeptList[messages.WriterEntry], WriterInfo)

    async def delete_writer(self, writer: str) -> None:
        """Forget a writer: what it publishes again is stored again. Raises Missing(WRITER_MISSING), Denied for another user's."""
        await self._ask(Verb.DELETE_WRITER, messages.DeleteKept(writer), Head)

    def consume(
        self, topic: str, *, group: str | None = None, member: str | None = None, start: Start = EARLIEST
    ) -> AsyncGenerator[Delivered, None]:
        """Return an iterator over a topic's records as they come, for ever; see ``client.consume.consume``.

        Args:
            topic: full name.
            group: whom to share the topic with, and whose positions to go on at; None: read everything alone, and store nothing.
            member: one's name in the group; None: a new one.
            start: where to begin without a position: ``EARLIEST``, ``LATEST``, or microseconds since 1970.
        """
        return consume(self, topic, group=group, member=member, start=start)

    async def _kept(self, verb: Verb, kind: type[messages.KeptList[_E]], info: Callable[..., _I]) -> list[_I]:
        """All entries of a list that comes in pieces."""
        found: list[_I] = []
        after, more = "", True
        while more:
            answer = await self._ask(verb, messages.AskKept(after), kind)
            found += [info(*msgspec.structs.astuple(entry)) for entry in answer.entries]
            more = answer.more and bool(answer.entries)
            after = beyond(after, answer.entries[-1].name, "name") if more else ""
        return found

    async def _ask(self, verb: Verb, head: Head, kind: type[_H]) -> _H:
        answered, _ = await self._connection.ask(verb, head)
        return _decode(answered, kind)


def _decode(head: bytes, kind: type[_H]) -> _H:
    try:
        return decode_answer(head, kind)
    except PeerError as error:
        raise Unavailable(ErrorCode.UNREACHABLE, error.message) from None


def _cut(records: Sequence[Record]) -> list[Sequence[Record]]:
    """The records in order, in groups of about ``BATCH_BYTES``."""
    groups: list[Sequence[Record]] = []
    first = size = 0
    for index, record in enumerate(records):
        weight = RECORD_OVERHEAD_BYTES + len(record.value or b"") + len(record.key or b"")
        weight += sum([len(header.key) + len(header.value or b"") for header in record.headers])
        if index > first and size + weight > BATCH_BYTES:
            groups.append(records[first:index])
            first, size = index, 0
        size += weight
    if first < len(records):
        groups.append(records[first:])
    return groups


def _places(answer: messages.Produced, chosen: bytes) -> list[Produced]:
    if not chosen:
        return [Produced(a.partition, a.base_offset + row) for a in answer.appended for row in range(a.record_count)]
    following = {a.partition: a.base_offset for a in answer.appended}
    places = []
    for number in array("I", chosen):
        places.append(Produced(number, following[number]))
        following[number] += 1
    return places


def _records(payload: bytes) -> list[Record]:
    records: list[Record] = []
    for at in walk(payload):
        if _flags(payload, at)[0] & 6:
            records += to_records(expand_body(memoryview(payload)[at:], EXPANDED_BYTES_MAX))
        else:
            records += to_records(payload, at)
    return records


def _group(entry: messages.GroupEntry) -> GroupInfo:
    members = tuple(MemberInfo(m.member, m.wire, m.idle_ms, tuple(m.partitions)) for m in entry.members)
    positions = {position[0]: position[1] for position in entry.positions}
    return GroupInfo(entry.name, entry.group, entry.generation, entry.assignor, members, positions, entry.owner)


def _membership(answer: messages.Membership) -> Membership:
    return Membership(answer.generation, tuple(answer.partitions))


__all__ = ["ABILITIES", "BrokerError", "PolywireClient"]
