"""Seal one full journal file (slot): write its content into segments, then free it (decision 0102).

A slot is freed only after the journal on disk lists its segments and a snapshot. A slot may contain batches of tens of
thousands of partitions, so little of the work may run on the event loop. The loop collects the content, and a thread
plans and writes the segments. Then the loop adds them to the partitions in short steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Final

import msgspec

from polywire.errors import BrokerError
from polywire.log.journal.snapshot import Snapshot, put_snapshot
from polywire.log.journal.staging import StagedBatch
from polywire.log.partition.partition import PUBLISHED, PUBLISHED_SHIFT, FilePartition
from polywire.log.partition.reader import PublishedBatch, Reader
from polywire.log.partition.tail_index import spans_of
from polywire.log.segments.format import NO_TOKEN, SegmentInfo, SegmentRun
from polywire.log.segments.segment_set import Sealed, SegmentSet, segment_name
from polywire.log.segments.writer import Part, RunSource, plan_blobs, write_segment
from polywire.log.state import Contents, Image, LogState
from polywire.store.base import Store
from polywire.types import Buffer

INSTALLED_MAX: Final = 1000  # runs or staged batches installed before the event loop may do other work: takes some 3 ms

Key = tuple[int, bytes]
"""(partition, token); the token is empty except for staged batches."""


class CollectedSlots(msgspec.Struct, frozen=True):
    """Content of full journal files, collected on the event loop and written to segments by a thread.

    Attributes:
        views: content of the files, by serial.
        image: copy of the log's state at the end of the files.
        partitions: partitions with batches in the files.
        ends: end of each partition's entries in the next three arrays.
        slots: journal file of each batch.
        positions: position of each batch.
        lengths: length of each batch.
        segments: older segments, which the snapshot lists besides the new ones.
        clean: offset up to which each partition is compacted.
        strict: raise Busy if the disk cannot read a published batch, so that the whole job is retried. Otherwise the
            batch is stored as zeros, and its records stay damaged.
    """

    reader: Reader
    views: Mapping[int, Buffer]
    listed: SegmentSet
    image: Image
    serials: Sequence[int]
    partitions: Sequence[FilePartition]
    ends: array[int]
    slots: array[int]
    positions: array[int]
    lengths: array[int]
    segments: Sequence[int]
    clean: Mapping[int, int]
    strict: bool


class Plan(msgspec.Struct, frozen=True):
    """Content of the new segments.

    Attributes:
        blobs: for each segment, the partitions and tokens whose batches it contains.
        staged: batches of each token, in order.
    """

    blobs: Sequence[Sequence[RunSource]]
    staged: Mapping[Key, Sequence[StagedBatch]]


class Written(msgspec.Struct, frozen=True):
    """The segments written for a plan.

    Attributes:
        numbers: numbers of the segments.
        infos: footers of the segments.
    """

    plan: Plan
    numbers: Sequence[int]
    infos: Sequence[SegmentInfo]


class _Parts(Sequence[Part]):
    """One partition's batches to write to a segment.

    The body of a published batch is read only on access, because all bodies together may exceed memory.
    """

    def __init__(self, reader: Reader, parts: Sequence[Part | PublishedBatch], *, strict: bool) -> None:
        self._reader = reader
        self._parts = parts
        self._strict = strict

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        part = self._parts[index]
        return _whole(self._reader.join(part, strict=self._strict)) if isinstance(part, PublishedBatch) else part

    def __iter__(self) -> Iterator[Part]:
        for index in range(len(self._parts)):
            yield self[index]


def collect_slots(
    state: LogState, contents: Mapping[int, Contents], views: Mapping[int, Buffer], image: Image, *, strict: bool
) -> CollectedSlots:
    """Collect the content of full journal files, so that a thread can write it to segments.

    Args:
        contents: partitions and unpublished batches in each file, by serial, oldest first.
        views: content of the files, by serial.
        image: copy of the log's state at the end of the files.
        strict: raise Busy later if the disk cannot read a published batch.
    """
    partitions = list(dict.fromkeys(partition for content in contents.values() for partition in content.partitions))
    serials = list(contents)
    found = spans_of(
        [partition.tail for partition in partitions], min(serials, default=0), max(serials, default=0), PUBLISHED
    )
    segments = state.segments
    return CollectedSlots(
        state.reader, views, segments, image, serials, partitions, *found, segments.numbers(), dict(state.clean), strict
    )


# In the sealer's thread


def plan_slots(taken: CollectedSlots) -> Plan:
    sources: dict[Key, RunSource] = {}
    sizes: dict[Key, int] = {}
    start = 0
    for partition, end in zip(taken.partitions, taken.ends, strict=True):
        parts, size = _parts_of(taken, start, end)
        start = end
        if size:
            key = (partition.incarnation, NO_TOKEN)
            sources[key] = RunSource(partition.incarnation, parts, compression=partition.compression)
            sizes[key] = size
    staged = _staged_runs(taken)
    for key, batches in staged.items():
        parts = [Part(taken.views[batch.serial], _numbers(batch.position), _numbers(batch.length)) for batch in batches]
        sources[key] = RunSource(key[0], parts, key[1])
        sizes[key] = sum(batch.length for batch in batches)
    blobs = [[sources[key] for key in keys] for keys in plan_blobs(sizes)]
    return Plan(blobs, staged)


def _parts_of(taken: CollectedSlots, start: int, end: int) -> tuple[Sequence[Part], int]:
    """Return batches ``start`` to ``end``, which belong to one partition, and their total size."""
    parts: list[Part | PublishedBatch] = []
    size, at, has_published = 0, start, False
    for slot, entries in groupby(taken.slots[start:end]):
        stop = at + len(list(entries))
        positions, lengths = taken.positions[at:stop], taken.lengths[at:stop]
        at = stop
        if slot != PUBLISHED:
            parts.append(Part(taken.views[slot], positions, lengths))
            size += sum(lengths)
            continue
        has_published = True
        for position, length in zip(positions, lengths, strict=True):
            published = taken.reader.published.get(position >> PUBLISHED_SHIFT)
            if published is None:  # trimmed in the meantime, like everything before it
                parts, size = [], 0
            elif published.serial in taken.serials:
                parts.append(published)
                size += length
            else:
                assert published.serial > taken.serials[-1], "data in older slots was sealed before"
                return _Parts(taken.reader, parts, strict=taken.strict), size
    return _Parts(taken.reader, parts, strict=taken.strict) if has_published else parts, size  # type: ignore[return-value]


def _staged_runs(taken: CollectedSlots) -> dict[Key, list[StagedBatch]]:
    """Return the batches that were still unpublished at the end of these journal files."""
    found: dict[Key, list[StagedBatch]] = {}
    for staged in taken.image.staged:
        for batch in staged.batches:
            if batch.needed and batch.location < 0 and batch.serial in taken.serials:
                found.setdefault((batch.incarnation, staged.token), []).append(batch)
    return found


def snapshot_of(
    taken: CollectedSlots, plan: Plan, numbers: Sequence[int], broker: tuple[Sequence[bytes], int]
) -> Snapshot:
    """Return the snapshot to store with the new segments.

    Args:
        numbers: numbers of the new segments.
        broker: pieces of the broker's state, and the last journal write that the state depends on.
    """
    image = taken.image
    expiries = {staged.token: staged.expires_at_us for staged in image.staged}
    tokens: set[tuple[bytes, int, int]] = set()
    for staged in image.staged:
        for batch in staged.batches:
            sealed = taken.listed.by_location.get(batch.location) if batch.needed and batch.location >= 0 else None
            if sealed is not None:  # otherwise it is no longer needed
                tokens.add((staged.token, staged.expires_at_us, sealed.number))
    for number, runs in zip(numbers, plan.blobs, strict=True):
        tokens.update((run.token, expiries[run.token], number) for run in runs if run.token)
    return Snapshot(
        sequence=image.sequence,
        broker_sequence=broker[1],
        partitions=b"".join(image.partitions),
        segments=[*taken.segments, *numbers],
        tokens=sorted(tokens),
        broker=b"".join(broker[0]),
        clean=taken.clean,
    )


def seal(
    store: Store,
    taken: CollectedSlots,
    next_number: Callable[[], int],
    snapshot_name: str,
    broker: tuple[Sequence[bytes], int],
) -> Written:
    """Write full journal files to segments, and the snapshot that lists these.

    No other caller may use ``next_number`` meanwhile. If this raises an error of the store, nothing is left behind.
    """
    plan = plan_slots(taken)
    numbers = [next_number() for _ in plan.blobs]
    names = [segment_name(number) for number in numbers]
    try:
        infos = [write_segment(store, name, runs) for name, runs in zip(names, plan.blobs, strict=True)]
        put_snapshot(store, snapshot_name, snapshot_of(taken, plan, numbers, broker))
    except BrokerError:
        for name in (*names, snapshot_name):
            with suppress(BrokerError):
                store.delete(name)
        raise
    return Written(plan, numbers, infos)


def seal_all(
    store: Store, state: LogState, views: Mapping[int, Buffer], image: Image, broker: bytes, snapshot_name: str
) -> Written:
    """Write everything that is in no segment into segments, and the snapshot that lists them, at a start or a stop.

    Args:
        views: content of the journal files, by serial.
        image: copy of the log's state at the end of the journal.
        broker: the broker's state at the end of the journal.

    Raises:
        Busy: the disk is full, or cannot read a batch yet. No file is left behind.
        Corrupt: a batch is damaged. No file is left behind.
    """
    taken = collect_slots(state, state.contents, views, image, strict=True)
    return seal(store, taken, state.segments.next_number, snapshot_name, ([broker], image.sequence))


# On the loop


def install(state: LogState, written: Written, sealed: Sequence[Sealed]) -> Iterator[None]:
    """Use these segments for reads from now on, instead of the journal files.

    Yields so that other work can run on the event loop. At any moment readers find each record exactly once.
    """
    for item in sealed:
        item.live += 1  # keeps the segment alive until all runs are assigned
    count = 0
    for info, item in zip(written.infos, sealed, strict=True):
        for run in info:
            if run.token:
                yield from _locate_staged(written.plan.staged[run.partition, run.token], item, run.position)
            else:
                _install_run(state, run, item)
            count += 1
            if count % INSTALLED_MAX == 0:
                yield
    for item in sealed:
        item.live -= 1
    state.segments.settle(sealed)


def _install_run(state: LogState, run: SegmentRun, item: Sealed) -> None:
    partition = state.partitions.get(run.partition)
    if partition is None:
        item.lost_partition = True
        return
    if run.next_offset > partition.first_offset:
        partition.add_run(item.location, run.first_offset, run.size, run.first_address, run.first_time_us)
        item.keep(run.size, run.first_time_us)
    state.seal_tail(partition, run.next_offset)


def _locate_staged(batches: Sequence[StagedBatch], item: Sealed, position: int) -> Iterator[None]:
    for count, batch in enumerate(batches, 1):
        if batch.needed:
            batch.position, batch.location = position, item.location
            item.keep_staged(batch.length)
        position += batch.length
        if count % INSTALLED_MAX == 0:
            yield


def _numbers(number: int) -> array[int]:
    return array("q", (number,))


def _whole(batch: Buffer) -> Part:
    return Part(batch, _numbers(0), _numbers(len(batch)))
