"""A whole broker in memory, with its clock and loop under control, that can be killed and started again.

Promises: the broker is the real one; only the log under it is kept in memory. Must not know: wires.
"""

from __future__ import annotations

from collections.abc import Callable

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.clock import Clock
from polywire.log.base import Loop, Replay
from polywire.testing.clock import SimulatedClock
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_log import MemoryLog


class MemoryBroker:
    """A broker over a ``MemoryLog``.

    Invariant: ``broker`` and ``log`` are those of the latest start.
    """

    __slots__ = ("broker", "clock", "log", "loop", "settings")

    def __init__(
        self, settings: BrokerSettings | None = None, *, loop: Loop | None = None, clock: Clock | None = None
    ) -> None:
        """Without a loop and a clock both are simulated; an asyncio loop and a ``SystemClock`` do as well."""
        simulated = SimulatedClock()
        self.settings = settings or BrokerSettings()
        self.clock: Clock = clock or simulated
        self.loop: Loop = loop or ManualLoop(simulated)
        self.broker = self._start(
            lambda replay: MemoryLog(self.loop, self.clock, replay, floor=self.settings.durability)
        )

    def _start(self, open_log: Callable[[Replay], MemoryLog]) -> Broker:
        def remember(replay: Replay) -> MemoryLog:
            self.log = open_log(replay)
            return self.log

        return Broker.over(remember, settings=self.settings, loop=self.loop, clock=self.clock)

    def run(self) -> None:
        """Run everything that is due, so that every callback owed now has been called."""
        assert isinstance(self.loop, ManualLoop), "a real loop runs by itself"
        self.loop.run_due()

    def advance(self, seconds: float) -> None:
        """Let simulated time pass."""
        assert isinstance(self.loop, ManualLoop), "a real loop has its own time"
        self.loop.advance(seconds)

    def restart(self, *, synced_only: bool = False) -> Broker:
        """Kill the broker (``synced_only``: cut the power) and start it again from what the log kept."""
        log = self.log
        self.broker = self._start(lambda replay: log.reopen(replay, synced_only=synced_only))
        return self.broker
