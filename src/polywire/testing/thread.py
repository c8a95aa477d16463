"""A broker in memory in its own thread.

When ``start`` returns, the broker listens on free ports. It writes nothing to disk, and stopping it frees all of its
memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from polywire.clock import SystemClock
from polywire.errors import ErrorCode, Invalid
from polywire.server.config import Address, ServeConfig
from polywire.server.hub import Hub
from polywire.server.lifecycle import SWEEP_S
from polywire.server.listener import Listener, close_listeners, open_listeners
from polywire.server.wires import factories_of
from polywire.testing.memory_broker import MemoryBroker
from polywire.testing.process import WIRES, address_of, already_running, checked_wires, lasting_port

HOST: Final = "127.0.0.1"
CALL_SECONDS_MAX: Final = 30.0
# passes of the loop to wait after connections were aborted, because some may still be in the process of being accepted
ENDING_PASSES: Final = 50

T = TypeVar("T")


class BrokerThread:
    """A broker in memory, in its own thread. Its records survive ``kill``, but not ``stop``.

    Example:
        with BrokerThread(wires=["kafka", "polywire"]) as broker:
            print(broker.url("kafka"))
    """

    def __init__(self, *, wires: Sequence[str] | None = None) -> None:
        """Create the object. ``wires`` are the protocols to serve, by default all. ``start`` starts the broker.

        Raises Invalid(INVALID_REQUEST) for an unknown protocol.
        """
        wires = checked_wires(wires)
        wires = WIRES if wires is None else wires
        unknown = [wire for wire in wires if wire not in WIRES]
        if unknown or not wires:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"unknown protocols, or none given (use one or more of the known) unknown={','.join(unknown)} known={','.join(WIRES)}",
            )
        self.addresses: dict[str, tuple[str, int]] = {}
        self._wires: Final = tuple(wires)
        self._memory: MemoryBroker | None = None
        self._listeners: list[Listener] = []

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def url(self, wire: str = "polywire") -> str:
        """Return the URL of a protocol for ``polywire.connect``. Raises Invalid if it is not served."""
        return f"{wire}://{self.address(wire)}"

    def address(self, wire: str) -> str:
        """Return ``host:port`` of a protocol, for other clients. Raises Invalid if it is not served."""
        return address_of(self.addresses, wire)

    def start(self) -> Self:
        """Start to listen. After ``kill``, listen on the same ports and with the same records.

        Raises Invalid(INVALID_REQUEST) if it is running.
        """
        if self._listeners:
            raise already_running()
        if self._memory is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="polywire-broker", daemon=True)
            self._thread.start()
        self._call(self._open())
        return self

    def kill(self) -> None:
        """Break all connections and drop what was not written, like ``kill -9``. ``start`` starts the broker again."""
        self._call(self._break())

    def stop(self) -> None:
        """Stop the broker and drop everything. Calling it again does nothing."""
        if self._memory is None:
            return
        self._call(self._break())
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._memory = None

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._memory is None:
            self._memory = MemoryBroker(loop=loop, clock=SystemClock())
        else:
            self._memory.restart()
        broker = self._memory.broker
        addresses = {wire: Address(*(self.addresses.get(wire) or (HOST, lasting_port()))) for wire in self._wires}
        self._hub = Hub(broker, identities=broker.access, quotas=broker.access.quotas)
        self._listeners = await open_listeners(self._hub, addresses, factories_of(broker, ServeConfig()))
        self.addresses = {one.name: (one.address.host, one.address.port) for one in self._listeners}
        self._sweeping = asyncio.ensure_future(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._hub.sweep()

    async def _break(self) -> None:
        listeners, self._listeners = self._listeners, []
        if not listeners:
            return
        self._sweeping.cancel()
        # If an asyncio server is closed while it accepts, it forgets the connection and the client waits.
        for listener in listeners:
            for listening in listener.server.sockets:
                self._loop.remove_reader(listening.fileno())
        for _ in range(ENDING_PASSES):
            for peer in list(self._hub.connections):
                peer.abort()  # aborted, because a broker that is killed logs nothing
            await asyncio.sleep(0)
        close_listeners(listeners)

    async def _end(self) -> None:
        assert self._memory is not None, "it was started"
        self._memory.broker.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS_MAX)


_named: Final[dict[str, BrokerThread]] = {}
_named_lock: Final = threading.Lock()


def memory_url(name: str) -> str:
    """Return the address of the broker for ``memory://name``.

    The first call creates the broker, which then runs as long as this process.
    """
    with _named_lock:
        if name not in _named:
            _named[name] = BrokerThread(wires=["polywire"]).start()
        return _named[name].url()


def forget_memory(name: str = "") -> None:
    """End the broker of ``memory://name`` and drop its records. The next call for the name creates an empty broker."""
    with _named_lock:
        found = _named.pop(name, None)
    if found is not None:
        found.stop()
