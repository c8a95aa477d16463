"""Options of streams and topics in today's Iggy: typed keys and values one after the other (dossier §8.4).

Promises: a block is taken whole or refused with the number the dossier gives; what was given is kept and told again as it came.
Must not know: what else a request holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from polywire.protocols.iggy import errors
from polywire.protocols.iggy.messages import U32, U64, Refused, str32_bytes

ENTRIES_MAX: Final = 1024
BYTES_MAX: Final = 100_000
_TEXT: Final = 2
_U64: Final = 12
_COMPRESSIONS: Final = {b"none": 1, b"gzip": 2}
_NEVER: Final = 2**64 - 1
_BOOL: Final = 3
_U32: Final = 11
# What a topic may be given: kind and default as the wire has them, and what the broker makes of it.
_KNOWN: Final = {
    b"compression_algorithm": (_TEXT, b"none", "none or gzip; kept and told again"),
    b"message_expiry": (
        _U64,
        U64.pack(_NEVER),
        "microseconds, or a text like 7 days; records that are older are removed",
    ),
    b"max_topic_size": (_U64, U64.pack(_NEVER), "bytes, or a text like 10 GB; divided among the partitions"),
    b"segment_size": (_U64, U64.pack(1 << 30), "kept and told again; the broker sizes its segments itself"),
    b"durability": (_TEXT, b"replicated", "kept and told again; the broker's own durability counts"),
    b"consumer_offset_durability": (_TEXT, b"replicated", "kept and told again"),
    b"enforce_fsync": (_BOOL, b"\0", "kept and told again; the broker's own durability counts"),
    b"messages_required_to_save": (_U32, U32.pack(1024), "kept and told again; every send is written at once"),
    b"size_of_messages_required_to_save": (_U64, U64.pack(1 << 20), "kept and told again"),
    b"preallocate_segments": (_BOOL, b"\0", "kept and told again"),
}
_DURATION: Final = re.compile(r"(\d+)\s*([a-z]*)")
_SECOND_US: Final = 1_000_000
_DURATIONS: Final = {
    "": 1,
    "us": 1,
    "ms": 1000,
    "s": _SECOND_US,
    "sec": _SECOND_US,
    "second": _SECOND_US,
    "m": 60 * _SECOND_US,
    "min": 60 * _SECOND_US,
    "minute": 60 * _SECOND_US,
    "h": 3600 * _SECOND_US,
    "hour": 3600 * _SECOND_US,
    "d": 86_400 * _SECOND_US,
    "day": 86_400 * _SECOND_US,
}
_SIZES: Final = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}


def described() -> bytes:
    """The catalogue of a topic's options."""
    body = U32.pack(len(_KNOWN))
    for key, (kind, default, meaning) in _KNOWN.items():
        body += bytes((len(key),)) + key + bytes((kind,)) + U32.pack(len(default)) + default + str32_bytes(meaning)
    return body


@dataclass(frozen=True, slots=True)
class TopicOptions:
    """What the broker acts on; None where nothing was given."""

    compression: int | None = None
    expiry_us: int | None = None
    size_max: int | None = None


def parse_options(block: bytes) -> dict[bytes, tuple[int, bytes]]:
    """Kind and value by key. Raises Refused 4042, 4043."""
    if len(block) > BYTES_MAX:
        raise Refused(errors.OPTIONS_TOO_BIG)
    found: dict[bytes, tuple[int, bytes]] = {}
    at = 0
    while at < len(block):
        key_kind, key, at = _part(block, at)
        kind, value, at = _part(block, at)
        if key_kind != _TEXT or key in found:
            raise Refused(errors.BAD_OPTION)
        found[key] = (kind, value)
        if len(found) > ENTRIES_MAX:
            raise Refused(errors.OPTIONS_TOO_BIG)
    return found


def _part(block: bytes, at: int) -> tuple[int, bytes, int]:
    if len(block) - at < 5:
        raise Refused(errors.BAD_OPTION)
    size = U32.unpack_from(block, at + 1)[0]
    end = at + 5 + size
    if end > len(block):
        raise Refused(errors.BAD_OPTION)
    return block[at], block[at + 5 : end], end


def topic_options(block: bytes) -> TopicOptions:
    """What a topic's options ask for. Raises Refused 4041 for a key nobody knows, 4042, 4043."""
    found = parse_options(block)
    if not found.keys() <= _KNOWN.keys():
        raise Refused(errors.UNKNOWN_OPTION)
    compression = None
    if b"compression_algorithm" in found:
        compression = _COMPRESSIONS.get(found[b"compression_algorithm"][1].lower())
        if compression is None:
            raise Refused(errors.BAD_OPTION)
    expiry = _number(found.get(b"message_expiry"), _DURATIONS)
    size_max = _number(found.get(b"max_topic_size"), _SIZES)
    return TopicOptions(compression, 0 if expiry == _NEVER else expiry, None if size_max == _NEVER else size_max)


def _number(given: tuple[int, bytes] | None, units: dict[str, int]) -> int | None:
    """A number, or a text with units; None for nothing and for 0, which means the default."""
    if given is None:
        return None
    kind, value = given
    if kind == _U64 and len(value) == U64.size:
        number: int = U64.unpack(value)[0]
        return number or None
    try:
        text = value.decode().lower().strip()
    except UnicodeDecodeError:
        raise Refused(errors.BAD_OPTION) from None
    if kind != _TEXT:
        raise Refused(errors.BAD_OPTION)
    if text in ("never", "unlimited", "none", "never_expire"):
        return _NEVER
    total, at = 0, 0
    for match in _DURATION.finditer(text):
        unit = match[2] if match[2] in units else match[2].removesuffix("s")
        if unit not in units or text[at : match.start()].strip():
            raise Refused(errors.BAD_OPTION)
        total += int(match[1]) * units[unit]
        at = match.end()
    if at != len(text) or at == 0 or total >= 2**62:
        raise Refused(errors.BAD_OPTION)
    return total or None
