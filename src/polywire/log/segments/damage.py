"""Separate intact batches of a segment from damaged ones.

* A batch is intact if header and body match their checksums.
* Every damaged range is reported with its position in the file and the missing offsets. Data after it stays readable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final, NamedTuple

import msgspec
import structlog

from polywire.clock import Clock
from polywire.errors import Corrupt, ErrorCode, Unavailable
from polywire.log.segments.search import scan_read
from polywire.records.batch import check_header, first_damaged, read_header, totals
from polywire.records.columns import HEADER_BYTES
from polywire.records.fields import header_fields
from polywire.store.base import Blob

RANGES_MAX: Final = 16  # verified ranges remembered per segment: this many readers can read old data at the same time
VERIFIED_S: Final = 60.0  # after this time a range is verified again: 0.1 CPU seconds per GB
SALVAGE_BYTES: Final = 64 * 1024  # block size of reads around a bad sector; the whole block is lost with the sector
# remembered damages, so that each is logged once; if there are more, some are logged again
DAMAGES_NOTED_MAX: Final = 4096

_base_offset: Final = header_fields("base_offset")
logger: Final = structlog.get_logger("polywire.log")

Mark = tuple[int, int]
"""(position in the blob, offset) of a known start of a batch, or the end of a run."""

PiecePosition = tuple[int, int]
"""(index of a piece, position in it) at which a batch begins."""

BEGINNING: Final[PiecePosition] = (0, 0)


class Damage(msgspec.Struct, frozen=True):
    """Damaged bytes [position, stop) of a segment, which contained records [first_offset, next_offset) of a partition.

    Attributes:
        partition: its incarnation, which users do not know.
        name: its topic and number, if they are known.
    """

    segment: str
    partition: int
    position: int
    stop: int
    first_offset: int
    next_offset: int
    name: tuple[str, int] | None = None

    def error(self) -> Corrupt:
        """Return the error to raise if these records are read."""
        where = "" if self.name is None else f"topic={self.name[0]!r} partition={self.name[1]} "
        return Corrupt(
            ErrorCode.CORRUPT,
            f"stored records are damaged {where}first_offset={self.first_offset} next_offset={self.next_offset}"
            f" segment={self.segment!r} position={self.position}",
        )


class Piece(NamedTuple):
    """Either intact batches back to back, or a damaged range."""

    data: memoryview
    end: int
    """Offset at which the piece ends."""
    damage: Damage | None


class DamageNotes:
    """Logs damage of segments, each damage once. Thread-safe.

    Attributes:
        name_of: returns topic and number of a partition; None if it does not exist any more. Called in any thread.
    """

    __slots__ = ("_lock", "_noted", "name_of")

    def __init__(self) -> None:
        self.name_of: Callable[[int], tuple[str, int] | None] = _unnamed
        self._noted: dict[tuple[str, int], Damage] = {}
        self._lock = Lock()

    @property
    def found(self) -> list[Damage]:
        with self._lock:
            return list(self._noted.values())

    def note(self, damage: Damage) -> None:
        """Log damage, unless it was logged before."""
        key = (damage.segment, damage.position)
        with self._lock:
            if key in self._noted:
                return
            if len(self._noted) >= DAMAGES_NOTED_MAX:
                self._noted.clear()
            self._noted[key] = damage
        topic, partition = damage.name or (None, None)
        logger.error(
            "stored records are damaged: reading them fails; the records around them remain readable",
            topic=topic,
            partition=partition,
            first_offset=damage.first_offset,
            next_offset=damage.next_offset,
            segment=damage.segment,
            position=damage.position,
            size=damage.stop - damage.position,
        )


def _unnamed(_: int) -> None:
    return None


class VerifiedRanges:
    """Byte ranges of a segment that were verified recently and need not be verified again. Thread-safe.

    A range is forgotten after ``VERIFIED_S``, because the system may drop its pages unnoticed and read them again from
    a disk that has become damaged.
    """

    __slots__ = ("_clock", "_ranges")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ranges: tuple[tuple[int, int, float], ...] = ()

    def add(self, start: int, stop: int) -> None:
        since = now = self._clock.monotonic()
        kept = []
        for begun, ended, found in self._ranges:
            if now - found >= VERIFIED_S:
                continue
            if begun <= stop and start <= ended:
                start, stop, since = min(start, begun), max(stop, ended), min(since, found)
            else:
                kept.append((begun, ended, found))
        self._ranges = (*kept[-RANGES_MAX + 1 :], (start, stop, since))

    def forget(self) -> None:
        """Drop all ranges. Called when some of the segment is no longer in the page cache."""
        self._ranges = ()

    def hold(self, start: int, stop: int) -> bool:
        """Return whether bytes [start, stop) were verified recently."""
        oldest = self._clock.monotonic() - VERIFIED_S
        return any(begun <= start and stop <= ended and found > oldest for begun, ended, found in self._ranges)


def split_sound(
    data: memoryview, marks: Sequence[Mark], *, segment: str, partition: int, name: tuple[str, int] | None = None
) -> list[Piece]:
    """Split bytes of a partition's batches in a segment into intact pieces and damaged ones.

    Args:
        marks: in order, the start of ``data``, the known starts of batches in it, and its end.
        name: topic and number of the partition, for errors.
    """
    (start, offset), end = marks[0], marks[-1][1]
    pieces: list[Piece] = []
    at = 0
    while at < len(data):
        bad = first_damaged(data[at:])
        sound = data[at : at + bad] if bad >= 0 else data[at:]
        if len(sound):
            at += len(sound)
            offset = _end_of(sound) if bad >= 0 else end
            pieces.append(Piece(sound, offset, None))
        if bad >= 0:
            stop, next_offset = _next_batch(data, at, start, offset, marks, partition)
            found = Damage(segment, partition, start + at, start + stop, offset, next_offset, name)
            pieces.append(Piece(data[:0], next_offset, found))
            at, offset = stop, next_offset
    return pieces


def _end_of(batches: memoryview) -> int:
    at = offset = 0
    while at < len(batches):
        header = read_header(batches, at)
        at, offset = at + header.length, header.next_offset
    return offset


def _next_batch(
    data: memoryview, at: int, start: int, offset: int, marks: Sequence[Mark], partition: int
) -> tuple[int, int]:
    """Return position and offset of the batch after a damaged one.

    The position is the first that applies:

    * a header that matches its checksum
    * the end of the damaged batch, if a valid header of the same partition follows there
    * the next known start of a batch
    """
    if check_header(data, at):
        header = read_header(data, at)
        if header.partition == partition and at + header.length <= len(data):
            return at + header.length, header.next_offset
    following = at + totals(data, at)[0] if len(data) - at >= HEADER_BYTES else len(data)
    if at < following < len(data) and check_header(data, following):
        header = read_header(data, following)
        if header.partition == partition and header.base_offset >= offset:
            return following, header.base_offset
    return next((position - start, mark) for position, mark in marks if position > start + at)


def read_pieces(
    pieces: Sequence[Piece],
    offset: int,
    bytes_max: int,
    offset_end: int,
    chunks: list[memoryview],
    begin: PiecePosition = BEGINNING,
) -> tuple[int, int, PiecePosition]:
    """Append batches from ``offset`` on to ``chunks``, up to the limits or to damaged data.

    Returns (offset after the last record, ``bytes_max`` minus the bytes added, position reached). A record is never
    added twice, even if batches were merged since an earlier call with the same ``chunks``.

    Args:
        pieces: consecutive pieces.
        begin: where the search for ``offset`` begins.

    Raises:
        Corrupt: the data at ``offset`` is damaged, and ``chunks`` is empty.
    """
    at, bytes_left, (number, position) = offset, bytes_max, begin
    while number < len(pieces):
        data, end, damage = pieces[number]
        if at >= end:
            number, position = number + 1, 0
            continue
        if damage is not None and not chunks:
            raise damage.error()
        start, stop, next_offset = scan_read(data[position:] if position else data, at, bytes_left, offset_end)
        if damage is not None or start < 0 or (chunks and stop - start > bytes_left):
            break
        if chunks and start < stop and _base_offset(data, position + start)[0] < at:
            # merged meanwhile: the batch also contains records that were already added, so it must begin a separate
            # read
            break
        if start < stop:
            chunks.append(data[position + start : position + stop])
            at, bytes_left = next_offset, bytes_left - (stop - start)
            if at < end or at >= offset_end or bytes_left <= 0:
                return at, bytes_left, (number, position + stop)
        number, position = number + 1, 0
    return at, bytes_left, (number, position)


def salvaged(blob: Blob, block: memoryview, start: int) -> memoryview:
    """Fill ``block`` with bytes of a segment file from ``start`` on. Unreadable parts are filled with zeros."""
    block[:] = bytes(len(block))
    for at in range(0, len(block), SALVAGE_BYTES):
        piece = block[at : at + SALVAGE_BYTES]
        try:
            blob.pread_into(piece, start + at)
        except Unavailable:
            piece[:] = bytes(len(piece))
    return block
