"""Write a segment: collect batches into one immutable file with a footer (decision 0102).

The layout is in ``format``.

* Memory is bounded by a few buffers, however large the segment is. Large copies release the GIL.
* A new checksum is only computed for bytes that matched their old one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec
import structlog

from polywire.errors import Corrupt, ErrorCode, Unavailable
from polywire.log.segments.batch_scan import (
    INDEX_STRIDE_BYTES,
    RUN_ENTRIES,
    RUN_EPOCH,
    RUN_FIRST_ADDRESS,
    RUN_FIRST_OFFSET,
    RUN_FIRST_TIME,
    RUN_LAST_ENTRY,
    RUN_LAST_TIME,
    RUN_NEXT_ADDRESS,
    RUN_NEXT_OFFSET,
    RUN_PARTITION,
    RUN_POSITION,
    RUN_RECORDS,
    RUN_STATE_COUNT,
    SMALL_BYTES,
    copy_batches,
    next_merge,
    survey,
    verify,
)
from polywire.log.segments.format import (
    ENTRY,
    EPOCH,
    NO_TOKEN,
    RUN,
    SEGMENT_MAGIC,
    SEGMENT_VERSION,
    TOKEN_BYTES,
    TRAILER,
    SegmentInfo,
    SegmentRun,
)
from polywire.log.segments.search import split_batches
from polywire.log.segments.segment import Segment
from polywire.records.batch import first_damaged, merge
from polywire.records.checksum import xxh64
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.records.compression import Compression, compress_body
from polywire.records.fields import header_fields
from polywire.store.base import BLOCK_BYTES, CHUNK_BYTES, CopiedParts, Store, aligned_buffer, blob_corrupt
from polywire.types import Buffer

# a partition with this much data in a journal file gets its own segment (decision 0102)
OWN_BLOB_BYTES_MIN: Final = 4 * 1024 * 1024
PACKED_BYTES_MIN: Final = 512  # smaller batches are not compressed, because most of their bytes are the header
WRITTEN_BYTES: Final = 1024 * 1024  # bytes verified before they are copied, while they are still in the CPU cache
MERGED_BYTES_MAX: Final = 256 * 1024  # still small enough to read and send single batches

logger: Final = structlog.get_logger("polywire.log")

Key = TypeVar("Key", bound=Hashable)
_beginning: Final = header_fields("epoch", "base_offset")


class Part(msgspec.Struct, frozen=True):
    """Batches somewhere in one buffer, in offset order.

    Attributes:
        positions: positions of the batches, an ``array('q')``.
        lengths: lengths of the batches, an ``array('q')``.
        verified: whether their checksums were already checked.
    """

    base: Buffer
    positions: array[int]
    lengths: array[int]
    verified: bool = False


class RunSource(msgspec.Struct, frozen=True):
    """One partition's batches to write to a segment.

    Attributes:
        parts: the batches, in order.
        token: if not empty, the batches are unpublished: they have no offsets and are never merged.
        compression: compression of bodies that are large enough and not yet compressed.
    """

    partition: int
    parts: Iterable[Part]
    token: bytes = NO_TOKEN
    compression: Compression | None = None

    @classmethod
    def of_batches(cls, partition: int, batches: Sequence[Buffer], token: bytes = NO_TOKEN) -> RunSource:
        """Return a source of batches that are in separate buffers."""
        parts = [Part(batch, array("q", (0,)), array("q", (len(batch),))) for batch in batches]
        return cls(partition, parts, token)

    @classmethod
    def of_segments(
        cls,
        runs: Sequence[tuple[Segment, SegmentRun]],
        *,
        damaged: Callable[[Segment], None] | None = None,
        compression: Compression | None = None,
    ) -> RunSource:
        """Return a source that copies the batches of one partition (or token) from older segments, in order.

        They are read while the new segment is written, in the writer's thread.

        Args:
            damaged: called with the segment if the checksum of a batch does not match. Writing then raises Corrupt.
        """
        return cls(runs[0][1].partition, StoredParts(runs, damaged), runs[0][1].token, compression)


class StoredParts(Iterable[Part]):
    """Whole batches of older segments, read in buffers that bypass the page cache.

    A part is valid until the next one is read.
    """

    def __init__(self, runs: Sequence[tuple[Segment, SegmentRun]], damaged: Callable[[Segment], None] | None) -> None:
        self._runs = runs
        self._damaged = damaged

    def __iter__(self) -> Iterator[Part]:
        block = aligned_buffer(BATCH_BYTES_MAX + 2 * BLOCK_BYTES)  # memory that is never read into costs nothing
        for segment, run in self._runs:
            at, window = run.position, CHUNK_BYTES
            while at < run.stop:
                chunk = self._read(segment, block, at, min(at + window, run.stop))
                positions, lengths = split_batches(chunk)
                if not positions and window < BATCH_BYTES_MAX:
                    window = BATCH_BYTES_MAX  # one batch may be larger than a window
                    continue
                end = positions[-1] + lengths[-1] if positions else 0
                self._check(segment, chunk[:end], at)
                yield Part(chunk, positions, lengths, verified=True)
                at, window = at + end, CHUNK_BYTES

    def _read(self, segment: Segment, block: memoryview, start: int, stop: int) -> memoryview:
        try:
            return segment.read_uncached(block, start, stop)
        except Unavailable as error:  # a bad sector must not stop work on other segments
            raise self._broken(segment, error.message) from error

    def _check(self, segment: Segment, chunk: memoryview, at: int) -> None:
        position = first_damaged(chunk) if len(chunk) else 0
        if position >= 0:
            raise self._broken(segment, f"batch is damaged position={at + position}")

    def _broken(self, segment: Segment, reason: str) -> Corrupt:
        if self._damaged is not None:
            self._damaged(segment)
        return blob_corrupt(segment.name, reason)


def plan_blobs(sizes: Mapping[Key, int]) -> list[list[Key]]:
    """Assign partitions to segment files.

    A partition with 4 MiB or more gets its own file. All others share the last file. Their order is preserved.
    """
    own = [[key] for key, size in sizes.items() if size >= OWN_BLOB_BYTES_MIN]
    shared = [key for key, size in sizes.items() if size < OWN_BLOB_BYTES_MIN]
    return [*own, shared] if shared else own


def write_segment(
    store: Store, name: str, runs: Sequence[RunSource], *, chunk_bytes: int = WRITTEN_BYTES
) -> SegmentInfo:
    """Write one segment file. It is durable on return.

    Args:
        chunk_bytes: size of a write if the store has no memory of its own.

    Raises:
        BlobExists: the name is in use.
        Corrupt: a source contains something other than batches of its partition, in offset order.
    """
    writer = _SegmentWriter(runs, chunk_bytes)
    store.put_new(name, writer)
    return writer.info(name)


class _Stretch(msgspec.Struct, frozen=True):
    """Batches [start, stop) of the given positions and lengths in one buffer.

    Attributes:
        sound: whether the batches' checksums were already checked.
    """

    base: Buffer
    positions: array[int]
    lengths: array[int]
    start: int
    stop: int
    sound: bool = True


class _SegmentWriter(CopiedParts):
    """Builds a segment file chunk by chunk, in memory of the store if it has some."""

    def __init__(self, runs: Sequence[RunSource], chunk_bytes: int) -> None:
        super().__init__(chunk_bytes)
        self._sources = sorted(runs, key=lambda run: (run.partition, run.token))
        keys = {(run.partition, run.token) for run in runs}
        assert len(keys) == len(runs), "a run was given twice"
        self._chunk = memoryview(b"")
        self._filled = 0
        self._fills = self._fill_chunks()
        self._state = array("q", bytes(8 * RUN_STATE_COUNT))
        self._runs = bytearray()
        self._epochs = bytearray()
        self._entries = bytearray()

    def fill(self, out: memoryview) -> int:
        self._chunk, self._filled = out, 0
        next(self._fills, None)
        self._chunk = memoryview(b"")  # the store may reuse its memory once it has no view of it
        return self._filled

    def _fill_chunks(self) -> Iterator[None]:
        """Write the file. Yields when the current chunk is full, and continues in the next one."""
        for source in self._sources:
            yield from self._run(source)
        del self._entries[self._state[RUN_ENTRIES] * ENTRY.size :]
        footer = self._footer()
        for _ in range(2):  # a start needs the footer, so it is stored twice
            yield from self._copy(_whole(footer))

    def info(self, name: str) -> SegmentInfo:
        """Return the footer. The whole file must have been written."""
        data_bytes = self._state[RUN_POSITION]
        tables = len(self._runs) + len(self._epochs)
        return SegmentInfo(
            name=name,
            size=data_bytes + 2 * (tables + len(self._entries) + TRAILER.size),
            data_bytes=data_bytes,
            runs=bytes(self._runs),
            epochs=bytes(self._epochs),
            index_count=len(self._entries) // ENTRY.size,
        )

    def _run(self, source: RunSource) -> Iterator[None]:
        self._begin(source)
        position, index_start = self._state[RUN_POSITION], self._state[RUN_ENTRIES]
        epoch_start = len(self._epochs) // EPOCH.size
        for part in source.parts:
            for stretch in _prepared(part, source):
                self._survey(stretch, source)
                yield from self._copy(stretch)
        state = self._state
        self._runs += RUN.pack(
            source.partition,
            source.token or bytes(TOKEN_BYTES),
            position,
            state[RUN_POSITION] - position,
            max(state[RUN_FIRST_OFFSET], 0),
            max(state[RUN_NEXT_OFFSET], 0),
            state[RUN_FIRST_ADDRESS],
            state[RUN_NEXT_ADDRESS] if not source.token else 0,
            state[RUN_FIRST_TIME],
            state[RUN_LAST_TIME],
            index_start,
            state[RUN_ENTRIES] - index_start,
            epoch_start,
            len(self._epochs) // EPOCH.size - epoch_start,
            state[RUN_RECORDS],
        )

    def _begin(self, source: RunSource) -> None:
        state = self._state
        assert len(source.token) in (0, TOKEN_BYTES), "a token has 16 bytes"
        for field in range(RUN_FIRST_OFFSET, RUN_STATE_COUNT):
            state[field] = 0
        state[RUN_LAST_ENTRY] = state[RUN_POSITION] - INDEX_STRIDE_BYTES
        state[RUN_FIRST_OFFSET] = -1
        if source.token:
            state[RUN_NEXT_OFFSET] = -1  # staged batches have neither offsets nor an epoch
        else:
            state[RUN_EPOCH] = -1
            state[RUN_PARTITION] = source.partition

    def _survey(self, stretch: _Stretch, source: RunSource) -> None:
        at = stretch.start
        while at < stretch.stop:
            self._allocate_entries(len(stretch.base) // INDEX_STRIDE_BYTES + 1)
            at = survey(stretch.base, stretch.positions, stretch.lengths, at, stretch.stop, self._state, self._entries)
            if at < 0:
                raise Corrupt(
                    ErrorCode.CORRUPT,
                    f"cannot seal an invalid batch partition={source.partition} position={stretch.positions[-1 - at]}",
                )
            if at < stretch.stop:
                self._begin_epoch(stretch.base, stretch.positions[at])

    def _allocate_entries(self, count: int) -> None:
        size = (self._state[RUN_ENTRIES] + count) * ENTRY.size
        if len(self._entries) < size:
            self._entries += bytes(size - len(self._entries))

    def _begin_epoch(self, base: Buffer, position: int) -> None:
        epoch, offset = _beginning(base, position)
        self._epochs += EPOCH.pack(epoch, 0, offset)
        self._state[RUN_EPOCH] = epoch

    def _copy(self, stretch: _Stretch) -> Iterator[None]:
        cursor = array("q", (stretch.start, 0, 0))
        while cursor[0] < stretch.stop:
            cursor[2] = self._filled
            copy_batches(stretch.base, stretch.positions, stretch.lengths, stretch.stop, self._chunk, cursor)
            self._filled = cursor[2]
            if self._filled == len(self._chunk):
                yield

    def _footer(self) -> bytes:
        footer = bytes(self._runs) + self._epochs + self._entries
        trailer = TRAILER.pack(
            SEGMENT_MAGIC,
            SEGMENT_VERSION,
            self._state[RUN_POSITION],
            len(footer),
            len(self._runs) // RUN.size,
            len(self._epochs) // EPOCH.size,
            len(self._entries) // ENTRY.size,
            xxh64(footer),
            0,
            0,
        )[:-8]
        return footer + trailer + xxh64(trailer).to_bytes(8, "little")


def _whole(content: Buffer) -> _Stretch:
    return _Stretch(content, array("q", (0,)), array("q", (len(content),)), 0, 1)


def _packed(stretches: Iterator[_Stretch], kind: Compression | None) -> Iterator[_Stretch]:
    for stretch in stretches:
        if kind is None:
            yield stretch
            continue
        view, plain = memoryview(stretch.base), stretch.start
        for index in range(stretch.start, stretch.stop):
            length = stretch.lengths[index]
            if length >= PACKED_BYTES_MIN:
                yield from _between(stretch, plain, index)
                yield _whole(compress_body(view[stretch.positions[index] : stretch.positions[index] + length], kind))
                plain = index + 1
        yield from _between(stretch, plain, stretch.stop)


def _between(stretch: _Stretch, start: int, stop: int) -> Iterator[_Stretch]:
    if start < stop:
        yield _Stretch(stretch.base, stretch.positions, stretch.lengths, start, stop)


def _prepared(part: Part, source: RunSource) -> Iterator[_Stretch]:
    """Yield a part's batches as they are written: merged, compressed, and verified before they get another checksum.

    A damaged batch is copied with its wrong checksum, so that reading it fails and the rest of the segment stays
    intact.
    """
    copied_from = SMALL_BYTES if source.compression is None else BATCH_BYTES_MAX + 1
    for whole in _verified(part, copied_from):
        if whole.sound:
            stretches = _stretches(whole, merging=not source.token)
            yield from _packed(stretches, source.compression)
        else:
            position = part.positions[whole.start]
            logger.error(
                "found a damaged batch while sealing: it was copied unchanged, and reading it fails",
                partition=source.partition,
                offset=_beginning(part.base, position)[1],
                size=part.lengths[whole.start],
            )
            yield whole


def _verified(part: Part, copied_from: int) -> Iterator[_Stretch]:
    """Yield the part in pieces that are verified and still in the CPU cache when they are copied.

    A damaged batch is a piece by itself. Of batches of at least ``copied_from`` bytes, only the header is verified,
    because they are copied with their existing checksum.
    """
    at, count = 0, len(part.positions)
    while at < count:
        end = count
        if not part.verified:
            end = verify(part.base, part.positions, part.lengths, at, count, WRITTEN_BYTES, copied_from)
        bad = -1 - end if end < 0 else count
        end = bad if end < 0 else end
        if end > at:
            yield _Stretch(part.base, part.positions, part.lengths, at, end)
        at = end
        if at == bad < count:
            yield _Stretch(part.base, part.positions, part.lengths, at, at + 1, sound=False)
            at += 1


def _stretches(whole: _Stretch, *, merging: bool) -> Iterator[_Stretch]:
    """Yield pieces of ``whole`` in order: pieces to copy unchanged, and merged batches between them.

    Args:
        merging: whether to merge batches at all.
    """
    base, positions, lengths = whole.base, whole.positions, whole.lengths
    stop = whole.stop
    at = whole.start
    while at < stop:
        start, end = (stop, stop)
        if merging:
            start, end = next_merge(base, positions, lengths, at, stop, MERGED_BYTES_MAX)
        if start > at:
            yield _Stretch(base, positions, lengths, at, start)
        if end > start:
            view = memoryview(base)
            spans = zip(positions[start:end], lengths[start:end], strict=True)
            yield _whole(merge([view[position : position + length] for position, length in spans]))
        at = end
