"""Consumer groups: joining, assignment, expiry and commits (concepts: groups#what-a-group-is)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from polywire.broker import changes
from polywire.broker.groups.group import Membership, assign
from polywire.broker.settings import BrokerSettings
from polywire.broker.transaction_state import Scope, TransactionTable
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Assignor, Level, PositionKind, TopicName
from tests.unit.broker.answers import Answers


def join(memory: MemoryBroker, member: str, assignor: Assignor | None = None, *, topic: str = "t") -> Membership:
    return memory.broker.groups.join("g", topic, member, wire="flux", assignor=assignor, named_alone=True)


def beat(memory: MemoryBroker, member: str, generation: int, *, topic: str = "t") -> Membership:
    return memory.broker.groups.heartbeat("g", topic, member, generation, wire="flux")


def refusal(memory: MemoryBroker, member: str, generation: int, *, topic: str = "t") -> ErrorCode:
    with pytest.raises(BrokerError) as caught:
        beat(memory, member, generation, topic=topic)
    return caught.value.code


def listed(owned: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return assignments as plain numbers."""
    return {member: tuple(partitions) for member, partitions in owned.items()}


@pytest.mark.parametrize(
    ("count", "members", "round_robin", "ranges"),
    [
        (3, "ab", {"a": (0, 2), "b": (1,)}, {"a": (0, 1), "b": (2,)}),
        (5, "ab", {"a": (0, 2, 4), "b": (1, 3)}, {"a": (0, 1, 2), "b": (3, 4)}),
        (3, "abcd", {"a": (0,), "b": (1,), "c": (2,), "d": ()}, {"a": (0,), "b": (1,), "c": (2,), "d": ()}),
        (3, "", {}, {}),
    ],
)
def test_assignors(
    count: int, members: str, round_robin: dict[str, tuple[int, ...]], ranges: dict[str, tuple[int, ...]]
) -> None:
    assert listed(assign(members, count, Assignor.ROUND_ROBIN)) == round_robin
    assert listed(assign(reversed(members), count, Assignor.RANGE)) == ranges


def test_members_sort_by_bytes() -> None:
    assert listed(assign(["b", "B", "é", "z"], 4, Assignor.RANGE)) == {"B": (0,), "b": (1,), "z": (2,), "é": (3,)}


def test_generations_count_from_two_and_rejoining_is_free(memory: MemoryBroker) -> None:
    assert join(memory, "a") == Membership(2, (0, 1, 2))
    assert join(memory, "b") == Membership(3, (1,))
    assert join(memory, "a") == Membership(3, (0, 2))
    assert join(memory, "a", Assignor.ROUND_ROBIN).generation == 3
    assert join(memory, "a", Assignor.RANGE) == Membership(4, (0, 1))
    assert join(memory, "c").generation == 5


def test_nothing_is_remembered_of_groups_that_ended_with_their_topics(memory: MemoryBroker) -> None:
    broker = memory.broker
    for number in range(100):
        topic = broker.create_topic(TopicName("default", f"short-{number}"), 1)
        broker.groups.join("g", topic.name.topic, "a", wire="flux")
        broker.delete_topic(topic)
    assert len(broker.groups._seen) < 20
    assert len(broker.groups._changed) < 20


def test_a_protocol_whose_generations_count_from_zero(memory: MemoryBroker) -> None:
    assert memory.broker.groups.join("g", "t", "a", wire="cursus", first_generation=0).generation == 1


def test_switching_topic_costs_two_generations_and_leaves_the_old_one(memory: MemoryBroker) -> None:
    join(memory, "a", Assignor.RANGE)
    join(memory, "b")
    assert join(memory, "a", topic="u") == Membership(5, (0, 1, 2))
    assert refusal(memory, "b", 3) is ErrorCode.GROUP_MISSING
    assert memory.broker.groups.topic_of("flux", "g") == "u"
    views = {view.topic: view for view in memory.broker.groups.views()}
    assert views["t"].members == ()
    assert views["u"].assignor is Assignor.RANGE
    assert join(memory, "a").generation == 7


def test_switching_moves_only_members_of_that_protocol(memory: MemoryBroker) -> None:
    join(memory, "a")
    memory.broker.groups.join("g", "t", "i", wire="iggy")
    join(memory, "a", topic="u")
    assert memory.broker.groups.heartbeat("g", "t", "i", 4, wire="iggy") == Membership(4, (0, 1, 2))


def test_members_of_several_protocols_share_a_group(memory: MemoryBroker) -> None:
    join(memory, "a")
    assert memory.broker.groups.join("g", "t", "b", wire="iggy") == Membership(3, (1,))
    assert beat(memory, "a", 3) == Membership(3, (0, 2))


def test_checks_come_in_order(memory: MemoryBroker) -> None:
    assert refusal(memory, "a", 2) is ErrorCode.GROUP_MISSING
    join(memory, "a")
    assert refusal(memory, "a", 2, topic="u") is ErrorCode.GROUP_MISSING
    assert refusal(memory, "x", 1) is ErrorCode.GENERATION_STALE
    assert refusal(memory, "x", 2) is ErrorCode.MEMBER_MISSING
    assert beat(memory, "a", 2) == Membership(2, (0, 1, 2))
    assert memory.broker.groups.sync("g", "t", "a", 2, wire="flux") == Membership(2, (0, 1, 2))


def test_members_expire_after_more_than_the_timeout(memory: MemoryBroker) -> None:
    join(memory, "a")
    memory.advance(10)
    assert beat(memory, "a", 2).generation == 2
    memory.advance(10.001)
    assert refusal(memory, "a", 2) is ErrorCode.GENERATION_STALE
    assert refusal(memory, "a", 3) is ErrorCode.MEMBER_MISSING
    assert join(memory, "a").generation == 4


def test_removals_of_one_pass_cost_one_generation(memory: MemoryBroker) -> None:
    for member in "abc":
        join(memory, member)
    memory.advance(6)
    beat(memory, "c", 4)
    memory.advance(6)
    assert refusal(memory, "c", 4) is ErrorCode.GENERATION_STALE
    assert beat(memory, "c", 5) == Membership(5, (0, 1, 2))


def test_commits_and_failed_calls_do_not_renew_a_session(memory: MemoryBroker) -> None:
    join(memory, "a")
    memory.advance(6)
    memory.broker.groups.commit("g", "t", "a", 2, 0, 1, wire="flux")
    assert refusal(memory, "a", 1) is ErrorCode.GENERATION_STALE
    memory.advance(6)
    assert refusal(memory, "a", 2) is ErrorCode.GENERATION_STALE
    again = join(memory, "a").generation
    memory.advance(6)
    memory.broker.groups.commit("g", "t", "a", again, 0, 1, wire="cursus", refresh=True)
    memory.advance(6)
    assert beat(memory, "a", again).generation == again


def test_leaving_starts_a_generation_and_the_empty_group_stays(memory: MemoryBroker) -> None:
    answers = Answers()
    join(memory, "a")
    memory.broker.groups.leave("g", "t", "a", 2, wire="flux", done=answers)
    memory.run()
    assert answers.errors == []
    assert refusal(memory, "a", 3) is ErrorCode.MEMBER_MISSING
    assert join(memory, "b") == Membership(4, (0, 1, 2))
    memory.broker.groups.leave("g", "t", "b", None, wire="cursus")
    assert join(memory, "b").generation == 6


def test_only_owners_commit(memory: MemoryBroker) -> None:
    join(memory, "a")
    join(memory, "b")
    with pytest.raises(BrokerError) as caught:
        memory.broker.groups.commit("g", "t", "b", 3, 0, 7, wire="flux")
    assert caught.value.code is ErrorCode.PARTITION_NOT_ASSIGNED
    answers = Answers()
    memory.broker.groups.commit("g", "t", "a", 3, 0, 7, wire="flux", done=answers)
    memory.run()
    assert answers.errors == []
    assert memory.broker.position("t", 0, PositionKind.GROUP, "g") == 7


@pytest.mark.parametrize("snapshot", [False, True])
def test_groups_survive_and_members_get_one_full_timeout(memory: MemoryBroker, snapshot: bool) -> None:
    join(memory, "b", Assignor.RANGE)
    join(memory, "a")
    memory.run()
    if snapshot:
        memory.log.take_snapshot()
    memory.advance(3600)
    memory.restart()
    memory.advance(9)
    assert beat(memory, "a", 3) == Membership(3, (0, 1))
    memory.advance(2)
    assert refusal(memory, "a", 3) is ErrorCode.GENERATION_STALE
    assert beat(memory, "a", 4) == Membership(4, (0, 1, 2))
    assert refusal(memory, "a", 4, topic="u") is ErrorCode.GROUP_MISSING
    assert join(memory, "b").generation == 5


@pytest.mark.parametrize("snapshot", [False, True])
def test_members_whose_connection_ended_with_the_broker_hold_no_partitions(
    memory: MemoryBroker, snapshot: bool
) -> None:
    for member in ("a", "b"):
        memory.broker.groups.join("g", "t", member, wire="iggy", connected=True)
    join(memory, "beating")
    memory.run()
    if snapshot:
        memory.log.take_snapshot()
    groups = memory.restart().groups
    again = groups.join("g", "t", "c", wire="iggy", connected=True)
    assert again.partitions == (1,)
    assert beat(memory, "beating", again.generation).partitions == (0, 2)
    memory.advance(9)
    assert groups.join("g", "t", "c", wire="iggy", connected=True) == again


def test_heartbeats_write_nothing(memory: MemoryBroker) -> None:
    join(memory, "a")
    memory.run()
    groups = memory.log.group_count
    for _ in range(20):
        memory.advance(3)
        beat(memory, "a", 2)
    join(memory, "a")
    memory.run()
    assert memory.log.group_count == groups


def test_a_join_is_acknowledged_when_it_is_journalled(memory: MemoryBroker) -> None:
    first, again = Answers(), Answers()
    memory.broker.groups.join("g", "t", "a", wire="flux", level=Level.SYNCED, done=first)
    memory.broker.groups.join("g", "t", "a", wire="flux", level=Level.SYNCED, done=again)
    memory.broker.commit()
    assert (first.offsets, again.offsets) == ([], [])
    memory.run()
    assert (first.offsets, again.offsets) == ([-1], [-1])
    assert memory.restart(synced_only=True).groups.views()[0].generation == 2


def test_groups_follow_the_topics_partitions(memory: MemoryBroker) -> None:
    assert join(memory, "a") == Membership(2, (0, 1, 2))
    topic = memory.broker.create_topic(TopicName("default", "t"), 5)
    assert refusal(memory, "a", 2) is ErrorCode.GENERATION_STALE
    assert beat(memory, "a", 3) == Membership(3, (0, 1, 2, 3, 4))
    memory.broker.grow_topic(topic, 6)
    assert join(memory, "a") == Membership(4, (0, 1, 2, 3, 4, 5))


def test_automatic_creation_changes_no_generation(memory: MemoryBroker) -> None:
    join(memory, "a")
    memory.broker.ensure_topic("t")
    assert beat(memory, "a", 2).generation == 2


def test_groups_are_deleted_with_their_topic_or_on_request(memory: MemoryBroker) -> None:
    topic = memory.broker.ensure_topic("t")
    join(memory, "a")
    memory.broker.groups.commit("g", "t", "a", 2, 0, 7, wire="flux")
    memory.broker.delete_topic(topic)
    assert refusal(memory, "a", 2) is ErrorCode.GROUP_MISSING
    join(memory, "a")
    memory.broker.groups.commit("g", "t", "a", 2, 0, 7, wire="flux")
    memory.broker.groups.delete("g", "t")
    assert memory.broker.position("t", 0, PositionKind.GROUP, "g") is None
    with pytest.raises(BrokerError) as caught:
        memory.broker.groups.delete("g", "t")
    assert caught.value.code is ErrorCode.GROUP_MISSING
    memory.run()
    assert memory.restart().groups.views() == []


def test_limits_and_names() -> None:
    memory = MemoryBroker(BrokerSettings(groups_max=1, members_max=2))
    join(memory, "a")
    join(memory, "b")
    with pytest.raises(Busy):
        join(memory, "c")
    with pytest.raises(Busy):
        memory.broker.groups.join("other", "t", "a", wire="flux")
    assert join(memory, "a").generation == 3
    for name in ("", "n" * 256, "\udcff"):
        with pytest.raises(Invalid) as caught:
            join(memory, name)
        assert caught.value.code is ErrorCode.INVALID_NAME


def test_views_show_each_members_partitions(memory: MemoryBroker) -> None:
    join(memory, "a")
    memory.advance(4)
    join(memory, "b")
    (view,) = memory.broker.groups.views()
    assert [(member.id, member.wire, member.idle_s, member.partitions) for member in view.members] == [
        ("a", "flux", 4.0, (0, 2)),
        ("b", "flux", 0.0, (1,)),
    ]


def test_views_omit_expired_members_without_changing_the_group(memory: MemoryBroker) -> None:
    groups = memory.broker.groups
    join(memory, "a")
    memory.advance(6)
    generation = join(memory, "b").generation
    memory.advance(4.001)
    for view in (*groups.views(), groups.view("g", "t")):
        assert view is not None
        assert [(member.id, member.partitions) for member in view.members] == [("b", (0, 1, 2))]
        assert view.generation == generation + 1, "the generation that its members will see"
    assert not memory.broker.uncommitted
    assert beat(memory, "b", generation + 1) == Membership(generation + 1, (0, 1, 2))
    memory.advance(10.001)
    assert groups.views()[0].members == ()


def test_members_of_all_groups_together_are_bounded() -> None:
    memory = MemoryBroker(BrokerSettings(members_total_max=2))
    groups = memory.broker.groups
    groups.join("g", "t", "a", wire="flux")
    left = groups.join("h", "t", "b", wire="flux").generation
    with pytest.raises(Busy):
        groups.join("other", "t", "c", wire="flux")
    groups.leave("h", "t", "b", left, wire="flux")
    groups.join("other", "t", "c", wire="flux")
    memory.run()
    with pytest.raises(Busy):
        memory.restart().groups.join("more", "t", "d", wire="flux")


def test_a_group_begins_without_members(memory: MemoryBroker) -> None:
    groups = memory.broker.groups
    memory.broker.create_topic(TopicName("default", "t"), 3)
    groups.create("g", "t")
    memory.run()
    with pytest.raises(BrokerError) as caught:
        groups.create("g", "t")
    assert caught.value.code is ErrorCode.GROUP_EXISTS
    assert memory.restart().groups.view("g", "t") is not None
    groups = memory.broker.groups
    assert [view.name for view in groups.views("t")] == ["g"]
    assert groups.views("other") == []
    assert not groups.has_member("g", "t", "a")
    place = groups.join("g", "t", "a", wire="iggy")
    assert (place.generation, place.partitions) == (1, (0, 1, 2))
    assert groups.has_member("g", "t", "a")


def test_a_connected_member_needs_no_heartbeat(memory: MemoryBroker) -> None:
    groups = memory.broker.groups
    memory.broker.create_topic(TopicName("default", "t"), 2)
    groups.join("g", "t", "a", wire="iggy", connected=True)
    groups.join("g", "t", "b", wire="flux")
    memory.advance(60)
    assert groups.heartbeat("g", "t", "a", None, wire="iggy").partitions == (0, 1), "the other member has expired"
    memory.advance(60)
    assert groups.heartbeat("g", "t", "a", None, wire="iggy").partitions == (0, 1)
    groups.leave("g", "t", "a", None, wire="iggy")
    assert not groups.has_member("g", "t", "a")
    groups.join("g", "t", "a", wire="iggy", connected=True)
    memory.run()
    groups = memory.restart().groups
    memory.advance(60)
    assert groups.join("g", "t", "c", wire="iggy").partitions == (0, 1), "connections end with the broker"


def test_the_size_of_a_stored_change_does_not_depend_on_the_group_size(
    memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = changes.encode

    def measured(value: changes.Change | changes.Snapshot) -> bytes:
        data = encode(value)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(changes, "encode", measured)
    members = [f"member-{number:04}" for number in range(900)]
    for member in members:
        memory.broker.groups.join("g", "t", member, wire="polywire")
    assert max(sizes) < 200
    memory.broker.groups.join("g", "t", "one more", wire="polywire", assignor=Assignor.RANGE)
    memory.broker.groups.leave("g", "t", "member-0007", None, wire="polywire")
    assert max(sizes) < 200
    memory.run()
    snapshot = memory.broker._state.snapshot()
    memory.restart()
    assert memory.broker._state.snapshot() == snapshot
    view = memory.broker.groups.view("g", "t")
    assert view is not None
    members.remove("member-0007")
    assert [member.id for member in view.members] == [*members, "one more"]


def test_offsets_of_a_transaction_are_recorded_once_each(memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    transactions = memory.broker.transactions
    transaction = transactions.begin_epoch("x", done=None)
    transactions.begin(transaction, done=None)
    transaction = transactions.find("x") or transaction
    reported: list[changes.TransactionOffsets] = []
    apply = memory.broker._state.transactions.apply_offsets

    def applied(_: TransactionTable, change: changes.TransactionOffsets) -> None:
        reported.append(change)
        apply(change)

    monkeypatch.setattr(TransactionTable, "apply_offsets", applied)
    for partition in range(3):
        transactions.put_offsets(transaction, Scope("t", "g", "m", 1), {partition: 5}, done=None)
    assert [change.offsets for change in reported] == [{partition: 5} for partition in range(3)]
    assert transaction.positions[Scope("t", "g", "m", 1)].offsets == {0: 5, 1: 5, 2: 5}
