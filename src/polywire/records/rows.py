"""Convert between stored batches and ``Record`` objects (decision 0101).

The conversion is slow: clients, tests and rare requests use it. ``to_records(from_records(records))`` returns equal
records, with two exceptions: an id of zeros becomes None, and empty event metadata becomes None.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from polywire.errors import ErrorCode, Invalid
from polywire.records.build import from_columns
from polywire.records.columns import NO_TIME, Column, Event, Header, HeaderKind, Record, RecordFlags
from polywire.records.header import layout, read_header
from polywire.types import Buffer

_ID_BYTES = 16
_NO_ID = bytes(_ID_BYTES)
_UNSIGNED_MAX = 2**64 - 1
_FLAGS = sum(RecordFlags)  # a plain int, so that ~ of it removes unknown bits
HEADER_BYTES_STORED = 10  # bytes of a header besides its key and value: two kinds and two end positions


def from_records(
    records: Sequence[Record], *, producer_id: bytes | None = None, producer_epoch: int = -1, base_sequence: int = 0
) -> bytearray:
    """Build a batch without offsets. The records' offsets and append times are ignored.

    If a producer is given, a record without a sequence number gets that of the previous record plus one. The first
    record gets ``base_sequence``.

    Raises:
        Invalid: INVALID_BATCH: no records, or a value that a batch cannot hold. RECORD_TOO_LARGE: above the largest
            batch.
    """
    columns: dict[int, Buffer] = {}
    try:
        _put_payloads(columns, records)
        first_sequence = _put_producer(columns, records, producer_id, base_sequence)
        _put_fixed(columns, records)
        _put_headers(columns, records)
        _put_events(columns, records)
        return from_columns(
            columns,
            len(records),
            producer_epoch=producer_epoch if producer_id is not None else -1,
            base_sequence=first_sequence,
        )
    except OverflowError as error:
        raise Invalid(ErrorCode.INVALID_BATCH, f"a number of a record is out of range: {error}") from error


def to_records(batch: Buffer, at: int = 0) -> list[Record]:
    """Return the records of the valid, uncompressed batch at ``at``. Raises Invalid(INVALID_BATCH) if there is none."""
    header = read_header(batch, at)
    columns = _columns(batch, at)
    count = header.record_count
    values = _payloads(columns, Column.VALUE_OFFSETS, Column.VALUE_VALIDITY, count)
    keys = _payloads(columns, Column.KEY_OFFSETS, Column.KEY_VALIDITY, count)
    flags = columns.get(Column.RECORD_FLAGS, bytes(count))
    deltas = _numbers(columns, Column.OFFSET_DELTAS, "I", range(count))
    times = _numbers(columns, Column.ORIGIN_TIMES_US, "q", [NO_TIME] * count)
    ids = columns.get(Column.IDS)
    sequences: Sequence[int | None] = [None] * count
    if Column.PRODUCER_ID in columns:
        sequences = _numbers(columns, Column.SEQUENCES, "Q", range(header.base_sequence, header.base_sequence + count))
    headers = _headers(columns, count)
    events = _events(columns, flags, count)
    return [
        Record(
            value=values[i],
            key=keys[i],
            headers=headers[i],
            offset=header.base_offset + deltas[i] if header.partition else -1,
            append_time_us=header.append_time_us,
            origin_time_us=None if times[i] == NO_TIME else times[i],
            id=None if ids is None else _id(ids, i),
            sequence=sequences[i],
            flags=flags[i],
            event=events[i],
        )
        for i in range(count)
    ]


def producer_of(batch: Buffer, at: int = 0) -> bytes | None:
    """Return the producer id of the batch at ``at``, or None.

    Raises Invalid if the batch is truncated or compressed.
    """
    return _columns(batch, at).get(Column.PRODUCER_ID)


class Rows:
    """Records of one valid, uncompressed batch. Each field is decoded on request.

    A record may have 1.5 million headers, so callers that filter, measure or display records decode only the fields
    they need.
    """

    __slots__ = ("_header_keys", "_header_starts", "_key_ends", "_value_ends", "_views", "count", "header")

    def __init__(self, batch: Buffer) -> None:
        """Raise Invalid(INVALID_BATCH) if the batch is truncated or compressed."""
        self.header = read_header(batch)
        self.count = self.header.record_count
        numbers, view = layout(batch), memoryview(batch).cast("B")
        places = zip(numbers[::2], numbers[1::2], strict=True)
        self._views = {i: view[place : place + size] for i, (place, size) in enumerate(places) if place >= 0}
        self._header_starts = self._ends(Column.HEADER_COUNTS)
        self._key_ends = self._ends(Column.HEADER_KEY_OFFSETS)
        self._value_ends = self._ends(Column.HEADER_VALUE_OFFSETS)
        self._header_keys: bytes | None = None

    def _ends(self, column: Column) -> memoryview[int]:
        return self._views.get(column, memoryview(b"")).cast("i")

    def offset(self, index: int) -> int:
        """Return a record's offset, or -1 if the batch has no offsets yet."""
        if not self.header.partition:
            return -1
        deltas = self._views.get(Column.OFFSET_DELTAS)
        return self.header.base_offset + (index if deltas is None else deltas.cast("I")[index])

    def origin_time_us(self, index: int) -> int | None:
        """Return the time that the producer set for a record, or None."""
        times = self._views.get(Column.ORIGIN_TIMES_US)
        time = NO_TIME if times is None else times.cast("q")[index]
        return None if time == NO_TIME else time

    def key(self, index: int) -> memoryview[int] | None:
        """Return a record's key as a view of the batch."""
        return self._payload(index, Column.KEY_OFFSETS, Column.KEY_VALIDITY)

    def value(self, index: int) -> memoryview[int] | None:
        """Return a record's value as a view of the batch."""
        return self._payload(index, Column.VALUE_OFFSETS, Column.VALUE_VALIDITY)

    def _payload(self, index: int, offsets: Column, validity: Column | None = None) -> memoryview[int] | None:
        if offsets not in self._views:
            return None
        bits = None if validity is None else self._views.get(validity)
        if bits is not None and not bits[index >> 3] >> (index & 7) & 1:
            return None
        ends = self._ends(offsets)
        return self._views[offsets + 1][ends[index] : ends[index + 1]]

    def size(self, index: int) -> int:
        """Return the size of a record's key, value and headers in the batch, in bytes."""
        numbers = self._numbers_of_headers(index)
        size = len(self.key(index) or b"") + len(self.value(index) or b"")
        if numbers:
            size += self._key_ends[numbers.stop] - self._key_ends[numbers.start]
            size += self._value_ends[numbers.stop] - self._value_ends[numbers.start]
        return size + HEADER_BYTES_STORED * len(numbers)

    def header_count(self, index: int) -> int:
        return len(self._numbers_of_headers(index))

    def headers(self, index: int) -> Iterator[Header]:
        return map(self._header, self._numbers_of_headers(index))

    def last_header(self, index: int, key: bytes) -> Header | None:
        """Return the last of a record's headers with this key and a value that is not null, or None."""
        keys, ends = self._keys_of_headers(), self._key_ends
        kinds = self._views.get(Column.HEADER_VALUE_KINDS, b"")
        for number in reversed(self._numbers_of_headers(index)):
            start, end = ends[number], ends[number + 1]
            if end - start == len(key) and kinds[number] and keys.startswith(key, start, end):
                return self._header(number)
        return None

    def event(self, index: int) -> Event | None:
        """Return a record's event fields, or None."""
        views = self._views
        if Column.EVENT_TYPE_OFFSETS not in views or not views[Column.RECORD_FLAGS][index] & RecordFlags.EVENT_SOURCED:
            return None
        kind = self._payload(index, Column.EVENT_TYPE_OFFSETS)
        metadata = self._payload(index, Column.EVENT_METADATA_OFFSETS)
        return Event(
            bytes(kind or b"").decode(),
            views[Column.EVENT_SCHEMA_VERSIONS].cast("I")[index],
            views[Column.AGGREGATE_VERSIONS].cast("Q")[index],
            bytes(metadata or b"") or None,
        )

    def copy(
        self,
        index: int,
        *,
        without: bytes = b"",
        omitted: Collection[bytes] = (),
        has_origin_time: bool = False,
        added: Sequence[Header] = (),
    ) -> bytearray:
        """Return a batch with only this record, without offsets.

        Args:
            without: headers whose keys begin with this prefix are not copied.
            omitted: headers with these keys are not copied either.
            has_origin_time: copy the time that the producer set, too.
            added: further headers, after those of the record.
        """
        columns: dict[int, Buffer] = {}
        _put_payload(columns, Column.VALUE_OFFSETS, self.value(index))
        if (key := self.key(index)) is not None:
            _put_payload(columns, Column.KEY_OFFSETS, key)
        if has_origin_time and (time_us := self.origin_time_us(index)) is not None:
            columns[Column.ORIGIN_TIMES_US] = array("q", [time_us]).tobytes()
        self._put_headers(columns, self._runs_without(index, without, omitted), added)
        return from_columns(columns, 1)

    def _numbers_of_headers(self, index: int) -> range:
        starts = self._header_starts
        return range(starts[index], starts[index + 1]) if len(starts) else range(0)

    def _keys_of_headers(self) -> bytes:
        if self._header_keys is None:
            self._header_keys = bytes(self._views.get(Column.HEADER_KEY_BYTES, b""))
        return self._header_keys

    def _header(self, number: int) -> Header:
        views = self._views
        key = views[Column.HEADER_KEY_BYTES][self._key_ends[number] : self._key_ends[number + 1]]
        value = views[Column.HEADER_VALUE_BYTES][self._value_ends[number] : self._value_ends[number + 1]]
        key_kind, value_kind = views[Column.HEADER_KEY_KINDS][number], views[Column.HEADER_VALUE_KINDS][number]
        return Header(bytes(key), bytes(value) if value_kind else None, HeaderKind(key_kind), HeaderKind(value_kind))

    def _runs_without(self, index: int, prefix: bytes, omitted: Collection[bytes]) -> list[range]:
        """Return index ranges of a record's headers, without those whose keys begin with ``prefix`` or are omitted."""
        numbers = self._numbers_of_headers(index)
        if not prefix and not omitted:
            return [numbers]
        keys, ends, runs, start = self._keys_of_headers(), self._key_ends, [], numbers.start
        for number in numbers:
            key = keys[ends[number] : ends[number + 1]]
            if (prefix and key.startswith(prefix)) or key in omitted:
                runs.append(range(start, number))
                start = number + 1
        return [run for run in (*runs, range(start, numbers.stop)) if run]

    def _put_headers(self, columns: dict[int, Buffer], runs: Sequence[range], added: Sequence[Header]) -> None:
        count = sum(map(len, runs)) + len(added)
        if not count:
            return
        columns[Column.HEADER_COUNTS] = _offsets([count])
        for kinds, more_kinds in (
            (Column.HEADER_KEY_KINDS, bytes(header.key_kind for header in added)),
            (Column.HEADER_VALUE_KINDS, bytes(header.value_kind for header in added)),
        ):
            columns[kinds] = b"".join([self._views[kinds][run.start : run.stop] for run in runs if run] + [more_kinds])
        for ends, offsets, more in (
            (self._key_ends, Column.HEADER_KEY_OFFSETS, [header.key for header in added]),
            (self._value_ends, Column.HEADER_VALUE_OFFSETS, [header.value or b"" for header in added]),
        ):
            sizes = [ends[number + 1] - ends[number] for run in runs for number in run]
            columns[offsets] = _offsets(sizes + [len(part) for part in more])
            columns[offsets + 1] = b"".join(
                [*(self._views[offsets + 1][ends[run.start] : ends[run.stop]] for run in runs if run), *more]
            )


def _put_payload(columns: dict[int, Buffer], offsets: Column, data: Buffer | None) -> None:
    """Add the columns for the key or value of a single record, None for null."""
    columns[offsets] = _offsets([len(data or b"")])
    columns[offsets + 1] = data or b""
    if data is None:
        columns[offsets + 2] = _bitmap([False])


def _offsets(sizes: Iterable[int]) -> bytes:
    return array("i", accumulate(sizes, initial=0)).tobytes()


def _bitmap(present: Sequence[bool]) -> bytes:
    bits = bytearray((len(present) + 7) // 8)
    for i, bit in enumerate(present):
        bits[i >> 3] |= bit << (i & 7)
    return bytes(bits)


def _put_payloads(columns: dict[int, Buffer], records: Sequence[Record]) -> None:
    values = [record.value for record in records]
    columns[Column.VALUE_OFFSETS] = _offsets(len(value or b"") for value in values)
    columns[Column.VALUE_BYTES] = b"".join(value or b"" for value in values)
    if None in values:
        columns[Column.VALUE_VALIDITY] = _bitmap([value is not None for value in values])
    keys = [record.key for record in records]
    if all(key is None for key in keys):
        return
    columns[Column.KEY_OFFSETS] = _offsets(len(key or b"") for key in keys)
    columns[Column.KEY_BYTES] = b"".join(key or b"" for key in keys)
    if None in keys:
        columns[Column.KEY_VALIDITY] = _bitmap([key is not None for key in keys])


def _put_producer(
    columns: dict[int, Buffer], records: Sequence[Record], producer_id: bytes | None, base_sequence: int
) -> int:
    """Add the producer id, and the sequence numbers unless they are consecutive. Return the first sequence number."""
    if producer_id is None:
        if any(record.sequence is not None for record in records):
            raise Invalid(ErrorCode.INVALID_BATCH, "a record has a sequence but the batch has no producer")
        return 0
    columns[Column.PRODUCER_ID] = producer_id
    sequences: list[int] = []
    for record in records:
        following = sequences[-1] + 1 if sequences else base_sequence
        sequences.append(following if record.sequence is None else record.sequence)
    first = sequences[0] if sequences else base_sequence
    if not 0 <= first <= _UNSIGNED_MAX:
        raise Invalid(ErrorCode.INVALID_BATCH, f"sequence out of range sequence={first}")
    if any(sequence != first + i for i, sequence in enumerate(sequences)):
        columns[Column.SEQUENCES] = array("Q", sequences).tobytes()
    return first


def _put_fixed(columns: dict[int, Buffer], records: Sequence[Record]) -> None:
    ids = [record.id or _NO_ID for record in records]
    if any(len(id_) != _ID_BYTES for id_ in ids):
        raise Invalid(ErrorCode.INVALID_BATCH, f"a record's id must have {_ID_BYTES} bytes")
    if any(id_ != _NO_ID for id_ in ids):
        columns[Column.IDS] = b"".join(ids)
    if any(record.origin_time_us is not None for record in records):
        times = [NO_TIME if record.origin_time_us is None else record.origin_time_us for record in records]
        columns[Column.ORIGIN_TIMES_US] = array("q", times).tobytes()
    flags = array("B", (_flags(record) for record in records))
    if any(flags):
        columns[Column.RECORD_FLAGS] = flags.tobytes()


def _flags(record: Record) -> int:
    if record.flags & ~_FLAGS:
        raise Invalid(ErrorCode.INVALID_BATCH, f"unknown record flags flags={record.flags:#x}")
    plain = record.flags & ~RecordFlags.EVENT_SOURCED
    return plain | RecordFlags.EVENT_SOURCED if record.event is not None else plain


def _put_headers(columns: dict[int, Buffer], records: Sequence[Record]) -> None:
    headers = [header for record in records for header in record.headers]
    if not headers:
        return
    for header in headers:
        if header.key_kind is HeaderKind.NULL or (header.value_kind is HeaderKind.NULL and header.value):
            raise Invalid(ErrorCode.INVALID_BATCH, f"header kind does not match its content key={header.key!r:.80}")
    values = [header.value or b"" for header in headers]
    value_kinds = [HeaderKind.NULL if header.value is None else header.value_kind for header in headers]
    columns[Column.HEADER_COUNTS] = _offsets(len(record.headers) for record in records)
    columns[Column.HEADER_KEY_KINDS] = bytes(header.key_kind for header in headers)
    columns[Column.HEADER_KEY_OFFSETS] = _offsets(len(header.key) for header in headers)
    columns[Column.HEADER_KEY_BYTES] = b"".join(header.key for header in headers)
    columns[Column.HEADER_VALUE_KINDS] = bytes(value_kinds)
    columns[Column.HEADER_VALUE_OFFSETS] = _offsets(len(value) for value in values)
    columns[Column.HEADER_VALUE_BYTES] = b"".join(values)


def _put_events(columns: dict[int, Buffer], records: Sequence[Record]) -> None:
    events = [record.event for record in records]
    if all(event is None for event in events):
        return
    types = [event.type.encode() if event is not None else b"" for event in events]
    columns[Column.EVENT_TYPE_OFFSETS] = _offsets(len(type_) for type_ in types)
    columns[Column.EVENT_TYPE_BYTES] = b"".join(types)
    versions = (event.schema_version if event is not None else 0 for event in events)
    columns[Column.EVENT_SCHEMA_VERSIONS] = array("I", versions).tobytes()
    versions = (event.aggregate_version if event is not None else 0 for event in events)
    columns[Column.AGGREGATE_VERSIONS] = array("Q", versions).tobytes()
    metadata = [event.metadata or b"" if event is not None else b"" for event in events]
    if any(metadata):
        columns[Column.EVENT_METADATA_OFFSETS] = _offsets(len(part) for part in metadata)
        columns[Column.EVENT_METADATA_BYTES] = b"".join(metadata)


def _columns(batch: Buffer, at: int) -> dict[int, bytes]:
    numbers = layout(batch, at)
    view = memoryview(batch).cast("B")
    places = zip(numbers[::2], numbers[1::2], strict=True)
    return {i: bytes(view[place : place + size]) for i, (place, size) in enumerate(places) if place >= 0}


def _numbers(columns: dict[int, bytes], column: Column, code: str, default: Sequence[int]) -> Sequence[int]:
    if column not in columns:
        return default
    numbers: array[int] = array(code)
    numbers.frombytes(columns[column])
    return numbers


def _parts(columns: dict[int, bytes], offsets: Column) -> list[bytes]:
    ends = _numbers(columns, offsets, "i", ())
    parts = columns[offsets + 1]
    return [parts[start:stop] for start, stop in pairwise(ends)]


def _payloads(columns: dict[int, bytes], offsets: Column, validity: Column, count: int) -> Sequence[bytes | None]:
    if offsets not in columns:
        return [None] * count
    parts = _parts(columns, offsets)
    bits = columns.get(validity)
    if bits is None:
        return parts
    return [part if bits[i >> 3] >> (i & 7) & 1 else None for i, part in enumerate(parts)]


def _id(ids: bytes, index: int) -> bytes | None:
    id_ = ids[_ID_BYTES * index : _ID_BYTES * (index + 1)]
    return None if id_ == _NO_ID else id_


def _headers(columns: dict[int, bytes], count: int) -> list[tuple[Header, ...]]:
    if Column.HEADER_COUNTS not in columns:
        return [()] * count
    keys = _parts(columns, Column.HEADER_KEY_OFFSETS)
    values = _parts(columns, Column.HEADER_VALUE_OFFSETS)
    kinds = zip(columns[Column.HEADER_KEY_KINDS], columns[Column.HEADER_VALUE_KINDS], strict=True)
    headers = [
        Header(key, value if value_kind else None, HeaderKind(key_kind), HeaderKind(value_kind))
        for key, value, (key_kind, value_kind) in zip(keys, values, kinds, strict=True)
    ]
    ends = _numbers(columns, Column.HEADER_COUNTS, "i", ())
    return [tuple(headers[start:stop]) for start, stop in pairwise(ends)]


def _events(columns: dict[int, bytes], flags: Sequence[int], count: int) -> list[Event | None]:
    if Column.EVENT_TYPE_OFFSETS not in columns:
        return [None] * count
    types = _parts(columns, Column.EVENT_TYPE_OFFSETS)
    schemas = _numbers(columns, Column.EVENT_SCHEMA_VERSIONS, "I", ())
    aggregates = _numbers(columns, Column.AGGREGATE_VERSIONS, "Q", ())
    metadata = [b""] * count
    if Column.EVENT_METADATA_OFFSETS in columns:
        metadata = _parts(columns, Column.EVENT_METADATA_OFFSETS)
    return [
        Event(types[i].decode(), schemas[i], aggregates[i], metadata[i] or None)
        if flags[i] & RecordFlags.EVENT_SOURCED
        else None
        for i in range(count)
    ]
