"""Rebuild the log's state: load a snapshot and the segments it lists, then apply all later journal groups.

Raises Corrupt if the state before the stop cannot be restored.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from polywire.errors import Corrupt, ErrorCode
from polywire.log.base import Replay
from polywire.log.journal.group import TOKEN_BYTES, Entry, EntryKind, read_directory
from polywire.log.journal.recovery import Chain, FoundGroup
from polywire.log.journal.slots import Slot
from polywire.log.journal.snapshot import Snapshot, get_snapshot
from polywire.log.journal.staging import StagedBatch
from polywire.log.journal.steps import read_sealed
from polywire.log.partition.partition import FilePartition, packed_incarnation
from polywire.log.partition.run_index import assign_runs
from polywire.log.segments.format import SegmentRun, read_info
from polywire.log.segments.segment_set import Sealed, segment_name
from polywire.log.state import Contents, Image, LogState
from polywire.records.batch import check_header, layout, read_header
from polywire.records.columns import HEADER_BYTES, Column
from polywire.records.fields import header_fields
from polywire.store.base import CHUNK_BYTES, BlobMissing, Store, aligned_buffer
from polywire.types import Buffer

_length: Final = header_fields("length")
_columns: Final = header_fields("columns")
_numbers: Final = header_fields("epoch", "base_offset", "base_address", "append_time_us", "address_span", "offset_span")
_PRODUCER_BIT: Final = 1 << Column.PRODUCER_ID
_ALL: Final = 2**63 - 1


class Player:
    """Replays a recovered journal. Each entry is applied once, in the order of the journal."""

    def __init__(self, store: Store, state: LogState, replay: Replay, chain: Chain) -> None:
        self._store = store
        self._state = state
        self._replay = replay
        self._chain = chain
        self._broker_sequence = chain.rests_on
        """Last journal write whose effect on the broker's state was restored from the snapshot."""
        self._expiries: dict[tuple[bytes, int], int] = {}
        """Expiry by token and segment; the segment is needed because a token can be used again."""
        self._published: list[bytes] = []
        self._gone = _removed_ends(chain)
        self.playing: FoundGroup | None = None
        """The journal write that is being replayed. After Corrupt was raised, the invalid one."""
        self.full: Final[list[tuple[Slot, Image]]] = []
        """Full journal files, in order, each with the state after its last journal write."""

    def play(self) -> None:
        """Replay everything. Raises Corrupt, and errors of the store."""
        if self._chain.snapshot is not None:
            try:
                self._restore(get_snapshot(self._store, self._chain.snapshot))
            except BlobMissing as missing:
                raise self._chain.missing(str(missing)) from missing
        last: FoundGroup | None = None
        for group in self._chain.groups:
            self.playing = group
            if last is not None and last.slot is not group.slot:
                self.full.append((last.slot, image_of_all(self._state, last.sequence)))
            group.slot.first, group.slot.last = group.slot.first or group.sequence, group.sequence
            contents = self._state.contents.setdefault(group.slot.serial, Contents())
            for entry in read_directory(group.slot.view, group.position):
                self._apply(group, contents, entry)
            last = group
        for partition in self._state.partitions.values():
            partition.synced_offset = partition.next_offset

    def _restore(self, snapshot: Snapshot) -> None:
        self._replay.restore(snapshot.broker)
        self._broker_sequence = snapshot.broker_sequence
        self._expiries = {(token, number): expires_at_us for token, expires_at_us, number in snapshot.tokens}
        at = 0
        while at < len(snapshot.partitions):
            partition = self._state.make(packed_incarnation(snapshot.partitions, at))
            at = partition.unpack(snapshot.partitions, at)
        for incarnation, offset in snapshot.clean.items():
            compacted = self._state.partitions.get(incarnation)
            if compacted is not None:  # a snapshot may list partitions that were dropped later
                self._state.cleaned(compacted, offset)
        new, removed = self._listed_segments()
        self._assign_runs(sorted({*snapshot.segments, *new} - removed))

    def _listed_segments(self) -> tuple[set[int], set[int]]:
        """Return the segments that the journal adds after the snapshot, and those that it removes."""
        new: set[int] = set()
        removed: set[int] = set()
        for group in self._chain.groups:
            entries = read_directory(group.slot.view, group.position) if group.kinds & 1 << EntryKind.SEALED else ()
            for entry in entries:
                if entry.kind == EntryKind.SEALED:
                    content = group.slot.view[entry.position : entry.position + entry.length]
                    named = read_sealed(content)
                    new.update(named[0])
                    removed.update(named[1])
        return new, removed

    def _assign_runs(self, numbers: Sequence[int]) -> None:
        """Assign the batches in these segments to their partitions in offset order, and unpublished batches to their
        tokens.
        """
        partitions = sorted(self._state.partitions.values(), key=lambda partition: partition.incarnation)
        incarnations = array("Q", (partition.incarnation for partition in partitions))
        kept = array("q", map(self._first_retained, partitions))
        ends, sizes = array("q", bytes(8 * len(partitions))), array("q", bytes(8 * len(partitions)))
        ends[:] = array("q", (-1 for _ in partitions))
        indexes = [partition.runs for partition in partitions]
        breaks: list[tuple[int, int, int]] = []
        sealed = []
        block = aligned_buffer(CHUNK_BYTES)
        for number in numbers:
            info = read_info(self._store, segment_name(number), block)
            item = self._state.segments.add(info, number, keep=False)
            staged: list[int] = []
            item.live, item.live_bytes, item.begun_us, item.lost_partition = assign_runs(
                info.runs, item.location, incarnations, indexes, kept, ends, sizes, breaks, staged
            )
            for run in staged:
                self._assign_staged(info.run(run), item)
            sealed.append(item)
        for partition, size in zip(partitions, sizes, strict=True):
            partition.sealed_bytes += size
        for index, found in groupby(sorted(breaks), key=itemgetter(0)):
            before = {number: end for _, number, end in found}
            ends[index] = sort_runs(partitions[index], before, ends[index], self._state.segments.by_location)
        self._check_ends(dict(zip(incarnations, ends, strict=True)))
        self._state.segments.settle(sealed)

    def _first_retained(self, partition: FilePartition) -> int:
        """Return the first offset that the partition will have after replay.

        Segments and unpublished batches below it may already be deleted.
        """
        return max(partition.first_offset, self._gone.get(partition.incarnation, 0))

    def _check_ends(self, ends: Mapping[int, int]) -> None:
        """Raise Corrupt unless each partition's segments reach from its first offset to its end in the snapshot."""
        for incarnation, partition in self._state.partitions.items():
            kept = self._first_retained(partition)
            if kept >= partition.next_offset:
                continue
            end = ends[incarnation] if ends[incarnation] >= 0 else kept
            if end != partition.next_offset:
                raise Corrupt(
                    ErrorCode.CORRUPT,
                    f"records are missing between the segments and the journal partition={incarnation} segments_end={end}",
                )
            if partition.runs.entry(0)[0] > kept:
                raise Corrupt(
                    ErrorCode.CORRUPT,
                    f"segments begin after the first retained offset partition={incarnation} offset={kept}",
                )

    def _assign_staged(self, run: SegmentRun, item: Sealed) -> None:
        expires_at_us = self._expiries.get((run.token, item.number))
        if expires_at_us is None:
            return
        position = run.position
        while position < run.stop:
            header = bytes(item.segment.stored(position, min(position + HEADER_BYTES, run.stop)))
            if not check_header(header, 0) or position + (length := _length(header)[0]) > run.stop:
                raise Corrupt(
                    ErrorCode.CORRUPT, f"staged batches are damaged segment={item.segment.name!r} position={position}"
                )
            batch = StagedBatch(run.token, run.partition, header, length)
            batch.location, batch.position = item.location, position
            item.keep_staged(length)
            self._state.staging.add(batch, expires_at_us)
            position += length

    # Entries

    def _apply(self, group: FoundGroup, contents: Contents, entry: Entry) -> None:
        view = group.slot.view[entry.position : entry.position + entry.length]
        partition = self._state.partitions.get(entry.partition)
        match entry.kind:
            case EntryKind.BATCH:
                if partition is not None:
                    contents.partitions[partition] = None
                    self._add_batch(partition, view, group.slot.serial, entry.position)
            case EntryKind.STAGED:
                self._stage(contents, group, entry, view)
            case EntryKind.PUBLISH:
                if partition is not None:
                    contents.partitions[partition] = None
                    self._publish(partition, bytes(view[:TOKEN_BYTES]), view[TOKEN_BYTES:], group.slot.serial)
            case EntryKind.ABANDON:
                self._state.unstage(bytes(view[at : at + TOKEN_BYTES]) for at in range(0, len(view), TOKEN_BYTES))
            case EntryKind.CHANGE:
                if self._published:
                    self._unstage_published()
                if group.sequence > self._broker_sequence:
                    self._replay.apply(bytes(view))
            case EntryKind.OPEN:
                made = self._state.make(entry.partition)
                made.opened = True
                contents.partitions[made] = None
            case EntryKind.DROP:
                if partition is not None:
                    self._state.drop(partition)
            case EntryKind.TRIM:
                if partition is not None:
                    contents.partitions[partition] = None
                    end = partition.next_offset
                    partition.next_offset = max(end, entry.argument)  # above the end if the partition began there
                    self._state.trim(partition, entry.argument, end)
            case EntryKind.SEALED | EntryKind.SNAPSHOT | EntryKind.START:
                pass
            case _:
                raise Corrupt(
                    ErrorCode.NEWER_FORMAT,
                    "a newer version of Polywire wrote this journal entry (start that version)"
                    f" kind={entry.kind} sequence={group.sequence}",
                )

    def _add_batch(self, partition: FilePartition, batch: Buffer, serial: int, position: int) -> None:
        """Add a batch with offsets to its partition. It is at ``position`` of the journal file ``serial``."""
        offset, address, time_us, span, address_span = self._check_follows(partition, batch)
        length = len(batch)
        partition.tail.append(offset, position, length, serial, address, time_us)
        partition.tail_bytes += length
        self._advance(partition, offset + span, address + address_span, time_us)
        self._replay_producer(batch)

    def _check_follows(self, partition: FilePartition, header: Buffer) -> tuple[int, int, int, int, int]:
        """Return the fields of a batch header that index entries need.

        They are (first offset, Kafka 0.7 offset, append time, number of offsets, bytes in Kafka 0.7's format). Raises
        Corrupt unless the batch begins where the partition ends.
        """
        epoch, offset, address, time_us, address_span, offset_span = _numbers(header)
        if offset != partition.next_offset or address != partition.next_address:
            raise Corrupt(
                ErrorCode.CORRUPT,
                f"the journal has a gap partition={partition.incarnation} offset={offset} expected={partition.next_offset}",
            )
        if epoch != partition.last_epoch:
            partition.begin_epoch(epoch)
        return offset, address, time_us, offset_span, address_span

    def _advance(self, partition: FilePartition, next_offset: int, next_address: int, time_us: int) -> None:
        partition.next_offset = next_offset
        partition.next_address = next_address
        partition.last_append_time_us = time_us

    def _replay_producer(self, batch: Buffer) -> None:
        if _columns(batch)[0] & _PRODUCER_BIT:
            header = read_header(batch)
            columns = layout(batch)
            at, size = columns[2 * Column.PRODUCER_ID], columns[2 * Column.PRODUCER_ID + 1]
            self._replay.replayed(header, bytes(memoryview(batch)[at : at + size]))

    def _stage(self, contents: Contents, group: FoundGroup, entry: Entry, view: memoryview) -> None:
        token = bytes(view[:TOKEN_BYTES])
        header = bytes(view[TOKEN_BYTES : TOKEN_BYTES + HEADER_BYTES])
        batch = StagedBatch(token, entry.partition, header, entry.length - TOKEN_BYTES)
        batch.serial, batch.position = group.slot.serial, entry.position + TOKEN_BYTES
        contents.staged.append(batch)
        self._state.staging.add(batch, entry.argument)

    def _publish(self, partition: FilePartition, token: bytes, headers: memoryview, serial: int) -> None:
        staged = self._state.staging.get(token)
        if staged is not None and not staged.claimed:
            staged.claimed = True
            self._published.append(token)
        batches = [] if staged is None else [b for b in staged.batches if b.incarnation == partition.incarnation]
        count = len(headers) // HEADER_BYTES
        missing = count - len(batches)  # the first batches may be missing, because they were trimmed or dropped later
        for number in range(count):
            header = bytes(headers[number * HEADER_BYTES : (number + 1) * HEADER_BYTES])
            offset, address, time_us, span, address_span = self._check_follows(partition, header)
            if offset + span > self._gone.get(partition.incarnation, 0):
                if not 0 <= missing <= number or batches[number - missing].length != _length(header)[0]:
                    raise Corrupt(ErrorCode.CORRUPT, f"published batches are missing token={token.hex()}")
                batch = batches[number - missing]
                self._state.attach(partition, header, batch, serial)
                if _columns(header)[0] & _PRODUCER_BIT:
                    self._replay_producer(self._state.reader.tail_batch(partition, len(partition.tail) - 1))
            self._advance(partition, offset + span, address + address_span, time_us)

    def _unstage_published(self) -> None:
        self._state.unstage(self._published)
        self._published.clear()


def image_of_all(state: LogState, sequence: int) -> Image:
    """Return a copy of the log's state after the journal write ``sequence``, which must be the last one replayed."""
    return state.image(sequence, state.partitions.values())


def sort_runs(partition: FilePartition, breaks: Mapping[int, int], end: int, by_location: Mapping[int, Sealed]) -> int:
    """Sort a partition's index of segments by offset, and return the end offset. Raises Corrupt if there is a gap.

    Args:
        breaks: by index, entries that do not begin where the previous entry in segment order ends, with that end
            offset.
        end: end offset of the last entry in segment order.
    """
    runs = partition.take_runs()
    entries = [runs.entry(number) for number in range(len(runs))]
    firsts = [entry[0] for entry in entries]
    ends = [*[breaks.get(number, first) for number, first in enumerate(firsts)][1:], end]
    found = [(entry, stop, by_location[entry[3]]) for entry, stop in zip(entries, ends, strict=True)]
    found.sort(key=lambda run: (run[0][0], -run[2].number))
    at, newest = found[0][0][0], 0
    for (offset, _, size, location, address, time_us), stop, item in found:
        if stop <= at and item.number < newest:  # these offsets were compacted into the previous run
            item.live -= 1
            item.live_bytes -= size
            continue
        if offset != at:
            raise Corrupt(
                ErrorCode.CORRUPT, f"segments have a gap partition={partition.incarnation} offset={at} next={offset}"
            )
        at, newest = stop, item.number
        partition.add_run(location, offset, size, address, time_us)
    return at


def _removed_ends(chain: Chain) -> dict[int, int]:
    """Return, for each partition, the offset below which the journal trims or drops all records.

    Segments with only such records may already be deleted.
    """
    gone: dict[int, int] = {}
    for group in chain.groups:
        ends = group.kinds & (1 << EntryKind.TRIM | 1 << EntryKind.DROP)
        for entry in read_directory(group.slot.view, group.position) if ends else ():
            if entry.kind == EntryKind.TRIM:
                gone[entry.partition] = max(gone.get(entry.partition, 0), entry.argument)
            elif entry.kind == EntryKind.DROP:
                gone[entry.partition] = _ALL
    return gone
