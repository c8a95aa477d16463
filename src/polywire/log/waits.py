"""Notify readers that wait for new records of a partition: each once, or never if it was cancelled.

This module is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import cython

from polywire.log.base import Handle, Loop

if cython.compiled:
    from cython.cimports.polywire.log.callbacks import Notifications
    from cython.cimports.polywire.log.partition.partition import FilePartition
else:
    from polywire.log.callbacks import Notifications
    from polywire.log.partition.partition import FilePartition


@cython.cclass
class Wait:
    """A reader that waits for the record at ``offset``.

    It is registered with its partition until ``wake`` is called or the wait is cancelled.
    """

    if not cython.compiled:  # when compiled, waits.pxd declares the fields
        __slots__ = ("_partition", "_waits", "_wake", "is_due", "offset")

    def __init__(self, waits: Waits, partition: FilePartition, offset: int, wake: Callable[[], None]) -> None:
        self._waits: Final = waits
        self._partition: Final = partition
        self._wake: Final = wake
        self.offset = offset
        self.is_due = False

    @cython.ccall
    @cython.exceptval(-1, check=False)
    def leave(self) -> cython.bint:
        """Stop waiting. Return False if the reader was already woken or cancelled."""
        if self not in self._partition.wakes:
            return False
        del self._partition.wakes[self]
        self._waits.count -= 1
        return True

    def wake(self) -> None:
        """Notify the reader, unless the wait was cancelled."""
        if self.leave():
            self._wake()

    @cython.ccall
    def cancel(self) -> None:
        self.leave()


@cython.cclass
class Waits:
    """All waiting readers.

    Attributes:
        count: their number.

    Args:
        loop: event loop for the log's own callbacks.
    """

    if not cython.compiled:
        __slots__ = ("_loop", "_notifications", "count")

    def __init__(self, loop: Loop, notifications: Notifications) -> None:
        self._loop = loop
        self._notifications = notifications
        self.count = 0

    def add(self, partition: FilePartition, offset: int, wake: Callable[[], None]) -> Handle:
        """Register ``wake``, called once when the record at ``offset`` is readable or the partition is dropped."""
        wait: Wait = Wait(self, partition, offset, wake)
        partition.wakes[wait] = None
        self.count += 1
        if partition.ended or partition.readable_end() > offset:
            self.wake_due_soon(partition)
        return wait

    def wake_due_soon(self, partition: FilePartition) -> None:
        """Call ``wake_due`` in the loop's next pass."""
        if partition.wakes:
            self._loop.call_soon(self.wake_due, partition)

    @cython.ccall
    def wake_due(self, partition: FilePartition | None) -> None:
        """Queue the callbacks of readers whose record is readable or whose partition was dropped."""
        if partition is None or not partition.wakes:
            return
        readable, ended = partition.readable_end(), partition.ended
        wait: Wait
        for wait in partition.wakes:
            if not wait.is_due and (ended or readable > wait.offset):
                wait.is_due = True
                self._notifications.add(wait.wake)
