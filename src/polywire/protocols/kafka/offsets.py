"""ListOffsets, OffsetForLeaderEpoch, DeleteRecords. An error in one partition does not affect others.

Spec: kafka#listoffsets, kafka#offsetforleaderepoch, kafka#deleterecords.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, ErrorCode, Missing
from polywire.log.base import Completion
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.context import epoch_of
from polywire.protocols.kafka.lookup import led_topic, partition_of
from polywire.protocols.kafka.messages import NO_EPOCH, NO_OFFSET, Api, WireError
from polywire.protocols.kafka.replies import PARTITIONS_PER_STEP, PendingResponse, answer_in_slices, refuse
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.protocols.kafka.times import TimeSearch

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        DeleteRecordsRequest,
        DeleteRecordsResponse,
        ListOffsetsRequest,
        ListOffsetsResponse,
        OffsetForLeaderEpochRequest,
        OffsetForLeaderEpochResponse,
    )

LATEST: Final = -1
EARLIEST: Final = -2
GREATEST_TIME: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
EARLIEST_PENDING: Final = -6
SINCE: Final = {LATEST: 1, EARLIEST: 1, GREATEST_TIME: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9, EARLIEST_PENDING: 11}
"""The first version of ListOffsets that supports each special timestamp."""
READABLE_END: Final = -1  # offset in DeleteRecords that means: delete all readable records


def list_offsets(session: KafkaSession, answer: Answer, request: ListOffsetsRequest, /) -> None:
    response = schema.response(Api.LIST_OFFSETS)
    body = response(topics=[])
    pending_response = PendingResponse(answer, body)

    def entries() -> Iterator[None]:
        for topic_request in request.topics:
            topic = response.Topics(name=topic_request.name, partitions=[])
            body.topics.append(topic)
            for partition_request in topic_request.partitions:
                entry = response.Topics.Partitions(index=partition_request.index, timestamp=-1, offset=NO_OFFSET)
                topic.partitions.append(entry)
                try:
                    partition = partition_of(
                        led_topic(session, Action.TOPIC_DESCRIBE, topic_request.name), partition_request.index
                    )
                    _list(session, pending_response, answer.request.version, partition, partition_request, entry)
                except BrokerError as error:
                    refuse(entry, error)
                yield None

    pending_response.run(session.broker, entries())


def _list(
    session: KafkaSession,
    pending_response: PendingResponse,
    version: int,
    partition: Partition,
    partition_request: ListOffsetsRequest.Topics.Partitions,
    entry: ListOffsetsResponse.Topics.Partitions,
) -> None:
    """Fill a partition's response entry, or start a search by time that does it. Raises BrokerError."""
    log, time_ms = partition.log, partition_request.timestamp
    stale = leader_error(partition, partition_request.current_leader_epoch)
    if stale is not None:
        entry.error = stale
        return
    if time_ms < 0 and SINCE.get(time_ms, version + 1) > version:
        entry.error = WireError.UNSUPPORTED_VERSION
        return
    match time_ms:
        case -1:
            entry.offset, entry.leader_epoch = log.readable_offset, epoch_of(partition)
        case -2 | -4:
            entry.offset = log.first_offset
            entry.leader_epoch = log.epoch_at(log.first_offset)
        case -5 | -6:
            pass
        case _:
            pending_response.expect()
            search = TimeSearch(
                session.broker,
                partition,
                None if time_ms == GREATEST_TIME else time_ms,
                partial(_found, pending_response, partition, entry),
            )
            pending_response.on_cancel(search.cancel)


def _found(
    pending_response: PendingResponse,
    partition: Partition,
    entry: ListOffsetsResponse.Topics.Partitions,
    found: tuple[int, int] | BrokerError | None,
) -> None:
    if isinstance(found, BrokerError):
        refuse(entry, found)
    elif found is not None:
        entry.offset, entry.timestamp = found
        try:
            entry.leader_epoch = partition.log.epoch_at(entry.offset)
        except BrokerError:  # the record was trimmed in the meantime
            entry.leader_epoch = NO_EPOCH
    pending_response.count_result()


def leader_error(partition: Partition, epoch: int) -> WireError | None:
    """Return the error for a client's leader epoch, or None if it is current (spec: kafka#fetch)."""
    if epoch == NO_EPOCH:
        return None
    current = epoch_of(partition)
    if epoch == current:
        return None
    return WireError.FENCED_LEADER_EPOCH if epoch < current else WireError.UNKNOWN_LEADER_EPOCH


# Epochs


def offset_for_leader_epoch(
    session: KafkaSession, answer: Answer, request: OffsetForLeaderEpochRequest, /
) -> OffsetForLeaderEpochResponse | None:
    """OffsetForLeaderEpoch: return the offsets at which epochs end."""
    response = schema.response(Api.OFFSET_FOR_LEADER_EPOCH)
    entries = _ends(session, request, response.Topics)
    return answer_in_slices(session.broker, answer, entries, lambda topics: response(topics=topics))


def _ends(
    session: KafkaSession, request: OffsetForLeaderEpochRequest, made: type[OffsetForLeaderEpochResponse.Topics]
) -> Iterator[OffsetForLeaderEpochResponse.Topics | None]:
    """Yield the response's topics, with the ends of the requested epochs. After each None, other requests may run."""
    for topic_request in request.topics:
        partitions: list[OffsetForLeaderEpochResponse.Topics.Partitions] = []
        for partition_request in topic_request.partitions:
            partitions.append(_end(session, topic_request.topic, partition_request, made.Partitions))
            if not len(partitions) % PARTITIONS_PER_STEP:
                yield None
        yield made(topic=topic_request.topic, partitions=partitions)


def _end(
    session: KafkaSession,
    name: str,
    partition_request: OffsetForLeaderEpochRequest.Topics.Partitions,
    made: type[OffsetForLeaderEpochResponse.Topics.Partitions],
) -> OffsetForLeaderEpochResponse.Topics.Partitions:
    entry = made(partition=partition_request.partition, leader_epoch=NO_EPOCH, end_offset=NO_OFFSET)
    try:
        partition = partition_of(led_topic(session, Action.TOPIC_DESCRIBE, name), partition_request.partition)
    except BrokerError as error:
        refuse(entry, error)
        return entry
    stale = leader_error(partition, partition_request.current_leader_epoch)
    if stale is not None:
        entry.error = stale
    else:
        entry.leader_epoch, entry.end_offset = epoch_end(partition, partition_request.leader_epoch)
    return entry


def epoch_end(partition: Partition, epoch: int) -> tuple[int, int]:
    """Return the partition's latest epoch up to ``epoch``, and the offset at which it ends.

    Both are -1 if the partition has no such epoch.
    """
    log, current = partition.log, epoch_of(partition)
    if not 0 < epoch <= current:
        return NO_EPOCH, NO_OFFSET
    end = log.epoch_end(epoch)
    if epoch == current:
        return current, end
    return (log.epoch_at(end - 1), end) if end > log.first_offset else (NO_EPOCH, NO_OFFSET)


# Deletion


def delete_records(session: KafkaSession, answer: Answer, request: DeleteRecordsRequest, /) -> None:
    response = schema.response(Api.DELETE_RECORDS)
    body = response(topics=[])
    pending_response = PendingResponse(answer, body)

    def entries() -> Iterator[None]:
        for topic_request in request.topics:
            topic = response.Topics(name=topic_request.name, partitions=[])
            body.topics.append(topic)
            for partition_request in topic_request.partitions:
                entry = response.Topics.Partitions(index=partition_request.index, low_watermark=NO_OFFSET)
                topic.partitions.append(entry)
                pending_response.expect()
                try:
                    partition = partition_of(
                        led_topic(session, Action.TOPIC_PURGE, topic_request.name), partition_request.index
                    )
                    _trim(
                        session,
                        partition,
                        partition_request.offset,
                        partial(_trimmed, pending_response, partition, entry),
                    )
                except BrokerError as error:
                    pending_response.set_result(entry, error)
                yield None

    pending_response.run(session.broker, entries())


def _trim(session: KafkaSession, partition: Partition, offset: int, done: Completion[int]) -> None:
    """Delete records below an offset. Raises BrokerError for an invalid offset."""
    if offset == READABLE_END:
        offset = partition.log.next_offset
    if offset < 0:
        raise Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset must not be negative offset={offset}")
    session.broker.trim_partition(partition, offset, done=done)


def _trimmed(
    pending_response: PendingResponse,
    partition: Partition,
    entry: DeleteRecordsResponse.Topics.Partitions,
    result: int | BrokerError,
) -> None:
    if not isinstance(result, BrokerError):
        entry.low_watermark = partition.log.first_offset
    pending_response.set_result(entry, result)
