"""Track free disk space.

Appends are refused before the disk is full, so that retention and sealing still have space.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from polywire.clock import Clock
from polywire.errors import Busy, ErrorCode
from polywire.log.base import Loop
from polywire.log.segments.deletion import Deleter
from polywire.log.worker import MakeWorker
from polywire.store.base import Store
from polywire.store.files import Files

logger: Final = structlog.get_logger("polywire.log")


class Disk:
    """Tracks the free space of a data directory. ``full`` is the last observation; it becomes false when space is free
    again.
    """

    def __init__(
        self,
        path: Path,
        store: Store,
        reserve_bytes: int,
        loop: Loop,
        *,
        files: Files,
        clock: Clock,
        make_worker: MakeWorker,
        grace_s: float = 0.0,
    ) -> None:
        self.store: Final = store
        self.deleter: Final = Deleter(store, loop, clock, make_worker, grace_s=grace_s)
        self.make_worker: Final = make_worker
        self._files = files
        self.full = False
        self._path = path
        self._reserve_bytes = reserve_bytes
        self._refused = False
        self.measure()

    def measure(self) -> None:
        """Measure the free space."""
        free_bytes = self._files.free_bytes(self._path)
        self._see(self._refused or free_bytes < self._reserve_bytes, free_bytes)

    def refused(self, error: Busy) -> None:
        """Record that a segment could not be written for lack of space, even if the system reports free space.

        A lack of file descriptors does not count.
        """
        if error.code is ErrorCode.DISK_FULL:
            self._refused = True
            self.measure()
        else:
            logger.warning("writing a segment was postponed", reason=error.message)

    def accepted(self) -> None:
        """Record that a segment was written."""
        self._refused = False
        self.measure()

    def _see(self, full: bool, free_bytes: int) -> None:
        if full == self.full:
            return
        self.full = full
        facts = {"path": str(self._path), "free_bytes": free_bytes, "kept_free_bytes": self._reserve_bytes}
        if full:
            logger.warning("the disk is full: the broker rejects records until there is space", **facts)
        else:
            logger.info("the disk has free space again: the broker accepts records", **facts)
