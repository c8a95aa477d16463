"""Records as the admin API shows them: read in small parts, decoded beside the loop.

Promises: one page holds no more than its limits, however large batches are; what is not text is spelled in base64. Must not know: who asks.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from polywire.broker.broker import Broker
from polywire.broker.topics import Partition
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
    while page.next_offset < end and not page.is_full(limit):
        read = await fetched(broker, partition, page.next_offset, bytes_max=READ_BYTES)
        try:
            copies = [bytes(chunk) for chunk in read.chunks]
        finally:
            read.pin.release()
        if not copies:
            break
        await asyncio.to_thread(partial(_put, page, copies, limit=limit, key=key, whole=whole))
        if not page.is_full(limit):
            page.next_offset = max(page.next_offset, read.next_offset)
    return page


def _put(page: Page, chunks: Sequence[bytes], *, limit: int, key: bytes | None, whole: bool) -> None:
    """In a thread: records of these chunks onto the page."""
    for chunk in chunks:
        at = 0
        while at < len(chunk) and not page.is_full(limit):
            size = read_header(chunk, at).length
            _put_batch(page, chunk[at : at + size], limit=limit, key=key, whole=whole)
            at += size


def _put_batch(page: Page, stored: bytes, *, limit: int, key: bytes | None, whole: bool) -> None:
    batch = expand_body(stored)
    count = read_header(batch).record_count
    index = record_at_offset(batch, page.next_offset)
    while 0 <= index < count and not page.is_full(limit):
        stop = min(index + DECODED_AT_ONCE, count, index + limit - len(page.records) if key is None else count)
        for record in to_records(slice_records(batch, index, stop)):
            page.next_offset = record.offset + 1
            page.looked_at += 1
            if key is None or record.key == key:
                page.value_bytes += len(record.value or b"")
                page.records.append(shown(record, page.partition, whole=whole))
            if page.is_full(limit):
                break
        index = stop


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
