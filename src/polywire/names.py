"""Percent-encode stream and topic names for protocols that reserve some characters, and decode them.

As in URLs, ``%XX`` is one byte of the name in UTF-8 (RFC 3986, 2.1).

* ``unescape(escape(name)) == name``, so different names have different encodings.
* An escaped name has no reserved character. A name without reserved characters is unchanged, except for a ``%`` before
  two hexadecimal digits.
* Decoding accepts an escape for any character, in either case. Check permissions on the decoded name, never on an
  encoded one.
"""

from __future__ import annotations

from collections.abc import Container
from hashlib import blake2b
from typing import Final

from polywire.errors import ErrorCode, Invalid
from polywire.matching import WORD, consists_of

ESCAPE: Final = "%"
_HEX: Final = frozenset("0123456789ABCDEFabcdef")
_NEVER_RESERVED: Final = WORD + "._=-"  # nearly all names consist of these characters
WHITE: Final = frozenset(char for char in map(chr, range(0x3001)) if char.isspace())
CONTROLS: Final = frozenset(map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)))


def is_simple(name: str) -> bool:
    """Return whether a name has only characters that no protocol reserves, and nothing that looks like an escape."""
    return consists_of(name, _NEVER_RESERVED)


def escape(name: str, reserved: Container[str] = ()) -> str:
    """Return the name with reserved characters, and anything that looks like an escape, percent-encoded."""
    if is_simple(name):
        return name
    return "".join(_escape(char) if char in reserved or _is_escape(name, at) else char for at, char in enumerate(name))


def unescape(text: str) -> str:
    """Decode a percent-encoded name.

    Raises:
        Invalid: INVALID_TOPIC: an escape decodes to invalid UTF-8 or to a control character.
    """
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
    """Encode a text as UTF-8. Surrogates that stand for undecodable bytes become these bytes again."""
    return text.encode("utf-8", "surrogateescape")


def _refused(text: str) -> Invalid:
    return Invalid(ErrorCode.INVALID_TOPIC, f"name has an invalid %XX escape name={text!r}")


DIRECTORY_NAME_MAX: Final = 64  # two of them and a file name are far below the limits of stores


def table_directory(stream: str, topic: str) -> str:
    """Return the directory of a topic's table, below that of all tables.

    It is ``stream/topic``. Of a name that is long or has characters that not all stores accept, it has the beginning
    and a digest.
    """
    return f"{_directory_name(stream)}/{_directory_name(topic)}"


def _directory_name(name: str) -> str:
    if consists_of(name, WORD + "_.-") and not name.startswith((".", "_")) and len(name) <= DIRECTORY_NAME_MAX:
        return name
    digest = blake2b(name.encode(), digest_size=8).hexdigest()
    plain = "".join(char if consists_of(char, WORD + "_.-") else "-" for char in name[:DIRECTORY_NAME_MAX])
    return f"_{plain}-{digest}"
