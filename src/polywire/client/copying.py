"""Copy a topic between any two protocols or brokers.

* Records of a partition are copied in order and exactly once, even if a broker or the copy itself crashes. This
  requires that no other producer writes to the target.
* Before a copy resumes, it reads the target after the last known offset. It does not write the records again that it
  finds there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from polywire.client.base import Ability, WireClient
from polywire.client.connect import connect
from polywire.client.copy_fields import Carried, carry
from polywire.client.copy_state import CopyState, PartitionProgress
from polywire.client.cursors import beyond
from polywire.client.group_names import group_names, no_such_group, no_such_topic
from polywire.client.kafka07 import Kafka07Client
from polywire.client.login import split_login
from polywire.client.places import places_of, tells_offsets
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.records.columns import Record

PAUSE_S: Final = 0.2  # pause before a failed connection is retried
# limit for records read back from the target; if there are more, another producer must have written some
DOUBTFUL_MAX: Final = 100_000
RECORDS_AT_ONCE: Final = 2_000  # records per write, which is the maximum number with an unknown outcome after a crash
_OF_RECORDS: Final = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_BATCH, ErrorCode.RECORD_TOO_LARGE})
MEMBER: Final = "polywire-copy"


@dataclass(frozen=True, slots=True)
class End:
    """One side of a copy: the URL of a broker and the full name of a topic."""

    url: str
    topic: str

    def __str__(self) -> str:
        return f"{split_login(self.url)[1]}/{self.topic}"


@dataclass(frozen=True, slots=True)
class Span:
    """The range to copy: all partitions or one, and where to begin and end, by offset or time.

    A limit that is None does not restrict the range. A copy always ends with the last record that existed when it
    began.
    """

    partition: int | None = None
    begin: int | None = None
    begin_time_us: int | None = None
    until: int | None = None
    until_time_us: int | None = None


@dataclass(slots=True)
class Outcome:
    """The result of a copy.

    It counts records that were written, were found in the target already, or were skipped. ``lost`` counts removed
    fields by name. ``remarks`` has other differences.
    """

    written: int = 0
    found: int = 0
    skipped: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    remarks: dict[str, None] = field(default_factory=dict)


class Copy:
    """One copy of a topic.

    Its position at the source advances only over records that are stored in the target or skipped.
    """

    def __init__(
        self,
        source: End,
        target: End,
        state: CopyState,
        *,
        span: Span,
        skip: bool = False,
        patience_s: float = 60.0,
        on_progress: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        """Prepare a copy.

        Args:
            source: the topic to read.
            target: the topic to write.
            state: progress so far.
            span: the range to copy.
            skip: skip records that the target does not support, instead of failing.
            patience_s: how long to retry a broker that is not reachable, in seconds.
            on_progress: called after each write.
        """
        self.source: Final = source
        self.target: Final = target
        self.state: Final = state
        self.span: Final = span
        self.skip: Final = skip
        self._patience_s: Final = patience_s
        self._on_progress: Final = on_progress
        self.stops: dict[int, int] = {}
        self._connected = False
        self._moved_at = time.monotonic()
        self.outcome: Final = Outcome()

    async def run(self) -> None:
        """Copy to the end of the range.

        Raises Unavailable if a broker is not reachable for ``patience_s``, Invalid for a record that the target does
        not support, Missing, and Denied.
        """
        while True:
            try:
                async with connected(self.source.url) as source, connected(self.target.url) as target:
                    self._connected = True
                    await _Session(self, source, target).copy()
                    return
            except (Unavailable, Busy):  # retry from the last known position
                if not self._connected or time.monotonic() - self._moved_at > self._patience_s:
                    raise
            await asyncio.sleep(PAUSE_S)

    def moved(self) -> None:
        """Report progress, and restart the time limit for retries."""
        self._moved_at = time.monotonic()
        self._on_progress(self.outcome)

    async def check_groups(self, groups: Sequence[str]) -> None:
        """Check that the groups have committed offsets at the source, before anything is copied.

        Raises Missing(GROUP_MISSING) for a group that has none, and Missing(TOPIC_MISSING).
        """
        if not groups:
            return
        async with connected(self.source.url) as source:
            count = await _partition_count(source, self.source, "source")
            for group in groups:
                await self._positions(source, group, range(count))

    async def _positions(self, source: WireClient, group: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return a group's committed offsets at the source. Raises Missing(GROUP_MISSING)."""
        topic = self.source.topic
        found = {number: await source.position(group, topic, number) for number in partitions}
        # Some protocols report 0 for a group that does not exist; only the list of groups shows that it is missing.
        if not any(found.values()) and group not in (await group_names(source, topic) or ()):
            raise await no_such_group(source, group, topic)
        return {number: position for number, position in found.items() if position is not None}

    async def commit_positions(self, groups: Sequence[str]) -> list[tuple[str, int, int, int]]:
        """Commit the groups' offsets at the target, after everything is copied.

        Returns (group, partition, source offset, target offset) for each. Raises Invalid if offsets cannot be
        translated:
        a protocol has no offsets, or records changed their partition.
        """
        moved: list[tuple[str, int, int, int]] = []
        async with connected(self.source.url) as source, connected(self.target.url) as target:
            if not (tells_offsets(source) and tells_offsets(target) and await _keeps(source, target, self)):
                raise Invalid(ErrorCode.INVALID_REQUEST, "committed offsets cannot be translated between these topics")
            for group in groups:
                for number, position in (await self._positions(source, group, sorted(self.state.partitions))).items():
                    offset = self.state.partition(number).target_of(position)
                    await _commit(target, group, self.target.topic, number, offset)
                    moved.append((group, number, position, offset))
        return moved


async def _commit(target: WireClient, group: str, topic: str, partition: int, offset: int) -> None:
    """Commit an offset, and create the group first if the target's protocol requires it."""
    if offset == 0 and Ability.GENERATIONS not in target.abilities:
        return  # Iggy stores the last consumed offset: a group without one also begins at 0
    try:
        await target.commit(group, topic, partition, offset)
    except Missing as error:
        if error.code is not ErrorCode.GROUP_MISSING:
            raise
        membership = await target.join(group, topic, MEMBER)
        await target.leave(group, topic, MEMBER, membership.generation)
        await target.commit(group, topic, partition, offset)


async def _keeps(source: WireClient, target: WireClient, copy: Copy) -> bool:
    """Return whether each record is copied to the partition with the same number."""
    if Ability.CHOOSE_PARTITION not in target.abilities:
        return False
    from_count = await places_of(source, copy.source.topic).partition_count()
    return await places_of(target, copy.target.topic).partition_count() >= from_count


@dataclass(frozen=True, slots=True)
class _Found:
    """A record that is already in the target: its partition and offset, and the offset after it."""

    partition: int
    offset: int
    behind: int


class _Session:
    """A copy over one pair of connections. After a lost connection, a new session continues."""

    def __init__(self, copy: Copy, source: WireClient, target: WireClient) -> None:
        self._copy: Final = copy
        self._state: Final = copy.state
        self._source: Final = source
        self._target: Final = target
        self._from: Final = places_of(source, copy.source.topic)
        self._to: Final = places_of(target, copy.target.topic)
        self._carried: Final = Carried.by(target)
        self._there: defaultdict[tuple[int, bytes], deque[_Found]] = defaultdict(deque)
        self._there_ends: dict[int, int] = {}
        self._doubtful = 0
        self._looked_at = self._look_at_most = 0
        self._keeps = self._notes = False

    async def copy(self) -> None:
        count = await _partition_count(self._source, self._copy.source, "source")
        numbers = [number for number in range(count) if self._copy.span.partition in (None, number)]
        if not numbers:
            facts = f"partition={self._copy.span.partition} topic={self._copy.source.topic!r} end=source known=0..{count - 1}"
            raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition {facts}")
        await self._prepare_target(count)
        for number in numbers:
            await self._copy_partition(number, await self._stop(number))
        if self._doubtful and self._copy.span.partition is None:
            self._look_no_more()
            self._state.save()

    async def _prepare_target(self, count: int) -> None:
        """Create the topic if it is missing, and read back what an earlier session may have written."""
        remarks = self._copy.outcome.remarks
        try:
            there = await self._to.partition_count()
        except Missing:
            if Ability.CREATE_TOPIC not in self._target.abilities:
                raise await no_such_topic(self._target, self._copy.target.topic, facts="end=target") from None
            with suppress(Conflict):  # another client created it, or a broker crashed after it did
                await self._target.create_topic(self._copy.target.topic, count)
            there = await self._to.partition_count()
        self._keeps = Ability.CHOOSE_PARTITION in self._target.abilities and there >= count
        if not self._keeps:
            remarks["the target chooses partitions by key"] = None
        self._notes = self._keeps and tells_offsets(self._source) and tells_offsets(self._target)
        if Ability.KEYS_READ not in self._source.abilities:
            remarks["the source protocol does not expose keys, so keys are not copied"] = None
        if not self._state.ends:
            self._state.ends = {number: await self._to.end(number) for number in range(there)}
            self._state.save()
        await self._look_back()

    async def _look_back(self) -> None:
        """Read the target after the last known offset, to find records that were written without an acknowledgement."""
        self._there.clear()
        self._doubtful = self._looked_at = 0
        for number, end in sorted(self._state.ends.items()):
            place, following = -1, end
            while place < following:
                records, following = await self._to.read(number, place := following)
                behind = [record.offset for record in records[1:]] + [following]
                for record, after in zip(records, behind, strict=False):
                    found = _Found(number, record.offset, after)
                    self._there[number if self._keeps else -1, _digest(record)].append(found)
                self._doubtful += len(records)
                if self._doubtful > DOUBTFUL_MAX:
                    facts = f"topic={self._copy.target.topic!r} partition={number}"
                    raise Conflict(ErrorCode.TOPIC_REPLACED, f"another producer writes to the target {facts}")
            self._there_ends[number] = following
        self._look_at_most = max(RECORDS_AT_ONCE, self._doubtful)

    def _look_no_more(self) -> None:
        """Stop matching records. Another producer must have written the unmatched ones."""
        if self._doubtful > 0:
            self._copy.outcome.remarks[f"another producer writes to the target records={self._doubtful}"] = None
        self._doubtful = 0
        self._there.clear()
        self._state.ends |= self._there_ends

    async def _stop(self, number: int) -> int:
        """Return the offset at which to stop in a partition. It is determined once."""
        if number not in self._copy.stops:
            span, end = self._copy.span, await self._from.end(number)
            if span.until_time_us is not None:
                end = await self._source.offset_at(self._copy.source.topic, number, span.until_time_us)
            self._copy.stops[number] = end if span.until is None else min(end, span.until)
        return self._copy.stops[number]

    async def _begin(self, number: int) -> int:
        span, first = self._copy.span, await self._from.first(number)
        if span.begin_time_us is not None:
            return await self._source.offset_at(self._copy.source.topic, number, span.begin_time_us)
        return first if span.begin is None else max(first, span.begin)

    async def _copy_partition(self, number: int, stop: int) -> None:
        progress = self._state.partition(number)
        place = await self._begin(number) if progress.place is None else progress.place
        first = await self._from.first(number)
        if place < first:
            self._copy.outcome.remarks[f"retention was faster partition={number} offsets={first - place}"] = None
            place = first
        while place < stop:
            records, following = await self._from.read(number, place)
            if following <= place:  # retention may have removed the remaining records
                following = beyond(place, await self._from.first(number), "offset")
                self._copy.outcome.remarks[f"retention was faster partition={number} offsets={following - place}"] = (
                    None
                )
            chosen = [record for record in records if record.offset < stop]
            if len(chosen) < len(records):
                following = records[len(chosen)].offset
            at = 0
            while at < len(chosen):
                end = _part_end(chosen, at)
                await self._write(number, progress, chosen[at:end])
                if self._doubtful and self._looked_at >= self._look_at_most:
                    self._look_no_more()
                self._pass(progress, chosen[end].offset if end < len(chosen) else following)
                at = end
            place = following
        self._pass(progress, place)

    def _pass(self, progress: PartitionProgress, place: int) -> None:
        progress.place = place
        self._state.save()
        self._copy.moved()

    async def _write(self, number: int, progress: PartitionProgress, records: Sequence[Record]) -> None:
        """Write the records that the target does not have yet, in one batch.

        If it is rejected, write them one at a time.
        """
        lost: Counter[str] = Counter()
        carried = [carry(record, self._carried, lost) for record in records]
        try:
            await self._append(number, progress, records, carried)
        except Invalid as error:
            if error.code not in _OF_RECORDS:
                raise
            await self._look_back()  # some of them may have been stored
            for record, prepared in zip(records, carried, strict=True):
                try:
                    await self._append(number, progress, [record], [prepared])
                except Invalid as refused:
                    self._refuse(number, record, refused)
        self._copy.outcome.lost += lost

    def _refuse(self, number: int, record: Record, error: BrokerError) -> None:
        if not self._copy.skip:
            facts = f"partition={number} offset={record.offset}"
            raise Invalid(
                error.code, f"a record cannot be copied (use --skip to skip such records): {error.message} {facts}"
            )
        self._copy.outcome.skipped += 1

    async def _append(
        self, number: int, progress: PartitionProgress, records: Sequence[Record], carried: Sequence[Record]
    ) -> None:
        """Write the records that are not in the target yet, and record the target offset of each.

        Raises the errors of ``produce``.
        """
        found = self._find(number, carried)
        missing = [row for row, copied in enumerate(found) if copied is None]
        offsets = [-1 if copied is None else copied.offset for copied in found]
        ends: dict[int, int] = {copied.partition: copied.behind for copied in found if copied is not None}
        if missing:
            sent = [carried[row] for row in missing]
            chosen = number if self._keeps else None
            for row, at in zip(
                missing, await self._target.produce(self._copy.target.topic, sent, partition=chosen), strict=True
            ):
                offsets[row] = at.offset
                ends[at.partition] = at.offset + 1
            if isinstance(self._target, Kafka07Client):  # its positions are byte addresses
                ends = {touched: await self._to.end(touched) for touched in ends}
        self._state.ends |= ends
        self._state.records += len(records)
        self._copy.outcome.written += len(missing)
        self._copy.outcome.found += len(records) - len(missing)
        for record, offset in zip(records, offsets, strict=True):
            if self._notes and offset >= 0:
                progress.note(record.offset, offset)

    def _find(self, number: int, carried: Sequence[Record]) -> list[_Found | None]:
        """Return for each record where it is in the target, or None if it is not there."""
        found: list[_Found | None] = []
        for record in carried:
            known = self._there.get((number if self._keeps else -1, _digest(record))) if self._doubtful else None
            found.append(known.popleft() if known else None)
            self._doubtful -= found[-1] is not None
        self._looked_at += len(carried)
        return found


async def _partition_count(client: WireClient, end: End, role: str) -> int:
    """Return the number of partitions.

    Raises Missing(TOPIC_MISSING), whose message has the side (source or target), the topic, and existing topics.
    """
    try:
        return await places_of(client, end.topic).partition_count()
    except Missing as error:
        if error.code is not ErrorCode.TOPIC_MISSING:
            raise
        raise await no_such_topic(client, end.topic, facts=f"end={role}") from None


def _part_end(records: Sequence[Record], at: int) -> int:
    """Return the end of the next write.

    Records in the same Kafka 0.7 wrapper message have one offset and stay together.
    """
    end = min(at + RECORDS_AT_ONCE, len(records))
    while end < len(records) and records[end].offset == records[end - 1].offset:
        end += 1
    return end


def _digest(record: Record) -> bytes:
    return blake2b(record.value or b"", digest_size=16).digest()


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[WireClient, None]:
    """Connect, and close the client at the end of the ``with`` block."""
    client = await connect(url)
    try:
        yield client
    finally:
        await client.close()
