"""Assign partitions to members of a group (concepts: groups#what-a-group-is).

* The result depends only on the members' ids and the number of partitions, not on the order of members.
* Every partition has exactly one owner if there is a member.
* The numbers of partitions of any two members differ by at most one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import assert_never

from polywire.types import Assignor


def assign(members: Iterable[str], partition_count: int, assignor: Assignor) -> dict[str, range]:
    """Return the partitions of each member."""
    ids = ordered(members)
    return {key.decode(): share(at, len(ids), partition_count, assignor) for at, key in enumerate(ids)}


def share(index: int, member_count: int, partition_count: int, assignor: Assignor) -> range:
    """Return the partitions of one member, ascending, from its index in the order of ids.

    The result is a range, because a list for every member would take gigabytes at the broker's limits. ROUND_ROBIN
    gives partition p to member p mod n. RANGE gives contiguous blocks, and the first P mod n blocks have one more
    partition.
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
    """Return the index, in the order of ids, of the member whose ``share`` contains a partition."""
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
    """Return the ids as bytes, sorted."""
    return sorted({ordered_by(member) for member in members})


def ordered_by(member: str) -> bytes:
    """Return the sort key of an id; it also exists for invalid text, which no member has as its id."""
    return member.encode("utf-8", "surrogatepass")
