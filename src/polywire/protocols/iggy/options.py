"""Options of streams and topics in current dialects: typed keys and values (spec: iggy#topic-options).

A request's options are accepted completely, or refused with an error number of the specification. Replies list the
options that were set, and the broker's defaults for all others. Values have the types that DESCRIBE_OPTIONS reports.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Final

import msgspec

from polywire.matching import DIGITS, LOWER
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.messages import U32, U64, Refused, str32_bytes

ENTRIES_MAX: Final = 1024
BYTES_MAX: Final = 100_000
TEXT: Final = 2
_U64: Final = 12
_COMPRESSIONS: Final = {b"none": 1, b"gzip": 2}
_NEVER: Final = 2**64 - 1
_BOOL: Final = 3
_U32: Final = 11
# Options of a topic: the protocol's kind, the default, and the effect in the broker.
_KNOWN: Final = {
    b"compression_algorithm": (TEXT, b"none", "none or gzip; stored and returned"),
    b"message_expiry": (
        _U64,
        U64.pack(_NEVER),
        "microseconds, or a text like 7 days; records that are older are removed",
    ),
    b"max_topic_size": (_U64, U64.pack(_NEVER), "bytes, or a text like 10 GB; divided among the partitions"),
    b"segment_size": (_U64, U64.pack(1 << 30), "stored and returned; the broker sizes its segments itself"),
    b"durability": (TEXT, b"replicated", "stored and returned; the broker's durability level applies"),
    b"consumer_offset_durability": (TEXT, b"replicated", "stored and returned"),
    b"enforce_fsync": (_BOOL, b"\0", "stored and returned; the broker's durability level applies"),
    b"messages_required_to_save": (_U32, U32.pack(1024), "stored and returned; every send is written at once"),
    b"size_of_messages_required_to_save": (_U64, U64.pack(1 << 20), "stored and returned"),
    b"preallocate_segments": (_BOOL, b"\0", "stored and returned"),
    b"partition_resize_policy": (
        TEXT,
        b"mutable",
        "mutable or fixed; the number of partitions of a fixed topic cannot change",
    ),
    b"replication_factor": (_U32, U32.pack(1), "stored and returned; the broker's durability level applies"),
}
_SINCE_012: Final = (b"partition_resize_policy", b"replication_factor")
_UNTIL_012: Final = (b"enforce_fsync",)
_CHANGEABLE: Final = (b"compression_algorithm", b"message_expiry", b"max_topic_size")
RESETTABLE_KEYS: Final = (b"message_expiry", b"max_topic_size")
UPDATABLE: Final = 1
RESETTABLE: Final = 2
_WORDS: Final[Mapping[bytes, Collection[bytes]]] = {
    b"compression_algorithm": _COMPRESSIONS,
    b"durability": (b"replicated", b"persisted"),
    b"consumer_offset_durability": (b"replicated", b"persisted"),
    b"partition_resize_policy": (b"mutable", b"fixed"),
}
_SEGMENT_BYTES: Final = range(1 << 20, (1 << 30) + 1, 512)
_ENCODED_MAX: Final = 1024  # number of different sets of options whose encoding is cached
AMOUNT_CHARACTERS_MAX: Final = 64  # longest duration or size as text; "1 day 2 h 3 min 4 s" has 20 characters
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


def described(*, today: bool) -> bytes:
    """Return the encoded descriptions of all topic options.

    ``today``: for clients since protocol 0.12, with a byte that says how each option may be changed.
    """
    keys = _keys(today=today)
    body = U32.pack(len(keys))
    for key in keys:
        kind, default, meaning = _KNOWN[key]
        body += bytes((len(key),)) + key + bytes((kind,))
        if today:
            body += bytes((UPDATABLE | RESETTABLE if key in RESETTABLE_KEYS else 0,))
        body += U32.pack(len(default)) + default + str32_bytes(meaning)
    return body


def _keys(*, today: bool) -> list[bytes]:
    return [key for key in _KNOWN if key not in (_UNTIL_012 if today else _SINCE_012)]


class TopicOptions(msgspec.Struct, frozen=True):
    """The topic options that affect the broker. None means not set, 0 means no limit.

    Attributes:
        given: all options that were set, encoded with their canonical types.
    """

    compression: int | None = None
    expiry_us: int | None = None
    size_max: int | None = None
    given: bytes = b""


def parse_options(block: bytes) -> dict[bytes, tuple[int, bytes]]:
    """Decode a block of options.

    Return the type and value of each key. Raises Refused 4042 or 4043 for an invalid block.
    """
    if len(block) > BYTES_MAX:
        raise Refused(errors.OPTIONS_TOO_BIG)
    found: dict[bytes, tuple[int, bytes]] = {}
    at = 0
    while at < len(block):
        key_kind, key, at = _part(block, at)
        kind, value, at = _part(block, at)
        if key_kind != TEXT or key in found:
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


def topic_options(block: bytes, before: bytes | None = None) -> TopicOptions:
    """Return a topic's options: those that it had ``before``, updated by the block of options in a request.

    Raises Refused 4041 for an unknown key, 4042 for an invalid value or the change of a fixed option, and 4043 for a
    block that is too large.
    """
    found = parse_options(block)
    if not found.keys() <= _KNOWN.keys():
        raise Refused(errors.UNKNOWN_OPTION)
    values = {key: _canonical(key, kind, value) for key, (kind, value) in found.items()}
    compression = _COMPRESSIONS.get(values.get(b"compression_algorithm") or b"")
    expiry = _number(values.get(b"message_expiry"))
    size_max = _number(values.get(b"max_topic_size"))
    merged = {} if before is None else {key: value for key, (_, value) in parse_options(before).items()}
    for key, value in values.items():
        if before is not None and key not in _CHANGEABLE and value not in (None, merged.get(key, _KNOWN[key][1])):
            raise Refused(errors.BAD_OPTION)
        if value is not None:
            merged[key] = value
    given = _encoded(merged)
    return TopicOptions(compression, 0 if expiry == _NEVER else expiry, 0 if size_max == _NEVER else size_max, given)


@lru_cache(maxsize=_ENCODED_MAX)
def encode_options(given: bytes, compression: int, expiry_us: int, size_max: int, *, today: bool) -> bytes:
    """Encode two lists, each with its length: the options that were set, and the broker's defaults for the others.

    Args:
        given: the options that were set.
        compression, expiry_us, size_max: the topic's settings, which other protocols may have changed; 2**64 - 1 means
            no limit.
        today: whether the client uses protocol 0.12 or newer.
    """
    names = {number: name for name, number in _COMPRESSIONS.items()}
    stored = {key: value for key, (_, value) in parse_options(given).items()}
    now = {
        **{key: _KNOWN[key][1] for key in _keys(today=today)},
        **stored,
        b"compression_algorithm": names[compression],
        b"message_expiry": U64.pack(expiry_us),
        b"max_topic_size": U64.pack(size_max),
    }
    chosen = _encoded({key: value for key, value in now.items() if key in stored})
    unchosen = _encoded({key: value for key, value in now.items() if key not in stored})
    return U32.pack(len(chosen)) + chosen + U32.pack(len(unchosen)) + unchosen


def is_known(key: bytes) -> bool:
    return key in _KNOWN


def is_fixed(given: bytes) -> bool:
    """Return whether these options forbid to change the topic's number of partitions."""
    return parse_options(given).get(b"partition_resize_policy") == (TEXT, b"fixed")


def encode_option(key: bytes, kind: int, value: bytes) -> bytes:
    return b"".join(bytes((of,)) + U32.pack(len(part)) + part for of, part in ((TEXT, key), (kind, value)))


def encode_default(key: bytes) -> bytes:
    kind, default, _ = _KNOWN[key]
    return encode_option(key, kind, default)


def _encoded(values: Mapping[bytes, bytes]) -> bytes:
    return b"".join(encode_option(key, _KNOWN[key][0], value) for key, value in values.items())


def _number(value: bytes | None) -> int | None:
    return None if value is None else int.from_bytes(value, "little")


def _canonical(key: bytes, kind: int, value: bytes) -> bytes | None:
    """Return an option's value in the type that DESCRIBE_OPTIONS reports.

    Return None for a 64-bit 0, which requests the default. Raises Refused for an invalid value.
    """
    wanted = _KNOWN[key][0]
    if wanted == _U64:
        return _canonical_number(key, kind, value)
    if kind != wanted:
        raise Refused(errors.BAD_OPTION)
    if wanted == TEXT:
        value = value.lower()
        allowed = value in _WORDS[key]
    elif wanted == _BOOL:
        allowed = value in (b"\0", b"\1")
    else:
        allowed = len(value) == U32.size
    if not allowed:
        raise Refused(errors.BAD_OPTION)
    return value


def _canonical_number(key: bytes, kind: int, value: bytes) -> bytes | None:
    """Return an option's number as 64 bits.

    It may be sent as text with a unit, such as ``10 GB``. Raises Refused for any other text.
    """
    if kind == _U64 and len(value) == U64.size:
        number: int = U64.unpack(value)[0]
    elif kind == TEXT:
        number = _number_of(value, _DURATIONS if key == b"message_expiry" else _SIZES)
    else:
        raise Refused(errors.BAD_OPTION)
    if number and key == b"segment_size" and number not in _SEGMENT_BYTES:
        raise Refused(errors.BAD_OPTION)
    return U64.pack(number) if number else None


def _number_of(value: bytes, units: dict[str, int]) -> int:
    try:
        text = value.decode().lower().strip()
    except UnicodeDecodeError:
        raise Refused(errors.BAD_OPTION) from None
    if text in ("never", "unlimited", "none", "never_expire"):
        return _NEVER
    return _amount(text, units)


def _amount(text: str, units: dict[str, int]) -> int:
    """Return the sum of the numbers with units in a text. Raises Refused for a malformed text."""
    total, rest = 0, text if len(text) <= AMOUNT_CHARACTERS_MAX else ""
    if not rest:
        raise Refused(errors.BAD_OPTION)
    while rest:
        behind = rest.lstrip(DIGITS)
        digits, behind = rest[: len(rest) - len(behind)], behind.lstrip()
        rest = behind.lstrip(LOWER)
        unit = behind[: len(behind) - len(rest)]
        unit = unit if unit in units else unit.removesuffix("s")
        if not digits or unit not in units:
            raise Refused(errors.BAD_OPTION)
        total += int(digits) * units[unit]
        rest = rest.lstrip()
    if total >= 2**62:
        raise Refused(errors.BAD_OPTION)
    return total
