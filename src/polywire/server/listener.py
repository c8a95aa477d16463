"""Listeners: sockets that accept connections for one wire, or for whichever the peer speaks.

Promises: all listeners accept before ``open_listeners`` returns, or none is left open. Must not know: any wire, the broker.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from polywire.errors import Busy, ErrorCode
from polywire.protocols.runtime.session import SessionFactory
from polywire.server.config import ANY, TLS_SUFFIX, Address
from polywire.server.connection import Connection
from polywire.server.hub import Hub
from polywire.server.tls import ServerTls, TlsConnection

ACCEPT_BACKLOG: Final = 1024  # connections the kernel may hold before they are accepted
KEEP_ALIVE: Final = {
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 6,
}  # seconds, seconds, probes: dead after two minutes


@dataclass(frozen=True, slots=True)
class Listener:
    """An open listener and the address it really has."""

    name: str
    address: Address
    server: asyncio.Server


async def open_listeners(
    hub: Hub,
    addresses: Mapping[str, Address],
    factories: Sequence[SessionFactory],
    *,
    any_wires: Collection[str] | None = None,
    any_plain: bool = True,
    tls: ServerTls | None = None,
) -> list[Listener]:
    """Listen on every address; the listener for all wires recognises ``any_wires``, every one without, and TLS where there is a certificate;
    without ``any_plain`` it takes nothing but TLS.

    Raises Busy(BUSY) with the address that cannot be had.
    """
    by_wire = {factory.wire: factory for factory in factories}
    among_all = [factory for factory in factories if any_wires is None or factory.wire in any_wires]
    opened: list[Listener] = []
    for name, address in addresses.items():
        wire = name.removesuffix(TLS_SUFFIX)
        spoken = among_all if wire == ANY else [by_wire[wire]]
        spoken_tls = tls if name == ANY or name.endswith(TLS_SUFFIX) else None
        try:
            opened.append(await _listen(hub, name, address, spoken, spoken_tls, plain_too=name == ANY and any_plain))
        except OSError as error:
            close_listeners(opened)
            raise _cannot_listen(name, address, error) from error
    return opened


def _cannot_listen(name: str, address: Address, error: OSError) -> Busy:
    reason = error.strerror or str(error)
    advice = ""
    if error.errno == errno.EADDRINUSE:
        advice = f", something else listens there: stop it or choose another address with --{name} HOST:PORT"
    return Busy(ErrorCode.BUSY, f"cannot listen{advice} listener={name} address={address} reason={reason!r}")


async def _listen(
    hub: Hub,
    name: str,
    address: Address,
    spoken: Sequence[SessionFactory],
    tls: ServerTls | None,
    *,
    plain_too: bool,
) -> Listener:
    loop = asyncio.get_running_loop()

    def connect() -> Any:
        connection = Connection(hub, spoken)
        return connection if tls is None else TlsConnection(hub, connection, tls.context, plain_too=plain_too)

    server = await loop.create_server(connect, address.host, address.port, backlog=ACCEPT_BACKLOG)
    for listening in server.sockets:
        _keep_alive(listening)
    host, port = server.sockets[0].getsockname()[:2]
    return Listener(name, Address(host, port), server)


def close_listeners(listeners: Sequence[Listener]) -> None:
    """Accept no further connection."""
    for listener in listeners:
        listener.server.close()


def _keep_alive(listening: Any) -> None:
    """Peers that vanished without a word are noticed by the kernel; accepted sockets inherit these options."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        option = getattr(socket, name, None)  # not every system has all of them
        if option is not None:
            listening.setsockopt(socket.IPPROTO_TCP, option, value)
