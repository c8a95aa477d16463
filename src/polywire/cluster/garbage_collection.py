"""Find and delete objects of a shard that it no longer needs, a few at a time (decision 0124).

* A thread collects while this broker leads: soon after it takes over, then daily.
* The procedures are Python generators that yield requests, as in ``fencing``.
* An object is deleted only after a grace period, so readers that received its name can finish.
* A deposed leader may continue to collect, because unneeded objects never become needed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

import structlog

from polywire.cluster.fencing import (
    READ_AT_ONCE,
    Delete,
    DeleteBlobs,
    ListBlobs,
    ListJournal,
    Pause,
    ReadFloor,
    ReadHeads,
    Steps,
)
from polywire.cluster.journal_chain import START_BYTES_MAX, start_of
from polywire.cluster.journal_objects import JournalObjects
from polywire.errors import BrokerError
from polywire.log.base import Loop
from polywire.log.journal.group import read_group
from polywire.log.segments.segment_set import SEGMENTS, SNAPSHOTS
from polywire.log.worker import MakeWorker

DELETED_PER_S: Final = 20  # far below the thousands of requests per second that a store handles
# journal objects, and as many blobs, in one run, to limit memory; the next run deletes the rest
SWEPT_MAX: Final = 10_000
HEAD_BYTES: Final = START_BYTES_MAX + 1
SWEEP_INTERVAL_S: Final = 24 * 3600.0  # each run lists all objects and reads every start below the floor
logger: Final = structlog.get_logger("polywire.cluster")


def sweep(seed: int, start: int, needed: Collection[str], grace_s: float) -> Steps[int]:
    """Delete unneeded objects of older leaders and of failed requests. Return their number.

    Args:
        seed: seed of the journal.
        start: number of the leader's start.
        needed: segments and snapshots that the log refers to, or has written and will refer to.
        grace_s: seconds between finding an object and deleting it.
    """
    blobs: list[str] = []
    for directory in (SEGMENTS, SNAPSHOTS):
        found = yield ListBlobs(directory)
        blobs += _unneeded(directory, found, needed, start)
    numbers = yield from _below_the_floor(seed)
    del blobs[SWEPT_MAX:], numbers[SWEPT_MAX:]
    if blobs or numbers:
        yield Pause(grace_s)
    for at in range(0, len(numbers), DELETED_PER_S):
        yield Delete(numbers[at : at + DELETED_PER_S])
        yield Pause(1)
    for at in range(0, len(blobs), DELETED_PER_S):
        yield DeleteBlobs(blobs[at : at + DELETED_PER_S])
        yield Pause(1)
    return len(blobs) + len(numbers)


def _unneeded(directory: str, found: Sequence[str], needed: Collection[str], start: int) -> list[str]:
    """Return segments or snapshots to which the journal does not refer and never will.

    They belong to an older start, or have a lower number than the newest needed one, because numbers are used in order.
    """
    own = f"{directory}/{start:08x}"
    end = max([own, *(name for name in needed if name.startswith(f"{directory}/"))])
    return [name for name in found if name < end and name not in needed]


def _below_the_floor(seed: int) -> Steps[list[int]]:
    """Return the numbers of journal objects below the first needed one that can be deleted.

    Lost or late requests left them. An object with a broker's start is never returned. Neither is one that cannot be
    verified, because it may have a start.
    """
    floor, _ = yield ReadFloor()
    found = yield ListJournal()
    below = sorted(number for number in found if number < floor.number)
    litter: list[int] = []
    for at in range(0, len(below), READ_AT_ONCE):
        part = below[at : at + READ_AT_ONCE]
        heads = yield ReadHeads(part, HEAD_BYTES)
        litter += [
            number for number, head in zip(part, heads, strict=True) if head is not None and _is_no_start(head, seed)
        ]
    return litter


def _is_no_start(head: bytes, seed: int) -> bool:
    if len(head) > START_BYTES_MAX:
        return True
    return read_group(head, 0, seed) is not None and start_of(head, seed) == 0


class GarbageCollector:
    """Runs garbage collections in a thread. None begins after ``stop``.

    Args:
        needed: called on the event loop. Returns the names of needed segments and snapshots, see ``sweep``.
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
        """Stop. The bucket's requests and pauses must have been cancelled before."""
        self._stopped = True
        self._worker.stop()
