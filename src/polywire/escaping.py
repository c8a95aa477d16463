"""Text that may have come from anybody, made safe to be shown on a terminal.

Promises: what is returned moves no cursor, sets no title and turns no direction of reading; other text stays as it is. Must not know:
where it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# C0 and DEL, C1 (a terminal may take U+009B for ESC [), marks and turns of the direction of reading, separators of lines and paragraphs,
# and halves of surrogate pairs, which no output can encode.
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


_TEXT: Final[Mapping[int, str]] = {code: _escape(code) for code in _UNSAFE}
_JSON: Final[Mapping[int, str]] = {code: f"\\u{code:04x}" for code in _UNSAFE if code not in (0x09, 0x0A)}


def escaped(text: str) -> str:
    """The text on one line, with ``\\xNN`` and ``\\uNNNN`` for what a terminal might obey."""
    return text.translate(_TEXT)


def escaped_json(text: str) -> str:
    """JSON that means the same, with ``\\uNNNN`` for what a terminal might obey; line ends between values stay."""
    return text.translate(_JSON)
