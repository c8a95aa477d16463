"""Helpers of the log's tests: a loop that tests run by hand, broker state that records changes, and batches.

``run_until`` never waits longer than its limit.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from polywire.clock import SystemClock
from polywire.errors import BrokerError
from polywire.log import base
from polywire.log.base import Completion, Encoding, Read
from polywire.log.journal.syncer import Flusher
from polywire.log.log import FileLog
from polywire.log.opening import open_log
from polywire.log.partition.partition import FilePartition
from polywire.log.settings import LogSettings
from polywire.log.worker import MakeWorker, Pending, ThreadWorker
from polywire.records.batch import read_header
from polywire.records.columns import BatchHeader, Record
from polywire.records.compression import expand_body
from polywire.records.rows import from_records, to_records
from polywire.testing.loop import Handle
from polywire.types import Level

_T = TypeVar("_T")

SMALL = LogSettings(
    slot_bytes=64 * 1024,
    slot_count_max=4,
    sync_interval_ms=2,
    disk_reserve_bytes=0,
    staged_bytes_max=4 * 1024 * 1024,
)
"""Slots that fill quickly."""


class RigLoop:
    """A ``Loop`` whose callbacks run inside ``run_until``. Timers use real time, as threads do."""

    def __init__(self) -> None:
        self._soon: deque[Handle] = deque()
        self._threads: SimpleQueue[Handle] = SimpleQueue()
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = count()

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Handle:
        handle = Handle(callback, args)
        self._soon.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Handle:
        handle = Handle(callback, args)
        self._threads.put(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle:
        handle = Handle(callback, args)
        heapq.heappush(self._timers, (time.monotonic() + delay, next(self._order), handle))
        return handle

    @property
    def is_quiet(self) -> bool:
        """Return whether no callback is ready."""
        return not self._soon and self._threads.empty()

    def run_pass(self, wait: float = 0.0) -> None:
        """Run the ready callbacks; wait for a thread or a timer if there are none."""
        while self._timers and self._timers[0][0] <= time.monotonic():
            self._soon.append(heapq.heappop(self._timers)[2])
        try:
            item = self._threads.get(timeout=wait) if wait and not self._soon else self._threads.get_nowait()
            self._soon.append(item)
        except Empty:
            pass
        for _ in range(len(self._soon)):
            handle = self._soon.popleft()
            if not handle.cancelled:
                handle.callback(*handle.args)

    def run_until(self, reached: Callable[[], object], seconds: float = 60.0) -> None:
        """Run passes until the condition holds."""
        end = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < end, "the condition was not reached in time"
            self.run_pass(0.002)


class Memory:
    """The broker's state: records every change and every producer's batch, in order."""

    def __init__(self) -> None:
        self.changes: list[bytes] = []
        self.producers: list[tuple[bytes, int]] = []
        self.restored = 0

    def restore(self, snapshot: bytes) -> None:
        self.restored += 1
        self.changes = snapshot.split(b"\n")[:-1]

    def apply(self, change: bytes) -> None:
        self.changes.append(change)

    def replayed(self, header: BatchHeader, producer_id: bytes) -> None:
        self.producers.append((producer_id, header.base_offset))

    def snapshot(self) -> bytes:
        return b"".join(change + b"\n" for change in self.changes)

    def encoding(self) -> Encoding:
        return Encoding(iter((self.snapshot(),)))


class Rig:
    """One log in one directory, which a test can reopen repeatedly."""

    def __init__(self, directory: Path, settings: LogSettings = SMALL, make_worker: MakeWorker = ThreadWorker) -> None:
        self.make_worker = make_worker
        self.directory = directory
        self.settings = settings
        self.loop = RigLoop()
        self.memory = Memory()
        self.log: FileLog = self.open()

    def open(self) -> FileLog:
        """Open the log with an empty state."""
        self.loop = RigLoop()
        self.memory = Memory()
        self.log = open_log(
            self.directory,
            settings=self.settings,
            loop=self.loop,
            clock=SystemClock(),
            replay=self.memory,
            make_worker=self.make_worker,
        )
        return self.log

    def hold_syncs(self, yes: bool) -> None:
        """Block further syncs, or allow them again."""
        flusher = self.log._flusher
        assert isinstance(flusher, Flusher)
        flusher._running = yes

    def synced(self, sequence: int) -> None:
        """Behave as if the journal writes up to ``sequence`` had been synced, while syncs are held."""
        flusher = self.log._flusher
        assert isinstance(flusher, Flusher)
        flusher._reached(sequence, 0)
        self.log.commit()

    def kill(self) -> None:
        """Stop as after ``kill -9``: flush nothing, call no callbacks."""
        abandon(self.log)

    def append(self, partition: FilePartition, values: list[bytes], level: Level = Level.WRITTEN) -> list[int]:
        """Append one batch; its offset is added to the returned list."""
        reported: list[int] = []
        self.log.append(partition, batch_of(values), level=level, done=expecting(reported))
        return reported

    def change(self, change: bytes, level: Level = Level.WRITTEN) -> list[int]:
        """Apply a change and journal it."""
        reported: list[int] = []
        self.log.change(change, level=level, done=expecting(reported))
        self.memory.apply(change)
        return reported

    def settle(self) -> None:
        """Wait until everything is synced and every full slot is sealed."""
        reported: list[int] = []
        self.log.barrier(Level.SYNCED, expecting(reported))
        self.loop.run_until(lambda: reported and not self.log.sealing)

    def read(self, partition: FilePartition, offset: int = 0, bytes_max: int = 1 << 20) -> list[bytes | None]:
        """Return all values from ``offset`` on."""
        values: list[bytes | None] = []
        while True:
            found = self.read_once(partition, offset, bytes_max)
            for record in records_of(found):
                if record.offset >= offset:
                    assert record.offset == offset, "offsets must be consecutive"
                    values.append(record.value)
                    offset += 1
            assert offset == found.next_offset, "the end of a read must match its records"
            found.pin.release()
            if not found.chunks:
                return values

    def look_up(self, question: Callable[[int, Completion[int]], int | base.Handle], argument: int) -> int:
        """Return the result of a lookup, immediate or later."""
        return self.answered(lambda then: question(argument, then))

    def answered(self, ask: Callable[[Completion[_T]], _T | base.Handle]) -> _T:
        """Return the result of a request, immediate or later."""
        answers: list[_T | BrokerError] = []
        found = ask(answers.append)
        if not isinstance(found, Pending):
            assert not answers, "the callback must run once"
            return found  # type: ignore[return-value]
        self.loop.run_until(lambda: answers)
        (answer,) = answers
        if isinstance(answer, BrokerError):
            raise answer
        return answer

    def read_once(
        self, partition: FilePartition, offset: int, bytes_max: int = 1 << 20, offset_end: int | None = None
    ) -> Read:
        """Read once, cold or warm."""
        return self.answered(lambda then: partition.read(offset, bytes_max=bytes_max, then=then, offset_end=offset_end))


def abandon(log: FileLog) -> None:
    """Close a log's files and threads without flushing. Written data stays in the page cache, as after ``kill -9``."""
    log._sealer.stop()
    log._flusher.stop()
    log._reader_worker.stop()
    log._journal.close()
    log._unlock()


def batch_of(values: list[bytes]) -> bytearray:
    """Return a batch without offsets."""
    return from_records([Record(value) for value in values])


def records_of(found: Read) -> list[Record]:
    """Return the records of a read, in order."""
    records: list[Record] = []
    for chunk in found.chunks:
        at = 0
        while at < len(chunk):
            length = read_header(chunk, at).length
            records += to_records(expand_body(chunk[at : at + length]))
            at += length
    return records


def expecting(reported: list[int]) -> Completion[int]:
    """Return a ``done`` callback that fails on errors."""

    def done(offset: int | BrokerError) -> None:
        assert not isinstance(offset, BrokerError), offset
        reported.append(offset)

    return done
