"""Carry (copy) the committed offsets of consumer groups between the two ends of a link.

* A group is active where it has members. Its offsets are carried from there to the other end. If it has no members,
  they are carried from the end where clients write, unless its last members were at the other end.
* Offsets are carried only up to the end of the copy, and only in partitions whose records have the same offsets.
* An offset moves backwards only if it moved backwards at the active end, because a user has reset it there.
* Groups have their own connection to the source, so their requests do not delay the copy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from polywire.choices import missing
from polywire.client.base import Ability, WireClient
from polywire.client.copying import connected
from polywire.client.iggy import IggyClient
from polywire.client.kafka import KafkaClient
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, ErrorCode, Invalid, PeerError, Unavailable
from polywire.link_orders import GroupReport
from polywire.matching import is_pattern, matches

GROUPS_S: Final = 1.0  # interval at which offsets are carried
BUSY_SHARE: Final = 0.1  # share of the time that requests about groups may take, if there are many groups
FINAL_S: Final = 2.0  # time to carry the last offsets of a cut-over, before clients may write here
PAUSE_MAX_S: Final = 30.0
REPORTED_BYTES_MAX: Final = 256 * 1024  # bytes of the groups in one report
ERROR_CHARS_MAX: Final = 300
NAME_BYTES_MAX: Final = 255
OFFSETS_MAX: Final = 100_000  # offsets of all groups of a link; a broker can have five times as many

SOURCE: Final = "source"
HERE: Final = "here"
BOTH: Final = "both"

Key = tuple[str, str]
"""Group and topic."""


@dataclass(frozen=True, slots=True)
class Carried:
    """The range in which the offsets of a topic are the same at both ends.

    Attributes:
        ends: by partition, the offset up to which records were copied; None where offsets differ.
        is_reversed: whether records are copied to the source.
    """

    ends: Sequence[int | None]
    is_reversed: bool = False


@dataclass(slots=True)
class GroupState:
    """A group on one topic, at one end of the link."""

    offsets: dict[int, int] = field(default_factory=dict)
    is_active: bool = False


async def group_states(client: WireClient, topics: Mapping[str, int], groups: Sequence[str]) -> dict[Key, GroupState]:
    """Return the groups with committed offsets in these topics, or with members.

    Args:
        topics: number of partitions by name.
        groups: names to look for, if the protocol cannot list groups.
    """
    match client:
        case PolywireClient() | KafkaClient():
            infos = await client.groups()
            active = {info.name for info in infos if info.members}
            return {
                (info.name, info.topic): GroupState(dict(info.positions), info.name in active)
                for info in infos
                if info.topic in topics
            }
        case IggyClient():
            members = {topic: await client.group_members(topic) for topic in topics}
            sizes = {(group, topic): count for topic, found in members.items() for group, count in found.items()}
        case _:
            sizes = {(group, topic): 0 for topic in topics for group in groups if not is_pattern(group)}
    if Ability.POSITIONS not in client.abilities:
        return {}
    return {key: GroupState(await _offsets(client, key, topics[key[1]]), bool(size)) for key, size in sizes.items()}


async def _offsets(client: WireClient, key: Key, count: int) -> dict[int, int]:
    """Return the offsets of a group over a protocol that has no request for all of them.

    Some of these protocols report 0 if nothing was committed.
    """
    found = {number: await client.position(*key, number) for number in range(count)}
    return {number: offset for number, offset in found.items() if offset}


def can_list_groups(client: WireClient) -> bool:
    return isinstance(client, PolywireClient | KafkaClient | IggyClient)


async def matching_groups(source: WireClient, topics: Mapping[str, int], patterns: Sequence[str]) -> list[str]:
    """Return the groups of the source that match. Raises Missing(GROUP_MISSING) for an unknown name."""
    if not patterns or Ability.POSITIONS not in source.abilities:
        return []
    found = await group_states(source, topics, patterns)
    known = sorted({group for (group, _), state in found.items() if state.offsets or can_list_groups(source)})
    for pattern in patterns:
        if not is_pattern(pattern) and pattern not in known:
            raise missing(ErrorCode.GROUP_MISSING, "group", pattern, known, facts="end=source")
    return [group for group in known if any(matches(pattern, group) for pattern in patterns)]


def _first(groups: Sequence[GroupReport]) -> Iterator[GroupReport]:
    """Yield as many groups as a report has room for."""
    size = 0
    for group in groups:
        size += len(msgspec.json.encode(group))
        if size > REPORTED_BYTES_MAX:
            return
        yield group


class GroupSync:
    """The groups of one link."""

    def __init__(
        self,
        source: str,
        patterns: Sequence[str],
        target: PolywireClient,
        carried: Callable[[], Mapping[str, Carried]],
        report: Callable[[tuple[GroupReport, ...], str], None],
    ) -> None:
        """Prepare to carry offsets.

        Args:
            source: URL of the source.
            patterns: names and patterns of groups.
            carried: returns the topics, and up to which offsets they are copied.
            report: called with the groups, and the reason if they could not be carried.
        """
        self._url: Final = source
        self._patterns: Final = patterns
        self._target: Final = target
        self._carried: Final = carried
        self._report: Final = report
        self._last_active: dict[Key, str] = {}
        # offsets at the last comparison, by end, group, topic and partition, to detect resets
        self._seen: dict[tuple[str, Key, int], int] = {}
        self._due: Final = asyncio.Event()
        self._done: asyncio.Future[None] | None = None
        self._groups: tuple[GroupReport, ...] = ()

    async def run(self) -> None:
        """Carry offsets until the task is cancelled. Raises Unavailable if the broker is lost."""
        pause_s = 0.0
        while True:
            try:
                async with connected(self._url) as source:
                    pause_s = 0.0
                    await self._carry_over(source)
            except (BrokerError, PeerError, OSError, MemoryError) as error:
                await self._target.ping()
                self._report(self._groups, getattr(error, "message", "") or str(error) or type(error).__name__)
                self._finish()
                pause_s = min(max(GROUPS_S, 2 * pause_s), PAUSE_MAX_S)
                await self._wait(pause_s)

    async def _carry_over(self, source: WireClient) -> None:
        while True:
            begun = time.monotonic()
            await self.carry_once(source)
            await self._wait(max(GROUPS_S, (time.monotonic() - begun) / BUSY_SHARE))

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._due.wait()

    async def carry_now(self) -> None:
        """Carry offsets now, and wait until it is done, but only for a limited time."""
        done = self._done = self._done or asyncio.get_running_loop().create_future()
        self._due.set()
        await asyncio.wait([done], timeout=FINAL_S)

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
        self._done = None

    async def carry_once(self, source: WireClient) -> None:
        self._due.clear()
        waiting = self._done
        carried = self._carried()
        topics = {topic: len(copy.ends) for topic, copy in carried.items()}
        here = await group_states(self._target, topics, ())
        there = await group_states(source, topics, self._patterns)
        count = sum([len(state.offsets) for state in there.values()])
        if count > OFFSETS_MAX:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"groups have too many offsets: create the link with --groups offsets={count} limit={OFFSETS_MAX}",
            )
        found: list[GroupReport] = []
        seen: dict[tuple[str, Key, int], int] = {}
        for key in sorted(key for key in there.keys() | here.keys() if self._is_chosen(key[0])):
            theirs, ours = there.get(key, GroupState()), here.get(key, GroupState())
            found.append(await self._carry(source, key, theirs, ours, carried[key[1]]))
            for end, state in ((SOURCE, theirs), (HERE, ours)):
                seen.update({(end, key, number): offset for number, offset in state.offsets.items()})
        self._seen = seen
        self._last_active = {key: end for key, end in self._last_active.items() if key in there or key in here}
        self._groups = tuple(_first(found))
        self._report(self._groups, "")
        if waiting is self._done:  # a request that came in the meantime waits for the next comparison
            self._finish()

    def _is_chosen(self, group: str) -> bool:
        is_name = 0 < len(group.encode("utf-8", "replace")) <= NAME_BYTES_MAX
        return is_name and any(matches(pattern, group) for pattern in self._patterns)

    async def _carry(
        self, source: WireClient, key: Key, theirs: GroupState, ours: GroupState, copy: Carried
    ) -> GroupReport:
        """Carry the offsets of one group on one topic."""
        group, topic = key
        active = BOTH if theirs.is_active and ours.is_active else ""
        active = active or (SOURCE if theirs.is_active else HERE if ours.is_active else "")
        error, skipped = "", 0
        if active in (SOURCE, HERE):
            self._last_active[key] = active
        if active == BOTH:
            error = "the group has members at both ends: stop those of one end"
        else:
            ends, last = copy.ends, self._last_active.get(key, HERE if copy.is_reversed else SOURCE)
            is_here = last == HERE and (copy.is_reversed or bool(theirs.offsets))
            end, client = (HERE, source) if is_here else (SOURCE, self._target)
            leading, following = (ours, theirs) if is_here else (theirs, ours)
            skipped = len([number for number in leading.offsets if self._end(ends, number) is None])
            try:
                await self._move(client, end, key, leading, following, ends)
            except Unavailable:
                raise
            except BrokerError as failure:  # members have joined in the meantime, for example
                error = failure.message[:ERROR_CHARS_MAX]
        return GroupReport(
            group, topic, sum(theirs.offsets.values()), sum(ours.offsets.values()), active, skipped, error
        )

    async def _move(
        self,
        client: WireClient,
        end: str,
        key: Key,
        leading: GroupState,
        following: GroupState,
        ends: Sequence[int | None],
    ) -> None:
        """Commit the offsets that a group has at the end ``end`` at the other end."""
        for number, offset in sorted(leading.offsets.items()):
            limit = self._end(ends, number)
            if limit is None:
                continue
            new, old = min(offset, limit), following.offsets.get(number)
            was_reset = offset < self._seen.get((end, key, number), 0)
            if old is not None and (new == old or (new < old and not was_reset)):
                continue
            if new == 0 and Ability.GENERATIONS not in client.abilities:
                continue  # Iggy stores the last consumed offset: a group without one also begins at 0
            await client.commit(*key, number, new)
            following.offsets[number] = new

    @staticmethod
    def _end(ends: Sequence[int | None], number: int) -> int | None:
        return ends[number] if number < len(ends) else None
