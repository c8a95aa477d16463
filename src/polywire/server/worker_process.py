"""Run a worker process of the broker, and start it again whenever it ends.

* The process reads orders as JSON lines from its standard input, and writes reports as JSON lines to its standard output.
* The process is a client of the broker over a socket pair, as an internal user. No other client can log in as that user.
* If the broker ends in any way, the process ends, too, because its input ends.
* The next process starts when all requests of the previous process were executed or discarded.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec
import structlog

from polywire.broker.users import Principal
from polywire.errors import BrokerError
from polywire.protocols.runtime.session import SessionFactory
from polywire.server.child import connect_child, kill, start_child
from polywire.server.hub import Hub
from polywire.server.readiness import ReadinessDriver

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from polywire.server.connection import Connection

RESTART_FIRST_S: Final = 1.0
RESTART_MAX_S: Final = 30.0
HEALTHY_S: Final = 10.0  # after this time, the next failure is treated as the first one
STOP_S: Final = 1.0  # time for the last commit; afterwards the process is killed, which loses nothing
LINE_BYTES_MAX: Final = 1 << 20
CLOSE_S: Final = 5.0  # time for the connection of a process that has ended to execute what it received
CLOSE_POLL_S: Final = 0.02


class WorkerProcess(ABC):
    """The worker process of one broker process, for one job.

    Subclasses set ``MODULE``, which Python runs as a program, ``JOB`` for messages, and the user ``USER``.
    """

    MODULE: ClassVar[str]
    JOB: ClassVar[str]
    USER: ClassVar[Principal]

    def __init__(self, hub: Hub, factory: SessionFactory, driver: ReadinessDriver | None) -> None:
        """``factory`` serves the process, over the protocol `polywire`."""
        self._hub: Final = hub
        self._factory: Final = factory
        self._driver: Final = driver
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._log: Final = structlog.get_logger(self.MODULE)

    @abstractmethod
    def _orders(self) -> msgspec.Struct:
        """Return the orders to send, which replace earlier ones."""

    @abstractmethod
    def _reported(self, line: bytes) -> None:
        """Handle a report of the process."""

    def _send(self, *, is_needed: bool) -> None:
        """Send the orders, and start the process if it is needed and does not run."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, RuntimeError):  # the process has just ended, and the next one gets the orders
                self._process.stdin.write(msgspec.json.encode(self._orders()) + b"\n")
        if is_needed and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._supervise())

    async def _supervise(self) -> None:
        pause_s = RESTART_FIRST_S
        while True:
            begun = time.monotonic()
            code = await self._run()
            if time.monotonic() - begun >= HEALTHY_S:
                pause_s = RESTART_FIRST_S
            self._log.warning(
                f"the process that {self.JOB} has ended: starting it again", exit_code=code, pause_s=pause_s
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_MAX_S)

    async def _run(self) -> int:
        """Start the process, and return its exit code when it ends."""
        try:
            process, ours = await start_child(self.MODULE, limit=LINE_BYTES_MAX)
        except OSError as error:
            self._log.warning(f"cannot start the process that {self.JOB}", reason=error.strerror)
            return -1
        self._process = process
        connection: Connection | None = None
        try:
            with suppress(BrokerError):  # without a slot of a user, it is served as long as there are other slots
                connection = await connect_child(self._hub, [self._factory], self._driver, ours, self.USER)
            self._send(is_needed=False)
            assert process.stdout is not None, "it is a pipe"
            with suppress(ValueError):  # a line above the limit: the process is ended, and started again
                async for line in process.stdout:
                    self._reported(line)
                return await process.wait()
            return -1
        finally:
            self._process = None
            if process.returncode is None:
                await _end(process)
            if connection is not None:
                await self._closed(connection)

    async def _closed(self, connection: Connection) -> None:
        """Wait until a connection has ended, after its other end was closed. Abort it after ``CLOSE_S``."""
        end = time.monotonic() + CLOSE_S
        while connection in self._hub.connections and time.monotonic() < end:  # noqa: ASYNC110 - its end is no event
            await asyncio.sleep(CLOSE_POLL_S)
        if connection in self._hub.connections:
            connection.abort(f"the process that {self.JOB} has ended")

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
