"""Records as the admin API shows them: read in small parts, decoded beside the loop.

Promises: one page holds no more than its limits, however large batches are; what is not text is spelled in base64. Must not know: who asks.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from polywire.broker.broker import Broker
from polywire.broker.topics import Partition
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.http.lag import fetched
from polywire.records.columns import Record
from polywire.records.compression import expand_body
from polywire.records.header import read_header
from polywire.records.lookup import record_at_offset
from polywire.records.reshape import slice_records
from polywire.records.rows import to_records

READ_BYTES: Final = 256 * 1024  # asked for at once; one batch is read whole
RECORDS_MAX: Final = 500  # of one page
SHOWN_BYTES_MAX: Final = 4 * 1024  # of a value or header on a page of many
PAGE_BYTES_MAX: Final = 2 * 1024 * 1024  # of values on a page
LOOKED_AT_MAX: Final = 20_000  # records looked through for a key before the page is answered as it is
DECODED_AT_ONCE: Final = 1_000  # records
Take = Callable[[Record], bool]


@dataclass(slots=True)
class Page:
    """Some records of a partition. next_offset: where to read on. looked_at: records that were seen, those that did not match included."""

    partition: int
    first_offset: int
    end_offset: int
    next_offset: int
    records: list[Mapping[str, Any]] = field(default_factory=list)
    looked_at: int = 0
    value_bytes: int = 0

    def is_full(self, limit: int) -> bool:
        """Whether nothing more goes onto it."""
        return len(self.records) >= limit or self.value_bytes >= PAGE_BYTES_MAX or self.looked_at >= LOOKED_AT_MAX


async def read_page(
    broker: Broker, partition: Partition, offset: int, *, limit: int, key: bytes | None = None, whole: bool = False
) -> Page:
    """Records from an offset on, of one key where it is given. whole: values are not cut short. Raises BrokerError."""
    log = partition.log
    end = log.readable_offset
    begin = min(max(offset, log.first_offset), end)
    page = Page(partition.number, log.first_offset, end, begin)

    def take(record: Record) -> bool:
        page.looked_at += 1
        if key is None or record.key == key:
            page.value_bytes += len(record.value or b"")
            page.records.append(shown(record, page.partition, whole=whole))
        return not page.is_full(limit)

    at_once = DECODED_AT_ONCE if key is not None else min(limit, DECODED_AT_ONCE)
    page.next_offset = await read_each(broker, partition, begin, take, at_once=at_once)
    return page


async def read_each(
    broker: Broker, partition: Partition, offset: int, take: Take, *, at_once: int = DECODED_AT_ONCE
) -> int:
    """Hand records from an offset on, of those that are there now, to ``take`` until it has enough; returns the offset behind the last one.

    take: called in a thread; returns whether it takes more. at_once: records decoded for it together. Raises BrokerError.
    """
    end, goes_on = partition.log.readable_offset, True
    while offset < end and goes_on:
        read = await fetched(broker, partition, offset, bytes_max=READ_BYTES)
        try:
            copies = [bytes(chunk) for chunk in read.chunks]
        finally:
            read.pin.release()
        if not copies:
            break
        offset, goes_on = await asyncio.to_thread(_hand_out, copies, offset, take, at_once)
        if goes_on:
            offset = max(offset, read.next_offset)
    return offset


async def read_one(broker: Broker, partition: Partition, offset: Any) -> Record:
    """The record at an offset that somebody named. Raises Invalid(INVALID_REQUEST), Missing(OFFSET_OUT_OF_RANGE)."""
    if type(offset) is not int:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"offset is a number got={offset!r:.40}")
    found: list[Record] = []

    def take(record: Record) -> bool:
        found.append(record)
        return False

    if partition.log.first_offset <= offset < partition.log.readable_offset:
        await read_each(broker, partition, offset, take, at_once=1)
    if not found or found[0].offset != offset:  # it may have been compacted away
        raise Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"no such record partition={partition.number} offset={offset}")
    return found[0]


def _hand_out(chunks: Sequence[bytes], offset: int, take: Take, at_once: int) -> tuple[int, bool]:
    """In a thread: records of these chunks, as long as they are taken; the offset behind the last, and whether there may be more."""
    for batch in _batches(chunks):
        for record in _records(batch, offset, at_once):
            offset = record.offset + 1
            if not take(record):
                return offset, False
    return offset, True


def _batches(chunks: Sequence[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        at = 0
        while at < len(chunk):
            size = read_header(chunk, at).length
            yield chunk[at : at + size]
            at += size


def _records(stored: bytes, offset: int, at_once: int) -> Iterator[Record]:
    """The records of a stored batch, from an offset on."""
    batch = expand_body(stored)
    count = read_header(batch).record_count
    for index in range(record_at_offset(batch, offset), count, at_once):
        yield from to_records(slice_records(batch, index, min(index + at_once, count)))


def shown(record: Record, partition: int, *, whole: bool = False) -> Mapping[str, Any]:
    """A record for JSON."""
    bytes_max = None if whole else SHOWN_BYTES_MAX
    return {
        "partition": partition,
        "offset": record.offset,
        "stored_at_us": record.append_time_us,
        "created_at_us": record.origin_time_us,
        "key": spelled(record.key, bytes_max),
        "value": spelled(record.value, bytes_max),
        "headers": [
            {
                "key": spelled(header.key, bytes_max),
                "value": spelled(header.value, bytes_max),
                "kind": header.value_kind.name.lower(),
            }
            for header in record.headers
        ],
    }


def spelled(data: bytes | None, bytes_max: int | None) -> Mapping[str, Any] | None:
    """Bytes for JSON: as text where they are, else in base64; None stays None."""
    if data is None:
        return None
    cut = data if bytes_max is None else data[:bytes_max]
    facts = {"bytes": len(data), "cut": len(cut) < len(data)}
    try:
        text = cut.decode()
    except UnicodeDecodeError as error:
        if not facts["cut"] or error.start < len(cut) - 3:
            return {"base64": b64encode(cut).decode(), **facts}
        text = cut[: error.start].decode()  # cut in the middle of a character
    return {"text": text, **facts}
