"""One shard of a simulation: its disk, and one process after another. Without a process there are no responses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, Protocol

from polywire.broker.broker import Broker
from polywire.errors import BrokerError
from polywire.testing.loop import SimulatedClock
from tests.sim.chance import Chance
from tests.sim.disk import SimulatedDisk
from tests.sim.files import Killed
from tests.sim.node import CAPACITY_BYTES, Node
from tests.sim.shards.process import ShardProcess
from tests.sim.shards.turns import Together
from tests.sim.story import Story


class Judge(Protocol):
    """The checks of starts and stops."""

    def check_start(self, node: ShardNode, *, powerless: bool) -> None:
        """Check a process that has started: acknowledged data is there."""

    def closed(self, node: ShardNode) -> None:
        """Note a clean stop: everything acknowledged is synced."""


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
        """make: creates a process of this shard on a disk."""
        self.number: Final = number
        self.is_up = False
        self._is_open = False
        """Whether its start was checked, and others can reach it."""
        self.wakes_at = 0.0
        """When it wakes up."""
        self.is_made = False
        """Whether its topics are durable."""
        self.story = story
        self._chance, self._clock, self._without = chance, clock, without
        self._make: Final = make
        self._judge: Final = judge
        self._together: Final = together
        self._disk = SimulatedDisk(CAPACITY_BYTES, reads_past=chance.happens(0.7))
        self._error: BrokerError | None = None

    @property
    def process(self) -> ShardProcess:
        """The latest process."""
        return self._process

    @property
    def broker(self) -> Broker:
        """Its broker."""
        return self._process.broker

    @property
    def takes(self) -> bool:
        """Whether it accepts connections."""
        return self._is_open and not self._process.files.faults.dead

    @property
    def has_failed(self) -> bool:
        """Whether its storage has failed."""
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
        """Do nothing: clients choose for themselves."""

    def _expect_failed_reads(self) -> None:
        """Do nothing: reads may always fail."""

    def _let_go(self) -> None:
        """Do nothing: clients hold only what they send."""

    def _closed(self) -> None:
        self._judge.closed(self)

    def _check_closed(self) -> None:
        """Do nothing: the next start checks the disk."""

    def _check_start(self) -> None:
        self.is_up = True
        self._judge.check_start(self, powerless=self._powerless)
        self._is_open = True

    def _leave(self) -> None:
        """Drop everything of the process except what it wrote, and what its kernel had accepted."""
        process = self._process
        process.files.faults.dead = True
        self._together.leave(process.loop)
        if self.is_up:
            self.is_up = self._is_open = False
            process.ends.left(self._chance)
            process.network.leave(self._chance)
        super()._leave()

    # Called by the world

    def start(self) -> None:
        """Start without faults."""
        self._start()

    def restart(self) -> None:
        """Start another process after one ended, perhaps after a power loss."""
        self._restart()

    def step(self, *, has_mood: bool) -> None:
        """Run a step with possible faults. has_mood: choose new probabilities first."""
        try:
            if has_mood:
                self._change_mood()
            self._count_down()
        except Killed:
            self.bury()
        self._notice_failure()

    def bury(self) -> None:
        """Let others notice that the process was killed."""
        if self.is_up:
            self._leave()

    def calm(self) -> None:
        """End all faults."""
        self._calm()

    def close_for_good(self) -> None:
        """Stop cleanly; after that even a power loss must not lose anything."""
        self._close_for_good()
