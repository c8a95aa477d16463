"""Names of streams and topics where a syntax has other uses for some characters: spelled with ``%XX``, and read again.

Promises: reading what was spelled gives the same name, so that different names never meet; what is spelled has no reserved character. A name
without reserved characters stays as it is, but for a ``%`` before two hexadecimal digits. Must not know: which characters a wire reserves.

``%XX`` is one byte of the name's UTF-8, as in URLs (RFC 3986, 2.1). Reading takes an escape for any character, in either case: whoever asks
what a peer may do asks about what was read, never about a spelling.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from polywire.errors import ErrorCode, Invalid
from polywire.matching import WORD, consists_of

ESCAPE: Final = "%"
_HEX: Final = frozenset("0123456789ABCDEFabcdef")
_NEVER_RESERVED: Final = WORD + "._=-"  # what all names had once: nearly all have nothing else
WHITE: Final = frozenset(char for char in map(chr, range(0x3001)) if char.isspace())
CONTROLS: Final = frozenset(map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)))


def is_simple(name: str) -> bool:
    """Whether a name has only what no syntax reserves, as nearly all have; no escape either."""
    return consists_of(name, _NEVER_RESERVED)


def escape(name: str, reserved: Container[str] = ()) -> str:
    """The name without reserved characters, and without anything that would be read as an escape."""
    if is_simple(name):
        return name
    return "".join(_escape(char) if char in reserved or _is_escape(name, at) else char for at, char in enumerate(name))


def unescape(text: str) -> str:
    """The name that a text spells. Raises Invalid(INVALID_TOPIC) where its escapes are no UTF-8, or control characters."""
    if ESCAPE not in text:
        return text
    found, at = bytearray(), 0
    for position in range(len(text)):
        if _is_escape(text, position):
            found += _bytes(text[at:position])
            found.append(int(text[position + 1 : position + 3], 16))
            at = position + 3
    if not at:
        return text
    try:
        name = (bytes(found) + _bytes(text[at:])).decode()
    except UnicodeDecodeError:
        raise _refused(text) from None
    if not CONTROLS.isdisjoint(name):
        raise _refused(text)
    return name


def _is_escape(text: str, at: int) -> bool:
    return text[at] == ESCAPE and len(text) > at + 2 and text[at + 1] in _HEX and text[at + 2] in _HEX


def _escape(char: str) -> str:
    return "".join(f"{ESCAPE}{byte:02X}" for byte in _bytes(char))


def _bytes(text: str) -> bytes:
    """Bytes that were no UTF-8 when a wire decoded them are again what they were."""
    return text.encode("utf-8", "surrogateescape")


def _refused(text: str) -> Invalid:
    return Invalid(ErrorCode.INVALID_TOPIC, f"not the spelling of a name name={text!r}")
