"""A log whose worker jobs and their completions run in the order that a test chooses; reads complete at once.

The jobs of one worker run in order.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from polywire.log.base import Completion, Loop
from polywire.log.settings import LogSettings
from polywire.log.worker import Job, ThreadWorker, Worker, attempt
from tests.unit.log.rig import SMALL, Rig

MANUAL = ("sync", "seal", "reader")


class ManualWorker:
    """Replaces ``Worker``; the reader's variant runs jobs at once. Each completion reaches the loop once, in order."""

    def __init__(self, name: str, loop: Loop, made: dict[str, ManualWorker]) -> None:
        self._loop = loop
        self._eager = name == "reader"
        self.jobs: deque[tuple[Job, Completion[Any]]] = deque()
        self.stopped = False
        made[name] = self

    def run(self, job: Job, completed: Completion[Any]) -> None:
        self.jobs.append((job, completed))
        if self._eager:
            self.step()

    def step(self) -> None:
        """Run the next job and queue its completion on the loop."""
        job, completed = self.jobs.popleft()
        self._loop.call_soon_threadsafe(completed, attempt(job))

    def stop(self) -> None:
        while self.jobs and not self.stopped:
            self.step()


class ManualRig(Rig):
    """A rig with manual workers: ``sync``, ``seal`` and ``reader``."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, settings: LogSettings = SMALL) -> None:
        self.workers: dict[str, ManualWorker] = {}
        super().__init__(directory, settings, self._make_worker)

    def _make_worker(self, name: str, loop: Loop) -> Worker:
        return ManualWorker(name, loop, self.workers) if name in MANUAL else ThreadWorker(name, loop)

    def kill(self) -> None:
        for worker in self.workers.values():
            worker.stopped = True  # remaining jobs never run
        super().kill()

    def passes(self, count: int = 3) -> None:
        """Run the loop's ready callbacks, without timers that are not due."""
        for _ in range(count):
            self.loop.run_pass()

    def step(self, name: str) -> None:
        """Run one job of a worker and the callbacks that follow."""
        self.workers[name].step()
        self.passes()

    def drain(self) -> None:
        """Run all jobs of all workers."""
        while any(worker.jobs for worker in self.workers.values()):
            for worker in self.workers.values():
                while worker.jobs:
                    worker.step()
            self.passes()
