"""One partition of the log: its offsets and epochs, and indexes of its batches in the journal and in segments.

It implements ``log.base.PartitionLog``. It contains only data in memory; the module ``reader`` fetches records. This
module is compiled.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from struct import Struct
from typing import Any, Final, Protocol

import cython

from polywire.errors import ErrorCode, Missing
from polywire.log.base import Completion, Handle, Located, Read
from polywire.log.partition.run_index import RunIndex
from polywire.log.partition.tail_index import TailIndex
from polywire.log.segments.format import SegmentRun
from polywire.records.compression import Compression
from polywire.types import Buffer, Level

PUBLISHED: Final = 0xFFFF_FFFF  # in place of a serial: the entry's bytes are a published header and a staged body
PUBLISHED_SHIFT: Final = 25  # shifts positions so that entries of published batches never look adjacent
_NUMBERS: Final = Struct("<4QqI")
_EPOCH: Final = Struct("<IQ")
_ALL: Final = 2**62

Append = tuple[Buffer, Level, Completion[int] | None]
"""Added batch, requested level, and completion."""


class PartitionReader(Protocol):
    @property
    def epoch(self) -> int: ...

    def run_now(self, location: int, incarnation: int) -> SegmentRun | None:
        """Return a partition's entry in a segment's footer if the footer is in memory, else None."""

    def published_offset(self, number: int) -> int:
        """Return the first offset of a published batch, given the batch's number."""

    def read(
        self,
        partition: FilePartition,
        offset: int,
        bytes_max: int,
        then: Completion[Read],
        offset_end: int | None,
    ) -> Read | Handle: ...

    def locate(
        self,
        partition: FilePartition,
        offset: int,
        then: Completion[Located],
        *,
        offset_end: int | None,
    ) -> Located | Handle: ...

    def offset_at(self, partition: FilePartition, time_us: int, then: Completion[int]) -> int | Handle: ...

    def offset_of_address(
        self, partition: FilePartition, address: int, then: Completion[int], *, covering: bool
    ) -> int | Handle: ...

    def address_of_offset(self, partition: FilePartition, offset: int, then: Completion[int]) -> int | Handle: ...


@cython.cclass
class FilePartition:
    """Index of one partition's records in segments and in the journal. Implements ``PartitionLog``.

    Both parts of the index together cover all retained offsets up to ``next_offset`` without gaps.

    Attributes:
        tail: index of the batches that are in the journal only.
        tail_bytes: total size of these batches.
        sealed_bytes: total size of the batches in segments.
        opened: whether the journal write that creates the partition is done.
        ended: whether the partition was dropped, even if that is not written yet.
    """

    if not cython.compiled:  # when compiled, partition.pxd declares the fields
        __slots__ = (
            "_packed_epochs",
            "_reader",
            "clean_offset",
            "compression",
            "ended",
            "epoch_numbers",
            "epoch_offsets",
            "first_offset",
            "hides_unsynced",
            "incarnation",
            "last_append_time_us",
            "last_epoch",
            "next_address",
            "next_offset",
            "opened",
            "pending",
            "published",
            "runs",
            "sealed_bytes",
            "synced_offset",
            "tail",
            "tail_bytes",
            "wakes",
        )

    def __init__(self, incarnation: int, reader: PartitionReader, *, hides_unsynced: bool) -> None:
        self._reader = reader
        self.incarnation: Final = incarnation
        self.hides_unsynced: Final = hides_unsynced
        self.first_offset = 0
        self.next_offset = 0
        self.synced_offset = 0
        self.next_address = 0
        self.last_append_time_us = 0
        self.tail: Final = TailIndex()
        self.tail_bytes = 0
        self.runs = RunIndex()
        """The data in segments: (first offset, 0, bytes, segment's location, first address, first append time)."""
        self.sealed_bytes = 0
        self.compression: Compression | None = None
        self.clean_offset = 0
        """End of the offsets that were compacted. For each key below it, only the newest record remains."""
        self.last_epoch = 0
        self.epoch_numbers: Final = array("I")
        self.epoch_offsets: Final = array("Q")
        self._packed_epochs = b""
        """Result of the last ``pack``, or None if epochs changed since then."""
        self.published: Final[deque[int]] = deque()
        """Numbers of the published batches in the tail, in order."""
        self.pending: list[Append] | None = None
        """Appends of this partition in the current write batch. None if no more can be added to them."""
        self.wakes: Final[dict[Any, None]] = {}
        """Waiting readers (``log.waits.Wait``), in order of arrival."""
        self.opened = False
        self.ended = False

    @property
    def readable_offset(self) -> int:
        return self.readable_end()

    @cython.ccall
    @cython.exceptval(-1, check=True)
    def readable_end(self) -> cython.longlong:
        return self.synced_offset if self.hides_unsynced else self.next_offset

    @property
    def stored_bytes(self) -> int:
        return self.sealed_bytes + self.tail_bytes

    @property
    def tail_offset(self) -> int:
        """First offset that is in the journal only, not in a segment."""
        return self.tail.entry(0)[0] if len(self.tail) else self.next_offset

    # Reading

    def read(
        self,
        offset: int,
        *,
        bytes_max: int,
        then: Completion[Read],
        offset_end: int | None = None,
    ) -> Read | Handle:
        self.check_range(offset)
        return self._reader.read(self, offset, bytes_max, then, offset_end)

    @cython.ccall
    def check_range(self, offset: Any) -> None:
        """Raise Missing(OFFSET_OUT_OF_RANGE) outside [first_offset, next_offset]."""
        if not self.first_offset <= offset <= self.next_offset:
            raise Missing(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset out of range offset={offset} first={self.first_offset} next={self.next_offset}",
            )

    def locate(self, offset: int, then: Completion[Located], *, offset_end: int | None = None) -> Located | Handle:
        return self._reader.locate(self, offset, then, offset_end=offset_end)

    def offset_at(self, time_us: int, then: Completion[int]) -> int | Handle:
        return self._reader.offset_at(self, time_us, then)

    def offset_of_address(self, address: int, then: Completion[int], *, covering: bool = False) -> int | Handle:
        return self._reader.offset_of_address(self, address, then, covering=covering)

    def address_of_offset(self, offset: int, then: Completion[int]) -> int | Handle:
        return self._reader.address_of_offset(self, offset, then)

    # Epochs

    def begin_epoch(self, epoch: int) -> None:
        """Begin this leader epoch at next_offset."""
        self.last_epoch = epoch
        self.epoch_numbers.append(epoch)
        self.epoch_offsets.append(self.next_offset)
        self._packed_epochs = b""

    def epoch_end(self, epoch: int) -> int:
        if not 0 < epoch <= self._reader.epoch:
            raise Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"unknown epoch epoch={epoch} current={self._reader.epoch}")
        number = bisect_right(self.epoch_numbers, epoch)
        if number < len(self.epoch_numbers):
            return self.epoch_offsets[number]
        return self.readable_offset

    def epoch_at(self, offset: int) -> int:
        self.check_range(offset)
        if offset == self.next_offset:
            return self._reader.epoch
        return self.epoch_numbers[bisect_right(self.epoch_offsets, offset) - 1]

    # Retention

    def retention_offset(self, *, age_us_max: int | None, bytes_max: int | None, now_us: int) -> int:
        kept = self.first_offset
        if age_us_max is not None:
            kept = max(kept, self._kept_by_age(now_us - age_us_max))
        if bytes_max is not None and self.stored_bytes > bytes_max:
            kept = max(kept, self._kept_by_size(self.stored_bytes - bytes_max))
        return kept

    def _kept_by_age(self, since_us: int) -> int:
        """Return the first offset to retain. Everything before it was appended before ``since_us``.

        If a segment's footer is not in memory, all its records are retained until a later call.
        """
        number = max(self.runs.find_time(since_us) - 1, 0)
        while number < len(self.runs):
            entry = self.runs.entry(number)
            run = self._reader.run_now(entry[3], self.incarnation)
            if run is None or run.last_time_us >= since_us:
                return entry[0]
            number += 1
        number = self.tail.find_time(since_us)
        return self.tail.entry(number)[0] if number < len(self.tail) else self.next_offset

    def _kept_by_size(self, excess: int) -> int:
        """Return the first offset to retain.

        The batches before it have at least ``excess`` bytes, but no more than needed.
        """
        for number in range(len(self.runs)):
            if excess <= 0:
                return self.runs.entry(number)[0]
            excess -= self.runs.entry(number)[2]
        for number in range(len(self.tail)):
            if excess <= 0:
                return self.tail.entry(number)[0]
            excess -= self.tail.entry(number)[2]
        return self.next_offset

    # Changes by journal writes, the sealer and recovery

    def add_run(self, location: int, first_offset: int, size: int, first_address: int, first_time_us: int) -> None:
        self.runs.append(first_offset, size, location, first_address, first_time_us)
        self.sealed_bytes += size

    def runs_between(self, first_offset: int, next_offset: int) -> range:
        """Return the index entries of the segments whose records begin in [first_offset, next_offset)."""
        start = self.runs.find_offset(first_offset - 1) + 1 if first_offset else 0
        return range(start, self.runs.find_offset(next_offset - 1) + 1)

    def join_runs(self, numbers: range, location: int, size: int) -> list[tuple[int, int]]:
        """Replace index entries of several segments by one of a merged segment.

        Return (location, size) of each old entry.
        """
        entries = [self.runs.entry(number) for number in numbers]
        self.sealed_bytes += size - sum(entry[2] for entry in entries)
        self.runs.join(numbers.start, numbers.stop, size, location)
        return [(entry[3], entry[2]) for entry in entries]

    def drop_tail(self, next_offset: int) -> list[int]:
        """Remove the batches in the journal that begin below ``next_offset``.

        Return the numbers of the published batches among them. A published batch was staged before, so its body is in
        the journal before its header.
        """
        count = self.tail.find_offset(next_offset - 1) + 1
        if count:
            self.tail_bytes -= self.tail.take(self.tail.entry(0)[0], _ALL, next_offset)[2]
            self.tail.drop_front(count)
        gone = []
        while self.published and self._reader.published_offset(self.published[0]) < next_offset:
            gone.append(self.published.popleft())
        return gone

    def take_runs(self) -> RunIndex:
        """Remove and return all index entries of segments."""
        taken, self.runs = self.runs, RunIndex()
        self.sealed_bytes = 0
        return taken

    def trim(self, first_offset: int, end: int) -> tuple[RunIndex, list[int]]:
        """Make offsets below ``first_offset`` unreadable. Remove index entries that have only such offsets.

        Returns the removed entries of segments and the numbers of the removed published batches.

        Args:
            end: end of the indexed batches. Later batches have offsets but are not indexed yet.
        """
        self.first_offset = max(self.first_offset, min(first_offset, self.next_offset))
        runs = self._trim_runs(end)
        number = len(self.tail) if self.first_offset >= end else self.tail.find_offset(self.first_offset)
        if number == len(self.tail):
            gone = self.drop_tail(end)
        else:
            gone = self.drop_tail(self.tail.entry(number)[0]) if number > 0 else []
        while len(self.epoch_offsets) > 1 and self.epoch_offsets[1] <= self.first_offset:
            del self.epoch_offsets[0], self.epoch_numbers[0]
            self._packed_epochs = b""
        return runs, gone

    def _trim_runs(self, end: int) -> RunIndex:
        """Remove index entries of segments whose records end at or below the first offset.

        The records of the last segment end where those of the journal begin.
        """
        if self.first_offset >= (self.tail.entry(0)[0] if len(self.tail) else end):
            return self.take_runs()
        gone = RunIndex()
        for number in range(self.runs.find_offset(self.first_offset)):
            offset, _, size, location, address, time_us = self.runs.entry(number)
            gone.append(offset, size, location, address, time_us)
            self.sealed_bytes -= size
        self.runs.drop_front(len(gone))
        return gone

    # Snapshot format

    def pack(self) -> bytes:
        """Return the partition's state in the snapshot format."""
        if not self._packed_epochs:
            self._packed_epochs = b"".join(map(_EPOCH.pack, self.epoch_numbers, self.epoch_offsets))
        return (
            _NUMBERS.pack(
                self.incarnation,
                self.first_offset,
                self.next_offset,
                self.next_address,
                self.last_append_time_us,
                len(self.epoch_numbers),
            )
            + self._packed_epochs
        )

    def unpack(self, content: Buffer, at: int) -> int:
        """Load the state encoded by ``pack`` from byte ``at`` of ``content``. Return the position after it."""
        fields = _NUMBERS.unpack_from(content, at)
        self.first_offset, self.next_offset, self.next_address, self.last_append_time_us = fields[1:5]
        self.synced_offset = self.next_offset
        at += _NUMBERS.size
        for _ in range(fields[5]):
            epoch, offset = _EPOCH.unpack_from(content, at)
            self.epoch_numbers.append(epoch)
            self.epoch_offsets.append(offset)
            at += _EPOCH.size
            self.last_epoch = epoch
        self.opened = True
        return at


def packed_incarnation(content: Buffer, at: int) -> int:
    """Return the incarnation of the encoded partition at byte ``at``."""
    return int.from_bytes(memoryview(content)[at : at + 8], "little")
