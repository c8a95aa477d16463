"""Read the delivery and expiry times of records (``deliver.at``, ``expires.at``) from stored batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from polywire.delivery_times import DELAY_MS_MAX, DELIVER_AT, EXPIRES_AT, parsed_ms
from polywire.records.columns import Column
from polywire.records.compression import expand_body
from polywire.records.fields import header_fields
from polywire.records.header_numbers import ABSENT, NO_NUMBER, batches_with, header_numbers
from polywire.records.rows import Rows
from polywire.types import Buffer

MARKS_MAX: Final = 4096  # delayed records that are read at once, so that the event loop is not blocked
_DELIVER_AT: Final = DELIVER_AT.encode()
_EXPIRES_AT: Final = EXPIRES_AT.encode()
_DELTAS: Final = 1 << Column.OFFSET_DELTAS
_facts: Final = header_fields("length", "base_offset", "append_time_us", "offset_span")


class Marks(msgspec.Struct, frozen=True):
    """Times of some consecutive records, in milliseconds since 1970, by offset.

    Attributes:
        due_ms: when records are due that were sent with a delay. Malformed times are ignored.
        expires_ms: when records must no longer be delivered.
        end: offset after the last record that was read.
    """

    due_ms: dict[int, int]
    expires_ms: dict[int, int]
    end: int


def read_marks(chunks: Sequence[memoryview], first: int, end: int, *, due_from: int) -> Marks:
    """Read the times of the records of [first, end), or fewer if many of them are delayed.

    Delays are read from ``due_from`` on. Raises Invalid(INVALID_BATCH).
    """
    due: dict[int, int] = {}
    expires: dict[int, int] = {}
    is_full = False
    for batch, append_time_us in _batches_with_times(chunks, first, end):
        last_ms = append_time_us // 1000 + DELAY_MS_MAX
        for offset, time_ms in _times(batch, _DELIVER_AT, max(first, due_from), end):
            if len(due) == MARKS_MAX:
                end, is_full = offset, True
                break
            if time_ms <= last_ms:
                due[offset] = time_ms
        expires.update(_times(batch, _EXPIRES_AT, first, end))
        if is_full:
            break
    return Marks(due, expires, end)


def _batches_with_times(chunks: Sequence[memoryview], first: int, end: int) -> Iterator[tuple[Buffer, int]]:
    """Yield the batches of [first, end) whose records may have such times: decompressed, with their append time."""
    for chunk in chunks:
        for at in batches_with(chunk, _DELIVER_AT, _EXPIRES_AT):
            length, base, append_time_us, span = _facts(chunk, at)
            if base < end and base + span > first:
                yield expand_body(chunk[at : at + length]), append_time_us


def _times(batch: Buffer, key: bytes, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield offset and time of the records of [first, end) that have the header, in order."""
    numbers = header_numbers(batch, key) if first < end else None
    if numbers is None:
        return
    rows = Rows(batch)
    base = rows.header.base_offset
    is_dense = not rows.header.columns & _DELTAS
    skipped = max(first - base, 0) if is_dense else 0
    for row, number in enumerate(numbers[skipped:], skipped):
        if number == ABSENT:
            continue
        offset = base + row if is_dense else rows.offset(row)
        if offset >= end:
            return
        if number != NO_NUMBER:
            time_ms: int | None = number
        else:
            text = rows.last_header(row, key)
            time_ms = None if text is None else parsed_ms(text.value or b"")
        if time_ms is not None and offset >= first:
            yield offset, time_ms
