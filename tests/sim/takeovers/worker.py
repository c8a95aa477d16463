"""Workers that wait for the bucket: each request of a ``fencing`` procedure is a step, and pauses take virtual time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from polywire.cluster.fencing import Create, Delete, DeleteBlobs, MoveFloor, Pause, Request, Steps
from polywire.cluster.journal_objects import JournalObjects
from polywire.errors import BrokerError, ErrorCode, Unavailable
from polywire.log.base import Completion, Loop
from polywire.log.worker import Job
from polywire.testing.loop import SimulatedClock
from tests.sim.chance import Chance
from tests.sim.schedule import Schedule, SimulatedWorker
from tests.sim.story import Story

WAITING: Final = ("bucket", "floor", "sweep")  # the workers whose jobs are ``fencing`` procedures

WRITES: Final = Create | MoveFloor | Delete | DeleteBlobs  # requests that are not repeated until they succeed


class BucketWorker(SimulatedWorker):
    """Guards: a read gets no response while the bucket is unreachable. A write then has an unknown outcome."""

    __slots__ = ("_answer", "_clock", "_completed", "_is_cut", "_journal", "_request", "_resumes_at", "_steps")

    def __init__(self, name: str, loop: Loop, story: Story, clock: SimulatedClock, is_cut: Callable[[], bool]) -> None:
        super().__init__(name, loop, story)
        self._clock = clock
        self._is_cut = is_cut
        self._journal: JournalObjects | None = None
        self._steps: Steps[Any] | None = None
        self._request: Request | None = None
        self._completed: Completion[Any] | None = None
        self._answer: Any = None
        self._resumes_at = 0.0

    @property
    def idle(self) -> bool:
        return not self._answers and not self._has_work

    @property
    def _has_work(self) -> bool:
        if self._steps is None:
            return bool(self._jobs)
        is_paused = self._clock.monotonic() < self._resumes_at
        return not is_paused and (isinstance(self._request, WRITES | None) or not self._is_cut())

    def step(self, chance: Chance) -> None:
        if self._answers and (not self._has_work or chance.happens(0.6)):
            self._loop.call_soon_threadsafe(*self._answers.popleft())
        else:
            self._work()

    def _work(self) -> None:
        before, self._story.actor = self._story.actor, self.name
        if self._steps is None:
            job, self._completed = self._jobs.popleft()
            self._journal, self._steps = _procedure(job)
            self._answer = self._request = None
            self._story.tell("job")
        try:
            self._go_on(self._journal, self._steps)
        except StopIteration as end:
            self._finish(end.value)
        except BrokerError as error:
            self._story.tell("failed", error.code.name)
            self._finish(error)
        self._story.actor = before

    def _go_on(self, journal: JournalObjects | None, steps: Steps[Any]) -> None:
        """Make the next request, or choose it. Raises StopIteration and BrokerError at the end of the procedure."""
        assert journal is not None, "a job has begun"
        if self._request is not None:
            request, self._request = self._request, None
            self._answer = journal._perform(request)
            return
        request = steps.send(self._answer)
        self._answer = None
        if journal._gone.is_set():
            raise Unavailable(ErrorCode.STORAGE_FAILED, "the bucket did not respond in time")
        if isinstance(request, Pause):
            self._resumes_at = self._clock.monotonic() + request.seconds
            self._loop.call_later(request.seconds, _nothing)
        else:
            self._request = request

    def _finish(self, result: Any) -> None:
        assert self._completed is not None, "a job has begun"
        self._answers.append((self._completed, result))
        self._steps = self._completed = self._journal = self._request = None

    def stop(self) -> None:
        while self._jobs or self._steps is not None:
            self._work()
        super().stop()


def _procedure(job: Job) -> tuple[JournalObjects, Steps[Any]]:
    """Return the parts of a job that executes a ``fencing`` procedure."""
    assert isinstance(job, partial), "its job is a procedure"
    journal = job.func.__self__  # type: ignore[attr-defined]
    assert isinstance(journal, JournalObjects), "its job is a procedure"
    return journal, job.args[0]


def _nothing() -> None:
    pass


class BucketSchedule(Schedule):
    """The schedule of a process over a bucket."""

    def __init__(self, clock: SimulatedClock, chance: Chance, story: Story, is_cut: Callable[[], bool]) -> None:
        super().__init__(clock, chance, story)
        self._is_cut: Final = is_cut

    def make_worker(self, name: str, loop: Loop) -> SimulatedWorker:
        if name not in WAITING:
            return super().make_worker(name, loop)
        worker = BucketWorker(name, loop, self._story, self.clock, self._is_cut)
        self.workers.append(worker)
        return worker
