"""Who waits for records of a partition.

Promises: whoever waits is woken once, from among the notifications, and not at all once it has cancelled. Must not know: when records come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from polywire.log.base import Handle, Loop
from polywire.log.callbacks import Notifications
from polywire.log.partition.partition import FilePartition


class Wait:
    """One who waits for the record at ``offset``. Guards: it is among its partition's wakes until it is woken or cancels."""

    __slots__ = ("_partition", "_waits", "_wake", "is_due", "offset")

    def __init__(self, waits: Waits, partition: FilePartition, offset: int, wake: Callable[[], None]) -> None:
        self._waits: Final = waits
        self._partition: Final = partition
        self._wake: Final = wake
        self.offset = offset
        self.is_due = False

    def leave(self) -> bool:
        """Wait no longer; whether it did."""
        if self not in self._partition.wakes:
            return False
        del self._partition.wakes[self]
        self._waits.count -= 1
        return True

    def wake(self) -> None:
        """Notify, unless it has left meanwhile."""
        if self.leave():
            self._wake()

    def cancel(self) -> None:
        """Wake nobody."""
        self.leave()


class Waits:
    """Guards: ``count`` is how many wait, in all partitions."""

    __slots__ = ("_loop", "_notifications", "count")

    def __init__(self, loop: Loop, notifications: Notifications) -> None:
        """loop: for the log's own callbacks."""
        self._loop = loop
        self._notifications = notifications
        self.count = 0

    def add(self, partition: FilePartition, offset: int, wake: Callable[[], None]) -> Handle:
        """Wake once when the record at ``offset`` can be read or the partition has ended."""
        wait = Wait(self, partition, offset, wake)
        partition.wakes[wait] = None
        self.count += 1
        if partition.ended or partition.readable_offset > offset:
            self.wake_due_soon(partition)
        return wait

    def wake_due_soon(self, partition: FilePartition) -> None:
        """Look in the loop's next pass who is to be woken."""
        if partition.wakes:
            self._loop.call_soon(self.wake_due, partition)

    def wake_due(self, partition: FilePartition | None) -> None:
        """Queue the wakes that are due."""
        if partition is None or not partition.wakes:
            return
        readable, ended = partition.readable_offset, partition.ended
        for wait in partition.wakes:
            if not wait.is_due and (ended or readable > wait.offset):
                wait.is_due = True
                self._notifications.add(wait.wake)
