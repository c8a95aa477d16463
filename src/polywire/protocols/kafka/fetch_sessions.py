"""Fetch sessions: what a consumer wants, kept between its requests (spec: kafka#fetch-sessions).

Promises: looking at a session costs what has changed in it, not what is in it; nobody but the connection that opened it can use it, and
it ends with that; all of a listener together hold no more than their limits. Must not know: frames, records, how they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from polywire.log.base import Handle
from polywire.protocols.kafka.messages import NO_ID, NO_OFFSET
from polywire.protocols.runtime.broker import WireBroker

SESSIONS_MAX: Final = 10_000  # of one listener
BYTES_MAX: Final = 64 * 1024 * 1024  # that all of them take, some 100,000 partitions
PARTITION_BYTES: Final = 640  # of a partition that is wanted, with its wait and its places in dictionaries
TOPIC_BYTES: Final = 512  # of a topic without its name
IDLE_S: Final = 120.0  # after which a session makes way for another, as in the reference
EPOCH_MAX: Final = 2**31 - 1


class WantedTopic:
    """A topic as the client names it, and the partitions wanted of it by their number."""

    __slots__ = ("name", "partitions", "topic_id")

    def __init__(self, name: str, topic_id: bytes) -> None:
        self.name: Final = name
        self.topic_id: Final = topic_id
        self.partitions: Final[dict[int, Wanted]] = {}


class Wanted:
    """A partition that is wanted; the fields of a request's have the names that they have there.

    wait: what tells of its next record. end, start: what the client was told last.
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

    def __init__(self, session: FetchSession, topic: WantedTopic, partition: int) -> None:
        self.session: Final = session
        self.topic: Final = topic
        self.partition: Final = partition
        self.fetch_offset = self.end = self.start = NO_OFFSET
        self.partition_max_bytes = self.current_leader_epoch = 0
        self.wait: Handle | None = None

    def woken(self) -> None:
        """A record has come, or the partition has ended."""
        self.wait = None
        self.session.note(self)

    def stop_waiting(self) -> None:
        """Hear of no more records."""
        if self.wait is not None:
            self.wait.cancel()
            self.wait = None


class FetchSession:
    """What one consumer wants.

    Invariant: a partition that is not in ``ready`` has a wait at the end of its log, which is where the client reads it from, so looking at
    those in ``ready`` is enough. ``ready`` is in the order of their turns. epoch: of the next request. news: called when a partition
    becomes ready, while a request waits. has_news: one has become so since it was last set to False. names_ids: whether its requests name
    topics by their ids.
    """

    __slots__ = (
        "_sessions",
        "_topics",
        "bytes",
        "epoch",
        "has_news",
        "is_over",
        "names_ids",
        "news",
        "number",
        "ready",
        "used_at",
    )

    def __init__(self, sessions: FetchSessions, number: int, now: float, *, names_ids: bool) -> None:
        self._sessions: Final = sessions
        self._topics: dict[str | bytes, WantedTopic] = {}
        self.number: Final = number
        self.names_ids: Final = names_ids
        self.epoch = 1
        self.ready: dict[Wanted, None] = {}
        self.news: Callable[[], None] | None = None
        self.has_news = self.is_over = False
        self.bytes = 0
        self.used_at = now

    @property
    def is_empty(self) -> bool:
        """Whether nothing is wanted."""
        return not self._topics

    def want(self, named: Any, one: Any) -> Wanted | None:
        """Read this partition of a topic from here on; None when the session is over, which it is when there is no room for more."""
        if self.is_over:
            return None
        key = _key(named)
        topic = self._topics.get(key)
        if topic is None:
            if not self._sessions.allocate(self, TOPIC_BYTES + len(named.topic)):
                return None
            topic = self._topics[key] = WantedTopic(named.topic, named.topic_id)
        wanted = topic.partitions.get(one.partition)
        if wanted is None:
            if not self._sessions.allocate(self, PARTITION_BYTES):
                return None
            wanted = topic.partitions[one.partition] = Wanted(self, topic, one.partition)
        wanted.fetch_offset = one.fetch_offset
        wanted.partition_max_bytes = one.partition_max_bytes
        wanted.current_leader_epoch = one.current_leader_epoch
        self.ready[wanted] = None
        return wanted

    def forget(self, named: Any, partition: int) -> None:
        """This partition of a topic is not wanted any more; one that is not here does not matter."""
        key = _key(named)
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

    def rest(self, wanted: Wanted) -> None:
        """There is nothing to read of it until it is woken."""
        self.ready.pop(wanted, None)

    def note(self, wanted: Wanted) -> None:
        """There may be something to read."""
        self.ready[wanted] = None
        self.has_news = True
        if self.news is not None:
            self.news()

    def served(self, wanted: Wanted) -> None:
        """Its records are in an answer: others come first the next time."""
        if wanted in self.ready:
            del self.ready[wanted]
            self.ready[wanted] = None

    def advance(self) -> None:
        """A request of this epoch came."""
        self.epoch = self.epoch + 1 if self.epoch < EPOCH_MAX else 1

    def end(self) -> None:
        """Nobody uses it any more."""
        self._sessions.end(self)

    def release(self, end: float, now: Callable[[], float]) -> bool:
        """Let go of what it holds until this time; whether there is more."""
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
    """The sessions of one listener, the one used last at the end.

    Invariant: ``_bytes`` is what all of them take, with those that are over and still hold something.
    """

    __slots__ = ("_broker", "_by_use", "_bytes", "_number")

    def __init__(self, broker: WireBroker) -> None:
        self._broker: Final = broker
        self._by_use: dict[FetchSession, None] = {}
        self._bytes = 0
        self._number = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._by_use)

    @property
    def bytes(self) -> int:
        """What they take, as they are counted."""
        return self._bytes

    def open(self, *, names_ids: bool) -> FetchSession | None:
        """A new one, or None when there are too many that are in use."""
        if len(self._by_use) >= SESSIONS_MAX and not self._evict(None):
            return None
        self._number = self._number % EPOCH_MAX + 1
        session = FetchSession(self, self._number, self._broker.clock.monotonic(), names_ids=names_ids)
        self._by_use[session] = None
        return session

    def use(self, session: FetchSession) -> None:
        """It is in use."""
        session.used_at = self._broker.clock.monotonic()
        del self._by_use[session]
        self._by_use[session] = None

    def allocate(self, session: FetchSession, size: int) -> bool:
        """Let a session take more; False, and it is over, when there is no room. One that is not in use makes some for the next who asks."""
        if self._bytes + size > BYTES_MAX:
            self._evict(session)
            self.end(session)
            return False
        self._bytes += size
        session.bytes += size
        return True

    def free(self, session: FetchSession, size: int) -> None:
        """A session takes less."""
        self._bytes -= size
        session.bytes -= size

    def _evict(self, other: FetchSession | None) -> bool:
        """End the session that was not used for longest, unless that is ``other`` or not long ago; whether one was ended."""
        oldest = next(iter(self._by_use), None)
        if oldest is None or oldest is other or oldest.used_at + IDLE_S > self._broker.clock.monotonic():
            return False
        self.end(oldest)
        return True

    def end(self, session: FetchSession) -> None:
        """It is over: its next request is answered so."""
        if session.is_over:
            return
        session.is_over = True
        session.news = None
        del self._by_use[session]
        now = self._broker.clock.monotonic
        self._broker.sliced.put(lambda end: session.release(end, now))


def _key(named: Any) -> str | bytes:
    """By what a topic is told from others: its id where requests have that."""
    topic_id: bytes = named.topic_id
    name: str = named.topic
    return name if topic_id == NO_ID else topic_id


def _key_of(topic: WantedTopic) -> str | bytes:
    return topic.name if topic.topic_id == NO_ID else topic.topic_id
