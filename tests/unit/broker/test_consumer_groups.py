"""Consumer groups of a whole broker: epochs, restarts and limits (concepts: groups#handing-over)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import pairwise

import pytest

from polywire.broker.groups.commits import Commit
from polywire.broker.groups.consumer import AWAY, FORGET_MIN, JOINING, LEAVING, TOPICS_MAX, Beat
from polywire.broker.groups.consumer_groups import JOINS_AT_ONCE_MAX, BeatResponse
from polywire.broker.owners import Caller
from polywire.broker.settings import BrokerSettings
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Missing, NotOwner, Unavailable
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Assignor, PositionKind, TopicName
from tests.unit.broker.answers import Answers

NOTHING: Mapping[bytes, Set[int]] = {}
REBALANCE_S = 20.0


class Consumer:
    """A client that releases partitions as soon as they are revoked."""

    def __init__(self, memory: MemoryBroker, id_: str, *topics: str, instance: str | None = None) -> None:
        self.memory = memory
        self.id = id_
        self.topics = frozenset(topics or ("t",))
        self.instance = instance
        self.epoch = JOINING
        self.reading = NOTHING

    def beat(self, *, assignor: Assignor | None = None, is_full: bool = True, by: Caller | None = None) -> BeatResponse:
        beat = Beat(self.id, self.epoch, "kafka", self.instance, assignor=assignor)
        if is_full:
            beat = Beat(
                self.id,
                self.epoch,
                "kafka",
                self.instance,
                rebalance_timeout_s=REBALANCE_S,
                topics=self.topics,
                assignor=assignor,
                owned=self.reading,
            )
        reported = self.memory.broker.consumers.beat("g", beat) if by is None else self._by(beat, by)
        self.epoch = reported.epoch
        if reported.assignment is not None:
            self.reading = reported.assignment
        return reported

    def _by(self, beat: Beat, by: Caller) -> BeatResponse:
        return self.memory.broker.consumers.beat("g", beat, by=by)

    def leave(self, epoch: int = LEAVING) -> None:
        self.memory.broker.consumers.beat("g", Beat(self.id, epoch, "kafka", self.instance))

    @property
    def partitions(self) -> list[int]:
        """Return the partitions it reads of its only topic."""
        assert len(self.reading) <= 1
        return sorted(one for partitions in self.reading.values() for one in partitions)


@pytest.fixture
def memory() -> MemoryBroker:
    return broker_with_a_topic()


def broker_with_a_topic() -> MemoryBroker:
    """A broker with a topic of four partitions."""
    made = MemoryBroker()
    made.broker.create_topic(TopicName.parse("t"), 4)
    made.run()
    return made


def code_of(caught: pytest.ExceptionInfo[BrokerError]) -> ErrorCode:
    return caught.value.code


def commit(
    memory: MemoryBroker, consumer: Consumer, partition: int, epoch: int | None = None, *, topic: str = "t"
) -> ErrorCode | None:
    """Commit an offset as clients do; return the error code, if any."""
    consumers, epoch = memory.broker.consumers, consumer.epoch if epoch is None else epoch
    try:
        consumers.check_epoch("g", consumer.id, epoch, instance_id=consumer.instance)
    except BrokerError as error:
        return error.code
    done = Answers()
    made = {topic: {partition: Commit(7)}}
    refused = consumers.commit("g", consumer.id, made, epoch=epoch, wire="kafka", done=done)
    memory.run()
    done.check()
    return refused[topic].code if refused else None


def test_a_single_member_is_assigned_everything_at_once(memory: MemoryBroker) -> None:
    one = Consumer(memory, "m1")
    reported = one.beat()
    assert one.partitions == [0, 1, 2, 3]
    assert reported.is_settled
    assert reported.epoch > 0
    assert one.beat(is_full=False).assignment is None, "nothing has changed, so no assignment is sent"


def test_a_partition_is_assigned_after_its_last_reader_released_it(memory: MemoryBroker) -> None:
    one, two = Consumer(memory, "m1"), Consumer(memory, "m2")
    one.beat()
    assert not two.beat().is_settled
    assert two.partitions == []
    epoch = one.epoch
    reported = one.beat(is_full=False)
    assert (one.partitions, reported.epoch, reported.is_settled) == ([0, 2], epoch, False), (
        "a member keeps its old epoch until it has released its partitions"
    )
    two.beat(is_full=False)
    assert two.partitions == [], "the first member has not confirmed the revocation"
    assert one.beat().is_settled
    assert two.beat(is_full=False).is_settled
    assert (one.partitions, two.partitions) == ([0, 2], [1, 3])
    assert one.epoch == two.epoch > epoch


def test_members_with_different_subscriptions_share_a_group(memory: MemoryBroker) -> None:
    memory.broker.create_topic(TopicName.parse("u"), 2)
    one, two = Consumer(memory, "m1", "t", "u"), Consumer(memory, "m2", "u")
    one.beat()
    two.beat()
    one.beat()
    one.beat()
    two.beat()
    ids = {memory.broker.topic(name).id: name for name in ("t", "u")}
    assert {ids[id_]: sorted(held) for id_, held in one.reading.items()} == {"t": [0, 1, 2, 3], "u": [0]}
    assert {ids[id_]: sorted(held) for id_, held in two.reading.items()} == {"u": [1]}
    assert one.epoch == two.epoch


def test_a_member_that_unsubscribes_releases_the_topic_first(memory: MemoryBroker) -> None:
    memory.broker.create_topic(TopicName.parse("u"), 2)
    one, two = Consumer(memory, "m1", "t", "u"), Consumer(memory, "m2", "u")
    one.beat()
    two.beat()
    one.topics = frozenset({"t"})
    one.beat()
    two.beat()
    assert two.partitions == []
    one.beat()
    two.beat()
    assert two.partitions == [0, 1]


def test_a_topic_that_is_created_and_deleted_is_assigned_and_revoked(memory: MemoryBroker) -> None:
    one = Consumer(memory, "m1", "later")
    assert one.beat().is_settled
    assert one.reading == NOTHING
    topic = memory.broker.create_topic(TopicName.parse("later"), 2)
    one.beat(is_full=False)
    assert one.partitions == [0, 1]
    memory.broker.delete_topic(topic)
    again = memory.broker.create_topic(TopicName.parse("later"), 3)
    one.beat(is_full=False)
    one.beat()
    assert one.reading == {again.id: {0, 1, 2}}


def test_deleted_topics_are_forgotten(memory: MemoryBroker) -> None:
    consumer = Consumer(memory, "a", "t", "u")
    for _ in range(2 * FORGET_MIN):
        topic = memory.broker.create_topic(TopicName.parse("u"), 1)
        consumer.beat()
        assert topic.id in consumer.reading
        memory.broker.delete_topic(topic)
        consumer.beat()
    assert len(memory.broker.consumers._entries["g"].group._generations) <= FORGET_MIN + 4


def test_members_of_another_protocol_share_a_group(memory: MemoryBroker) -> None:
    groups = memory.broker.groups
    one = Consumer(memory, "m1")
    one.beat()
    before = groups.join("g", "t", "m2", wire="flux")
    assert before.partitions == (), "every partition is still being read"
    one.beat(is_full=False)
    assert groups.heartbeat("g", "t", "m2", before.generation, wire="flux").partitions == ()
    one.beat()
    with pytest.raises(Conflict) as caught:
        groups.heartbeat("g", "t", "m2", before.generation, wire="flux")
    assert code_of(caught) is ErrorCode.GENERATION_STALE
    after = groups.join("g", "t", "m2", wire="flux")
    assert (one.partitions, after.partitions) == ([0, 2], (1, 3))
    groups.commit("g", "t", "m2", after.generation, 1, 5, wire="flux")
    with pytest.raises(Conflict) as caught:
        groups.commit("g", "t", "m2", after.generation, 0, 5, wire="flux")
    assert code_of(caught) is ErrorCode.PARTITION_NOT_ASSIGNED
    assert commit(memory, one, 2) is None
    assert commit(memory, one, 1) is ErrorCode.PARTITION_NOT_ASSIGNED
    groups.leave("g", "t", "m2", after.generation, wire="flux")
    one.beat(is_full=False)
    assert one.partitions == [0, 1, 2, 3]
    assert groups.view("g", "t") is not None


def test_a_handover_among_consumers_starts_no_generation_for_other_members(memory: MemoryBroker) -> None:
    memory.broker.grow_topic(memory.broker.topic("t"), 6)
    groups = memory.broker.groups
    one, two = Consumer(memory, "m1"), Consumer(memory, "m2")
    one.beat()
    two.beat()
    groups.join("g", "t", "z", wire="flux")
    for consumer in (one, two, one, two, one, two):
        consumer.beat()
    place = groups.join("g", "t", "z", wire="flux")
    assert (one.partitions, two.partitions, place.partitions) == ([0, 3], [1, 4], (2, 5))
    three = Consumer(memory, "m3")
    three.beat()
    generation = groups.join("g", "t", "z", wire="flux").generation
    two.beat()
    assert groups.join("g", "t", "z", wire="flux").generation == generation
    for consumer in (one, two, three) * 3:
        consumer.beat()
    found = [one.partitions, two.partitions, three.partitions, list(groups.join("g", "t", "z", wire="flux").partitions)]
    assert found == [[0, 4], [1, 5], [2], [3]]


def test_a_lost_response_is_repeated(memory: MemoryBroker) -> None:
    one = Consumer(memory, "m1")
    one.beat()
    epoch, reading = one.epoch, one.reading
    two = Consumer(memory, "m2")
    two.beat()
    one.beat()
    one.beat()
    assert one.epoch > epoch
    one.epoch, one.reading = epoch, {id_: {0, 2} for id_ in reading}
    assert one.beat().assignment == {id_: {0, 2} for id_ in reading}
    one.epoch, one.reading = epoch, reading
    with pytest.raises(Conflict) as caught:
        one.beat()
    assert code_of(caught) is ErrorCode.GENERATION_STALE, "it reads partitions that are not assigned to it"
    one.epoch = 99
    with pytest.raises(Conflict):
        one.beat()


def test_silent_members_are_removed(memory: MemoryBroker) -> None:
    one, two = Consumer(memory, "m1"), Consumer(memory, "m2")
    one.beat()
    memory.advance(30.0)
    two.beat()
    memory.advance(14.0)
    two.beat(is_full=False)
    assert two.partitions == []
    memory.advance(2.0)
    two.beat(is_full=False)
    assert two.partitions == [0, 1, 2, 3]
    with pytest.raises(Missing):
        one.beat(is_full=False)


@pytest.mark.parametrize(
    "error",
    [NotOwner(ErrorCode.NOT_OWNER, "deposed"), Unavailable(ErrorCode.STORAGE_FAILED, "storage failed")],
    ids=["deposed", "failed"],
)
def test_a_broker_whose_log_accepts_no_writes_removes_no_members(memory: MemoryBroker, error: BrokerError) -> None:
    one = Consumer(memory, "m1")
    one.beat()
    memory.log.fail(error)
    memory.advance(60.0)  # an error would end the loop
    view = memory.broker.consumers.view("g")
    assert view is not None
    assert len(view.members) == 1


def test_a_member_that_does_not_release_in_time_is_removed(memory: MemoryBroker) -> None:
    one, two = Consumer(memory, "m1"), Consumer(memory, "m2")
    one.beat()
    two.beat()
    one.beat(is_full=False)
    for _ in range(5):
        memory.advance(REBALANCE_S / 5 + 0.1)
        two.beat(is_full=False)
        if memory.broker.consumers.topics_of("g", one.id):
            one.beat(is_full=False)
    two.beat(is_full=False)
    assert two.partitions == [0, 1, 2, 3]


def test_a_static_member_keeps_its_assignment_while_it_is_away(memory: MemoryBroker) -> None:
    one, two = Consumer(memory, "m1", instance="i"), Consumer(memory, "m2")
    for consumer in (one, two, one, one, two):
        consumer.beat()
    mine = one.partitions
    taker = Consumer(memory, "m3", instance="i")
    with pytest.raises(Conflict) as caught:
        taker.beat()
    assert code_of(caught) is ErrorCode.MEMBER_FENCED
    one.leave(AWAY)
    two.beat()
    assert len(two.partitions) == 2
    taker.beat()
    assert taker.partitions == mine
    with pytest.raises(Conflict) as caught:
        one.beat(is_full=False)
    assert code_of(caught) is ErrorCode.MEMBER_FENCED
    taker.leave(AWAY)
    memory.advance(40.0)
    two.beat()
    memory.advance(6.0)
    two.beat()
    assert two.partitions == [0, 1, 2, 3]


def test_members_keep_their_assignments_over_a_restart_until_they_return(memory: MemoryBroker) -> None:
    groups = memory.broker.groups
    one = Consumer(memory, "m1")
    one.beat()
    groups.join("g", "t", "m2", wire="flux")
    one.beat()
    one.beat()
    memory.run()
    memory.restart()
    groups = memory.broker.groups
    assert groups.join("g", "t", "m2", wire="flux").partitions == (1, 3)
    assert commit(memory, one, 0) is None, "records read before the restart can be committed"
    assert commit(memory, one, 1) is ErrorCode.PARTITION_NOT_ASSIGNED
    with pytest.raises(Missing):
        one.beat(is_full=False)
    epoch = one.epoch
    one.epoch, one.reading = JOINING, NOTHING
    one.beat()
    assert one.partitions == [0, 2]
    assert commit(memory, one, 0, epoch) is ErrorCode.GENERATION_STALE or one.epoch == epoch
    memory.restart()
    memory.advance(11.0)
    assert memory.broker.groups.join("g", "t", "m2", wire="flux").partitions == (0, 1, 2, 3), (
        "the first member has not returned"
    )


def test_a_member_cannot_commit_after_a_restart_once_partitions_were_reassigned() -> None:
    """Another member may have read its partitions meanwhile, and read further."""
    memory = broker_with_a_topic()
    one = Consumer(memory, "m1")
    one.beat()
    memory.run()
    memory.restart()
    assert commit(memory, one, 0) is None
    memory.broker.groups.join("g", "t", "m2", wire="flux")
    assert commit(memory, one, 0) is ErrorCode.MEMBER_MISSING
    one.epoch, one.reading = JOINING, NOTHING
    one.beat()
    assert commit(memory, one, one.partitions[0]) is None


def test_commits_need_the_current_epoch(memory: MemoryBroker) -> None:
    one = Consumer(memory, "m1")
    one.beat()
    assert commit(memory, one, 0) is None
    assert commit(memory, one, 0, one.epoch - 1) is ErrorCode.GENERATION_STALE
    assert memory.broker.position("t", 0, PositionKind.GROUP, "g") == 7


def test_a_member_can_commit_a_topic_that_it_does_not_read(memory: MemoryBroker) -> None:
    """After it stopped reading the topic, in a topic that never had a group, and after a restart before it returned."""
    for name in ("u", "v"):
        memory.broker.create_topic(TopicName.parse(name), 2)
    one = Consumer(memory, "m1", "t", "u")
    one.beat()
    one.topics = frozenset({"t"})
    one.beat()
    assert commit(memory, one, 0, topic="u") is None, "the first member has not released it yet"
    one.beat()
    for topic in ("u", "v"):
        assert commit(memory, one, 0, topic=topic) is None
        assert memory.broker.position(topic, 0, PositionKind.GROUP, "g") == 7
    memory.run()
    memory.restart()
    for topic in ("u", "v"):
        assert commit(memory, one, 1, topic=topic) is None
        assert memory.broker.position(topic, 1, PositionKind.GROUP, "g") == 7


def test_a_member_cannot_commit_a_partition_that_another_member_reads(memory: MemoryBroker) -> None:
    memory.broker.create_topic(TopicName.parse("u"), 2)
    one, two = Consumer(memory, "m1", "t", "u"), Consumer(memory, "m2", "u")
    one.beat()
    one.topics = frozenset({"t"})
    one.beat()
    two.beat()
    assert commit(memory, two, 0, topic="u") is ErrorCode.PARTITION_NOT_ASSIGNED, (
        "the first member has not released it yet"
    )
    assert commit(memory, one, 0, topic="u") is None
    one.beat()
    two.beat()
    assert commit(memory, two, 0, topic="u") is None
    assert commit(memory, one, 0, topic="u") is ErrorCode.PARTITION_NOT_ASSIGNED
    memory.broker.create_topic(TopicName.parse("w"), 2)
    memory.broker.groups.join("g", "w", "m3", wire="flux")
    assert commit(memory, one, 0, topic="w") is ErrorCode.PARTITION_NOT_ASSIGNED


def test_a_joining_member_must_send_its_subscription(memory: MemoryBroker) -> None:
    consumers = memory.broker.consumers
    for beat in (
        Beat("m", JOINING, "kafka"),
        Beat("m", JOINING, "kafka", rebalance_timeout_s=1.0, topics=frozenset({"t"})),
        Beat("m", JOINING, "kafka", rebalance_timeout_s=1.0, topics=frozenset({"t"}), owned={b"x": frozenset({1})}),
    ):
        with pytest.raises(Invalid):
            consumers.beat("g", beat)
    with pytest.raises(Missing):
        consumers.beat("g", Beat("m", 1, "kafka"))
    assert consumers.names() == []


def test_limits() -> None:
    memory = MemoryBroker(BrokerSettings(members_max=2, group_bytes_max=400))
    memory.broker.create_topic(TopicName.parse("t"), 1)
    with pytest.raises(Invalid):
        Consumer(memory, "m1", *(f"{number}" for number in range(TOPICS_MAX + 1))).beat()
    with pytest.raises(Busy):
        Consumer(memory, "m1", "t" * 500).beat()
    assert memory.broker.consumers.names() == []
    Consumer(memory, "m1").beat()
    Consumer(memory, "m2").beat()
    with pytest.raises(Busy):
        Consumer(memory, "m3").beat()
    view = memory.broker.groups.view("g", "t")
    assert view is not None
    assert [member.id for member in view.members] == ["m1", "m2"]


def test_counted_memory_is_released(memory: MemoryBroker) -> None:
    before = memory.broker._state.usage.bytes
    one, two = Consumer(memory, "m1"), Consumer(memory, "m2", instance="i")
    for consumer in (one, two, one, one, two):
        consumer.beat()
    one.leave()
    two.leave()
    memory.broker.groups.delete("g", "t")
    assert memory.broker._state.usage.bytes == before
    assert not memory.broker.groups.holdings
    assert memory.broker.consumers.names() == []


def test_a_deleted_group_gets_its_members_back(memory: MemoryBroker) -> None:
    one = Consumer(memory, "m1")
    one.beat()
    memory.broker.groups.delete("g", "t")
    one.beat(is_full=False)
    assert one.beat().is_settled
    assert one.partitions == [0, 1, 2, 3]


def test_memberships_in_many_topics_are_added_in_slices(memory: MemoryBroker) -> None:
    count = 2 * JOINS_AT_ONCE_MAX + 1
    names = [f"many{number}" for number in range(count)]
    for name in names:
        memory.broker.create_topic(TopicName.parse(name), 1)
    memory.run()
    one = Consumer(memory, "m1", *names)
    reported = one.beat()
    assert (len(one.reading), reported.is_settled) == (JOINS_AT_ONCE_MAX, False), "it returns within the session"
    memory.run()
    reported = one.beat(is_full=False)
    assert (len(one.reading), reported.is_settled) == (count, True)
    assert one.beat(is_full=False).assignment is None


def test_a_member_that_leaves_while_its_memberships_are_added_leaves_none_behind(memory: MemoryBroker) -> None:
    names = [f"many{number}" for number in range(3 * JOINS_AT_ONCE_MAX)]
    for name in names:
        memory.broker.create_topic(TopicName.parse(name), 1)
    memory.run()
    one = Consumer(memory, "m1", *names)
    one.beat()
    one.leave()
    memory.run()
    views = [memory.broker.groups.view("g", name) for name in names]
    assert not any(view.members for view in views if view is not None)


def test_many_memberships_of_an_expired_member_are_removed_in_several_passes(memory: MemoryBroker) -> None:
    loop = memory.loop
    assert isinstance(loop, ManualLoop)
    names = [f"many{number}" for number in range(4 * JOINS_AT_ONCE_MAX)]
    for name in names:
        memory.broker.create_topic(TopicName.parse(name), 1)
    one, other = Consumer(memory, "m1", *names), Consumer(memory, "m2", names[-1])
    for consumer in (one, other):
        consumer.beat()
        memory.run()

    def seats() -> int:
        views = [memory.broker.groups.view("g", name) for name in names]
        return sum(len(view.members) for view in views if view is not None)

    memory.advance(44.0)
    other.beat(is_full=False)
    loop.clock.advance(2.0)
    seen = [seats()]
    for _ in range(20):
        loop.run_pass()
        seen.append(seats())
    assert (seen[0], seen[-1]) == (len(names) + 1, 1)
    assert all(before - after <= JOINS_AT_ONCE_MAX for before, after in pairwise(seen))
    assert list(memory.broker.consumers.view("g").members[0].topics) == [names[-1]]  # type: ignore[union-attr]  # it is there


def test_many_memberships_of_a_leaving_member_are_removed_in_several_passes(memory: MemoryBroker) -> None:
    loop = memory.loop
    assert isinstance(loop, ManualLoop)
    names = [f"many{number}" for number in range(4 * JOINS_AT_ONCE_MAX)]
    for name in names:
        memory.broker.create_topic(TopicName.parse(name), 1)
    one = Consumer(memory, "m1", *names)
    while not one.beat().is_settled:
        memory.run()

    def seats() -> int:
        views = [memory.broker.groups.view("g", name) for name in names]
        return sum(len(view.members) for view in views if view is not None)

    one.leave()
    seen = [seats()]
    with pytest.raises(Conflict):
        one.beat(is_full=False)
    for _ in range(20):
        loop.run_pass()
        seen.append(seats())
    assert (seen[0], seen[-1]) == (len(names), 0)
    assert all(before - after <= JOINS_AT_ONCE_MAX for before, after in pairwise(seen))
    assert memory.broker.consumers.names() == []


@pytest.mark.parametrize("instance", [None, "i"])
def test_a_member_can_rejoin_while_its_many_memberships_are_removed(memory: MemoryBroker, instance: str | None) -> None:
    loop = memory.loop
    assert isinstance(loop, ManualLoop)
    names = [f"many{number}" for number in range(4 * JOINS_AT_ONCE_MAX)]
    for name in names:
        memory.broker.create_topic(TopicName.parse(name), 1)
    one = Consumer(memory, "m1", *names, instance=instance)
    while not one.beat().is_settled:
        memory.run()
    one.leave()
    loop.run_pass()
    again = Consumer(memory, "m1" if instance is None else "m2", *names, instance=instance)
    while not again.beat().is_settled:
        memory.run()
    assert len(again.reading) == len(names)


def test_expired_members_are_removed_one_per_pass(memory: MemoryBroker) -> None:
    loop = memory.loop
    assert isinstance(loop, ManualLoop)
    for number in range(5):
        Consumer(memory, f"m{number}").beat()
    memory.run()

    def members() -> int:
        view = memory.broker.groups.view("g", "t")
        return 0 if view is None else len(view.members)

    loop.clock.advance(46.0)
    seen = [members()]
    for _ in range(20):
        loop.run_pass()
        seen.append(members())
    assert seen[-1] == 0
    assert all(before - after <= 1 for before, after in pairwise(seen))
