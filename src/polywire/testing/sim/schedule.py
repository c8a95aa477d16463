"""Who does the next step: one thread plays the loop and every worker, on virtual time.

Callbacks of the loop run in the order asyncio would run them. Between any two of them a worker may do its next job, or its answer may
arrive, or nothing of that for a long time: chance decides, with weights that change now and then, so that a run has spells in which one
worker is slow and others are quick.

Promises: one worker's jobs are done, and answered, in the order they were given; nothing happens but in ``step``. Must not know: files,
what jobs do.
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
from polywire.testing.clock import SimulatedClock
from polywire.testing.loop import Handle
from polywire.testing.sim.chance import Chance
from polywire.testing.sim.story import Story

QUICKEST: Final = 0.02  # weights of workers lie between this and 1


class SimulatedWorker:
    """Implements ``Worker``. ``weight`` is how likely it is the next to do something."""

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
        """Whether there is nothing to do."""
        return not self._jobs and not self._answers

    def run(self, job: Job, completed: Completion[Any]) -> None:
        self._jobs.append((job, completed))

    def step(self, chance: Chance) -> None:
        """Do the next job, or let its answer arrive."""
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
    """Whoever does something between two callbacks of the loop."""

    weight: float

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""

    def step(self, chance: Chance) -> None:
        """Do something."""


class Schedule:
    """Implements ``Loop``, for one process. Guards: time passes only when a step lets it."""

    def __init__(self, clock: SimulatedClock, chance: Chance, story: Story) -> None:
        self.clock: Final = clock
        self._chance = chance
        self._story = story
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = 0
        self.workers: Final[list[Actor]] = []
        self._loop_weight = 1.0

    # The port of the loop

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
        """A worker of this process."""
        worker = SimulatedWorker(name, loop, self._story)
        self.workers.append(worker)
        return worker

    # Steps

    def change_mood(self) -> None:
        """From here on some are slow and others are quick."""
        self._loop_weight = 0.3 + 2 * self._chance.share()
        for worker in self.workers:
            worker.weight = QUICKEST ** self._chance.share()

    @property
    def is_idle(self) -> bool:
        """Whether nothing happens until a timer is due."""
        return not self._ready and all(worker.idle for worker in self.workers)

    def step(self) -> bool:
        """Somebody does something; False when only time can help."""
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
        """Let time pass; timers that are due become ready."""
        self.clock.advance(seconds)
        self.wake()

    def wake(self) -> None:
        """Timers that are due become ready."""
        now = self.clock.monotonic()
        while self._timers and self._timers[0][0] <= now:
            self._ready.append(heapq.heappop(self._timers)[2])

    def pass_to_timer(self) -> bool:
        """Let time pass until the next timer is due; False when there is none."""
        due_at = self.due_at
        if due_at is None:
            return False
        self.pass_time(until(due_at, self.clock))
        return True

    @property
    def due_at(self) -> float | None:
        """When the next timer is due; None when there is none."""
        return self._timers[0][0] if self._timers else None

    def _call(self) -> None:
        handle = self._ready.popleft()
        if not handle.cancelled:
            handle.callback(*handle.args)


def until(at_s: float, clock: SimulatedClock) -> float:
    """Seconds until then, of which the clock knows whole microseconds only."""
    return ceil(max(at_s - clock.monotonic(), 0.0) * 1_000_000) / 1_000_000
