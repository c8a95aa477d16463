"""What a broker asks of a bucket to lead a shard, in which order (decision 0058).

Promises: every procedure is a generator of requests, each answered before the next: no clock, no thread, no bucket in here, so that one
number replays any order of events. The rules that keep two leaders apart are marked with their names. Must not know: how requests are
carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, TypeVar

from polywire.cluster.chain import ObjectChain
from polywire.cluster.floor import Floor
from polywire.errors import Corrupt, ErrorCode

READ_AT_ONCE: Final = 64
READ_AT_ONCE_MAX: Final = 256  # of a journal that proves to be long: what is not there yet is asked for in vain
PAUSE_FIRST_S: Final = 0.005
PAUSE_MAX_S: Final = 0.2

_Result = TypeVar("_Result")


class Outcome(Enum):
    """What became of a write. EXISTS is not final: a store says so while another request is under way. UNKNOWN: anything may have, or may
    still."""

    DONE = auto()
    EXISTS = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Create:
    """Store a journal object of which there is none. Answer: Outcome."""

    number: int
    content: Any


@dataclass(frozen=True, slots=True)
class Read:
    """Answer: for each number the object's bytes, or None."""

    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReadFloor:
    """Answer: the floor and its tag, nothing where there is none."""


@dataclass(frozen=True, slots=True)
class MoveFloor:
    """Replace the floor that had this tag. Answer: Outcome."""

    floor: Floor
    tag: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete journal objects. Answer: nothing."""

    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait. Answer: nothing."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ReadHeads:
    """Answer: for each number the object's first bytes, at most ``size``, or None."""

    numbers: Sequence[int]
    size: int


@dataclass(frozen=True, slots=True)
class ListJournal:
    """Answer: numbers of the journal's objects, perhaps as they were a while ago."""


@dataclass(frozen=True, slots=True)
class ListBlobs:
    """Answer: names of the blobs in a directory, perhaps as they were a while ago."""

    directory: str


@dataclass(frozen=True, slots=True)
class DeleteBlobs:
    """Delete segments and snapshots. Answer: nothing."""

    names: Sequence[str]


Request = Create | Read | ReadFloor | MoveFloor | Delete | Pause | ReadHeads | ListJournal | ListBlobs | DeleteBlobs
Steps = Generator[Request, Any, _Result]
"""Reads that fail are repeated by whoever carries them out: they have no answer but what was read."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A shard that was taken over: all that lies below object ``number``, which holds ``content``, the group of its start."""

    chain: ObjectChain
    number: int
    content: bytes


def settle(number: int, content: Any) -> Steps[bool]:
    """Put an object of mine; whether it is there. False: somebody else leads, and nothing may be put under this start again.

    I2: the bytes of a number never change once they were sent, so a request that arrives hours late does no harm. I3: one leader per number.
    """
    pause = PAUSE_FIRST_S
    while True:
        outcome = yield Create(number, content)
        if outcome is Outcome.DONE:
            return True
        if outcome is Outcome.EXISTS:
            (found,) = yield Read((number,))
            if found is not None:
                return bool(found == content)
            floor, _ = yield ReadFloor()
            if floor.number > number:
                return False
        yield Pause(pause)
        pause = min(2 * pause, PAUSE_MAX_S)


def read_journal(seed: int) -> Steps[ObjectChain]:
    """The chain from the floor on, up to the first number that is free. Raises Corrupt.

    R: an object counts only if a floor read after it is not above its number. Below the floor anything may lie, for instance the start of
    somebody who slept, and it may even fit the chain.
    """
    while True:
        floor, _ = yield ReadFloor()
        chain = ObjectChain(seed, floor)
        broken: Corrupt | None = None
        try:
            yield from _read_to_end(chain)
            chain.naming()
        except Corrupt as error:
            broken = error
        after, _ = yield ReadFloor()
        if after.number != floor.number:
            continue
        if broken is not None:
            raise broken
        return chain


def _read_to_end(chain: ObjectChain) -> Steps[None]:
    """Add objects until a number is absent. Raises Corrupt."""
    count = READ_AT_ONCE
    while True:
        first = chain.next_number
        found: list[bytes | None] = list((yield Read(range(first, first + count))))
        for content in found:
            if content is None:
                break
            chain.add(content)
        else:
            count = min(2 * count, READ_AT_ONCE_MAX)
            continue
        absent = chain.next_number
        if not any(content is not None for content in found[absent - first :]):
            return
        (again,) = yield Read((absent,))  # a living leader may have written it meanwhile
        if again is None:
            raise Corrupt(
                ErrorCode.CORRUPT, f"an object of the journal is missing, later ones are there object={absent:016x}"
            )


def claim(seed: int, start_object: Callable[[ObjectChain], bytes]) -> Steps[Claim | None]:
    """Read everything, then claim the first free number with the group of a new start; None when somebody else was quicker. Raises Corrupt.

    I5: who claims a number has read all below. I6: a claim counts only if a floor read after it is not above it: the number may have been
    used and deleted while the claimant slept.
    """
    chain = yield from read_journal(seed)
    number = chain.next_number
    content = start_object(chain)
    if not (yield from settle(number, content)):
        return None
    floor, _ = yield ReadFloor()
    if floor.number > number:
        return None
    return Claim(chain, number, content)


def is_last(claim: Claim) -> Steps[bool]:
    """Whether nobody had claimed the shard since, before the first object of this start. Who slept finds that what the journal named then has
    been deleted, and must not take it for damage."""
    floor, _ = yield ReadFloor()
    (after,) = yield Read((claim.number + 1,))
    return floor.number <= claim.number and after is None


def raise_floor(floor: Floor, starts: Collection[int]) -> Steps[None]:
    """Move the floor, then delete what lies below: call it once the group that makes it true is stored. ``starts``: numbers of objects that
    hold the group of a start.

    I8: nothing is deleted that a stored group has not made unneeded. Starts stay for ever: whoever slept through a change of leaders finds
    the next number taken, whenever that is.
    """
    pause = PAUSE_FIRST_S
    while True:
        seen, tag = yield ReadFloor()
        if seen.number >= floor.number:
            return
        outcome = yield MoveFloor(floor, tag)
        if outcome is Outcome.DONE:
            yield Delete([number for number in range(seen.number, floor.number) if number not in starts])
            return
        yield Pause(pause)
        pause = min(2 * pause, PAUSE_MAX_S)
