"""Make journal writes (groups) durable: the interface, and the implementation that syncs journal files to a disk.

The implementation for buckets is in ``cluster.uploader``.

* Groups become durable in order, and callbacks are called in the order of requests.
* The flusher runs one flush at a time in one thread, on request and periodically while data is unsynced.
* A failed sync is never retried.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from polywire.clock import Clock
from polywire.errors import BrokerError
from polywire.log.base import Completion, Loop
from polywire.log.journal.bare_journal import BareFlusher, Unsynced
from polywire.log.journal.slots import FileJournal, Slot
from polywire.log.settings import LogSettings
from polywire.log.worker import MakeWorker

RECHECK_MS_MAX: Final = 10  # pause between two checks whether the sealer is still working


class Syncer(Protocol):
    """Makes journal writes durable.

    Attributes:
        synced: last sequence number up to which all journal writes are durable.
        written: sequence number of the last journal write.
        unsynced_bytes: total size of the journal writes after ``synced``.
    """

    synced: int
    written: int
    unsynced_bytes: int

    @property
    def is_local(self) -> bool:
        """Whether recovery reads local journal files, not a bucket.

        In local files, a journal write may be intact after a power loss although an earlier one is lost (decision 0102).
        So each write contains the last synced sequence number, by which recovery distinguishes damage from a torn write.
        """

    @property
    def is_long(self) -> bool:
        """Whether to write the current journal file to segments before it is full, because recovery would have to read
        too much.
        """

    def wrote(self, sequence: int, position: int, size: int) -> None:
        """Record that the journal write ``sequence`` has ``size`` bytes at ``position`` of the current journal file."""

    def wait(self, sequence: int, callback: Completion[None]) -> None:
        """Call ``callback`` once the journal write ``sequence`` is durable, at once if it already is."""

    def spare(self, slot: Slot) -> None:
        """Do not sync a full journal file, because the last journal write names segments that contain its data."""

    def sync_last(self, slot: Slot, done: Callable[[], None]) -> None:
        """Make only the last journal write durable, and skip those before it.

        The last journal write names the segments that replace the journal file ``slot``. Only for syncers with
        ``is_local``.
        """

    def sealed(self, sequence: int, naming: int) -> None:
        """Record that all journal writes up to ``sequence`` are in segments, which the durable write ``naming`` names."""

    def finish(self) -> None:
        """Make everything durable now, before closing. Raises OSError, NotOwner or Unavailable."""

    def abandon(self) -> Sequence[Completion[None]]:
        """Stop after a failure of the log. Return the callbacks that were not called yet."""

    def stop(self) -> None:
        """Stop all threads."""


MakeSyncer = Callable[[Loop, Callable[[], None], Callable[[BrokerError], None], Callable[[], bool]], Syncer]
"""Creates a syncer for this loop.

The syncer calls the second argument whenever ``synced`` has grown, after the waiting callbacks, and the third argument
on failure. The last argument returns whether a journal file is being written to segments.
"""


def flushing(journal: FileJournal, clock: Clock, make_worker: MakeWorker, settings: LogSettings) -> MakeSyncer:
    """Return a function that creates flushers for this journal."""

    def make(
        loop: Loop, advanced: Callable[[], None], failed: Callable[[BrokerError], None], sealing: Callable[[], bool]
    ) -> Flusher:
        return Flusher(
            journal, loop, clock, make_worker, settings=settings, sealing=sealing, advanced=advanced, failed=failed
        )

    return make


class Flusher(BareFlusher):
    """Makes journal writes durable with fsync, one at a time. Implements ``Syncer``.

    A journal write also counts as synced once its data is in segments that a synced journal write names. ``MakeSyncer``
    describes the arguments.
    """

    def __init__(
        self,
        journal: FileJournal,
        loop: Loop,
        clock: Clock,
        make_worker: MakeWorker,
        *,
        settings: LogSettings,
        sealing: Callable[[], bool],
        advanced: Callable[[], None],
        failed: Callable[[BrokerError], None],
    ) -> None:
        interval_ms = settings.sync_interval_ms
        super().__init__(
            journal, loop, clock, interval_s=interval_ms / 1000, bytes_soon=settings.unsynced_bytes_max // 2
        )
        self._recheck: Final = min(interval_ms, RECHECK_MS_MAX) / 1000
        self._sealing = sealing
        self._advanced = advanced
        self._failed = failed
        self._worker = make_worker("sync", loop)
        self._waiting: deque[tuple[int, Completion[None]]] = deque()
        self._finished = False
        self._error: OSError | None = None

    @property
    def is_local(self) -> bool:
        return True

    @property
    def is_long(self) -> bool:
        return False

    def wait(self, sequence: int, callback: Completion[None]) -> None:
        """Call ``callback`` once the journal write ``sequence`` is synced, at once if it already is.

        Starts a sync if necessary. A call from inside a callback is queued after the callbacks already waiting.
        """
        if sequence > self.synced:
            self._waiting.append((sequence, callback))
            self.start()
        elif self._waiting and self._waiting[0][0] <= self.synced:
            due = [waiting for waiting in self._waiting if waiting[0] <= self.synced]
            self._waiting.insert(len(due), (sequence, callback))
        else:
            callback(None)

    def start(self) -> None:
        """Sync everything written so far. If a sync is running, another one follows it."""
        if self._running or not self._unsynced:
            return
        self._running = True
        self._journal.align()
        taken, self._unsynced = list(self._unsynced.values()), {}
        size = sum(unsynced.size for unsynced in taken)
        self._worker.run(partial(self._flush, taken), partial(self._synced, self.written, size))

    def _flush(self, taken: Sequence[Unsynced]) -> None:
        try:
            _flush_all(taken)
        except OSError as error:
            self._error = error
            raise

    def _is_sealed_soon(self) -> bool:
        """Return whether the oldest unsynced data is in a full journal file that is about to be written to segments.

        A sync now would write it to disk twice.
        """
        oldest = next(iter(self._unsynced.values()), None)
        return oldest is not None and oldest.slot is not self._journal.current and self._sealing()

    def _tick(self) -> None:
        self._timer = False
        oldest = next(iter(self._unsynced.values()), None)
        if oldest is None:
            return
        wait = oldest.since + self._interval - self._clock.monotonic()
        if wait <= 0:
            wait = self._recheck
            if not self._is_sealed_soon():
                self.start()
        if self._unsynced:  # the sync was not due yet, the data is being sealed, or a sync was running
            self._timer = True
            self._loop.call_later(wait, self._tick)

    def _synced(self, sequence: int, size: int, flushed: BrokerError | None) -> None:
        self._running = False
        if flushed is not None:
            self._failed(flushed)
            return
        self._reached(sequence, size)

    def _reached(self, sequence: int, size: int) -> None:
        """Record that all journal writes up to ``sequence`` are on disk.

        ``size`` is the number of bytes synced since the last call.
        """
        self.synced = max(self.synced, sequence)
        self.unsynced_bytes -= size
        while self._waiting and self._waiting[0][0] <= self.synced:
            self._waiting.popleft()[1](None)
        self._advanced()
        if self._waiting or (self.unsynced_bytes > self._bytes_soon and not self._is_sealed_soon()):
            self.start()  # producers that wait for the sync write nothing that would start it

    # Ranges of journal files that were sealed before they were synced

    def spare(self, slot: Slot) -> None:
        unsynced = self._unsynced.get(slot.serial)
        if unsynced is not None:
            unsynced.start = unsynced.stop

    def sync_last(self, slot: Slot, done: Callable[[], None]) -> None:
        """Sync only the last journal write, and skip those in the journal file ``slot`` and before it.

        The last journal write names the segments that replace ``slot``, which must be the oldest file. When ``done`` is
        called, everything up to the end of ``slot`` counts as synced.
        """
        current, spared = self._journal.current, self._unsynced.pop(slot.serial, None)
        assert current is not None
        assert current is not slot, "a slot is sealed when it is full"
        last = Unsynced(current, self._last_position, self._journal.position, 0.0)
        self._journal.align()

        def named(flushed: BrokerError | None) -> None:
            if flushed is not None:
                self._failed(flushed)
            elif not self._finished:
                self._reached(sequence, size)
                done()

        sequence, size = slot.last, 0 if spared is None else spared.size
        self._worker.run(partial(self._flush, [last]), named)

    def sealed(self, sequence: int, naming: int) -> None:
        pass

    # End

    def finish(self) -> None:
        """Sync everything now, before closing. Raises OSError."""
        self._worker.stop()
        if self._error is not None:
            raise self._error
        self._running, self._finished = False, True
        taken, self._unsynced = list(self._unsynced.values()), {}
        _flush_all(taken)
        self._reached(self.written, self.unsynced_bytes)

    def abandon(self) -> list[Completion[None]]:
        """Stop syncing after a failure of the log. Return the callbacks that were not called yet."""
        waiting = [callback for _, callback in self._waiting]
        self._waiting.clear()
        self._unsynced.clear()
        return waiting

    def stop(self) -> None:
        self._worker.stop()


def _flush_all(taken: Sequence[Unsynced]) -> None:
    for unsynced in taken:
        if unsynced.start < unsynced.stop:
            unsynced.mapping.flush(unsynced.start, unsynced.stop)
