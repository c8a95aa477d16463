"""Operations that look up, create, grow, shrink, configure, purge, trim and delete topics.

A change of few partitions is one atomic journal write and takes effect before the call returns. A change of more than
``AT_ONCE_MAX`` partitions runs in slices, between other requests. The order of its steps leaves a valid state if the
broker stops at any point:

* A new topic, or new partitions, become visible with one change, after the log has opened all of the partitions.
* A deleted topic, or removed partitions, disappear with one change. The log drops their data afterwards.
* A purge trims one partition after the other, each up to its end at the time of the request.
* Several topics are deleted, or purged, one after the other.

If the broker stops before a new topic is visible, the next start drops the partitions that the log opened for it. A
request completes when all of its changes have reached the requested durability level.

* Preconditions are checked at the request, and again before the change is made.
* Offsets are never reused.
* Partitions that are being dropped count towards the partition limit, so creating and deleting topics quickly cannot
  exhaust memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from polywire.broker import changes
from polywire.broker.claims import Claims
from polywire.broker.owners import LINKS_CALLER, NO_CALLER, Caller
from polywire.broker.quotas import Kind
from polywire.broker.record_verbs import check_alive
from polywire.broker.settings import BrokerSettings, TopicSettings
from polywire.broker.sliced import OrderedWork, Steps
from polywire.broker.state import ENTRY_BYTES, WriteBatchVerbs
from polywire.broker.topics import Catalog, Partition, Topic, check_unlinked, linked, missing
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid, Missing
from polywire.log.base import Completion, Need, PartitionLog
from polywire.records.partitioner import partition_of
from polywire.types import Buffer, KeyHash, Level, TopicName

# partitions to open, trim or drop in one pass of the loop, which takes up to 7 ms; larger changes run in slices
AT_ONCE_MAX: Final = 500
BEGIN_MAX: Final = 2**62  # the greatest offset at which an empty partition can begin; half of the range remains
Then = Callable[[Topic], None]
"""Callback that gets a topic as soon as it can be used."""


class TopicLookup(Protocol):
    """The methods of ``Broker`` that look up topics."""

    __slots__ = ()

    settings: BrokerSettings
    _catalog: Catalog

    def find_topic(self, full_name: str) -> Topic | None:
        """Return the topic with this full name, or None."""
        return self._catalog.find(full_name)

    def topic(self, full_name: str) -> Topic:
        """Return the topic with this full name. Raises Missing(TOPIC_MISSING)."""
        topic = self._catalog.find(full_name)
        if topic is None:
            raise missing(full_name)
        return topic

    def topic_of_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with this id, or None."""
        return self._catalog.find_id(topic_id)

    def resource(self, full_name: str) -> Topic | TopicName:
        """Return the resource for permission checks on a full name: the topic, or its name if it does not exist."""
        return self._catalog.find(full_name) or TopicName.parse(full_name)

    @property
    def topics_version(self) -> int:
        """A number that increases by one whenever a topic is created or deleted, so that callers can cache lists."""
        return self._catalog.version

    def topics(self, *, internal: bool = False) -> list[Topic]:
        """Return all topics, sorted by full name.

        Args:
            internal: include the broker's own topics, whose names begin with ``__``.
        """
        return self._catalog.topics(internal=internal)

    def require_latest(self) -> None:
        """Make sure that ``topics`` returns all topics that exist now, including those of other processes.

        A broker with several processes raises Pending if they must report first (``api.Topics``).
        """

    def watch_topics(self, changing: Callable[[bytes], None]) -> Callable[[], None]:
        """Call ``changing`` with the id of each topic that is about to be created, changed or deleted.

        Returns a function that stops the calls.
        """
        self._catalog.watchers.append(changing)
        return partial(self._catalog.watchers.remove, changing)

    def partition_count(self, full_name: str) -> int:
        """Return a topic's number of partitions, or the default number for new topics if it does not exist."""
        topic = self._catalog.find(full_name)
        return self.settings.partition_count if topic is None else len(topic.partitions)

    def partition_of_key(self, topic: Topic, key: Buffer, wire_hash: KeyHash) -> Partition:
        """Return the partition for a key.

        The topic's hash function is used, or the protocol's if the topic has none. Raises Missing(PARTITION_MISSING) if
        the topic has no partitions.
        """
        # ``written_to`` raises if there are none; calling it only then makes each request faster
        partitions = topic.partitions or topic.written_to()
        count = len(partitions)
        return partitions[partition_of(key, count, topic.settings.key_hash or wire_hash) if count > 1 else 0]


def retry_while_busy(addition: Callable[[], None]) -> Steps:
    """Call ``addition`` until it no longer raises Busy, and yield between calls. Other errors are raised."""
    while True:
        try:
            addition()
        except Busy as error:
            if error.code is not ErrorCode.BUSY:
                raise
            yield True
        else:
            return


def are_many(topics: Sequence[Topic]) -> bool:
    """Return whether changing these topics takes too long for one pass of the loop."""
    return sum([1 + len(topic.partitions) for topic in topics]) > AT_ONCE_MAX


class TopicVerbs(TopicLookup, WriteBatchVerbs, Protocol):
    """The methods of ``Broker`` that create, change and delete topics."""

    __slots__ = ()

    claims: Claims
    clock: Clock
    _topic_work: OrderedWork

    # Create

    def create_topic(
        self,
        name: TopicName,
        partition_count: int | None = None,
        settings: TopicSettings | None = None,
        *,
        internal: bool = False,
        partition_count_min: int = 1,
        by: Caller = NO_CALLER,
        level: Level = Level.SYNCED,
        done: Completion[int] | None = None,
    ) -> Topic:
        """Create a topic before the call returns, regardless of its number of partitions.

        Requests of clients use ``make_topic``. Raises Invalid(INVALID_TOPIC, INVALID_PARTITION_COUNT, INVALID_REQUEST),
        Conflict(TOPIC_EXISTS), Busy(BUSY, DISK_FULL).

        Args:
            partition_count_min: 0 permits a topic without partitions, which cannot be written.
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
        by: Caller = NO_CALLER,
        level: Level = Level.SYNCED,
        then: Then,
        done: Completion[int],
    ) -> bool:
        """Create a topic, in several passes of the loop if it is large.

        Return whether it was created before the call returns. Raises the same errors as ``create_topic``.

        Args:
            then: called with the topic as soon as it can be used.
            done: called once the topic has reached ``level``, or with an error. After an error there is no topic.
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

    def ensure_topic(self, full_name: str, *, by: Caller = NO_CALLER) -> Topic:
        """Return the topic with this name. Create it with the default settings if it is missing.

        Raises the same errors as ``create_topic``, and Missing(TOPIC_MISSING) if topics are not created automatically.
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
        by: Caller = NO_CALLER,
    ) -> None:
        """Check whether a topic could be created, without creating it. Raises the same errors as ``create_topic``."""
        self._check_new(name, partition_count, settings or TopicSettings(), partition_count_min=1, by=by)

    def grow_topic(
        self,
        topic: Topic,
        partition_count: int,
        *,
        by: Caller = NO_CALLER,
        level: Level = Level.SYNCED,
        then: Then | None = None,
        done: Completion[int] | None = None,
    ) -> bool:
        """Add partitions until the topic has this count. Return whether they were added before the call returns.

        Raises Missing(TOPIC_MISSING), Invalid(INVALID_PARTITION_COUNT), Conflict(TOPIC_LINKED) for the topic of a link,
        Busy(BUSY, DISK_FULL).

        Args:
            then: called with the topic as soon as the partitions can be used.
            done: called once the change has reached ``level``, or with an error, such as Busy(BUSY) if another request
                has changed the partitions. After an error nothing was added.
        """
        if by.owner != LINKS_CALLER.owner:
            check_unlinked(topic)
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
            raise Busy(
                ErrorCode.BUSY, f"another request changed the partitions of the topic (retry) name={topic.name.full!r}"
            )
        self._state.quotas.admit(Kind.PARTITIONS, NO_CALLER, 0, count=added, owner=topic.owner)
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
        """Add partitions, which the log has opened already, to a new or existing topic."""
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
        """Open ``count`` partitions in the log, then journal the change that makes them visible to clients.

        Args:
            check: called again before the change is made. Raises an error if the change has become invalid meanwhile.
            made: returns the change, given the incarnation number of the first partition.
            ready: called once clients can use the partitions.
        """
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

    # Delete

    def delete_topic(self, topic: Topic, *, level: Level = Level.SYNCED, done: Completion[int] | None = None) -> None:
        """Delete a topic with its records, offsets and groups.

        Raises Missing(TOPIC_MISSING), and Conflict(TOPIC_LINKED) for the topic of a link.
        """
        self._catalog.check_alive(topic)
        check_unlinked(topic)
        self._end(
            changes.TopicDeleted(topic.id), [partition.incarnation for partition in topic.partitions], level, done
        )
        self.claims.release(topic.name.full)

    def shrink_topic(
        self, topic: Topic, partition_count: int, *, level: Level = Level.SYNCED, done: Completion[int] | None = None
    ) -> None:
        """Remove the last partitions, with their records and offsets, until the topic has this count, which may be 0.

        Raises Missing(TOPIC_MISSING), Invalid(INVALID_PARTITION_COUNT), Conflict(TOPIC_LINKED), Busy(DISK_FULL).
        """
        check_unlinked(topic)
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
        """Delete topics one after the other, in several passes of the loop if they are many.

        Topics that were deleted meanwhile are skipped. Topics deleted before an error stay deleted. If there are few
        topics, errors are raised, including those of ``then``. If there are many, ``done`` is called with the error.

        Args:
            ended: called with each topic as soon as it is deleted.
            then: called after the last topic.
            done: called when all deletions have reached ``level``.
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
        """Delete a topic. If it is large, wait until the log has dropped its data."""
        numbers = [partition.incarnation for partition in topic.partitions]
        if len(numbers) <= AT_ONCE_MAX:
            yield from retry_while_busy(partial(self.delete_topic, topic, level=Level.MEMORY))
            return
        change = changes.TopicDeleted(topic.id)
        check_unlinked(topic)
        yield from retry_while_busy(partial(self.change_all, [change], level=Level.MEMORY, done=None))
        self.claims.release(topic.name.full)
        self._catalog.leaving += len(numbers)
        yield from self._dropping(numbers, Level.MEMORY, None)

    def _end(self, change: changes.Change, ended: Sequence[int], level: Level, done: Completion[int] | None) -> None:
        """Journal a change that removes partitions, and drop their data.

        The data of few partitions is dropped in the same journal write, that of many partitions in later writes.
        """
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

    def _drop_orphaned_partitions(self) -> None:
        """Drop partitions of the log that belong to no topic.

        They remain if the broker stopped while it created or deleted a topic.
        """
        left = [number for number in self._log.incarnations() if self._catalog.find_partition(number) is None]
        if left:
            self._catalog.next_incarnation = max(self._catalog.next_incarnation, max(left) + 1)
            self._drop_behind(left, Level.MEMORY, None)

    # Configure

    def configure_topic(
        self, topic: Topic, settings: TopicSettings, *, level: Level = Level.SYNCED, done: Completion[int] | None = None
    ) -> None:
        """Change a topic's settings, except ``link``. Raises Missing(TOPIC_MISSING), Invalid(INVALID_REQUEST), Busy."""
        settings.check()
        self._catalog.check_alive(topic)
        settings = replace(settings, link=topic.settings.link)  # the sender may not know the current link yet
        more = settings.size - topic.settings.size
        self._state.quotas.admit(Kind.TOPICS, NO_CALLER, more, count=0, owner=topic.owner)
        self._configure(topic, settings, level, done)

    def _configure(self, topic: Topic, settings: TopicSettings, level: Level, done: Completion[int] | None) -> None:
        self.change_all([changes.TopicConfigured(topic.id, settings)], level=level, done=done)
        for partition in topic.partitions:
            partition.configure()

    def link_topic(
        self, topic: Topic, link: str, *, level: Level = Level.SYNCED, done: Completion[int] | None = None
    ) -> None:
        """Make a link the only writer of a topic. An empty ``link`` lets clients write to the topic again.

        Raises Missing(TOPIC_MISSING), Conflict(TOPIC_LINKED) for the topic of another link, and Busy(BUSY) while the
        topic has records of open transactions.
        """
        self._catalog.check_alive(topic)
        was = topic.settings.link
        if link and was not in ("", link):
            raise linked(topic)
        if link and not was:
            self._check_no_transaction(topic)
        if link != was:
            self._configure(topic, replace(topic.settings, link=link), level, done)
        else:
            self.change_all((), level=level, done=done)

    def _check_no_transaction(self, topic: Topic) -> None:
        numbers = {partition.incarnation for partition in topic.partitions}
        for transaction in self._state.transactions:
            if transaction.is_open and not numbers.isdisjoint(transaction.sequences):
                raise Busy(
                    ErrorCode.BUSY,
                    "the topic has records of an open transaction: end it first"
                    f" topic={topic.name.full!r} transactional_id={transaction.id!r}",
                )


class RemovalVerbs(WriteBatchVerbs, Protocol):
    """The methods of ``Broker`` that delete records."""

    __slots__ = ()

    clock: Clock
    _catalog: Catalog
    _topic_work: OrderedWork

    def purge_topic(self, topic: Topic, *, level: Level = Level.SYNCED, done: Completion[int] | None = None) -> bool:
        """Delete all records of a topic. Offsets continue with the next record.

        Return True if all records were deleted before the call returns. Otherwise they are deleted before ``done`` is
        called. After an error, some may remain. Raises Missing(TOPIC_MISSING), and Conflict(TOPIC_LINKED) for the topic
        of a link.
        """
        self._catalog.check_alive(topic)
        check_unlinked(topic)
        self._log.write()  # assigns offsets to earlier batches, so that they are removed, too
        if len(topic.partitions) > AT_ONCE_MAX:
            ends = [(partition, partition.log.next_offset) for partition in topic.partitions]
            self._topic_work.put(self._purging(topic, ends, level, done))
            return False
        self._log.reserve(ENTRY_BYTES * (len(topic.partitions) + 3), need=Need.REMOVAL)
        for partition in topic.partitions:
            self._log.trim(partition.incarnation, partition.log.next_offset)
        self.change_all([changes.TopicPurged(topic.id, self.clock.now_us())], level=level, done=done)
        return True

    def _purging(
        self, topic: Topic, ends: Sequence[tuple[Partition, int]], level: Level, done: Completion[int] | None
    ) -> Steps:
        try:
            yield from self._trimming(ends)
            self._catalog.check_alive(topic)
            self.change_all([changes.TopicPurged(topic.id, self.clock.now_us())], level=level, done=done)
        except BrokerError as error:
            if done is not None:
                done(error)

    def _trimming(self, ends: Sequence[tuple[Partition, int]]) -> Steps:
        for partition, end in ends:
            if not partition.ended and partition.log.first_offset < end:
                yield from retry_while_busy(partial(self._log.trim, partition.incarnation, end))
            yield False

    def trim_partition(
        self,
        partition: Partition,
        first_offset: int,
        *,
        level: Level = Level.SYNCED,
        done: Completion[int] | None = None,
    ) -> None:
        """Delete the records below an offset. Do nothing if there are none.

        Raises Missing(PARTITION_MISSING), Missing(OFFSET_OUT_OF_RANGE) for an offset above the end,
        Conflict(TOPIC_LINKED) for the topic of a link, Busy(DISK_FULL), Unavailable.
        """
        check_alive(partition)
        check_unlinked(partition.topic)
        self._log.write()  # assigns offsets to earlier batches, so that the end of the partition is known
        if first_offset > partition.log.first_offset:
            # raises if the write above failed, because the end of the partition is then lower again
            self._log.reserve(ENTRY_BYTES, need=Need.REMOVAL)
            if first_offset > partition.log.next_offset:
                raise Missing(
                    ErrorCode.OFFSET_OUT_OF_RANGE,
                    f"offset is above the end of the partition offset={first_offset} next_offset={partition.log.next_offset}",
                )
            self._log.trim(partition.incarnation, first_offset)
        self.change_all((), level=level, done=done)

    def begin_partition(
        self,
        partition: Partition,
        offset: int,
        *,
        by: Caller = NO_CALLER,
        level: Level = Level.SYNCED,
        done: Completion[int] | None = None,
    ) -> None:
        """Set the offset of the next record of an empty partition. Do nothing if it is not above the present one.

        Raises Missing(PARTITION_MISSING), Invalid(INVALID_REQUEST) for a partition with records or an offset out of
        range, Conflict(TOPIC_LINKED) for the topic of a link, Busy(DISK_FULL), Unavailable.
        """
        check_alive(partition)
        if by.owner != LINKS_CALLER.owner:
            check_unlinked(partition.topic)
        self._log.write()  # assigns offsets to earlier batches
        log = partition.log
        if offset > BEGIN_MAX or log.first_offset < log.next_offset < offset:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                "only an empty partition can begin at another offset, up to 2^62"
                f" offset={offset} first_offset={log.first_offset} next_offset={log.next_offset}",
            )
        if offset > log.next_offset:
            self._log.begin(partition.incarnation, offset)
        self.change_all((), level=level, done=done)

    def purge_topics(self, topics: Sequence[Topic], *, level: Level = Level.SYNCED, done: Completion[int]) -> None:
        """Delete all records of several topics, one topic after the other.

        If there are many, this takes several passes of the loop. A topic loses the records that it has when its purge
        begins. Topics that were deleted meanwhile are skipped. After an error, some topics may be purged. If there are
        few topics, errors are raised. If there are many, ``done`` is called with the error.

        Args:
            done: called when all deletions have reached ``level``.
        """
        for topic in topics:
            check_unlinked(topic)
        if are_many(topics):
            self._log.write()  # assigns offsets to earlier batches, so that they are removed, too
            self._topic_work.put(self._purging_all(topics, level, done))
            return
        for topic in topics:
            self.purge_topic(topic, level=level)
        self.change_all((), level=level, done=done)

    def _purging_all(self, topics: Sequence[Topic], level: Level, done: Completion[int]) -> Steps:
        try:
            for topic in topics:
                yield from self._trimming([(partition, partition.log.next_offset) for partition in topic.partitions])
                if self._catalog.find_id(topic.id) is topic:
                    change = changes.TopicPurged(topic.id, self.clock.now_us())
                    yield from retry_while_busy(partial(self.change_all, [change], level=Level.MEMORY, done=None))
                yield False
            self.change_all((), level=level, done=done)
        except BrokerError as error:
            done(error)
