"""Claim the leadership of a shard, and read and trim its journal (decision 0124).

The order of the requests rules out that two brokers lead. Each procedure is a Python generator that yields requests to
the bucket one by one, and receives their responses. This module uses no clock, thread or bucket, so a simulation can
try any order of events. Comments such as "I2" refer to rules of the decision, which prevent two leaders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, TypeVar

from polywire.cluster.journal_chain import JournalChain
from polywire.cluster.journal_floor import Floor
from polywire.errors import Corrupt, ErrorCode

READ_AT_ONCE: Final = 64
# objects of a long journal that are read together; reads beyond the end of the journal are wasted
READ_AT_ONCE_MAX: Final = 256
PAUSE_FIRST_S: Final = 0.005
PAUSE_MAX_S: Final = 0.2

_Result = TypeVar("_Result")


class Outcome(Enum):
    """Outcome of a request to create an object in the bucket.

    EXISTS is not final, because stores report it while another request is pending. UNKNOWN means that the write may
    have happened, or may still happen.
    """

    DONE = auto()
    EXISTS = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class Create:
    """Request to create a journal object. The response is an ``Outcome``."""

    number: int
    content: Any


@dataclass(frozen=True, slots=True)
class Read:
    """Request to read journal objects. The response has the bytes of each object, or None if it does not exist."""

    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReadFloor:
    """Request to read the floor: the number of the first journal object that is needed.

    The response is the floor and its tag, or the initial floor and an empty tag if there is none.
    """


@dataclass(frozen=True, slots=True)
class MoveFloor:
    """Request to replace the floor if it still has this tag. The response is an ``Outcome``."""

    floor: Floor
    tag: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Request to delete journal objects. There is no response."""

    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class Pause:
    """Request to wait. There is no response."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ReadHeads:
    """Request to read the first ``size`` bytes of journal objects.

    The response has the bytes of each object, or None if it does not exist.
    """

    numbers: Sequence[int]
    size: int


@dataclass(frozen=True, slots=True)
class ListJournal:
    """Request to list the journal. The response has the numbers of its objects, and may be outdated."""


@dataclass(frozen=True, slots=True)
class ListBlobs:
    """Request to list segments or snapshots. The response has their names, and may be outdated."""

    directory: str


@dataclass(frozen=True, slots=True)
class DeleteBlobs:
    """Request to delete segments and snapshots. There is no response."""

    names: Sequence[str]


Request = Create | Read | ReadFloor | MoveFloor | Delete | Pause | ReadHeads | ListJournal | ListBlobs | DeleteBlobs
Steps = Generator[Request, Any, _Result]
"""A procedure. Its executor repeats failed reads, so that every read is answered."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A successful claim to be the leader of a shard.

    Attributes:
        chain: journal before the claim.
        number: number of the journal object with the claim.
        content: content of that object, the first journal write of the new leader.
    """

    chain: JournalChain
    number: int
    content: bytes


def settle(number: int, content: Any) -> Steps[bool]:
    """Create a journal object. Return whether this broker wrote it, even if a response was lost.

    If another broker wrote it, that one is the leader, and this one must not write again. I2: the bytes of a number
    never change once they were sent, so a request that arrives hours late is harmless. I3: there is one leader per
    number.
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


def read_journal(seed: int) -> Steps[JournalChain]:
    """Read the journal from the floor (the first needed object) up to the first free number. Raises Corrupt.

    R: an object is valid only if the floor, read after the object, is not above its number. Below the floor there may
    be any object, for example the start of a broker that was suspended, and it may even fit the journal.
    """
    while True:
        floor, _ = yield ReadFloor()
        chain = JournalChain(seed, floor)
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


def _read_to_end(chain: JournalChain) -> Steps[None]:
    """Add journal objects to the chain up to the first unused number. Raises Corrupt."""
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
        (again,) = yield Read((absent,))  # the current leader may have written it meanwhile
        if again is None:
            raise Corrupt(ErrorCode.CORRUPT, f"a journal object is missing before later ones object={absent:016x}")


def claim(seed: int, start_object: Callable[[JournalChain], bytes]) -> Steps[Claim | None]:
    """Read the journal, then claim leadership by creating the object with the first unused number.

    Returns None if another broker was first. I5: a claimant has read all lower numbers. I6: a claim is valid only if
    the floor (the first needed object), read after the claim, is not above its number. Otherwise the number may have
    been used and deleted while the claimant was suspended. Raises Corrupt.

    Args:
        seed: seed of the journal.
        start_object: returns the content of the object with the claim.
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
    """Return whether no other broker has claimed the shard after this claim.

    If another broker has, objects that this broker cannot find may have been deleted. They are not damage.
    """
    floor, _ = yield ReadFloor()
    (after,) = yield Read((claim.number + 1,))
    return floor.number <= claim.number and after is None


def raise_floor(floor: Floor, starts: Collection[int]) -> Steps[None]:
    """Move the floor (the first needed object) up, then delete journal objects below it.

    The journal entry that permits the new floor must be stored. I8: only objects that a stored entry has made
    unnecessary are deleted. Objects with a start are never deleted, so a broker that was suspended during a change of
    leaders finds the next number used, however late it resumes.

    Args:
        starts: numbers of the objects with a start.
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
