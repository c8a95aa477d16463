"""Reasons why a consumer group is behind, found by comparing two observations of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from polywire.client.base import PartitionBounds
from polywire.client.listings import GroupInfo
from polywire.errors import ErrorCode, Missing

OBSERVED_S: Final = 3.0  # consumers of the client commit once a second
HOT_SHARE: Final = 0.8  # share of the lag above which one partition explains it
IDLE_MS: Final = 5_000  # members send a request every three seconds or more often


class Source(Protocol):
    """The methods of a client that ``explain`` calls."""

    async def bounds(self, topic: str, /) -> list[PartitionBounds]:
        """Return the first and next offset of each partition."""

    async def groups(self, group: str | None = None, /) -> list[GroupInfo]:
        """Return the groups on each topic."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A group on one topic at one moment. ``at_s`` is a monotonic time in seconds."""

    at_s: float
    group: GroupInfo
    bounds: Sequence[PartitionBounds]

    def position(self, part: PartitionBounds) -> int | None:
        """Return the committed offset, at least the first offset, or None if there is none."""
        position = self.group.positions.get(part.partition)
        return None if position is None else max(position, part.first_offset)

    def lags(self) -> dict[int, int]:
        """Return the number of records to read, by partition, where an offset was committed."""
        return {
            part.partition: part.next_offset - position
            for part in self.bounds
            if (position := self.position(part)) is not None
        }


async def observe(client: Source, group: str, topic: str) -> Observation:
    """Observe a group. Raises Missing(GROUP_MISSING, TOPIC_MISSING)."""
    bounds = await client.bounds(topic)
    for found in await client.groups(group):
        if found.topic == topic:
            return Observation(time.monotonic(), found, bounds)
    raise Missing(ErrorCode.GROUP_MISSING, f"no such group on this topic group={group!r} topic={topic!r}")


async def explain(client: Source, group: str, topic: str, *, seconds: float = OBSERVED_S) -> list[str]:
    """Observe a group twice, and return sentences that say why it is behind. Raises the same errors as ``observe``."""
    before = await observe(client, group, topic)
    await asyncio.sleep(seconds)
    return list(reasons(before, await observe(client, group, topic)))


def reasons(before: Observation, after: Observation) -> Iterator[str]:
    """Yield sentences that say why a group is behind, the most important ones first."""
    lags = after.lags()
    total, name = sum(lags.values()), after.group.name
    members = after.group.members
    if not after.bounds:
        yield "The topic has no partitions."
        return
    if not lags:
        yield f"The group {name} has not committed an offset, so its lag is unknown."
    elif not total:
        yield f"The group {name} is not behind: it has read everything."
    if not members:
        yield f"The group has no members: no consumer is running. {total} records wait."
    yield from _lost(after)
    if total:
        yield from _pace(before, after, lags)
        yield from _hot(lags, total)
    yield from _members(after)


def _lost(after: Observation) -> Iterator[str]:
    for part in after.bounds:
        position = after.group.positions.get(part.partition)
        if position is not None and position < part.first_offset:
            yield (
                f"Retention has removed {part.first_offset - position} records of partition {part.partition} that the "
                "group had not read."
            )


def _pace(before: Observation, after: Observation, lags: Mapping[int, int]) -> Iterator[str]:
    seconds = max(after.at_s - before.at_s, 1e-3)
    earlier = {part.partition: part for part in before.bounds}
    produced = consumed = 0
    stuck: list[int] = []
    for part in after.bounds:
        was = earlier.get(part.partition)
        if was is None:
            continue
        produced += part.next_offset - was.next_offset
        now, then = after.position(part), before.position(was)
        read = 0 if now is None or then is None else now - then
        consumed += read
        if not read and lags.get(part.partition):
            stuck.append(part.partition)
    if after.group.members and stuck:
        owners = {number: member.id for member in after.group.members for number in member.partitions}
        named = ", ".join(f"{number} ({owners.get(number, 'no member')})" for number in stuck[:10])
        yield (
            f"No offset was committed for {seconds:.0f} s in partitions with records to read: {named}. The member hangs, "
            "needs longer than that for its records, or does not commit."
        )
    if consumed < produced:
        yield (
            f"It falls behind: {produced / seconds:.0f} records/s are produced and {consumed / seconds:.0f} are read. "
            f"Add members, up to {len(after.bounds)} (one per partition), or handle records faster."
        )
    elif consumed > produced:
        left_s = sum(lags.values()) * seconds / (consumed - produced)
        yield f"It catches up: about {left_s:.0f} s until it has read everything, at the present pace."


def _hot(lags: Mapping[int, int], total: int) -> Iterator[str]:
    number, most = max(lags.items(), key=lambda lag: lag[1])
    if len(lags) > 1 and most > HOT_SHARE * total:
        yield (
            f"Partition {number} has {most} of the {total} records: its keys are more frequent, or its member is slower "
            "than the others. More members do not help."
        )


def _members(after: Observation) -> Iterator[str]:
    members = after.group.members
    assigned = {number for member in members for number in member.partitions}
    unassigned = sorted({part.partition for part in after.bounds} - assigned)
    if members and unassigned:
        yield f"Partitions without a member: {', '.join(map(str, unassigned[:20]))}. The group may be rebalancing."
    if len(members) > len(after.bounds):
        yield f"{len(members) - len(after.bounds)} members have no partition: a partition has at most one member."
    silent = [member.id for member in members if member.idle_ms >= IDLE_MS]
    if silent:
        yield f"Members that have been silent for {IDLE_MS // 1000} s: {', '.join(silent[:10])}."
