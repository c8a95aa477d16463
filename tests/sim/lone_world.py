"""A simulation with one disk. Clients act between two steps of the process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection

from tests.sim.disk import SimulatedDisk
from tests.sim.node import CAPACITY_BYTES, Node
from tests.sim.world import MOOD_STEPS, STEPS, World


class LoneWorld(Node, World):
    """Guards: there is a process unless one is being started."""

    def __init__(
        self,
        seed: int,
        *,
        steps: int = STEPS,
        without: Collection[str] = (),
        show: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(seed, steps=steps, without=without, show=show)
        self._disk = SimulatedDisk(CAPACITY_BYTES, reads_past=self._chance.happens(0.7))
        self._choose_settings()
        self._process = self._make_process()

    # What a world implements

    @abstractmethod
    def _choose_settings(self) -> None:
        """Choose the settings of all processes of this run."""

    @abstractmethod
    def _act(self) -> None:
        """Let a client make a request."""

    @abstractmethod
    def _come_to_rest(self) -> None:
        """End the run: every request gets an answer, and everything can be read."""

    @abstractmethod
    def _check_end(self) -> None:
        """Check the last process, started after a clean stop and a power loss."""

    # Steps

    def _step(self) -> None:
        chance = self._chance
        if chance.happens(1 / MOOD_STEPS):
            self._change_mood()
        self._count_down()
        if chance.happens(0.35):
            self._act()
        elif not self._process.loop.step() or chance.happens(0.1):
            self._pass_time()
        self._notice_failure()

    def _pass_time(self) -> None:
        before, self.story.actor = self.story.actor, "time"
        if self._chance.happens(0.5):
            self._process.loop.pass_time(self._chance.below(100_000) / 1_000_000)
        elif self._process.loop.is_idle:
            self._process.loop.pass_to_timer()
        self.story.actor = before

    def _end(self) -> None:
        self._calm()
        self._process.until(lambda: self._process.loop.is_idle)  # report all failures until now
        if self._failure is not None:
            self._powerless = False
            self._leave()
            self._start()
        self._let_go()
        self._come_to_rest()
        self._close_for_good()
        self._check_end()
