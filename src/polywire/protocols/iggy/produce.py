"""SEND_MESSAGES and FLUSH_UNSAVED_BUFFER (spec: iggy#sending, iggy#d2-send, iggy#d3-send).

The messages of a request become one batch of one partition, so consumers see all of them at the same time.
"""

from __future__ import annotations

from functools import partial
from struct import Struct
from typing import Final

from polywire.broker.owners import NO_CALLER
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.protocols.iggy import decoder, errors
from polywire.protocols.iggy.dialect import D0
from polywire.protocols.iggy.histories import check_history
from polywire.protocols.iggy.lookup import partition_at, topic_of
from polywire.protocols.iggy.messages import Refused
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.repeated import learn
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession
from polywire.records.split import with_producer
from polywire.types import KeyHash, Level

_SENT: Final = Struct("<IIIIQ")
# kinds of partitioning
_BALANCED: Final = 1
_TO_PARTITION: Final = 2
_PRODUCER_AT: Final = 52  # position, in the header of a D3 batch, of the flag that a producer is set
_PRODUCER: Final = Struct("<56xQH2xI")
PRODUCER_ID_MAX: Final = 2**63 - 1
EPOCH_MAX: Final = 2**15 - 1
SEQUENCE_MAX: Final = 2**31 - 1  # after it, sequences restart at 0
_XXH32: Final = KeyHash.XXH32
# errors when a payload in the form of the byte list is read as a struct: it seems to have headers, or a length of zero
_UNREADABLE: Final = frozenset({3, 4018, 4019, 4024})


def send(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    dialect = reader.dialect
    if dialect.batched:
        end = reader.u32() + reader.at
    names_at = reader.at
    topic = topic_of(session, reader, Action.PRODUCE)
    destination_at = reader.at
    partition, key = _destination(session, topic, reader)
    if key is None and not dialect.framed:
        balanced = reader.data[destination_at] == _BALANCED
        learn(session, reader, partition, names_at=names_at, balanced=balanced)
    if dialect.contexts:
        check_history(session, answer, partition)
    if not dialect.batched:
        batch = decoder.from_flat(reader.data, reader.at, reader.stop, key)
        if dialect is D0 and isinstance(batch, int) and batch in _UNREADABLE:
            # The client may use the form that the documentation shows as a list of bytes.
            listed = decoder.from_flat(reader.data, reader.at, reader.stop, key, decoder.LISTED)
            batch = batch if isinstance(listed, int) else listed
    else:
        count = reader.u32()
        if reader.at != end:
            raise Refused(errors.UNKNOWN_COMMAND)
        if dialect.framed:
            batch = decoder.from_frames(reader.data, reader.at, reader.stop, key)
        else:
            head = decoder.message_head(reader.data, reader.at, reader.stop, count)
            if head:
                session.recognition.see_message_head(head)
            batch = decoder.from_indexed(reader.data, reader.at, reader.stop, count, head or dialect.message_head, key)
    if isinstance(batch, int):
        raise Refused(batch)
    if dialect.framed:
        by = NO_CALLER
        if reader.data[reader.at + _PRODUCER_AT]:
            is_named = reader.data[destination_at] == _TO_PARTITION
            batch, by = _name_producer(session, partition, batch, reader, is_named=is_named), session.caller
        done = partial(_sent, session, answer, topic, partition, session.shared.directory.stream_of(topic).number)
        session.append_queue.produce(partition, batch, Level.WRITTEN, done, by=by)
    else:
        session.append_queue.produce(partition, batch, Level.WRITTEN, answer.sent)


def _name_producer(
    session: IggySession, partition: Partition, batch: bytearray, reader: Reader, *, is_named: bool
) -> bytearray:
    """Return the batch with the producer id and sequence number of the request.

    With them, the broker does not store duplicates. ``is_named``: whether the request names the partition. It must,
    because sequence numbers belong to one partition. Raises Refused or Invalid (spec: iggy#d4-producers).
    """
    producer_id, epoch, sequence = _PRODUCER.unpack_from(reader.data, reader.at)
    if not reader.dialect.contexts:
        raise Refused(errors.RESERVED)
    if not is_named:
        raise Refused(errors.NO_PRODUCER_PARTITION)
    if producer_id > PRODUCER_ID_MAX or epoch > EPOCH_MAX or sequence > SEQUENCE_MAX:
        raise Refused(errors.UNKNOWN_COMMAND)
    producer = f"iggy-{producer_id}".encode()
    sequence = session.broker.producer_sequence(partition, producer, epoch=epoch, sequence=sequence)
    return with_producer(batch, producer, epoch=epoch, base_sequence=sequence)


def _destination(session: IggySession, topic: Topic, reader: Reader) -> tuple[Partition, bytes | None]:
    kind, size = reader.u8(), reader.u8()
    if not topic.partitions:
        raise Refused(errors.NO_PARTITIONS)
    if kind == _BALANCED:
        # the value has no meaning; the documentation of 2023 shows one, and Iggy's own server ignores it
        reader.take(size)
        return topic.partitions[session.shared.directory.next_balanced(topic)], None
    if kind == _TO_PARTITION:
        if size != 4:
            raise Refused(errors.UNKNOWN_COMMAND)
        return partition_at(topic, reader.u32() - reader.dialect.base), None
    if kind != 3:
        raise Refused(errors.UNKNOWN_COMMAND)
    if size == 0:
        raise Refused(errors.NO_KEY_VALUE)
    key = bytes(reader.take(size))
    return session.broker.partition_of_key(topic, key, _XXH32), key


def _sent(
    session: IggySession, answer: Answer, topic: Topic, partition: Partition, stream: int, offset: int | BrokerError
) -> None:
    """Reply to a request whose batch was stored, or with the error.

    In Iggy's newest protocol (D3), the reply contains the partition and the offset.
    """
    if isinstance(offset, BrokerError):
        answer.sent(offset)
        return
    try:
        number = session.shared.directory.stored(topic).number
    except (KeyError, BrokerError):  # the topic was deleted in the meantime
        answer.ok()
        return
    answer.ok(_SENT.pack(1, stream, number, partition.number, offset))


def flush(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """FLUSH_UNSAVED_BUFFER: reply when all earlier messages are synced to disk."""
    if reader.dialect.framed:
        raise Refused(errors.UNAVAILABLE)  # always unavailable in the framed dialects (spec: iggy#d3-operations)
    topic = topic_of(session, reader, Action.PRODUCE)
    partition_at(topic, reader.number())
    session.broker.bounds(topic.partitions[0], then=answer.done)
