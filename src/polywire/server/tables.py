"""Start the process that writes tables, order its tables, and receive their states (concepts: tables).

The process is started when a topic of this broker process has a table. As a client of the broker it may only read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar, Final

import msgspec

from polywire.broker.broker import Broker
from polywire.broker.settings import TableFormat
from polywire.broker.users import TABLES, Principal
from polywire.protocols.polywire.factory import PolywireFactory
from polywire.server.hub import Hub
from polywire.server.readiness import ReadinessDriver
from polywire.server.worker_process import WorkerProcess
from polywire.table_orders import Orders, TableOrder, TableReport

STALE_S: Final = 60.0  # interval of warnings about a table that cannot be written


class TableStatus(msgspec.Struct):
    """The last report on one table. ``warned_at`` is when a warning was logged, in seconds of the monotonic clock."""

    report: TableReport
    warned_at: float = float("-inf")


class Tables(WorkerProcess):
    """The tables of one broker process."""

    MODULE: ClassVar[str] = "polywire.tables"
    JOB: ClassVar[str] = "writes tables"
    USER: ClassVar[Principal] = TABLES

    def __init__(self, broker: Broker, hub: Hub, driver: ReadinessDriver | None) -> None:
        super().__init__(hub, PolywireFactory(broker), driver)
        self._broker: Final = broker
        self._ordered = Orders([])
        self._changed = True
        self._broker.watch_topics(self._topic_changed)
        self._statuses: Final[dict[str, TableStatus]] = {}

    def _topic_changed(self, _topic_id: bytes) -> None:
        self._changed = True

    def sweep(self) -> None:
        """Send changed orders, and start the process if it is needed. Call it once a second."""
        if not self._changed:
            return
        self._changed = False
        orders = self._current()
        if orders == self._ordered:
            return
        self._ordered = orders
        for topic in self._statuses.keys() - {order.topic for order in orders.tables}:
            del self._statuses[topic]
        self._send(is_needed=bool(orders.tables))

    def _orders(self) -> Orders:
        return self._ordered

    def _current(self) -> Orders:
        settings = self._broker.settings
        found: list[TableOrder] = []
        for topic in self._broker.topics():
            table = topic.table_settings(settings)
            if table is not None:
                found.append(
                    TableOrder(
                        topic=topic.name.full,
                        topic_id=topic.id,
                        url=topic.table_url(settings),
                        is_iceberg=table.formats is TableFormat.DELTA_AND_ICEBERG,
                        is_latest=topic.settings.compaction,
                        freshness_s=table.freshness_s,
                        history_hours=table.history_hours,
                        columns=table.columns,
                    )
                )
        return Orders(found)

    def _reported(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=TableReport)
        except msgspec.DecodeError:
            return
        if all(order.topic != report.topic for order in self._ordered.tables):
            return
        status = self._statuses.get(report.topic)
        if status is None:
            status = self._statuses[report.topic] = TableStatus(report)
        elif status.report.error and not report.error:
            self._log.info("table is written again", topic=report.topic, version=report.version)
        status.report = report
        now = time.monotonic()
        if report.error and now - status.warned_at >= STALE_S:
            status.warned_at = now
            self._log.warning("cannot write a table: trying again", topic=report.topic, reason=report.error)

    def reports(self) -> Mapping[str, TableReport]:
        """Return the state of each table, by full name of its topic."""
        return {topic: status.report for topic, status in self._statuses.items()}
