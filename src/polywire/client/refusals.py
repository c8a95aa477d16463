"""Errors for features that a protocol does not support. They are raised before anything is sent."""

from __future__ import annotations

from polywire.errors import ErrorCode, Invalid
from polywire.records.columns import Record


def cannot(wire: str, what: str) -> Invalid:
    """Return the error for an operation that the protocol does not support."""
    return Invalid(ErrorCode.INVALID_REQUEST, f"the {wire} protocol cannot {what}")


def cannot_name(wire: str, name: str) -> Invalid:
    """Return the error for a topic name that the protocol does not support."""
    return Invalid(ErrorCode.INVALID_TOPIC, f"the {wire} protocol does not support this name name={name!r}")


def bare_value(wire: str, record: Record, *, events: bool = False) -> bytes:
    """Return the value of a record that has only a value and a key. With ``events``, it may also have an event.

    Raises Invalid for any other record.
    """
    if record.value is None:
        raise cannot(wire, "send null values")
    if record.headers or record.id is not None or record.origin_time_us is not None:
        raise cannot(wire, "send headers, ids or times")
    if record.event is not None and not events:
        raise cannot(wire, "send events")
    return record.value
