"""When the journal is synced: one flush in one thread for everybody who waits, and one every so often while something is unsynced.

Promises: a callback is called once its sequence is on the disk, in order of asking; a failed sync is never tried again. Must not know: what
a group holds, who waits.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from polywire.errors import BrokerError
from polywire.log.base import Loop
from polywire.log.journal_file import FileJournal
from polywire.log.worker import Worker

Waiting = Callable[[BrokerError | None], None]
"""Called once: without an error when the sequence is on the disk."""


class Syncer:
    """Guards: ``synced`` is the highest sequence known to be on the disk, and only one sync runs."""

    def __init__(
        self,
        journal: FileJournal,
        loop: Loop,
        *,
        interval_ms: int,
        bytes_max: int,
        advanced: Callable[[], None],
        failed: Callable[[BrokerError], None],
    ) -> None:
        """``advanced`` is called on the loop whenever ``synced`` has grown, after the callbacks that waited for it."""
        self._journal = journal
        self._loop = loop
        self._interval: Final = interval_ms / 1000
        self._bytes_soon: Final = bytes_max // 2
        self._advanced = advanced
        self._failed = failed
        self._worker = Worker("sync", loop)
        self._waiting: deque[tuple[int, Waiting]] = deque()
        self._dirty: dict[int, None] = {}
        self._running = False
        self._timer = False
        self._bytes_running = 0
        self._error: OSError | None = None
        self.synced = 0
        self.written = 0
        self.unsynced_bytes = 0

    def wrote(self, sequence: int, size: int) -> None:
        """A group was written to the current slot."""
        slot = self._journal.current
        assert slot is not None
        self.written = sequence
        self.unsynced_bytes += size
        self._dirty[slot.descriptor] = None
        if not self._timer:
            self._timer = True
            self._loop.call_later(self._interval, self._tick)
        if not self._running and self.unsynced_bytes > self._bytes_soon:
            self.start()

    def wait(self, sequence: int, callback: Waiting) -> None:
        """Call back once ``sequence``, which was written, is synced; syncs at once, or calls at once when it is."""
        if sequence <= self.synced:
            callback(None)
            return
        self._waiting.append((sequence, callback))
        self.start()

    def start(self) -> None:
        """Sync what was written so far, unless that is being done; what comes meanwhile follows."""
        if self._running or not self._dirty:
            return
        self._running = True
        self._journal.align()
        descriptors, self._dirty = tuple(self._dirty), {}
        self._bytes_running = self.unsynced_bytes
        self._worker.run(partial(self._sync, descriptors), partial(self._synced, self.written))

    def _sync(self, descriptors: tuple[int, ...]) -> None:
        """In the thread; remembers a failure for those who do not wait for the answer."""
        try:
            sync_all(descriptors)
        except OSError as error:
            self._error = error
            raise

    def _tick(self) -> None:
        self._timer = False
        if self._dirty:
            self.start()
            if self._dirty and not self._timer:  # a sync was running
                self._timer = True
                self._loop.call_later(self._interval, self._tick)

    def _synced(self, sequence: int, _: None, error: BrokerError | None) -> None:
        self._running = False
        if error is not None:
            self._failed(error)
            return
        self.reached(sequence)

    def reached(self, sequence: int) -> None:
        """Everything up to ``sequence`` is on the disk."""
        self.synced = max(self.synced, sequence)
        self.unsynced_bytes -= self._bytes_running
        self._bytes_running = 0
        while self._waiting and self._waiting[0][0] <= self.synced:
            self._waiting.popleft()[1](None)
        self._advanced()
        if self._waiting:
            self.start()

    def finish(self) -> None:
        """Sync everything here and now; for closing. Raises OSError."""
        self._worker.stop()
        if self._error is not None:
            raise self._error
        self._running = False
        descriptors, self._dirty = tuple(self._dirty), {}
        sync_all(descriptors)
        self._bytes_running = self.unsynced_bytes
        self.reached(self.written)

    def abandon(self) -> list[Waiting]:
        """The log has failed: nothing is synced any more; returns who waited."""
        waiting = [callback for _, callback in self._waiting]
        self._waiting.clear()
        self._dirty.clear()
        return waiting

    def stop(self) -> None:
        """End the thread."""
        self._worker.stop()


def sync_all(descriptors: tuple[int, ...]) -> None:
    """Flush the data of every file. Raises OSError."""
    for descriptor in descriptors:
        os.fdatasync(descriptor)
