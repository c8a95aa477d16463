"""Typed keys and values of headers, whatever bytes a client sent for their kinds."""

from __future__ import annotations

import struct

import pytest

from polywire.records.columns import HeaderKind, HeaderValue, text_of, typed


@pytest.mark.parametrize(
    ("data", "kind", "value", "text"),
    [
        (None, HeaderKind.NULL, None, ""),
        (b"\xff", HeaderKind.RAW, b"\xff", "\N{REPLACEMENT CHARACTER}"),
        ("ä".encode(), HeaderKind.STRING, "ä", "ä"),
        (b"\1", HeaderKind.BOOL, True, "true"),
        (b"\7\0\0\0", HeaderKind.INT32, 7, "7"),
        (b"\xff\xff", HeaderKind.INT16, -1, "-1"),
        (b"\xff\xff", HeaderKind.UINT16, 65_535, "65535"),
        (struct.pack("<d", 0.5), HeaderKind.FLOAT64, 0.5, "0.5"),
        (b"abc", HeaderKind.FLOAT32, b"abc", "abc"),
        (b"1" * 20_000, HeaderKind.INT64, b"1" * 20_000, "1" * 20_000),
    ],
)
def test_values(data: bytes | None, kind: HeaderKind, value: HeaderValue, text: str) -> None:
    assert typed(data, kind) == value
    assert text_of(data, kind) == text
