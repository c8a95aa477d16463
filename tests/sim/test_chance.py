"""Random numbers follow from a seed, and those of one seed are independent of another's."""

from __future__ import annotations

from tests.sim.chance import Chance

COUNT = 20_000  # numbers of a run


def numbers(seed: int) -> list[int]:
    chance = Chance(seed)
    return [chance.number() for _ in range(COUNT)]


def test_nearby_seeds_share_no_numbers() -> None:
    found = [numbers(seed) for seed in range(8)]
    assert len({number for sequence in found for number in sequence}) == len(found) * COUNT


def test_a_seed_always_gives_the_same_numbers() -> None:
    assert [hex(number) for number in numbers(7)[:2]] == ["0x6a9216023fd7dc5d", "0x732e5af435f16013"]
