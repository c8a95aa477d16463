"""A blocking client that reads and writes batches in the broker's stored format, for Spark's Python workers and tools.

* Stored batches are received without a copy per record.
* Reads are retried after a lost connection. Writes are never retried.
* The connections of a process are shared, and never used after a fork.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep
from typing import Final, TypeVar

from polywire.client.address import SCHEME_SUFFIX, Login, client_context, split_address, split_brokers, split_login
from polywire.client.base import TopicInfo
from polywire.client.failures import beyond
from polywire.client.sockets import BrokerAddress, FramedSocket, Sockets, more_follows
from polywire.clock import Clock, SystemClock
from polywire.errors import ErrorCode, Missing, PeerError, Unavailable
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import decode_answer
from polywire.protocols.polywire.messages import ANY_EPOCH, ANY_INCARNATION, BY_KEY, NO_OFFSET, Head, Verb
from polywire.records.allocation import Arena
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.types import Buffer, Level

TIMEOUT_S: Final = 120.0  # the poll timeout of Kafka's Spark source
RECONNECT_S: Final = 10.0  # enough for a broker's restart, including recovery
RECONNECT_INTERVAL_S: Final = 0.1
PRODUCE_WINDOW: Final = 16  # requests that produce_all sends before their responses arrive

_H = TypeVar("_H", bound=Head)


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """The offsets of a partition that are synced to disk.

    Attributes:
        first_offset: offset of the first record.
        next_offset: offset after the last synced record.
        time_offsets: for each requested time, the offset of the first record appended at or after it, or
            ``next_offset`` if there is none.
    """

    topic: str
    topic_id: bytes
    partition: int
    incarnation: int
    epoch: int
    first_offset: int
    next_offset: int
    time_offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicDetail:
    """A topic, with the incarnation number of each partition.

    Attributes:
        table: URL of the topic's table; empty if it has none, or if the user may not get its path.
    """

    name: str
    id: bytes
    created_at_us: int
    incarnations: tuple[int, ...]
    settings: dict[str, int | str | None]
    table: str = ""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Consecutive stored batches of one partition.

    Attributes:
        data: the batches, in memory that is reused when nothing refers to it any more.
        offset: start of the requested range; ignore earlier rows.
        offset_end: end of the requested range; ignore later rows.
        next_offset: offset after the last batch.
        bodies: if false, ``data`` has only the headers of batches. Compacted batches are complete.
    """

    topic: str
    partition: int
    data: memoryview
    offset: int
    offset_end: int
    next_offset: int
    bodies: bool = True


@dataclass(frozen=True, slots=True)
class AppendedRange:
    """The offsets at which the records of one batch were stored."""

    partition: int
    base_offset: int
    record_count: int


@dataclass(frozen=True, slots=True)
class ProduceResult:
    """The result of a produce request.

    Attributes:
        appended: offsets by batch and partition.
        partitions: partition of each record, as u32, if the broker chose them by key; otherwise empty.
    """

    appended: tuple[AppendedRange, ...]
    partitions: bytes


@dataclass(frozen=True, slots=True)
class PublishResult:
    """The result of a publish.

    Attributes:
        duplicate: whether the same publish was made before.
        ranges: records that became visible, as (topic, partition, first offset, next offset); empty for a duplicate.
    """

    duplicate: bool
    ranges: tuple[tuple[str, int, int, int], ...]


class _Progress:
    """Progress of a read over a range of offsets. It survives lost connections, so no record is returned twice."""

    __slots__ = (
        "_asked_from",
        "_bodies",
        "_bytes_left",
        "_offset_end",
        "_partition",
        "_topic",
        "complete",
        "next_offset",
    )

    def __init__(
        self, topic: str, partition: int, offset: int, offset_end: int, bytes_max: int, *, bodies: bool
    ) -> None:
        self._topic: Final = topic
        self._bodies: Final = bodies
        self._partition: Final = partition
        self._offset_end: Final = offset_end
        self._bytes_left = bytes_max if bytes_max >= 0 else None
        self._asked_from = offset
        self.next_offset = offset
        self.complete = False

    def request(self, incarnation: int, epoch: int, wait_ms: int) -> messages.Fetch:
        self._asked_from = self.next_offset
        bytes_max = -1 if self._bytes_left is None else max(self._bytes_left, 1)
        return messages.Fetch(
            self._topic,
            self._partition,
            self.next_offset,
            self._offset_end,
            incarnation,
            epoch,
            bytes_max,
            wait_ms,
            self._bodies,
        )

    def moved(self) -> bool:
        return self.next_offset > self._asked_from

    def advance(self, data: memoryview, next_offset: int) -> StoredChunk | None:
        """Return the chunk in a frame; None if the frame has no batches."""
        first = self.next_offset
        # An empty frame may repeat the offset: at the end of a response, or if compaction removed all records.
        self.next_offset = beyond(first, next_offset, "offset") if len(data) else max(first, next_offset)
        if self._bytes_left is not None:
            self._bytes_left -= len(data)
        if not len(data):
            return None
        last = next_offset if self._offset_end < 0 else min(self._offset_end, next_offset)
        return StoredChunk(self._topic, self._partition, data, first, last, next_offset, self._bodies)


class BulkConnection:
    """A pool of sockets to one broker; each call in flight uses one. Calls may come from any thread.

    Create one with ``connect``. A socket is reused only if its last response was read completely.
    """

    __slots__ = (
        "_arena",
        "_clock",
        "_sockets",
        "reconnect_s",
    )

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float = TIMEOUT_S,
        reconnect_s: float = RECONNECT_S,
        clock: Clock | None = None,
        tls: ssl.SSLContext | None = None,
        login: Login | None = None,
        others: Sequence[BrokerAddress] = (),
    ) -> None:
        """Create the pool. The first call connects.

        Args:
            host: name or address of the broker.
            port: port of its `polywire` listener.
            timeout_s: time limit for each wait for the broker, in seconds.
            reconnect_s: how long reads retry if the broker is not reachable, in seconds.
            clock: clock for time limits; None uses the system's clock.
            tls: TLS settings that verify the broker; None connects without TLS.
            login: the user of each connection; None connects without a login.
            others: brokers to use if this one does not respond.
        """
        self._sockets = Sockets([BrokerAddress(host, port, tls), *others], timeout_s=timeout_s, login=login)
        self._clock: Clock = clock or SystemClock()
        self._arena = Arena()
        self.reconnect_s = reconnect_s

    @classmethod
    def over(cls, connected: socket.socket, *, timeout_s: float = TIMEOUT_S) -> BulkConnection:
        """Return a connection over one end of a socket pair, for calls that follow each other. It is never reopened."""
        made = cls.__new__(cls)
        framed = FramedSocket.over(connected, timeout_s=timeout_s)
        made._sockets = Sockets([], timeout_s=timeout_s, login=None, connected=[framed])
        made._clock = SystemClock()
        made._arena = Arena()
        made.reconnect_s = 0.0
        return made

    def close(self) -> None:
        """Close idle sockets. Calls in flight continue."""
        self._sockets.close()

    def ping(self) -> None:
        """Wait for a response from the broker. Raises Unavailable."""
        self._read(Verb.PING, Head(), Head)

    def topics(self, pattern: str | None = None) -> list[TopicInfo]:
        """Return topics, sorted by name. ``pattern`` is a regular expression that must match the whole name."""
        answer = self._read(Verb.TOPICS, messages.ListTopics(), messages.TopicList)
        chosen = re.compile(pattern or ".*")
        return [TopicInfo(t.name, t.id, t.partition_count) for t in answer.topics if chosen.fullmatch(t.name)]

    def describe(self, topic: str) -> TopicDetail:
        """Return one topic's id, settings and incarnation numbers. Raises Missing(TOPIC_MISSING)."""
        answer = self._read(Verb.DESCRIBE, messages.Describe(topic), messages.TopicDescription)
        return _detail(answer)

    def create_topic(
        self, topic: str, partition_count: int | None = None, settings: dict[str, int | str | None] | None = None
    ) -> TopicDetail:
        """Create a topic, and return it.

        Args:
            topic: full name.
            partition_count: number of partitions; None uses the broker's default.
            settings: as for ``PolywireClient.create_topic``.

        Raises:
            Conflict: TOPIC_EXISTS.
            Invalid: INVALID_TOPIC, INVALID_PARTITION_COUNT, INVALID_REQUEST.
        """
        head = messages.CreateTopic(topic, partition_count, settings=settings or {})
        return _detail(self._write(Verb.CREATE_TOPIC, head, messages.TopicDescription)[0])

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and its data. Raises Missing(TOPIC_MISSING)."""
        self._write(Verb.DELETE_TOPIC, messages.DeleteTopic(topic), Head)

    def bounds(self, topics: Sequence[str], *, times_us: Sequence[int] = ()) -> list[PartitionRange]:
        """Sync every partition of these topics to disk, and return the offsets of each.

        Args:
            topics: full names, at most 1,000.
            times_us: up to 16 points in time, in microseconds since 1970. ``PartitionRange.time_offsets`` has an offset
                for each.

        Raises:
            Missing: TOPIC_MISSING.
        """
        answer = self._read(Verb.BOUNDS, messages.AskBounds(list(topics), list(times_us)), messages.BoundsList)
        return [
            PartitionRange(
                t.name, t.id, p.partition, p.incarnation, p.epoch, p.first_offset, p.next_offset, tuple(p.offsets)
            )
            for t in answer.topics
            for p in t.partitions
        ]

    def fetch_range(
        self,
        topic: str,
        partition: int,
        incarnation: int = ANY_INCARNATION,
        offset: int = 0,
        offset_end: int = NO_OFFSET,
        *,
        epoch: int = ANY_EPOCH,
        bytes_max: int = -1,
        wait_ms: int = 0,
        bodies: bool = True,
    ) -> Iterator[StoredChunk]:
        """Yield chunks with the records in ``[offset, offset_end)``, in order.

        After a lost connection, the read continues over a new one. While the caller uses a chunk, the broker already
        sends the next.

        Args:
            topic: full name.
            partition: number of the partition, from 0.
            incarnation: expected incarnation number of the partition, which changes if the topic is deleted and created
                again; 0 accepts any.
            offset: first offset. The first chunk can begin before it, and the last chunk can end after ``offset_end``:
                skip those rows.
            offset_end: exclusive end; -1 reads up to the last readable record.
            epoch: leader epoch in which the offsets were reported; -1 disables the check.
            bytes_max: stop after this many bytes, but return at least one batch; -1 for no limit.
            wait_ms: milliseconds to wait for the first record.
            bodies: if false, the broker sends only the headers of batches, which have offsets and times.

        Raises:
            Conflict: TOPIC_REPLACED if the incarnation does not match, EPOCH_ENDED if records were lost since that
                epoch.
            Missing: OFFSET_OUT_OF_RANGE: part of the range does not exist.
            Unavailable: the broker was not reachable for ``reconnect_s``.
        """
        at = _Progress(topic, partition, offset, offset_end, bytes_max, bodies=bodies)
        retries = self.retries()
        while not at.complete:
            try:
                yield from self._chunks(at, incarnation=incarnation, epoch=epoch, wait_ms=wait_ms)
            except Unavailable as error:
                retries = self.retries() if at.moved() else retries
                self._retry_or_raise(retries, error)
        if bytes_max < 0 and 0 <= at.next_offset < offset_end:
            raise Missing(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"the range ends early topic={topic} partition={partition} next_offset={at.next_offset} offset_end={offset_end}",
            )

    def locate(
        self,
        topic: str,
        partition: int,
        incarnation: int = ANY_INCARNATION,
        offset: int = 0,
        offset_end: int = NO_OFFSET,
        *,
        epoch: int = ANY_EPOCH,
    ) -> messages.Located:
        """Return the segment files that store a range, if the user may see them.

        The newest records are in no such file yet: read them with ``fetch_range``. Raises the errors that
        ``fetch_range`` raises before its first chunk, and Invalid(INVALID_REQUEST) if the broker does not support the
        request.
        """
        head = messages.Locate(topic, partition, offset, offset_end, incarnation, epoch)
        return self._read(Verb.LOCATE, head, messages.Located)

    def produce(
        self,
        topic: str,
        partition: int,
        batches: Sequence[Buffer],
        level: Level = Level.WRITTEN,
        *,
        create: bool = False,
    ) -> ProduceResult:
        """Append batches, and return their offsets once all have reached ``level``. The call is not retried.

        Args:
            topic: full name.
            partition: number of the partition; -1 selects a partition for each record by its key.
            batches: stored batches. If they do not fit one frame, they are sent in several requests, in order.
            level: durability of an acknowledged record.
            create: create the topic if it is missing.

        Raises:
            Unavailable: some or all batches may be stored; only batches with a producer id can be sent again without
                duplicates.
            Invalid: INVALID_BATCH, SEQUENCE_GAP.
            Missing: TOPIC_MISSING, PARTITION_MISSING.
            Busy: a limit is reached, or DISK_FULL.
        """
        head = messages.Produce(topic, partition, int(level), create)
        answers = [self._write(Verb.PRODUCE, head, messages.Produced, group) for group in _fitting(batches)]
        appended = tuple(
            AppendedRange(a.partition, a.base_offset, a.record_count) for answer, _ in answers for a in answer.appended
        )
        return ProduceResult(appended, b"".join([chosen for _, chosen in answers]))

    def produce_all(
        self,
        topic: str,
        partition: int,
        batches: Iterable[Buffer],
        level: Level = Level.WRITTEN,
        *,
        window: int = PRODUCE_WINDOW,
    ) -> int:
        """Append batches with pipelined requests, one per batch, and return the number of stored records.

        At most ``window`` requests are in flight. Other arguments and errors are the same as in ``produce``. If an
        error is raised, the batches in flight may be stored.
        """
        head = messages.Produce(topic, partition, int(level))
        record_count = 0
        with self._lease() as wire:
            waiting: list[int] = []
            for batch in batches:
                waiting.append(wire.send(Verb.PRODUCE, head, [batch]))
                if len(waiting) >= window:
                    record_count += self._read_record_count(wire, waiting)
            while waiting:
                record_count += self._read_record_count(wire, waiting)
        return record_count

    def stage(
        self, token: bytes, topic: str, partition: int, batches: Sequence[Buffer], level: Level = Level.WRITTEN
    ) -> int:
        """Store batches invisibly until ``publish`` is called with the same token, and return the number of records.

        ``token`` is 16 random bytes. Other arguments are the same as in ``produce``. Raises Busy(STAGE_FULL), Missing,
        and Denied if the token belongs to another user.
        """
        head = messages.Stage(token, topic, partition, int(level))
        answers = [self._write(Verb.STAGE, head, messages.Staged, group) for group in _fitting(batches)]
        return sum([answer.record_count for answer, _ in answers])

    def publish(self, writer: str, number: int, tokens: Sequence[bytes]) -> PublishResult:
        """Make everything stored under these tokens with ``stage`` visible at once.

        A publish with the same writer and sequence number is executed only once, so a retry is safe.

        Args:
            writer: name of the writer, at most 255 bytes.
            number: sequence number of the publish; each publish of a writer needs a higher one.
            tokens: at most 10,000.

        Raises:
            Missing: STAGE_MISSING: a token is unknown or expired; nothing was published.
            Invalid: SEQUENCE_GAP: the sequence number is more than 2^32 above the last one.
        """
        answer = self._read(Verb.PUBLISH, messages.Publish(writer, number, list(tokens)), messages.Published)
        ranges = tuple((r.name, r.partition, r.first_offset, r.next_offset) for r in answer.ranges)
        return PublishResult(answer.duplicate, ranges)

    def last_publish(self, writer: str) -> int | None:
        """Return the number of a writer's last publish; None if the broker does not know the writer."""
        after = writer[:-1]  # so that the writer is one of the first in the list, which is sorted by name
        while True:
            page = self._read(Verb.WRITERS, messages.ListEntries(after), messages.EntryList[messages.WriterEntry])
            for entry in page.entries:
                if entry.name == writer:
                    return entry.number
            if not page.more or not page.entries or page.entries[-1].name > writer:
                return None
            after = beyond(after, page.entries[-1].name, "name")

    def abandon(self, tokens: Sequence[bytes]) -> None:
        """Delete everything that ``stage`` stored under these tokens and that is not published.

        Unknown tokens are ignored.
        """
        self._read(Verb.ABANDON, messages.Abandon(list(tokens)), Head)

    def commit_position(self, topic: str, partition: int, group: str, offset: int) -> None:
        """Commit a group's next offset to read, so that the broker can show its lag. Membership is not checked."""
        self._read(Verb.COMMIT, messages.Commit(topic, partition, 1, group, offset), Head)

    def _read_record_count(self, wire: FramedSocket, waiting: list[int]) -> int:
        prefix, head = wire.receive(waiting.pop(0))
        wire.receive_payload(prefix)
        return sum(a.record_count for a in _decode(head, messages.Produced).appended)

    def _chunks(self, at: _Progress, *, incarnation: int, epoch: int, wait_ms: int) -> Iterator[StoredChunk]:
        """Send one FETCH for the rest of the range, and yield the chunks of its response."""
        with self._lease() as wire:
            correlation = wire.send(Verb.FETCH, at.request(incarnation, epoch, wait_ms))
            while not at.complete:
                prefix, head = wire.receive(correlation)
                data = wire.receive_payload(prefix, self._arena)
                chunk = at.advance(data, _decode(head, messages.Fetched).next_offset)
                at.complete = not more_follows(prefix)
                if chunk is not None:
                    yield chunk

    def retries(self) -> Iterator[None]:
        """Yield once per retry, after a pause, until ``reconnect_s`` have passed since the first retry."""
        deadline = self._clock.monotonic() + self.reconnect_s
        while self._clock.monotonic() < deadline:
            sleep(RECONNECT_INTERVAL_S)
            yield

    @property
    def arena(self) -> Arena:
        """The pool from which memory for chunks is allocated. Callers may also allocate memory from it."""
        return self._arena

    @staticmethod
    def _retry_or_raise(retries: Iterator[None], error: Unavailable) -> None:
        for _ in retries:
            return
        raise error

    def _read(self, verb: Verb, head: Head, answer: type[_H]) -> _H:
        """Send a request that is safe to repeat. Repeat it if the connection is lost."""
        retries = self.retries()
        while True:
            try:
                return self._write(verb, head, answer)[0]
            except Unavailable as error:
                self._retry_or_raise(retries, error)

    def _write(self, verb: Verb, head: Head, answer: type[_H], payload: Sequence[Buffer] = ()) -> tuple[_H, bytes]:
        """Send a request that must not be repeated."""
        with self._lease() as wire:
            prefix, received = wire.receive(wire.send(verb, head, payload))
            return _decode(received, answer), bytes(wire.receive_payload(prefix))

    @contextmanager
    def _lease(self) -> Iterator[FramedSocket]:
        wire = self.take()
        try:
            yield wire
        finally:
            self.give(wire)

    def take(self) -> FramedSocket:
        """Return a socket for pipelined requests. The caller returns it with ``give``. Raises Unavailable."""
        return self._sockets.take()

    def give(self, wire: FramedSocket) -> None:
        """Return a socket after ``take``. It is closed if a response was not read."""
        self._sockets.give(wire)


TLS_SCHEME: Final = f"polywire{SCHEME_SUFFIX}://"
_Key = tuple[int, tuple[tuple[str, int, bool], ...], float, float, Login | None]
_connections: dict[_Key, BulkConnection] = {}
_connections_lock = threading.Lock()


def connect(
    address: str, *, timeout_s: float = TIMEOUT_S, reconnect_s: float = RECONNECT_S, login: Login | None = None
) -> BulkConnection:
    """Return the connection of this process to ``host:port``. A forked child creates its own connection.

    ``host:port,host:port`` names several brokers. The first that responds is used. If its connection is lost, the next
    one is used.

    Args:
        address: may begin with ``polywire://``, or ``polywire+tls://`` for TLS, and with ``name:password@`` before the
            host.
        timeout_s: time limit for each wait for the broker, in seconds.
        reconnect_s: how long reads retry if the broker is not reachable, in seconds.
        login: the user, instead of the one in the address.

    Raises:
        Invalid: INVALID_REQUEST: the address is invalid. No broker is contacted before the first call.
    """
    brokers = [split_login(broker) for broker in split_brokers(address)]
    login = login or next((found for found, _ in brokers if found is not None), None)
    listeners = tuple(_listener(bare) for _, bare in brokers)
    key = (os.getpid(), listeners, timeout_s, reconnect_s, login)
    with _connections_lock:
        connection = _connections.get(key)
        if connection is None:
            tls = client_context() if any(is_secured for _, _, is_secured in listeners) else None
            first, *others = [
                BrokerAddress(host, port, tls if is_secured else None) for host, port, is_secured in listeners
            ]
            connection = BulkConnection(
                first.host,
                first.port,
                timeout_s=timeout_s,
                reconnect_s=reconnect_s,
                tls=first.tls,
                login=login,
                others=others,
            )
            _connections[key] = connection
        return connection


def _listener(address: str) -> tuple[str, int, bool]:
    bare = address.removeprefix(TLS_SCHEME)
    return *split_address(bare), bare != address


def _decode(head: bytes, kind: type[_H]) -> _H:
    try:
        return decode_answer(head, kind)
    except PeerError as error:
        raise Unavailable(ErrorCode.UNREACHABLE, error.message) from None


def _detail(answer: messages.TopicDescription) -> TopicDetail:
    return TopicDetail(
        answer.name, answer.id, answer.created_at_us, tuple(answer.incarnations), answer.settings, answer.table
    )


def _fitting(batches: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """Yield the batches in order, as many at a time as fit one frame.

    A batch that is too large for a frame is yielded alone, so that the broker rejects it.
    """
    group: list[Buffer] = []
    size = 0
    for batch in batches:
        length = memoryview(batch).nbytes
        if group and size + length > BATCH_BYTES_MAX:
            yield group
            group, size = [], 0
        group.append(batch)
        size += length
    if group or not batches:
        yield group


__all__ = [
    "BY_KEY",
    "AppendedRange",
    "BulkConnection",
    "PartitionRange",
    "ProduceResult",
    "PublishResult",
    "StoredChunk",
    "TopicDetail",
    "connect",
]
