"""Listeners: sockets that accept connections of one protocol, or of every protocol.

If one listener cannot be opened, ``open_listeners`` opens none.

The ready file exists while all listeners accept connections, and contains their addresses. It is renamed into place, so
readers never see a partial file.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from polywire.errors import Busy, ErrorCode
from polywire.protocols.runtime.session import SessionFactory
from polywire.server.config import ANY, TLS_SUFFIX, Address
from polywire.server.connection import Connection
from polywire.server.hub import Hub
from polywire.server.readiness import ReadinessDriver
from polywire.server.tls import ServerTls

READY_MODE: Final = 0o644  # listener addresses are not secret
INSIDE: Final = "inside"  # the listener for other processes of this broker
INSIDE_TLS: Final = INSIDE + TLS_SUFFIX  # the listener for other machines, if they connect with TLS
# prefix for listeners that belong to one process, in contrast to those that several processes share
OWN: Final = "own-"
EVERYWHERE_V6: Final = "::"
ACCEPT_BACKLOG: Final = 1024  # connections that the kernel can queue before they are accepted
ACCEPT_PAUSE_S: Final = 1.0  # pause if the system has no descriptor or memory for another connection
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
KEEP_ALIVE: Final = {
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 6,
}  # idle time and interval in seconds, number of probes: a vanished client is detected after two minutes
log = structlog.get_logger("polywire.server")


def write_ready(path: Path | None, addresses: Mapping[str, Address]) -> None:
    """Write the addresses of all listeners to the ready file, if one is configured."""
    if path is None:
        return
    ready = {name: {"host": address.host, "port": address.port} for name, address in addresses.items()}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(ready) + "\n", encoding="utf-8")
    temporary.chmod(READY_MODE)
    os.replace(temporary, path)


def withdraw_ready(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)


class Server(Protocol):
    """Accepts connections, as asyncio's servers do."""

    @property
    def sockets(self) -> Sequence[Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Listener:
    """An open listener, with its address after binding."""

    name: str
    address: Address
    server: Server


class LoopServer:
    """Accepts connections on several sockets. The event loop reads and writes them."""

    def __init__(self, servers: Sequence[asyncio.Server]) -> None:
        self._servers = servers
        self.sockets: Sequence[Any] = [listening for server in servers for listening in server.sockets]

    def close(self) -> None:
        for server in self._servers:
            server.close()


class ReadinessServer:
    """Accepts connections, which ``ReadinessDriver`` reads and writes.

    If the system has no free descriptors, it accepts none for ``ACCEPT_PAUSE_S``.
    """

    def __init__(
        self, driver: ReadinessDriver, sockets: Sequence[socket.socket], connect: Callable[[], Any], loop: Any
    ) -> None:
        """``connect`` creates the protocol of each connection. ``loop`` must be able to watch descriptors."""
        self._driver = driver
        self._loop = loop
        self._connect = connect
        self.sockets: Sequence[socket.socket] = sockets
        for listening in sockets:
            self._watch(listening)

    def _watch(self, listening: socket.socket) -> None:
        if listening in self.sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept only one connection, so that existing connections are served even while many new ones arrive."""
        try:
            peer, name = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            log.warning(
                "cannot accept connections: retrying after a pause", reason=error.strerror, pause_s=ACCEPT_PAUSE_S
            )
            self._loop.remove_reader(listening.fileno())
            self._loop.call_later(ACCEPT_PAUSE_S, self._watch, listening)
            return
        self._driver.accepted(peer, name, self._connect())

    def close(self) -> None:
        sockets, self.sockets = self.sockets, ()
        for listening in sockets:
            self._loop.remove_reader(listening.fileno())
            listening.close()


async def open_listeners(
    hub: Hub,
    addresses: Mapping[str, Address],
    factories: Sequence[SessionFactory],
    *,
    any_wires: Collection[str] | None = None,
    any_plain: bool = True,
    tls: ServerTls | None = None,
    driver: ReadinessDriver | None = None,
    shared: bool = False,
) -> list[Listener]:
    """Listen on every address. Raises Busy(BUSY) with the address that is not available, and then listens on none.

    Args:
        hub: state that all connections share.
        addresses: the address of each listener by name.
        factories: the protocols.
        any_wires: protocols that the listener ``any`` accepts; None for all.
        any_plain: whether the listener ``any`` accepts connections without TLS.
        tls: the certificate, if any.
        driver: serves connections without TLS; without it, the event loop does.
        shared: whether other processes listen on the same addresses. The system then distributes connections among
            them.
    """
    by_wire = {factory.wire: factory for factory in factories}
    among_all = [factory for factory in factories if any_wires is None or factory.wire in any_wires]
    opened: list[Listener] = []
    for name, address in addresses.items():
        wire = name.removesuffix(TLS_SUFFIX)
        spoken = among_all if wire == ANY else [by_wire[wire]]
        spoken_tls = tls if name == ANY or name.endswith(TLS_SUFFIX) else None
        try:
            opened.append(
                await _listen(
                    hub, name, address, spoken, spoken_tls, driver, plain_too=name == ANY and any_plain, shared=shared
                )
            )
        except OSError as error:
            close_listeners(opened)
            raise cannot_listen(name, address, error) from error
    return opened


def cannot_listen(name: str, address: Address, error: OSError) -> Busy:
    """Return the error to raise for an address that is not available. If it is in use, the message says what to do."""
    reason = error.strerror or str(error)
    advice = ""
    if error.errno == errno.EADDRINUSE:
        advice = f": the address is in use (stop the other program, or choose another address with --{name} HOST:PORT)"
    return Busy(ErrorCode.BUSY, f"cannot listen{advice} listener={name} address={address} reason={reason!r}")


async def _listen(
    hub: Hub,
    name: str,
    address: Address,
    spoken: Sequence[SessionFactory],
    tls: ServerTls | None,
    driver: ReadinessDriver | None,
    *,
    plain_too: bool,
    shared: bool,
) -> Listener:
    loop = asyncio.get_running_loop()
    server: Server

    def connect() -> Any:
        connection = Connection(hub, spoken)
        return connection if tls is None else tls.over(hub, connection, plain_too=plain_too)

    sockets = await listening_sockets(address, shared=shared)
    if tls is None and driver is not None:
        server = ReadinessServer(driver, sockets, connect, loop)
    else:
        server = LoopServer(
            [await loop.create_server(connect, sock=listening, backlog=ACCEPT_BACKLOG) for listening in sockets]
        )
    for listening in server.sockets:
        _keep_alive(listening)
    host, port = server.sockets[0].getsockname()[:2]
    return Listener(name, Address(host, port), server)


async def listen_inside(
    hub: Hub, listening: socket.socket, factories: Sequence[SessionFactory], driver: ReadinessDriver | None
) -> Listener:
    """Accept connections of other processes of this broker on a listening socket."""
    loop = asyncio.get_running_loop()
    server: Server

    def connect() -> Any:
        return Connection(hub, factories)

    if driver is not None:
        server = ReadinessServer(driver, [listening], connect, loop)
    else:
        server = await loop.create_server(connect, sock=listening, backlog=ACCEPT_BACKLOG)
    host, port = listening.getsockname()[:2]
    return Listener(INSIDE, Address(host, port), server)


async def open_inside(
    hub: Hub,
    address: Address,
    factories: Sequence[SessionFactory],
    driver: ReadinessDriver | None,
    tls: ServerTls | None = None,
) -> Listener:
    """Accept connections of other machines. If ``tls`` is set, connections without TLS are rejected.

    Raises Busy(BUSY) if the address is in use.
    """
    name = INSIDE if tls is None else INSIDE_TLS
    try:
        return await _listen(hub, name, address, factories, tls, driver, plain_too=False, shared=False)
    except OSError as error:
        raise cannot_listen(name, address, error) from error


async def listening_sockets(address: Address, *, shared: bool = False) -> list[socket.socket]:
    """Return a listening socket for each address of a host. Raises OSError if one cannot listen.

    For the host ``::``, a single socket accepts IPv4 and IPv6.

    Two processes can bind the same port at the same moment, and only the first to listen gets it. uvloop's servers do not
    report that, so this function listens.
    """
    found = await asyncio.get_running_loop().getaddrinfo(
        address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address_info in dict.fromkeys(found):
            sockets.append(made := socket.socket(family, kind, protocol))
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address_info[0] != EVERYWHERE_V6))
            made.bind(address_info)
            made.listen(ACCEPT_BACKLOG)
    except OSError:
        for made in sockets:
            made.close()
        raise
    return sockets


def close_listeners(listeners: Sequence[Listener]) -> None:
    for listener in listeners:
        listener.server.close()


def _keep_alive(listening: Any) -> None:
    """Enable TCP keepalive, so that the kernel detects clients that disappeared. Accepted sockets inherit it."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        option = getattr(socket, name, None)  # some systems lack some of these options
        if option is not None:
            listening.setsockopt(socket.IPPROTO_TCP, option, value)
