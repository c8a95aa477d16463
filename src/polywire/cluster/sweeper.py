"""Collect a shard's garbage in a thread while this broker leads: soon after it takes over, then daily."""

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

SWEEP_INTERVAL_S: Final = 24 * 3600.0  # each run lists all objects and reads every start below the floor

logger: Final = structlog.get_logger("polywire.cluster")


class Sweeper:
    """Schedule of garbage collections; none begins after ``stop``.

    Args:
        needed: called on the event loop; see ``sweeping.sweep``.
    """

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
        self._bucket = bucket
        self._loop = loop
        self._worker = make_worker("sweep", loop)
        self._seed = seed
        self._start = start
        self._needed = needed
        self._grace_s = grace_s
        self._stopped = False

    def begin(self) -> None:
        """Collect garbage now, and daily from then on."""
        if not self._stopped:
            steps = sweep(self._seed, self._start, self._needed(), self._grace_s)
            self._worker.run(partial(self._bucket.run, steps), self._swept)

    def _swept(self, count: int | BrokerError) -> None:
        if self._stopped:
            return
        if isinstance(count, BrokerError):
            logger.warning(
                "garbage collection of the bucket failed: trying again at the next run", reason=count.message
            )
        elif count:
            logger.info("deleted unneeded objects from the bucket", objects=count)
        self._loop.call_later(SWEEP_INTERVAL_S, self.begin)

    def stop(self) -> None:
        """Stop. Call it after the bucket's requests and pauses were cancelled."""
        self._stopped = True
        self._worker.stop()
