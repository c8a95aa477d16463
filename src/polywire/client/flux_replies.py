"""Parse FLUX replies, including those of CONSUME, which joins values by commas without escaping.

The method is described in (spec: flux#values, flux#reading-records). If the text is ambiguous, the parser says so and
never guesses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, NotOwner, PeerError, Unavailable
from polywire.protocols.flux.messages import VERSION, WireCode

CAPPED_BYTES_MIN: Final = 1024 * 1024  # only replies above this size can be shortened by a broker

_BORDER: Final = re.compile(rb",([0-9]+):")


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply line: the id of the request, and a payload or an error."""

    id: bytes
    payload: bytes
    error: BrokerError | None


def parse_reply(line: bytes) -> Reply:
    """Parse a line without its ending. Raises PeerError."""
    version, _, rest = line.removesuffix(b"\r").partition(b"|")
    correlation, _, rest = rest.partition(b"|")
    status, _, rest = rest.partition(b"|")
    if version != VERSION or status not in (b"OK", b"ERR"):
        raise PeerError(f"not a FLUX response line={line[:80]!r}", fatal=True)
    if status == b"OK":
        return Reply(correlation, rest, None)
    code, _, message = rest.partition(b"|")
    return Reply(correlation, b"", _error(code, message.decode("utf-8", "replace")))


def _error(code: bytes, message: str) -> BrokerError:
    match code:
        case WireCode.NOT_LEADER.value:
            return NotOwner(ErrorCode.NOT_OWNER, message)
        case WireCode.REPLICATION_TIMEOUT.value:
            return Unavailable(ErrorCode.REPLICATION_TIMEOUT, message)
        case WireCode.GENERATION_MISMATCH.value:
            return Conflict(ErrorCode.GENERATION_STALE, message)
        case _:
            return Invalid(ErrorCode.INVALID_REQUEST, message)


def field(payload: bytes, name: bytes) -> bytes:
    """Return the text of ``name=…`` up to the next space, or to the closing bracket of a list. Raises PeerError."""
    for part in re.finditer(rb"(?:^| )([a-z_]+)=(\[[^\]]*\]|[^ ]*)", payload):
        if part[1] == name:
            return part[2]
    raise PeerError(f"response lacks a field field={name.decode()} payload={payload[:80]!r}", fatal=True)


def number(payload: bytes, name: bytes) -> int:
    """Return an integer field. Raises PeerError."""
    text = field(payload, name)
    if re.fullmatch(rb"-?[0-9]{1,19}", text) is None:
        raise PeerError(f"field is not a number field={name.decode()} text={text[:40]!r}", fatal=True)
    return int(text)


def items(payload: bytes, name: bytes) -> list[bytes]:
    """Return a list field. Raises PeerError."""
    return field(payload, name).strip(b"[]").split()


@dataclass(frozen=True, slots=True)
class Batch:
    """The records of a CONSUME reply that could be separated without doubt.

    ``values`` are the values at consecutive offsets, beginning at ``first``. ``rest`` is the text from the first
    ambiguous record on. It is empty if there is none.
    """

    first: int
    values: list[bytes]
    rest: bytes
    hw: int

    @property
    def next(self) -> int:
        """Offset after the last value."""
        return self.first + len(self.values)


def split_consumed(payload: bytes, first: int) -> tuple[bytes, int]:
    """Return the text of the records and the high watermark (``hw``) of a CONSUME payload. Raises PeerError."""
    text, found, hw = payload.rpartition(b" hw=")
    shown = re.match(rb"(-?[0-9]{1,19})(?: |$)", hw)
    if not found or not text.startswith(b"messages=") or shown is None:
        raise PeerError(f"not a response to CONSUME offset={first} payload={payload[:80]!r}", fatal=True)
    return text.removeprefix(b"messages="), int(shown[1])


def read_records(text: bytes, hw: int) -> Batch:
    """Split the text of a reply into records, up to the first ambiguous boundary. Raises PeerError.

    Offsets are consecutive, so the boundary after record n is ``,n+1:``. If each of these texts occurs only once, the
    split is unambiguous. A long reply may have been shortened. Then its last boundary may be part of a value.
    """
    head, colon, _ = text.partition(b":")
    if not text:
        return Batch(0, [], b"", hw)
    if not colon or re.fullmatch(rb"[0-9]{1,19}", head) is None:
        raise PeerError(f"record does not begin with an offset text={text[:80]!r}", fatal=True)
    first = int(head)
    borders: dict[int, list[int]] = {}
    for border in _BORDER.finditer(text):
        offset = int(border[1]) if len(border[1]) < 20 else -1
        if first < offset <= hw and str(offset).encode() == border[1]:
            borders.setdefault(offset, []).append(border.start())
    values: list[bytes] = []
    at, offset = 0, first
    whole = len(text) < CAPPED_BYTES_MIN
    while True:
        places = borders.get(offset + 1, [])
        start = at + len(str(offset)) + 1
        last = not places
        if (
            len(places) > 1
            or (places and places[0] < start)
            or (last and not whole and offset < hw and _BORDER.search(text, at))
        ):
            return Batch(first, values, text[at:], hw)
        values.append(text[start:] if last else text[start : places[0]])
        if last:
            return Batch(first, values, b"", hw)
        at, offset = places[0] + 1, offset + 1


def settle(text: bytes, following: bytes) -> bytes | None:
    """Return the value of the first record of ``text``, or None if it is still ambiguous.

    ``following`` is the text of a reply that begins with the next record.
    """
    head, _, _ = text.partition(b":")
    border = b",%d:" % (int(head) + 1)
    start = len(head) + 1
    at = text.find(border, start)
    while at >= 0:
        if following.startswith(text[at + 1 :]):
            return text[start:at]
        at = text.find(border, at + 1)
    return text[start:] if not following else None
