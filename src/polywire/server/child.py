"""Serve a child process of the broker as a client over a socket pair, and end it."""

from __future__ import annotations

import asyncio
import socket
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from polywire.broker.users import Principal
from polywire.protocols.runtime.session import SessionFactory
from polywire.server.connection import Connection
from polywire.server.hub import Hub
from polywire.server.readiness import ReadinessDriver


async def connect_child(
    hub: Hub, factories: Sequence[SessionFactory], driver: ReadinessDriver | None, ours: socket.socket, user: Principal
) -> Connection:
    """Serve a process at the other end of a socket pair as a user.

    Returns the connection. Raises Busy(BUSY) if users have too many connections. The process is then served as long as there are other slots.
    """
    loop: Any = asyncio.get_running_loop()
    connection = Connection(hub, factories)
    connection.certified = user
    if driver is not None:
        driver.accepted(ours, None, connection)
    else:
        ours.setblocking(False)
        await loop.connect_accepted_socket(lambda: connection, ours)
    hub.logins.identify(connection, user)
    return connection


async def kill(process: Process) -> None:
    """Kill a process that may have ended, and wait until it has."""
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
