"""Sweeps a shard's litter while this broker leads: once soon after it has taken over, and then every day.

Promises: one sweep at a time, in a thread of its own. Must not know: what is litter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Final

import structlog

from polywire.cluster.journal_objects import JournalObjects
from polywire.cluster.sweeping import sweep
from polywire.errors import BrokerError
from polywire.log.base import Loop
from polywire.log.worker import MakeWorker

SWEEP_INTERVAL_S: Final = 24 * 3600.0  # between two: each lists everything, and reads every start below the floor

logger: Final = structlog.get_logger("polywire.cluster")


class Sweeper:
    """Guards: nothing is begun after ``stop``."""

    def __init__(
        self,
        bucket: JournalObjects,
        loop: Loop,
        make_worker: MakeWorker,
        *,
        seed: int,
        start: int,
        needed: Callable[[], Collection[str]],
        grace_s: float,
    ) -> None:
        """needed: asked on the loop, see ``sweeping.sweep``."""
        self._bucket = bucket
        self._loop = loop
        self._worker = make_worker("sweep", loop)
        self._seed = seed
        self._start = start
        self._needed = needed
        self._grace_s = grace_s
        self._stopped = False

    def begin(self) -> None:
        """Sweep, and again a day later."""
        if not self._stopped:
            steps = sweep(self._seed, self._start, self._needed(), self._grace_s)
            self._worker.run(partial(self._bucket.run, steps), self._swept)

    def _swept(self, count: int | BrokerError) -> None:
        if self._stopped:
            return
        if isinstance(count, BrokerError):
            logger.warning("litter in the bucket is left for the next sweep", reason=count.message)
        elif count:
            logger.info("objects were deleted that nobody needs", objects=count)
        self._loop.call_later(SWEEP_INTERVAL_S, self.begin)

    def stop(self) -> None:
        """Sweep no more; call it once the bucket repeats nothing and waits for nothing."""
        self._stopped = True
        self._worker.stop()
