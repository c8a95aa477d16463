"""Look up a name in a set of known names, or raise an error that lists them.

An error lists at most ``NAMES_SHOWN`` names, each with at most ``NAME_CHARS_SHOWN`` characters.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import Enum
from itertools import islice
from typing import Final, TypeVar

from polywire.errors import ErrorCode, Invalid, Missing

NAMES_SHOWN: Final = 10  # as many names as fit a line or two of a terminal
NAME_CHARS_SHOWN: Final = 100  # a topic's name may have 511 bytes
NAMES_COMPARED_MAX: Final = 2_000  # limits the time of an error: comparing two names takes some 10 µs

E = TypeVar("E", bound=Enum)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the known name most similar to ``name``, or an empty string if none is similar."""
    by_lower = {other.lower()[:NAME_CHARS_SHOWN]: other for other in islice(known, NAMES_COMPARED_MAX)}
    close = get_close_matches(name.lower()[:NAME_CHARS_SHOWN], by_lower, n=1)
    return f", did you mean {by_lower[close[0]]!r}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """Return names as a value in a message: separated by commas, cut to a line or two."""
    found = sorted(set(names))
    shown = ",".join(name[:NAME_CHARS_SHOWN] for name in found[:NAMES_SHOWN])
    more = f",… ({len(found)} in all)" if len(found) > NAMES_SHOWN else ""
    return f"{shown}{more}" if found else "none"


def missing(code: ErrorCode, noun: str, name: str, known: Iterable[str], *, facts: str = "") -> Missing:
    """Return the error for a name that does not exist. Its message suggests a similar name and lists the existing ones.

    Args:
        code: code of the error.
        noun: kind of thing that has the name, such as "topic".
        name: the name that does not exist.
        known: the names that exist.
        facts: further ``key=value`` facts for the end of the message.
    """
    names = list(known)
    return Missing(code, _message(noun, name, names, facts))


def unknown(noun: str, name: str, known: Iterable[str]) -> Invalid:
    """Return the error for a word that is not one of a fixed set; see ``missing`` for the arguments."""
    names = list(known)
    return Invalid(ErrorCode.INVALID_REQUEST, _message(noun, name, names, ""))


def _message(noun: str, name: str, names: list[str], facts: str) -> str:
    tail = f" {facts}" if facts else ""
    return f"no such {noun}{did_you_mean(name, names)} {noun.replace(' ', '_')}={name!r}{tail} known={listed(names)}"


def check_options(noun: str, value: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword argument that a function does not have, and suggest a similar one."""
    names = list(known)
    for name in value:
        if name not in names:
            raise TypeError(
                f"unknown option of a {noun}{did_you_mean(name, names)} option={name!r} known={listed(names)}"
            )


def word_of(member: Enum) -> str:
    """Return the word for an enum member: its value if that is a string, else its name."""
    return (member.value if isinstance(member.value, str) else member.name).lower()


def choice(kind: type[E], value: E | str, noun: str) -> E:
    """Return the enum member for ``value``, which is a member or a word for one; case is ignored.

    Raises:
        Invalid: INVALID_REQUEST: no member has this word; the message lists the valid ones.
    """
    if isinstance(value, kind):
        return value
    words = {word_of(member): member for member in kind}
    found = words.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise unknown(noun, str(value), words)
    return found
