"""Who reads which partition: a pure function of the members' ids and the number of partitions (FLUX dossier §10).

Promises: every partition has exactly one owner when there is a member, shares differ by at most one partition, and
equal input gives equal output whatever the order of members. Must not know: generations, liveness, wires.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from polywire.types import Assignor


def assign(members: Iterable[str], partition_count: int, assignor: Assignor) -> dict[str, range]:
    """Partitions of each member, ascending. A range, because members × partitions numbers would be gigabytes at the broker's limits.

    ROUND_ROBIN gives partition p to member p mod n, RANGE gives contiguous blocks of which the first P mod n have one more.
    """
    ordered = sorted(set(members), key=str.encode)
    if not ordered:
        return {}
    count = len(ordered)
    match assignor:
        case Assignor.ROUND_ROBIN:
            return {member: range(index, partition_count, count) for index, member in enumerate(ordered)}
        case Assignor.RANGE:
            share, extra = divmod(partition_count, count)
            starts = [index * share + min(index, extra) for index in range(count + 1)]
            return {member: range(starts[index], starts[index + 1]) for index, member in enumerate(ordered)}
        case _:
            assert_never(assignor)
