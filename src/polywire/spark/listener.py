"""Report the progress of all streaming queries of a Spark session, for programs that export metrics.

Each report also has the name of the query. The end of a query is reported once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from polywire.spark.progress import BatchProgress, batch_progress


@dataclass(frozen=True, slots=True)
class QueryProgress:
    """Progress of one query.

    Attributes:
        id: id of the query, which its checkpoint stores.
        records: records read since the listener was added.
        batch: the last micro-batch, None before the first.
        ended: whether the query has ended.
        error: why the query failed, or None.
    """

    id: str
    name: str | None
    records: int = 0
    batch: BatchProgress | None = None
    ended: bool = False
    error: str | None = None


class ProgressListener(StreamingQueryListener):
    """Calls ``on_progress`` when a query starts, progresses or ends, in a thread of Spark."""

    def __init__(self, on_progress: Callable[[QueryProgress], None] | None = None) -> None:
        self._on_progress: Final = on_progress
        self._queries: dict[str, QueryProgress] = {}

    @property
    def queries(self) -> Mapping[str, QueryProgress]:
        """Latest progress of the running queries, by id."""
        return dict(self._queries)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Report a new query. Called by Spark."""
        self._update(QueryProgress(str(event.id), event.name))

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Report a micro-batch. Called by Spark."""
        report = event.progress
        batch = batch_progress(json.loads(report.json))
        known = self._queries.get(str(report.id))
        records = (0 if known is None else known.records) + batch.records
        self._update(QueryProgress(str(report.id), report.name, records, batch))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Ignore idle queries."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Report a query's end, with its error if it failed. Called by Spark."""
        known = self._queries.pop(str(event.id), QueryProgress(str(event.id), None))
        self._report(QueryProgress(known.id, known.name, known.records, known.batch, ended=True, error=event.exception))

    def _update(self, progress: QueryProgress) -> None:
        self._queries[progress.id] = progress
        self._report(progress)

    def _report(self, progress: QueryProgress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)


def watch(spark: SparkSession, on_progress: Callable[[QueryProgress], None] | None = None) -> ProgressListener:
    """Report the progress of all queries of a session from now on, and return the listener.

    To stop, call ``spark.streams.removeListener``.

    Args:
        spark: the session.
        on_progress: called with each ``QueryProgress``, in a thread of Spark. If None, only ``queries`` is updated.
    """
    listener = ProgressListener(on_progress)
    spark.streams.addListener(listener)
    return listener
