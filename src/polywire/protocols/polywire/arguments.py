"""Small translations that every part of the session needs: levels, partitions, names, and what a part asks of its session.

Promises: what a request says wrongly is refused as Invalid or Missing. Must not know: frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from polywire.errors import BrokerError, ErrorCode, Invalid, Missing
from polywire.protocols.polywire.messages import Head
from polywire.types import Level, PositionKind

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.broker.topics import Partition, Topic

NAME_BYTES_MAX: Final = 255  # page §3
TOPICS_MAX: Final = 1000  # page §3: what one BOUNDS may name
LEVELS: Final = tuple(Level)
KINDS: Final = (PositionKind.CONSUMER, PositionKind.GROUP)


class Answering(Protocol):
    """What the parts of a session ask of it."""

    def owe(self) -> None: ...

    def settle(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None: ...

    def settle_error(self, verb: int, correlation: int, error: BrokerError) -> None: ...

    def answer(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...

    def pin(self) -> Callable[[], None]: ...


def level_of(number: int) -> Level:
    """The level of this number. Raises Invalid(INVALID_REQUEST)."""
    if not 0 <= number < len(LEVELS):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown level level={number}")
    return LEVELS[number]


def kind_of(number: int) -> PositionKind:
    """Whose position. Raises Invalid(INVALID_REQUEST)."""
    if not 0 <= number < len(KINDS):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown kind of position kind={number}")
    return KINDS[number]


def partition_of(topic: Topic, number: int) -> Partition:
    """A partition by its number. Raises Missing(PARTITION_MISSING)."""
    if not 0 <= number < len(topic.partitions):
        raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition topic={topic.name.full} partition={number}")
    return topic.partitions[number]


def find_partition(broker: Broker, name: str, number: int) -> Partition:
    """A partition of a topic by name. Raises Missing(TOPIC_MISSING), Missing(PARTITION_MISSING)."""
    return partition_of(broker.topic(name), number)


def check_name(what: str, name: str) -> None:
    """Refuse an empty or overlong name. Raises Invalid(INVALID_NAME)."""
    size = len(name.encode())
    if not 0 < size <= NAME_BYTES_MAX:
        raise Invalid(ErrorCode.INVALID_NAME, f"name must have 1 to {NAME_BYTES_MAX} bytes what={what} size={size}")
