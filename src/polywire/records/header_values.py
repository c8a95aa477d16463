"""Decode header keys and values into the types given by their kinds (spec: iggy).

Decoding never fails: any bytes of any kind give a value. A value never takes more memory than its bytes.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

from polywire.records.columns import HeaderKind

HeaderValue: TypeAlias = str | bytes | int | float | bool | None
INT_BYTES_MAX: Final = (
    16  # size of the widest kind; a longer "number" stays bytes, because Python refuses to print 4,300 digits
)
_FLOATS: Final = {HeaderKind.FLOAT32: "<f", HeaderKind.FLOAT64: "<d"}
_UNSIGNED: Final = (HeaderKind.UINT8, HeaderKind.UINT16, HeaderKind.UINT32, HeaderKind.UINT64, HeaderKind.UINT128)


def typed(data: bytes | None, kind: HeaderKind) -> HeaderValue:
    """Return a header's key or value in the type of its kind; raw bytes, and bytes that do not fit the kind, are
    unchanged.
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
    """Return a header's key or value as text. Numbers become digits, other bytes are decoded as UTF-8 with replacement
    characters.
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
