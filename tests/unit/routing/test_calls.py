"""Methods of the broker for topics of another process have the results of a single process."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from polywire.broker.api import Pending
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.group import Membership
from polywire.broker.owners import ITSELF
from polywire.broker.record_verbs import Bounds
from polywire.broker.settings import TopicSettings
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.routing.broker import METHODS
from polywire.types import Assignor, PositionKind, TopicName
from tests.unit.routing.test_router import HERE, THERE, Together


@pytest.fixture
def together() -> Together:
    return Together()


@pytest.fixture
def topic(together: Together) -> Topic:
    """A topic of the other process."""
    together.there.create_topic(TopicName.parse(THERE), 4)
    together.run()
    found = together.find(THERE)
    assert found is not None
    return found


def test_every_method_has_arguments_that_can_be_sent() -> None:
    assert {"groups.join", "bounds", "configure_topic"} <= METHODS.keys()
    for method in METHODS.values():
        # msgspec reports a type that it cannot encode when it first decodes
        with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
            msgspec.msgpack.decode(b"\xc1", type=method._arguments)
        with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
            method.decode_result(memoryview(b"\xc1"))


def join(together: Together, member: str) -> Membership:
    groups = together.broker.groups
    return together.call(lambda: groups.join("g", THERE, member, wire="flux", assignor=Assignor.RANGE))


def test_a_group_of_a_topic_of_another_process(together: Together, topic: Topic) -> None:
    assert join(together, "one") == Membership(2, (0, 1, 2, 3))
    assert join(together, "two") == Membership(3, (2, 3))
    assert join(together, "one") == Membership(3, (0, 1))
    assert isinstance(together.there.groups, Coordinator)
    assert together.there.groups.names(THERE) == ["g"]


def test_errors_of_a_group_of_another_process(together: Together, topic: Topic) -> None:
    groups = together.broker.groups
    with pytest.raises(Missing) as missing:
        together.call(lambda: groups.heartbeat("g", THERE, "one", 1, wire="flux"))
    assert missing.value.code is ErrorCode.GROUP_MISSING
    join(together, "one")
    with pytest.raises(Conflict) as stale:
        together.call(lambda: groups.heartbeat("g", THERE, "one", 1, wire="flux"))
    assert stale.value.code is ErrorCode.GENERATION_STALE


def test_a_repeated_request_gets_the_answer_of_its_first_call(together: Together, topic: Topic) -> None:
    groups = together.broker.groups
    with pytest.raises(Pending) as first:
        groups.view("g", THERE)
    first.value.then(lambda: None)
    together.run()
    together.there.groups.create("g", THERE)
    with first.value:
        assert groups.view("g", THERE) is None, "the answer of the time of the request"
    assert together.call(lambda: groups.view("g", THERE)) is not None


def test_a_request_with_several_calls(together: Together, topic: Topic) -> None:
    groups, calls = together.broker.groups, []

    def request() -> tuple[int, list[str]]:
        generation = groups.join("g", THERE, "one", wire="flux").generation
        calls.append(generation)
        return generation, groups.names(THERE)

    with pytest.raises(Pending) as pending:
        request()
    pending.value.then(lambda: None)
    together.run()
    with pytest.raises(Pending) as again, pending.value:
        request()
    again.value.then(lambda: None)
    together.run()
    with again.value:
        assert request() == (2, ["g"])
    assert calls == [2, 2]


def test_commits_complete_when_they_are_stored(together: Together, topic: Topic) -> None:
    done: list[int | BrokerError] = []
    broker = together.broker
    broker.commit_position(THERE, 1, PositionKind.GROUP, "g", 7, done=done.append)
    broker.commit_positions(THERE, {2: 8, 3: 9}, PositionKind.GROUP, "g", done=done.append)
    with pytest.raises(Invalid):
        broker.commit_positions(THERE, {2: -(2**70)}, PositionKind.GROUP, "g")
    with pytest.raises(Invalid):
        broker.commit_positions(THERE, {2: 1}, PositionKind.GROUP, "\udc80")
    assert done == []
    together.run()
    assert done == [0, 0]
    broker.commit_positions(THERE, {2: 1}, PositionKind.GROUP, "h" * 5000, done=done.append)
    together.run()
    assert isinstance(done[2], Invalid)
    assert together.call(lambda: broker.position(THERE, 1, PositionKind.GROUP, "g")) == 7
    assert together.call(lambda: broker.positions_in(THERE, PositionKind.GROUP, "g")) == {1: 7, 2: 8, 3: 9}
    assert together.there.positions_in(THERE, PositionKind.GROUP, "g") == {1: 7, 2: 8, 3: 9}


def test_lists_of_groups_have_those_of_all_processes(together: Together, topic: Topic) -> None:
    together.shards.brokers[0].create_topic(TopicName.parse(HERE), 1)
    together.shards.brokers[0].groups.create("here", HERE)
    together.there.groups.create("there", THERE)
    groups = together.broker.groups
    assert sorted(together.call(groups.pairs)) == [(THERE, "there"), (HERE, "here")]
    assert [view.name for view in together.call(groups.views)] == ["there", "here"]
    assert [view.name for view in together.call(lambda: groups.views(THERE))] == ["there"]
    assert [view.name for view in groups.views(HERE)] == ["here"]
    groups.bind("flux", "here", HERE)
    groups.bind("flux", "there", THERE)
    together.run()
    assert together.call(lambda: groups.bound("flux")) == {"here": HERE, "there": THERE}
    assert [groups.bound_to("flux", name) for name in ("here", "there", "nowhere")] == [HERE, THERE, None]


def test_topics_of_another_process_are_changed_there(together: Together, topic: Topic) -> None:
    done: list[int | BrokerError] = []
    broker = together.broker
    broker.configure_topic(topic, TopicSettings(retention_bytes=12345678), done=done.append)
    broker.shrink_topic(topic, 2, done=done.append)
    together.run()
    assert done == [0, 0]
    assert (topic.settings.retention_bytes, len(topic.partitions)) == (12345678, 2)
    found: list[Any] = []
    broker.bounds(topic.partitions[0], then=found.append)
    together.produce(topic.partitions[0], b"1", b"2")
    together.run()
    broker.bounds(topic.partitions[0], then=found.append)
    together.run()
    assert [(bounds.first_offset, bounds.next_offset) for bounds in found] == [(0, 0), (0, 2)]
    assert isinstance(found[0], Bounds)
    assert together.call(lambda: broker.purge_topic(topic, done=done.append)) is True
    broker.delete_topic(topic, done=done.append)
    together.run()
    assert done == [0, 0, 0, 0]
    assert together.there.topics() == []


def test_a_method_ends_with_its_link(together: Together, topic: Topic) -> None:
    groups = together.broker.groups
    with pytest.raises(Pending) as pending:
        groups.names(THERE)
    came: list[None] = []
    pending.value.then(lambda: came.append(None))
    together.shards.links[0].break_off()
    assert came == [None]
    with pytest.raises(Unavailable), pending.value:
        groups.names(THERE)


def test_methods_for_topics_of_this_process_take_no_link(together: Together) -> None:
    together.shards.brokers[0].create_topic(TopicName.parse(HERE), 1)
    together.shards.links[0].break_off()
    assert together.broker.groups.join("g", HERE, "one", wire="flux").partitions == (0,)
    together.broker.commit_position(HERE, 0, PositionKind.GROUP, "g", 3)
    assert together.broker.position(HERE, 0, PositionKind.GROUP, "g") == 3


def test_topics_of_all_processes_are_listed(together: Together, topic: Topic) -> None:
    together.shards.brokers[0].create_topic(TopicName.parse(HERE), 1)
    broker = together.broker
    assert [found.name.full for found in broker.topics()] == [THERE, HERE]
    version = broker.topics_version
    assert broker.topic_of_id(topic.id) is topic
    together.there.delete_topic(together.there.topic(THERE))
    together.run()
    assert [found.name.full for found in broker.topics()] == [HERE]
    assert broker.topics_version > version
    assert broker.topic_of_id(topic.id) is None


def test_a_topic_is_created_in_the_process_with_the_fewest(together: Together) -> None:
    broker, known, done = together.broker, [], []  # type: ignore[var-annotated]
    together.shards.brokers[0].create_topic(TopicName.parse(HERE), 1)
    name = TopicName.parse("orders")
    assert not broker.make_topic(name, 3, then=known.append, done=done.append)
    together.run()
    assert [topic.name.full for topic in together.there.topics()] == ["orders"]
    assert (len(known[0].partitions), done) == (3, [0])
    broker.make_topic(name, 3, then=known.append, done=done.append)
    assert not broker.grow_topic(known[0], 5, then=known.append, done=done.append)
    together.run()
    assert isinstance(done[1], Conflict)
    assert (done[2], known[1] is known[0], len(known[1].partitions)) == (0, True, 5)


def test_topics_of_several_processes_are_deleted_and_purged_together(together: Together, topic: Topic) -> None:
    broker, done = together.broker, []  # type: ignore[var-annotated]
    ended: list[Any] = []
    together.shards.brokers[0].create_topic(TopicName.parse(HERE), 1)
    together.produce(topic.partitions[0], b"1")
    together.produce(broker.topic(HERE).partitions[0], b"1")
    together.run()
    broker.purge_topics(broker.topics(), done=done.append)
    together.run()
    assert [isinstance(result, int) for result in done] == [True]
    assert {found.partitions[0].log.first_offset for found in (together.there.topic(THERE), broker.topic(HERE))} == {1}
    broker.delete_topics(broker.topics(), ended=ended.append, then=lambda: ended.append("all"), done=done.append)
    together.run()
    assert sorted(found.name.full for found in ended[:2]) == [THERE, HERE]
    assert (ended[2], len(ended), len(done), broker.topics()) == ("all", 3, 2, [])


def test_members_leave_when_the_link_of_their_process_ends(together: Together, topic: Topic) -> None:
    groups = together.broker.groups
    for member, connected in (("one", True), ("two", True), ("three", False)):
        together.call(lambda: groups.join("g", THERE, member, wire="iggy", connected=connected))  # noqa: B023 - called at once
    groups.leave("g", THERE, "two", None, wire="iggy", by=ITSELF)
    together.run()
    together.call(lambda: groups.join("g", THERE, "two", wire="iggy"))
    together.shards.links[0].break_off()
    together.run()
    view = together.there.groups.view("g", THERE)
    assert view is not None
    assert [member.id for member in view.members] == ["three", "two"]
