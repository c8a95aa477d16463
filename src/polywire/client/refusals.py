"""What a wire cannot do or carry, refused in the same words by every client.

Promises: Invalid, before anything is sent. Must not know: which wire can do what.
"""

from __future__ import annotations

from polywire.errors import ErrorCode, Invalid
from polywire.records.columns import Record


def cannot(wire: str, what: str) -> Invalid:
    """The wire has no word for it."""
    return Invalid(ErrorCode.INVALID_REQUEST, f"the {wire} protocol cannot {what}")


def cannot_name(wire: str, name: str) -> Invalid:
    """No topic of this wire has such a name."""
    return Invalid(ErrorCode.INVALID_TOPIC, f"the {wire} protocol does not support this name name={name!r}")


def bare_value(wire: str, record: Record, *, events: bool = False) -> bytes:
    """The value of a record that has nothing but one, and a key, or with ``events`` an event. Raises Invalid for any other."""
    if record.value is None:
        raise cannot(wire, "carry a null value")
    if record.headers or record.id is not None or record.origin_time_us is not None:
        raise cannot(wire, "carry headers, ids or times")
    if record.event is not None and not events:
        raise cannot(wire, "carry events")
    return record.value
