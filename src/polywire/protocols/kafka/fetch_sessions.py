"""Fetch sessions: remember which partitions a consumer reads, between its requests (spec: kafka#fetch-sessions).

* The cost of a fetch depends on the number of partitions with new data, not on all partitions of the session.
* A session belongs to the connection that opened it, and ends with it.
* The sessions of a listener share limits on their number and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from polywire.log.base import Handle
from polywire.protocols.kafka.messages import NO_ID, NO_OFFSET
from polywire.protocols.runtime.broker import WireBroker

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import FetchRequest

SESSIONS_MAX: Final = 10_000  # sessions of one listener
BYTES_MAX: Final = 64 * 1024 * 1024  # memory of all sessions together, enough for about 100,000 partitions
PARTITION_BYTES: Final = 640  # memory of one partition, with its registration and its dictionary entries
TOPIC_BYTES: Final = 512  # memory of one topic, without its name
IDLE_S: Final = 120.0  # seconds after which a session may be evicted for another one, as in Kafka
EPOCH_MAX: Final = 2**31 - 1


class SessionTopic:
    """A topic of a session, with the name and id that the client uses, and its partitions by number."""

    __slots__ = ("name", "partitions", "topic_id")

    def __init__(self, name: str, topic_id: bytes) -> None:
        self.name: Final = name
        self.topic_id: Final = topic_id
        self.partitions: Final[dict[int, SessionPartition]] = {}


class SessionPartition:
    """A partition of a session.

    Attributes:
        current_leader_epoch, fetch_offset, partition, partition_max_bytes: as in the last request that named the
            partition.
        wait: registration for the next record, if there is one.
        start, end: the log's first offset and high watermark, as last sent to the client.
    """

    __slots__ = (
        "current_leader_epoch",
        "end",
        "fetch_offset",
        "partition",
        "partition_max_bytes",
        "session",
        "start",
        "topic",
        "wait",
    )

    def __init__(self, session: FetchSession, topic: SessionTopic, partition: int) -> None:
        self.session: Final = session
        self.topic: Final = topic
        self.partition: Final = partition
        self.fetch_offset = self.end = self.start = NO_OFFSET
        self.partition_max_bytes = self.current_leader_epoch = 0
        self.wait: Handle | None = None

    def woken(self) -> None:
        """Mark the partition as ready: a record was appended, or the partition was deleted."""
        self.wait = None
        self.session.mark_ready(self)

    def stop_waiting(self) -> None:
        if self.wait is not None:
            self.wait.cancel()
            self.wait = None


class FetchSession:
    """The partitions that one consumer reads.

    A request checks only the partitions in ``ready``, in that order. The others have no unread records, and are
    registered with the broker for the next one.

    Attributes:
        epoch: the epoch that the next request must have.
        names_ids: whether requests name topics by id.
        ready_callback: called when a partition becomes ready while a request waits.
        has_new_ready: whether a partition has become ready since a request set this to False.
        is_over: whether the session has ended.
    """

    __slots__ = (
        "_sessions",
        "_topics",
        "bytes",
        "epoch",
        "has_new_ready",
        "is_over",
        "names_ids",
        "number",
        "ready",
        "ready_callback",
        "used_at",
    )

    def __init__(self, sessions: FetchSessions, number: int, now: float, *, names_ids: bool) -> None:
        self._sessions: Final = sessions
        self._topics: dict[str | bytes, SessionTopic] = {}
        self.number: Final = number
        self.names_ids: Final = names_ids
        self.epoch = 1
        self.ready: dict[SessionPartition, None] = {}
        self.ready_callback: Callable[[], None] | None = None
        self.has_new_ready = self.is_over = False
        self.bytes = 0
        self.used_at = now

    @property
    def is_empty(self) -> bool:
        return not self._topics

    def add(
        self, topic_request: FetchRequest.Topics, partition_request: FetchRequest.Topics.Partitions
    ) -> SessionPartition | None:
        """Add a partition, or update the one that exists.

        Returns None if the session has ended because of the memory limit.
        """
        if self.is_over:
            return None
        key = _key(topic_request)
        topic = self._topics.get(key)
        if topic is None:
            if not self._sessions.allocate(self, TOPIC_BYTES + len(topic_request.topic)):
                return None
            topic = self._topics[key] = SessionTopic(topic_request.topic, topic_request.topic_id)
        wanted = topic.partitions.get(partition_request.partition)
        if wanted is None:
            if not self._sessions.allocate(self, PARTITION_BYTES):
                return None
            wanted = topic.partitions[partition_request.partition] = SessionPartition(
                self, topic, partition_request.partition
            )
        wanted.fetch_offset = partition_request.fetch_offset
        wanted.partition_max_bytes = partition_request.partition_max_bytes
        wanted.current_leader_epoch = partition_request.current_leader_epoch
        self.ready[wanted] = None
        return wanted

    def forget(self, topic_request: FetchRequest.Forgotten, partition: int) -> None:
        """Remove a partition if it is in the session."""
        key = _key(topic_request)
        topic = self._topics.get(key)
        wanted = None if topic is None else topic.partitions.pop(partition, None)
        if topic is None or wanted is None:
            return
        wanted.stop_waiting()
        self.ready.pop(wanted, None)
        freed = PARTITION_BYTES
        if not topic.partitions:
            del self._topics[key]
            freed += TOPIC_BYTES + len(topic.name)
        self._sessions.free(self, freed)

    def mark_read(self, wanted: SessionPartition) -> None:
        """Mark a partition as not ready: the client has read all records."""
        self.ready.pop(wanted, None)

    def mark_ready(self, wanted: SessionPartition) -> None:
        self.ready[wanted] = None
        self.has_new_ready = True
        if self.ready_callback is not None:
            self.ready_callback()

    def move_back(self, wanted: SessionPartition) -> None:
        """Move a partition behind the other ready partitions, after its records were sent."""
        if wanted in self.ready:
            del self.ready[wanted]
            self.ready[wanted] = None

    def advance(self) -> None:
        self.epoch = self.epoch + 1 if self.epoch < EPOCH_MAX else 1

    def end(self) -> None:
        self._sessions.end(self)

    def release(self, end: float, now: Callable[[], float]) -> bool:
        """Free the memory of this session, which has ended, but stop at time ``end``. Return whether partitions are left."""
        self.ready.clear()
        while self._topics:
            topic = next(iter(self._topics.values()))
            while topic.partitions:
                _, wanted = topic.partitions.popitem()
                wanted.stop_waiting()
                if now() >= end:
                    return True
            self._topics.pop(_key_of(topic))
        self._sessions.free(self, self.bytes)
        return False


class FetchSessions:
    """The sessions of one listener."""

    __slots__ = ("_broker", "_by_use", "_bytes", "_number")

    def __init__(self, broker: WireBroker) -> None:
        self._broker: Final = broker
        self._by_use: dict[FetchSession, None] = {}  # least recently used first
        self._bytes = 0
        self._number = 0

    @property
    def count(self) -> int:
        return len(self._by_use)

    @property
    def bytes(self) -> int:
        """The estimated memory of all sessions, including ended ones that are not completely freed yet."""
        return self._bytes

    def open(self, *, names_ids: bool) -> FetchSession | None:
        """Return a new session, or None if there are too many in use."""
        if len(self._by_use) >= SESSIONS_MAX and not self._evict(None):
            return None
        self._number = self._number % EPOCH_MAX + 1
        session = FetchSession(self, self._number, self._broker.clock.monotonic(), names_ids=names_ids)
        self._by_use[session] = None
        return session

    def use(self, session: FetchSession) -> None:
        session.used_at = self._broker.clock.monotonic()
        del self._by_use[session]
        self._by_use[session] = None

    def allocate(self, session: FetchSession, size: int) -> bool:
        """Return whether a session may grow by ``size`` bytes.

        If the memory limit is reached, the session is ended. An idle session is evicted, too, so that the next client
        finds memory.
        """
        if self._bytes + size > BYTES_MAX:
            self._evict(session)
            self.end(session)
            return False
        self._bytes += size
        session.bytes += size
        return True

    def free(self, session: FetchSession, size: int) -> None:
        self._bytes -= size
        session.bytes -= size

    def _evict(self, other: FetchSession | None) -> bool:
        """End the least recently used session, if it is idle and not ``other``. Return whether a session was ended."""
        oldest = next(iter(self._by_use), None)
        if oldest is None or oldest is other or oldest.used_at + IDLE_S > self._broker.clock.monotonic():
            return False
        self.end(oldest)
        return True

    def end(self, session: FetchSession) -> None:
        """End a session. The client's next request gets an error."""
        if session.is_over:
            return
        session.is_over = True
        session.ready_callback = None
        del self._by_use[session]
        now = self._broker.clock.monotonic
        self._broker.sliced.put(lambda end: session.release(end, now))


def _key(topic_request: FetchRequest.Topics | FetchRequest.Forgotten) -> str | bytes:
    """Return the key of a topic: its id if the request names ids, otherwise its name."""
    return topic_request.topic if topic_request.topic_id == NO_ID else topic_request.topic_id


def _key_of(topic: SessionTopic) -> str | bytes:
    return topic.name if topic.topic_id == NO_ID else topic.topic_id
