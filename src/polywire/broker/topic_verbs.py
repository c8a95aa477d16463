"""The broker's verbs that change topics: the part of its facade that makes, grows, shrinks, purges, configures and deletes them.

What touches few partitions is one group of the log and true when the call returns. What touches more than ``AT_ONCE_MAX`` is done in slices
(``topic_work``), others' requests in between, and ordered so that a stop anywhere leaves what a start accepts:

* a topic, or more partitions, begin with the one change that names them, when all of them are open in the log. Nobody sees them before;
* a topic, or its last partitions, end with the one change that says so, at once. What the log has of them is dropped behind it;
* a purge trims one partition after the other up to where it ended when the purge was asked for;
* several topics are ended, or purged, one after the other.

What a stop leaves open in the log without a topic is dropped by the next start. An answer is given when all of it has its level.

Promises: what was looked up when a change was asked for is looked up again when its turn has come and before it is made; partitions being
dropped count for the limit of partitions, so however fast topics come and go memory is bounded. Must not know: wires, records.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from polywire.broker import changes
from polywire.broker.claims import Claims
from polywire.broker.owners import NOBODY, Caller
from polywire.broker.quotas import Kind
from polywire.broker.settings import TopicSettings
from polywire.broker.sliced import OrderedWork, Steps
from polywire.broker.topic_lookup import TopicLookup
from polywire.broker.topic_work import AT_ONCE_MAX, are_many, retry_while_busy
from polywire.broker.topics import Topic
from polywire.broker.write_batch import ENTRY_BYTES, WriteBatchVerbs
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import Completion, Need, PartitionLog
from polywire.types import Level, TopicName

Then = Callable[[Topic], None]
"""Called with a topic as soon as what was asked for can be used."""


class TopicVerbs(TopicLookup, WriteBatchVerbs, Protocol):
    """A base of ``Broker``, whose state these verbs use."""

    __slots__ = ()

    claims: Claims
    clock: Clock
    _topic_work: OrderedWork

    # Topics begin

    def create_topic(
        self,
        name: TopicName,
        partition_count: int | None = None,
        settings: TopicSettings | None = None,
        *,
        internal: bool = False,
        partition_count_min: int = 1,
        by: Caller = NOBODY,
        level: Level = Level.SYNCED,
        done: Completion[int] | None = None,
    ) -> Topic:
        """Make a topic at once, however many partitions it has; it can be used when this returns. ``make_topic`` is for what peers ask for.

        partition_count_min: whoever allows none has topics that nobody can write to.
        Raises Invalid(INVALID_TOPIC, INVALID_PARTITION_COUNT, INVALID_REQUEST), Conflict(TOPIC_EXISTS), Busy(BUSY, DISK_FULL).
        """
        count = self.settings.partition_count if partition_count is None else partition_count
        given = settings or TopicSettings()
        self._check_new(name, count, given, internal=internal, partition_count_min=partition_count_min, by=by)
        change = self._created(name, count, given, self._catalog.next_incarnation, by)
        self._log.reserve(len(changes.encode(change)) + ENTRY_BYTES * (count + 1))
        if not internal:
            self.claims.claim(name.full)
        first = change.first_incarnation
        opened = [self._log.open_partition(incarnation) for incarnation in range(first, first + count)]
        self._begin(change, opened, level, done)
        return self.topic(name.full)

    def make_topic(
        self,
        name: TopicName,
        partition_count: int | None = None,
        settings: TopicSettings | None = None,
        *,
        partition_count_min: int = 1,
        by: Caller = NOBODY,
        level: Level = Level.SYNCED,
        then: Then,
        done: Completion[int],
    ) -> bool:
        """Make a topic of any size; ``then`` is called with it as soon as it can be used. Returns whether it was.

        Raises as ``create_topic``; what is found out later ``done`` gets, and there is no topic then.
        """
        count = self.settings.partition_count if partition_count is None else partition_count
        given = settings or TopicSettings()
        if count <= AT_ONCE_MAX:
            then(self.create_topic(name, count, given, partition_count_min=partition_count_min, by=by))
            self._log.barrier(level, done)
            return True
        check = partial(self._check_new, name, count, given, partition_count_min=partition_count_min, by=by)
        check()
        self.claims.claim(name.full)
        made = partial(self._created, name, count, given, by=by)
        self._topic_work.put(self._making(check, made, count, lambda: then(self.topic(name.full)), level, done))
        return False

    def ensure_topic(self, full_name: str, *, by: Caller = NOBODY) -> Topic:
        """The topic of this name, made at once with the default settings when it is missing.

        Raises Missing(TOPIC_MISSING) when topics are not made automatically, else as ``create_topic``.
        """
        if not self.settings.auto_create or self._catalog.find(full_name) is not None:
            return self.topic(full_name)
        return self.create_topic(TopicName.parse(full_name), by=by, level=Level.WRITTEN)

    def check_new_topic(
        self,
        name: TopicName,
        partition_count: int,
        settings: TopicSettings | None = None,
        *,
        by: Caller = NOBODY,
    ) -> None:
        """Find out whether a topic could be made; nothing is. Raises as ``create_topic``."""
        self._check_new(name, partition_count, settings or TopicSettings(), partition_count_min=1, by=by)

    def grow_topic(
        self,
        topic: Topic,
        partition_count: int,
        *,
        level: Level = Level.SYNCED,
        then: Then | None = None,
        done: Completion[int] | None = None,
    ) -> bool:
        """Add partitions up to this count; ``then`` is called as soon as they can be used. Returns whether it was, or would have been.

        Raises Missing(TOPIC_MISSING), Invalid(INVALID_PARTITION_COUNT), Busy(BUSY, DISK_FULL); what is found out later ``done`` gets,
        Busy(BUSY) where the topic has grown or shrunk meanwhile, and nothing is added then.
        """
        added = self._check_growth(topic, partition_count)
        if added > AT_ONCE_MAX:
            check = partial(self._check_growth, topic, partition_count, expected=added)
            made = partial(changes.PartitionsAdded, topic.id, count=added)
            ready = None if then is None else partial(then, topic)
            self._topic_work.put(self._making(check, made, added, ready, level, done))
            return False
        if added:
            change = changes.PartitionsAdded(topic.id, self._catalog.next_incarnation, added)
            self._log.reserve(len(changes.encode(change)) + ENTRY_BYTES * (added + 1))
            first = change.first_incarnation
            opened = [self._log.open_partition(incarnation) for incarnation in range(first, first + added)]
            self._begin(change, opened, level, None)
        if then is not None:
            then(topic)
        self.change_all((), level=level, done=done)
        return True

    def _check_new(
        self,
        name: TopicName,
        count: int,
        settings: TopicSettings,
        *,
        internal: bool = False,
        partition_count_min: int,
        by: Caller,
    ) -> None:
        settings.check()
        self._catalog.check_new(name, count, internal=internal, count_min=partition_count_min)
        self._state.quotas.admit(Kind.TOPICS, by, settings.size)
        self._state.quotas.admit(Kind.PARTITIONS, by, 0, count=count)

    def _check_growth(self, topic: Topic, partition_count: int, *, expected: int | None = None) -> int:
        added = self._catalog.check_growth(topic, partition_count)
        if expected not in (None, added):
            raise Busy(ErrorCode.BUSY, f"partitions of the topic were changed meanwhile name={topic.name.full!r}")
        self._state.quotas.admit(Kind.PARTITIONS, NOBODY, 0, count=added, owner=topic.owner)
        return added

    def _created(
        self, name: TopicName, count: int, settings: TopicSettings, first_incarnation: int, by: Caller
    ) -> changes.TopicCreated:
        return changes.TopicCreated(
            id=secrets.token_bytes(16),
            stream=name.stream,
            topic=name.topic,
            created_at_us=self.clock.now_us(),
            first_incarnation=first_incarnation,
            partition_count=count,
            settings=settings,
            owner=by.owner,
        )

    def _begin(
        self,
        change: changes.TopicCreated | changes.PartitionsAdded,
        opened: Sequence[PartitionLog],
        level: Level,
        done: Completion[int] | None,
    ) -> None:
        """Say that partitions which are open in the log belong to a topic."""
        self._log.change(changes.encode(change), level=level, done=done)
        self._state.apply_change(change)
        for log in opened:
            partition = self._catalog.find_partition(log.incarnation)
            assert partition is not None, "it has just begun"
            partition.attach(log)

    def _making(
        self,
        check: Callable[[], object],
        made: Callable[[int], changes.TopicCreated | changes.PartitionsAdded],
        count: int,
        ready: Callable[[], None] | None,
        level: Level,
        done: Completion[int] | None,
    ) -> Steps:
        """Open so many partitions, then have a change begin them."""
        opened: list[PartitionLog] = []
        try:
            check()
            first = self._catalog.take_incarnations(count)
            for incarnation in range(first, first + count):
                opened.append(self._log.open_partition(incarnation))
                yield False
            check()
            began, opened = opened, []
            self._begin(made(first), began, level, None)
            if ready is not None:
                ready()
            self.change_all((), level=level, done=done)
        except BrokerError as error:
            if done is not None:
                done(error)
            self._catalog.leaving += len(opened)
            yield from self._dropping([log.incarnation for log in opened], level, None)

    # Topics end

    def delete_topic(self, topic: Topic, *, level: Level = Level.SYNCED, done: Completion[int] | None = None) -> None:
        """End a topic with its records, positions and groups. Raises Missing(TOPIC_MISSING)."""
        self._catalog.check_alive(topic)
        self._end(
            changes.TopicDeleted(topic.id), [partition.incarnation for partition in topic.partitions], level, done
        )
        self.claims.release(topic.name.full)

    def shrink_topic(
        self, topic: Topic, partition_count: int, *, level: Level = Level.SYNCED, done: Completion[int] | None = None
    ) -> None:
        """End the last partitions, with their records and positions, until so many are left; none may be.

        Raises Missing(TOPIC_MISSING), Invalid(INVALID_PARTITION_COUNT), Busy(DISK_FULL).
        """
        ended = self._catalog.check_shrinking(topic, partition_count)
        if ended:
            change = changes.PartitionsRemoved(topic.id, partition_count)
            self._end(change, [partition.incarnation for partition in ended], level, done)
        else:
            self.change_all((), level=level, done=done)

    def delete_topics(
        self,
        topics: Sequence[Topic],
        *,
        ended: Callable[[Topic], None],
        then: Callable[[], None],
        level: Level = Level.SYNCED,
        done: Completion[int],
    ) -> None:
        """End topics, one after the other: at once where they are few, else in slices. ``ended`` is called with each as soon as it is gone,
        ``then`` behind the last; ``done`` when all of it has its level. Who ends one of them meanwhile has done part of the work.

        Where they are few, raises as ``delete_topic`` and what ``then`` raises; else ``done`` gets what ends the work too early. What is gone
        stays gone.
        """
        if are_many(topics):
            self._topic_work.put(self._deleting(topics, ended, then, level, done))
            return
        for topic in topics:
            self.delete_topic(topic, level=level)
            ended(topic)
        then()
        self.change_all((), level=level, done=done)

    def _deleting(
        self,
        topics: Sequence[Topic],
        ended: Callable[[Topic], None],
        then: Callable[[], None],
        level: Level,
        done: Completion[int],
    ) -> Steps:
        try:
            for topic in topics:
                if self._catalog.find_id(topic.id) is topic:
                    yield from self._deleting_one(topic)
                ended(topic)
                yield False
            then()
            self.change_all((), level=level, done=done)
        except BrokerError as error:
            done(error)

    def _deleting_one(self, topic: Topic) -> Steps:
        """As ``delete_topic``, but the log drops what it has of many partitions before anything else is done."""
        numbers = [partition.incarnation for partition in topic.partitions]
        if len(numbers) <= AT_ONCE_MAX:
            yield from retry_while_busy(partial(self.delete_topic, topic, level=Level.MEMORY))
            return
        change = changes.TopicDeleted(topic.id)
        yield from retry_while_busy(partial(self.change_all, [change], level=Level.MEMORY, done=None))
        self.claims.release(topic.name.full)
        self._catalog.leaving += len(numbers)
        yield from self._dropping(numbers, Level.MEMORY, None)

    def _end(self, change: changes.Change, ended: Sequence[int], level: Level, done: Completion[int] | None) -> None:
        """Make a change that ends partitions, and drop what the log has of them: with it, or behind it where they are many."""
        if len(ended) > AT_ONCE_MAX:
            self.change_all([change], level=level, done=None)
            self._drop_behind(ended, level, done)
            return
        self._log.reserve(ENTRY_BYTES * (len(ended) + 3), need=Need.REMOVAL)
        for incarnation in ended:
            self._log.drop_partition(incarnation)
        self.change_all([change], level=level, done=done)

    def _drop_behind(self, ended: Sequence[int], level: Level, done: Completion[int] | None) -> None:
        self._catalog.leaving += len(ended)
        self._topic_work.put(self._dropping(ended, level, done))

    def _dropping(self, ended: Sequence[int], level: Level, done: Completion[int] | None) -> Steps:
        try:
            for incarnation in ended:
                yield from retry_while_busy(partial(self._log.drop_partition, incarnation))
                self._catalog.leaving -= 1
                yield False
            self.change_all((), level=level, done=done)
        except BrokerError as error:
            if done is not None:
                done(error)

    def _drop_what_a_stop_left(self) -> None:
        """Drop what the log has open without a topic: it was being made, or dropped, when the broker stopped."""
        left = [number for number in self._log.incarnations() if self._catalog.find_partition(number) is None]
        if left:
            self._catalog.next_incarnation = max(self._catalog.next_incarnation, max(left) + 1)
            self._drop_behind(left, Level.MEMORY, None)

    # What topics hold, and how they hold it

    def configure_topic(
        self, topic: Topic, settings: TopicSettings, *, level: Level = Level.SYNCED, done: Completion[int] | None = None
    ) -> None:
        """Give a topic other settings. Raises Missing(TOPIC_MISSING), Invalid(INVALID_REQUEST), Busy."""
        settings.check()
        self._catalog.check_alive(topic)
        more = settings.size - topic.settings.size
        self._state.quotas.admit(Kind.TOPICS, NOBODY, more, count=0, owner=topic.owner)
        self.change_all([changes.TopicConfigured(topic.id, settings)], level=level, done=done)
        for partition in topic.partitions:
            partition.configure()
