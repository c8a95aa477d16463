"""``Record``, the record of the client API, and its conversion from and to stored batches.

* When a record is created, text is encoded as UTF-8, and invalid keys, values and headers are rejected.
* A batch is decoded or built with a few calls for all of its records.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self, TypeAlias, Unpack

from polywire.client.rows import rows_of
from polywire.delivery_times import DeliveryTimes, time_headers
from polywire.errors import ErrorCode, Invalid
from polywire.records import columns
from polywire.records.batch import from_columns, layout, walk
from polywire.records.columns import INT_BYTES_MAX, BatchFlags, Column, Header, HeaderKind, HeaderValue, typed
from polywire.records.compression import expand_body
from polywire.records.fields import header_fields
from polywire.records.rows import from_records, to_records
from polywire.types import Buffer

Text: TypeAlias = str | bytes | bytearray | memoryview
Headers: TypeAlias = Mapping[str, HeaderValue]

NO_HEADERS: Final[Headers] = MappingProxyType({})
EXPANDED_BYTES_MAX: Final = 64 << 20  # limit for the size of a decompressed body
RECORD_OVERHEAD_BYTES: Final = 64  # estimated memory per record, without key and value
TEXT_CHARACTERS_SHOWN: Final = 60  # of text that cannot be encoded
PRODUCER_EPOCH: Final = 0  # each producer has its own id, so it never needs a second epoch
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)
INT_BYTES: Final = 8

_COMPRESSED: Final = int(BatchFlags.LZ4 | BatchFlags.ZSTD)
# Batches with more columns than keys and values are decoded and built record by record.
_PLAIN_COLUMNS: Final = sum(
    1 << column
    for column in (
        Column.VALUE_OFFSETS,
        Column.VALUE_BYTES,
        Column.KEY_OFFSETS,
        Column.KEY_BYTES,
        Column.PRODUCER_ID,
        Column.SEQUENCES,
    )
)
_facts: Final = header_fields("length", "flags", "columns", "record_count", "base_offset", "append_time_us")


class _Fields(NamedTuple):
    value: bytes | None
    key: bytes | None
    headers: Headers
    topic: str
    partition: int
    offset: int
    append_time_us: int
    origin_time_us: int | None


class Record(_Fields):
    """A record to send, or one that was read from the log.

    Attributes:
        value: bytes or None.
        key: bytes or None.
        headers: mapping of names to values.
        origin_time_us: the writer's timestamp in microseconds since 1970, or None.
        topic: full name; "" in a record to send.
        partition: number of the partition; -1 in a record to send.
        offset: offset in the partition; -1 in a record to send.
        append_time_us: when the broker appended the record, in microseconds since 1970; 0 in a record to send.

    Example:
        record = Record("hello", key="a", headers={"source": "web"})
        assert record.value == b"hello"
    """

    __slots__ = ()

    def __new__(
        cls,
        value: Text | None,
        key: Text | None = None,
        headers: Headers | None = None,
        *,
        origin_time_us: int | None = None,
        timestamp: datetime | None = None,
        **times: Unpack[DeliveryTimes],
    ) -> Self:
        """Create a record to send.

        Args:
            value: str (stored as UTF-8), bytes, or None for no value.
            key: str, bytes or None. Records with the same key go to the same partition, in order.
            headers: mapping of names to str, bytes, int, float, bool or None. Types are preserved if the protocol
                supports them.
            origin_time_us: timestamp of the event, in microseconds since 1970.
            timestamp: the same as a datetime with a time zone.
            deliver_at: when queues deliver the record, as in ``Producer.send``.
            delay_s: the same, in seconds from now.
            expires_at: until when queues deliver the record.
            ttl_s: the same, in seconds from now.

        Raises:
            Invalid: INVALID_REQUEST: an argument has the wrong type; the message says what is expected.
        """
        return tuple.__new__(
            cls,
            (
                as_bytes(value, "a value"),
                as_bytes(key, "a key"),
                as_headers(_timed(headers, times) if times else headers),
                "",
                -1,
                -1,
                0,
                _as_time_us(origin_time_us, timestamp),
            ),
        )

    @property
    def text(self) -> str:
        """The value as text. It is "" if there is no value. Raises UnicodeDecodeError if it is not UTF-8."""
        return (self.value or b"").decode()

    def json(self) -> Any:
        """Return the value decoded from JSON. It is None if there is no value. Raises ValueError if it is not JSON."""
        return None if self.value is None else json.loads(self.value)

    @property
    def timestamp(self) -> datetime | None:
        """The writer's timestamp, in UTC, or None."""
        return None if self.origin_time_us is None else EPOCH + self.origin_time_us * MICROSECOND

    @property
    def time(self) -> datetime:
        """The append time, in UTC."""
        return EPOCH + self.append_time_us * MICROSECOND


def _timed(headers: Headers | None, times: DeliveryTimes) -> Headers:
    return {**as_headers(headers), **time_headers(**times)}


_make: Final[partial[Record]] = partial(tuple.__new__, Record)


def valid_record(value: bytes | None, key: bytes | None, headers: Headers) -> Record:
    """Return a record to send, without the checks and conversions of ``Record``."""
    return _make((value, key, headers, "", -1, -1, 0, None))


def as_bytes(given: object, what: str) -> bytes | None:
    """Return str as UTF-8 and bytes-like values as bytes. Raises Invalid(INVALID_REQUEST) for other types.

    ``what`` names the value in the message.
    """
    if given is None or type(given) is bytes:
        return given
    if isinstance(given, str):
        return as_utf8(given, what)
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    raise Invalid(ErrorCode.INVALID_REQUEST, f"{what} must be str, bytes or None got={type(given).__name__}")


def as_utf8(text: str, what: str) -> bytes:
    """Return text as UTF-8. Raises Invalid(INVALID_REQUEST) for half a surrogate pair; ``what`` names the text."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"{what} has half a surrogate pair, which UTF-8 cannot encode (pass a name of a file through os.fsencode)"
            f" got={text[:TEXT_CHARACTERS_SHOWN]!r}",
        ) from None


def as_headers(given: object) -> Headers:
    """Return a read-only copy of the headers. Raises Invalid(INVALID_REQUEST) if a name or value cannot be stored."""
    if not given:
        return NO_HEADERS
    if not isinstance(given, Mapping):
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f'headers must be a dict like {{"source": "web"}} got={type(given).__name__}'
        )
    for name, value in given.items():
        if not isinstance(name, str):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"header name must be str got={type(name).__name__}")
        if value is not None and not isinstance(value, str | bytes | int | float):
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"header value must be str, bytes, int, float, bool or None name={name!r} got={type(value).__name__}",
            )
        _header(name, value)
    return MappingProxyType(dict(given))


def as_record(
    value: Text | Record | None,
    key: Text | None,
    headers: Headers | None,
    timestamp: datetime | None,
    **times: Unpack[DeliveryTimes],
) -> Record:
    """Return the record to send. Raises Invalid(INVALID_REQUEST)."""
    if not isinstance(value, Record):
        return Record(value, key, headers, timestamp=timestamp, **times)
    if key is None and headers is None and timestamp is None and not times:
        return value
    raise Invalid(ErrorCode.INVALID_REQUEST, "key, headers, timestamp and times must be set in the Record")


def size_of(record: Record) -> int:
    """Return about how much memory a record needs, in bytes."""
    size = RECORD_OVERHEAD_BYTES + len(record.value or b"") + len(record.key or b"")
    if record.headers:
        size += sum([len(name) + len(str(value)) for name, value in record.headers.items()])
    return size


def as_json(value: object) -> bytes:
    """Return a value as JSON in UTF-8. Raises Invalid(INVALID_REQUEST) if JSON cannot represent it."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"the value cannot be written as JSON: {error}") from None


def _as_time_us(given: object, timestamp: object) -> int | None:
    if given is not None and type(given) is not int:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"origin time must be an int, in microseconds since 1970 got={type(given).__name__}",
        )
    if given is not None and not -(1 << 63) <= given < 1 << 63:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"origin time does not fit 64 bits got={given}")
    if timestamp is None:
        return given
    if given is not None:
        raise Invalid(ErrorCode.INVALID_REQUEST, "use either timestamp or origin_time_us, not both")
    if not isinstance(timestamp, datetime) or timestamp.tzinfo is None:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"timestamp must be a datetime with a time zone got={timestamp!r}")
    return (timestamp - EPOCH) // MICROSECOND


def to_stored(record: Record) -> columns.Record:
    """Convert a record to the form that protocol clients use."""
    headers = tuple(_header(name, value) for name, value in record.headers.items())
    return columns.Record(record.value, record.key, headers=headers, origin_time_us=record.origin_time_us)


def from_stored(record: columns.Record, topic: str, partition: int) -> Record:
    """Convert a record from the form that protocol clients use."""
    headers = {header.key.decode(errors="replace"): typed(header.value, header.value_kind) for header in record.headers}
    return _make(
        (
            record.value,
            record.key,
            MappingProxyType(headers) if headers else NO_HEADERS,
            topic,
            partition,
            record.offset,
            record.append_time_us,
            record.origin_time_us,
        )
    )


def encode_batch(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None],
    others: Mapping[int, Record],
    *,
    producer_id: bytes | None,
    base_sequence: int,
) -> bytearray:
    """Build a stored batch from values and keys. ``others`` has the records with more than these, by row.

    Raises Invalid(INVALID_BATCH), Invalid(RECORD_TOO_LARGE).
    """
    if others or None in values or (None in keys and any(key is not None for key in keys)):
        records = [
            to_stored(others[row]) if row in others else columns.Record(value, key)
            for row, (value, key) in enumerate(zip(values, keys, strict=True))
        ]
        epoch = PRODUCER_EPOCH if producer_id is not None else -1
        return from_records(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=base_sequence)
    made: dict[int, Buffer] = {Column.VALUE_OFFSETS: _offsets(values), Column.VALUE_BYTES: b"".join(values)}  # type: ignore[arg-type]
    if None not in keys:
        made[Column.KEY_OFFSETS] = _offsets(keys)
        made[Column.KEY_BYTES] = b"".join(keys)  # type: ignore[arg-type]  # no key is None
    if producer_id is None:
        return from_columns(made, len(values))
    made[Column.PRODUCER_ID] = producer_id
    return from_columns(made, len(values), producer_epoch=PRODUCER_EPOCH, base_sequence=base_sequence)


def decode_batches(payload: Buffer, topic: str, partition: int, offset: int) -> list[Record]:
    """Decode the records of consecutive stored batches, from ``offset`` on. Raises Invalid(INVALID_BATCH)."""
    found: list[Record] = []
    view = memoryview(payload)
    for at in walk(payload).tolist():
        length, flags, present, count, base_offset, time_us = _facts(view, at)
        source: Buffer = payload
        position = at
        if flags & _COMPRESSED:
            source, position = expand_body(view[at : at + length], EXPANDED_BYTES_MAX), 0
        if present & ~_PLAIN_COLUMNS:
            whole = to_records(source, position)
            found += [from_stored(record, topic, partition) for record in whole if record.offset >= offset]
            continue
        found += rows_of(
            Record,
            source,
            layout(source, position),
            max(0, offset - base_offset),
            count,
            base_offset,
            headers=NO_HEADERS,
            topic=topic,
            partition=partition,
            append_time_us=time_us,
        )
    return found


def _offsets(parts: Iterable[Any]) -> bytes:
    return array("i", accumulate(map(len, parts), initial=0)).tobytes()


def _header(name: str, value: HeaderValue) -> Header:
    """Return a header with the type of the Python value.

    Raises Invalid(INVALID_REQUEST) for an integer that is too large, and for text that UTF-8 cannot encode.
    """
    key = as_utf8(name, "a header name")
    match value:
        case None:
            return Header(key, None, value_kind=HeaderKind.NULL)
        case bool():
            return Header(key, bytes([value]), value_kind=HeaderKind.BOOL)
        case int():
            for size, kind in ((INT_BYTES, HeaderKind.INT64), (INT_BYTES_MAX, HeaderKind.INT128)):
                if -(1 << (8 * size - 1)) <= value < 1 << (8 * size - 1):
                    return Header(key, value.to_bytes(size, "little", signed=True), value_kind=kind)
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"header value is an integer of more than {8 * INT_BYTES_MAX} bits name={name!r}",
            )
        case float():
            return Header(key, struct.pack("<d", value), value_kind=HeaderKind.FLOAT64)
        case str():
            return Header(key, as_utf8(value, "a header value"), value_kind=HeaderKind.STRING)
        case _:
            return Header(key, bytes(value), value_kind=HeaderKind.RAW)
