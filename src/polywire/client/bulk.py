"""A blocking client for bulk: stored batches in and out of the broker, for Spark's Python workers and for tools.

Promises: whole stored batches without a copy per record; what only reads is asked again after a lost connection, what writes never is.
Connections are kept per process and never cross a fork. Must not know: asyncio, Arrow, Spark.
"""

from __future__ import annotations

import os
import re
import ssl
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep
from typing import Final, TypeVar

from polywire.client.base import TopicInfo
from polywire.client.blocking import FramedSocket, more_follows
from polywire.client.brokers import split_address, split_brokers
from polywire.client.cursors import beyond
from polywire.client.login import Login, split_login
from polywire.client.sockets import Place, Sockets
from polywire.client.tls import SCHEME_SUFFIX, client_context
from polywire.clock import Clock, SystemClock
from polywire.errors import ErrorCode, Missing, PeerError, Unavailable
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import decode_answer
from polywire.protocols.polywire.messages import ANY_EPOCH, ANY_INCARNATION, BY_KEY, NO_OFFSET, Head, Verb
from polywire.records.arena import Arena
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.types import Buffer, Level

TIMEOUT_S: Final = 120.0  # Kafka's Spark source waits as long for a poll
RECONNECT_S: Final = 10.0  # a broker's restart, recovery included
RECONNECT_INTERVAL_S: Final = 0.1
PRODUCE_WINDOW: Final = 16  # requests sent ahead of their answers by produce_all

_H = TypeVar("_H", bound=Head)


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """Bounds of one partition, as durable as the disk: first inclusive, next exclusive.

    ``time_offsets`` answers the times asked for, in their order: first offset appended at or after it (``next_offset`` when none is).
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
    """A topic with the incarnation of each of its partitions, by number."""

    name: str
    id: bytes
    created_at_us: int
    incarnations: tuple[int, ...]
    settings: dict[str, int | str | None]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Whole stored batches of one partition back to back; rows outside ``[offset, offset_end)`` were not asked for.

    Without ``bodies`` only their headers, but for compacted batches, which are always whole.

    ``data`` lies in a reused block: it and whatever was made from it without a copy stay valid for as long as they are referred to.
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
    """Where records of one batch went."""

    partition: int
    base_offset: int
    record_count: int


@dataclass(frozen=True, slots=True)
class ProduceResult:
    """Answer of a produce. ``partitions`` has a u32 per record where the broker chose by key, else it is empty."""

    appended: tuple[AppendedRange, ...]
    partitions: bytes


@dataclass(frozen=True, slots=True)
class PublishResult:
    """Answer of a publish: whether it had been done before, else (topic, partition, first, next) of what became visible."""

    duplicate: bool
    ranges: tuple[tuple[str, int, int, int], ...]


class _Progress:
    """How far a range was read. Guards: no offset is handed out twice, however often the connection is lost."""

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
        """What is still to be read."""
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
        """Whether anything was read since the last request."""
        return self.next_offset > self._asked_from

    def advance(self, data: memoryview, next_offset: int) -> StoredChunk | None:
        """Take one frame; None when it is empty."""
        first = self.next_offset
        # A frame without data may repeat the offset: it ends an answer, or says that compaction left nothing.
        self.next_offset = beyond(first, next_offset, "offset") if len(data) else max(first, next_offset)
        if self._bytes_left is not None:
            self._bytes_left -= len(data)
        if not len(data):
            return None
        last = next_offset if self._offset_end < 0 else min(self._offset_end, next_offset)
        return StoredChunk(self._topic, self._partition, data, first, last, next_offset, self._bodies)


class BulkConnection:
    """Sockets to one broker, one per call under way; ``connect`` makes it. Calls may come from any thread.

    Guards: a socket whose answer was not read to its end is never used again.
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
        others: Sequence[Place] = (),
    ) -> None:
        """Remember where the broker is; nothing is sent before the first call.

        Args:
            host: name or address of the broker.
            port: where its `polywire` wire listens.
            timeout_s: longest wait for the peer, in seconds, of each call.
            reconnect_s: how long, in seconds, reading calls go on trying to reach a broker that is gone.
            clock: None: the system's.
            tls: how to verify the broker; None: without TLS.
            login: who logs in first, on each connection; None: nobody.
            others: brokers that will do as well where this one does not answer.
        """
        self._sockets: Final = Sockets([Place(host, port, tls), *others], timeout_s=timeout_s, login=login)
        self._clock: Final[Clock] = clock or SystemClock()
        self._arena: Final = Arena()
        self.reconnect_s = reconnect_s

    def close(self) -> None:
        """Close idle sockets; a fetch under way keeps its own."""
        self._sockets.close()

    def ping(self) -> None:
        """Return when the broker answers. Raises Unavailable."""
        self._read(Verb.PING, Head(), Head)

    def topics(self, pattern: str | None = None) -> list[TopicInfo]:
        """Return topics by name; with ``pattern`` (a regular expression) those whose full name matches it from end to end."""
        answer = self._read(Verb.TOPICS, messages.ListTopics(), messages.TopicList)
        chosen = re.compile(pattern or ".*")
        return [TopicInfo(t.name, t.id, t.partition_count) for t in answer.topics if chosen.fullmatch(t.name)]

    def describe(self, topic: str) -> TopicDetail:
        """Return one topic's id, settings and incarnations. Raises Missing(TOPIC_MISSING)."""
        answer = self._read(Verb.DESCRIBE, messages.Describe(topic), messages.TopicDescription)
        return _detail(answer)

    def create_topic(
        self, topic: str, partition_count: int | None = None, settings: dict[str, int | str | None] | None = None
    ) -> TopicDetail:
        """Make a topic, and return it.

        Args:
            topic: full name.
            partition_count: None: the broker's default.
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
        """Return the bounds of every partition of these topics, synced first.

        Args:
            topics: full names, at most 1,000.
            times_us: microseconds since 1970, at most 16: for each the first offset appended at it or after is told too.

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
        """Yield chunks that hold ``[offset, offset_end)`` in order; without an end, up to what can be read now.

        A lost connection is replaced and the range goes on where it stood. The broker sends ahead while a chunk is being used.

        Args:
            topic: full name.
            partition: its number, from 0.
            incarnation: which life of the partition is meant; 0: any.
            offset: of the first record wanted. The first chunk may begin below it, the last end above ``offset_end``: skip those rows.
            offset_end: exclusive; -1: none.
            epoch: in which the offsets were learnt; -1: not checked.
            bytes_max: ends it early, after at least one batch; -1: no limit.
            wait_ms: how long to wait, in milliseconds, for the first record.
            bodies: without, only headers of batches are sent, for who wants to know offsets and times.

        Raises:
            Conflict: TOPIC_REPLACED or EPOCH_ENDED: incarnation or epoch say that other data was meant.
            Missing: OFFSET_OUT_OF_RANGE: part of the range does not exist.
            Unavailable: the broker was gone for longer than ``reconnect_s``.
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
                f"range ends early topic={topic} partition={partition} next_offset={at.next_offset} offset_end={offset_end}",
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
        """Where the sealed part of a range lies as files, for who may see them; what it does not name is to be fetched.

        Raises as ``fetch_range`` does before its first chunk; Invalid(INVALID_REQUEST) from a broker that does not know the question.
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
        """Append whole batches, and return where they went once all have reached ``level``. Made once, never again.

        Args:
            topic: full name.
            partition: its number; -1: the partition of each record's key.
            batches: stored batches. What does not fit one frame together goes in several requests, in order.
            level: what the acknowledgement means.
            create: whether a missing topic is made.

        Raises:
            Unavailable: nobody knows whether they were stored, unless the batches carry a producer.
            Invalid: INVALID_BATCH, SEQUENCE_GAP.
            Missing: TOPIC_MISSING, PARTITION_MISSING.
            Busy: over a limit, or DISK_FULL.
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
        """Append each batch as a request of its own, up to ``window`` ahead of the answers; return how many records were stored.

        The rest as for ``produce``. Raises what it raises; batches sent ahead may be stored then.
        """
        head = messages.Produce(topic, partition, int(level))
        record_count = 0
        with self._lease() as wire:
            waiting: list[int] = []
            for batch in batches:
                waiting.append(wire.send(Verb.PRODUCE, head, [batch]))
                if len(waiting) >= window:
                    record_count += self._settle(wire, waiting)
            while waiting:
                record_count += self._settle(wire, waiting)
        return record_count

    def stage(
        self, token: bytes, topic: str, partition: int, batches: Sequence[Buffer], level: Level = Level.WRITTEN
    ) -> int:
        """Store batches invisibly under a token of 16 random bytes, for ``publish``; return how many records.

        The rest as for ``produce``. Raises Busy(STAGE_FULL), Missing, Denied for another user's token.
        """
        head = messages.Stage(token, topic, partition, int(level))
        answers = [self._write(Verb.STAGE, head, messages.Staged, group) for group in _fitting(batches)]
        return sum([answer.record_count for answer, _ in answers])

    def publish(self, writer: str, number: int, tokens: Sequence[bytes]) -> PublishResult:
        """Make everything staged under these tokens visible at once, exactly once per (writer, number), so it may be asked again.

        Args:
            writer: who publishes, at most 255 bytes.
            number: grows from publish to publish of one writer.
            tokens: at most 10,000.

        Raises:
            Missing: STAGE_MISSING: a token is unknown or expired; nothing was published.
            Invalid: SEQUENCE_GAP: the number is more than 2^32 above the last one.
        """
        answer = self._read(Verb.PUBLISH, messages.Publish(writer, number, list(tokens)), messages.Published)
        ranges = tuple((r.name, r.partition, r.first_offset, r.next_offset) for r in answer.ranges)
        return PublishResult(answer.duplicate, ranges)

    def abandon(self, tokens: Sequence[bytes]) -> None:
        """Drop what was staged under these tokens; unknown ones are ignored."""
        self._read(Verb.ABANDON, messages.Abandon(list(tokens)), Head)

    def commit_position(self, topic: str, partition: int, group: str, offset: int) -> None:
        """Store a group's next offset to read, unchecked (for showing lag)."""
        self._read(Verb.COMMIT, messages.Commit(topic, partition, 1, group, offset), Head)

    def _settle(self, wire: FramedSocket, waiting: list[int]) -> int:
        prefix, head = wire.receive(waiting.pop(0))
        wire.receive_payload(prefix)
        return sum(a.record_count for a in _decode(head, messages.Produced).appended)

    def _chunks(self, at: _Progress, *, incarnation: int, epoch: int, wait_ms: int) -> Iterator[StoredChunk]:
        """One FETCH from where ``at`` stands."""
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
        """Yield once per further attempt, each after a pause, until ``reconnect_s`` have passed since the first was asked for."""
        deadline = self._clock.monotonic() + self.reconnect_s
        while self._clock.monotonic() < deadline:
            sleep(RECONNECT_INTERVAL_S)
            yield

    @property
    def arena(self) -> Arena:
        """Where chunks lie: for who makes further ones."""
        return self._arena

    @staticmethod
    def _retry_or_raise(retries: Iterator[None], error: Unavailable) -> None:
        for _ in retries:
            return
        raise error

    def _read(self, verb: Verb, head: Head, answer: type[_H]) -> _H:
        """A call that may safely be made twice."""
        retries = self.retries()
        while True:
            try:
                return self._write(verb, head, answer)[0]
            except Unavailable as error:
                self._retry_or_raise(retries, error)

    def _write(self, verb: Verb, head: Head, answer: type[_H], payload: Sequence[Buffer] = ()) -> tuple[_H, bytes]:
        """A call that is made once."""
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
        """A socket for requests sent ahead of their answers; it goes back with ``give``. Raises Unavailable."""
        return self._sockets.take()

    def give(self, wire: FramedSocket) -> None:
        """Take a socket back: kept for others when every answer was read, closed otherwise."""
        self._sockets.give(wire)


TLS_SCHEME: Final = f"polywire{SCHEME_SUFFIX}://"
_Key = tuple[int, tuple[tuple[str, int, bool], ...], float, float, Login | None]
_connections: dict[_Key, BulkConnection] = {}
_connections_lock = threading.Lock()


def connect(
    address: str, *, timeout_s: float = TIMEOUT_S, reconnect_s: float = RECONNECT_S, login: Login | None = None
) -> BulkConnection:
    """Return the process's connection to ``host:port``, made once; a forked child makes its own.

    Of several brokers, ``host:port,host:port``, the first that answers is asked, and when it is gone the next.

    Args:
        address: ``polywire://`` in front is allowed, ``polywire+tls://`` asks for TLS; a name and a password may stand before the host.
        timeout_s: longest wait for the peer, in seconds.
        reconnect_s: how long, in seconds, reading calls go on trying to reach a broker that is gone.
        login: who logs in; it goes before what the address says.

    Raises:
        Invalid: INVALID_REQUEST: a broken address. Nobody is asked before the first call.
    """
    brokers = [split_login(broker) for broker in split_brokers(address)]
    login = login or next((found for found, _ in brokers if found is not None), None)
    listeners = tuple(_listener(bare) for _, bare in brokers)
    key = (os.getpid(), listeners, timeout_s, reconnect_s, login)
    with _connections_lock:
        connection = _connections.get(key)
        if connection is None:
            tls = client_context() if any(is_secured for _, _, is_secured in listeners) else None
            place, *others = [Place(host, port, tls if is_secured else None) for host, port, is_secured in listeners]
            connection = BulkConnection(
                place.host,
                place.port,
                timeout_s=timeout_s,
                reconnect_s=reconnect_s,
                tls=place.tls,
                login=login,
                others=others,
            )
            _connections[key] = connection
        return connection


def _listener(address: str) -> tuple[str, int, bool]:
    """Host, port, and whether under TLS."""
    bare = address.removeprefix(TLS_SCHEME)
    return *split_address(bare), bare != address


def _decode(head: bytes, kind: type[_H]) -> _H:
    try:
        return decode_answer(head, kind)
    except PeerError as error:
        raise Unavailable(ErrorCode.UNREACHABLE, error.message) from None


def _detail(answer: messages.TopicDescription) -> TopicDetail:
    return TopicDetail(answer.name, answer.id, answer.created_at_us, tuple(answer.incarnations), answer.settings)


def _fitting(batches: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """The batches in order, in groups that fit one frame; one that does not fit by itself is left for the broker to refuse."""
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
