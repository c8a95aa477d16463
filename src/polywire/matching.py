"""Match untrusted text against sets of characters and against patterns with ``*`` and ``?``.

Matching takes time proportional to the length of the text, or at most to that times the length of the pattern.
Regular expressions can backtrack without such a bound. Packages that handle untrusted bytes therefore use these
functions instead of ``re``.
"""

from __future__ import annotations

from typing import Final

DIGITS: Final = "0123456789"
UPPER: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LOWER: Final = "abcdefghijklmnopqrstuvwxyz"
HEX_DIGITS: Final = DIGITS + "abcdef"
WORD: Final = DIGITS + UPPER + LOWER
INTEGER_DIGITS_MAX: Final = 19  # maximum number of digits of a signed 64-bit number
ANY: Final = "*"  # matches any characters, or none
ONE: Final = "?"  # matches exactly one character


def consists_of(text: str, characters: str) -> bool:
    """Return whether a text consists only of these characters; True for an empty text."""
    return not text.strip(characters)


def signed_64(text: str) -> int | None:
    """Parse a signed 64-bit decimal number in ASCII digits, with or without leading zeros; None for any other text."""
    if len(text) < INTEGER_DIGITS_MAX and text.isascii() and text.isdigit():
        return int(text)  # the fast path: nearly all numbers
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits.isascii() or not digits.isdigit():
        return None
    digits = digits.lstrip("0") or "0"
    if len(digits) > INTEGER_DIGITS_MAX:
        return None
    value = -int(digits) if text[0] == "-" else int(digits)
    return value if -(2**63) <= value < 2**63 else None


def is_pattern(text: str) -> bool:
    """Return whether a text has a wildcard."""
    return ANY in text or ONE in text


def matches(pattern: str, text: str) -> bool:
    """Return whether the pattern matches the whole text, in at most ``len(pattern) * len(text)`` steps.

    After a mismatch only the last ``*`` is extended, because it can match everything that an earlier ``*`` could match.
    """
    index = position = 0  # index in the pattern, position in the text
    star, star_end = -1, 0  # index of the last ``*``, end of the text that it matches
    while position < len(text):
        char = pattern[index] if index < len(pattern) else ""
        if char == ANY:
            star, star_end = index, position
            index += 1
        elif char in (ONE, text[position]):
            index, position = index + 1, position + 1
        elif star >= 0:
            star_end += 1
            index, position = star + 1, star_end
        else:
            return False
    return not pattern[index:].strip(ANY)
