"""The process that writes the tables of one broker process.

It reads the tables to write from its standard input, reports the state of each to its standard output, and ends with
the input. It reads records over a socket pair whose other end is the broker, so it needs neither an address nor a
login.

* Tables are written one after the other, the one that is due first, at most one file at a time.
* Small files are merged in a thread, so that merging does not delay new rows.
* A step that fails is reported, and repeated after a pause, which grows with each failure. Other tables are not
  affected.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import BinaryIO, Final

import msgspec
import pyarrow as pa

from polywire.client.bulk import BulkConnection
from polywire.errors import BrokerError
from polywire.store.base import BlobMissing
from polywire.store.url import open_bucket
from polywire.table_orders import Orders, TableOrder, TableReport
from polywire.tables.delta_log import NEW, CommitConflict, now_ms
from polywire.tables.iceberg import IcebergMetadata
from polywire.tables.parquet import Written
from polywire.tables.sealed import SegmentReader
from polywire.tables.writer import MergePlan, Progress, TopicTable, merged

PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0
CONFLICT_PAUSE_S: Final = 0.2
STEP_MIN_S: Final = 0.05  # shortest time between two attempts to append rows, whatever the table's freshness
MAINTAIN_S: Final = 0.5  # interval of checks whether a merge has ended
RESERVE: Final = 2.0  # an attempt begins this many durations of the last one before rows are due
VACUUM_S: Final = 600.0
STORE_TIMEOUT_S: Final = 120.0  # enough for files of 64 MiB over slow networks
NICE: Final = 19  # the broker and its clients come first
EXIT_LOST: Final = 3  # the broker closed the socket pair


class OrderReader:
    """The latest orders, from a thread that reads the input."""

    def __init__(self, source: BinaryIO) -> None:
        self._source: Final = source
        self._changed: Final = threading.Condition()
        self._latest: Orders | None = None
        self.has_ended = False
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(Orders)
        with suppress(OSError, msgspec.DecodeError):
            for line in self._source:
                orders = decoder.decode(line)
                with self._changed:
                    self._latest = orders
                    self._changed.notify()
        with self._changed:
            self.has_ended = True
            self._changed.notify()

    def take(self, wait_s: float | None) -> Orders | None:
        """Return new orders, or None if there are none after ``wait_s`` seconds or the input has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest is not None or self.has_ended, wait_s)
            latest, self._latest = self._latest, None
            return latest


class Job:
    """One table, with the time of its next attempt."""

    def __init__(self, order: TableOrder, source: SegmentReader, merger: ThreadPoolExecutor) -> None:
        self.order = order
        self.due = 0.0
        self._append_at = 0.0  # time of the next attempt to append rows
        self._merger: Final = merger
        self._pause_s = 0.0
        self._skipped = 0
        self._rejected = 0
        self._sample = ""
        self._complete_ms = 0
        self._last = TableReport(order.topic, NEW, 0, 0, 0, 0, 0, 0, 0, 0.0)
        self._vacuumed_at = float("-inf")  # so that files of a writer that crashed are deleted soon
        self._merging: tuple[MergePlan, Future[Written]] | None = None
        self._source: Final = source
        self._table: TopicTable | None = None

    @property
    def is_early(self) -> bool:
        """Whether rows are not due yet, but a merge may have ended."""
        return time.monotonic() < self._append_at

    def step(self, *, appends: bool = True) -> TableReport:
        """Bring the table closer to the log, or only maintain it, and return its state."""
        begun, begun_ms, progress, error = time.monotonic(), now_ms(), Progress(), ""
        try:
            table = self._open()
            if appends:
                progress = table.append()
                self._complete_ms = self._complete_ms if progress.behind else begun_ms
            if not progress.behind:
                self._maintain(table)
            self._pause_s = 0.0
        except CommitConflict:
            self._table = None
            self._pause_s, error = CONFLICT_PAUSE_S, "another broker writes this table"
        except (BrokerError, BlobMissing, OSError, pa.ArrowException, MemoryError) as failure:
            self._table = self._merging = None
            self._pause_s = min(max(PAUSE_FIRST_S, 2 * self._pause_s), PAUSE_MAX_S)
            error = getattr(failure, "message", "") or str(failure) or type(failure).__name__
        took = time.monotonic() - begun
        if self._pause_s:
            self.due = self._append_at = time.monotonic() + self._pause_s
        else:
            if appends:
                wait_s = 0.0 if progress.behind else max(self.order.freshness_s - RESERVE * took, STEP_MIN_S)
                self._append_at = begun + wait_s
            self.due = self._append_at if self._merging is None else min(self._append_at, begun + MAINTAIN_S)
        self._rejected += progress.rejected
        self._sample = progress.rejected_sample or self._sample
        self._skipped += progress.skipped
        self._last = self._report(progress, took if appends else self._last.commit_s, error)
        return self._last

    def _open(self) -> TopicTable:
        """Return the table, whose state is loaded again after every error."""
        if self._table is None:
            order = self.order
            objects = open_bucket(order.url, timeout_s=STORE_TIMEOUT_S)
            iceberg = IcebergMetadata(objects, order.url) if order.is_iceberg else None
            self._table = TopicTable(
                order.topic,
                objects,
                self._source,
                iceberg=iceberg,
                columns=order.columns,
                is_latest=order.is_latest,
            )
        return self._table

    def _maintain(self, table: TopicTable) -> None:
        """Finish a merge, begin the next one, and delete files that no version needs."""
        if self._merging is not None and self._merging[1].done():
            plan, future = self._merging
            self._merging = None
            table.replace(plan, future.result())
        if self._merging is None and (next_plan := table.plan_merge()) is not None:
            self._merging = next_plan, self._merger.submit(merged, next_plan)
        if time.monotonic() - self._vacuumed_at >= VACUUM_S:
            self._vacuumed_at = time.monotonic()
            table.vacuum(self.order.history_hours * 3_600_000)

    def _report(self, progress: Progress, took: float, error: str) -> TableReport:
        state = None if self._table is None else self._table.known
        if state is None:  # after an error, the files have not changed
            return msgspec.structs.replace(self._last, commit_s=took, error=error)
        return TableReport(
            topic=self.order.topic,
            version=state.version,
            rows=state.row_count,
            files=len(state.files),
            size=state.byte_count,
            behind=progress.behind,
            skipped=self._skipped,
            committed_ms=state.committed_ms,
            complete_ms=self._complete_ms,
            commit_s=took,
            error=error,
            rejected=self._rejected,
            rejected_sample=self._sample,
            columns=max(0, len(state.columns) - 1),
            notes="" if self._table is None or self._table.typed is None else self._table.typed.notes,
        )


def work(source: SegmentReader, orders: OrderReader, report: Callable[[TableReport], object]) -> int:
    """Write tables until the input ends. Return the exit code."""
    jobs: dict[str, Job] = {}
    merger = ThreadPoolExecutor(1, "merge")
    try:
        while not orders.has_ended:
            first = min(jobs.values(), key=lambda job: job.due, default=None)
            latest = orders.take(None if first is None else max(0.0, first.due - time.monotonic()))
            if latest is not None:
                follow(jobs, latest, source, merger)
                continue
            if first is None or first.due > time.monotonic() or orders.has_ended:
                continue
            found = first.step(appends=not first.is_early)
            report(found)
            if found.error and not _is_alive(source):
                return EXIT_LOST
    finally:
        merger.shutdown(wait=False, cancel_futures=True)
    return 0


def follow(jobs: dict[str, Job], orders: Orders, source: SegmentReader, merger: ThreadPoolExecutor) -> None:
    """Begin new tables, and forget those that are not ordered any more."""
    ordered = {order.topic: order for order in orders.tables}
    for topic in [topic for topic, job in jobs.items() if ordered.get(topic) != job.order]:
        del jobs[topic]
    for topic, order in ordered.items():
        if topic not in jobs:
            jobs[topic] = Job(order, source, merger)


def _is_alive(source: SegmentReader) -> bool:
    try:
        source.ping()
    except BrokerError:
        return False
    return True


def main(arguments: list[str]) -> int:
    """Run the process. The only argument is the descriptor of the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the broker, which then ends the input
    os.nice(NICE)
    pa.set_cpu_count(1)
    output = sys.stdout.buffer

    def report(found: TableReport) -> None:
        output.write(msgspec.json.encode(found) + b"\n")
        output.flush()

    orders = OrderReader(sys.stdin.buffer)
    try:
        source = SegmentReader(BulkConnection.over(socket.socket(fileno=int(arguments[0]))))
        return work(source, orders, report)
    except BrokenPipeError:
        return EXIT_LOST
    finally:
        sys.stdout = None  # a closed pipe must not become an error at exit
