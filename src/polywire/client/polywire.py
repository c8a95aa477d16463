"""The asynchronous client of the `polywire` protocol.

Calls can be concurrent, and responses may arrive in any order. If the connection is lost, every pending call fails with
Unavailable. If a caller is cancelled, its request is cancelled at the broker.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from polywire.client.address import Login, secured
from polywire.client.base import Ability, Membership, PartitionBounds, Produced, TopicInfo, WireClient
from polywire.client.connection import Connection, Scope
from polywire.client.consume import EARLIEST, Delivered, Start, consume
from polywire.client.failures import POLYWIRE_PORT, beyond, cannot_connect, invalid_reply, not_polywire
from polywire.client.listings import GroupInfo, MemberInfo, TransactionInfo, WriterInfo
from polywire.errors import BrokerError, ErrorCode, Invalid, PeerError, Unavailable
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import (
    ERROR,
    MAGIC,
    MORE,
    PREFIX_BYTES,
    decode_answer,
    decode_answer_prefix,
    encode_head,
)
from polywire.protocols.polywire.errors import error_of
from polywire.protocols.polywire.messages import BY_KEY, Failure, Head, Verb
from polywire.records.batch import read_header, walk
from polywire.records.columns import BATCH_BYTES_MAX, Record
from polywire.records.compression import expand_body
from polywire.records.fields import header_fields
from polywire.records.rows import from_records, to_records
from polywire.types import Assignor, Buffer, Level, PositionKind

OPEN_TIMEOUT_S: Final = 10.0
FETCH_BYTES_MAX: Final = 4 << 20  # per fetch; 1 MiB of stored data becomes about 10 MB of Python objects
EXPANDED_BYTES_MAX: Final = 64 << 20  # limit for the size of a decompressed body
ANSWER_BYTES_MAX: Final = 1 << 30  # payload of a response; a server that never ends one must not fill the memory
BATCH_BYTES: Final = 1 << 20  # the records of one call are split into batches of about this size
RECORD_OVERHEAD_BYTES: Final = 64  # upper bound for the size of a record without key and value
ABILITIES: Final = frozenset(Ability)
_H = TypeVar("_H", bound=Head)
_E = TypeVar("_E", bound=messages.ListedEntry)
_I = TypeVar("_I", TransactionInfo, WriterInfo)
_flags: Final = header_fields("flags")


@dataclass(eq=False, slots=True)
class _Pending:
    """A request in flight.

    Attributes:
        done: header of the last response frame, and payloads of all frames.
        parts: payloads of the frames received so far.
        bytes_left: bytes of payloads that may follow.
    """

    done: asyncio.Future[tuple[bytes, list[bytes]]]
    parts: list[bytes] = field(default_factory=list)
    bytes_left: int = ANSWER_BYTES_MAX


class PolywireConnection(Connection):
    """A connection of the ``polywire`` protocol.

    Each request gets one result or error, even if the connection is lost.
    """

    CLOSE_ADVICE: ClassVar[str] = POLYWIRE_PORT

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.greeted: Final[asyncio.Future[bytes]] = loop.create_future()
        self.greeted.add_done_callback(_ignore)
        self._buffer = bytearray()
        self._pending: dict[int, _Pending] = {}
        self._correlation = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first bytes, which contain the name and the version of the protocol. Called by asyncio."""
        super().connection_made(transport)
        self._opened().write(MAGIC)

    def _take_waiting(self) -> Iterable[asyncio.Future[Any]]:
        pending, self._pending = self._pending, {}
        return [self.greeted, *(request.done for request in pending.values())]

    def data_received(self, data: bytes) -> None:
        """Pass complete responses to their requests. Called by asyncio."""
        self._buffer += data
        try:
            taken = self._take()
        except PeerError as error:
            self.fail(invalid_reply(error, self._address, is_later=self._has_reply))
            return
        except Invalid as error:
            self.fail(error)
            return
        del self._buffer[:taken]

    async def ask(
        self, verb: Verb, head: Head, payload: Sequence[Buffer] = (), *, bytes_max: int = ANSWER_BYTES_MAX
    ) -> tuple[bytes, list[bytes]]:
        """Send a request. Return the header of the response's last frame, and the payloads of all its frames.

        If the payloads have more than ``bytes_max`` bytes, the connection fails.
        """
        transport = self._opened()
        self._correlation = (self._correlation % 0xFFFF_FFFF) + 1
        correlation = self._correlation
        parts = [memoryview(part).cast("B") for part in payload]
        size = sum([len(part) for part in parts])
        try:
            encoded = encode_head(verb, correlation, head, payload_bytes=size)
        except (UnicodeEncodeError, OverflowError) as error:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"an argument cannot be encoded: {error}") from None
        pending = self._pending[correlation] = _Pending(self._loop.create_future(), bytes_left=bytes_max)
        transport.writelines([encoded, *parts])
        try:
            await self._writable.wait()
            return await pending.done
        except asyncio.CancelledError:
            if verb is Verb.FETCH and self._lost is None:
                self._cancel(correlation)
            raise

    def _cancel(self, correlation: int) -> None:
        """Cancel a request at the broker. The responses to it and to the cancellation are ignored."""
        self._correlation = (self._correlation % 0xFFFF_FFFF) + 1
        ignored = self._pending[self._correlation] = _Pending(self._loop.create_future())
        ignored.done.add_done_callback(_ignore)
        self._opened().write(encode_head(Verb.CANCEL, self._correlation, messages.Cancel(correlation)))

    def _take(self) -> int:
        at = 0
        if not self._has_reply:
            self._look_for_tls(self._buffer)
            if len(self._buffer) < len(MAGIC):
                return 0
            if self._buffer[: len(MAGIC)] != MAGIC:
                raise not_polywire(bytes(self._buffer[:8]), self._address)
            self._has_reply = True
            at = len(MAGIC)
        while len(self._buffer) - at >= PREFIX_BYTES:
            prefix = decode_answer_prefix(self._buffer, at)
            end = at + PREFIX_BYTES + prefix.length
            if end > len(self._buffer):
                break
            body = at + PREFIX_BYTES + prefix.head_bytes
            with memoryview(self._buffer) as view:
                head, payload = bytes(view[at + PREFIX_BYTES : body]), bytes(view[body:end])
            self._dispatch(prefix.correlation, prefix.flags, head, payload)
            at = end
        return at

    def _dispatch(self, correlation: int, flags: int, head: bytes, payload: bytes) -> None:
        if correlation == 0:
            if flags & ERROR:
                raise PeerError(decode_answer(head, Failure).message, fatal=True)
            if not self.greeted.done():
                self.greeted.set_result(head)
            return
        pending = self._pending.get(correlation)
        if pending is None:
            raise PeerError(f"response to no known request correlation={correlation}", fatal=True)
        if flags & ERROR:
            failure = decode_answer(head, Failure)
            del self._pending[correlation]
            if not pending.done.done():
                pending.done.set_exception(error_of(failure))
            return
        pending.parts.append(payload)
        pending.bytes_left -= len(payload)
        if pending.bytes_left < 0:
            raise PeerError(f"response is too long frames={len(pending.parts)}", fatal=True)
        if not flags & MORE:
            del self._pending[correlation]
            if not pending.done.done():
                pending.done.set_result((head, pending.parts))


def _ignore(done: asyncio.Future[Any]) -> None:
    """Retrieve the outcome of a future, because asyncio logs exceptions that were never retrieved."""
    if not done.cancelled():
        done.exception()


class PolywireClient(Scope):
    """A client of one connection. It implements ``WireClient`` and the features that only this protocol has.

    Create one with ``open``. Calls can be concurrent.

    Attributes:
        limits: limits that the broker reported when the connection was opened (sizes in bytes, times in milliseconds).

    Example:
        async with await PolywireClient.open("127.0.0.1", 9555) as client:
            async for delivered in client.consume("orders", group="billing"):
                print(delivered.value)
    """

    __slots__ = ("_connection", "limits")

    def __init__(self, connection: PolywireConnection, limits: messages.Limits) -> None:
        self._connection: PolywireConnection = connection
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
        """Connect, negotiate the protocol version, and log in.

        Args:
            host: name or address of the broker.
            port: port of its `polywire` listener.
            timeout_s: time limit for all steps together, in seconds.
            tls: how to verify the broker (``client.address.client_context``); None connects without TLS.
            login: the user; None connects without a login.

        Raises:
            Unavailable: the server did not respond in time, or does not speak this protocol.
            Denied: LOGIN_FAILED.
            Busy: the broker is checking too many logins; retry later.
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

    @classmethod
    async def over(cls, sock: socket.socket) -> PolywireClient:
        """Return a client over a connected socket, without a login. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        connection = PolywireConnection(loop)
        await loop.create_connection(lambda: connection, sock=sock)
        return cls(connection, decode_answer(await connection.greeted, messages.Limits))

    @property
    def abilities(self) -> frozenset[Ability]:
        """All features: this protocol supports all of them."""
        return ABILITIES

    async def close(self) -> None:
        """Close the connection. Pending calls fail with Unavailable."""
        self._connection.fail(Unavailable(ErrorCode.STOPPING, "client was closed"))

    async def ping(self) -> None:
        """Wait for a response from the broker. Raises Unavailable."""
        await self._ask(Verb.PING, Head(), Head)

    async def create_topic(
        self, topic: str, partition_count: int | None = None, *, settings: dict[str, int | str | None] | None = None
    ) -> None:
        """Create a topic.

        Args:
            topic: full name, as for ``WireClient.create_topic``.
            partition_count: number of partitions; None uses the broker's default.
            settings: by name: ``retention_age_us`` (microseconds), ``retention_bytes`` (per partition), ``compaction``
                (1 retains the latest record of each key), ``compression`` (none, lz4 or zstd), ``key_hash`` (fnv32,
                fnv64, xxh32 or murmur3). For any other setting, the broker's default is used.

        Raises:
            Conflict: TOPIC_EXISTS.
            Invalid: INVALID_TOPIC, INVALID_PARTITION_COUNT, or INVALID_REQUEST for an unknown setting.
        """
        head = messages.CreateTopic(topic, partition_count, settings=settings or {})
        await self._ask(Verb.CREATE_TOPIC, head, messages.TopicDescription)

    async def describe(self, topic: str) -> messages.TopicDescription:
        """Return a topic's id, settings and the incarnation numbers of its partitions.

        Raises Missing(TOPIC_MISSING).
        """
        return await self._ask(Verb.DESCRIBE, messages.Describe(topic), messages.TopicDescription)

    async def grow_topic(self, topic: str, partition_count: int) -> None:
        """Add partitions to a topic until it has this number.

        Args:
            topic: full name.
            partition_count: number of partitions, not below the current one. Later records of a key may go to another
                partition than earlier ones.

        Raises:
            Missing: TOPIC_MISSING.
            Invalid: INVALID_PARTITION_COUNT.
            Busy: another client changed the topic at the same time.
        """
        await self._ask(Verb.GROW_TOPIC, messages.GrowTopic(topic, partition_count), Head)

    async def configure_topic(self, topic: str, settings: dict[str, int | str | None]) -> None:
        """Change settings of a topic. Settings that are not passed do not change.

        Args:
            topic: full name.
            settings: as for ``create_topic``, except ``key_hash``, which cannot change because records stay in their
                partitions. None restores the broker's default.

        Raises:
            Missing: TOPIC_MISSING.
            Invalid: INVALID_REQUEST for an unknown setting, or one that cannot be changed.
        """
        await self._ask(Verb.CONFIGURE_TOPIC, messages.ConfigureTopic(topic, settings), Head)

    async def link_topic(self, topic: str, link: str) -> None:
        """Let only a link write to a topic. With an empty name, let all clients write to it again.

        Raises:
            Missing: TOPIC_MISSING.
            Conflict: TOPIC_LINKED if another link writes the topic.
            Busy: the topic has records of an open transaction.
        """
        await self._ask(Verb.LINK_TOPIC, messages.LinkTopic(topic, link), Head)

    async def purge_topic(self, topic: str) -> None:
        """Remove all records of a topic. Offsets continue after the removed records.

        Raises Missing(TOPIC_MISSING). After any other error, some partitions may not be purged: try again.
        """
        await self._ask(Verb.PURGE_TOPIC, messages.PurgeTopic(topic), Head)

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its records. Raises Missing(TOPIC_MISSING)."""
        await self._ask(Verb.DELETE_TOPIC, messages.DeleteTopic(topic), Head)

    async def begin_partition(self, topic: str, partition: int, offset: int) -> None:
        """Set the offset of the next record of an empty partition. Nothing changes if it is not above the present one.

        Args:
            topic: full name.
            partition: number of the partition, from 0.
            offset: at most 2^62.

        Raises:
            Missing: TOPIC_MISSING, PARTITION_MISSING.
            Invalid: INVALID_REQUEST: the partition has records, or the offset is out of range.
        """
        await self._ask(Verb.BEGIN_PARTITION, messages.BeginPartition(topic, partition, offset), Head)

    async def topics(self) -> list[TopicInfo]:
        """Return the topics that this user may produce to or consume from, sorted by name."""
        answer = await self._ask(Verb.TOPICS, messages.ListTopics(), messages.TopicList)
        return [TopicInfo(entry.name, entry.id, entry.partition_count, entry.link) for entry in answer.topics]

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Return the first and next offset of each partition, in order of their numbers. Raises Missing(TOPIC_MISSING).

        All records below the next offset have been synced to disk.
        """
        answer = await self._ask(Verb.BOUNDS, messages.AskBounds([topic]), messages.BoundsList)
        return [
            PartitionBounds(entry.partition, entry.incarnation, entry.epoch, entry.first_offset, entry.next_offset)
            for entry in answer.topics[0].partitions
        ]

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Return the offset of the first record appended at or after a time, or the next offset if there is none.

        The time is in microseconds since 1970. See ``WireClient``. Raises Missing(TOPIC_MISSING), and
        Invalid(INVALID_REQUEST) for a partition that does not exist.
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
        """Append records in order, and return their offsets. See ``WireClient``.

        Args:
            topic: full name.
            records: the records.
            partition: number of the partition. With None, each key selects a partition; all records without a key go to
                the same one.
            level: durability of an acknowledged record.
            create: create the topic if it is missing, with the broker's default settings.

        Raises:
            Missing: TOPIC_MISSING if ``create`` is false, PARTITION_MISSING.
            Invalid: RECORD_TOO_LARGE, INVALID_BATCH. Records before the rejected one may have been stored.
            Busy: a limit is reached, or DISK_FULL.
            Unavailable: the connection was lost; some or all records may be stored.
        """
        produced: list[Produced] = []
        for group in split_records(records):
            number = BY_KEY if partition is None else partition
            produced += await self.produce_batch(topic, number, from_records(group), level=level, create=create)
        return produced

    async def produce_batch(
        self, topic: str, partition: int, batch: Buffer, *, level: Level = Level.WRITTEN, create: bool = False
    ) -> list[Produced]:
        """Append one stored batch, made by ``records.rows.from_records``, and return the offset of each record.

        Args:
            topic: full name.
            partition: number of the partition; -1 selects a partition for each record by its key.
            batch: at most ``limits.batch_bytes_max`` bytes. A batch with a producer id is stored once, even if it is
                sent again.
            level: durability of an acknowledged record.
            create: create the topic if it is missing.

        Raises:
            Invalid: INVALID_BATCH, or SEQUENCE_GAP: the broker has not stored the producer's previous batch.
            Conflict: PRODUCER_FENCED.
            Missing: TOPIC_MISSING, PARTITION_MISSING.
        """
        head = messages.Produce(topic, partition, int(level), create)
        response, parts = await self._connection.ask(Verb.PRODUCE, head, [batch])
        return _produced(decode(response, messages.Produced), b"".join(parts))

    async def append_batch(self, topic: str, partition: int, batch: Buffer, *, level: Level = Level.WRITTEN) -> int:
        """Append one stored batch to a partition, and return the offset of its first record. See ``produce_batch``."""
        response, _ = await self._connection.ask(Verb.PRODUCE, messages.Produce(topic, partition, int(level)), [batch])
        return decode(response, messages.Produced).appended[0].base_offset

    async def fetch_batches(
        self, topic: str, partition: int, offset: int, *, bytes_max: int, wait_ms: int = 0
    ) -> tuple[list[bytes], int]:
        """Return complete stored batches from an offset on, and the offset after the last one.

        The first batch may begin before ``offset``.

        Args:
            topic: full name.
            partition: number of the partition, from 0.
            offset: first offset to read.
            bytes_max: stop after this many bytes, but return at least one batch.
            wait_ms: milliseconds to wait for the first record.

        Raises:
            Missing: TOPIC_MISSING, PARTITION_MISSING, or OFFSET_OUT_OF_RANGE.
        """
        head = messages.Fetch(topic, partition, offset, bytes_max=bytes_max, wait_ms=wait_ms)
        response, parts = await self._connection.ask(Verb.FETCH, head, bytes_max=bytes_max + BATCH_BYTES_MAX)
        following = decode(response, messages.Fetched).next_offset
        return parts, beyond(offset, following, "offset") if any(parts) else max(offset, following)

    async def stored_at_us(self, topic: str, partition: int, offset: int) -> int | None:
        """Return the append time of the first record from an offset on, without decoding its batch."""
        batches, _ = await self.fetch_batches(topic, partition, offset, bytes_max=1)
        return read_header(batches[0]).append_time_us if batches else None

    async def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = 10_000, wait_ms: int = 0
    ) -> list[Record]:
        """Return records from an offset on. See ``WireClient``. Waits at most ``limits.wait_ms_max``.

        A call reads about 4 MiB, so it may return fewer than ``records_max`` records even if there are more.
        """
        at, wait = offset, wait_ms
        while True:
            head = messages.Fetch(
                topic, partition, at, offset_end=at + records_max, bytes_max=FETCH_BYTES_MAX, wait_ms=wait
            )
            response, parts = await self._connection.ask(Verb.FETCH, head)
            records = [record for part in parts for record in _records(part) if record.offset >= offset]
            fetched = decode(response, messages.Fetched)
            if records or not at < fetched.next_offset < fetched.readable_offset:
                return records[:records_max]
            at, wait = (
                fetched.next_offset,
                0,
            )  # compaction removed all requested records: read on until there are some, or the end is reached

    async def stage(
        self,
        token: bytes,
        topic: str,
        partition: int,
        batch: Buffer,
        *,
        level: Level = Level.WRITTEN,
        write: tuple[str, int] = ("", 0),
    ) -> int:
        """Store a batch invisibly until ``publish`` is called with the same token, and return its number of records.

        Args:
            token: 16 random bytes. Everything stored under a token expires ``limits.stage_expiry_ms`` after the last
                call with it.
            topic: full name.
            partition: number of the partition, or -1 to choose by key.
            batch: a stored batch, as for ``produce_batch``.
            level: durability of an acknowledged record.
            write: writer and sequence number of the publish that the batch is for. The broker drops the batch when the
                writer publishes this number or a later one without it, and when the writer begins an epoch.

        Raises:
            Busy: STAGE_FULL: the broker is at its limit of unpublished data.
            Missing: TOPIC_MISSING, PARTITION_MISSING.
            Denied: another user has used this token.
        """
        head = messages.Stage(token, topic, partition, int(level), *write)
        response, _ = await self._connection.ask(Verb.STAGE, head, [batch])
        return decode(response, messages.Staged).record_count

    async def publish(
        self,
        writer: str,
        number: int,
        tokens: Sequence[bytes],
        *,
        groups: Sequence[messages.GroupOffsets] = (),
        epoch: int = 0,
    ) -> messages.Published:
        """Make everything stored under these tokens with ``stage`` visible atomically, and sync it to disk.

        A publish with the same writer and sequence number is executed only once, so a retry is safe. If the sequence
        number is not above the writer's last one, nothing changes and the response is a ``duplicate``.

        Args:
            writer: name of the writer, at most 255 bytes.
            number: sequence number of the publish; each publish of a writer needs a higher one.
            tokens: at most 10,000.
            groups: offsets to commit in the same step, at most 10,000.
            epoch: the writer's epoch, from ``begin_epoch``.

        Raises:
            Missing: STAGE_MISSING: a token is unknown or expired; nothing was published.
            Invalid: SEQUENCE_GAP: the sequence number is more than 2^32 above the last one.
            Conflict: PRODUCER_FENCED: the writer has a later epoch. GENERATION_STALE, PARTITION_NOT_ASSIGNED: a member
                does not own the partitions of its offsets. Nothing was published.
            Denied: the writer, a token or a group belongs to another user.
        """
        head = messages.Publish(writer, number, list(tokens), list(groups), epoch)
        return await self._ask(Verb.PUBLISH, head, messages.Published)

    async def begin_epoch(self, writer: str) -> int:
        """Begin an epoch of a writer, and return it. Publishes with an earlier epoch are then rejected.

        Raises Denied if the writer belongs to another user.
        """
        return (await self._ask(Verb.BEGIN_EPOCH, messages.BeginEpoch(writer), messages.EpochBegun)).epoch

    async def abandon(self, tokens: Sequence[bytes]) -> None:
        """Delete everything that ``stage`` stored under these tokens and that is not published.

        Unknown tokens are ignored.
        """
        await self._ask(Verb.ABANDON, messages.Abandon(list(tokens)), Head)

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Join a group. See ``WireClient``. Raises Denied if another user owns the group."""
        head = messages.Join(group, topic, member, None if assignor is None else assignor.value)
        return _membership(await self._ask(Verb.JOIN, head, messages.Membership))

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Send a heartbeat, and return the assignment. See ``WireClient``."""
        head = messages.Member(group, topic, member, generation)
        return _membership(await self._ask(Verb.HEARTBEAT, head, messages.Membership))

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Leave a group. See ``WireClient``."""
        await self._ask(Verb.LEAVE, messages.Member(group, topic, member, generation), Head)

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Commit a group's next offset to read. See ``WireClient``. Raises Denied if another user owns the group."""
        head = messages.Commit(topic, partition, 1, group, offset, member=member, generation=generation)
        await self._ask(Verb.COMMIT, head, Head)

    async def position(
        self, group: str, topic: str, partition: int, *, kind: PositionKind = PositionKind.GROUP
    ) -> int | None:
        """Return the next offset to read, or None if nothing was committed.

        Args:
            group: name of the group or consumer.
            topic: full name.
            partition: number of the partition, from 0.
            kind: whether ``group`` names a group or a single consumer.
        """
        number = 1 if kind is PositionKind.GROUP else 0
        head = messages.AskPosition(topic, partition, number, group)
        return (await self._ask(Verb.POSITION, head, messages.Position)).offset

    async def groups(self, group: str | None = None) -> list[GroupInfo]:
        """Return the groups that have members or committed offsets, sorted by topic and name.

        ``group`` limits the result to one name.
        """
        found: list[GroupInfo] = []
        after, more = ("", ""), True
        while more:
            start_after = list(after) if found else []
            answer = await self._ask(Verb.GROUPS, messages.AskGroups(group, start_after), messages.GroupList)
            found += [_group(entry) for entry in answer.groups]
            more = answer.more and bool(answer.groups)
            if more:
                after = beyond(after, (found[-1].topic, found[-1].name), "group")
        return found

    async def delete_group(self, group: str, topic: str) -> None:
        """Delete a group of a topic with its members and offsets.

        Raises Missing(GROUP_MISSING), and Denied if the group belongs to another user.
        """
        await self._ask(Verb.DELETE_GROUP, messages.DeleteGroup(group, topic), Head)

    async def ask(self, verb: Verb, head: Head) -> tuple[bytes, list[bytes]]:
        """Send a request. Return the header of the response, and its payloads. For the modules of this package."""
        return await self._connection.ask(verb, head)

    async def transactions(self) -> list[TransactionInfo]:
        """Return the user's transactional ids, sorted by name. Administrators see the ids of all users."""
        return await self._list(Verb.TRANSACTIONS, messages.EntryList[messages.TransactionEntry], TransactionInfo)

    async def delete_transaction(self, transactional_id: str) -> None:
        """Delete a transactional id and abort its open transaction.

        Raises Missing(TRANSACTION_MISSING), and Denied if the id belongs to another user.
        """
        await self._ask(Verb.DELETE_TRANSACTION, messages.DeleteEntry(transactional_id), Head)

    async def writers(self, prefix: str = "") -> list[WriterInfo]:
        """Return the user's writers, sorted by name, each with the sequence number of its last publish.

        Administrators see the writers of all users.

        Args:
            prefix: return only writers whose names begin with it and are longer.
        """
        return await self._list(Verb.WRITERS, messages.EntryList[messages.WriterEntry], WriterInfo, prefix)

    async def delete_writer(self, writer: str) -> None:
        """Delete a writer, so that its sequence numbers can be used again.

        If the writer then repeats an old publish, the data is stored twice. Raises Missing(WRITER_MISSING), and Denied
        if the writer belongs to another user.
        """
        await self._ask(Verb.DELETE_WRITER, messages.DeleteEntry(writer), Head)

    def consume(
        self, topic: str, *, group: str | None = None, member: str | None = None, start: Start = EARLIEST
    ) -> AsyncGenerator[Delivered, None]:
        """Return an iterator over a topic's records that never ends. See ``client.consume.consume``.

        Args:
            topic: full name.
            group: name of the group to join; None reads all partitions and commits nothing.
            member: name of the member; None generates one.
            start: where to start without a committed offset: ``EARLIEST``, ``LATEST``, or microseconds since 1970.
        """
        return consume(self, topic, group=group, member=member, start=start)

    async def _list(
        self, verb: Verb, kind: type[messages.EntryList[_E]], info: Callable[..., _I], prefix: str = ""
    ) -> list[_I]:
        found: list[_I] = []
        after, more = prefix, True
        while more:
            answer = await self._ask(verb, messages.ListEntries(after), kind)
            entries = [entry for entry in answer.entries if entry.name.startswith(prefix)]
            found += [info(*msgspec.structs.astuple(entry)) for entry in entries]
            more = answer.more and bool(answer.entries) and len(entries) == len(answer.entries)
            after = beyond(after, answer.entries[-1].name, "name") if more else ""
        return found

    async def _ask(self, verb: Verb, head: Head, kind: type[_H]) -> _H:
        response, _ = await self._connection.ask(verb, head)
        return decode(response, kind)


def needs_polywire(wire: WireClient, action: str) -> PolywireClient:
    """Return the client if it uses the `polywire` protocol. Otherwise raise Invalid: the protocol cannot do this."""
    if not isinstance(wire, PolywireClient):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"this protocol cannot {action}: connect with a polywire:// URL")
    return wire


def decode(head: bytes, kind: type[_H]) -> _H:
    """Decode the header of a response. Raises Unavailable(UNREACHABLE) if it is malformed."""
    try:
        return decode_answer(head, kind)
    except PeerError as error:
        raise Unavailable(ErrorCode.UNREACHABLE, error.message) from None


def split_records(records: Sequence[Record]) -> list[Sequence[Record]]:
    """Split records into groups of about ``BATCH_BYTES``."""
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


def _produced(answer: messages.Produced, chosen: bytes) -> list[Produced]:
    if not chosen:
        return [Produced(a.partition, a.base_offset + row) for a in answer.appended for row in range(a.record_count)]
    following = {a.partition: a.base_offset for a in answer.appended}
    produced = []
    for number in array("I", chosen):
        produced.append(Produced(number, following[number]))
        following[number] += 1
    return produced


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
