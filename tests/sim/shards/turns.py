"""The scheduler of several processes: it chooses whose loop or worker steps next, on one virtual time.

Sleeping and dead processes do not step. A kill during another process's check affects its own process only.
"""

from __future__ import annotations

from typing import Final

from polywire.testing.loop import SimulatedClock
from tests.sim.chance import Chance
from tests.sim.files import Killed
from tests.sim.schedule import QUICKEST, Schedule, until


class Together:
    """Implements ``Turns``.

    Guards: ``_weights`` has the schedules of live processes, with the probability of being next.
    """

    def __init__(self, clock: SimulatedClock, chance: Chance) -> None:
        self._clock = clock
        self._chance = chance
        self._weights: dict[Schedule, float] = {}
        self.asleep: Final[set[Schedule]] = set()
        """Sleeping processes."""
        self.fallen: Final[list[Schedule]] = []
        """Processes that were killed in a step, whose end others have not noticed yet."""

    def join(self, schedule: Schedule) -> None:
        """Add a process."""
        self._weights[schedule] = 1.0

    def leave(self, schedule: Schedule) -> None:
        """Remove a process."""
        self._weights.pop(schedule, None)
        self.asleep.discard(schedule)

    def change_mood(self) -> None:
        """Change which processes are slow."""
        for schedule in self._weights:
            self._weights[schedule] = QUICKEST ** self._chance.share()

    @property
    def is_idle(self) -> bool:
        """Return whether nothing happens before a timer is due."""
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
        """Advance time and make due timers ready."""
        self._clock.advance(seconds)
        for one in self._weights:
            one.wake()

    def pass_to_timer(self) -> bool:
        due = [one.due_at for one in self._awake if one.due_at is not None]
        if not due:
            return False
        self.pass_time(until(min(due), self._clock))
        return True
