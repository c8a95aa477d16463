"""Who waits for records of a partition.

Promises: whoever waits is woken once, from among the notifications, and not at all once it has cancelled. Must not know: when records come.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from polywire.log.base import Loop
from polywire.log.callbacks import Notifications
from polywire.log.partition.partition import FilePartition

_DUE: Final = 2**63  # an offset that no partition reaches: whoever waits for it is being woken already


class Waits:
    """Guards: ``count`` is how many wait, in all partitions."""

    __slots__ = ("_loop", "_notifications", "count")

    def __init__(self, loop: Loop, notifications: Notifications) -> None:
        """loop: for the log's own callbacks."""
        self._loop = loop
        self._notifications = notifications
        self.count = 0

    def add(self, partition: FilePartition, offset: int, wake: Callable[[], None]) -> Callable[[], None]:
        """Wake once when the record at ``offset`` can be read or the partition has ended; returns what cancels."""
        key = object()
        partition.wakes[key] = (offset, wake)
        self.count += 1
        if partition.ended or partition.readable_offset > offset:
            self.wake_due_soon(partition)
        return partial(self._cancel, partition, key)

    def wake_due_soon(self, partition: FilePartition) -> None:
        """Look in the loop's next pass who is to be woken."""
        if partition.wakes:
            self._loop.call_soon(self.wake_due, partition)

    def wake_due(self, partition: FilePartition | None) -> None:
        """Queue the wakes that are due."""
        if partition is None or not partition.wakes:
            return
        readable, ended = partition.readable_offset, partition.ended
        for key, (offset, wake) in partition.wakes.items():
            if readable > offset or (ended and offset != _DUE):
                partition.wakes[key] = (_DUE, wake)
                self._notifications.add(self._wake, partition, key)

    def _wake(self, partition: FilePartition, key: object) -> None:
        found = partition.wakes.pop(key, None)
        if found is not None:
            self.count -= 1
            found[1]()

    def _cancel(self, partition: FilePartition, key: object) -> None:
        if partition.wakes.pop(key, None) is not None:
            self.count -= 1
