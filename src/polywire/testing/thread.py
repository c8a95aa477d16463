"""A broker in memory in its own thread.

When ``start`` returns, the broker listens on free ports. It writes nothing to disk, and stopping it frees all of its
memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from polywire.clock import SYSTEM_CLOCK
from polywire.errors import ErrorCode, Invalid
from polywire.server.config import Address, ServeConfig
from polywire.server.hub import SWEEP_S, Hub
from polywire.server.listener import Listener, close_listeners, open_listeners
from polywire.server.wires import factories_of
from polywire.testing.faults import Faults, FaultyFactory
from polywire.testing.memory_broker import MemoryBroker
from polywire.testing.process import WIRES, address_of, already_running, checked_wires, lasting_port

HOST: Final = "127.0.0.1"
CALL_SECONDS_MAX: Final = 30.0
# passes of the loop to wait after connections were aborted, because some may still be in the process of being accepted
ENDING_PASSES: Final = 50

T = TypeVar("T")


class _AdvancedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time a test advances. Implements ``Clock``, so the broker's timers and its clock agree."""

    advanced_s = 0.0

    def time(self) -> float:
        return super().time() + self.advanced_s

    def now_us(self) -> int:
        return SYSTEM_CLOCK.now_us() + round(self.advanced_s * 1e6)

    def monotonic(self) -> float:
        return SYSTEM_CLOCK.monotonic() + self.advanced_s


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
            self._loop = _AdvancedLoop()
            self._faults = Faults(self._loop, lambda: self._running.log)
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

    # Faults and time

    def disconnect(self) -> None:
        """Break all connections. Clients can connect again at once."""
        self._call(self._abort_all())

    @contextmanager
    def delay(self, seconds: float) -> Iterator[None]:
        """Let each request wait for ``seconds`` before it is executed."""
        self._faults.delay_s = seconds
        try:
            yield
        finally:
            self._faults.delay_s = 0.0

    def lose_acknowledgement(self) -> None:
        """Break the connection of the next client that appends records, after they are stored, instead of responding."""
        self._faults.lost += 1

    @contextmanager
    def disk_full(self) -> Iterator[None]:
        """Reject everything that would be stored, with the error that each protocol has for a full disk."""
        self._running.log.disk_full = True
        try:
            yield
        finally:
            self._running.log.disk_full = False

    def advance(self, seconds: float) -> None:
        """Advance the broker's time, and run the timers that become due.

        Members that have sent no heartbeat for their session timeout leave their group, retention removes old records,
        and so on. A periodic task runs once. The time of clients does not change.
        """
        self._call(self._advance(seconds))

    async def _advance(self, seconds: float) -> None:
        self._loop.advanced_s += seconds
        for _ in range(ENDING_PASSES):  # a timer may start others
            await asyncio.sleep(0)

    @property
    def _running(self) -> MemoryBroker:
        assert self._memory is not None, "it was started"
        return self._memory

    async def _open(self) -> None:
        if self._memory is None:
            self._memory = MemoryBroker(loop=self._loop, clock=self._loop)
        else:
            self._memory.restart()
        broker = self._memory.broker
        addresses = {wire: Address(*(self.addresses.get(wire) or (HOST, lasting_port()))) for wire in self._wires}
        self._hub = Hub(broker, identities=broker.access, quotas=broker.access.quotas)
        factories = [FaultyFactory(factory, self._faults) for factory in factories_of(broker, ServeConfig())]
        self._listeners = await open_listeners(self._hub, addresses, factories)
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
        await self._abort_all()
        close_listeners(listeners)

    async def _abort_all(self) -> None:
        for _ in range(ENDING_PASSES):
            for peer in list(self._hub.connections):
                peer.abort()  # aborted, because a broker that is killed logs nothing
            await asyncio.sleep(0)

    async def _end(self) -> None:
        self._running.broker.close()

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
