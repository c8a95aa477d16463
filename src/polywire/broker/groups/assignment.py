"""Who reads which partition: a pure function of the members' ids and the number of partitions (concepts: groups#what-a-group-is).

Promises: every partition has exactly one owner when there is a member, shares differ by at most one partition, and
equal input gives equal output whatever the order of members. Must not know: generations, liveness, wires.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import assert_never

from polywire.types import Assignor


def assign(members: Iterable[str], partition_count: int, assignor: Assignor) -> dict[str, range]:
    """Partitions of each member."""
    ids = ordered(members)
    return {key.decode(): share(at, len(ids), partition_count, assignor) for at, key in enumerate(ids)}


def share(index: int, member_count: int, partition_count: int, assignor: Assignor) -> range:
    """Partitions of one member, ascending, by its place in the order of ids. A range, because members × partitions numbers would be
    gigabytes at the broker's limits.

    ROUND_ROBIN gives partition p to member p mod n, RANGE gives contiguous blocks of which the first P mod n have one more.
    """
    match assignor:
        case Assignor.ROUND_ROBIN:
            return range(index, partition_count, member_count)
        case Assignor.RANGE:
            each, extra = divmod(partition_count, member_count)
            start = index * each + min(index, extra)
            return range(start, start + each + (index < extra))
        case _:
            assert_never(assignor)


def index_of(partition: int, member_count: int, partition_count: int, assignor: Assignor) -> int:
    """The member, by its place in the order of ids, in whose ``share`` a partition is."""
    match assignor:
        case Assignor.ROUND_ROBIN:
            return partition % member_count
        case Assignor.RANGE:
            each, extra = divmod(partition_count, member_count)
            longer = extra * (each + 1)
            return partition // (each + 1) if partition < longer else extra + (partition - longer) // each
        case _:
            assert_never(assignor)


def ordered(members: Iterable[str]) -> Sequence[bytes]:
    """The order of ids: by their bytes."""
    return sorted({ordered_by(member) for member in members})


def ordered_by(member: str) -> bytes:
    """What an id is ordered by; also of one that is no valid text, which no member has."""
    return member.encode("utf-8", "surrogatepass")
