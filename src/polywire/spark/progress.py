"""Report the progress of a streaming query: records, rate and lag.

Every micro-batch is reported once, in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column as TableColumn

from polywire.errors import Invalid
from polywire.spark.offsets import decode_offset, total_next

POLL_INTERVAL_S: Final = 0.2
OBSERVED: Final = "polywire"  # name under which ``observed`` reports its metrics
UNMET: Final = "polywire-expectations"  # name of the counts of rows that do not meet an expectation


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """One finished micro-batch.

    Attributes:
        rate: records per second of this batch.
        lag: number of records still to read; None if unknown.
        left_out: number of rows that were not processed: late, or without a time.
        corrupt: number of values that could not be parsed.
        watermark: event time (ISO 8601) before which rows count as late; None if the query has no watermark.
        unmet: number of rows that do not meet an expectation, by its name.
    """

    batch_id: int
    records: int
    rate: float
    lag: int | None
    left_out: int = 0
    corrupt: int = 0
    watermark: str | None = None
    unmet: Mapping[str, int] = field(default_factory=dict)


OnProgress = Callable[[BatchProgress], None]


def batch_progress(report: Mapping[str, Any]) -> BatchProgress:
    """Decode Spark's progress report."""
    counted = _observed_metrics(report, OBSERVED)
    late = sum(int(operator.get("numRowsDroppedByWatermark") or 0) for operator in report.get("stateOperators", ()))
    return BatchProgress(
        batch_id=int(report["batchId"]),
        records=int(report["numInputRows"]),
        rate=float(report.get("processedRowsPerSecond") or 0.0),
        lag=_lag(report.get("sources", ())),
        left_out=late + int(counted.get("left_out") or 0),
        corrupt=int(counted.get("corrupt") or 0),
        watermark=(report.get("eventTime") or {}).get("watermark"),
        unmet={name: int(count or 0) for name, count in _observed_metrics(report, UNMET).items()},
    )


def _observed_metrics(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    metrics = (report.get("observedMetrics") or {}).get(name) or {}
    return metrics.asDict() if isinstance(metrics, Row) else metrics


def observed(rows: DataFrame, *, corrupt: Column, left_out: Column) -> DataFrame:
    """Count the rows for which the conditions ``corrupt`` and ``left_out`` are true.

    ``BatchProgress`` has the counts.
    """
    return rows.observe(OBSERVED, f.count_if(corrupt).alias("corrupt"), f.count_if(left_out).alias("left_out"))


def follow(query: StreamingQuery, on_progress: OnProgress) -> int:
    """Wait until the query ends and report every micro-batch. Return the number of records read.

    Raises the error with which the query failed. After an interrupt, or an error in ``on_progress``, the query is
    stopped.
    """
    last_batch, records = -1, 0
    ended = False
    try:
        while not ended:
            # Check before reading the reports, so that the last ones are not missed.
            ended = bool(query.awaitTermination(POLL_INTERVAL_S))  # type: ignore[arg-type]
            for batch in _newer(query, last_batch):
                last_batch = batch.batch_id
                records += batch.records
                on_progress(batch)
        return records
    finally:
        if not ended:
            query.stop()


def _newer(query: StreamingQuery, last_batch: int) -> list[BatchProgress]:
    batches = [batch_progress(report) for report in query.recentProgress]
    return [batch for batch in batches if batch.batch_id > last_batch]


@contextmanager
def progress_bar(title: str, *, total: int | None = None, console: Console | None = None) -> Iterator[OnProgress]:
    """Show records, rate and lag in a terminal. Pass the yielded function to ``follow`` or ``land``."""
    whole = TableColumn(no_wrap=True)
    columns = (
        SpinnerColumn(table_column=whole.copy()),
        TextColumn("[bold]{task.description}", table_column=whole.copy()),
        BarColumn(bar_width=20, table_column=whole.copy()),
        MofNCompleteColumn(table_column=whole.copy()),
        # On a narrow terminal the text is wrapped, so that nothing is cut off.
        TextColumn("{task.fields[facts]}", table_column=TableColumn(overflow="fold")),
        TimeElapsedColumn(table_column=whole.copy()),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total, facts="starting")

        rate = 0.0

        def show(batch: BatchProgress) -> None:
            nonlocal rate
            # A batch without records only moves the watermark: keep showing the last rate.
            rate = batch.rate if batch.records else rate
            lag = "" if batch.lag is None else f"  lag {batch.lag:,}"
            odd = "".join(f"  {name} {count:,}" for name, count in _oddities(batch) if count)
            watermark = "" if batch.watermark is None else f"  watermark {batch.watermark.removesuffix('.000Z')}"
            facts = f"{rate:,.0f} records/s{lag}{odd}{watermark}"
            progress.update(task, advance=batch.records, facts=facts)

        yield show


def _oddities(batch: BatchProgress) -> tuple[tuple[str, int], ...]:
    return ("dropped", batch.left_out), ("corrupt", batch.corrupt), ("unexpected", sum(batch.unmet.values()))


def _lag(sources: Any) -> int | None:
    """Return how many records all ``polywire`` sources are behind the end of their topics; None if unknown."""
    lag = None
    for source in sources:
        end, latest = _offset(source.get("endOffset")), _offset(source.get("latestOffset"))
        if end is not None and latest is not None:
            lag = (lag or 0) + max(0, latest - end)
    return lag


def _offset(text: Any) -> int | None:
    try:
        document = json.loads(text) if isinstance(text, str) else text
        return total_next(decode_offset(document)) if isinstance(document, Mapping) else None
    except (ValueError, Invalid):
        return None  # the offset of another kind of source
