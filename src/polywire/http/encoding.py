"""Encode records and lists as JSON, within limits in bytes.

* Values are truncated first. Then UTF-8 becomes text, and other bytes become base64.
* Text that would be longer in JSON than in base64 becomes base64, unless it is short.
* Long values are encoded in pieces, so that no step holds the GIL for more than a few milliseconds.
* A list has a limit of rows and of bytes.

Long work runs on the event loop in slices of a few milliseconds, so that other connections are served in between.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from codecs import getincrementaldecoder
from collections.abc import Iterable
from time import thread_time
from typing import Final

import msgspec

from polywire.records.columns import Header, HeaderKind, text_of, typed

SLICE_S: Final = 0.003  # seconds of processor time per slice
PIECE_BYTES: Final = (
    192 * 1024
)  # bytes encoded at once, in less than a millisecond; a multiple of 3, so that pieces of base64 can be joined
SHORT_BYTES: Final = 4 * 1024  # text up to this size stays text, even if JSON must escape most of its characters
LIST_BYTES_MAX: Final = 4 * 1024 * 1024  # JSON of a list
_AS_THEY_ARE: Final = frozenset({HeaderKind.NULL, HeaderKind.RAW, HeaderKind.STRING})
_Utf8Decoder: Final = getincrementaldecoder("utf-8")


class Slices:
    """Limits how long a task runs before other tasks of the event loop run.

    After each short step, the task checks ``is_over`` and, if it is true, awaits ``rest``.
    """

    def __init__(self) -> None:
        self._end = thread_time() + SLICE_S
        self.count = 1

    @property
    def is_over(self) -> bool:
        """Whether the task must let other tasks run."""
        return thread_time() >= self._end

    async def rest(self) -> None:
        """Let other tasks run."""
        await asyncio.sleep(0)
        self._end = thread_time() + SLICE_S
        self.count += 1


class Listing:
    """The rows of a list in a response, limited in number and to LIST_BYTES_MAX bytes.

    Attributes:
        rows: the rows as JSON.
        more: whether a row did not fit.
    """

    __slots__ = ("_bytes_left", "_count_max", "more", "rows")

    def __init__(self, count_max: int) -> None:
        self._count_max: Final = count_max
        self._bytes_left = LIST_BYTES_MAX
        self.rows: Final[list[msgspec.Raw]] = []
        self.more = False

    def add(self, row: object) -> bool:
        """Add a row. Return False and set ``more`` if it does not fit."""
        json = b"" if len(self.rows) >= self._count_max else msgspec.json.encode(row)
        self.more = self.more or not 0 < len(json) <= self._bytes_left
        if not self.more:
            self._bytes_left -= len(json)
            self.rows.append(msgspec.Raw(json))
        return not self.more

    async def extend(self, rows: Iterable[object], slices: Slices) -> Listing:
        """Add rows, pausing for other tasks, until one does not fit."""
        for row in rows:
            if not self.add(row):
                break
            if slices.is_over:
                await slices.rest()
        return self


def json_value(data: memoryview[int] | bytes | None, bytes_max: int | None) -> msgspec.Raw | None:
    """Encode bytes as a JSON object with text or base64, truncated to ``bytes_max``; None stays None."""
    if data is None:
        return None
    cut = data if bytes_max is None else data[:bytes_max]
    is_cut = len(cut) < len(data)
    content = _json_text(cut, is_cut=is_cut)
    name = b"text" if content is not None else b"base64"
    if content is None:
        content = b"".join(b64encode(cut[at : at + PIECE_BYTES]) for at in range(0, len(cut), PIECE_BYTES))
    return msgspec.Raw(b'{"%b":"%b","bytes":%d,"cut":%b}' % (name, content, len(data), b"true" if is_cut else b"false"))


def _json_text(data: memoryview[int] | bytes, *, is_cut: bool) -> bytes | None:
    """Return the content of a JSON string. If ``is_cut``, an incomplete last character is removed.

    Returns None if the bytes are not UTF-8, or if base64 would be shorter.
    """
    decoder, parts, left = _Utf8Decoder(), [], max(len(data) * 4 // 3, 6 * SHORT_BYTES)
    for at in range(0, len(data), PIECE_BYTES):
        is_last = at + PIECE_BYTES >= len(data)
        try:
            text = decoder.decode(bytes(data[at : at + PIECE_BYTES]), is_last and not is_cut)
        except UnicodeDecodeError:
            return None
        parts.append(msgspec.json.encode(text)[1:-1])
        left -= len(parts[-1])
        if left < 0:
            return None
    return b"".join(parts)


def json_headers(headers: Iterable[Header], *, part_max: int, json_max: int) -> list[msgspec.Raw]:
    """Encode the first headers of a record as JSON objects.

    Keys and values are truncated to ``part_max`` bytes. Headers are added until the JSON of all would exceed
    ``json_max``, but at least one.
    """
    found: list[msgspec.Raw] = []
    for header in headers:
        key = _part(header.key, header.key_kind, min(part_max, json_max * 3 // 8))
        left = max(0, json_max - len(bytes(key or b"")))
        value = _part(header.value, header.value_kind, min(part_max, left * 3 // 4))
        json = msgspec.json.encode({"key": key, "value": value, "kind": header.value_kind.name.lower()})
        json_max -= len(json) + 1  # plus a comma
        if found and json_max < 0:
            break
        found.append(msgspec.Raw(json))
        if json_max <= 0:
            break
    return found


def _part(data: bytes | None, kind: HeaderKind, bytes_max: int) -> msgspec.Raw | None:
    """Encode the key or the value of a header. A number also gets the field ``number``."""
    found = json_value(data, bytes_max)
    if found is None or kind in _AS_THEY_ARE or isinstance(typed(data, kind), bytes):
        return found
    return msgspec.Raw(bytes(found)[:-1] + b',"number":%b}' % msgspec.json.encode(text_of(data, kind)))
