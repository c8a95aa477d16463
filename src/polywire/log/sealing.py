"""Sealing: what lies in full slots becomes segments, and the slots become free (decision 0002).

Promises: a slot is freed only when its segments and a snapshot are named by a group that is on the disk; planning and installing happen on
the loop, everything slow in the sealer's thread. Must not know: how groups are written.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from polywire.errors import BrokerError
from polywire.log.history import Contents, History, Image
from polywire.log.partition import OVERLAY, OVERLAY_SHIFT, FilePartition
from polywire.log.reading import Overlay, Reader
from polywire.log.segment import NO_TOKEN, SegmentInfo
from polywire.log.segment_write import Part, RunSource, plan_blobs, write_segment
from polywire.log.segments import Sealed, segment_name
from polywire.log.snapshot import Snapshot, put_snapshot
from polywire.log.staging import StagedBatch
from polywire.store.base import Store
from polywire.types import Buffer

Key = tuple[int, bytes]
"""(partition, token or nothing)"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes into segments: the runs, blob by blob; and which staged batches are in a token's run, in order."""

    blobs: Sequence[Sequence[RunSource]]
    staged: Mapping[Key, Sequence[StagedBatch]]


class _Parts(Sequence[Part]):
    """Parts of which the joined ones are made when they are asked for: staged bodies may be larger than memory."""

    def __init__(self, reader: Reader, parts: Sequence[Part | Overlay]) -> None:
        self._reader = reader
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        part = self._parts[index]
        return _whole(self._reader.join(part)) if isinstance(part, Overlay) else part

    def __iter__(self) -> Iterator[Part]:
        for index in range(len(self._parts)):
            yield self[index]


def plan_slots(history: History, contents: Mapping[int, Contents], views: Mapping[int, Buffer], image: Image) -> Plan:
    """What to seal of these slots (by serial, oldest first); ``image`` tells which tokens were staged at their end."""
    sources: dict[Key, RunSource] = {}
    sizes: dict[Key, int] = {}
    for partition in dict.fromkeys(partition for content in contents.values() for partition in content.partitions):
        source, size = _partition_run(history.reader, partition, list(contents), views)
        if size:
            sources[partition.incarnation, NO_TOKEN] = source
            sizes[partition.incarnation, NO_TOKEN] = size
    staged = _staged_runs(contents, image)
    for key, batches in staged.items():
        parts = [Part(views[batch.serial], _numbers(batch.position), _numbers(batch.length)) for batch in batches]
        sources[key] = RunSource(key[0], parts, key[1])
        sizes[key] = sum(batch.length for batch in batches)
    blobs = [[sources[key] for key in keys] for keys in plan_blobs(sizes)]
    return Plan(blobs, staged)


def _partition_run(
    reader: Reader, partition: FilePartition, serials: Sequence[int], views: Mapping[int, Buffer]
) -> tuple[RunSource, int]:
    """A partition's unsealed batches of these slots, and their bytes."""
    if partition.overlays:
        return _overlaid_run(reader, partition, serials, views)
    parts, size = [], 0
    for serial in serials:
        positions, lengths = partition.tail.spans(serial)
        if positions:
            parts.append(Part(views[serial], positions, lengths))
            size += sum(lengths)
    return RunSource(partition.incarnation, parts, compression=partition.compression), size


def _overlaid_run(
    reader: Reader, partition: FilePartition, serials: Sequence[int], views: Mapping[int, Buffer]
) -> tuple[RunSource, int]:
    """The same when some batches were published: entry by entry."""
    parts: list[Part | Overlay] = []
    size = 0
    for number in range(len(partition.tail)):
        _, position, length, serial, _, _ = partition.tail.entry(number)
        overlay = reader.overlays[position >> OVERLAY_SHIFT] if serial == OVERLAY else None
        filled = serial if overlay is None else overlay.serial
        if filled not in serials:
            assert filled > serials[-1], "what older slots held was sealed before"  # or all that follows is passed over
            break
        size += length
        last = parts[-1] if parts else None
        if overlay is not None:
            parts.append(overlay)
        elif isinstance(last, Part) and last.base is views[serial]:
            last.positions.append(position)
            last.lengths.append(length)
        else:
            parts.append(Part(views[serial], _numbers(position), _numbers(length)))
    return RunSource(partition.incarnation, _Parts(reader, parts), compression=partition.compression), size


def _staged_runs(serials: Collection[int], image: Image) -> dict[Key, list[StagedBatch]]:
    """Batches of these slots that were staged, and neither published nor abandoned, at the image's sequence."""
    found: dict[Key, list[StagedBatch]] = {}
    for token, _, batches in image.staged:
        for batch in batches:
            if batch.needed and batch.place < 0 and batch.serial in serials:
                found.setdefault((batch.incarnation, token), []).append(batch)
    return found


def snapshot_of(
    history: History, image: Image, plan: Plan, numbers: Sequence[int], broker: tuple[bytes, int]
) -> Snapshot:
    """The snapshot of an image once its plan is written under these segment numbers; ``broker`` is its state and the sequence of that."""
    expiries = {token: expires_at_us for token, expires_at_us, _ in image.staged}
    tokens = {
        (token, expires_at_us, history.segments.by_place[batch.place].number)
        for token, expires_at_us, batches in image.staged
        for batch in batches
        if batch.needed and batch.place >= 0
    }
    for number, runs in zip(numbers, plan.blobs, strict=True):
        tokens.update((run.token, expiries[run.token], number) for run in runs if run.token)
    return Snapshot(
        sequence=image.sequence,
        broker_sequence=broker[1],
        partitions=b"".join(image.partitions),
        segments=[*history.segments.numbers(), *numbers],
        tokens=sorted(tokens),
        broker=broker[0],
        clean=dict(history.clean),
    )


def write_plan(
    store: Store, plan: Plan, numbers: Sequence[int], snapshot_name: str, snapshot: Snapshot
) -> list[SegmentInfo]:
    """Write segments under their numbers, and the snapshot that lists them; for the sealer's thread.

    Raises what the store raises; then nothing is left.
    """
    names = [segment_name(number) for number in numbers]
    try:
        infos = [write_segment(store, name, runs) for name, runs in zip(names, plan.blobs, strict=True)]
        put_snapshot(store, snapshot_name, snapshot)
    except BrokerError:
        with suppress(BrokerError):
            for name in (*names, snapshot_name):
                store.delete(name)
        raise
    return infos


def install(history: History, plan: Plan, sealed: Sequence[Sealed]) -> None:
    """The segments count now: readers get these runs from them, and unsealed entries go."""
    for item in sealed:
        for run in item.segment.info:
            if run.token:
                _place_staged(plan.staged[run.partition, run.token], item, run.position)
                continue
            partition = history.partitions.get(run.partition)
            if partition is None:
                item.lost_partition = True
                continue
            if run.next_offset > partition.first_offset:
                partition.add_run(item.place, run.first_offset, run.size, run.first_address, run.first_time_us)
                item.keep(run.size, run.first_time_us)
            history.seal_tail(partition, run.next_offset)
    history.segments.settle(sealed)


def _place_staged(batches: Sequence[StagedBatch], item: Sealed, position: int) -> None:
    """Staged batches lie in a segment now."""
    for batch in batches:
        if batch.needed:
            batch.position, batch.place = position, item.place
            item.keep_staged(batch.length)
        position += batch.length


def _numbers(number: int) -> array[int]:
    return array("q", (number,))


def _whole(batch: Buffer) -> Part:
    return Part(batch, _numbers(0), _numbers(len(batch)))
