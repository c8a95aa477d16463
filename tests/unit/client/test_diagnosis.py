"""Why a group is behind."""

from __future__ import annotations

from collections.abc import Mapping

from polywire.client.base import PartitionBounds
from polywire.client.diagnosis import Observation, reasons
from polywire.client.listings import GroupInfo, MemberInfo


def observed(
    at_s: float,
    positions: dict[int, int],
    ends: list[int],
    *,
    members: Mapping[str, tuple[int, ...]] | None = None,
    firsts: dict[int, int] | None = None,
    idle_ms: int = 0,
) -> Observation:
    infos = tuple(MemberInfo(name, "polywire", idle_ms, numbers) for name, numbers in (members or {}).items())
    bounds = [PartitionBounds(n, n + 1, 1, (firsts or {}).get(n, 0), end) for n, end in enumerate(ends)]
    return Observation(at_s, GroupInfo("orders", "billing", 1, None, infos, positions), bounds)


def found(before: Observation, after: Observation) -> str:
    return "\n".join(reasons(before, after))


MEMBERS = {"m0": (0,), "m1": (1,)}


def test_a_group_without_members() -> None:
    state = observed(0, {0: 5, 1: 5}, [10, 10])
    assert "no members" in found(state, state)
    assert "10 records wait" in found(state, state)


def test_a_group_that_has_read_everything() -> None:
    state = observed(0, {0: 10, 1: 10}, [10, 10], members=MEMBERS)
    assert found(state, state) == "The group billing is not behind: it has read everything."


def test_a_group_without_offsets() -> None:
    state = observed(0, {}, [10, 10], members=MEMBERS)
    assert found(state, state) == "The group billing has not committed an offset, so its lag is unknown."


def test_a_member_that_hangs_is_named() -> None:
    before = observed(0, {0: 5, 1: 5}, [10, 10], members=MEMBERS)
    after = observed(3, {0: 5, 1: 9}, [10, 10], members=MEMBERS)
    assert "No offset was committed for 3 s in partitions with records to read: 0 (m0)." in found(before, after)


def test_producers_are_faster() -> None:
    before = observed(0, {0: 0, 1: 0}, [1000, 1000], members=MEMBERS)
    after = observed(2, {0: 100, 1: 100}, [1500, 1500], members=MEMBERS)
    assert "500 records/s are produced and 100 are read. Add members, up to 2" in found(before, after)


def test_it_catches_up() -> None:
    before = observed(0, {0: 0, 1: 0}, [1000, 1000], members=MEMBERS)
    after = observed(1, {0: 100, 1: 100}, [1000, 1000], members=MEMBERS)
    assert "about 9 s until it has read everything" in found(before, after)


def test_one_partition_has_the_lag() -> None:
    before = observed(0, {0: 0, 1: 90}, [1000, 100], members=MEMBERS)
    after = observed(1, {0: 10, 1: 95}, [1000, 100], members=MEMBERS)
    assert "Partition 0 has 990 of the 995 records" in found(before, after)


def test_retention_and_members() -> None:
    state = observed(
        0,
        {0: 5, 1: 5},
        [100, 5],
        firsts={0: 50},
        members={"m0": (0,), "m1": (), "m2": ()},
        idle_ms=9_000,
    )
    text = found(state, state)
    assert "Retention has removed 45 records of partition 0" in text
    assert "Partitions without a member: 1." in text
    assert "1 members have no partition" in text
    assert "silent for 5 s: m0, m1, m2" in text
