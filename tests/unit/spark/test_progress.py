"""Reading Spark's progress reports."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from polywire.spark.offsets import PartitionKey, Position, SourceOffset, encode_offset
from polywire.spark.progress import BatchProgress, batch_progress, progress_bar


def offset(after: int) -> str:
    return json.dumps(encode_offset(SourceOffset({PartitionKey("t", 0): Position("00" * 16, 1, 1, after)})))


def report(**source: Any) -> dict[str, Any]:
    return {"batchId": 3, "numInputRows": 40, "processedRowsPerSecond": 12.5, "sources": [source]}


def test_lag_counts_unread_records() -> None:
    reported = batch_progress(report(endOffset=offset(70), latestOffset=offset(100)))
    assert reported == BatchProgress(batch_id=3, records=40, rate=12.5, lag=30)


def test_other_sources_have_no_lag() -> None:
    assert batch_progress(report(endOffset='"17"', latestOffset=None)).lag is None
    assert batch_progress(report(endOffset="not json", latestOffset='{"version": 9}')).lag is None
    assert batch_progress({"batchId": 0, "numInputRows": 0}) == BatchProgress(0, 0, 0.0, None)


def test_dropped_and_corrupt_records_are_counted() -> None:
    reported = {
        **report(), "stateOperators": [{"numRowsDroppedByWatermark": 2}], "eventTime": {"watermark": "2026-01-01T10:00:00.000Z"},
        "observedMetrics": {"polywire": {"corrupt": 5, "left_out": 1}},
    }  # fmt: skip
    batch = batch_progress(reported)
    assert (batch.left_out, batch.corrupt, batch.watermark) == (3, 5, "2026-01-01T10:00:00.000Z")


def test_the_bar_shows_records_rate_and_lag() -> None:
    written = io.StringIO()
    with progress_bar("landing", total=100, console=Console(file=written, width=120, force_terminal=True)) as reported:
        reported(BatchProgress(batch_id=2, records=40, rate=1234.0, lag=60))
    text = written.getvalue()
    assert "40/100" in text
    assert "1,234 records/s" in text
    assert "lag 60" in text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_nothing_is_truncated_on_a_narrow_terminal(width: int) -> None:
    written = io.StringIO()
    batch = BatchProgress(0, 1_234_567, 43_210.0, 987_654, 12, 3, "2026-01-01T10:00:00.000Z")
    with progress_bar("windows", console=Console(file=written, width=width, force_terminal=True)) as reported:
        reported(batch)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue().split("\r")[-1])
    assert "…" not in shown
    assert "windows" in shown
    for word in ("1234567/?", "43,210", "records/s", "987,654", "12", "corrupt", "3", "watermark", "0:00:00"):
        assert word in shown.split()
    facts = "".join(line[41:-8] for line in shown.splitlines()).replace(" ", "")
    assert "watermark2026-01-01T10:00:00" in facts


def test_the_bar_ends_with_the_rate_of_the_last_batch_that_had_records() -> None:
    written = io.StringIO()
    with progress_bar("windows", total=40, console=Console(file=written, width=200, force_terminal=True)) as reported:
        reported(BatchProgress(batch_id=0, records=40, rate=1234.0, lag=0))
        reported(BatchProgress(batch_id=1, records=0, rate=0.0, lag=0, watermark="2026-01-01T10:00:00.000Z"))
    last = [line for line in written.getvalue().splitlines() if "records/s" in line][-1]
    assert "1,234 records/s" in last
    assert "watermark 2026-01-01T10:00:00" in last
