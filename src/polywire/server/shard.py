"""Serve one shard of a data directory or a bucket in a process.

A shard owns a part of the topics, and its process has connections to those of the other shards.

* The name of a deleted topic is released only when the deletion is synced, so that recovery never restores the topic.
* No client is served before each process knows the owners of all topics.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import structlog

from polywire.broker.broker import Broker
from polywire.errors import BrokerError
from polywire.protocols.runtime.shards import Link, LinkPeer
from polywire.server.config import Address, ServeConfig
from polywire.server.link_tls import LinkTls, link_tls
from polywire.server.listener import INSIDE
from polywire.server.placement import Board, Names, Stage, shard_by_hash
from polywire.types import Level, shard_name

if TYPE_CHECKING:
    from polywire.server.listener import Listener

BEGIN_POLL_S: Final = 0.02

log = structlog.get_logger("polywire.server")


class Shard:
    """One shard of the broker, and its connections to the others.

    Implements ``ReachedShards``, ``Claims``, and ``Places`` of Cursus.
    """

    def __init__(
        self,
        own: int,
        board: Board,
        names: Names,
        addresses: Sequence[Address],
        inside: socket.socket,
        key: bytes,
        reached: Mapping[str, Address] | None = None,
    ) -> None:
        """Create the shard.

        Args:
            own: number of this shard.
            board: memory that the processes share.
            names: assigns topic names to shards.
            addresses: internal address of each shard's process.
            inside: listening socket of this process, at its internal address.
            key: shared secret of the processes.
            reached: addresses that lead to this process only, by listener. With a bucket, ``INSIDE`` is the one for
                other machines.
        """
        self.own: Final = own
        self.key: Final = key
        self.reached: Final[Mapping[str, Address]] = reached or {}
        self._inside: Final = inside
        self.count: Final = board.count
        self._board: Final = board
        self._names: Final = names
        self._addresses: Final = addresses
        self._broker: Broker | None = None
        self._topics = 0
        self._listeners: dict[int, str] = {}
        self._own_ports: dict[str, int] = {}
        self._shared_ports: dict[str, int] = {}
        self._host = ""
        self._is_advertised = False

    @property
    def ports(self) -> Mapping[str, int]:
        """Ports that lead clients to this process only, by listener. Empty until it listens."""
        return {name: self.port_of(name) for name in self._listeners.values()}

    @property
    def name(self) -> str:
        """Number of the shard as text, for messages and file names."""
        return shard_name(self.own)

    def link_tls(self, config: ServeConfig) -> LinkTls | None:
        """Return the TLS for connections to other machines; None if it is not configured.

        Raises Invalid(INVALID_REQUEST) for invalid files.
        """
        at = self.reached.get(INSIDE)
        return None if at is None else link_tls(config, config.reached_at(at))

    def inside(self) -> socket.socket:
        """Return a duplicate of the internal listening socket. Closing it does not close the original."""
        made = self._inside.dup()
        made.setblocking(False)
        return made

    async def begin(self, broker: Broker) -> None:
        """Register the recovered topics.

        On a data directory, also wait until all other processes have registered theirs. Raises Unavailable if the names
        cannot be stored.
        """
        self._broker = broker
        names = [topic.name.full for topic in broker.topics()]
        for name in self._names.begin(names):
            log.error(
                "another shard has a topic with this name: clients cannot reach the topic of this shard",
                topic=name,
                shard=self.own,
            )
        broker.claims = self
        self._count(len(names) - self._topics)
        self._board.reach(self.own, Stage.RECOVERED)
        while self._names.waits and not self._board.all_have(Stage.RECOVERED):  # noqa: ASYNC110 - other processes cannot signal
            await asyncio.sleep(BEGIN_POLL_S)

    def serving(self) -> None:
        """Record that this process accepts clients, either as leader or as a standby that forwards them."""
        self._board.reach(self.own, Stage.SERVING)

    def opened(self, shared: Iterable[Listener], own: Iterable[Listener], *, host: str, is_advertised: bool) -> None:
        """Set the listeners that all processes share, and those of this process only.

        ``host`` is the host of this machine for clients. If it is empty, clients use the host that they connected to.
        ``is_advertised`` is whether clients may be sent to the ports of this process, which must then never change.
        """
        shared, own = list(shared), list(own)
        self._host, self._is_advertised = host, is_advertised
        self._shared_ports = {listener.name: listener.address.port for listener in shared}
        self._own_ports = {listener.name: listener.address.port for listener in own}
        self._listeners = {listener.address.port: listener.name for listener in (*shared, *own)}

    # Claims

    def claim(self, full_name: str) -> None:
        self._names.claim(full_name)
        # a topic that is not created after all stays in the count until the next start, which only affects balance
        self._count(1)

    def release(self, full_name: str) -> None:
        assert self._broker is not None, "a topic was deleted"
        self._count(-1)
        try:
            self._broker.settle(Level.SYNCED, lambda _: self._ended(full_name))
        except BrokerError:
            """The log has stopped; the next process registers the topics that it recovers."""

    def _ended(self, full_name: str) -> None:
        assert self._broker is not None, "a topic was deleted"
        if self._broker.find_topic(full_name) is None:
            self._names.release(full_name)

    def _count(self, added: int) -> None:
        self._topics += added
        self._board.set_topics(self.own, self._topics)

    # Shards

    def shard_of(self, full_name: str) -> int | None:
        return self._names.shard_of(full_name)

    def shard_by_hash(self, full_name: str) -> int:
        return shard_by_hash(full_name, self.count)

    def least_loaded(self) -> int:
        return self._board.fewest_topics()

    def listener_of(self, port: int) -> str:
        return self._listeners.get(port, "")

    def port_of(self, listener: str) -> int:
        """Return the port of a listener at which clients reach only this process. For an unknown listener, use the first one."""
        return self._own_ports.get(listener) or next(iter(self._own_ports.values()), 0)

    def lasting(self, at: tuple[str, int]) -> tuple[str, int]:
        """Return the address that all processes of this machine share. It stays valid if another process takes over."""
        name = self._listeners.get(at[1], "")
        if at[1] not in self._own_ports.values() or name not in self._shared_ports:
            return at
        return self._host or at[0], self._shared_ports[name]

    def alone(self, at: tuple[str, int]) -> tuple[str, int]:
        own = self._own_ports.get(self._listeners.get(at[1], ""))
        return at if own is None or not self._is_advertised else (at[0], own)

    def connect(self, shard: int, peer: LinkPeer) -> Link:
        return SocketLink(self._addresses[shard], peer)


class SocketLink(asyncio.Protocol):
    """A connection to the process of another shard. Implements ``Link``."""

    def __init__(self, address: Address, peer: LinkPeer) -> None:
        self._peer: LinkPeer | None = peer
        self._transport: Any = None  # uvloop's transport is not a subclass of asyncio.Transport
        self._unsent: list[bytes] = []  # written before the connection was established
        loop = asyncio.get_running_loop()
        self._making: Final = loop.create_task(self._make(loop, address))

    async def _make(self, loop: asyncio.AbstractEventLoop, address: Address) -> None:
        try:
            await loop.create_connection(lambda: self, address.host, address.port)
        except OSError as error:
            log.warning("cannot connect to another broker process", address=str(address), reason=error.strerror)
            self.connection_lost(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._peer is None:
            self._transport.abort()
            return
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        if self._peer is not None:
            self._peer.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.lost()

    def write(self, data: bytes) -> None:
        if self._transport is None:
            self._unsent.append(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._peer = None
        self._unsent.clear()
        if self._transport is not None:
            self._transport.abort()
        else:
            self._making.cancel()
