"""Return the offset bounds of partitions to readers.

Records within the bounds are synced before the bounds are returned, so a crash cannot lose them (concepts:
durability#what-a-crash-may-take).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from polywire.broker.sliced import SlicedWork
from polywire.broker.topics import Partition
from polywire.clock import Clock
from polywire.errors import BrokerError, ErrorCode, Missing
from polywire.log.base import Completion, WriteBatch
from polywire.types import Level


@dataclass(frozen=True, slots=True)
class Bounds:
    """Offsets between which a partition can be read; ``next_offset`` is exclusive. ``epoch`` is the current epoch."""

    first_offset: int
    next_offset: int
    epoch: int
    next_address: int


def check_alive(partition: Partition) -> None:
    """Raise Missing(PARTITION_MISSING) if the partition was deleted."""
    if partition.ended:
        raise _missing(partition)


def ask_bounds(log: WriteBatch, partition: Partition, then: Completion[Bounds]) -> None:
    """Record the partition's current end and call ``then`` with the bounds once that end is synced."""
    check_alive(partition)
    next_offset, next_address = partition.log.next_offset, partition.log.next_address
    log.barrier(Level.SYNCED, partial(_notify, log.epoch, partition, next_offset, next_address, then))


def _notify(
    epoch: int,
    partition: Partition,
    next_offset: int,
    next_address: int,
    then: Completion[Bounds],
    synced: int | BrokerError,
) -> None:
    if isinstance(synced, BrokerError):
        then(synced)
    elif partition.ended:
        then(_missing(partition))
    else:
        then(Bounds(partition.log.first_offset, next_offset, epoch, next_address))


class ManyBounds:
    """The bounds of many partitions: computed and encoded in slices, with one sync for all.

    Invariant: ``then`` is called once, never from inside a call of the caller.
    """

    __slots__ = ("_clock", "_ends", "_found", "_log", "_partitions", "_sliced", "_then")

    def __init__(
        self,
        log: WriteBatch,
        sliced: SlicedWork,
        clock: Clock,
        partitions: Sequence[Partition],
        then: Completion[list[Bounds]],
    ) -> None:
        self._log: Final = log
        self._sliced: Final = sliced
        self._clock: Final = clock
        self._partitions: Final = partitions
        self._then: Final = then
        self._ends: Final[list[tuple[int, int]]] = []
        self._found: Final[list[Bounds]] = []
        sliced.put(self._take_ends)

    def _take_ends(self, end: float) -> bool:
        """Record the current ends. One sync that begins after the last of them covers all."""
        ends, partitions, now = self._ends, self._partitions, self._clock.monotonic
        while len(ends) < len(partitions):
            partition = partitions[len(ends)]
            if partition.ended:
                self._then(_missing(partition))
                return False
            ends.append((partition.log.next_offset, partition.log.next_address))
            if now() >= end:
                return True
        self._log.barrier(Level.SYNCED, self._synced)
        return False

    def _synced(self, synced: int | BrokerError) -> None:
        if isinstance(synced, BrokerError):
            self._then(synced)
        else:
            self._sliced.put(self._make)

    def _make(self, end: float) -> bool:
        found, partitions, now = self._found, self._partitions, self._clock.monotonic
        while len(found) < len(partitions):
            partition = partitions[len(found)]
            if partition.ended:
                self._then(_missing(partition))
                return False
            next_offset, next_address = self._ends[len(found)]
            found.append(Bounds(partition.log.first_offset, next_offset, self._log.epoch, next_address))
            if now() >= end:
                return True
        self._then(found)
        return False


def _missing(partition: Partition) -> Missing:
    return Missing(ErrorCode.PARTITION_MISSING, f"partition was deleted partition={partition!r}")
