"""Operations that remove records: purge topics, trim partitions.

Offsets are never reused. Topics with thousands of partitions are purged in slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from polywire.broker import changes
from polywire.broker.catalog import Catalog
from polywire.broker.fetch import check_alive
from polywire.broker.sliced import OrderedWork, Steps
from polywire.broker.topic_work import AT_ONCE_MAX, are_many, retry_while_busy
from polywire.broker.topics import Partition, Topic
from polywire.broker.write_batch import ENTRY_BYTES, WriteBatchVerbs
from polywire.clock import Clock
from polywire.errors import BrokerError, ErrorCode, Missing
from polywire.log.base import Completion, Need
from polywire.types import Level


class RemovalVerbs(WriteBatchVerbs, Protocol):
    """A base of ``Broker``: the verbs use its log and state."""

    __slots__ = ()

    clock: Clock
    _catalog: Catalog
    _topic_work: OrderedWork

    def purge_topic(self, topic: Topic, *, level: Level = Level.SYNCED, done: Completion[int] | None = None) -> bool:
        """Remove all records of a topic; its offsets continue. Return whether the records can no longer be read.

        If not, they are removed by the time ``done`` is called; if that is with an error, some may remain. Raises
        Missing(TOPIC_MISSING).
        """
        self._catalog.check_alive(topic)
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
        """Remove the records below an offset; do nothing if there are none.

        Raises Missing(PARTITION_MISSING), Missing(OFFSET_OUT_OF_RANGE) for an offset above the end, Busy(DISK_FULL),
        Unavailable.
        """
        check_alive(partition)
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

    def purge_topics(self, topics: Sequence[Topic], *, level: Level = Level.SYNCED, done: Completion[int]) -> None:
        """Remove all records of several topics, one topic after the other: at once if they are few, else in slices.

        A topic loses the records that it has when its purge begins; topics deleted by then are skipped. ``done`` is
        called when all removals have reached ``level``, or with an error; some topics are purged then. For few topics,
        an error is raised instead.
        """
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
