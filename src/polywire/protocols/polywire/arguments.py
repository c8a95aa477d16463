"""Decode arguments of requests: durability levels, consumer or group, partitions (spec: polywire#verbs).

An argument that cannot be decoded raises Invalid or Missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from polywire.errors import ErrorCode, Invalid, Missing
from polywire.types import Level, PositionKind

if TYPE_CHECKING:
    from polywire.broker.topics import Partition, Topic
    from polywire.protocols.polywire.context import PolywireBroker

NAME_BYTES_MAX: Final = 255  # bytes of a name (spec: polywire#limits)
TOPICS_MAX: Final = 1000  # topics of one BOUNDS (spec: polywire#limits)
LEVELS: Final = tuple(Level)
KINDS: Final = (PositionKind.CONSUMER, PositionKind.GROUP)


def level_of(number: int) -> Level:
    """Return the durability level with this number. Raises Invalid(INVALID_REQUEST) for an unknown number."""
    if not 0 <= number < len(LEVELS):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown level level={number}")
    return LEVELS[number]


def kind_of(number: int) -> PositionKind:
    """Return the kind of committed offset (of a consumer or a group) with this number.

    Raises Invalid(INVALID_REQUEST).
    """
    if not 0 <= number < len(KINDS):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown kind of position kind={number}")
    return KINDS[number]


def partition_of(topic: Topic, number: int) -> Partition:
    """Return a partition by its number. Raises Missing(PARTITION_MISSING)."""
    if not 0 <= number < len(topic.partitions):
        raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition topic={topic.name.full} partition={number}")
    return topic.partitions[number]


def find_partition(broker: PolywireBroker, name: str, number: int) -> Partition:
    """Return a partition of the topic with this name. Raises Missing(TOPIC_MISSING, PARTITION_MISSING)."""
    return partition_of(broker.topic(name), number)


def check_name(what: str, name: str) -> None:
    """Raise Invalid(INVALID_NAME) for an empty or too long name. ``what`` is the kind of name, for the message."""
    size = len(name.encode())
    if not 0 < size <= NAME_BYTES_MAX:
        raise Invalid(ErrorCode.INVALID_NAME, f"name must have 1 to {NAME_BYTES_MAX} bytes what={what} size={size}")
