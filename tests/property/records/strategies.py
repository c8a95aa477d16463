"""Hypothesis strategies for records and batches."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from polywire.records.columns import Event, Header, HeaderKind, Record, RecordFlags

_BYTES = st.binary(max_size=40)
_KINDS = st.sampled_from([kind for kind in HeaderKind if kind is not HeaderKind.NULL])
_HEADERS = st.builds(Header, key=_BYTES, value=st.none() | _BYTES, key_kind=_KINDS, value_kind=_KINDS)
_EVENTS = st.builds(
    Event,
    type=st.text(max_size=10),
    schema_version=st.integers(0, 2**32 - 1),
    aggregate_version=st.integers(0, 2**64 - 1),
    metadata=st.none() | st.binary(min_size=1, max_size=20),
)


def _as_stored(record: Record) -> Record:
    """Return a record as a batch returns it: a null header value has the kind null, and the event decides its flag."""
    headers = tuple(
        replace(header, value_kind=HeaderKind.NULL) if header.value is None else header for header in record.headers
    )
    event_flag = RecordFlags.EVENT_SOURCED if record.event is not None else 0
    return replace(record, headers=headers, flags=record.flags | event_flag)


RECORDS = st.builds(
    Record,
    value=st.none() | _BYTES | st.binary(min_size=1000, max_size=2000),
    key=st.none() | _BYTES,
    headers=st.lists(_HEADERS, max_size=3).map(tuple),
    origin_time_us=st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    id=st.none() | st.binary(min_size=16, max_size=16).filter(any),
    flags=st.sampled_from([0, 0, RecordFlags.KAFKA_MAGIC_0.value]),
    event=st.none() | st.none() | _EVENTS,
).map(_as_stored)

LISTS = st.lists(RECORDS, min_size=1, max_size=9) | st.lists(
    st.builds(Record, value=st.none() | _BYTES, key=st.none() | _BYTES), min_size=1, max_size=40
)
