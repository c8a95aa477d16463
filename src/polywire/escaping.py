"""Escape untrusted text for a terminal.

Escaped text cannot move the cursor, set the title or change the direction of writing. Other characters are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

# C0 and DEL, C1 (some terminals treat U+009B as ESC [), bidirectional marks and overrides, line and paragraph
# separators, and lone surrogates, which cannot be encoded.
_UNSAFE: Final = (
    *range(0x20),
    *range(0x7F, 0xA0),
    0x061C,
    *range(0x200E, 0x2010),
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    0xFEFF,
    *range(0xD800, 0xE000),
)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


@cache  # made when first needed, because every command imports this module
def _text() -> Mapping[int, str]:
    return {code: _escape(code) for code in _UNSAFE}


@cache
def _json() -> Mapping[int, str]:
    return {code: f"\\u{code:04x}" for code in _UNSAFE if code not in (0x09, 0x0A)}


def escaped(text: str) -> str:
    r"""Return the text on one line, with ``\xNN`` or ``\uNNNN`` for characters that a terminal might interpret."""
    return text.translate(_text())


def escaped_json(text: str) -> str:
    r"""Return equivalent JSON with ``\uNNNN`` for unsafe characters; newlines between values are kept."""
    return text.translate(_json())
