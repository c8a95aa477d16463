"""Check the sequences of idempotent producers by the rules of Cursus (spec: cursus#idempotent-producers).

These rules are stricter than the broker's, so the broker accepts every batch that passes them. The text of each
rejection contains a word that makes clients stop producing. Forwarded batches are checked by the process that owns the
partition, in the order of their arrival.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

import msgspec

from polywire.broker.owners import Caller
from polywire.broker.record_verbs import ProducerVerbs, RecordVerbs, producer_identity
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, ErrorCode
from polywire.log.base import Completion
from polywire.protocols.cursus.messages import decoded
from polywire.protocols.runtime.append_queue import is_full
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.records.rows import from_records, to_records
from polywire.types import Level

STORED_BYTES_MAX: Final = 255  # longest producer id in a stored batch (decision 0101)
DIGEST_BYTES: Final = 32
BUSY_RETRY_S: Final = 0.05  # between two attempts while the log is full; a journal slot is sealed in about this time
BUSY_WAIT_S: Final = 10.0  # how long a batch waits if the log accepts nothing


def stored_id(producer: bytes) -> bytes:
    """Return the id under which a producer is stored. A long id is replaced by its beginning, ``~`` and a digest."""
    if len(producer) <= STORED_BYTES_MAX:
        return producer
    digest = blake2b(producer, digest_size=DIGEST_BYTES).hexdigest().encode()
    return producer[: STORED_BYTES_MAX - len(digest) - 1] + b"~" + digest


class Rejected(Exception):
    """Raised for sequence numbers that must not be stored. The acknowledgement has the text of this error."""


def already_stored(known: tuple[int, int] | None, *, producer: str, epoch: int, first: int, last: int) -> int:
    """Return how many of the messages with sequence numbers ``first`` to ``last`` are stored already.

    ``known`` is the producer's latest (epoch, sequence number) in this partition; None for a new producer. Raises
    Rejected if the messages must not be stored.
    """
    if known is None:
        if first != 1:
            raise Rejected(f"idempotency error: first message for producer {producer} must have seqNum 1, got {first}")
        return 0
    current, latest = known
    if epoch < current:
        raise Rejected(f"stale_producer_epoch producer={producer} current={current} got={epoch}")
    if epoch > current:
        if first != 1:
            raise Rejected(
                "idempotency error: first message in new producer epoch for producer"
                f" {producer} must have seqNum 1, got {first}"
            )
        return 0
    if first > latest + 1:
        raise Rejected(f"idempotency gap for producer {producer}: expected {latest + 1}, got {first}")
    return min(latest, last) - first + 1


def append_failure(error: BrokerError) -> str:
    """Return the text for a failed append, with the words by which clients recognise that the producer must end."""
    if error.code is ErrorCode.PRODUCER_FENCED:
        return f"stale_producer_epoch {error.message}"
    if error.code is ErrorCode.SEQUENCE_GAP:
        return f"idempotency gap {error.message}"
    return error.message


# Batches that other processes forward


class Checked(msgspec.Struct, frozen=True, array_like=True):
    """The result of a forwarded batch.

    Attributes:
        offset: offset of the last record; -1 if unknown.
        latest: the partition's latest offset if the batch is a duplicate, otherwise -1.
        epoch: the producer's current epoch after an error; -1 if unknown.
        error: why the batch was not stored; empty if it was.
    """

    offset: int = -1
    latest: int = -1
    epoch: int = -1
    error: str = ""


class CheckedBroker(RecordVerbs, ProducerVerbs, WireBroker, Protocol):
    """The methods of the broker that ``CheckedAppends`` uses."""


class _Append(NamedTuple):
    batch: bytes
    level: Level
    by: Caller
    then: Completion[Checked]
    until: float


class CheckedAppends:
    """Appends forwarded batches of idempotent producers."""

    __slots__ = ("_broker", "_waiting")

    def __init__(self, broker: CheckedBroker) -> None:
        self._broker: Final = broker
        self._waiting: Final[dict[Partition, deque[_Append]]] = {}  # batches that wait for space in the log

    def append(
        self, partition: Partition, batch: bytes, *, level: Level, by: Caller, then: Completion[Checked]
    ) -> None:
        """Append a batch of one producer, unless it is a duplicate."""
        append = _Append(batch, level, by, then, self._broker.clock.monotonic() + BUSY_WAIT_S)
        waiting = self._waiting.get(partition)
        if waiting is not None:
            waiting.append(append)
        elif not self._store(partition, append):
            self._waiting[partition] = deque((append,))
            self._broker.loop.call_later(BUSY_RETRY_S, self._retry, partition)

    def _retry(self, partition: Partition) -> None:
        waiting, now = self._waiting[partition], self._broker.clock.monotonic
        end = now() + QUANTUM_S
        while waiting and now() < end:
            if not self._store(partition, waiting[0], is_last=now() >= waiting[0].until):
                break
            waiting.popleft()
        if waiting:
            self._broker.loop.call_later(BUSY_RETRY_S if now() < end else 0, self._retry, partition)
        else:
            del self._waiting[partition]

    def _store(self, partition: Partition, append: _Append, *, is_last: bool = False) -> bool:
        """Append a batch. Return False if the log has no space for it and this is not the last attempt."""
        broker, then, batch = self._broker, append.then, append.batch
        producer, epoch = b"", -1
        try:
            identity = producer_identity(batch)
            assert identity is not None, "batches without a producer are not checked"
            producer, epoch, first, last = identity
            count = last - first + 1
            known = broker.producer_last(partition, producer)
            stored = already_stored(known, producer=decoded(producer), epoch=epoch, first=first, last=last)
            if stored == count:
                repeated = partial(self._repeated, partition, producer, epoch, last, then)
                broker.settle(append.level, repeated)
                return True
            if stored:
                records = to_records(batch)[stored:]
                batch = bytes(
                    from_records(records, producer_id=producer, producer_epoch=epoch, base_sequence=first + stored)
                )
            done = partial(self._stored, partition, producer, count - stored, then)
            broker.produce(partition, batch, by=append.by, level=append.level, done=done)
        except Rejected as error:
            self._fail(partition, producer, str(error), then)
        except BrokerError as error:
            if is_full(error) and not is_last:
                return False
            self._fail(partition, producer, append_failure(error), then)
        return True

    def _stored(
        self, partition: Partition, producer: bytes, count: int, then: Completion[Checked], offset: int | BrokerError
    ) -> None:
        if isinstance(offset, BrokerError):
            self._fail(partition, producer, append_failure(offset), then)
        else:
            then(Checked(offset + count - 1))

    def _repeated(
        self,
        partition: Partition,
        producer: bytes,
        epoch: int,
        sequence: int,
        then: Completion[Checked],
        result: int | BrokerError,
    ) -> None:
        if isinstance(result, BrokerError):
            self._fail(partition, producer, append_failure(result), then)
            return
        offset = self._broker.producer_offset(partition, producer, epoch=epoch, sequence=sequence)
        then(Checked(offset, partition.log.next_offset - 1))

    def _fail(self, partition: Partition, producer: bytes, error: str, then: Completion[Checked]) -> None:
        known = None if partition.ended else self._broker.producer_last(partition, producer)
        then(Checked(epoch=-1 if known is None else known[0], error=error))
