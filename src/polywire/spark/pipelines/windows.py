"""Aggregate over windows of event time.

A table gets each window once, when it is closed. A topic gets every window that a micro-batch changed, keyed by window
and group. So the last record of a key is the current value. The pipeline ``compact`` retains only the last ones.

Each record is counted once, even after a crash. Records are dropped, counted and reported if they are older than the
watermark or have no time (for instance, because they are unreadable).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from polywire.errors import ErrorCode, Invalid
from polywire.spark.pipelines.queries import (
    Address,
    AvailableNow,
    BatchRecordsMax,
    Checkpoint,
    Parser,
    Ran,
    Topic,
    changes_into_topic,
    parsed,
    run_query,
    stateful,
    topic_stream,
)
from polywire.spark.pipelines.tables import Table, into_table
from polywire.spark.progress import OnProgress

BOUNDS = ("window_start", "window_end")
# Added columns, whose names no field may have by chance.
_TIME: Final = "polywire=time"
_WINDOW: Final = "polywire=window"


def windows(
    spark: SparkSession,
    address: Address,
    topic: Topic,
    checkpoint: Checkpoint,
    parse: Parser,
    *,
    length: Annotated[str, "length of a window"] = "1 minute",
    slide: Annotated[str | None, "time between the starts of windows, if they overlap"] = None,
    time: Annotated[str, "column of the event time"] = "_timestamp",
    delay: Annotated[str, "how much older than the newest record a record may be"] = "10 minutes",
    group_by: Annotated[Sequence[str], "columns to group by, in addition to the window"] = (),
    measures: Annotated[Sequence[str], "SQL aggregates"] = (),
    path: Annotated[str | Path | None, "folder of a table for closed windows"] = None,
    output: Annotated[str | None, "topic for changed windows"] = None,
    target: Annotated[str | None, "host:port of the broker of the output topic, if it is another one"] = None,
    batch_records_max: BatchRecordsMax = None,
    available_now: AvailableNow = True,
    on_progress: OnProgress | None = None,
) -> Ran:
    """Count (``records``) and aggregate a topic's records by window, into a table or a topic.

    Raises Invalid unless exactly one of ``path`` and ``output`` is given, and the error with which the query failed.
    """
    if parse is None:
        raise Invalid(ErrorCode.INVALID_REQUEST, "windows needs the setting parse")
    records = topic_stream(stateful(spark), address, topic, batch_records_max=batch_records_max)
    rows = parsed(records, parse, time=time)
    grouped = aggregate(rows, time=time, delay=delay, length=length, slide=slide, group_by=group_by, measures=measures)
    if path is not None and output is None:
        writer = into_table(grouped, Table(Path(path)))
    elif output is not None and path is None:
        changed = grouped.select(
            f.to_json(f.struct(BOUNDS[0], *group_by)).alias("key"), f.to_json(f.struct("*")).alias("value")
        )
        writer = changes_into_topic(changed, target or address, output)
    else:
        raise Invalid(ErrorCode.INVALID_REQUEST, "set exactly one of the settings path and output")
    return run_query(writer, f"windows-{topic}", checkpoint, available_now=available_now, on_progress=on_progress)


def aggregate(
    rows: DataFrame,
    *,
    time: str,
    delay: str,
    length: str,
    slide: str | None = None,
    group_by: Sequence[str] = (),
    measures: Sequence[str] = (),
) -> DataFrame:
    """Return parsed records grouped by window, with the window's bounds, the group, ``records`` and the measures."""
    # Do not use the append time for records without a time: it would move the watermark, and all earlier events would
    # be dropped.
    timed = rows.withColumn(_TIME, f.col(time).cast("timestamp")).withWatermark(f"`{_TIME}`", delay)
    window = f.window(_TIME, length, slide) if slide else f.window(_TIME, length)
    grouped = timed.groupBy(window.alias(_WINDOW), *group_by).agg(
        f.count("*").alias("records"), *(f.expr(measure) for measure in measures)
    )
    bounds = [f.col(_WINDOW)[bound.removeprefix("window_")].alias(bound) for bound in BOUNDS]
    result = grouped.select(*bounds, "*").drop(_WINDOW)
    counts = Counter(name.casefold() for name in result.columns)
    repeated = [name for name in result.columns if counts[name.casefold()] > 1]
    if repeated:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "two columns of a window have the same name (rename the field with your own parser, or name the measure with AS) "
            f"column={repeated[0]!r}",
        )
    return result
