"""A group name of a protocol whose names do not include a topic has one topic in all processes."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.broker.access import ConfiguredUser
from polywire.broker.groups.group import Membership
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.permissions import parse_grants
from polywire.errors import Denied, ErrorCode, Missing
from polywire.log.base import Completion
from polywire.routing.link import RETRY_S
from polywire.routing.values import APPLIED_S
from polywire.types import TopicName
from tests.unit.routing.test_users import COUNT, HASH, Processes

TOPICS = ("ccc", "a", "bb")  # by shard
WIRE = "flux"


@pytest.fixture
def processes() -> Processes:
    made = Processes()
    for broker, name in zip(made.shards.brokers, TOPICS, strict=True):
        broker.create_topic(TopicName("default", name), 2)
    made.run()
    return made


def join(
    processes: Processes,
    shard: int,
    member: str = "m",
    *,
    group: str = "g",
    by: Caller = NO_CALLER,
    done: Completion[int] | None = None,
) -> Membership:
    """Join a group of a topic in its process, as a forwarded request does."""
    groups = processes.shards.brokers[shard].groups
    return groups.join(group, TOPICS[shard], member, wire=WIRE, named_alone=True, by=by, done=done)


def bound(processes: Processes) -> list[dict[str, str]]:
    return [broker.groups.bound(WIRE) for broker in processes.shards.brokers]


def members(processes: Processes, shard: int, group: str = "g") -> list[str]:
    view = processes.shards.brokers[shard].groups.view(group, TOPICS[shard])
    return [] if view is None else [member.id for member in view.members]


def test_a_group_moves_to_the_topic_of_another_process(processes: Processes) -> None:
    for shard in (1, 2, 0, 1):
        join(processes, shard)
        processes.run()
        assert bound(processes) == [{"g": TOPICS[shard]} if number == shard else {} for number in range(COUNT)]
        assert [members(processes, number) for number in range(COUNT)] == [
            ["m"] if number == shard else [] for number in range(COUNT)
        ]
        assert {broker.groups.bound_to(WIRE, "g") for broker in processes.shards.brokers} == {TOPICS[shard]}
    with pytest.raises(Missing) as missing:
        processes.shards.brokers[2].groups.heartbeat("g", TOPICS[2], "m", None, wire=WIRE)
    assert missing.value.code is ErrorCode.GROUP_MISSING
    assert processes.shards.brokers[1].groups.heartbeat("g", TOPICS[1], "m", None, wire=WIRE).partitions == (0, 1)


def test_members_of_other_protocols_stay(processes: Processes) -> None:
    processes.shards.brokers[1].groups.join("g", TOPICS[1], "other", wire="polywire")
    for shard in (1, 2):
        join(processes, shard)
        processes.run()
    assert (members(processes, 1), members(processes, 2)) == (["other"], ["m"])


def test_names_that_are_bound_at_the_same_time_stay_in_one_process(processes: Processes) -> None:
    for shard in (2, 1):
        join(processes, shard)
    processes.run()
    assert bound(processes) == [{}, {"g": TOPICS[1]}, {}]
    assert members(processes, 2) == []
    join(processes, 2, group="h")
    processes.run()
    join(processes, 0, group="h")
    join(processes, 1, group="h")
    processes.run()
    assert [found.get("h") for found in bound(processes)] == [TOPICS[0], None, None]


def test_bindings_that_changed_while_a_link_was_lost(processes: Processes) -> None:
    join(processes, 1)
    join(processes, 1, group="deleted")
    processes.run()
    processes.lost.add(1)
    processes.links[2, 1].break_off()
    processes.shards.brokers[1].groups.delete("deleted", TOPICS[1], by=NO_CALLER, done=None)
    join(processes, 2)
    processes.run()
    assert processes.shards.brokers[2].groups.bound_to(WIRE, "deleted") == TOPICS[1], "as it was known last"
    processes.lost.clear()
    processes.run(RETRY_S)
    processes.run(RETRY_S)
    assert processes.shards.brokers[2].groups.bound_to(WIRE, "deleted") is None
    assert bound(processes) == [{}, {}, {"g": TOPICS[2]}]


def test_a_name_is_free_when_its_topic_was_deleted(processes: Processes) -> None:
    join(processes, 1)
    processes.run()
    broker = processes.shards.brokers[1]
    broker.delete_topic(broker.topic(TOPICS[1]))
    processes.run()
    assert {broker.groups.bound_to(WIRE, "g") for broker in processes.shards.brokers} == {None}


def test_a_name_belongs_to_its_user_in_all_processes(processes: Processes) -> None:
    grants = parse_grants(["consume", "group"])
    processes.access(0).configure([ConfiguredUser(name, HASH, grants) for name in ("alice", "bob")])
    processes.run()
    alice, bob = (Caller(processes.access(0).vouched(name), number + 1) for number, name in enumerate(("alice", "bob")))
    join(processes, 1, by=alice)
    processes.run()
    with pytest.raises(Denied):
        join(processes, 2, by=bob)
    with pytest.raises(Denied):
        processes.shards.brokers[0].groups.bind(WIRE, "g", TOPICS[0], by=bob)
    join(processes, 2, by=alice)
    processes.run()
    assert bound(processes)[2] == {"g": TOPICS[2]}


def test_a_join_completes_when_all_processes_know_the_topic(processes: Processes) -> None:
    done: list[Any] = []
    processes.links[0, 1].pause()
    join(processes, 1, done=done.append)
    processes.run()
    assert done == []
    processes.links[0, 1].resume()
    processes.run()
    assert len(done) == 1
    processes.links[0, 1].pause()
    join(processes, 1, "other", done=done.append)
    processes.run()
    assert len(done) == 2, "the name was bound already"
    processes.shards.brokers[1].groups.bind(WIRE, "h", TOPICS[1], done=done.append)
    processes.run()
    processes.run(APPLIED_S)
    assert len(done) == 3, "a process that does not respond delays it shortly"
