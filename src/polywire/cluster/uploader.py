"""Upload journal writes (groups) to the bucket, one object after the other (decision 0124).

Adjacent groups are combined into one object. A group is durable when its object is stored, and this broker is known to
have written it. The event loop never waits for the network.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from polywire.clock import Clock
from polywire.cluster import fencing
from polywire.cluster.journal_floor import Floor
from polywire.cluster.journal_objects import JournalObjects
from polywire.errors import BrokerError, ErrorCode, NotOwner, Unavailable
from polywire.log.base import Completion, Loop
from polywire.log.journal.slots import FileJournal, Slot
from polywire.log.journal.syncer import MakeSyncer
from polywire.log.worker import MakeWorker

OBJECT_BYTES: Final = 8 * 1024 * 1024  # groups of this total size are uploaded at once
OBJECT_BYTES_MAX: Final = (
    16 * 1024 * 1024
)  # groups that arrive during an upload are combined up to this size, which a single group can also have
PUT_INTERVAL_S: Final = 0.1  # seconds between the starts of two uploads, because each request costs money
OBJECTS_MAX: Final = 1000  # a slot is sealed when it has this many objects: recovery reads them in a second
STEP_DOWN_S: Final = 30.0  # seconds for one object; a leader that cannot write for so long steps down
FINISH_S: Final = 10.0  # seconds for the last objects when the broker stops


@dataclass(slots=True)
class _Unsent:
    """Journal writes in bytes [start, stop) of a local journal file that are not uploaded yet.

    Attributes:
        first: sequence number of the first one.
        last: sequence number of the last one.
        begun_at: time at which the first one was written.
    """

    slot: Slot
    start: int
    stop: int
    first: int
    last: int
    begun_at: float

    @property
    def size(self) -> int:
        return self.stop - self.start


class Uploader:
    """Makes journal writes durable by uploading them as objects, one at a time. Implements ``Syncer``.

    Args:
        sequence: sequence number of the write with which this broker claimed leadership. It and all earlier ones are
            stored.
    """

    is_local: Final = False

    def __init__(
        self,
        journal: FileJournal,
        bucket: JournalObjects,
        claim: fencing.Claim,
        loop: Loop,
        clock: Clock,
        make_worker: MakeWorker,
        *,
        sequence: int,
        advanced: Callable[[], None],
        failed: Callable[[BrokerError], None],
    ) -> None:
        self._journal = journal
        self._bucket = bucket
        self._loop = loop
        self._clock = clock
        self._advanced = advanced
        self._failed = failed
        self._start = claim.chain.start + 1
        self._sender = make_worker("bucket", loop)
        self._sweeper = make_worker("floor", loop)
        self._starts = {*claim.chain.starts, claim.number}
        self._number = claim.number
        # sequence of the first group of each object since the floor; ``_numbers`` has the objects' numbers
        self._firsts: list[int] = []
        self._numbers: list[int] = []
        for group in claim.chain.groups:
            self._note(group.sequence, group.number)
        self._note(sequence, claim.number)
        self._unsent: deque[_Unsent] = deque()
        self._waiting: deque[tuple[int, Completion[None]]] = deque()
        self._running: _Unsent | None = None
        self._timer = False
        self._begun_at = -PUT_INTERVAL_S
        self._over = False
        self.synced = self.written = sequence
        self.unsynced_bytes = 0

    def _note(self, first: int, number: int) -> None:
        """Record that journal object ``number``, whose first journal write is ``first``, is stored."""
        if not self._numbers or self._numbers[-1] != number:
            self._firsts.append(first)
            self._numbers.append(number)

    @property
    def start(self) -> int:
        """Number of the start under which the broker leads."""
        return self._start

    @property
    def objects(self) -> int:
        """Number of journal objects that the next start has to read."""
        return len(self._numbers)

    @property
    def unsynced_s(self) -> float:
        """Age in seconds of the oldest journal write that is not in the bucket, 0.0 if there is none."""
        oldest = self._running or (self._unsent[0] if self._unsent else None)
        return 0.0 if oldest is None else max(self._clock.monotonic() - oldest.begun_at, 0.0)

    @property
    def is_long(self) -> bool:
        return len(self._numbers) > OBJECTS_MAX

    def wrote(self, sequence: int, position: int, size: int) -> None:
        slot = self._journal.current
        assert slot is not None, "a group was written to it"
        last = self._unsent[-1] if self._unsent else None
        follows = last is not None and last.slot is slot and last.stop == position
        if last is not None and follows and last.size + size <= OBJECT_BYTES_MAX:
            last.stop, last.last = position + size, sequence
        else:
            self._unsent.append(_Unsent(slot, position, position + size, sequence, sequence, self._clock.monotonic()))
        self.written = sequence
        self.unsynced_bytes += size
        self._send_soon()

    def wait(self, sequence: int, callback: Completion[None]) -> None:
        if sequence > self.synced:
            self._waiting.append((sequence, callback))
        # callbacks are being called: queue this one after them
        elif self._waiting and self._waiting[0][0] <= self.synced:
            due = [waiting for waiting in self._waiting if waiting[0] <= self.synced]
            self._waiting.insert(len(due), (sequence, callback))
        else:
            callback(None)

    def spare(self, slot: Slot) -> None:
        """Do nothing: recovery needs every journal object that was not deleted."""

    def sync_last(self, slot: Slot, done: Callable[[], None]) -> None:
        raise AssertionError("a group in the bucket is valid only with all earlier ones")

    def sealed(self, sequence: int, naming: int) -> None:
        floor = Floor(self._number_of(sequence + 1), self._number_of(naming), self._start, sequence)
        count = bisect_right(self._numbers, floor.number) - 1
        del self._firsts[:count], self._numbers[:count]
        self._sweeper.run(partial(self._bucket.run, fencing.raise_floor(floor, frozenset(self._starts))), _ignore)

    def _number_of(self, sequence: int) -> int:
        return self._numbers[bisect_right(self._firsts, sequence) - 1]

    # Sending

    def _send_soon(self) -> None:
        """Schedule an upload of the oldest journal writes, at once if they fill an object or nothing was sent recently."""
        if self._running is not None or self._timer or not self._unsent or self._over:
            return
        wait = self._begun_at + PUT_INTERVAL_S - self._clock.monotonic()
        full = self._unsent[0].size >= OBJECT_BYTES or len(self._unsent) > 1
        self._timer = True
        # in a later pass of the loop, because one pass may write many groups
        self._loop.call_later(0.0 if full else max(wait, 0.0), self._send)

    def _send(self) -> None:
        self._timer = False
        if self._running is not None or not self._unsent or self._over:
            return
        self._running = unsent = self._unsent.popleft()
        self._begun_at = self._clock.monotonic()
        self._number += 1
        self._sender.run(partial(self._bucket.run, self._steps(unsent)), self._settled)
        self._loop.call_later(STEP_DOWN_S, self._check_duration, self._number)

    def _check_duration(self, number: int) -> None:
        """Stop being the leader if the upload of this object takes longer than ``STEP_DOWN_S``.

        Another broker may be able to reach the bucket. If the object arrives later, the next leader reads it.
        """
        if self._running is not None and self._number == number and not self._over:
            limit = f"object={number:016x} limit_s={STEP_DOWN_S:g}"
            self._failed(
                Unavailable(ErrorCode.REPLICATION_TIMEOUT, f"the bucket accepted no writes for too long {limit}")
            )

    def _steps(self, unsent: _Unsent) -> fencing.Steps[bool]:
        return fencing.settle(self._number, unsent.slot.view[unsent.start : unsent.stop])

    def _settled(self, mine: bool | BrokerError) -> None:
        if self._over:
            return
        if isinstance(mine, BrokerError):
            self._failed(mine)
        elif not mine:
            self._failed(_deposed())
        else:
            self._stored()

    def _stored(self) -> None:
        """Record that the current object is stored, notify waiting callers, and schedule the next upload."""
        assert self._running is not None, "one was sent"
        stored, self._running = self._running, None
        self._note(stored.first, self._number)
        self.synced = stored.last
        self.unsynced_bytes -= stored.size
        while self._waiting and self._waiting[0][0] <= self.synced:
            self._waiting.popleft()[1](None)
        self._advanced()
        self._send_soon()

    # Ends

    def finish(self) -> None:
        """Upload the remaining journal writes, in this thread. Raises NotOwner or Unavailable."""
        self._over = True
        if self._running is not None:
            self._unsent.appendleft(self._running)
            self._number -= 1  # sending the same bytes again is harmless
            self._running = None
        self._bucket.finish_within(FINISH_S)
        self._sender.stop()
        try:
            while self._unsent:
                self._running = unsent = self._unsent.popleft()
                self._number += 1
                if not self._bucket.run(self._steps(unsent)):
                    raise _deposed()
                self._stored()
        except Unavailable as error:
            raise Unavailable(ErrorCode.REPLICATION_TIMEOUT, error.message) from error

    def abandon(self) -> Sequence[Completion[None]]:
        self._over = True
        waiting = [callback for _, callback in self._waiting]
        self._waiting.clear()
        self._unsent.clear()
        return waiting

    def stop(self) -> None:
        self._over = True
        self._bucket.cancel()
        self._sender.stop()
        self._sweeper.stop()


def uploading(
    journal: FileJournal,
    bucket: JournalObjects,
    claim: fencing.Claim,
    clock: Clock,
    make_worker: MakeWorker,
    *,
    sequence: int,
    made: Callable[[Uploader], None],
) -> MakeSyncer:
    """Return a function that creates uploaders, which continue the journal after this claim.

    Args:
        sequence: sequence number of the journal write with the claim.
        made: called with each uploader.
    """

    def make(
        loop: Loop, advanced: Callable[[], None], failed: Callable[[BrokerError], None], _: Callable[[], bool]
    ) -> Uploader:
        uploader = Uploader(
            journal, bucket, claim, loop, clock, make_worker, sequence=sequence, advanced=advanced, failed=failed
        )
        made(uploader)
        return uploader

    return make


def _deposed() -> NotOwner:
    return NotOwner(ErrorCode.NOT_OWNER, "another broker is the leader of this shard")


def _ignore(_: BrokerError | None) -> None:
    pass
