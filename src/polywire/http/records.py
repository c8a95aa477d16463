"""Read records for the admin API batch by batch, and encode them as JSON in a thread.

* A page has a limit in bytes, including keys, values and headers. It contains at least one record, truncated if
  necessary.
* A request reads a limited number of bytes, and only few requests read at the same time. Memory use is therefore
  bounded, whatever the records contain.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, ParamSpec, TypeVar

import msgspec

from polywire.broker.broker import Broker
from polywire.broker.topics import Partition
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.http.encoding import json_headers, json_value
from polywire.http.lag import fetch
from polywire.http.search import Filter
from polywire.records.compression import expand_body
from polywire.records.header import read_header
from polywire.records.lookup import record_at_offset
from polywire.records.rows import Rows

READ_BYTES: Final = 256 * 1024  # bytes of one read; a batch is always read completely
READ_TOTAL_BYTES_MAX: Final = 32 * 1024 * 1024  # bytes of batches that one request reads
READERS_MAX: Final = 4  # concurrent requests that read records; each holds one batch in memory
RECORDS_MAX: Final = 500  # records of one page
PAGE_BYTES_MAX: Final = 2 * 1024 * 1024  # JSON of the records of one page
SHOWN_BYTES_MAX: Final = 4 * 1024  # key, value or part of a header, unless `whole=1`
HEADERS_BYTES_MAX: Final = 16 * 1024  # JSON of the headers of one record, unless `whole=1`
LOOKED_AT_MAX: Final = 20_000  # records that one request compares with a filter
WINDOW_MIN: Final = 16  # offsets of the first part that is read backwards; the size of each part doubles
WINDOW_MAX: Final = 4_096

EVERY: Final = Filter()

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Taken(Enum):
    """Result of ``Take``: whether the record was used, and whether to continue."""

    MORE = auto()
    LAST = auto()
    LEFT = auto()  # not used: the next request begins with this record


@dataclass(slots=True)
class ReadLimit:
    """The number of bytes of batches that a request may still read. The last batch may exceed it."""

    left: int = READ_TOTAL_BYTES_MAX


Take = Callable[[Rows, int], Taken]
"""Called in a thread with the rows of a batch and the index of a record."""


@dataclass(slots=True)
class Page:
    """Records of a partition.

    Attributes:
        begin_offset: offset at which this page begins: the end of the page before it.
        next_offset: offset at which the next page begins.
        records: the records as JSON.
        looked_at: number of records that were compared with the filter.
        value_bytes: size of the values before truncation.
    """

    partition: int
    first_offset: int
    end_offset: int
    begin_offset: int
    next_offset: int
    records: list[msgspec.Raw] = field(default_factory=list)
    looked_at: int = 0
    value_bytes: int = 0


class _PageTaker:
    def __init__(self, page: Page, *, limit: int, wanted: Filter, whole: bool) -> None:
        self._page: Final = page
        self._limit: Final = limit
        self._filter: Final = wanted
        self._whole: Final = whole
        self._bytes = 0

    def take(self, rows: Rows, index: int) -> Taken:
        page = self._page
        if self._filter.matches(rows, index):
            record = record_json(rows, index, page.partition, whole=self._whole)
            if page.records and self._bytes + len(record) > PAGE_BYTES_MAX:
                return Taken.LEFT
            self._bytes += len(record)
            page.records.append(msgspec.Raw(record))
            page.value_bytes += len(rows.value(index) or b"")
        page.looked_at += 1
        is_full = len(page.records) >= self._limit or page.looked_at >= LOOKED_AT_MAX
        return Taken.LAST if is_full or self._bytes >= PAGE_BYTES_MAX else Taken.MORE


class _PartTaker:
    """Collects the last matching records of one part of a partition."""

    def __init__(self, partition: int, end: int, *, limit: int, bytes_max: int, wanted: Filter, whole: bool) -> None:
        self._partition: Final = partition
        self._end: Final = end
        self._limit: Final = limit
        self._bytes_max: Final = bytes_max
        self._filter: Final = wanted
        self._whole: Final = whole
        self.found: Final[deque[tuple[int, bytes]]] = deque()
        self.bytes = 0
        self.looked_at = 0
        self.is_full = False

    def take(self, rows: Rows, index: int) -> Taken:
        offset = rows.offset(index)
        if offset >= self._end:
            return Taken.LEFT
        self.looked_at += 1
        if self._filter.matches(rows, index):
            record = record_json(rows, index, self._partition, whole=self._whole)
            self.found.append((offset, record))
            self.bytes += len(record)
            while len(self.found) > self._limit or (self.bytes > self._bytes_max and len(self.found) > 1):
                self.bytes -= len(self.found.popleft()[1])
                self.is_full = True
        return Taken.LAST if offset == self._end - 1 else Taken.MORE


class RecordReader:
    """Reads records for requests. At most READERS_MAX requests hold batches in memory; others wait."""

    def __init__(self, broker: Broker) -> None:
        self._broker: Final = broker
        self._turns: Final = asyncio.Semaphore(READERS_MAX)

    async def page(
        self, partition: Partition, offset: int, *, limit: int, wanted: Filter = EVERY, whole: bool = False
    ) -> Page:
        """Return a page of records from an offset on. Raises BrokerError if they cannot be read.

        Args:
            partition: the partition.
            offset: offset of the first record.
            limit: maximum number of records.
            wanted: return only records that match.
            whole: do not truncate keys, values and headers.
        """
        log = partition.log
        end = log.readable_offset
        begin = min(max(offset, log.first_offset), end)
        page = Page(partition.number, log.first_offset, end, begin, begin)
        taker = _PageTaker(page, limit=limit, wanted=wanted, whole=whole)
        page.next_offset = await self.each(partition, begin, taker.take)
        return page

    async def page_before(
        self, partition: Partition, before: int, *, limit: int, wanted: Filter = EVERY, whole: bool = False
    ) -> Page:
        """Return the last matching records before an offset. Raises BrokerError if they cannot be read.

        Batches can only be read forwards, so this reads parts of growing size, the last one first. A part that exceeds
        the read limit is not returned. If the first part exceeds the limit, its last record is returned alone, whatever
        its size.
        """
        log = partition.log
        end = min(max(before, log.first_offset), log.readable_offset)
        page = Page(partition.number, log.first_offset, log.readable_offset, end, end)
        window, left, bytes_left = WINDOW_MIN, ReadLimit(), PAGE_BYTES_MAX
        parts: list[list[bytes]] = []
        while page.begin_offset > log.first_offset and limit > 0 and page.looked_at < LOOKED_AT_MAX:
            begin = max(log.first_offset, page.begin_offset - window)
            taker = _PartTaker(
                partition.number, page.begin_offset, limit=limit, bytes_max=bytes_left, wanted=wanted, whole=whole
            )
            reached = await self.each(partition, begin, taker.take, limit=left)
            if left.left <= 0 and reached < page.begin_offset and window > 1:
                if page.begin_offset < end:
                    break
                window, left = 1, ReadLimit()  # these records are so large that the next ones are read one by one
                continue
            page.looked_at += taker.looked_at
            parts.append([record for _, record in taker.found])
            limit, bytes_left = limit - len(taker.found), bytes_left - taker.bytes
            page.begin_offset = taker.found[0][0] if taker.is_full else begin
            if taker.is_full or bytes_left <= 0:
                break
            window = min(2 * window, WINDOW_MAX)
        page.records = [msgspec.Raw(record) for part in reversed(parts) for record in part]
        return page

    async def each(self, partition: Partition, offset: int, take: Take, *, limit: ReadLimit | None = None) -> int:
        """Call ``take`` with each record from an offset to the present end.

        Return the offset after the last record used.

        ``limit`` is shared by all partitions that a request reads. Raises BrokerError if they cannot be read.
        """
        end, goes_on = partition.log.readable_offset, True
        limit = limit or ReadLimit()
        async with self._turns:
            while offset < end and goes_on and limit.left > 0:
                read = await fetch(self._broker, partition, offset, bytes_max=READ_BYTES)
                try:
                    copies = [bytes(chunk) for chunk in read.chunks]
                finally:
                    read.pin.release()
                if not copies:
                    break
                offset, goes_on, count = await _in_thread(_offer, copies, offset, take)
                limit.left -= count
                if goes_on:
                    offset = max(offset, read.next_offset)
        return offset

    async def read_one(self, partition: Partition, offset: Any, use: Callable[[Rows, int], object]) -> None:
        """Call ``use`` in a thread with the rows of a batch and the index of the record at an offset.

        Raises Invalid(INVALID_REQUEST) if the offset is not a number, and Missing(OFFSET_OUT_OF_RANGE) if there is no
        record.
        """
        if type(offset) is not int:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"offset must be a number got={offset!r:.40}")
        was_found = False

        def take(rows: Rows, index: int) -> Taken:
            nonlocal was_found
            if rows.offset(index) == offset:  # if not equal, compaction has removed the record
                was_found = True
                use(rows, index)
            return Taken.LAST

        if partition.log.first_offset <= offset < partition.log.readable_offset:
            await self.each(partition, offset, take)
        if not was_found:
            raise Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"no such record partition={partition.number} offset={offset}")


async def _in_thread(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run a function in a thread, and return its result.

    If the request is cancelled, this still waits for the thread, because the thread holds a batch in memory.
    """
    thread = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.wait([thread])
        raise


def _offer(chunks: Sequence[bytes], offset: int, take: Take) -> tuple[int, bool, int]:
    """Call ``take`` with the records of batches from an offset on. Called in a thread.

    Returns the offset after the last record used, whether to continue, and the number of decoded bytes.
    """
    decoded = 0
    for batch in _batches(chunks):
        plain = expand_body(batch)
        decoded += len(plain)
        rows = Rows(plain)
        for index in range(record_at_offset(plain, offset), rows.count):
            taken = take(rows, index)
            if taken is Taken.LEFT:
                return rows.offset(index), False, decoded
            offset = rows.offset(index) + 1
            if taken is Taken.LAST:
                return offset, False, decoded
    return offset, True, decoded


def _batches(chunks: Sequence[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        at = 0
        while at < len(chunk):
            size = read_header(chunk, at).length
            yield chunk[at : at + size]
            at += size


def record_json(rows: Rows, index: int, partition: int, *, whole: bool = False) -> bytes:
    """Encode a record as JSON. The field ``header_count`` includes headers that did not fit."""
    bytes_max = None if whole else SHOWN_BYTES_MAX
    headers_max = PAGE_BYTES_MAX if whole else HEADERS_BYTES_MAX
    return msgspec.json.encode(
        {
            "partition": partition,
            "offset": rows.offset(index),
            "stored_at_us": rows.header.append_time_us,
            "created_at_us": rows.origin_time_us(index),
            "key": json_value(rows.key(index), bytes_max),
            "value": json_value(rows.value(index), bytes_max),
            "headers": json_headers(rows.headers(index), part_max=bytes_max or headers_max, json_max=headers_max),
            "header_count": rows.header_count(index),
        }
    )
