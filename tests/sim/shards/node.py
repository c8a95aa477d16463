"""One shard of a world: its disk, and one process after another.

Promises: as ``Node``; while there is no process, nobody is answered. Must not know: what is asked of it, which other shards there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, Protocol

from polywire.broker.broker import Broker
from polywire.errors import BrokerError
from polywire.testing.clock import SimulatedClock
from tests.sim.chance import Chance
from tests.sim.disk import SimulatedDisk
from tests.sim.files import Killed
from tests.sim.node import CAPACITY_BYTES, Node
from tests.sim.shards.process import ShardProcess
from tests.sim.shards.turns import Together
from tests.sim.story import Story


class Judge(Protocol):
    """Who knows what must be there."""

    def check_start(self, node: ShardNode, *, powerless: bool) -> None:
        """A process has started: what was acknowledged is there."""

    def closed(self, node: ShardNode) -> None:
        """A process has stopped as asked to: everything that was acknowledged is synced."""


class ShardNode(Node):
    """Guards: ``is_up`` while there is a process."""

    _process: ShardProcess

    def __init__(
        self,
        number: int,
        make: Callable[[SimulatedDisk, Story], ShardProcess],
        judge: Judge,
        together: Together,
        *,
        chance: Chance,
        clock: SimulatedClock,
        story: Story,
        without: Collection[str],
    ) -> None:
        """make: a process of this shard on a disk."""
        self.number: Final = number
        self.is_up = False
        self._is_open = False
        """Whether what it has started with was looked at, and others reach it."""
        self.wakes_at = 0.0
        """When it sleeps no more."""
        self.is_made = False
        """Whether its topics are there for good."""
        self.story = story
        self._chance, self._clock, self._without = chance, clock, without
        self._make: Final = make
        self._judge: Final = judge
        self._together: Final = together
        self._disk = SimulatedDisk(CAPACITY_BYTES, reads_past=chance.happens(0.7))
        self._error: BrokerError | None = None

    @property
    def process(self) -> ShardProcess:
        """The one that was started last."""
        return self._process

    @property
    def broker(self) -> Broker:
        """Its broker."""
        return self._process.broker

    @property
    def takes(self) -> bool:
        """Whether connections are accepted."""
        return self._is_open and not self._process.files.faults.dead

    @property
    def has_failed(self) -> bool:
        """Whether its storage has."""
        return self._error is not None

    def _make_process(self) -> ShardProcess:
        return self._make(self._disk, self.story)

    def _meet(self) -> None:
        self._error = None
        self._process.log.on_failure(self._failed)
        self._together.join(self._process.loop)

    def _failed(self, error: BrokerError) -> None:
        self._error = error
        self.story.tell("log failed", error.message)

    @property
    def _failure(self) -> BrokerError | None:
        return self._error

    def _change_minds(self) -> None:
        """Who asks for something chooses for itself."""

    def _expect_failed_reads(self) -> None:
        """Nobody is promised that reads succeed."""

    def _let_go(self) -> None:
        """Nobody holds anything of the process but what it sends."""

    def _closed(self) -> None:
        self._judge.closed(self)

    def _check_closed(self) -> None:
        """The disk is looked at by what starts on it next."""

    def _check_start(self) -> None:
        self.is_up = True
        self._judge.check_start(self, powerless=self._powerless)
        self._is_open = True

    def _leave(self) -> None:
        """Nothing of the process is left but what it wrote, and what its kernel had taken."""
        process = self._process
        process.files.faults.dead = True
        self._together.leave(process.loop)
        if self.is_up:
            self.is_up = self._is_open = False
            process.ends.left(self._chance)
            process.network.leave(self._chance)
        super()._leave()

    # What the world asks for

    def start(self) -> None:
        """A start that nothing disturbs."""
        self._start()

    def restart(self) -> None:
        """The process has gone, and perhaps the power; another one starts."""
        self._restart()

    def step(self, *, has_mood: bool) -> None:
        """Something may happen to it. has_mood: from here on something else."""
        try:
            if has_mood:
                self._change_mood()
            self._count_down()
        except Killed:
            self.bury()
        self._notice_failure()

    def bury(self) -> None:
        """The process was killed: others find out."""
        if self.is_up:
            self._leave()

    def calm(self) -> None:
        """Nothing goes wrong from here on."""
        self._calm()

    def close_for_good(self) -> None:
        """After a clean stop not even a power loss takes anything."""
        self._close_for_good()
