"""Write a table back into a topic, ordered by its time column, at a chosen speed.

The table is divided into time slices, and each slice is written as one transaction. A killed run therefore resumes
after the last complete slice, and every row is in the topic exactly once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from polywire.client import bulk
from polywire.clock import Clock, SystemClock
from polywire.errors import ErrorCode, Invalid
from polywire.spark.pipelines.queries import SOURCE, Checkpoint, Ran, located
from polywire.spark.progress import BatchProgress, OnProgress
from polywire.spark.sink import Topics

SLICES_MAX: Final = 1_000_000
SECOND_US: Final = 1_000_000
CHECKPOINT_FILE: Final = "replayed.json"


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


@dataclass(frozen=True, slots=True)
class Position:
    """The content of a checkpoint: which replay it belongs to, and how far it is.

    Attributes:
        name: identifies the replay to the broker.
        output: topic to write.
        topic_id: id of that topic; empty if an earlier version has created the checkpoint.
        done: number of slices that were written.
        span: start, end and length of the slices, in microseconds.
    """

    name: str
    output: str
    topic_id: str
    done: int
    span: list[int]


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

    Raises Invalid if no row has a time, or if the checkpoint belongs to a replay of another table or into another topic,
    and the error of a failed write.
    """
    table = spark.read.parquet(str(path))
    span = _span(table, time_column, slice_seconds)
    state_path = Path(checkpoint) / CHECKPOINT_FILE
    position = _position(state_path, output, span, lambda: _topic_id(address, output))
    done = position.done
    ticker = clock or SystemClock()
    records = batches = 0
    began = ticker.monotonic()
    for number, first, end in span.slices():
        if number < done:
            continue
        _wait(ticker, began, (number - done) * span.slice_us, speed)
        at = ticker.monotonic()
        rows = _slice(table, time_column, first, end, with_null=number == 0)
        written = _write(rows, key=key, value=value, address=address, position=position, number=number)
        _remember(state_path, replace(position, done=number + 1))
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


def _write(rows: DataFrame, *, key: str | None, value: str, address: str, position: Position, number: int) -> int:
    columns: Sequence[str] = [f"{value} as value", *([f"{key} as key"] if key is not None else [])]
    records = rows.selectExpr(*columns).persist()
    try:
        count = records.count()
        if count:
            writer = located(records.write.format(SOURCE), address).mode("append").option("topic", position.output)
            writer.option("txnAppId", position.name).option("txnId", number).save()
        return count
    finally:
        records.unpersist()


def _topic_id(address: str, output: str) -> str:
    """Return the id of the output topic, which is created if it does not exist."""
    return Topics(bulk.connect(address), create=True)[output].id.hex()


def _position(path: Path, output: str, span: Span, topic_id: Callable[[], str]) -> Position:
    """Return the position in a checkpoint, which is created if it does not exist.

    Raises Invalid if the checkpoint belongs to another replay. Otherwise the replay would write nothing, or only the
    slices that the other one did not write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    requested = [span.start_us, span.end_us, span.slice_us]
    if not path.exists():
        position = Position(f"replay-{output}-{time.time_ns():x}", output, topic_id(), 0, requested)
        _remember(path, position)
        return position
    stored = json.loads(path.read_text(encoding="utf-8"))
    stored_output = stored["name"].removeprefix("replay-").rpartition("-")[0]  # of checkpoints of earlier versions
    known = Position(**{"output": stored_output, "topic_id": "", **stored})
    if known.output != output:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the checkpoint belongs to a replay into another topic (use another checkpoint) checkpoint={known.output!r} "
            f"requested={output!r}",
        )
    if known.span != requested:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"the checkpoint belongs to another table or to other slices checkpoint={known.span} requested={requested}",
        )
    found = topic_id()
    if known.topic_id not in ("", found):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "the output topic was created again, or is on another broker, since the replay began (use another checkpoint) "
            f"topic={output!r} checkpoint={known.topic_id} found={found}",
        )
    return replace(known, topic_id=found)


def _remember(path: Path, position: Position) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(position)), encoding="utf-8")
    new.replace(path)


def _wait(clock: Clock, began: float, table_us: int, speed: float) -> None:
    """Wait until ``table_us`` of the table's time have passed at the chosen speed."""
    if speed > 0:
        left = began + table_us / SECOND_US / speed - clock.monotonic()
        if left > 0:
            time.sleep(left)


def _iso(time_us: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_us // SECOND_US))
