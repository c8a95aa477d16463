"""A process that serves a broker over connections. Seconds are counted as in the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from polywire.errors import BrokerError
from polywire.log.base import Replay
from polywire.log.log import FileLog
from polywire.protocols.cursus.context import CursusSettings
from polywire.protocols.cursus.factory import CursusFactory
from polywire.protocols.flux.factory import FluxFactory
from polywire.protocols.iggy.factory import IggyFactory
from polywire.protocols.kafka.factory import KafkaFactory
from polywire.protocols.kafka07.factory import Kafka07Factory
from polywire.protocols.polywire.factory import PolywireFactory
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.protocols.runtime.session import SessionFactory
from polywire.server.hub import ConnectionLimits, Hub
from tests.sim.broker.process import BrokerProcess
from tests.sim.chance import Chance
from tests.sim.promises import require
from tests.sim.wires.network import Caller, Link, Network, SimulatedConnection

CONNECTIONS_MAX: Final = 4
SWEEP_S: Final = 1.0
QUICK_S: Final = 0.0001
SLOW_S: Final = 0.004  # of one offer: a few of them fill a pass
LIMITS: Final = ConnectionLimits(
    connections_max=CONNECTIONS_MAX,
    receive_bytes_max=16 * 1024,
    quantum_bytes_max=24 * 1024,
    backlog_bytes_max=12 * 1024,
    backlog_total_bytes_max=24 * 1024,
)
"""Limits that are small so that they are reached."""
PATIENT: Final = CursusSettings(idle_timeout_s=86_400.0, unused_s=86_400.0)  # clients may be silent for long


class WorkClock:
    """The duration of offers: mostly short, sometimes long. Implements ``Clock`` for the run queue alone."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._spent = 0.0

    def now_us(self) -> int:
        """Return microseconds."""
        return int(self._spent * 1e6)

    def monotonic(self) -> float:
        """Return a time that advances with every call."""
        self._spent += SLOW_S if self._chance.happens(0.1) else QUICK_S
        return self._spent


class WiresProcess(BrokerProcess):
    """Guards: ``hub`` and ``network`` exist once ``open`` has returned."""

    hub: Hub
    network: Network
    has_driver = False
    """Whether the readiness driver reads connections, instead of a loop."""
    connections_max = CONNECTIONS_MAX
    on_refused_change: Callable[[], object] | None = None
    """Called whenever the log refuses a change of the broker's own."""
    _factories: Mapping[str, SessionFactory]

    def open(self) -> None:
        super().open()
        limits = replace(LIMITS, connections_max=self.connections_max)
        self.hub = Hub(
            self.broker,
            limits,
            soon=self._soon,
            later=self.loop.call_later,
            clock=WorkClock(self.files.chance),
            identities=self.broker.access,
            quotas=self.broker.access.quotas,
        )
        self._factories = {factory.wire: factory for factory in self._make_factories()}
        self.network = Network(self.loop, self.files.story)
        if self.has_driver:
            self.network.drive(self.hub, self.files.chance)
        self.loop.call_later(SWEEP_S, self._sweep)

    def _make_factories(self) -> Sequence[SessionFactory]:
        """Return the protocols of clients."""
        off_loop = OffLoopQueue(self.loop)
        return (
            FluxFactory(self.broker),
            CursusFactory(self.broker, PATIENT, off_loop=off_loop),
            IggyFactory(self.broker),
            Kafka07Factory(self.broker, off_loop=off_loop),
            KafkaFactory(self.broker, off_loop=off_loop),
            PolywireFactory(self.broker),
        )

    def _recover(self, replay: Replay) -> FileLog:
        log = super()._recover(replay)
        change = log.change

        def noting(*args: Any, **named: Any) -> None:
            try:
                change(*args, **named)
            except BrokerError:
                if self.on_refused_change is not None:
                    self.on_refused_change()
                raise

        log.change = noting  # type: ignore[method-assign]
        return log

    def _soon(self, callback: Callable[[], None]) -> object:
        return self.loop.call_soon(callback)

    def _sweep(self) -> None:
        self.hub.sweep()
        self.loop.call_later(SWEEP_S, self._sweep)

    def accept(self, caller: Caller, wire: str | None) -> Link:
        """Accept a connection to the port of a protocol, or to the one for any protocol."""
        factories = list(self._factories.values()) if wire is None else [self._factories[wire]]
        link = self.network.connect(caller, SimulatedConnection(self.hub, factories))
        count = len(self.hub.connections)
        require(count <= self.connections_max, "connections have a limit", count=count)
        return link
