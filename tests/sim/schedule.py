"""Choose the next step: one thread runs the loop and all workers on virtual time.

Callbacks of the loop run in the order of asyncio. Between any two of them, one of these may happen:

* A worker runs its next job.
* The result of a job arrives.
* Virtual time advances far without an event.

The weights of these choices change now and then, so a run has phases with slow and fast workers. The jobs of one worker
run, and report their results, in order. Events happen only in ``step``.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from math import ceil
from typing import Any, Final, Protocol

from polywire.errors import BrokerError
from polywire.log.base import Completion, Loop
from polywire.log.worker import Job, attempt
from polywire.testing.loop import Handle, SimulatedClock
from tests.sim.chance import Chance
from tests.sim.story import Story

QUICKEST: Final = 0.02  # weights of workers are between this and 1


class SimulatedWorker:
    """Implements ``Worker``. ``weight``: how likely it is to step next."""

    __slots__ = ("_answers", "_jobs", "_loop", "_story", "name", "weight")

    def __init__(self, name: str, loop: Loop, story: Story) -> None:
        self.name: Final = name
        self.weight = 1.0
        self._loop = loop
        self._story = story
        self._jobs: deque[tuple[Job, Completion[Any]]] = deque()
        self._answers: deque[tuple[Completion[Any], Any]] = deque()

    @property
    def idle(self) -> bool:
        """Whether it has no work."""
        return not self._jobs and not self._answers

    def run(self, job: Job, completed: Completion[Any]) -> None:
        self._jobs.append((job, completed))

    def step(self, chance: Chance) -> None:
        """Run the next job, or deliver its answer."""
        if self._answers and (not self._jobs or chance.happens(0.6)):
            self._loop.call_soon_threadsafe(*self._answers.popleft())
        else:
            self._work()

    def _work(self) -> None:
        job, completed = self._jobs.popleft()
        before, self._story.actor = self._story.actor, self.name
        self._story.tell("job")
        result = attempt(job)
        if isinstance(result, BrokerError):
            self._story.tell("failed", result.code.name)
        self._story.actor = before
        self._answers.append((completed, result))

    def stop(self) -> None:
        while self._jobs:
            self._work()
        while self._answers:
            self._loop.call_soon_threadsafe(*self._answers.popleft())


class Actor(Protocol):
    """A part that steps between two callbacks of the loop."""

    weight: float

    @property
    def idle(self) -> bool:
        """Whether it has no work."""

    def step(self, chance: Chance) -> None:
        pass


class Schedule:
    """Implements ``Loop`` for one process. Guards: time passes only in steps."""

    def __init__(self, clock: SimulatedClock, chance: Chance, story: Story) -> None:
        self.clock: Final = clock
        self._chance = chance
        self._story = story
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = 0
        self.workers: Final[list[Actor]] = []
        self._loop_weight = 1.0

    # The interface of the loop

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Handle:
        handle = Handle(callback, args)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Handle:
        return self.call_soon(callback, *args)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle:
        handle = Handle(callback, args)
        self._order += 1
        heapq.heappush(self._timers, (self.clock.monotonic() + delay, self._order, handle))
        return handle

    def make_worker(self, name: str, loop: Loop) -> SimulatedWorker:
        """Return a worker of this process."""
        worker = SimulatedWorker(name, loop, self._story)
        self.workers.append(worker)
        return worker

    # Steps

    def change_mood(self) -> None:
        """Change which workers are slow."""
        self._loop_weight = 0.3 + 2 * self._chance.share()
        for worker in self.workers:
            worker.weight = QUICKEST ** self._chance.share()

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before a timer is due."""
        return not self._ready and all(worker.idle for worker in self.workers)

    def step(self) -> bool:
        """Run a step; return False if only time can help."""
        busy = [worker for worker in self.workers if not worker.idle]
        weights = [worker.weight for worker in busy]
        if self._ready:
            chosen = self._chance.weighted([None, *busy], [self._loop_weight * 4, *weights])
        elif busy:
            chosen = self._chance.weighted(busy, weights)
        else:
            return False
        if chosen is None:
            self._call()
        else:
            chosen.step(self._chance)
        return True

    def pass_time(self, seconds: float) -> None:
        """Advance time and make due timers ready."""
        self.clock.advance(seconds)
        self.wake()

    def wake(self) -> None:
        """Make due timers ready."""
        now = self.clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._ready.append(heapq.heappop(self._timers)[2])

    def pass_to_timer(self) -> bool:
        """Advance time to the next timer; return False if there is none."""
        due_at = self.due_at
        if due_at is None:
            return False
        self.pass_time(until(due_at, self.clock))
        return True

    @property
    def due_at(self) -> float | None:
        """Return when the next timer is due, None if there is none."""
        return self._timers[0][0] if self._timers else None

    def _call(self) -> None:
        handle = self._ready.popleft()
        if not handle.cancelled:
            handle.callback(*handle.args)


def until(at_s: float, clock: SimulatedClock) -> float:
    """Return the seconds until then, in whole microseconds of the clock."""
    return ceil(max(at_s - clock.monotonic(), 0.0) * 1_000_000) / 1_000_000
