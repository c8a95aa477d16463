"""The broker's verbs about idempotent producers: the part of its facade that numbers them and knows what they have sent.

Promises: a number is never given twice. Must not know: wires, how producers are remembered.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Final, Protocol

from polywire.broker.changes import ProducerState
from polywire.broker.state import State
from polywire.broker.topics import Partition
from polywire.clock import ElapsedClock
from polywire.log.base import Log

_PRODUCER_COUNT_BITS: Final = 32  # of a producer's id: how many one start gives out
_SHARD_BIT: Final = 57  # below it there are 2^25 starts of a shard's broker


class ProducerVerbs(Protocol):
    """A base of ``Broker``, whose log and state these verbs use."""

    __slots__ = ()

    elapsed: ElapsedClock
    producer_shard: int
    """Which of several shards this broker has: no two give the same number."""
    _log: Log
    _producer_ids: Iterator[int]
    _state: State

    def new_producer_id(self) -> int:
        """A number of 63 bits that no producer has had here, and none will have: the number of this start, and a count."""
        return self.producer_shard << _SHARD_BIT | self._log.epoch << _PRODUCER_COUNT_BITS | next(self._producer_ids)

    def producer_last(self, partition: Partition, producer: bytes) -> tuple[int, int] | None:
        """Epoch and last sequence of a producer in a partition, None when nothing of it is remembered."""
        return self._state.producers.last(partition.incarnation, producer, now_us=self.elapsed.now_us())

    def producers_of(self, incarnations: Container[int]) -> Iterator[ProducerState | None]:
        """The producers that are remembered of some partitions; None now and then, as all are looked through."""
        return self._state.producers.of_partitions(incarnations, now_us=self.elapsed.now_us())

    def producer_sequence(self, partition: Partition, producer: bytes, *, epoch: int, sequence: int) -> int:
        """What a sequence stands for that wraps around behind 2^31 - 1, as ``Producers.unwrapped`` says; to be stored as it is.

        Raises Invalid(SEQUENCE_GAP) for a new epoch that does not begin at 0.
        """
        now_us = self.elapsed.now_us()
        return self._state.producers.unwrapped(
            partition.incarnation, producer, epoch=epoch, sequence=sequence, now_us=now_us
        )

    def producer_offset(self, partition: Partition, producer: bytes, *, epoch: int, sequence: int) -> int:
        """Where a producer's record with this sequence was stored, -1 when that is not remembered any more."""
        return self._state.producers.offset_of(partition.incarnation, producer, epoch=epoch, sequence=sequence)
