"""Deleting blobs in a thread of its own, a piece at a time: sealing and syncs go on beside it.

A file system frees a large file in one step of its journal, and every sync waits for that. So space is freed in pieces, and between two of
them the disk has as long for everybody else. Others may read segments of a bucket, and have been told of them: there they stay for a grace.

Promises: names go in the order they were given, urgent ones first; what a stop leaves, recovery deletes, because nobody names it; a blob
that cannot be deleted is left to it as well. Must not know: what the blobs hold, why they go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from polywire.clock import Clock
from polywire.errors import BrokerError
from polywire.log.base import Loop
from polywire.log.worker import MakeWorker
from polywire.store.base import Store

PAUSE_SECONDS_MIN: Final = 0.001  # after each piece: whoever waits for the disk comes first
PAUSE_SHARE: Final = 1.0  # of the time that a piece took, at least; half of the disk's time is enough to delete faster than it can be filled
READ_SECONDS: Final = 0.05  # between two looks whether a blob is still read
READ_MAX: Final = (
    16  # blobs with a descriptor each that wait for their readers; of more, the one read longest is left to the system
)


class Deleter:
    """Guards: ``_names`` are those that wait; one piece is deleted at a time, and only while there is something to delete."""

    def __init__(
        self, store: Store, loop: Loop, clock: Clock, make_worker: MakeWorker, *, grace_s: float = 0.0
    ) -> None:
        """grace_s: how long what is not urgent stays."""
        self._store = store
        self._loop = loop
        self._clock = clock
        self._grace_s = grace_s
        self._worker = make_worker("delete", loop)
        self._names: deque[str] = deque()
        self._begun: Iterator[int] | None = None
        """The blob of which a piece is gone, and more is left."""
        self._read: deque[Iterator[int]] = deque()
        """Blobs whose names are gone, and which somebody still reads."""
        self._running = False
        self._stopped = False

    @property
    def waiting(self) -> int:
        """Blobs that are not deleted yet, without the one at hand."""
        return len(self._names) + len(self._read)

    def delete(self, names: Sequence[str], *, urgent: bool = False) -> None:
        """Delete blobs some time soon, but behind the grace; urgent ones, of which few come at a time, at once and before all others."""
        if self._grace_s and not urgent:
            self._loop.call_later(self._grace_s, self._begin, names)
            return
        self._begin(names, urgent=urgent)

    def _begin(self, names: Sequence[str], *, urgent: bool = False) -> None:
        if urgent:
            self._names.extendleft(names)
        else:
            self._names.extend(names)
        if not self._running:
            self._go_on()

    def stop(self) -> None:
        """Finish the piece at hand, leave the rest to recovery, and end the thread."""
        self._stopped = True
        self._worker.stop()
        self._read.clear()
        self._begun = None

    def _go_on(self) -> None:
        """Begin with the next piece, if there is one."""
        self._running = not self._stopped and (self._begun is not None or self.waiting > 0)
        if not self._running:
            return
        steps, self._begun = self._begun, None
        if steps is None:
            steps = self._store.delete_in_steps(self._names.popleft()) if self._names else self._read.popleft()
        self._worker.run(partial(self._step, steps), partial(self._stepped, steps))

    def _step(self, steps: Iterator[int]) -> tuple[int | None, float]:
        """In the thread: free a piece; its size, None when nothing is left, and how long that took."""
        begun = self._clock.monotonic()
        freed = next(steps, None)
        return freed, self._clock.monotonic() - begun

    def _stepped(self, steps: Iterator[int], done: tuple[int | None, float] | BrokerError) -> None:
        freed, taken = (None, 0.0) if isinstance(done, BrokerError) else done  # where it failed recovery tries again
        if self._stopped or freed is None:
            self._go_on()
        elif freed:
            self._begun = steps
            self._loop.call_later(max(PAUSE_SECONDS_MIN, PAUSE_SHARE * taken), self._go_on)
        else:
            self._read.append(steps)
            if len(self._read) > READ_MAX:
                self._read.popleft()
            self._loop.call_later(0.0 if self._names else READ_SECONDS, self._go_on)
