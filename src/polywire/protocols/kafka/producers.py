"""Idempotent producers: InitProducerId, and what their sequences stand for (spec: kafka#idempotent-producers).

Promises: an id is never given twice; sequences that wrap around are stored as ones that count on. Must not know: frames, windows.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

from polywire.broker.actions import Action
from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.protocols.kafka import schema, transactions
from polywire.protocols.kafka.context import KafkaBroker
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.records.header import stamp_producer

_IDENTITY: Final = Struct(">cq")  # the letter tells ids of this wire from those of others


def init_producer_id(session: KafkaSession, answer: Answer, request: Any, /) -> Any:
    """InitProducerId: a new id, whatever the producer had before, unless it is one of transactions."""
    response = schema.response(Api.INIT_PRODUCER_ID)
    if request.transactional_id is not None:
        return transactions.hold(session, answer, request)
    try:
        session.broker.access.authorize_somewhere(session.principal, Action.PRODUCE)
    except BrokerError as error:
        denied = wire_error(error, denied=WireError.CLUSTER_AUTHORIZATION_FAILED)
        return response(error=denied, producer_id=-1, producer_epoch=-1)
    return response(producer_id=session.broker.new_producer_id(), producer_epoch=0)


def stamp_sequence(
    broker: KafkaBroker, partition: Partition, batch: bytearray, *, producer_id: int, producer_epoch: int, sequence: int
) -> None:
    """Have a batch of a producer, before it is produced, say which of all sequences it begins with. Raises Invalid(SEQUENCE_GAP)."""
    producer = _IDENTITY.pack(b"k", producer_id)
    unwrapped = broker.producer_sequence(partition, producer, epoch=producer_epoch, sequence=sequence)
    stamp_producer(batch, 0, producer_epoch, unwrapped)
