"""Operations of idempotent producers: assign producer ids, which are never reused, and return known sequences."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Final, Protocol

from polywire.broker.changes import ProducerState
from polywire.broker.state import State
from polywire.broker.topics import Partition
from polywire.clock import ElapsedClock
from polywire.log.base import Log

_PRODUCER_COUNT_BITS: Final = 32  # the lower bits of a producer id, which count within one start of the broker
_SHARD_BIT: Final = 57  # the bits from here on hold the shard; the bits below leave room for 2^25 starts


class ProducerVerbs(Protocol):
    """A base of ``Broker``: the verbs use its log and state."""

    __slots__ = ()

    elapsed: ElapsedClock
    producer_shard: int
    """Number of this shard, which is part of producer ids, so that two shards never assign the same id."""
    _log: Log
    _producer_ids: Iterator[int]
    _state: State

    def new_producer_id(self) -> int:
        """Return a unique number of 63 bits, made of the shard, the number of this start, and a counter."""
        return self.producer_shard << _SHARD_BIT | self._log.epoch << _PRODUCER_COUNT_BITS | next(self._producer_ids)

    def producer_last(self, partition: Partition, producer: bytes) -> tuple[int, int] | None:
        """Return (epoch, last sequence) of a producer in a partition, or None."""
        return self._state.producers.last(partition.incarnation, producer, now_us=self.elapsed.now_us())

    def producers_of(self, incarnations: Container[int]) -> Iterator[ProducerState | None]:
        """Yield the known producers of some partitions. Yields None now and then, so that the caller can pause."""
        return self._state.producers.of_partitions(incarnations, now_us=self.elapsed.now_us())

    def producer_sequence(self, partition: Partition, producer: bytes, *, epoch: int, sequence: int) -> int:
        """Convert a sequence that wraps after 2^31 - 1 to one that does not, as ``Producers.unwrapped`` does.

        Raises Invalid(SEQUENCE_GAP) for a new epoch that does not start at 0.
        """
        now_us = self.elapsed.now_us()
        return self._state.producers.unwrapped(
            partition.incarnation, producer, epoch=epoch, sequence=sequence, now_us=now_us
        )

    def producer_offset(self, partition: Partition, producer: bytes, *, epoch: int, sequence: int) -> int:
        """Return the offset of a producer's record with this sequence, -1 if it is no longer known."""
        return self._state.producers.offset_of(partition.incarnation, producer, epoch=epoch, sequence=sequence)
