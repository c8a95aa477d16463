"""The preferred leader of each shard, and when leadership is handed over."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from polywire.cluster.balance import AGAIN_S, DRAIN_PAUSE_S, PAUSE_S, Balance
from polywire.cluster.nodes import Candidate, Node, NodeState, TakeoverRequest, node_of, order_of

WAIT_S = 30.0
MACHINES = ("a", "b", "c")
Seen = list[tuple[Node, NodeState]]


def seen(shard: int, leader: str, *idle: str, id_: str = "x", silent: tuple[str, ...] = ()) -> Seen:
    """Return what the leader of a shard sees."""
    found = [(_node(leader, shard, id_, 5), NodeState.LEADS)]
    found += [(_node(name, shard, id_, 0), NodeState.STANDBY) for name in idle]
    return found + [(_node(name, shard, id_, 0), NodeState.SILENT) for name in silent]


def drained(found: Seen, *machines: str) -> Seen:
    return [(replace(node, drained=node.machine in machines), state) for node, state in found]


def _node(machine: str, shard: int, id_: str, start: int) -> Node:
    return node_of(Candidate(machine, shard, 3), id_, {}, start=start, counter=1)


def balance(machine: str, shard: int, wait_s: float = WAIT_S) -> Balance:
    return Balance(Candidate(machine, shard, 3), wait_s, lambda _: True)


@given(names=st.sets(st.text(min_size=1, max_size=5), min_size=1, max_size=6), shards=st.integers(1, 64))
def test_all_machines_agree_and_lead_equally_many_shards(names: set[str], shards: int) -> None:
    firsts = Counter(order_of(shard, names)[0] for shard in range(shards))
    counts = [firsts[name] for name in names]
    assert max(counts) - min(counts) <= 1
    assert all(sorted(order_of(shard, list(names)[::-1])) == sorted(names) for shard in range(shards))


def test_shards_of_a_machine_that_is_gone_are_spread_over_the_others() -> None:
    left = {order_of(shard, ("b", "c"))[0] for shard in range(0, 6, 3)}
    assert left == {"b", "c"}


def test_a_preferred_standby_gets_the_shard_after_the_waiting_time() -> None:
    leader = balance("a", 1)
    assert leader.target(seen(1, "a", "b", "c"), 0.0) is None
    assert leader.target(seen(1, "a", "b", "c"), WAIT_S - 0.1) is None
    found = leader.target(seen(1, "a", "b", "c"), WAIT_S)
    assert found is not None
    assert found.name == "b-0001"


def test_a_standby_that_reconnects_or_restarts_waits_again() -> None:
    leader = balance("a", 1)
    assert leader.target(seen(1, "a", "b"), 0.0) is None
    assert leader.target(seen(1, "a"), 10.0) is None
    assert leader.target(seen(1, "a", "b"), 20.0) is None
    assert leader.target(seen(1, "a", "b", id_="another process"), WAIT_S + 5) is None
    assert leader.target(seen(1, "a", "b", id_="another process"), 2 * WAIT_S) is None
    assert leader.target(seen(1, "a", "b", id_="another process"), 2 * WAIT_S + 5) is not None


def test_a_silent_machine_is_ignored() -> None:
    leader = balance("a", 1)
    for now in (0.0, WAIT_S, 2 * WAIT_S):
        assert leader.target(seen(1, "a", silent=("b",)), now) is None


def test_the_preferred_leader_keeps_its_shard() -> None:
    leader = balance("b", 1)
    for now in (0.0, WAIT_S, 2 * WAIT_S):
        assert leader.target(seen(1, "b", "a", "c"), now) is None


def test_a_shard_does_not_move_twice_in_a_short_time() -> None:
    leader = balance("a", 1)
    leader.target(seen(1, "a", "b"), 0.0)
    leader.moved(WAIT_S)
    assert leader.target(seen(1, "a", "b"), WAIT_S + PAUSE_S - 1) is None
    assert leader.target(seen(1, "a", "b"), WAIT_S + PAUSE_S) is not None


def test_recent_requests_of_other_shards_delay_a_handover_and_old_ones_do_not() -> None:
    leader = balance("a", 1)
    leader.note_request(TakeoverRequest("c-0001", 3), 0.0)
    leader.target(seen(1, "a", "b"), 1.0)
    assert leader.target(seen(1, "a", "b"), 1.0 + WAIT_S) is not None
    leader.note_request(TakeoverRequest("c-0001", 3), 50.0)
    assert leader.target(seen(1, "a", "b"), 51.0) is not None
    leader.note_request(TakeoverRequest("c-0001", 7), 52.0)
    assert leader.target(seen(1, "a", "b"), 100.0) is None


def test_nothing_moves_if_balancing_is_off_or_another_shard_just_moved() -> None:
    for leader in (balance("a", 1, 0.0), Balance(Candidate("a", 1, 3), WAIT_S, lambda _: False)):
        for now in (0.0, WAIT_S, 2 * WAIT_S):
            assert leader.target(seen(1, "a", "b"), now) is None


def test_the_shard_of_a_bucket_with_one_shard_does_not_move() -> None:
    leader = Balance(Candidate("b"), WAIT_S, lambda _: True)
    nodes = [(Node("b", "x", {}, start=2, machine="b"), NodeState.LEADS), (Node("a", "y", {}), NodeState.STANDBY)]
    assert [leader.target(nodes, now) for now in (0.0, WAIT_S, 2 * WAIT_S)] == [None] * 3


def test_a_drained_machine_hands_over_at_once_and_repeats_the_offer() -> None:
    leader = balance("a", 0, 0.0)  # balancing is off, and it is the preferred leader
    seen_now = drained(seen(0, "a", "b", "c"), "a")
    found = leader.target(seen_now, 0.0)
    assert found is not None
    assert found.machine == "b"
    leader.moved(0.0)
    assert leader.target(seen_now, AGAIN_S - 0.1) is None
    assert leader.target(seen_now, AGAIN_S) is not None
    assert leader.target(seen(0, "a", "b", "c"), 2 * AGAIN_S) is None, "no longer drained"


def test_a_drained_machine_gets_no_shard_and_is_not_counted() -> None:
    leader = balance("a", 1)
    for now in (0.0, WAIT_S, 2 * WAIT_S):
        assert leader.target(drained(seen(1, "a", "b"), "b"), now) is None
    assert balance("a", 0).target(drained(seen(0, "a", "b"), "a", "b"), 0.0) is None, "there is no other machine"
    leader = balance("c", 1)  # of a and c it is c's; of a, b and c it would be b's
    for now in (0.0, WAIT_S, 2 * WAIT_S):
        assert leader.target(drained(seen(1, "c", "a", "b"), "b"), now) is None


def test_the_shard_of_a_bucket_with_one_shard_is_drained() -> None:
    leader = Balance(Candidate("b"), WAIT_S, lambda pause_s: pause_s == DRAIN_PAUSE_S)
    nodes = [
        (Node("b", "x", {}, start=2, machine="b", drained=True), NodeState.LEADS),
        (Node("a", "y", {}, machine="a"), NodeState.STANDBY),
    ]
    assert leader.target(nodes, 0.0) == nodes[1][0]
