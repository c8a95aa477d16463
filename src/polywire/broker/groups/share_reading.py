"""The state of a share group that reads a partition: its progress and counts, timers, and the members that wait.

This module is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import cython
import msgspec

from polywire.broker.groups.share_delays import DueWatch
from polywire.broker.groups.share_keys import KeyReader
from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import Completion

if cython.compiled:
    from cython.cimports.polywire.broker.groups.share import SharePartition
else:
    from polywire.broker.groups.share import SharePartition


class ShareOffsets(NamedTuple):
    """Progress of a share group in one partition.

    Attributes:
        start: all records below this offset are finished.
        end: no record from this offset on was delivered.
        unfinished: records below ``end`` that are not finished.
        acquired: number of unfinished records that each member holds now. Members that wait for records hold none.
        delayed: number of unfinished records that were released with a delay, or wait to be copied to a dead-letter
            topic.
        available: offset of the first record that a member could acquire. It is ``end`` if none was delivered before.
        scheduled: number of records below ``end`` that were sent with a delay and are not due yet.
        next_due_ms: when the next of them is due, in milliseconds since 1970, if that is known.
    """

    start: int
    end: int
    unfinished: int
    acquired: Mapping[str, int]
    delayed: int
    available: int
    scheduled: int = 0
    next_due_ms: int | None = None


class ShareCounts(msgspec.Struct):
    """Outcomes of the records of a group in a topic, counted since this process began to read it for the group.

    Attributes:
        accepted: records that a member accepted.
        released: records that a member released, or that were released because its connection ended.
        rejected: records that a member rejected, or that were delivered too often.
        expired: records whose lock ended before the member acknowledged them.
        lapsed: records whose time (``expires.at``) was over before they were delivered.
    """

    accepted: int = 0
    released: int = 0
    rejected: int = 0
    expired: int = 0
    lapsed: int = 0


NO_COUNTS: Final = ShareCounts()


@cython.cclass
class Waiting:
    """A member that waits for records of a partition. A handle."""

    if not cython.compiled:  # when compiled, share_reading.pxd declares the fields
        __slots__ = ("_reading", "member", "wake")

    def __init__(self, reading: Reading, member: str, wake: Callable[[], None]) -> None:
        self._reading = reading
        self.member = member
        self.wake = wake

    def cancel(self) -> None:
        self._reading.waiting.pop(self, None)


@cython.cclass
class Reading:
    """A group that reads a partition.

    Attributes:
        counts: those of all partitions of the topic.
        timer: fires when the first lock may have expired.
        waiting: members that wait for records, longest first.
        log_wait: registration for the next record of the log.
        due: makes records available that were sent with a delay.
        keys: reads keys from the log if the group has an order per key.
        is_waking: whether a check of ``waiting`` is scheduled.
    """

    if not cython.compiled:
        __slots__ = (
            "counts",
            "due",
            "group",
            "is_waking",
            "keys",
            "log_wait",
            "partition",
            "share",
            "timer",
            "timer_at",
            "waiting",
        )

    def __init__(
        self,
        group: str,
        partition: Partition,
        share: SharePartition,
        due: DueWatch,
        keys: KeyReader,
        counts: ShareCounts,
    ) -> None:
        self.group = group
        self.partition = partition
        self.share = share
        self.due = due
        self.keys = keys
        self.counts = counts
        self.timer: Any = None
        self.timer_at = math.inf
        self.waiting: dict[Waiting, None] = {}
        self.log_wait: Any = None
        self.is_waking = False


class Countdown:
    """A completion that expects several calls and then calls another completion, with the first error if any."""

    __slots__ = ("_done", "_left", "_result")

    def __init__(self, count: int, done: Completion[int]) -> None:
        self._left = count
        self._done: Final = done
        self._result: int | BrokerError = 0

    def __call__(self, result: int | BrokerError) -> None:
        self._left -= 1
        if isinstance(result, BrokerError):
            self._result = result
        if not self._left:
            self._done(self._result)
