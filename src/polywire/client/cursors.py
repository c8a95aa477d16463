"""Check the cursors in paged responses: raise an error if a response does not advance, so that no loop runs forever."""

from __future__ import annotations

from typing import TypeVar

from polywire.errors import Corrupt, ErrorCode
from polywire.records.columns import Record

Cursor = TypeVar("Cursor", int, str, tuple[str, str])


def beyond(last: Cursor, found: Cursor, what: str) -> Cursor:
    """Return ``found``, the cursor at which to continue.

    Raises Corrupt(CORRUPT) unless it is above ``last``, because the loop would never end.
    """
    if found <= last:
        raise Corrupt(
            ErrorCode.CORRUPT,
            f"the broker's response does not advance (check its version and logs) cursor={what} asked={last!r} answered={found!r}",
        )
    return found


def from_offset(records: list[Record], offset: int) -> list[Record]:
    """Return fetched records. Raises Corrupt(CORRUPT) if all of them are below the requested offset."""
    if records:
        beyond(offset - 1, records[-1].offset, "offset")
    return records
