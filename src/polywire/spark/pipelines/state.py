"""Compute the current state of each key from its events (event sourcing).

The events of a key are numbered from 1. Version n of the state is the result of its first n events. States go to a
topic with the same keys as the events. The header ``state.version`` contains the version. The last record of a key is a
snapshot, from which a job with a new checkpoint starts.

An event is applied once, in the order of versions. A repeated version is ignored. An event goes to the dead-letter
topic if it cannot be parsed, has no key, or follows a missing version. Added headers contain the reason and the
original topic, partition and offset.

An event has the fields that its value has: a JSON null is None, and a field that the value does not have is absent.
Fields that are null in values of other formats are absent, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from polywire.client import bulk
from polywire.errors import Conflict, ErrorCode, Invalid
from polywire.spark.functions import CORRUPT, header_text, imported
from polywire.spark.pipelines.compact import last_by_key
from polywire.spark.pipelines.queries import (
    Address,
    AvailableNow,
    BatchRecordsMax,
    Checkpoint,
    Parser,
    Ran,
    Topic,
    into_topic,
    parsed,
    run_query,
    stateful,
    topic_rows,
    topic_stream,
)
from polywire.spark.progress import OnProgress

Fold = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]

VERSION_COLUMN: Final = "_version"  # column of the parser for events
VERSION_HEADER: Final = "state.version"
_OUT: Final = "key binary, value binary, headers array<struct<key: string, value: binary>>, topic string"
_STATE: Final = "version long, written long, state string"


def state(
    spark: SparkSession,
    address: Address,
    topic: Topic,
    output: Annotated[str, "topic for states"],
    checkpoint: Checkpoint,
    parse: Parser,
    *,
    fold: Annotated[
        Fold | str | None,
        "module:function of (state, event), both dicts; default: fields of events replace those of the state",
    ] = None,
    version: Annotated[
        str, "SQL expression of an event's version: its number, from 1, among the events of its key"
    ] = VERSION_COLUMN,
    every: Annotated[int, "write a key's state after this many of its events"] = 1,
    dead: Annotated[
        str | None, "topic for events that could not be applied (default: the output's name and .dead)"
    ] = None,
    batch_records_max: BatchRecordsMax = None,
    available_now: AvailableNow = True,
    on_progress: OnProgress | None = None,
) -> Ran:
    """Fold a topic's events and write the resulting states. Raises the error of the query or of ``fold``."""
    if parse is None:
        raise Invalid(ErrorCode.INVALID_REQUEST, "state needs the setting parse, for example events:amount long")
    with suppress(Conflict):
        connection = bulk.connect(address)
        connection.create_topic(output, len(connection.describe(topic).incarnations))
    spark = stateful(spark)
    records = topic_stream(spark, address, topic, batch_records_max=batch_records_max, headers=True)
    events = parsed(records, parse)
    if version == VERSION_COLUMN and VERSION_COLUMN not in events.columns:
        fields = ",".join(name for name in events.columns if not name.startswith("_"))
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "state needs the version of each event (use parse=events:…, which reads it from headers, or set version to "
            f"SQL of a field) fields={fields}",
        )
    processor = FoldProcessor(
        imported(fold) if isinstance(fold, str) else fold or merge, output, dead or f"{output}.dead", every
    )
    folded = (
        _numbered(events, version)
        .groupBy("key")
        .transformWithState(processor, _OUT, "Append", "None", snapshots(spark, address, output).groupBy("key"))
    )
    writer = into_topic(folded, address)
    return run_query(writer, f"state-{topic}", checkpoint, available_now=available_now, on_progress=on_progress)


def merge(state: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the event's fields added or replaced. This is the default fold function."""
    return {**state, **event}


def snapshots(spark: SparkSession, address: str, topic: str) -> DataFrame:
    """Return the last state of each key, with columns key, version, state (JSON)."""
    last = last_by_key(topic_rows(spark, address, topic, headers=True))
    version = header_text("headers", VERSION_HEADER).cast("long")
    return last.select("key", version.alias("version"), f.col("value").cast("string").alias("state"))


@dataclass(frozen=True, slots=True)
class Current:
    """The state of a key.

    Attributes:
        version: number of events that were applied.
        written: version that was last written to the topic.
        state: the state as JSON.
    """

    version: int = 0
    written: int = 0
    state: str = "{}"


class FoldProcessor(StatefulProcessor):
    """Applies events to the states that Spark stores (``StatefulProcessor``)."""

    def __init__(self, fold: Fold, output: str, dead: str, every: int) -> None:
        self._fold = fold
        self._output = output
        self._dead = dead
        self._every = every

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state of a key. Called by Spark."""
        self._kept = handle.getValueState("current", _STATE)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        """Load a key's earlier state. Called by Spark."""
        if initialState.version is not None:
            self._kept.update((initialState.version, initialState.version, initialState.state))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        """Apply the new events of one key, and yield states and dead-letter records. Called by Spark."""
        before = _current(self._kept)
        current, refused = fold_events(before, rows, self._fold)
        for row, reason in refused:
            yield self._dead_letter(row, reason)
        if current.version - current.written >= self._every:
            current = Current(current.version, current.version, current.state)
            headers = [Row(key=VERSION_HEADER, value=bytearray(str(current.version).encode()))]
            yield Row(key=key[0], value=bytearray(current.state.encode()), headers=headers, topic=self._output)
        if current != before:
            self._kept.update((current.version, current.written, current.state))

    def close(self) -> None:
        """Do nothing. Called by Spark."""

    def _dead_letter(self, row: Row, reason: str) -> Row:
        facts = {"reason": reason, "topic": row["topic"], "partition": row["partition"], "offset": row["offset"]}
        added = [Row(key=f"dead.{name}", value=bytearray(str(fact).encode())) for name, fact in facts.items()]
        return Row(key=row["key"], value=row["value"], headers=[*(row["headers"] or ()), *added], topic=self._dead)


def _current(kept: Any) -> Current:
    return Current(*kept.get()) if kept.exists() else Current()


def fold_events(before: Current, rows: Iterable[Any], fold: Fold) -> tuple[Current, list[tuple[Any, str]]]:
    """Apply the events of one key.

    Return the new state, and the events that could not be applied, each with the reason. Rows have ``key``, ``value``,
    ``version``, ``event`` (JSON of the fields that are not null), ``nulls`` (names of the others) and ``reason`` (why
    the event could not be parsed, or None).
    """
    refused = []
    version, folded = before.version, json.loads(before.state)
    for row in sorted(rows, key=lambda row: (row["version"] or 0, row["offset"])):
        reason = _why_not(row, version)
        if reason is not None:
            refused.append((row, reason))
        elif row["version"] > version:
            folded, version = fold(folded, _fields(row)), row["version"]
    return Current(version, before.written, json.dumps(folded, separators=(",", ":"))), refused


def _fields(row: Any) -> dict[str, Any]:
    """Return the fields of an event. Those that are null in its JSON value are None, and absent ones are absent."""
    fields: dict[str, Any] = json.loads(row["event"])
    nulls = _null_fields(row["value"]) if row["nulls"] else frozenset()
    return {**fields, **{name: None for name in row["nulls"] if name in nulls}}


def _null_fields(value: bytes | None) -> frozenset[str]:
    """Return the names of the fields that are null in a JSON object. It is empty for other values."""
    try:
        found = json.loads(value or b"null")
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(name for name in found if found[name] is None) if isinstance(found, dict) else frozenset()


def _why_not(row: Any, version: int) -> str | None:
    if row["reason"] is not None:
        return str(row["reason"])
    if row["key"] is None:
        return "no key"
    if row["version"] is None or row["version"] < 1:
        return "no version"
    if row["version"] > version + 1:
        return f"versions are missing expected={version + 1} got={row['version']}"
    return None


def _numbered(events: DataFrame, version: str) -> DataFrame:
    fields = [name for name in events.columns if not name.startswith("_") or name in ("_type", "_schema_version")]
    nulls = f.array_compact(f.array(*[f.when(f.col(name).isNull(), name) for name in fields]))
    return events.select(
        f.col("_key").alias("key"), f.col("_value").alias("value"), f.col("_headers").alias("headers"),
        f.col("_topic").alias("topic"), f.col("_partition").alias("partition"), f.col("_offset").alias("offset"),
        f.expr(version).cast("long").alias("version"), f.to_json(f.struct(*fields)).alias("event"), nulls.alias("nulls"),
        f.col(CORRUPT).alias("reason"),
    )  # fmt: skip
