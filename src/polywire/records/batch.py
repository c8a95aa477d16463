"""Import this module for all functions on stored batches (decision 0101).

They build and validate batches, assign offsets, find records, and merge or split batches. They accept buffers and
return values or bytes, with one compiled call per batch.
"""

from __future__ import annotations

from polywire.records.build import from_columns, from_spans
from polywire.records.check import validate
from polywire.records.header import (
    check_body,
    check_header,
    first_damaged,
    headers_of,
    layout,
    read_header,
    stamp,
    stamp_producer,
    totals,
    walk,
)
from polywire.records.lookup import (
    address_of,
    fill_spans,
    longest_payload,
    offset_of,
    record_at_address,
    record_at_offset,
    spans_of,
)
from polywire.records.reshape import keep, merge, slice_records, spread, take

__all__ = [
    "address_of",
    "check_body",
    "check_header",
    "fill_spans",
    "first_damaged",
    "from_columns",
    "from_spans",
    "headers_of",
    "keep",
    "layout",
    "longest_payload",
    "merge",
    "offset_of",
    "read_header",
    "record_at_address",
    "record_at_offset",
    "slice_records",
    "spans_of",
    "spread",
    "stamp",
    "stamp_producer",
    "take",
    "totals",
    "validate",
    "walk",
]
