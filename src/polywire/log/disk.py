"""Track free disk space, and delete files and bucket objects (blobs) in a thread.

Appends are refused before the disk is full, so that retention and sealing still have space.

While a file system deletes a large file, every sync waits. So a file is truncated in pieces, each followed by a pause
as long as freeing the piece took. Segments in a bucket stay for a grace period, because clients may have received their
names.

* Blobs are deleted in the order of the calls, urgent ones first.
* If a stop interrupts deletion, or a blob cannot be deleted, recovery deletes the blobs that no journal group lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import Loop
from polywire.log.worker import MakeWorker
from polywire.store.base import Store
from polywire.store.files import Files

PAUSE_SECONDS_MIN: Final = 0.001  # pause after each piece, so that other users of the disk come first
# ratio of the pause to the time a piece took. Deletion gets half of the disk's time, and is still faster than appends.
PAUSE_SHARE: Final = 1.0
READ_SECONDS: Final = 0.05  # pause between two checks whether a file is still being read
READ_MAX: Final = (
    # unlinked files that stay open until their readers finish; if there are more, the oldest is closed at once, and the
    # system frees it
    16
)
logger: Final = structlog.get_logger("polywire.log")


class Deleter:
    """Deletes files or objects in a thread, one piece at a time, so that large deletions do not delay syncs.

    Args:
        grace_s: seconds between ``delete`` and the deletion, except for urgent ones.
    """

    def __init__(
        self, store: Store, loop: Loop, clock: Clock, make_worker: MakeWorker, *, grace_s: float = 0.0
    ) -> None:
        self._store = store
        self._loop = loop
        self._clock = clock
        self._grace_s = grace_s
        self._worker = make_worker("delete", loop)
        self._names: deque[str] = deque()
        self._begun: Iterator[int] | None = None
        """Blob that is partly deleted."""
        self._read: deque[Iterator[int]] = deque()
        """Unlinked blobs that are still being read."""
        self._running = False
        self._stopped = False

    @property
    def waiting(self) -> int:
        """Number of files or objects not yet deleted, not counting the one in progress."""
        return len(self._names) + len(self._read)

    def delete(self, names: Sequence[str], *, urgent: bool = False) -> None:
        """Queue files or objects for deletion after the grace period.

        Args:
            urgent: delete these few before all others and without a grace period.
        """
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
            self._continue()

    def stop(self) -> None:
        """Finish the current piece and stop the thread. Recovery deletes the remaining blobs."""
        self._stopped = True
        self._worker.stop()
        self._read.clear()
        self._begun = None

    def _continue(self) -> None:
        self._running = not self._stopped and (self._begun is not None or self.waiting > 0)
        if not self._running:
            return
        steps, self._begun = self._begun, None
        if steps is None:
            steps = self._store.delete_in_steps(self._names.popleft()) if self._names else self._read.popleft()
        self._worker.run(partial(self._step, steps), partial(self._stepped, steps))

    def _step(self, steps: Iterator[int]) -> tuple[int | None, float]:
        """Free one piece, in the thread. Return its bytes (None if the file is deleted) and the duration in seconds."""
        begun = self._clock.monotonic()
        freed = next(steps, None)
        return freed, self._clock.monotonic() - begun

    def _stepped(self, steps: Iterator[int], done: tuple[int | None, float] | BrokerError) -> None:
        # after an error, recovery deletes the blob
        freed, taken = (None, 0.0) if isinstance(done, BrokerError) else done
        if self._stopped or freed is None:
            self._continue()
        elif freed:
            self._begun = steps
            self._loop.call_later(max(PAUSE_SECONDS_MIN, PAUSE_SHARE * taken), self._continue)
        else:
            self._read.append(steps)
            if len(self._read) > READ_MAX:
                self._read.popleft()
            self._loop.call_later(0.0 if self._names else READ_SECONDS, self._continue)


class Disk:
    """Tracks the free space of a data directory.

    Attributes:
        full: whether appends are refused for lack of space.
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
        free_bytes = self._files.free_bytes(self._path)
        self._see(self._refused or free_bytes < self._reserve_bytes, free_bytes)

    def refused(self, error: Busy) -> None:
        """Record that a segment file could not be written.

        If the reason is DISK_FULL, the disk counts as full until ``accepted`` is called, whatever the system reports.
        """
        if error.code is ErrorCode.DISK_FULL:
            self._refused = True
            self.measure()
        else:
            logger.warning("writing a segment was postponed", reason=error.message)

    def accepted(self) -> None:
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
