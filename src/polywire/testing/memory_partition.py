"""The records of one partition in memory: the read side of the log in memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from polywire.errors import ErrorCode, Missing
from polywire.log.base import NO_OFFSET, Completion, Located, Read
from polywire.records import batch as batches
from polywire.records.columns import BatchHeader
from polywire.records.compression import Compression, expand_body


class NoPin:
    """A pin that does nothing, because bytes in memory stay where they are."""

    __slots__ = ()

    def release(self) -> None:
        pass


class Wait:
    """A caller that waits for the record at ``offset``. Implements ``Handle``."""

    __slots__ = ("_partition", "offset", "wake")

    def __init__(self, partition: MemoryPartition, offset: int, wake: Callable[[], None]) -> None:
        self._partition = partition
        self.offset = offset
        self.wake = wake

    def cancel(self) -> None:
        self._partition.wakes.pop(self, None)


class MemoryPartition:
    """Implements ``PartitionLog``.

    Invariant: ``headers`` and ``bodies`` have the same batches in ascending order and without gaps, beginning with the
    one that contains ``first_offset``.
    """

    __slots__ = (
        "_current_epoch",
        "_hides_unsynced",
        "bodies",
        "compression",
        "ended",
        "first_offset",
        "headers",
        "incarnation",
        "last_append_time_us",
        "next_address",
        "next_offset",
        "synced_offset",
        "wakes",
    )

    def __init__(self, incarnation: int, *, epoch: int, hides_unsynced: bool) -> None:
        self.incarnation = incarnation
        self.first_offset = 0
        self.next_offset = 0
        self.synced_offset = 0
        self.compression: Compression | None = None
        self.next_address = 0
        self.last_append_time_us = 0
        self.headers: list[BatchHeader] = []
        self.bodies: list[bytes] = []
        self.wakes: dict[Wait, None] = {}
        self.ended = False
        self._current_epoch = epoch
        self._hides_unsynced = hides_unsynced

    @property
    def readable_offset(self) -> int:
        """The exclusive end of the offsets that readers may see."""
        return self.synced_offset if self._hides_unsynced else self.next_offset

    @property
    def stored_bytes(self) -> int:
        return sum(header.length for header in self.headers)

    def add(self, batch: bytes) -> None:
        """Append a batch whose offsets are assigned."""
        header = batches.read_header(batch)
        assert header.base_offset == self.next_offset, "batches follow each other without gaps"
        self.headers.append(header)
        self.bodies.append(batch)
        self.next_offset = header.next_offset
        self.next_address = header.base_address + header.address_span
        self.last_append_time_us = header.append_time_us

    def trim(self, first_offset: int) -> None:
        """Drop the batches whose records are all below ``first_offset``."""
        self.first_offset = max(self.first_offset, min(first_offset, self.next_offset))
        count = bisect_right(self.headers, self.first_offset, key=lambda header: header.next_offset)
        del self.headers[:count]
        del self.bodies[:count]

    def read(
        self,
        offset: int,
        *,
        bytes_max: int,
        then: Completion[Read],
        offset_end: int | None = None,
    ) -> Read:
        """Return the batches from the one that contains ``offset`` on. ``then`` is never called."""
        self._check_range(offset)
        chunks: list[memoryview] = []
        size = 0
        next_offset = offset
        readable = self.readable_offset
        for index in range(self._index(offset), len(self.headers)):
            header = self.headers[index]
            past_end = offset_end is not None and header.base_offset >= offset_end
            if past_end or header.next_offset > readable or (chunks and size + header.length > bytes_max):
                break
            chunks.append(memoryview(self.bodies[index]))
            size += header.length
            next_offset = header.next_offset
        return Read(chunks, next_offset, readable, NoPin())

    def _check_range(self, offset: int) -> None:
        if not self.first_offset <= offset <= self.next_offset:
            raise Missing(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset is out of range offset={offset} first={self.first_offset} next={self.next_offset}",
            )

    def _index(self, offset: int) -> int:
        return bisect_right(self.headers, offset, key=lambda header: header.next_offset)

    def locate(self, offset: int, then: Completion[Located], *, offset_end: int | None = None) -> Located:
        """Return no location, because a log in memory has no files."""
        self._check_range(offset)
        return Located(None, (), more=False)

    def offset_at(self, time_us: int, then: Completion[int]) -> int:
        """Return the first offset appended at or after ``time_us``."""
        index = bisect_left(self.headers, time_us, key=lambda header: header.append_time_us)
        return (
            max(self.first_offset, self.headers[index].base_offset) if index < len(self.headers) else self.next_offset
        )

    def offset_of_address(self, address: int, then: Completion[int], *, covering: bool = False) -> int:
        """See ``PartitionView.offset_of_address``. The result is always returned, so ``then`` is never called."""
        if address == self.next_address:
            return self.next_offset
        index = bisect_right(self.headers, address, key=lambda header: header.base_address) - 1
        if index < 0 or address > self.next_address:
            return NO_OFFSET
        body = expand_body(self.bodies[index])
        record = batches.record_at_address(body, address, covering=covering)
        return NO_OFFSET if record < 0 else batches.offset_of(body, record)

    def address_of_offset(self, offset: int, then: Completion[int]) -> int:
        """Return the address of a record. For the offset at the end, return ``next_address``."""
        if offset == self.next_offset:
            return self.next_address
        if not self.first_offset <= offset < self.next_offset:
            raise Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset is out of range offset={offset}")
        body = expand_body(self.bodies[self._index(offset)])
        return batches.address_of(body, batches.record_at_offset(body, offset))

    def epoch_end(self, epoch: int) -> int:
        """Return the offset at which the records of this epoch end."""
        if not 1 <= epoch <= self._current_epoch:
            raise Missing(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"the partition has no such epoch epoch={epoch} current={self._current_epoch}",
            )
        if epoch == self._current_epoch:
            return self.readable_offset
        index = bisect_right(self.headers, epoch, key=lambda header: header.epoch)
        return self.headers[index].base_offset if index < len(self.headers) else self.next_offset

    def epoch_at(self, offset: int) -> int:
        """Return the epoch of the record at this offset. For ``next_offset``, return the current epoch."""
        self._check_range(offset)
        return self._current_epoch if offset == self.next_offset else self.headers[self._index(offset)].epoch

    def retention_offset(self, *, age_us_max: int | None, bytes_max: int | None, now_us: int) -> int:
        """Return the first offset that these limits retain."""
        index = 0
        if age_us_max is not None:
            index = bisect_left(self.headers, now_us - age_us_max, key=lambda header: header.append_time_us)
        if bytes_max is not None:
            size = sum(header.length for header in self.headers[index:])
            while index < len(self.headers) and size > bytes_max:
                size -= self.headers[index].length
                index += 1
        kept = self.headers[index].base_offset if index < len(self.headers) else self.next_offset
        return max(self.first_offset, kept)
