"""Any records in any batches, read in any range: Arrow shows their content, and its tables convert back."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from polywire.client.arrow import HEADER_LIST, arrow_to_batches, chunk_to_arrow
from polywire.client.bulk import StoredChunk
from polywire.records.batch import stamp
from polywire.records.columns import Header, HeaderKind, Record
from polywire.records.rows import from_records, to_records

FIELDS: list[pa.Field[Any]] = [
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("offset", pa.int64()),
    pa.field("headers", HEADER_LIST),
]
SCHEMA = pa.schema(FIELDS)

payloads = st.none() | st.binary(max_size=9)
headers = st.builds(
    lambda key, value: Header(key.encode(), value, value_kind=HeaderKind.NULL if value is None else HeaderKind.RAW),
    st.text("abcä", max_size=3),
    payloads,
)
records = st.builds(Record, payloads, payloads, st.lists(headers, max_size=3).map(tuple))
batches = st.lists(st.lists(records, min_size=1, max_size=6), min_size=1, max_size=5)


@given(batches, st.integers(0, 30), st.integers(0, 30), st.integers(1, 7))
def test_ranges_of_batches(given_batches: list[list[Record]], start: int, size: int, rows_max: int) -> None:
    data, everything = bytearray(), [record for batch in given_batches for record in batch]
    offset = 0
    for batch in given_batches:
        stored = from_records(batch)
        stamp(stored, 0, 1, 1, offset, 0, 5)
        offset += len(batch)
        data += stored
    chunk = StoredChunk("t", 0, memoryview(data), start, start + size, offset)
    found = chunk_to_arrow(chunk, SCHEMA.names, SCHEMA, rows_max=rows_max)
    for batch_found in found:
        batch_found.validate(full=True)
        assert batch_found.num_rows <= rows_max
    table = pa.Table.from_batches(found, schema=SCHEMA)
    wanted = [
        {
            "key": record.key,
            "value": record.value,
            "offset": start + index,
            "headers": [{"key": h.key.decode(), "value": h.value} for h in record.headers] or None,
        }
        for index, record in enumerate(everything[start : start + size])
    ]
    assert table.to_pylist() == wanted
    again = [record for made in arrow_to_batches(table) for record in to_records(made)]
    assert [(r.key, r.value, r.headers) for r in again] == [
        (r.key, r.value, r.headers) for r in everything[start : start + size]
    ]
