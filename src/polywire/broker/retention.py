"""Retention by age and size, and compaction by key.

Every few seconds a pass checks a bounded number of partitions, and the next pass continues after them. Only whole
batches are removed.
"""

from __future__ import annotations

from polywire.broker.settings import KEEP, BrokerSettings, TopicSettings
from polywire.broker.topics import Catalog
from polywire.clock import Clock
from polywire.errors import Busy, NotOwner, Unavailable
from polywire.log.base import Loop, Partitions


def limits_of(topic: TopicSettings, broker: BrokerSettings) -> tuple[int | None, int | None]:
    """Return a topic's retention limits for each partition: (age in µs, bytes). None means no limit."""
    age = broker.retention_age_us if topic.retention_age_us is None else topic.retention_age_us
    size = broker.retention_bytes if topic.retention_bytes is None else topic.retention_bytes
    return (None if age == KEEP else age), (None if size == KEEP else size)


class Retention:
    """Applies retention and compaction with a timer, to a bounded number of partitions in each pass."""

    __slots__ = ("_catalog", "_clock", "_log", "_loop", "_queue", "_settings", "_stopped")

    def __init__(self, log: Partitions, catalog: Catalog, settings: BrokerSettings, loop: Loop, clock: Clock) -> None:
        self._log = log
        self._catalog = catalog
        self._settings = settings
        self._loop = loop
        self._clock = clock
        self._queue: list[int] = []
        self._stopped = False

    def start(self) -> None:
        """Schedule the first pass after one interval."""
        self._loop.call_later(self._settings.retention_interval_s, self._run)

    def stop(self) -> None:
        self._stopped = True

    def _run(self) -> None:
        if self._stopped:
            return
        self._loop.call_later(
            self._settings.retention_interval_s, self._run
        )  # scheduled first, so that an error does not end the timer
        try:
            self.run_pass()
        except (NotOwner, Unavailable):  # another broker leads, or storage has failed: this one is about to stop
            self._stopped = True

    def run_pass(self) -> int:
        """Apply retention and compaction to the next partitions.

        Return from how many of them retention deleted records. If the log is busy, the pass ends early.
        """
        if not self._queue:
            self._queue = self._catalog.incarnations()
            self._queue.reverse()
        now_us = self._clock.now_us()
        trimmed = 0
        for _ in range(min(len(self._queue), self._settings.retention_partitions_max)):
            incarnation = self._queue.pop()
            try:
                trimmed += self._trim(incarnation, now_us)
            except Busy:
                self._queue.append(incarnation)
                break
        return trimmed

    def _trim(self, incarnation: int, now_us: int) -> bool:
        partition = self._catalog.find_partition(incarnation)
        if partition is None:
            return False
        if partition.topic.settings.compaction:
            self._log.compact(incarnation, null_age_us=self._settings.tombstone_age_us)
        age_us, size = limits_of(partition.topic.settings, self._settings)
        if age_us is None and size is None:
            return False
        first = partition.log.retention_offset(age_us_max=age_us, bytes_max=size, now_us=now_us)
        if first <= partition.log.first_offset:
            return False
        self._log.trim(incarnation, first)
        return True
