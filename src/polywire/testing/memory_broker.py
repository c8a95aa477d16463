"""A broker for tests with a log in memory and a simulated clock and event loop. Tests can kill and restart it.

Except for the log, it is the real broker.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.clock import Clock
from polywire.log.base import Loop, Replay
from polywire.testing.loop import ManualLoop, SimulatedClock
from polywire.testing.memory_log import MemoryLog


class MemoryBroker:
    """A broker over a ``MemoryLog``.

    Attributes:
        broker: the broker of the latest start.
        log: its log.
    """

    __slots__ = ("_delays", "broker", "clock", "log", "loop", "settings")

    def __init__(
        self,
        settings: BrokerSettings | None = None,
        *,
        loop: Loop | None = None,
        clock: Clock | None = None,
        delays: Path | None = None,
    ) -> None:
        """Create a broker. Loop and clock are simulated by default. An asyncio loop and a ``SystemClock`` work, too.

        ``delays`` is the file of the index of delayed records, which is in memory by default.
        """
        self._delays = delays
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

        return Broker.over(remember, settings=self.settings, loop=self.loop, clock=self.clock, delays=self._delays)

    def run(self) -> None:
        """Run all callbacks that are due."""
        assert isinstance(self.loop, ManualLoop), "a real loop runs by itself"
        self.loop.run_due()

    def advance(self, seconds: float) -> None:
        """Advance the simulated time."""
        assert isinstance(self.loop, ManualLoop), "a real loop has its own time"
        self.loop.advance(seconds)

    def restart(self, *, synced_only: bool = False) -> Broker:
        """Kill the broker and start it again from its log.

        Args:
            synced_only: lose everything that was not synced, as in a power loss.
        """
        log = self.log
        self.broker = self._start(lambda replay: log.reopen(replay, synced_only=synced_only))
        return self.broker
