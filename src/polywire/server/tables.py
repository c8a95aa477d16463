"""Start the process that writes tables, order its tables, and receive their states (concepts: tables).

* The process is started when a topic of this broker process has a table, and again whenever it ends.
* It reads records over a socket pair, as a client that may only read. No other client can log in as it.
* If the broker ends in any way, so does the process, because its input ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from polywire.broker.broker import Broker
from polywire.broker.settings import TableFormat
from polywire.broker.users import TABLES
from polywire.errors import BrokerError
from polywire.protocols.polywire.factory import PolywireFactory
from polywire.server.child import connect_child, kill, start_child
from polywire.server.hub import Hub
from polywire.server.readiness import ReadinessDriver
from polywire.table_orders import Orders, TableOrder, TableReport

if TYPE_CHECKING:
    from asyncio.subprocess import Process

RESTART_FIRST_S: Final = 1.0
RESTART_MAX_S: Final = 60.0
HEALTHY_S: Final = 60.0  # after this time, the next failure is treated as the first one
STOP_S: Final = 1.0  # time for the last commit; afterwards the process is killed, which loses nothing
LINE_BYTES_MAX: Final = 1 << 20
STALE_S: Final = 60.0  # interval of warnings about a table that cannot be written

log = structlog.get_logger("polywire.tables")


@dataclass(slots=True)
class TableStatus:
    """The last report on one table. ``warned_at`` is when a warning was logged, in seconds of the monotonic clock."""

    report: TableReport
    warned_at: float = float("-inf")


class Tables:
    """The tables of one broker process."""

    def __init__(self, broker: Broker, hub: Hub, driver: ReadinessDriver | None) -> None:
        self._broker: Final = broker
        self._hub: Final = hub
        self._driver: Final = driver
        self._factory: Final = PolywireFactory(broker)
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._orders = Orders([])
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
        orders = self._ordered()
        if orders == self._orders:
            return
        self._orders = orders
        for topic in self._statuses.keys() - {order.topic for order in orders.tables}:
            del self._statuses[topic]
        self._send()
        if orders.tables and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._supervise())

    def _ordered(self) -> Orders:
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

    def _send(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, RuntimeError):  # the process has just ended, and the next one gets the orders
                self._process.stdin.write(msgspec.json.encode(self._orders) + b"\n")

    async def _supervise(self) -> None:
        pause_s = RESTART_FIRST_S
        while True:
            begun = time.monotonic()
            code = await self._run()
            if time.monotonic() - begun >= HEALTHY_S:
                pause_s = RESTART_FIRST_S
            log.warning("the process that writes tables has ended: starting it again", exit_code=code, pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_MAX_S)

    async def _run(self) -> int:
        """Start the process, and return its exit code when it ends."""
        try:
            process, ours = await start_child("polywire.tables", limit=LINE_BYTES_MAX)
        except OSError as error:
            log.warning("cannot start the process that writes tables", reason=error.strerror)
            return -1
        self._process = process
        try:
            with suppress(BrokerError):  # without a slot of a user, it is served as long as there are other slots
                await connect_child(self._hub, [self._factory], self._driver, ours, TABLES)
            self._send()
            assert process.stdout is not None, "it is a pipe"
            async for line in process.stdout:
                self._reported(line)
            return await process.wait()
        finally:
            self._process = None
            if process.returncode is None:
                await _end(process)

    def _reported(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=TableReport)
        except msgspec.DecodeError:
            return
        if all(order.topic != report.topic for order in self._orders.tables):
            return
        status = self._statuses.get(report.topic)
        if status is None:
            status = self._statuses[report.topic] = TableStatus(report)
        elif status.report.error and not report.error:
            log.info("table is written again", topic=report.topic, version=report.version)
        status.report = report
        now = time.monotonic()
        if report.error and now - status.warned_at >= STALE_S:
            status.warned_at = now
            log.warning("cannot write a table: trying again", topic=report.topic, reason=report.error)

    def reports(self) -> Mapping[str, TableReport]:
        """Return the state of each table, by full name of its topic."""
        return {topic: status.report for topic, status in self._statuses.items()}

    async def stop(self) -> None:
        """End the process after its current commit. Call it before the broker closes connections."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _end(process: Process) -> None:
    """End the process by ending its input, and kill it if it does not end in time."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        await kill(process)
