"""Who of several processes does the next step: their loops and workers, on one virtual time.

Promises: a process that sleeps or is gone does nothing; what ends a process while another is looked at ends that one alone. Must not know:
what processes do.
"""

from __future__ import annotations

from typing import Final

from polywire.testing.clock import SimulatedClock
from tests.sim.chance import Chance
from tests.sim.files import Killed
from tests.sim.schedule import QUICKEST, Schedule, until


class Together:
    """Implements ``Turns``. Guards: ``_weights`` has the schedules of processes that live, each with how likely it is the next."""

    def __init__(self, clock: SimulatedClock, chance: Chance) -> None:
        self._clock = clock
        self._chance = chance
        self._weights: dict[Schedule, float] = {}
        self.asleep: Final[set[Schedule]] = set()
        """Those that do nothing until they are woken."""
        self.fallen: Final[list[Schedule]] = []
        """Those whose process was killed in a step, and is not buried yet."""

    def join(self, schedule: Schedule) -> None:
        """A process begins."""
        self._weights[schedule] = 1.0

    def leave(self, schedule: Schedule) -> None:
        """A process is gone."""
        self._weights.pop(schedule, None)
        self.asleep.discard(schedule)

    def change_mood(self) -> None:
        """From here on some are slow and others are quick."""
        for schedule in self._weights:
            self._weights[schedule] = QUICKEST ** self._chance.share()

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens until a timer is due."""
        return all(one.is_idle for one in self._awake)

    @property
    def _awake(self) -> list[Schedule]:
        return [one for one in self._weights if one not in self.asleep]

    def step(self) -> bool:
        busy = [one for one in self._awake if not one.is_idle]
        if not busy:
            return False
        chosen = self._chance.weighted(busy, [self._weights[one] for one in busy])
        try:
            chosen.step()
        except Killed:
            self.leave(chosen)
            self.fallen.append(chosen)
        return True

    def pass_time(self, seconds: float) -> None:
        """Let time pass; timers that are due become ready."""
        self._clock.advance(seconds)
        for one in self._weights:
            one.wake()

    def pass_to_timer(self) -> bool:
        due = [one.due_at for one in self._awake if one.due_at is not None]
        if not due:
            return False
        self.pass_time(until(min(due), self._clock))
        return True
