"""Parse requests of the documented dialect D0, including bytes that clients send after a payload.

Every byte of a payload is decoded, except one or two zeros at its end. A payload that can be read in two ways is
refused.

The specification describes CREATE_STREAM and CREATE_TOPIC in two forms. Clients send the form that it shows as a
struct. In the other form, a list of bytes, the id can be an identifier, and the expiry of a topic is optional::

    struct      CREATE_STREAM  u32 id, name      CREATE_TOPIC  stream, u32 id, u32 partitions, u32 expiry, name byte
    list                  ident, name                     stream, u32 id or ident, u32 partitions, [u32 expiry,] name

(spec: iggy#d0-requests, iggy#disagreements-of-the-document)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from polywire.protocols.iggy import errors
from polywire.protocols.iggy.dialect import D0
from polywire.protocols.iggy.messages import U32, Code, Refused, name_bytes
from polywire.protocols.iggy.names import is_allowed
from polywire.protocols.iggy.reader import Reader

PARTITIONS_MAX: Final = 100_000  # the limit in the documentation; a higher number is read as part of a name
SPARE: Final = (b"", b"\0", b"\0\0")  # allowed after a payload, because a Go client sends two zeros after a topic
# a number whose highest byte is at least this may be part of a name; as an expiry it would be 17 years
LETTER_MIN: Final = 0x20
NAMED: Final = replace(D0, auto_ids=True)  # for requests with a name in place of the id: the broker chooses the number


class Layout(msgspec.Struct, frozen=True):
    """The layout of a request's payload.

    Attributes:
        before: number of bytes before the identifiers.
        idents: number of identifiers.
        behind: number of bytes after the identifiers.
        named: whether a name follows.
    """

    before: int = 0
    idents: int = 0
    behind: int = 0
    named: bool = False


LAYOUTS: Final[Mapping[int, Layout]] = {
    Code.POLL: Layout(5, 2, 18),
    Code.GET_OFFSET: Layout(5, 2, 4),
    Code.STORE_OFFSET: Layout(5, 2, 12),
    Code.GET_STREAM: Layout(idents=1),
    Code.CREATE_STREAM: Layout(before=4, named=True),
    Code.DELETE_STREAM: Layout(idents=1),
    Code.UPDATE_STREAM: Layout(idents=1, named=True),
    Code.GET_TOPIC: Layout(idents=2),
    Code.GET_TOPICS: Layout(idents=1),
    Code.CREATE_TOPIC: Layout(idents=1, behind=12, named=True),
    Code.DELETE_TOPIC: Layout(idents=2),
    Code.UPDATE_TOPIC: Layout(idents=2, behind=4, named=True),
    Code.CREATE_PARTITIONS: Layout(idents=2, behind=4),
    Code.DELETE_PARTITIONS: Layout(idents=2, behind=4),
    Code.GET_GROUP: Layout(idents=2, behind=4),
    Code.GET_GROUPS: Layout(idents=2),
    Code.CREATE_GROUP: Layout(idents=2, behind=4),
    Code.DELETE_GROUP: Layout(idents=2, behind=4),
    Code.JOIN_GROUP: Layout(idents=2, behind=4),
    Code.LEAVE_GROUP: Layout(idents=2, behind=4),
}


# For each byte list: whether the id is an identifier, and the bytes of the numbers between the id and the name.
_LISTED: Final[Mapping[int, tuple[tuple[bool, int], ...]]] = {
    Code.CREATE_STREAM: ((True, 0),),
    Code.CREATE_TOPIC: ((False, 4), (True, 4), (True, 8)),
}


def reader_of(code: int, payload: memoryview) -> Reader:
    """Return a reader of a payload, which is a struct or the byte list of Iggy's documentation.

    Raises Refused 3 for an invalid payload. Raises Refused 1014 or 2016 if its id is a name other than the request's
    name.
    """
    layout = LAYOUTS.get(code)
    if layout is None:
        return Reader(payload, D0)
    end = _end(payload, layout)
    fits = end == len(payload) or (end >= 0 and bytes(payload[end : end + 3]) in SPARE)
    if code not in _LISTED:
        if not fits:
            raise Refused(errors.UNKNOWN_COMMAND)
        return Reader(payload, D0)
    if fits and not _may_be_letters(code, payload):
        return Reader(payload, D0)
    listed = list(_listed_payloads(code, payload))
    if fits and not listed:
        return Reader(payload, D0)
    allowed = [payload_read for payload_read in listed if is_allowed(payload_read.name)]
    if fits or len(allowed) != 1:  # both forms are possible: do not create something that the client may not have meant
        raise Refused(errors.UNKNOWN_COMMAND)
    return allowed[0].as_struct(code)


def _end(payload: memoryview, layout: Layout) -> int:
    """Return the position of a payload's end, or -1 if the payload is shorter than the layout."""
    at, stop = layout.before, len(payload)
    for _ in range(layout.idents):
        if at + 2 > stop:
            return -1
        at += 2 + payload[at + 1]
    at += layout.behind
    if layout.named:
        if at >= stop or payload[at] == 0:
            return -1
        at += 1 + payload[at]
    return at if at <= stop else -1


def _may_be_letters(code: int, payload: memoryview) -> bool:
    """Return whether the id or the expiry of a struct is so high that its bytes may be letters of a name."""
    if code == Code.CREATE_STREAM:
        return payload[3] >= LETTER_MIN
    at = 2 + payload[1]
    return payload[at + 3] >= LETTER_MIN or payload[at + 11] >= LETTER_MIN


class ListedPayload(msgspec.Struct, frozen=True):
    """A payload in the form of a byte list, as in Iggy's documentation.

    Attributes:
        front: the bytes before the id.
        numbers: the bytes between the id and the name.
    """

    front: bytes
    given: int | str
    numbers: bytes
    name: str

    def as_struct(self, code: int) -> Reader:
        """Convert the payload to a struct. If the id is a name, it is dropped.

        Raises Refused 1014 or 2016 if it is not the request's name.
        """
        if isinstance(self.given, str) and self.given != self.name:
            raise Refused(errors.BAD_STREAM_ID if code == Code.CREATE_STREAM else errors.BAD_TOPIC_ID)
        number, dialect = (self.given, D0) if isinstance(self.given, int) else (0, NAMED)
        body = self.front + U32.pack(number) + self.numbers + name_bytes(self.name)
        return Reader(memoryview(body), dialect)


def _listed_payloads(code: int, payload: memoryview) -> Iterator[ListedPayload]:
    """Yield every way to parse all bytes of a payload as a byte list."""
    for has_ident, size in _LISTED[code]:
        reader = Reader(payload, D0)
        try:
            if code == Code.CREATE_TOPIC:
                reader.ident()
            front = bytes(payload[: reader.at])
            given = reader.ident() if has_ident else reader.u32()
            numbers, name = bytes(reader.take(size)), reader.name()
        except Refused:
            continue
        if reader.left == 0 and (not numbers or U32.unpack_from(numbers)[0] <= PARTITIONS_MAX):
            yield ListedPayload(front, given, numbers.ljust(8, b"\0") if numbers else b"", name)
