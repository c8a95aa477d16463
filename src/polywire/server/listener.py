"""Listeners: sockets that accept connections for one wire, or for whichever the peer speaks.

Promises: all listeners accept before ``open_listeners`` returns, or none is left open. Must not know: any wire, the broker.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog

from polywire.errors import Busy, ErrorCode
from polywire.protocols.runtime.session import SessionFactory
from polywire.server.config import ANY, TLS_SUFFIX, Address
from polywire.server.connection import Connection
from polywire.server.hub import Hub
from polywire.server.readiness import ReadinessDriver
from polywire.server.tls import ServerTls

INSIDE: Final = "inside"  # the listener for other processes of this broker
INSIDE_TLS: Final = INSIDE + TLS_SUFFIX  # the one for other machines, where links between them are under TLS
OWN: Final = "own-"  # before the name of one where a process is reached alone, beside those that several share
EVERYWHERE_V6: Final = "::"
ACCEPT_BACKLOG: Final = 1024  # connections the kernel may hold before they are accepted
ACCEPT_PAUSE_S: Final = 1.0  # while the system has no descriptor, or no memory, for another one
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
KEEP_ALIVE: Final = {
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 6,
}  # seconds, seconds, probes: dead after two minutes

log = structlog.get_logger("polywire.server")


class Server(Protocol):
    """What accepts connections; asyncio's servers do."""

    @property
    def sockets(self) -> Sequence[Any]:
        """Those that listen."""

    def close(self) -> None:
        """Accept no further connection."""


@dataclass(frozen=True, slots=True)
class Listener:
    """An open listener and the address it really has."""

    name: str
    address: Address
    server: Server


class LoopServer:
    """Accepts connections for the loop, on several sockets."""

    def __init__(self, servers: Sequence[asyncio.Server]) -> None:
        self._servers = servers
        self.sockets: Sequence[Any] = [one for server in servers for one in server.sockets]

    def close(self) -> None:
        """Accept no further connection."""
        for server in self._servers:
            server.close()


class ReadinessServer:
    """Accepts connections for the readiness driver. Guards: each of ``sockets`` is watched by the loop, but for a pause while the system has
    no descriptor for another connection."""

    def __init__(
        self, driver: ReadinessDriver, sockets: Sequence[socket.socket], connect: Callable[[], Any], loop: Any
    ) -> None:
        """connect: makes what is told of a connection's bytes. loop: any that can watch a descriptor."""
        self._driver = driver
        self._loop = loop
        self._connect = connect
        self.sockets: Sequence[socket.socket] = sockets
        for listening in sockets:
            listening.listen(ACCEPT_BACKLOG)
            self._watch(listening)

    def _watch(self, listening: socket.socket) -> None:
        if listening in self.sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection: in a storm of them those that are there are served in between."""
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
        """Accept no further connection."""
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
    """Listen on every address; the listener for all wires recognises ``any_wires``, every one without, and TLS where there is a certificate;
    without ``any_plain`` it takes nothing but TLS. driver: of plain connections; without one the loop drives them, as it does those of TLS.
    shared: other processes listen there, too, and the system gives each a part of the connections.

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
    """What is said of an address that cannot be had."""
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

    sockets = await bound(address, shared=shared)
    if tls is None and driver is not None:
        server = ReadinessServer(driver, sockets, connect, loop)
    else:
        server = LoopServer([await loop.create_server(connect, sock=one, backlog=ACCEPT_BACKLOG) for one in sockets])
    for listening in server.sockets:
        _keep_alive(listening)
    host, port = server.sockets[0].getsockname()[:2]
    return Listener(name, Address(host, port), server)


async def listen_inside(
    hub: Hub, listening: socket.socket, factories: Sequence[SessionFactory], driver: ReadinessDriver | None
) -> Listener:
    """Accept, on a socket that listens already, the connections of other processes of this broker."""
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
    """Accept what other machines carry to the processes of this one; with ``tls`` nothing else. Raises Busy(BUSY)."""
    name = INSIDE if tls is None else INSIDE_TLS
    try:
        return await _listen(hub, name, address, factories, tls, driver, plain_too=False, shared=False)
    except OSError as error:
        raise cannot_listen(name, address, error) from error


async def bound(address: Address, *, shared: bool = False) -> list[socket.socket]:
    """A socket for every address of this host, and for both families where the host is the wildcard of IPv6. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, place in dict.fromkeys(found):
            sockets.append(made := socket.socket(family, kind, protocol))
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(place[0] != EVERYWHERE_V6))
            made.bind(place)
    except OSError:
        for made in sockets:
            made.close()
        raise
    return sockets


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
