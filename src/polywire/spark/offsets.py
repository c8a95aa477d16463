"""Encode and decode the offsets of a streaming query, which Spark stores in its checkpoint as JSON.

Keys are sorted, because Spark compares offsets as strings. Every position includes its partition's incarnation, so a
topic that was deleted and created again is never mistaken for the old one.

```
{"initial": false, "topics": {"orders": {"id": "9f…", "partitions": {"0":
    {"begin": 0, "epoch": 3, "incarnation": 17, "next": 4200}}}}, "version": 1}
```

``next`` is exclusive. ``begin`` is present only in the offset at the end of a partition's first batch. It is where the
query started, which Spark does not store. A batch that is repeated after a crash therefore covers the same records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from polywire.errors import ErrorCode, Invalid

OFFSET_VERSION: Final = 1


class PartitionKey(NamedTuple):
    """A partition, identified by its topic's full name and its number. It sorts by topic, then number."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a query in one partition.

    Attributes:
        topic_id: 32 hexadecimal digits.
        incarnation: incarnation number of the partition, which changes if the topic is deleted and created again.
        epoch: leader epoch in which ``next_offset`` was observed.
        begin_offset: offset at which reading began. It is set only for a partition's first batch.
    """

    topic_id: str
    incarnation: int
    epoch: int
    next_offset: int
    begin_offset: int | None = None


@dataclass(frozen=True, slots=True)
class SourceOffset:
    """Position of a query in its topics, as Spark stores it in the checkpoint.

    Attributes:
        positions: position in each partition.
        initial: whether this is the start of a query that has not read a batch yet.
    """

    positions: Mapping[PartitionKey, Position] = field(default_factory=dict)
    initial: bool = False


def encode_offset(offset: SourceOffset) -> dict[str, Any]:
    """Return the offset as a JSON object whose keys are sorted at every level."""
    topics: dict[str, Any] = {}
    for key in sorted(offset.positions, key=lambda key: (key.topic, str(key.partition))):
        position = offset.positions[key]
        topic = topics.setdefault(key.topic, {"id": position.topic_id, "partitions": {}})
        begin = {} if position.begin_offset is None else {"begin": position.begin_offset}
        topic["partitions"][str(key.partition)] = {
            **begin,
            "epoch": position.epoch,
            "incarnation": position.incarnation,
            "next": position.next_offset,
        }
    return {"initial": offset.initial, "topics": topics, "version": OFFSET_VERSION}


def decode_offset(text: Mapping[str, Any]) -> SourceOffset:
    """Decode an offset from a JSON object.

    Raises Invalid(INVALID_REQUEST) for an unknown version or invalid content.
    """
    version = text.get("version")
    if version != OFFSET_VERSION:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the checkpoint has offsets of a version that this release cannot read version={version!r} supported={OFFSET_VERSION}",
        )
    try:
        return SourceOffset(
            positions={
                PartitionKey(name, int(number)): Position(
                    topic_id=topic["id"],
                    incarnation=int(entry["incarnation"]),
                    epoch=int(entry["epoch"]),
                    next_offset=int(entry["next"]),
                    begin_offset=int(entry["begin"]) if "begin" in entry else None,
                )
                for name, topic in text["topics"].items()
                for number, entry in topic["partitions"].items()
            },
            initial=bool(text["initial"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"the checkpoint has an invalid offset detail={error!r}") from error


def total_next(offset: SourceOffset) -> int:
    """Return the sum of the next offsets. The difference of two sums is the number of records between them."""
    return sum(position.next_offset for position in offset.positions.values())
