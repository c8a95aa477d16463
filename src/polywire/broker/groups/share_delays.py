"""Make records that were sent with a delay available to a share group when they are due (decision 0142).

* The group's scan passes records that are not due. ``DueWatch.skipped`` adds them to the index.
* When the first of them is due, ``DueWatch`` reads the index, and stores that these records are available.
* If the index does not know all of them, for example after a crash, ``DueWatch`` reads them from the log again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from polywire.broker import changes
from polywire.broker.api import Records
from polywire.broker.groups.delay_index import DelayIndex, Due, Entry
from polywire.broker.groups.delivery_marks import read_marks
from polywire.broker.groups.share import NO_CURSOR, NO_DELAYS, DueCursor, Run, SharePartition, runs_of
from polywire.broker.groups.share_table import ShareTable, flat
from polywire.broker.topics import Partition
from polywire.clock import Clock
from polywire.errors import BrokerError, ErrorCode
from polywire.log.base import Handle, Loop, Read
from polywire.types import Level

DUE_MAX: Final = 1_000  # records that one query makes available
RETRY_S: Final = 1.0  # seconds until a query or a read that failed is repeated
TIMER_S_MAX: Final = 3_600.0  # longest sleep, because the system clock may be set
REBUILD_BYTES: Final = 1024 * 1024  # size of a read of the log
LAST_OFFSET: Final = 2**63 - 1


class DelayBroker(Records, Protocol):
    """The methods of the broker that delays need."""

    def change_all(self, made: Sequence[changes.Change], *, level: Level, done: None) -> None: ...


class _State(Enum):
    """States of a ``DueWatch``: waiting for the next record, a query or a read of the log in progress, or a pause."""

    WAITING = "waiting"
    QUERYING = "querying"
    REBUILDING = "rebuilding"
    FAILED = "failed"


_WAITING: Final = _State.WAITING  # read for every request; a module constant is ten times as fast as an attribute
_QUERYING: Final = _State.QUERYING


class Delayed(NamedTuple):
    """New delayed records.

    Attributes:
        cursor: where the cursor may be now.
        due_ms: due time of each record, by offset.
        waiting: those of ``due_ms`` that the cursor has not passed.
    """

    cursor: DueCursor
    due_ms: Mapping[int, int]
    waiting: Mapping[int, int]

    def entries(self, end: int) -> list[Entry]:
        """Return the records below an offset, for the index.

        It includes those that the cursor has passed: another group, whose cursor is behind, may wait for them.
        """
        return [(due_ms, offset) for offset, due_ms in self.due_ms.items() if offset < end]

    def cursor_at(self, end: int) -> DueCursor:
        """Return the cursor after the scan has passed the records below an offset."""
        waiting = [offset for offset in self.waiting if offset < end]
        first = self.cursor.first if self.cursor.waiting else min(waiting, default=-1)
        return self.cursor._replace(first=first, waiting=self.cursor.waiting + len(waiting))


NO_DELAYED: Final = Delayed(NO_CURSOR, NO_DELAYS, NO_DELAYS)


class DueWatch:
    """The delayed records of one group in one partition.

    Attributes:
        next_ms: when the next record is due, if that is known. 0 if a record may be due now.
    """

    __slots__ = (
        "_broker",
        "_clock",
        "_group",
        "_index",
        "_is_stopped",
        "_loop",
        "_offered",
        "_partition",
        "_read_handle",
        "_rebuilt_to",
        "_share",
        "_space",
        "_state",
        "_table",
        "_timer",
        "_timer_ms",
        "next_ms",
    )

    def __init__(
        self,
        group: str,
        partition: Partition,
        share: SharePartition,
        *,
        broker: DelayBroker,
        table: ShareTable,
        index: DelayIndex,
        loop: Loop,
        clock: Clock,
        space: Callable[[], int],
        offered: Callable[[], None],
    ) -> None:
        """Create a watch. Call ``check`` next.

        Args:
            space: returns how many more records the group may have unfinished.
            offered: called when records are available, or when the scan may continue.
        """
        self._group: Final = group
        self._partition: Final = partition
        self._share: Final = share
        self._broker: Final = broker
        self._table: Final = table
        self._index: Final = index
        self._loop: Final = loop
        self._clock: Final = clock
        self._space: Final = space
        self._offered: Final = offered
        self.next_ms: float = 0 if share.progress.cursor.waiting else math.inf
        self._state = _WAITING
        self._timer: Handle | None = None
        self._timer_ms = math.inf
        self._read_handle: Handle | None = None
        self._rebuilt_to = -1  # end of the offsets that were added to the index since the last query that succeeded
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True
        for handle in (self._timer, self._read_handle):
            if handle is not None:
                handle.cancel()

    @property
    def _is_over(self) -> bool:
        """Whether the partition or the group was deleted, or the group was set to other offsets."""
        return self._is_stopped or self._partition.ended or self._share.progress.is_dropped

    def _now_ms(self) -> int:
        return self._clock.now_us() // 1000

    # For the scan

    @property
    def holds_scan(self) -> bool:
        """Whether the scan must wait, because records are due that were passed earlier, or the index is behind."""
        if self._index.is_full or self._state is _QUERYING:  # whose result would lack what the scan passes
            return True
        waits = self._share.progress.cursor.waiting > 0 and self._state is _WAITING
        return waits and self.next_ms <= self._now_ms()

    @property
    def next_due_ms(self) -> int | None:
        """When the next waiting record is due, if that is known."""
        return int(self.next_ms) if self.next_ms and self.next_ms != math.inf else None

    @property
    def cursor(self) -> DueCursor:
        """The stored cursor, moved as far as no waiting record is passed."""
        cursor = self._share.progress.cursor
        now_ms = self._now_ms()
        if not cursor.waiting:  # it may even move back, if the clock was set back
            return DueCursor(now_ms, LAST_OFFSET)
        if now_ms <= cursor.due_ms or self._state is not _WAITING or self.next_ms <= now_ms:
            return cursor
        return cursor._replace(due_ms=now_ms, offset=LAST_OFFSET)

    def delayed(self, due_ms: Mapping[int, int]) -> Delayed:
        """Return new delayed records, given their due times by offset."""
        if not due_ms:
            return NO_DELAYED
        cursor = self.cursor
        waiting = {at: time_ms for at, time_ms in due_ms.items() if not cursor.is_passed(time_ms, at)}
        return Delayed(cursor, due_ms, waiting)

    def scanned(self, first: int, end: int, delayed: Delayed) -> None:
        """Add the delayed records that the scan found in [first, end) to the index, after its result was stored."""
        if not self._share.progress.cursor.waiting:
            self.next_ms = math.inf
            return
        self._index.add(self._partition.incarnation, first, end, delayed.entries(end))
        if self._index.is_full:
            self._index.on_space(self._offered)
        next_ms = min([time_ms for at, time_ms in delayed.waiting.items() if at < end], default=math.inf)
        if next_ms < math.inf:
            self.next_ms = min(self.next_ms, next_ms)
            self.check()

    # When records are due

    def check(self) -> None:
        """Make the records available that are due, if there is space. Otherwise set a timer for the next ones."""
        progress = self._share.progress
        if not progress.cursor.waiting or self._state is not _WAITING or self._is_over:
            return
        now_ms = self._now_ms()
        if self.next_ms > now_ms:
            self._set_timer(self.next_ms, now_ms)
            return
        space = self._space()
        if space <= 0:
            return
        self._state = _QUERYING
        self._index.due(
            self._partition.incarnation,
            (progress.cursor.first, progress.end),
            after=progress.cursor[:2],
            until_ms=now_ms,
            limit=min(space, DUE_MAX),
            then=self._arrived,
        )

    def _set_timer(self, time_ms: float, now_ms: int) -> None:
        if time_ms >= self._timer_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = time_ms
        delay_s = min(max(time_ms - now_ms, 1) / 1000, TIMER_S_MAX)
        self._timer = self._loop.call_later(delay_s, self._on_time)

    def _on_time(self) -> None:
        self._timer, self._timer_ms = None, math.inf
        self.check()

    def _retry_later(self) -> None:
        self._state, self.next_ms = _State.FAILED, 0
        self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._state = _WAITING
        self.check()

    def _arrived(self, result: Due | BrokerError) -> None:
        if self._is_over:
            return
        if isinstance(result, BrokerError):
            self._retry_later()
            return
        if result.missing is not None:
            first, end = result.missing
            is_lost = (
                first < self._rebuilt_to
            )  # what was added could not be written, for example because the disk is full
            self._rebuilt_to = -1 if is_lost else end
            if is_lost:
                self._retry_later()
            else:
                self._state = _State.REBUILDING
                self._rebuild(first, end)
            return
        self._rebuilt_to = -1
        entries, next_ms = result.entries, math.inf if result.next_ms is None else result.next_ms
        try:
            self._move(entries, is_last=next_ms == math.inf)
        except BrokerError:  # the disk is full
            self._retry_later()
            return
        self._state, self.next_ms = _WAITING, next_ms
        if entries:
            self._index_forget()
        self._offered()
        self.check()

    def _move(self, entries: Sequence[Entry], *, is_last: bool) -> None:
        """Store that delayed records are available. Raises Busy(DISK_FULL)."""
        progress, log = self._share.progress, self._partition.log
        cursor = progress.cursor
        ours = sorted(offset for _, offset in entries if cursor.first <= offset < progress.end)
        waiting = 0 if is_last else max(cursor.waiting - len(ours), 0)
        due_ms, offset = entries[-1] if entries else cursor[:2]
        moved = DueCursor(due_ms, offset, cursor.first if waiting else -1, waiting)
        offered = [at for at in ours if at >= log.first_offset and at not in progress.counts]
        if moved == cursor:
            return
        runs = runs_of((at, 0) for at in offered)
        self._broker.change_all(
            [moved_change(self._group, self._partition, runs, moved)], level=Level.WRITTEN, done=None
        )
        self._share.offer_due(offered)

    def _index_forget(self) -> None:
        passed_ms = self._table.passed_ms(self._partition.incarnation)
        if passed_ms is None:
            self._index.drop([self._partition.incarnation])
        else:
            self._index.forget(self._partition.incarnation, passed_ms)

    # Reading the log again

    def _rebuild(self, first: int, end: int) -> None:
        """Add the delayed records of [first, end) to the index, then check again."""
        if self._is_over:
            return
        log = self._partition.log
        at = max(first, min(log.first_offset, end))
        if at > first:
            self._index.add(self._partition.incarnation, first, at, ())
        if at >= end:
            self._loop.call_soon(self._retry)
            return
        if self._index.is_full:
            self._index.on_space(partial(self._rebuild, at, end))
            return
        try:
            read = self._broker.fetch(
                self._partition, at, bytes_max=REBUILD_BYTES, then=partial(self._add_read, at, end), offset_end=end
            )
        except BrokerError as error:
            self._add_read(at, end, error)
            return
        if isinstance(read, Read):
            self._loop.call_soon(self._add_read, at, end, read)
        else:
            self._read_handle = read

    def _add_read(self, at: int, end: int, read: Read | BrokerError) -> None:
        self._read_handle = None
        if isinstance(read, BrokerError):
            if read.code is ErrorCode.OFFSET_OUT_OF_RANGE:  # retention has removed it
                self._loop.call_soon(self._rebuild, at, end)
            else:
                self._retry_later()
            return
        try:
            marks = read_marks(read.chunks, at, min(read.next_offset, end), due_from=at)
        finally:
            read.pin.release()
        self._index.add(
            self._partition.incarnation, at, marks.end, [(due_ms, offset) for offset, due_ms in marks.due_ms.items()]
        )
        self._loop.call_soon(self._rebuild, marks.end, end)


def moved_change(group: str, partition: Partition, runs: Sequence[Run], cursor: DueCursor) -> Any:
    """Return the change that stores new delivery counts and a new cursor."""
    return changes.ShareCursorMoved(group, partition.incarnation, flat(runs), cursor)
