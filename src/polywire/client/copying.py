"""Copy a topic between any two protocols or brokers.

* Records of a partition are copied in order and exactly once, even if a broker or the copy itself crashes. This
  requires that no other producer writes to the target.
* Before a copy resumes, it reads the target after the last known offset. Records that it finds there are not written
  again.
* The state file is replaced atomically: after a crash, it has the latest or the previous state. A state file that
  belongs to another copy is rejected.
* Fields that the target protocol does not support are removed and counted. Values do not change, except that a null
  value becomes an empty one if the target protocol has no null values.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self

from polywire.client.address import split_login
from polywire.client.base import Ability, WireClient
from polywire.client.connect import connect
from polywire.client.failures import beyond
from polywire.client.group_names import group_names, no_such_group, no_such_topic
from polywire.client.kafka import KafkaClient
from polywire.client.kafka07 import Kafka07Client
from polywire.client.partition_reader import reader_of, uses_offsets
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.records.columns import Header, HeaderKind, Record

MILLISECOND_US: Final = 1000
_PLAIN_KINDS: Final = frozenset({HeaderKind.RAW, HeaderKind.STRING, HeaderKind.NULL})
VERSION: Final = 1
RUNS_MAX: Final = 10_000  # runs that are stored per partition; a topic without gaps has one run
PAUSE_S: Final = 0.2  # pause before a failed connection is retried
FOLLOW_S: Final = 0.2  # interval of searches for new records
COUNT_S: Final = 10.0  # interval of checks for new partitions
# limit for records read back from the target; if there are more, another producer must have written some
DOUBTFUL_MAX: Final = 100_000
RECORDS_AT_ONCE: Final = 2_000  # records per write, which is the maximum number with an unknown outcome after a crash
_OF_RECORDS: Final = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_BATCH, ErrorCode.RECORD_TOO_LARGE})
MEMBER: Final = "polywire-copy"


@dataclass(frozen=True, slots=True)
class StoredFields:
    """The fields of a record that a protocol stores.

    Attributes:
        keys: whether it returns keys to consumers.
        headers: whether it stores headers without loss.
        plain_headers: whether it stores header values only as bytes.
        ids: whether it stores record ids.
        times: whether it stores the producer's timestamps without loss.
        times_ms: whether it stores the producer's timestamps in milliseconds.
        events: whether it stores the fields of events.
        null_values: whether a value can be null.
    """

    keys: bool
    headers: bool
    plain_headers: bool
    ids: bool
    times: bool
    times_ms: bool
    events: bool
    null_values: bool

    @classmethod
    def by(cls, client: WireClient) -> Self:
        """Return what the client's protocol stores."""
        able, kafka = client.abilities, isinstance(client, KafkaClient)
        return cls(
            keys=Ability.KEYS_READ in able,
            headers=Ability.HEADERS in able,
            plain_headers=kafka,
            ids=Ability.IDS in able,
            times=Ability.ORIGIN_TIMES in able,
            times_ms=kafka,
            events=isinstance(client, PolywireClient),
            null_values=Ability.NULL_VALUES in able,
        )


def reduced(record: Record, target: StoredFields, lost: Counter[str]) -> Record:
    """Return the record as the target can store it. Count the removed fields in ``lost``.

    A record without a producer's timestamp gets its append time. The key is always passed on, because it chooses the
    partition even if the target does not store it.
    """
    if record.key is not None and not target.keys:
        lost["keys"] += 1
    value = record.value
    if value is None and not target.null_values:
        lost["null_values_made_empty"] += 1
        value = b""
    id_ = record.id if target.ids else None
    event = record.event if target.events else None
    lost["ids"] += id_ is not record.id
    lost["events"] += event is not record.event
    headers = _headers(record.headers, target, lost)
    time_us = _time_us(record, target, lost)
    return Record(value, record.key, headers, id=id_, event=event, origin_time_us=time_us)


def _headers(headers: tuple[Header, ...], target: StoredFields, lost: Counter[str]) -> tuple[Header, ...]:
    if not headers or target.headers:
        return headers
    if not target.plain_headers:
        lost["headers"] += 1
        return ()
    lost["kinds_of_headers"] += any(header.value_kind not in _PLAIN_KINDS for header in headers)
    return headers


def _time_us(record: Record, target: StoredFields, lost: Counter[str]) -> int | None:
    time_us = record.origin_time_us if record.origin_time_us is not None else record.append_time_us or None
    if time_us is None or target.times:
        return time_us
    if not target.times_ms:
        lost["times"] += 1
        return None
    lost["microseconds"] += bool(time_us % MILLISECOND_US)
    return time_us - time_us % MILLISECOND_US


@dataclass(slots=True)
class Run:
    """A range of offsets of the source that was copied to consecutive offsets of the target."""

    source: int
    target: int
    count: int


@dataclass(slots=True)
class PartitionProgress:
    """Progress in one partition of the source.

    Attributes:
        location: where reading continues; None before the first read.
        runs: the copied ranges of offsets, ordered by their offset in the source.
    """

    location: int | None = None
    runs: list[Run] = field(default_factory=list)

    def note(self, source: int, target: int) -> None:
        """Record that the offset ``source`` was copied to ``target``. ``source`` must be above all earlier ones."""
        last = self.runs[-1] if self.runs else None
        if last is not None and (source, target) == (last.source + last.count, last.target + last.count):
            last.count += 1
            return
        self.runs.append(Run(source, target, 1))
        if len(self.runs) > RUNS_MAX:
            # Offsets of a removed run map to an earlier run, so a group reads some records again and skips none.
            del self.runs[1::2]

    def target_of(self, offset: int) -> int:
        """Return the target offset of the first copied record at or after a source offset.

        If there is none, return the target offset after the last copied record.
        """
        at = bisect_right(self.runs, offset, key=lambda run: run.source) - 1
        if at < 0:
            return self.runs[0].target if self.runs else 0
        run = self.runs[at]
        return run.target + min(offset - run.source, run.count)


@dataclass(slots=True)
class CopyState:
    """Progress of one copy, in a file.

    Attributes:
        ends: for each partition of the target, the offset after the last record that is known to be stored.
    """

    source: str
    target: str
    partitions: dict[int, PartitionProgress] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    records: int = 0
    path: Path | None = None

    @classmethod
    def load(cls, path: Path | None, source: str, target: str) -> Self:
        """Load the state from a file. Return an empty state if ``path`` is None or the file does not exist.

        Raises Invalid(INVALID_REQUEST) if the file has another format, or is the state of another copy.
        """
        fresh = cls(source, target, path=path)
        if path is None or not path.exists():
            return fresh
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            ours = (content["version"], content["source"], content["target"]) == (VERSION, source, target)
            fresh.records = int(content["records"])
            fresh.ends = {int(number): int(end) for number, end in content["ends"].items()}
            for number, part in content["partitions"].items():
                runs = [Run(*map(int, run)) for run in part["runs"]]
                fresh.partitions[int(number)] = PartitionProgress(part["place"], runs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"file is not the state of a copy file={path} reason={error!r}"
            ) from error
        if not ours:
            facts = f"file={path} source={content['source']} target={content['target']}"
            raise Invalid(ErrorCode.INVALID_REQUEST, f"the state file belongs to another copy {facts}")
        return fresh

    def partition(self, number: int) -> PartitionProgress:
        """Return the progress in one partition of the source."""
        return self.partitions.setdefault(number, PartitionProgress())

    def save(self) -> None:
        """Replace the state file, if the copy has one."""
        if self.path is None:
            return
        partitions = {
            number: {"place": part.location, "runs": [(run.source, run.target, run.count) for run in part.runs]}
            for number, part in self.partitions.items()
        }
        header = {"version": VERSION, "source": self.source, "target": self.target, "records": self.records}
        text = json.dumps(header | {"ends": self.ends, "partitions": partitions})
        made = self.path.with_name(self.path.name + ".new")
        made.write_text(text, encoding="utf-8")
        made.replace(self.path)


@dataclass(frozen=True, slots=True)
class End:
    """The source or target of a copy: the URL of a broker and the full name of a topic."""

    url: str
    topic: str

    def __str__(self) -> str:
        return f"{split_login(self.url)[1]}/{self.topic}"


@dataclass(frozen=True, slots=True)
class Span:
    """The range to copy. None means no limit; a copy always ends with the last record that exists when it begins.

    Attributes:
        partition: the only partition to copy.
        begin: first offset.
        begin_time_us: append time of the first record.
        until: offset after the last record.
        until_time_us: append time before which to end.
    """

    partition: int | None = None
    begin: int | None = None
    begin_time_us: int | None = None
    until: int | None = None
    until_time_us: int | None = None


@dataclass(slots=True)
class Outcome:
    """The result of a copy.

    Attributes:
        written: number of records that were written.
        found: number of records that an earlier attempt had written.
        skipped: number of records that the target rejected.
        lost: number of removed fields, by name.
        remarks: other differences between source and target, in order.
        lag: offsets of the source that were not copied yet, as last seen; bytes, if the source is Kafka 0.7.
    """

    written: int = 0
    found: int = 0
    skipped: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    remarks: dict[str, None] = field(default_factory=dict)
    lag: int = 0


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
        follow: bool = False,
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
            follow: continue with new records until ``stop`` is called.
            patience_s: how long to retry a broker that is not reachable, in seconds.
            on_progress: called after each write.
        """
        self.source: Final = source
        self.target: Final = target
        self.state: Final = state
        self.span: Final = span
        self.skip: Final = skip
        self.follow: Final = follow
        self.stopping: Final = asyncio.Event()
        self._patience_s: Final = patience_s
        self._on_progress: Final = on_progress
        self.stops: dict[int, int] = {}
        self._connected = False
        self._moved_at = time.monotonic()
        self.outcome: Final = Outcome()

    def stop(self) -> None:
        """End after the current write."""
        self.stopping.set()

    async def run(self) -> None:
        """Copy all records of the range, and with ``follow`` new ones until ``stop`` is called.

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
                if self.stopping.is_set():
                    return
                if not self._connected or time.monotonic() - self._moved_at > self._patience_s:
                    raise
            await self.wait(PAUSE_S)

    async def wait(self, seconds: float) -> None:
        """Wait, but not after ``stop`` was called."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    def moved(self) -> None:
        """Report progress with ``on_progress``, and restart the time limit for retries."""
        self._moved_at = time.monotonic()
        locations = {number: progress.location for number, progress in self.state.partitions.items()}
        self.outcome.lag = sum([max(0, stop - (locations.get(number) or 0)) for number, stop in self.stops.items()])
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

        Returns (group, partition, source offset, target offset) for each. Raises Invalid if one of the protocols has no
        offsets, or if the target stores records in other partitions.
        """
        moved: list[tuple[str, int, int, int]] = []
        async with connected(self.source.url) as source, connected(self.target.url) as target:
            if not (
                uses_offsets(source) and uses_offsets(target) and await _preserves_partitions(source, target, self)
            ):
                raise Invalid(ErrorCode.INVALID_REQUEST, "committed offsets cannot be translated between these topics")
            for group in groups:
                for number, position in (await self._positions(source, group, sorted(self.state.partitions))).items():
                    offset = self.state.partition(number).target_of(position)
                    await _commit(target, group, self.target.topic, number, offset)
                    moved.append((group, number, position, offset))
        return moved


async def _commit(target: WireClient, group: str, topic: str, partition: int, offset: int) -> None:
    """Commit an offset. If the group does not exist, create it first."""
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


async def _preserves_partitions(source: WireClient, target: WireClient, copy: Copy) -> bool:
    """Return whether each record is stored in the partition with the same number as in the source."""
    if Ability.CHOOSE_PARTITION not in target.abilities:
        return False
    from_count = await reader_of(source, copy.source.topic).partition_count()
    return await reader_of(target, copy.target.topic).partition_count() >= from_count


@dataclass(frozen=True, slots=True)
class _Found:
    """A record that is already in the target.

    Attributes:
        partition: its partition.
        offset: its offset.
        behind: the offset of the record after it.
    """

    partition: int
    offset: int
    behind: int


class _Session:
    """The part of a copy over one pair of connections. After a lost connection, a new session continues the copy."""

    def __init__(self, copy: Copy, source: WireClient, target: WireClient) -> None:
        self._copy: Final = copy
        self._state: Final = copy.state
        self._source: Final = source
        self._target: Final = target
        self._from: Final = reader_of(source, copy.source.topic)
        self._to: Final = reader_of(target, copy.target.topic)
        self._target_fields: Final = StoredFields.by(target)
        # records of earlier attempts by partition and digest
        self._there: defaultdict[tuple[int, bytes], deque[_Found]] = defaultdict(deque)
        self._there_ends: dict[int, int] = {}
        self._doubtful = 0  # number of records in ``_there``
        self._searched = self._searched_max = 0
        self._preserves_partitions = self._notes = False

    async def copy(self) -> None:
        count = await _partition_count(self._source, self._copy.source, "source")
        numbers = [number for number in range(count) if self._copy.span.partition in (None, number)]
        if not numbers:
            facts = f"partition={self._copy.span.partition} topic={self._copy.source.topic!r} end=source known=0..{count - 1}"
            raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition {facts}")
        await self._prepare_target(count)
        await self._copy_all(numbers)
        if self._doubtful and self._copy.span.partition is None and not self._copy.stopping.is_set():
            self._look_no_more()
            self._state.save()
        if self._copy.follow:
            await self._follow(numbers, count)

    async def _copy_all(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            await self._copy_partition(number, await self._stop(number))

    async def _follow(self, numbers: Sequence[int], count: int) -> None:
        """Copy new records until the copy is stopped. Raises Conflict if there are new partitions."""
        counted_at = time.monotonic()
        while not self._copy.stopping.is_set():
            await self._copy.wait(FOLLOW_S)
            if time.monotonic() - counted_at >= COUNT_S:
                counted_at = time.monotonic()
                found = await self._from.partition_count()
                if found != count:
                    raise Conflict(
                        ErrorCode.TOPIC_REPLACED,
                        "the number of partitions of the source has changed (add partitions to the target, and run the "
                        f"command again) topic={self._copy.source.topic!r} before={count} now={found}",
                    )
            self._copy.stops.clear()
            for number in numbers:
                await self._stop(number)
            self._copy.moved()
            await self._copy_all(numbers)

    async def _prepare_target(self, count: int) -> None:
        """Create the topic if it is missing, and find the records that an earlier session may have written."""
        remarks = self._copy.outcome.remarks
        try:
            there = await self._to.partition_count()
        except Missing:
            if Ability.CREATE_TOPIC not in self._target.abilities:
                raise await no_such_topic(self._target, self._copy.target.topic, facts="end=target") from None
            with suppress(Conflict):  # another client created it, or a broker crashed after it did
                await self._target.create_topic(self._copy.target.topic, count)
            there = await self._to.partition_count()
        self._preserves_partitions = Ability.CHOOSE_PARTITION in self._target.abilities and there >= count
        if not self._preserves_partitions:
            remarks["the target chooses partitions by key"] = None
        self._notes = self._preserves_partitions and uses_offsets(self._source) and uses_offsets(self._target)
        if Ability.KEYS_READ not in self._source.abilities:
            remarks["the source protocol does not expose keys, so keys are not copied"] = None
        if not self._state.ends:
            self._state.ends = {number: await self._to.end(number) for number in range(there)}
            self._state.save()
        await self._look_back()

    async def _look_back(self) -> None:
        """Find records after the last known offset of the target, which an unacknowledged attempt may have written."""
        self._there.clear()
        self._doubtful = self._searched = 0
        for number, end in sorted(self._state.ends.items()):
            location, following = -1, end
            while location < following:
                records, following = await self._to.read(number, location := following)
                behind = [record.offset for record in records[1:]] + [following]
                for record, after in zip(records, behind, strict=False):
                    found = _Found(number, record.offset, after)
                    self._there[number if self._preserves_partitions else -1, _digest(record)].append(found)
                self._doubtful += len(records)
                if self._doubtful > DOUBTFUL_MAX:
                    facts = f"topic={self._copy.target.topic!r} partition={number}"
                    raise Conflict(ErrorCode.TOPIC_REPLACED, f"another producer writes to the target {facts}")
            self._there_ends[number] = following
        self._searched_max = max(RECORDS_AT_ONCE, self._doubtful)

    def _look_no_more(self) -> None:
        """Stop searching for records of an earlier attempt. Those not found were written by another producer."""
        if self._doubtful > 0:
            self._copy.outcome.remarks[f"another producer writes to the target records={self._doubtful}"] = None
        self._doubtful = 0
        self._there.clear()
        self._state.ends |= self._there_ends

    async def _stop(self, number: int) -> int:
        """Return the offset at which the copy of a partition ends. It does not change during a copy."""
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
        location = await self._begin(number) if progress.location is None else progress.location
        first = await self._from.first(number)
        if location < first:
            self._copy.outcome.remarks[
                f"retention removed records before they were copied partition={number} offsets={first - location}"
            ] = None
            location = first
        while location < stop and not self._copy.stopping.is_set():
            records, following = await self._from.read(number, location)
            if following <= location:  # retention may have removed the remaining records
                following = beyond(location, await self._from.first(number), "offset")
                self._copy.outcome.remarks[
                    f"retention removed records before they were copied partition={number} offsets={following - location}"
                ] = None
            chosen = [record for record in records if record.offset < stop]
            if len(chosen) < len(records):
                following = records[len(chosen)].offset
            at = 0
            while at < len(chosen):
                if self._copy.stopping.is_set():
                    return
                end = _part_end(chosen, at)
                await self._write(number, progress, chosen[at:end])
                if self._doubtful and self._searched >= self._searched_max:
                    self._look_no_more()
                self._pass(progress, chosen[end].offset if end < len(chosen) else following)
                at = end
            location = following
        self._pass(progress, location)

    def _pass(self, progress: PartitionProgress, location: int) -> None:
        progress.location = location
        self._state.save()
        self._copy.moved()

    async def _write(self, number: int, progress: PartitionProgress, records: Sequence[Record]) -> None:
        """Write the records that the target does not have yet, in one batch.

        If the target rejects the batch, write the records one at a time.
        """
        lost: Counter[str] = Counter()
        prepared_records = [reduced(record, self._target_fields, lost) for record in records]
        try:
            await self._append(number, progress, records, prepared_records)
        except Invalid as error:
            if error.code not in _OF_RECORDS:
                raise
            await self._look_back()  # some of them may have been stored
            for record, prepared in zip(records, prepared_records, strict=True):
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
        self, number: int, progress: PartitionProgress, records: Sequence[Record], prepared_records: Sequence[Record]
    ) -> None:
        """Write the records that an earlier attempt has not written, and note the target offset of each record.

        Raises the errors of ``produce``.
        """
        found = self._find(number, prepared_records)
        missing = [row for row, copied in enumerate(found) if copied is None]
        offsets = [-1 if copied is None else copied.offset for copied in found]
        ends: dict[int, int] = {copied.partition: copied.behind for copied in found if copied is not None}
        if missing:
            sent = [prepared_records[row] for row in missing]
            chosen = number if self._preserves_partitions else None
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

    def _find(self, number: int, prepared_records: Sequence[Record]) -> list[_Found | None]:
        """Return, for each record, the copy that an earlier attempt has written, or None."""
        found: list[_Found | None] = []
        for record in prepared_records:
            known = (
                self._there.get((number if self._preserves_partitions else -1, _digest(record)))
                if self._doubtful
                else None
            )
            found.append(known.popleft() if known else None)
            self._doubtful -= found[-1] is not None
        self._searched += len(prepared_records)
        return found


async def _partition_count(client: WireClient, end: End, role: str) -> int:
    """Return the number of partitions of a topic. ``role`` is ``source`` or ``target``.

    Raises Missing(TOPIC_MISSING) with a message that lists the existing topics.
    """
    try:
        return await reader_of(client, end.topic).partition_count()
    except Missing as error:
        if error.code is not ErrorCode.TOPIC_MISSING:
            raise
        raise await no_such_topic(client, end.topic, facts=f"end={role}") from None


def _part_end(records: Sequence[Record], at: int) -> int:
    """Return the index after the last record of the next write.

    Records in the same Kafka 0.7 wrapper message have the same offset and are written together.
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
