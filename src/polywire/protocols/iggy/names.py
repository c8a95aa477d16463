"""Names of streams and topics: what the broker can have, and what dialects make of one (spec: iggy#names-and-ids).

Promises: every spelling of a name is made here. Must not know: the broker, sessions, which streams and topics there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.messages import Refused
from polywire.types import NAME_BYTES_MAX, is_name

_Found = TypeVar("_Found")


def find_named(find: Callable[[int | str], _Found | None], named: int | str, dialect: Dialect) -> _Found | None:
    """What has this number or name; without one, what has the name that a create request would have made of it."""
    found = find(named)
    if found is None and dialect.normalises and isinstance(named, str):
        found = find(shortened(named))
    return found


def numbered(name: str, number: int) -> str:
    """A name for what is called otherwise elsewhere, as long as names may be."""
    behind = f"-{number}"
    return name.encode()[: NAME_BYTES_MAX - len(behind)].decode(errors="ignore") + behind


def space_of(name: str) -> str:
    """The broker's stream for a stream of this name: there a dot would end the stream's name (decision 0116)."""
    return name.replace(".", "=")


def is_broker_name(name: str) -> bool:
    """Whether the broker can have a stream or topic of this name (decision 0116)."""
    return is_name(name) and name[:2] != "__"


def normalised(name: str, number: int) -> str:
    """A name as the dialects of 2023 and 2024 keep it. Raises Refused with ``number`` (spec: iggy#names-and-ids)."""
    short = shortened(name)
    if not is_allowed(name) or not short:
        raise Refused(number)
    return short


def is_allowed(name: str) -> bool:
    """Whether a name has letters of names only in those dialects."""
    return all(char.isalnum() or char.isspace() or char in "_.-" for char in name)


def shortened(name: str) -> str:
    """What those dialects make of a name's letters and white space."""
    return ".".join(name.lower().split())
