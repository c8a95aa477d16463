"""Search records by timestamp (spec: kafka#listoffsets).

A record's timestamp is set by the producer, or it is the append time if the topic is configured for that. The log can
only find records by append time. PRODUCE rejects timestamps that are too far ahead of the broker's clock: more than the
topic's `message.timestamp.after.max.ms`, by default an hour. The search therefore starts at the requested time minus
this limit, and scans from there.

* Among the matching records, the one with the lowest offset is found, even if timestamps are out of order.
* The search runs in slices, and keeps no data in memory between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.protocols.kafka.configs import AHEAD_MS_MAX, produce_limits
from polywire.records.batch import layout, read_header, walk
from polywire.records.columns import NO_TIME, BatchHeader, Column
from polywire.records.compression import expand_body
from polywire.types import Buffer

if TYPE_CHECKING:
    from polywire.protocols.kafka.context import KafkaBroker

READ_BYTES: Final = 1024 * 1024
_US_MAX: Final = 2**62

Found = tuple[int, int]
"""The offset of a record, and its time in milliseconds."""


class TimeSearch:
    """A search in one partition. It finds the first record with a timestamp of at least ``time_ms``.

    If ``time_ms`` is None, it finds the first record with the greatest timestamp. ``done`` gets the record, None if
    there is none, or an error. It is not called after ``cancel``.
    """

    __slots__ = ("_best", "_broker", "_done", "_end", "_offset", "_partition", "_time_us")

    def __init__(
        self,
        broker: KafkaBroker,
        partition: Partition,
        time_ms: int | None,
        done: Callable[[Found | BrokerError | None], None],
    ) -> None:
        self._broker: Final = broker
        self._partition: Final = partition
        self._time_us: Final = None if time_ms is None else min(time_ms * 1000, _US_MAX)
        self._done: Callable[[Found | BrokerError | None], None] | None = done
        self._best: tuple[int, int] | None = None
        self._end: Final = partition.log.readable_offset
        self._offset = partition.log.first_offset
        if self._time_us is None:
            broker.sliced.put(self._scan)
            return
        ahead_ms = max(produce_limits(partition.topic.settings).after_ms, AHEAD_MS_MAX)
        start = partition.log.offset_at(max(self._time_us - ahead_ms * 1000, 0), self._begin)
        if isinstance(start, int):
            self._begin(start)

    def cancel(self) -> None:
        self._done = None

    def _begin(self, start: int | BrokerError) -> None:
        if isinstance(start, BrokerError):
            self._finish(start)
            return
        self._offset = max(self._offset, start)
        self._broker.sliced.put(self._scan)

    def _scan(self, end: float) -> bool:
        """Search data in memory until ``end``.

        Return True to be called again. Return False if the search has ended or waits for a read.
        """
        now = self._broker.clock.monotonic
        while self._done is not None:
            if self._offset >= self._end:
                self._finish(self._best and (self._best[0], self._best[1] // 1000))
                break
            try:
                read = self._broker.fetch(self._partition, self._offset, bytes_max=READ_BYTES, then=self._arrived)
            except BrokerError as error:
                self._finish(error)
                break
            if not isinstance(read, Read):
                break
            self._search_chunk(read)
            if now() >= end:
                return self._done is not None
        return False

    def _arrived(self, read: Read | BrokerError) -> None:
        if isinstance(read, BrokerError):
            self._finish(read)
            return
        if self._done is None:
            read.pin.release()
            return
        self._search_chunk(read)
        self._broker.sliced.put(self._scan)

    def _search_chunk(self, read: Read) -> None:
        """Search a chunk that was read. If there is no match, the search continues after it."""
        try:
            found = next(
                filter(None, (self._search_batch(batch) for chunk in read.chunks for batch in _plain(chunk))), None
            )
        except BrokerError as error:
            self._finish(error)
            return
        finally:
            read.pin.release()
        self._offset = max(read.next_offset, self._offset + 1)
        if found is not None:
            self._finish(found)

    def _search_batch(self, batch: memoryview) -> Found | None:
        """Return the matching record of this batch, if any.

        If the greatest time is searched, update it and return None.
        """
        header = read_header(batch)
        if self._time_us is None:
            for offset, time_us in self._times(batch, header):
                if offset >= self._offset and (self._best is None or time_us > self._best[1]):
                    self._best = offset, time_us
            return None
        qualifies = partial(_is_from, self._offset, self._time_us)
        found = next(filter(qualifies, self._times(batch, header)), None)
        return None if found is None else (found[0], found[1] // 1000)

    def _times(self, batch: memoryview, header: BatchHeader) -> Sequence[Found]:
        places = layout(batch)
        at, size = places[2 * Column.ORIGIN_TIMES_US], places[2 * Column.ORIGIN_TIMES_US + 1]
        offsets = _offsets(batch, header, places)
        if at < 0 or produce_limits(self._partition.topic.settings).has_times_of_append:
            return [(offset, header.append_time_us) for offset in offsets]
        times = batch[at : at + size].cast("q")
        return [
            (offset, header.append_time_us if time_us == NO_TIME else time_us)
            for offset, time_us in zip(offsets, times, strict=True)
        ]

    def _finish(self, found: Found | BrokerError | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(found)


def _is_from(first_offset: int, time_us: int, found: tuple[int, int]) -> bool:
    return found[1] >= time_us and found[0] >= first_offset


def earliest_ms(batch: Buffer) -> int | None:
    """Return the earliest timestamp in a batch in milliseconds, or None if no record has one."""
    places = layout(batch)
    at, size = places[2 * Column.ORIGIN_TIMES_US], places[2 * Column.ORIGIN_TIMES_US + 1]
    if at < 0:
        return None
    times = memoryview(batch).cast("B")[at : at + size].cast("q")
    earliest_us = min((time_us for time_us in times if time_us != NO_TIME), default=None)
    return None if earliest_us is None else earliest_us // 1000


def _plain(chunk: memoryview) -> Sequence[memoryview]:
    """Return the batches of a chunk. Compressed batches are decompressed."""
    batches = []
    for at in walk(chunk):
        batches.append(memoryview(expand_body(chunk[at : at + read_header(chunk, at).length])))
    return batches


def _offsets(batch: memoryview, header: BatchHeader, places: Sequence[int]) -> Sequence[int]:
    at, size = places[2 * Column.OFFSET_DELTAS], places[2 * Column.OFFSET_DELTAS + 1]
    if at < 0:
        return range(header.base_offset, header.base_offset + header.record_count)
    return [header.base_offset + delta for delta in batch[at : at + size].cast("I")]
