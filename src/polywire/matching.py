"""What texts of peers are compared with: sets of characters, and patterns with ``*`` and ``?``.

Promises: the time is bounded by the length of a text, or by that of a text times that of a pattern; nothing is ever tried again from every
position, as regular expressions do. That is why floors that see bytes of peers import no ``re``. Must not know: who asks.
"""

from __future__ import annotations

from typing import Final

DIGITS: Final = "0123456789"
UPPER: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LOWER: Final = "abcdefghijklmnopqrstuvwxyz"
HEX_DIGITS: Final = DIGITS + "abcdef"
WORD: Final = DIGITS + UPPER + LOWER
INTEGER_DIGITS_MAX: Final = 19  # of a signed 64-bit number
ANY: Final = "*"  # any characters, none as well
ONE: Final = "?"  # exactly one character


def consists_of(text: str, characters: str) -> bool:
    """Whether a text has these characters only; an empty one has."""
    return not text.strip(characters)


def signed_64(text: str) -> int | None:
    """A signed 64-bit number in decimal, in ASCII digits, as far as leading zeros allow; None for anything else."""
    if len(text) < INTEGER_DIGITS_MAX and text.isascii() and text.isdigit():
        return int(text)  # nearly all there are
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits.isascii() or not digits.isdigit():
        return None
    digits = digits.lstrip("0") or "0"
    if len(digits) > INTEGER_DIGITS_MAX:
        return None
    value = -int(digits) if text[0] == "-" else int(digits)
    return value if -(2**63) <= value < 2**63 else None


def is_pattern(text: str) -> bool:
    """Whether a text has a wildcard."""
    return ANY in text or ONE in text


def matches(pattern: str, text: str) -> bool:
    """Whether the whole text is what the pattern says. At most len(pattern) * len(text) steps: only the last ``*`` is ever extended."""
    at = place = 0
    star, resumed = -1, 0
    while place < len(text):
        wanted = pattern[at] if at < len(pattern) else ""
        if wanted == ANY:
            star, resumed = at, place
            at += 1
        elif wanted in (ONE, text[place]):
            at, place = at + 1, place + 1
        elif star >= 0:
            resumed += 1
            at, place = star + 1, resumed
        else:
            return False
    return not pattern[at:].strip(ANY)
