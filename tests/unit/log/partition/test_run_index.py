"""The packed index of sealed runs behaves like a list and is small."""

from __future__ import annotations

import random
from array import array

import pytest

from polywire.log.partition.run_index import BLOCK_ENTRIES, Entry, RunIndex, assign_runs
from polywire.log.segments.format import RUN


def entries(count: int, seed: int = 1, step: int = 65) -> list[Entry]:
    chance = random.Random(seed)
    offset, address, time_us = chance.randrange(2**40), chance.randrange(2**45), 1_700_000_000_000_000
    made = []
    for number in range(count):
        made.append((offset, 0, chance.randrange(1, 200 * step), number * 3, address, time_us))
        offset += chance.randrange(1, 2 * step)
        address += chance.randrange(1, 200 * step)
        time_us += chance.randrange(0, 10_000_000)
    return made


def index_of(wanted: list[Entry]) -> RunIndex:
    made = RunIndex()
    for offset, _, size, place, address, time_us in wanted:
        made.append(offset, size, place, address, time_us)
    return made


def content(index: RunIndex) -> list[Entry]:
    return [index.entry(number) for number in range(len(index))]


def last_at(wanted: list[Entry], field: int, key: int) -> int:
    return sum(entry[field] <= key for entry in wanted) - 1


def check(index: RunIndex, wanted: list[Entry]) -> None:
    assert content(index) == wanted
    for offset, _, _, _, address, time_us in (*wanted[:3], *wanted[-3:], *wanted[:: max(len(wanted) // 7, 1)]):
        for near in (-1, 0, 1):
            assert index.find_offset(offset + near) == last_at(wanted, 0, offset + near)
            assert index.find_address(address + near) == last_at(wanted, 4, address + near)
            assert index.find_time(time_us + near) == last_at(wanted, 5, time_us + near - 1) + 1


@pytest.mark.parametrize("count", [0, 1, BLOCK_ENTRIES - 1, BLOCK_ENTRIES, BLOCK_ENTRIES + 1, 5 * BLOCK_ENTRIES + 7])
def test_entries_are_found_as_in_a_list(count: int) -> None:
    wanted = entries(count)
    check(index_of(wanted), wanted)


def test_extreme_numbers_are_stored() -> None:
    wanted: list[Entry] = [
        (number * (2**63 // 100), 0, 2**40 * number, 2**31 - number, number * (2**63 // 90), 2**62 // 80 * number)
        for number in range(80)
    ]
    assert content(index_of(wanted)) == wanted
    same: list[Entry] = [(7, 0, 7, 7, 7, 7)] * 80
    assert content(index_of(same)) == same


@pytest.mark.parametrize("seed", range(30))
def test_random_changes_match_a_list(seed: int) -> None:
    chance = random.Random(seed)
    wanted = entries(chance.randrange(1, 400), seed)
    index, coming = index_of(wanted), entries(4000, seed + 1000)
    for _ in range(40):
        match chance.randrange(3):
            case 0:
                count = min(chance.choice([0, 1, 5, 64, 130]), len(wanted))
                index.drop_front(count)
                del wanted[:count]
            case 1:
                for _, _, size, place, _, _ in coming[: chance.randrange(100)]:
                    shift = wanted[-1][0] + 1 if wanted else 0
                    index.append(shift, size, place, shift, 2**53)
                    wanted.append((shift, 0, size, place, shift, 2**53))
            case _ if wanted:
                start = chance.randrange(len(wanted))
                stop = min(start + chance.choice([1, 2, 4, 70]), len(wanted))
                index.join(start, stop, 12345, 99)
                wanted[start:stop] = [(wanted[start][0], 0, 12345, 99, *wanted[start][4:])]
        assert content(index) == wanted
    stop = len(wanted)
    start = stop // 3
    places, sizes = index.locations_and_sizes(start, stop)
    assert (list(places), list(sizes)) == (
        [entry[3] for entry in wanted[start:]],
        [entry[2] for entry in wanted[start:]],
    )
    assert index.size_of(start, stop) == sum(sizes)


def test_ranges_are_checked() -> None:
    index = index_of(entries(70))
    for broken in (
        lambda: index.entry(70),
        lambda: index.entry(-1),
        lambda: index.drop_front(71),
        lambda: index.join(3, 3, 1, 1),
        lambda: index.join(3, 71, 1, 1),
        lambda: index.locations_and_sizes(5, 71),
    ):
        with pytest.raises(IndexError):
            broken()


def test_an_entry_takes_about_ten_bytes() -> None:
    assert index_of(entries(64 * BLOCK_ENTRIES)).nbytes() < 12 * 64 * BLOCK_ENTRIES


def test_runs_are_distributed_to_their_partitions() -> None:
    def run(partition: int, first: int, after: int, token: bytes = bytes(16)) -> bytes:
        return RUN.pack(
            partition, token, 0, 10 * (after - first), first, after, 100 * first, 0, 1000 + first, 0, 0, 0, 0, 0, 0
        )

    indexes = [RunIndex() for _ in range(3)]
    partitions, kept = array("Q", (2, 5, 9)), array("q", (0, 7, 0))
    ends, sizes = array("q", (-1, -1, -1)), array("q", (0, 0, 0))
    breaks: list[tuple[int, int, int]] = []
    staged: list[int] = []

    def give(table: bytes, place: int) -> tuple[int, int, int, bool]:
        return assign_runs(table, place, partitions, indexes, kept, ends, sizes, breaks, staged)

    token = bytes(15) + b"x"
    assert give(run(2, 0, 4) + run(2, 0, 0, token) + run(5, 0, 7) + run(9, 3, 5), 0) == (2, 60, 1000, False)
    assert (staged, breaks) == ([1], [])
    assert give(run(1, 0, 4) + run(2, 6, 8) + run(5, 5, 9), 1) == (2, 60, 1005, True)
    assert breaks == [(0, 1, 4)]
    assert (list(ends), list(sizes)) == ([8, 9, 5], [60, 40, 20])
    assert content(indexes[0]) == [(0, 0, 40, 0, 0, 1000), (6, 0, 20, 1, 600, 1006)]
    assert content(indexes[1]) == [(5, 0, 40, 1, 500, 1005)]
