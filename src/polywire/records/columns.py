"""Constants of the stored batch: header fields, columns, types of header values, and limits (decision 0101).

Header keys and values have Iggy's types (kinds), and are decoded accordingly (spec: iggy). Decoding never fails: any
bytes of any kind give a value. A value never takes more memory than its bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final, TypeAlias

import msgspec

BATCH_MAGIC: Final = 0x31425750  # "PWB1" read as little-endian u32
HEADER_BYTES: Final = 104
RECORD_BYTES_MAX: Final = (
    10_000_000  # limit of a key and of a value: the longest payload that any protocol documents is 10 MB (Iggy)
)
BATCH_BYTES_MAX: Final = 16 * 1024 * 1024 - 4096  # a batch always fits one journal write
MERGED_BYTES_MAX: Final = (
    # small batches are merged up to this size, which is still small enough to read and send single batches
    262_144
)
RECORD_COUNT_MAX: Final = 4_194_304
PRODUCER_ID_BYTES_MAX: Final = 255
WIDE_BYTES_MIN: Final = 4096  # batches of this size and above align their columns to 64 bytes
NO_TIME: Final = -(2**63)  # stored origin time of a record that has none
HeaderValue: TypeAlias = str | bytes | int | float | bool | None
INT_BYTES_MAX: Final = (
    16  # size of the widest kind; a longer "number" stays bytes, because Python refuses to print 4,300 digits
)


class Column(IntEnum):
    """Columns of a batch in their stored order. The value is the column's bit in the header field ``columns``."""

    VALUE_OFFSETS = 0
    VALUE_BYTES = 1
    VALUE_VALIDITY = 2
    KEY_OFFSETS = 3
    KEY_BYTES = 4
    KEY_VALIDITY = 5
    PRODUCER_ID = 6
    SEQUENCES = 7
    IDS = 8
    ORIGIN_TIMES_US = 9
    RECORD_FLAGS = 10
    HEADER_COUNTS = 11
    HEADER_KEY_KINDS = 12
    HEADER_KEY_OFFSETS = 13
    HEADER_KEY_BYTES = 14
    HEADER_VALUE_KINDS = 15
    HEADER_VALUE_OFFSETS = 16
    HEADER_VALUE_BYTES = 17
    EVENT_TYPE_OFFSETS = 18
    EVENT_TYPE_BYTES = 19
    EVENT_SCHEMA_VERSIONS = 20
    AGGREGATE_VERSIONS = 21
    EVENT_METADATA_OFFSETS = 22
    EVENT_METADATA_BYTES = 23
    VALUE_CRC32 = 24
    OFFSET_DELTAS = 25
    ADDRESS_DELTAS = 26


COLUMN_COUNT: Final = len(Column)


class BatchFlags(IntFlag):
    """Bits of the header field ``flags``."""

    WIDE = 1
    LZ4 = 2
    ZSTD = 4
    COMPACTED = 8


class RecordFlags(IntFlag):
    """Flags of a single record, in the column ``record_flags``."""

    KAFKA_MAGIC_0 = 1
    EVENT_SOURCED = 2
    LINE_VALUE = 4


class HeaderKind(IntEnum):
    """Types of record header keys and values: 1 to 15 as in the Iggy protocol, 0 for a null value."""

    NULL = 0
    RAW = 1
    STRING = 2
    BOOL = 3
    INT8 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    INT128 = 8
    UINT8 = 9
    UINT16 = 10
    UINT32 = 11
    UINT64 = 12
    UINT128 = 13
    FLOAT32 = 14
    FLOAT64 = 15


class BatchHeader(msgspec.Struct, frozen=True, gc=False):
    """Fixed header of a batch. Decision 0101 describes the fields."""

    length: int
    flags: int
    columns: int
    partition: int
    epoch: int
    record_count: int
    base_offset: int
    base_address: int
    append_time_us: int
    producer_epoch: int
    base_sequence: int
    body_bytes: int
    body_bytes_raw: int
    address_span: int
    offset_span: int
    body_checksum: int
    header_checksum: int

    @property
    def next_offset(self) -> int:
        """Offset after the last one that this batch covers, removed records included."""
        return self.base_offset + self.offset_span


@dataclass(frozen=True, slots=True)
class Header:
    """One typed header of a record. Key and value are raw bytes. Numbers are little-endian."""

    key: bytes
    value: bytes | None
    key_kind: HeaderKind = HeaderKind.STRING
    value_kind: HeaderKind = HeaderKind.RAW


class Event(msgspec.Struct, frozen=True):
    """Event-sourcing fields of a record. Only Cursus sets them (concepts: records#event-fields)."""

    type: str
    schema_version: int
    aggregate_version: int
    metadata: bytes | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One record as a Python object, for code that is not performance-critical, clients and tests.

    Attributes:
        offset: -1 until the record is stored.
        append_time_us: 0 until the record is stored.
    """

    value: bytes | None
    key: bytes | None = None
    headers: tuple[Header, ...] = ()
    offset: int = -1
    append_time_us: int = 0
    origin_time_us: int | None = None
    id: bytes | None = None
    sequence: int | None = None
    flags: int = 0
    event: Event | None = None


_FLOATS: Final = {HeaderKind.FLOAT32: "<f", HeaderKind.FLOAT64: "<d"}
_UNSIGNED: Final = (HeaderKind.UINT8, HeaderKind.UINT16, HeaderKind.UINT32, HeaderKind.UINT64, HeaderKind.UINT128)


def typed(data: bytes | None, kind: HeaderKind) -> HeaderValue:
    """Return the key or value of a record header in the Python type of its kind.

    Raw bytes, and bytes that are invalid for the kind, are returned unchanged.
    """
    if data is None or kind is HeaderKind.NULL:
        return None
    if kind is HeaderKind.RAW:
        return data
    if kind is HeaderKind.STRING:
        return data.decode(errors="replace")
    if kind is HeaderKind.BOOL:
        return any(data)
    if kind in _FLOATS:
        layout = _FLOATS[kind]
        return struct.unpack(layout, data)[0] if len(data) == struct.calcsize(layout) else data
    if len(data) > INT_BYTES_MAX:
        return data
    return int.from_bytes(data, "little", signed=kind not in _UNSIGNED)


def text_of(data: bytes | None, kind: HeaderKind) -> str:
    """Return the key or value of a record header as text.

    Numbers become digits, other bytes are decoded as UTF-8 with replacement characters.
    """
    value = typed(data, kind)
    match value:
        case None:
            return ""
        case bytes():
            return value.decode(errors="replace")
        case bool():
            return "true" if value else "false"
        case _:
            return str(value)
