"""Checks of a batch before it is stored, and the errors of batches that were not (spec: kafka#refused-batches)."""

from __future__ import annotations

from struct import Struct
from typing import Final

from polywire.broker.topics import Partition, Topic
from polywire.clock import Clock
from polywire.errors import BrokerError, ErrorCode
from polywire.protocols.kafka.configs import ProduceLimits
from polywire.protocols.kafka.context import KafkaBroker
from polywire.protocols.kafka.decoder import BatchHead, Built
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.messages import Refused, WireError
from polywire.protocols.kafka.times import earliest_ms
from polywire.records.header import stamp_producer

REPEATED: Final = "the batch was stored before, and its offset is no longer known"
IDENTITY: Final = Struct(">cq")  # the letter marks producer ids of this protocol


def check_records(topic: Topic, built: Built, limits: ProduceLimits, clock: Clock) -> None:
    """Check the records of a batch against the settings of their topic. Raises Refused."""
    if not limits.has_times_of_append:
        _check_times(built, limits, clock.now_us() // 1000)
    if topic.settings.compaction and built.null_keys:
        raise Refused(WireError.INVALID_RECORD, "record has no key, which a compacted topic requires")


def _check_times(built: Built, limits: ProduceLimits, now_ms: int) -> None:
    """Raise Refused if timestamps differ too much from the broker's clock."""
    if built.max_time_ms > now_ms + limits.after_ms:
        raise Refused(
            WireError.INVALID_TIMESTAMP,
            f"timestamp is too far ahead ms={built.max_time_ms} limit={now_ms + limits.after_ms}",
        )
    if limits.before_ms is None:
        return
    earliest, limit = earliest_ms(built.batch), now_ms - limits.before_ms
    if earliest is not None and earliest < limit:
        raise Refused(WireError.INVALID_TIMESTAMP, f"timestamp is too old ms={earliest} limit={limit}")


def stamp_sequence(
    broker: KafkaBroker, partition: Partition, batch: bytearray, *, producer_id: int, producer_epoch: int, sequence: int
) -> None:
    """Write the sequence number of the first record into a batch, before the batch is appended.

    The stored number does not wrap around at 2**31. Raises Invalid(SEQUENCE_GAP).
    """
    producer = IDENTITY.pack(b"k", producer_id)
    unwrapped = broker.producer_sequence(partition, producer, epoch=producer_epoch, sequence=sequence)
    stamp_producer(batch, 0, producer_epoch, unwrapped)


def stamp_head(broker: KafkaBroker, partition: Partition, batch: bytearray, head: BatchHead) -> None:
    """Write the sequence number of an idempotent producer's batch into it. See ``stamp_sequence``."""
    if head.producer_id >= 0:
        stamp_sequence(
            broker,
            partition,
            batch,
            producer_id=head.producer_id,
            producer_epoch=head.producer_epoch,
            sequence=head.base_sequence,
        )


def produce_error(error: BrokerError) -> WireError:
    """Return the Kafka error for records that were not stored. If the log is full, clients retry after this error."""
    return WireError.REQUEST_TIMED_OUT if error.code is ErrorCode.BUSY else wire_error(error)
