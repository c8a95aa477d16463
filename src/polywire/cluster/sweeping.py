"""Which objects of a shard nobody needs any more, and deleting them, some at a time (decision 0070).

Promises: procedures of requests, as in ``protocol``. What is deleted nobody needed before the grace began: who had it named to them has as
long to read it. A leader that was deposed does no harm with it, for what nobody needed when it looked nobody ever will. Must not know: how
requests are carried out, what a blob holds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from polywire.cluster.chain import START_BYTES_MAX, start_of
from polywire.cluster.protocol import (
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
from polywire.log.journal.group import read_group
from polywire.log.segments.segment_set import SEGMENTS, SNAPSHOTS

DELETED_PER_S: Final = 20  # of the thousands of requests that a store takes in a second, few: others serve meanwhile
SWEPT_MAX: Final = (
    10_000  # journal objects, and as many blobs, of one sweep: their names are held. The next one goes on
)
HEAD_BYTES: Final = START_BYTES_MAX + 1


def sweep(seed: int, start: int, needed: Collection[str], grace_s: float) -> Steps[int]:
    """Delete what nobody needs and older leaders, or failed requests, have left; returns how many objects. ``start``: the leader's own,
    ``needed``: the segments and snapshots that its log names or has written to be named, at one moment."""
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
    """Blobs that no group names, or will: names are used in order, so what is older than the newest that is needed, or of an older start,
    is not on its way to be named."""
    own = f"{directory}/{start:08x}"
    end = max([own, *(name for name in needed if name.startswith(f"{directory}/"))])
    return [name for name in found if name < end and name not in needed]


def _below_the_floor(seed: int) -> Steps[list[int]]:
    """Journal objects that a request left which was lost, or late: all but starts. One that does not verify stays, for it may have been a
    start."""
    floor, _ = yield ReadFloor()
    found = yield ListJournal()
    below = sorted(number for number in found if number < floor.number)
    litter: list[int] = []
    for at in range(0, len(below), READ_AT_ONCE):
        part = below[at : at + READ_AT_ONCE]
        heads = yield ReadHeads(part, HEAD_BYTES)
        litter += [
            number for number, head in zip(part, heads, strict=True) if head is not None and _is_litter(head, seed)
        ]
    return litter


def _is_litter(head: bytes, seed: int) -> bool:
    if len(head) > START_BYTES_MAX:
        return True
    return read_group(head, 0, seed) is not None and start_of(head, seed) == 0
