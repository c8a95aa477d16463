"""The Kafka protocol over a broker on a data directory, in one thread and on the directory's clock.

``run`` returns when nothing is in flight any more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.log.base import Completion
from polywire.log.settings import LogSettings
from polywire.log.worker import ThreadWorker
from polywire.protocols.kafka.factory import KafkaFactory
from polywire.testing.loop import SimulatedClock
from polywire.types import Level
from tests.unit.log.rig import RigLoop
from tests.unit.protocols.kafka.dialogue import Dialogue, World

_Result = TypeVar("_Result")


class StoredWorld:
    """Replaces ``World``: ``memory`` is this object as well."""

    def __init__(self, directory: Path, now_us: int, log: LogSettings) -> None:
        self.loop: Final = RigLoop()
        self.clock: Final = SimulatedClock(now_us)
        self.under_way = 0
        """Unfinished jobs of the log's threads."""
        self.broker: Final = Broker.open(
            directory, BrokerSettings(), self.loop, self.clock, log_settings=log, make_worker=partial(_Counted, self)
        )
        self.factory: Final = KafkaFactory(self.broker, None)
        self.connected = 0

    @property
    def memory(self) -> StoredWorld:
        """The holder of broker and loop."""
        return self

    def run(self) -> None:
        """Run everything that is due, until all of it is synced."""
        self.broker.commit()
        reported: list[object] = []
        self.broker._log.barrier(Level.SYNCED, reported.append)
        self.loop.run_until(lambda: reported)
        self.loop.run_until(self._is_quiet)
        self.broker.commit()

    def _is_quiet(self) -> bool:
        return not self.under_way and self.loop.is_quiet

    def connect(self) -> Dialogue:
        """Open a connection over the Kafka protocol."""
        return Dialogue(cast(World, cast(Any, self)))


class _Counted(ThreadWorker):
    """A thread of the log that counts its unfinished jobs."""

    def __init__(self, world: StoredWorld, name: str, loop: RigLoop) -> None:
        super().__init__(name, loop)
        self._world = world

    def run(self, job: Callable[[], _Result], completed: Completion[_Result]) -> None:
        self._world.under_way += 1
        super().run(job, partial(self._over, completed))

    def _over(self, completed: Completion[Any], result: Any) -> None:
        self._world.under_way -= 1
        completed(result)
