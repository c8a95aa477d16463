"""The times of records for queues, as clients set them and as the broker reads them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from polywire import Record
from polywire.delivery_times import DELAY_DAYS_MAX, DELIVER_AT, EXPIRES_AT, parsed_ms
from polywire.errors import ErrorCode, Invalid


def test_times_become_headers_of_text() -> None:
    at = datetime(2026, 11, 27, 12, 0, 0, 5000, tzinfo=UTC) + timedelta(days=0)
    record = Record("v", headers={"a": "b"}, expires_at=at)
    assert record.headers == {"a": "b", EXPIRES_AT: str(round(at.timestamp() * 1000))}
    before = time.time()
    record = Record("v", delay_s=2.5, ttl_s=10)
    due_ms, end_ms = int(str(record.headers[DELIVER_AT])), int(str(record.headers[EXPIRES_AT]))
    assert before * 1000 + 2499 <= due_ms <= time.time() * 1000 + 2501
    assert 7499 <= end_ms - due_ms <= 7501
    assert Record("v", delay_s=None).headers == {}


@pytest.mark.parametrize(
    "times",
    [
        {"deliver_at": datetime(2026, 1, 1)},  # without a time zone
        {"deliver_at": "tomorrow"},
        {"deliver_at": 5},
        {"deliver_at": datetime.now(UTC) + timedelta(days=DELAY_DAYS_MAX + 1)},
        {"delay_s": (DELAY_DAYS_MAX + 1) * 86_400},
        {"delay_s": -1},
        {"delay_s": float("nan")},
        {"delay_s": "5"},
        {"deliver_at": datetime.now(UTC), "delay_s": 5},
        {"ttl_s": float("inf")},
        {"ttl_s": -0.1},
        {"expires_at": datetime.now(UTC), "ttl_s": 5},
    ],
)
def test_malformed_times_are_refused(times: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        Record("v", **times)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"0", 0),
        (b"1764244800000", 1764244800000),
        (b"2025-11-27T12:00:00Z", 1764244800000),
        (b"2025-11-27T13:00:00.250+01:00", 1764244800250),
        (b"2025-11-27T12:00:00", None),
        (b"2025-11-27", None),
        (b"", None),
        (b"-1", None),
        (b"1.5", None),
        ("１".encode(), None),
        (b"9" * 41, None),
    ],
)
def test_times_are_parsed(text: bytes, expected: int | None) -> None:
    assert parsed_ms(text) == expected
