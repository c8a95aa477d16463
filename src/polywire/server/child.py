"""Start a child process of the broker, serve it as a client over a socket pair, and end it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

from polywire.broker.users import Principal
from polywire.protocols.runtime.session import SessionFactory
from polywire.server.connection import Connection
from polywire.server.hub import Hub
from polywire.server.readiness import ReadinessDriver

SECRET: Final = "POLYWIRE_PASSWORD"  # clients read it; the broker's processes must not send it anywhere


async def start_child(module: str, *words: str, **options: Any) -> tuple[Process, socket.socket]:
    """Start a module as a process that has pipes and one end of a socket pair. Return the process and the other end.

    The module's arguments are the descriptor of its end, and ``words``. ``options`` are passed to
    ``create_subprocess_exec``. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    with ExitStack() as unused:
        unused.callback(ours.close)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                str(theirs.fileno()),
                *words,
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=(theirs.fileno(),),
                env={name: value for name, value in os.environ.items() if name != SECRET},
                **options,
            )
        unused.pop_all()  # from now on, the caller closes it
    return process, ours


async def connect_child(
    hub: Hub, factories: Sequence[SessionFactory], driver: ReadinessDriver | None, ours: socket.socket, user: Principal
) -> Connection:
    """Serve a process at the other end of a socket pair as a user, and return the connection.

    Raises Busy(BUSY) if users have too many connections. The connection then stays open, but a new connection may
    replace it.
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
