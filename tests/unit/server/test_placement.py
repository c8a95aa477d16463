"""Ownership of topic names among processes: one process owns each name, and links are created from the logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polywire.errors import Busy, ErrorCode, Invalid, Unavailable
from polywire.server.placement import (
    Board,
    HashedNames,
    Placement,
    Stage,
    check_count,
    count_shards,
    directory_of,
    shard_by_hash,
)


def test_the_first_claim_has_the_name_until_its_release(tmp_path: Path) -> None:
    first, second = Placement(tmp_path, 0), Placement(tmp_path, 1)
    assert second.shard_of("orders") is None
    second.claim("orders")
    second.claim("orders")
    assert first.shard_of("orders") == second.shard_of("orders") == 1
    with pytest.raises(Busy):
        first.claim("orders")
    first.release("orders")
    assert first.shard_of("orders") == 1, "only the process that claimed the name releases it"
    second.release("orders")
    first.claim("orders")
    assert second.shard_of("orders") == 0


def test_every_start_creates_the_links_from_the_log(tmp_path: Path) -> None:
    first, second = Placement(tmp_path, 0), Placement(tmp_path, 1)
    for name in ("kept", "gone"):
        first.claim(name)
    second.claim("taken")
    assert first.begin(["kept", "new", "taken"]) == ["taken"]
    assert [first.shard_of(name) for name in ("kept", "new", "gone", "taken")] == [0, 0, None, 1]


def test_internal_topics_have_no_owner(tmp_path: Path) -> None:
    assert Placement(tmp_path, 0).shard_of("__events") is None


def test_an_unwritable_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        Placement(tmp_path / "missing", 0).claim("orders")


@given(names=st.lists(st.text(min_size=1, max_size=300), unique=True, max_size=30), count=st.integers(1, 64))
def test_every_name_has_one_owner(names: list[str], count: int) -> None:
    assert all(0 <= shard_by_hash(name, count) < count for name in names)
    assert [shard_by_hash(name, count) for name in names] == [shard_by_hash(name, count) for name in names]


def test_names_are_distributed_over_all_shards() -> None:
    homes = [shard_by_hash(f"topic-{number}", 4) for number in range(1000)]
    assert all(200 < homes.count(shard) < 300 for shard in range(4))


def test_the_shard_with_the_fewest_topics_is_next() -> None:
    board = Board(3)
    for shard, topics in enumerate((2, 1, 1)):
        board.set_topics(shard, topics)
    assert board.fewest_topics() == 1


def test_a_stage_never_goes_back() -> None:
    board = Board(2)
    board.reach(0, Stage.SERVING)
    board.reach(0, Stage.RECOVERED)
    assert not board.all_have(Stage.RECOVERED)
    board.reach(1, Stage.RECOVERED)
    assert board.all_have(Stage.RECOVERED)
    assert not board.all_have(Stage.SERVING)


def test_a_directory_is_not_served_with_fewer_shards_than_it_has(tmp_path: Path) -> None:
    assert count_shards(tmp_path) == 1
    for shard in (1, 2):
        directory_of(tmp_path, shard).mkdir(parents=True)
    assert count_shards(tmp_path) == 3
    check_count(tmp_path, 4)
    with pytest.raises(Invalid, match="--processes 3") as caught:
        check_count(tmp_path, 2)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_hashed_name_belongs_to_one_shard() -> None:
    shards = [HashedNames(own, 3) for own in range(3)]
    home = shard_by_hash("orders", 3)
    assert {shard.shard_of("orders") for shard in shards} == {home}
    shards[home].claim("orders")
    for other in {0, 1, 2} - {home}:
        with pytest.raises(Busy):
            shards[other].claim("orders")
        assert shards[other].begin(["orders"]) == ["orders"]
    shards[home].release("orders")
    assert shards[home].begin(["orders"]) == []
    assert shards[0].shard_of("orders") == home, "the owner is the same whether the topic exists or not"
    assert shards[0].shard_of("__events") is None


def test_the_owner_of_a_name_never_changes() -> None:
    """Topics in buckets are placed by this function: changing it would lose them."""
    assert [shard_by_hash(name, 4) for name in ("orders", "shop.orders", "größe", "t0", "t1")] == [0, 3, 0, 2, 1]


def test_one_process_of_a_machine_hands_over_at_a_time() -> None:
    board = Board(2)
    assert board.may_hand_over(5.0, 10.0)
    assert not board.may_hand_over(14.9, 10.0)
    assert board.may_hand_over(15.0, 10.0)
    assert not board.all_have(Stage.RECOVERED), "not the name of a shard"
