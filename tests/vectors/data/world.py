"""The Kafka wire over a broker on a data directory, in one thread and on the clock of the directory: what dialogues talk to.

Promises: ``run`` returns when nothing is under way any more. Must not know: what is said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.log.settings import LogSettings
from polywire.protocols.kafka.factory import KafkaFactory
from polywire.testing.clock import SimulatedClock
from polywire.types import Level
from tests.unit.log.rig import RigLoop
from tests.unit.protocols.kafka.dialogue import Dialogue, World

QUIET_S: Final = 0.01  # nothing has come from the log's threads for so long
QUIET_PASSES: Final = 5


class StoredWorld:
    """Stands in for ``World``: ``memory`` is this object as well."""

    def __init__(self, directory: Path, now_us: int, log: LogSettings) -> None:
        self.loop: Final = RigLoop()
        self.clock: Final = SimulatedClock(now_us)
        self.broker: Final = Broker.open(directory, BrokerSettings(), self.loop, self.clock, log_settings=log)
        self.factory: Final = KafkaFactory(self.broker, None)
        self.connected = 0

    @property
    def memory(self) -> StoredWorld:
        """What holds broker and loop."""
        return self

    def run(self) -> None:
        """Let everything happen that is due, until all of it is synced."""
        self.broker.commit()
        told: list[object] = []
        self.broker._log.barrier(Level.SYNCED, told.append)
        self.loop.run_until(lambda: told)
        for _ in range(QUIET_PASSES):
            self.loop.run_pass(QUIET_S)
        self.broker.commit()

    def connect(self) -> Dialogue:
        """A connection over the Kafka wire."""
        return Dialogue(cast(World, cast(Any, self)))
