"""The headers with which a record says when it is delivered to queues: ``deliver.at`` and ``expires.at``.

A value is text: milliseconds since 1970, or a time as in RFC 3339. A malformed value has no effect, so a record is never
lost because of it.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Final, TypedDict

from polywire.errors import ErrorCode, Invalid

DELIVER_AT: Final = "deliver.at"
EXPIRES_AT: Final = "expires.at"
DELAY_DAYS_MAX: Final = 366
DELAY_MS_MAX: Final = DELAY_DAYS_MAX * 86_400_000  # a later time is most likely one in microseconds
_SECONDS_MAX: Final = 1e11  # some 3,000 years
TEXT_BYTES_MAX: Final = 40  # longest text of a time that is parsed


def parsed_ms(text: bytes) -> int | None:
    """Return a time in milliseconds since 1970. None if the text is malformed."""
    if len(text) > TEXT_BYTES_MAX or not text.isascii():
        return None
    if text.isdigit():
        return int(text)
    try:
        time = datetime.fromisoformat(text.decode())
        return None if time.tzinfo is None else int(time.timestamp() * 1000)
    except (ValueError, OverflowError):
        return None


class DeliveryTimes(TypedDict, total=False):
    """When queues deliver a record (concepts: queues#delays).

    Attributes:
        deliver_at: not before this time, a datetime with a time zone.
        delay_s: the same, as seconds from now.
        expires_at: not after this time.
        ttl_s: the same, as seconds from now.
    """

    deliver_at: datetime | None
    delay_s: float | None
    expires_at: datetime | None
    ttl_s: float | None


def time_headers(
    deliver_at: datetime | None = None,
    delay_s: float | None = None,
    expires_at: datetime | None = None,
    ttl_s: float | None = None,
) -> dict[str, str]:
    """Return the headers for the arguments that are not None. Raises Invalid(INVALID_REQUEST)."""
    now = time.time()
    due = _seconds("deliver_at", deliver_at, "delay_s", delay_s, now)
    end = _seconds("expires_at", expires_at, "ttl_s", ttl_s, now)
    if due is not None and due > now + DELAY_MS_MAX / 1000:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"a record can be delayed for up to {DELAY_DAYS_MAX} days deliver_at={deliver_at} delay_s={delay_s}",
        )
    found = {DELIVER_AT: due, EXPIRES_AT: end}
    return {name: str(max(round(seconds * 1000), 0)) for name, seconds in found.items() if seconds is not None}


def _seconds(name: str, at: object, name_s: str, seconds: object, now: float) -> float | None:
    """Return a time in seconds since 1970, from one of two arguments."""
    if at is not None and seconds is not None:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"use either {name} or {name_s}, not both")
    if at is not None:
        if not isinstance(at, datetime) or at.tzinfo is None:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"{name} must be a datetime with a time zone got={at!r}")
        return at.timestamp()
    if seconds is None:
        return None
    if not isinstance(seconds, int | float) or not 0 <= seconds <= _SECONDS_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{name_s} must be a number of seconds, 0 or more got={seconds!r}")
    return now + seconds
