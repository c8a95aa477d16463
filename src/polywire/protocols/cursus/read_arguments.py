"""Parse the arguments of CONSUME and STREAM: topic, partition and offset (spec: cursus#reading).

Reading begins at the offset in the request, else at the group's committed offset, else at the default.
"""

from __future__ import annotations

from typing import Final

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.protocols.cursus.messages import Refused, Request, integer, quote, topic_word
from polywire.protocols.cursus.session import CursusSession
from polywire.types import PositionKind

DEFAULT_GROUP: Final = "default-group"  # the group of a reader that names none
RECORDS_MAX: Final = 8192  # default limit for the records of one batch
_ISOLATIONS: Final = ("read_committed", "read_uncommitted")


def failed(reason: str, *, legacy: str | None = None) -> Refused:
    """Return the error with which the original broker rejects most invalid reads."""
    return Refused("command_failed", f"reason={quote(reason)}", legacy=legacy or reason)


def readable_topic(session: CursusSession, name: str) -> Topic:
    topic = session.state.broker.find_topic(name)
    if topic is None:
        raise failed(f"topic '{topic_word(name)}' does not exist")
    session.state.guard.admit_topic(session, topic, Action.FETCH)
    return topic


def partition_number(text: str) -> int:
    """Parse a partition number. Raises Refused if it is not one."""
    number = integer(text)
    if number is None:
        reason = f"strconv.Atoi: parsing {quote(text)}: invalid syntax"
        raise failed(f"invalid partition value: {text}", legacy=f"invalid partition ID: {reason}")
    return number


def readable_partition(topic: Topic, number: int) -> Partition:
    """Return the partition with this number. Raises Refused if it does not exist."""
    count = len(topic.partitions)
    if not 0 <= number < count:
        name = topic.name.full
        raise failed(
            f"partition {number} out of range for topic '{topic_word(name)}' (0-{count - 1})",
            legacy="failed to get disk handler",
        )
    return topic.partitions[number]


def given_offset(request: Request) -> int | None:
    """Return the offset in the request; None if it has none. Raises Refused for an invalid offset."""
    text = request.options.get("offset")
    if text is None:
        return None
    offset = integer(text)
    if offset is None or offset < 0:
        raise failed(f"invalid offset value: {text}", legacy="invalid offset")
    return offset


def start_offset(session: CursusSession, request: Request, partition: Partition, given: int | None) -> int:
    """Return the offset at which reading begins."""
    if given is not None:
        return given
    group = request.options.get("group") or session.group or DEFAULT_GROUP
    name = partition.topic.name.full
    committed = session.state.broker.position(name, partition.number, PositionKind.GROUP, group, latest=True)
    if committed is not None:
        return committed
    reset = request.options.get("autoOffsetReset", "earliest").lower()
    return partition.log.readable_offset if reset == "latest" else partition.log.first_offset


def check_isolation(request: Request) -> None:
    """Raise Refused for an unknown isolation level.

    Both known levels read the same records, because uncommitted data is never visible (concepts:
    storage#staged-records).
    """
    for key in ("isolation", "isolation_level"):
        given = request.options.get(key)
        if given is not None and given.lower() not in _ISOLATIONS:
            raise Refused("invalid_isolation", f"isolation={given}")


def batch_size(request: Request) -> int:
    """Return the maximum number of records of a batch. Raises Refused for an invalid number."""
    text = request.options.get("batch")
    if text is None:
        return RECORDS_MAX
    number = integer(text)
    if number is None:
        raise failed(f"invalid batch value: {text}")
    return min(max(number, 1), 100_000)


def out_of_range(partition: Partition, requested: int) -> str:
    return f"requested={requested} earliest={partition.log.first_offset} latest={partition.log.readable_offset}"
