"""Deleting blobs in a thread of its own, a piece at a time: sealing and syncs go on beside it.

A file system frees a large file in one step of its journal, and every sync waits for that. So space is freed in pieces, and between two of
them the disk has as long for everybody else.

Promises: names go in the order they were given, urgent ones first; what a stop leaves, recovery deletes, because nobody names it; a blob
that cannot be deleted is left to it as well. Must not know: what the blobs hold, why they go.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Final

from polywire.errors import BrokerError
from polywire.log.base import Loop
from polywire.log.worker import Worker
from polywire.store.base import Store

PAUSE_SECONDS_MIN: Final = 0.001  # after each piece: whoever waits for the disk comes first
PAUSE_SHARE: Final = 1.0  # of the time that a piece took, at least; half of the disk's time is enough to delete faster than it can be filled
READ_SECONDS: Final = 0.05  # between two looks whether a blob is still read
READ_MAX: Final = (
    16  # blobs with a descriptor each that wait for their readers; of more, the one read longest is left to the system
)


class Deleter:
    """Guards: ``_names`` are those that wait; one thread deletes, and only while there is something to delete."""

    def __init__(self, store: Store, loop: Loop) -> None:
        self._store = store
        self._worker = Worker("delete", loop)
        self._names: deque[str] = deque()
        self._read: deque[Iterator[int]] = deque()
        """Blobs whose names are gone, and which somebody still reads."""
        self._running = False
        self._stopped = Event()

    @property
    def waiting(self) -> int:
        """Blobs that are not deleted yet, without the one at hand."""
        return len(self._names) + len(self._read)

    def delete(self, names: Sequence[str], *, urgent: bool = False) -> None:
        """Delete blobs some time soon; urgent ones, of which few come at a time, before all others."""
        if urgent:
            self._names.extendleft(names)
        else:
            self._names.extend(names)
        if self._names and not self._running and not self._stopped.is_set():
            self._running = True
            self._worker.run(self._delete_all, self._completed)

    def stop(self) -> None:
        """Leave the rest to recovery, and end the thread."""
        self._stopped.set()
        self._worker.stop()

    def _completed(self, _: BrokerError | None) -> None:
        self._running = False
        self.delete(())

    # In the thread

    def _delete_all(self) -> None:
        while not self._stopped.is_set() and self.waiting:
            if self._names:
                self._delete(self._store.delete_in_steps(self._names.popleft()))
                continue
            self._stopped.wait(READ_SECONDS)
            self._delete(self._read.popleft())
        while self._stopped.is_set() and self._read:
            self._read.popleft()

    def _delete(self, steps: Iterator[int]) -> None:
        """Free a blob to its end, or as long as nobody reads it."""
        begun = time.monotonic()
        try:
            for freed in steps:
                if not freed:
                    self._read.append(steps)
                    break
                taken = time.monotonic() - begun
                if self._stopped.wait(max(PAUSE_SECONDS_MIN, PAUSE_SHARE * taken)):
                    return
                begun = time.monotonic()
        except BrokerError:
            return  # recovery tries again
        if len(self._read) > READ_MAX:
            self._read.popleft()
