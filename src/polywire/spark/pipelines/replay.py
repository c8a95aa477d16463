"""Write a table back into a topic, ordered by its time column, at a chosen speed.

The table is divided into time slices, and each slice is written as one transaction. A killed run therefore resumes
after the last complete slice, and every row is in the topic exactly once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from polywire.clock import Clock, SystemClock
from polywire.errors import ErrorCode, Invalid
from polywire.spark.pipelines.queries import SOURCE, Checkpoint, Ran, located
from polywire.spark.progress import BatchProgress, OnProgress

SLICES_MAX: Final = 1_000_000
SECOND_US: Final = 1_000_000
POSITION: Final = "replayed.json"


@dataclass(frozen=True, slots=True)
class Span:
    """The time range of a table, in microseconds, and its division into slices of equal length.

    Attributes:
        start_us: time of the first row.
        end_us: end of the range, exclusive.
        slice_us: length of a slice.
    """

    start_us: int
    end_us: int
    slice_us: int

    def slices(self) -> Iterator[tuple[int, int, int]]:
        """Yield (number, start, end) of every slice."""
        for number, first in enumerate(range(self.start_us, self.end_us, self.slice_us)):
            yield number, first, min(first + self.slice_us, self.end_us)

    def __len__(self) -> int:
        return -(-(self.end_us - self.start_us) // self.slice_us)


def replay(
    spark: SparkSession,
    path: Annotated[str | Path, "folder of the table (Parquet)"],
    address: Annotated[str, "host:port of the broker to write to"],
    output: Annotated[str, "topic to write"],
    checkpoint: Checkpoint,
    *,
    time_column: Annotated[str, "column with the time of a row"] = "_timestamp",
    value: Annotated[str, "SQL expression of the record's value; default: all columns as JSON"] = "to_json(struct(*))",
    key: Annotated[str | None, "SQL expression of the record's key"] = None,
    speed: Annotated[float, "speed relative to the table's time; 0: as fast as possible"] = 0.0,
    slice_seconds: Annotated[float, "length of a slice in table time; each slice is written as one transaction"] = 60.0,
    on_progress: OnProgress | None = None,
    clock: Clock | None = None,
) -> Ran:
    """Write a table's rows into a topic, ordered by time. Rows without a time come first.

    Raises Invalid if no row has a time, and the error of a failed write.
    """
    table = spark.read.parquet(str(path))
    span = _span(table, time_column, slice_seconds)
    state_path = Path(checkpoint) / POSITION
    name, done = _position(state_path, output, span)
    ticker = clock or SystemClock()
    records = batches = 0
    began = ticker.monotonic()
    for number, first, end in span.slices():
        if number < done:
            continue
        _wait(ticker, began, (number - done) * span.slice_us, speed)
        at = ticker.monotonic()
        rows = _slice(table, time_column, first, end, with_null=number == 0)
        written = _write(rows, key=key, value=value, address=address, output=output, name=name, number=number)
        _remember(state_path, name, number + 1, span)
        records, batches = records + written, batches + 1
        if on_progress is not None:
            rate = written / max(ticker.monotonic() - at, 1e-9)
            on_progress(BatchProgress(number, written, rate, lag=None, watermark=_iso(end)))
    return Ran(records, batches)


def _span(table: DataFrame, time_column: str, slice_seconds: float) -> Span:
    instant = f.unix_micros(f.col(time_column).cast("timestamp"))
    found = table.agg(f.min(instant).alias("first"), f.max(instant).alias("last")).first()
    if found is None or found["first"] is None:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"the time is null in every row of the table column={time_column}")
    span = Span(found["first"], found["last"] + 1, max(1, round(slice_seconds * SECOND_US)))
    if len(span) > SLICES_MAX:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"too many slices (use longer ones) slices={len(span)} limit={SLICES_MAX}"
        )
    return span


def _slice(table: DataFrame, time_column: str, first: int, end: int, *, with_null: bool) -> DataFrame:
    instant = f.unix_micros(f.col(time_column).cast("timestamp"))
    inside = (instant >= first) & (instant < end)
    return table.where(inside | instant.isNull() if with_null else inside).orderBy(instant)


def _write(rows: DataFrame, *, key: str | None, value: str, address: str, output: str, name: str, number: int) -> int:
    columns: Sequence[str] = [f"{value} as value", *([f"{key} as key"] if key is not None else [])]
    records = rows.selectExpr(*columns).persist()
    try:
        count = records.count()
        if count:
            writer = located(records.write.format(SOURCE), address).mode("append").option("topic", output)
            writer.option("txnAppId", name).option("txnId", number).save()
        return count
    finally:
        records.unpersist()


def _position(path: Path, output: str, span: Span) -> tuple[str, int]:
    """Return the name of the run and the number of slices that it has written.

    Raises Invalid if the checkpoint belongs to another replay.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    requested = [span.start_us, span.end_us, span.slice_us]
    if not path.exists():
        name = f"replay-{output}-{time.time_ns():x}"
        _remember(path, name, 0, span)
        return name, 0
    known = json.loads(path.read_text(encoding="utf-8"))
    if known["span"] != requested:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the checkpoint belongs to another table or to other slices checkpoint={known['span']} requested={requested}",
        )
    return str(known["name"]), int(known["done"])


def _remember(path: Path, name: str, done: int, span: Span) -> None:
    new = path.with_suffix(".new")
    new.write_text(
        json.dumps({"name": name, "done": done, "span": [span.start_us, span.end_us, span.slice_us]}), encoding="utf-8"
    )
    new.replace(path)


def _wait(clock: Clock, began: float, table_us: int, speed: float) -> None:
    """Wait until ``table_us`` of the table's time have passed at the chosen speed."""
    if speed > 0:
        left = began + table_us / SECOND_US / speed - clock.monotonic()
        if left > 0:
            time.sleep(left)


def _iso(time_us: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_us // SECOND_US))
