"""Check and normalise the names of Iggy streams and topics (spec: iggy#names-and-ids)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.messages import Refused
from polywire.types import NAME_BYTES_MAX, is_name

_Found = TypeVar("_Found")


def find_named(find: Callable[[int | str], _Found | None], named: int | str, dialect: Dialect) -> _Found | None:
    """Find an object by number or name. If no object has the name, try the normalised name."""
    found = find(named)
    if found is None and dialect.normalises and isinstance(named, str):
        found = find(shortened(named))
    return found


def numbered(name: str, number: int) -> str:
    """Return a name with a number appended, truncated to the limit. Used if another object has the name."""
    behind = f"-{number}"
    return name.encode()[: NAME_BYTES_MAX - len(behind)].decode(errors="ignore") + behind


def namespace_of(name: str) -> str:
    """Return the name in other protocols for a new stream (decision 0116).

    Dots become ``=``, because a dot ends a stream's name there.
    """
    return name.replace(".", "=")


def is_broker_name(name: str) -> bool:
    return is_name(name) and name[:2] != "__"


def normalised(name: str, number: int) -> str:
    """Return a name as Iggy's servers of 2023 and 2024 store it.

    Raises Refused with the error number ``number`` for a name that they do not allow (spec: iggy#names-and-ids).
    """
    short = shortened(name)
    if not is_allowed(name) or not short:
        raise Refused(number)
    return short


def is_allowed(name: str) -> bool:
    return all(char.isalnum() or char.isspace() or char in "_.-" for char in name)


def shortened(name: str) -> str:
    """Lower-case a name and replace its white space, as Iggy's servers of 2023 and 2024 do."""
    return ".".join(name.lower().split())
