"""Reading: bounds of partitions.

Promises: bounds are answered after a sync, so what a reader plans on cannot vanish (design §4). Must not know: wires.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from polywire.broker.topics import Partition
from polywire.errors import BrokerError, ErrorCode, Missing
from polywire.log.base import Log
from polywire.types import Level


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a partition begins and ends; ``next_offset`` is exclusive, ``epoch`` is the one that is being written."""

    first_offset: int
    next_offset: int
    epoch: int
    next_address: int


BoundsThen = Callable[[Bounds | BrokerError], None]


def check_alive(partition: Partition) -> None:
    """Refuse a partition that was deleted. Raises Missing(PARTITION_MISSING)."""
    if partition.ended:
        raise _gone(partition)


def ask_bounds(log: Log, partition: Partition, then: BoundsThen) -> None:
    """Take the end as it is now and tell it once it is synced."""
    check_alive(partition)
    next_offset, next_address = partition.log.next_offset, partition.log.next_address
    log.barrier(Level.SYNCED, partial(_tell, log.epoch, partition, next_offset, next_address, then))


def _tell(
    epoch: int,
    partition: Partition,
    next_offset: int,
    next_address: int,
    then: BoundsThen,
    _: int,
    error: BrokerError | None,
) -> None:
    if error is not None:
        then(error)
    elif partition.ended:
        then(_gone(partition))
    else:
        then(Bounds(partition.log.first_offset, next_offset, epoch, next_address))


def _gone(partition: Partition) -> Missing:
    return Missing(ErrorCode.PARTITION_MISSING, f"partition was deleted partition={partition!r}")
