"""Run SQL statements of HTTP clients, each in a process of its own (operate: console#query-topics-in-sql).

* The process reads records over a socket pair, as the user that sent the statement, so it sees only what that user may
  see.
* A query that takes too long, is cancelled, or whose client has disconnected is killed.
* Queries are not queued: if too many run already, a statement is rejected.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from polywire import errors
from polywire.broker.owners import Caller
from polywire.broker.users import ROOT
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid, Unavailable
from polywire.server.child import connect_child, kill, start_child
from polywire.table_orders import SqlOrder, SqlReply

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from polywire.protocols.runtime.session import SessionFactory
    from polywire.server.hub import Hub
    from polywire.server.readiness import ReadinessDriver

SQL_RESULT_BYTES_MAX: Final = 4 * 1024 * 1024  # JSON of a result; the first rows are returned
SQL_SECONDS_MAX: Final = 30  # duration of a query, in seconds, with starting its process
SQL_MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024  # memory of DuckDB for a query, which writes no temporary files
SQL_QUERIES_MAX: Final = 4  # concurrent queries of one broker process
SQL_QUERIES_OF_USER_MAX: Final = 2  # concurrent queries of one user, or of one address if there are no users
DONE: Final = "done"
FAILED: Final = "failed"
REJECTED: Final = "rejected"
RETRY_MS: Final = 1_000
READ_BYTES: Final = 256 * 1024
FURTHER_BYTES: Final = 4 * 1024 * 1024  # of a result, for the names and types of its columns
THREADS: Final = max(1, (os.cpu_count() or 1) // 2)  # the broker and its clients need the other processors


class _Query(msgspec.Struct, eq=False):
    """A running query. ``name`` is chosen by the client, to cancel it; it may be empty."""

    caller: Caller
    name: str
    task: asyncio.Task[bytes] | None = None


class Queries:
    """The queries of one broker process. Implements ``http.process.Queries``."""

    def __init__(
        self, hub: Hub, factory: SessionFactory, driver: ReadinessDriver | None, *, memory_bytes_max: int
    ) -> None:
        """``factory`` serves the processes, over the protocol `polywire`. A query needs at most ``memory_bytes_max``."""
        self._hub: Final = hub
        self._factory: Final = factory
        self._driver: Final = driver
        self._memory_bytes: Final = min(SQL_MEMORY_BYTES_MAX, memory_bytes_max)
        self._running: Final[set[_Query]] = set()
        self.outcomes: Final[Counter[str]] = Counter(dict.fromkeys((DONE, FAILED, REJECTED), 0))
        self._is_stopping = False

    async def run(self, caller: Caller, statement: str, *, rows_max: int, name: str) -> bytes:
        """Return the result of a statement as JSON. Raises BrokerError."""
        query, outcome = _Query(caller, name), REJECTED
        try:
            self._admit(query)
            outcome = FAILED
            found = await self._run(query, statement, rows_max)
            outcome = DONE
            return found
        finally:
            self.outcomes[outcome] += 1

    async def _run(self, query: _Query, statement: str, rows_max: int) -> bytes:
        order = SqlOrder(statement, rows_max, SQL_RESULT_BYTES_MAX, self._memory_bytes, SQL_SECONDS_MAX, THREADS)
        self._running.add(query)
        query.task = task = asyncio.get_running_loop().create_task(self._execute(query.caller, order))
        task.add_done_callback(partial(self._ended, query))
        try:
            done, _ = await asyncio.wait({task}, timeout=SQL_SECONDS_MAX)
        finally:
            task.cancel()
        if not done:
            await asyncio.wait({task})
        if not task.cancelled():
            return task.result()
        if self._is_stopping:
            raise _stopping()
        if done:
            raise Invalid(ErrorCode.INVALID_REQUEST, "the query was cancelled")
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"query took too long: read fewer records, or aggregate less limit_s={SQL_SECONDS_MAX}",
        )

    def _ended(self, query: _Query, task: asyncio.Task[bytes]) -> None:
        self._running.discard(query)
        if not task.cancelled():
            task.exception()  # if the client has disconnected, nothing else retrieves it

    def _admit(self, query: _Query) -> None:
        if self._is_stopping:
            raise _stopping()
        own = [other for other in self._running if other.caller.owner == query.caller.owner]
        if query.name and self._named(query.caller, query.name):
            raise Busy(ErrorCode.BUSY, f"a query with this id is running id={query.name!r}")
        for count, limit, noun in (
            (len(own), SQL_QUERIES_OF_USER_MAX, "your queries"),
            (len(self._running), SQL_QUERIES_MAX, "queries"),
        ):
            if count >= limit:
                raise Busy(
                    ErrorCode.BUSY,
                    f"too many {noun} are running: try again later limit={limit}",
                    retry_after_ms=RETRY_MS,
                )

    async def _execute(self, caller: Caller, order: SqlOrder) -> bytes:
        process, ours = await _start()
        try:
            await connect_child(self._hub, [self._factory], self._driver, ours, caller.principal or ROOT)
            return await _result(process, order)
        finally:
            await kill(process)

    def cancel(self, caller: Caller, name: str) -> bool:
        """Cancel a query of this caller. Return whether there was one."""
        found = self._named(caller, name)
        for query in found:
            if query.task is not None:
                query.task.cancel()
        return bool(found)

    def _named(self, caller: Caller, name: str) -> list[_Query]:
        """Return the query of a user with this name.

        Addresses are not compared, because another process of the broker may have forwarded the request.
        """
        return [query for query in self._running if query.caller.principal == caller.principal and query.name == name]

    async def stop(self) -> None:
        """Kill all queries, and reject further ones."""
        self._is_stopping = True
        tasks = [query.task for query in self._running if query.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _start() -> tuple[Process, socket.socket]:
    """Start the process of a query, and return the socket from which it reads. Raises Busy."""
    try:
        # libraries write errors if a statement makes them fail
        return await start_child("polywire.tables.query_process", stderr=asyncio.subprocess.DEVNULL)
    except OSError as error:
        raise Busy(ErrorCode.BUSY, f"cannot start a query: {error.strerror}") from error


async def _result(process: Process, order: SqlOrder) -> bytes:
    """Return the result that a process writes. Raises the error that it reports."""
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    try:
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        reply = msgspec.json.decode(await process.stdout.readline(), type=SqlReply)
        if reply.code:
            raise _error(reply)
        parts, size = [], 0
        while part := await process.stdout.read(READ_BYTES):
            size += len(part)
            if size > order.result_bytes_max + FURTHER_BYTES:
                raise Invalid(ErrorCode.INVALID_REQUEST, "the result has too many columns")
            parts.append(part)
    except (OSError, ValueError):  # it has ended: msgspec.DecodeError is a ValueError
        parts = []
    if await process.wait() or not parts:
        raise _no_result(process.returncode, order.memory_bytes_max)
    return b"".join(parts)


def _error(reply: SqlReply) -> BrokerError:
    kind = getattr(errors, reply.kind)
    if issubclass(kind, errors.NotOwner):
        return Unavailable(ErrorCode(reply.code), reply.message)
    found: BrokerError = kind(ErrorCode(reply.code), reply.message)
    return found


def _no_result(code: int | None, memory_bytes_max: int) -> BrokerError:
    """Return the error for a process that has ended without a result."""
    if code == -signal.SIGABRT:  # a library could not allocate memory
        message = f"query needs too much memory: select fewer rows or columns limit={memory_bytes_max}"
        return Invalid(ErrorCode.INVALID_REQUEST, message)
    reason = f"signal={signal.Signals(-code).name}" if code is not None and code < 0 else f"exit_code={code}"
    return Busy(ErrorCode.BUSY, f"the process of the query ended unexpectedly: try again {reason}")


def _stopping() -> Unavailable:
    return Unavailable(ErrorCode.STOPPING, "the broker is stopping")
