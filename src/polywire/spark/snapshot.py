"""Request the partitions of a subscription with their first and next offsets.

A next offset is never above the synced records, so a power loss cannot remove records that a plan includes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from polywire.choices import missing
from polywire.client import bulk
from polywire.client.bulk import BulkConnection, PartitionRange
from polywire.errors import ErrorCode, Missing
from polywire.spark.offsets import PartitionKey, Position
from polywire.spark.options import SinkOptions, SourceOptions, Subscription
from polywire.spark.planning import Extent, Extents

TIMES_MAX: Final = 16  # maximum number of times in one BOUNDS request (spec: polywire#limits)
LISTINGS_MAX: Final = 5  # retries, because a topic may be deleted between listing and describing


def connect(options: SourceOptions | SinkOptions) -> BulkConnection:
    """Return this process's connection to the first of the brokers that responds.

    If none responds, its calls raise Unavailable.
    """
    each = [address if "://" in address else f"polywire://{address}" for address in options.addresses]
    return bulk.connect(
        ",".join(each), timeout_s=options.timeout_s, reconnect_s=options.reconnect_s, login=options.login
    )


def extents(
    connection: BulkConnection, subscription: Subscription, *, times_us: Sequence[int] = (), must_exist: bool = False
) -> Extents:
    """Return all partitions of a subscription with their first and next offsets, and the offsets of ``times_us``.

    Missing topics are skipped. If ``must_exist``, they raise Missing(TOPIC_MISSING).
    """
    for attempt in range(LISTINGS_MAX):
        try:
            return _extents(connection, subscription, times_us, must_exist=must_exist)
        except Missing as error:
            if must_exist and error.code is ErrorCode.TOPIC_MISSING:
                raise _no_such_topic(connection, subscription, error) from None
            if must_exist or error.code is not ErrorCode.TOPIC_MISSING or attempt == LISTINGS_MAX - 1:
                raise
    raise AssertionError("unreachable")


def _no_such_topic(connection: BulkConnection, subscription: Subscription, error: Missing) -> Missing:
    """Return the error for a missing topic. It names the topic and lists the existing topics."""
    known = {topic.name for topic in connection.topics()}
    wanted = subscription.topics or tuple(sorted({key.topic for key in subscription.partitions}))
    absent = [name for name in wanted if name not in known]
    return missing(ErrorCode.TOPIC_MISSING, "topic", absent[0], known) if absent else error


def epoch_reached(connection: BulkConnection, key: PartitionKey, position: Position) -> None:
    """Check that the broker still has all records before a position that was observed before its last start.

    Raises Conflict(EPOCH_ENDED) if some of them were lost in a power failure.
    """
    offset = position.next_offset
    for _ in connection.fetch_range(
        key.topic, key.partition, position.incarnation, offset, offset, epoch=position.epoch
    ):
        pass


def record_bytes(connection: BulkConnection, key: PartitionKey, incarnation: int, offset: int) -> float:
    """Return the average stored size of the records in the batch that contains an offset."""
    for chunk in connection.fetch_range(key.topic, key.partition, incarnation, offset, bytes_max=1):
        return len(chunk.data) / max(1, chunk.next_offset - chunk.offset)
    return 1.0


def _extents(
    connection: BulkConnection, subscription: Subscription, times_us: Sequence[int], *, must_exist: bool
) -> Extents:
    names = _names(connection, subscription, must_exist=must_exist)
    found: dict[PartitionKey, Extent] = {}
    requests = [times_us[at : at + TIMES_MAX] for at in range(0, len(times_us), TIMES_MAX)] or [()]
    for times in requests if names else ():
        for bounds in connection.bounds(names, times_us=times):
            key = PartitionKey(bounds.topic, bounds.partition)
            found[key] = _extent(bounds, times, found.get(key))
    if not subscription.partitions:
        return found
    absent = [key for key in subscription.partitions if key not in found]
    if absent and must_exist:
        raise Missing(
            ErrorCode.PARTITION_MISSING,
            f"assigned partition does not exist topic={absent[0].topic} partition={absent[0].partition}",
        )
    return {key: found[key] for key in subscription.partitions if key in found}


def _names(connection: BulkConnection, subscription: Subscription, *, must_exist: bool) -> list[str]:
    if subscription.pattern is not None:
        return [topic.name for topic in connection.topics(subscription.pattern)]
    wanted = subscription.topics or tuple(sorted({key.topic for key in subscription.partitions}))
    if must_exist:
        return list(wanted)
    existing = {topic.name for topic in connection.topics()}
    return [name for name in wanted if name in existing]


def _extent(bounds: PartitionRange, times_us: Sequence[int], before: Extent | None) -> Extent:
    offsets = dict(zip(times_us, bounds.time_offsets, strict=True))
    if before is not None:
        offsets = {**before.time_offsets, **offsets}
    return Extent(
        bounds.topic_id.hex(), bounds.incarnation, bounds.epoch, bounds.first_offset, bounds.next_offset, offsets
    )
