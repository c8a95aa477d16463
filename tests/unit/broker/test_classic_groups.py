"""Classic groups of a whole broker: timers, limits, offsets and names (concepts: groups#classic-groups)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from polywire.broker.groups.classic import KEPT_BYTES_MAX, Phase
from polywire.broker.groups.classic_groups import KEEP_AGAIN_S
from polywire.broker.groups.classic_members import IdGiven, Join, Joined, Synced
from polywire.broker.groups.commits import Commit
from polywire.broker.groups.offsets import Position
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.settings import BrokerSettings
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Missing
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import PositionKind
from tests.unit.broker.answers import Answers

GROUP = PositionKind.GROUP
SESSION_S = 10.0


class Reported:
    """The responses to one member."""

    def __init__(self) -> None:
        self.answers: list[object] = []

    def __call__(self, answer: IdGiven | Joined | Synced | BrokerError) -> None:
        self.answers.append(answer)

    @property
    def joined(self) -> Joined:
        """Return the join result in the only response."""
        [answer] = self.answers
        assert isinstance(answer, Joined), answer
        return answer

    @property
    def code(self) -> ErrorCode:
        """Return the error code in the only response."""
        [answer] = self.answers
        assert isinstance(answer, BrokerError), answer
        return answer.code


def join(
    memory: MemoryBroker,
    new_id: str,
    *,
    member: str = "",
    topics: tuple[str, ...] = ("t",),
    group: str = "g",
    session_s: float = SESSION_S,
    metadata: bytes = b"",
    by: Caller = NO_CALLER,
    id_first: bool = False,
    instance: str | None = None,
) -> Reported:
    reported = Reported()
    asked = Join(
        member_id=member,
        session_timeout_s=session_s,
        rebalance_timeout_s=60.0,
        protocol_type="consumer",
        protocols=(("range", metadata),),
        topics=frozenset(topics),
        id_first=id_first,
        instance_id=instance,
        wire="kafka",
    )
    memory.broker.classic.join(group, asked, new_id=new_id, by=by, done=reported)
    return reported


def sync(memory: MemoryBroker, member: str, generation: int, *, group: str = "g") -> Reported:
    reported = Reported()
    memory.broker.classic.sync(group, member, generation, {member: b"all"}, done=reported)
    return reported


def code_of(caught: pytest.ExceptionInfo[BrokerError]) -> ErrorCode:
    return caught.value.code


def test_responses_arrive_from_the_loop(memory: MemoryBroker) -> None:
    reported = join(memory, "a")
    assert reported.answers == []
    memory.run()
    assert reported.joined.leader == "a"
    synced = sync(memory, "a", 1)
    memory.run()
    assert synced.answers == [Synced("consumer", "range", b"all")]
    memory.broker.classic.heartbeat("g", "a", 1)


def test_an_issued_id_expires(memory: MemoryBroker) -> None:
    reported = join(memory, "a", id_first=True)
    memory.run()
    assert reported.answers == [IdGiven("a")]
    memory.advance(SESSION_S + 1)
    with pytest.raises(Missing):
        join(memory, "", member="a")
    assert memory.broker.classic.names() == []


def test_silent_members_are_removed_when_they_are_due(memory: MemoryBroker) -> None:
    join(memory, "a")
    memory.run()
    sync(memory, "a", 1)
    memory.advance(SESSION_S - 1)
    memory.broker.classic.heartbeat("g", "a", 1)
    memory.advance(SESSION_S - 1)
    memory.broker.classic.heartbeat("g", "a", 1)
    memory.advance(SESSION_S + 1)
    view = memory.broker.classic.view("g")
    assert view is not None
    assert (view.phase, view.members) == (Phase.EMPTY, ())
    with pytest.raises(Missing) as caught:
        memory.broker.classic.heartbeat("g", "a", 1)
    assert code_of(caught) is ErrorCode.MEMBER_MISSING


def test_a_repeated_join_replaces_the_waiting_one(memory: MemoryBroker) -> None:
    join(memory, "a")
    memory.run()
    first = join(memory, "b")
    again = join(memory, "", member="b")
    memory.run()
    assert (first.code, again.answers) == (ErrorCode.GROUP_REBALANCING, [])
    join(memory, "", member="a")
    memory.run()
    assert again.joined.generation == 2


def test_an_unused_group_is_forgotten(memory: MemoryBroker) -> None:
    join(memory, "a")
    memory.run()
    memory.broker.classic.leave("g", "a")
    assert memory.broker.classic.names() == ["g"]
    memory.advance(3601)
    assert memory.broker.classic.names() == []


@pytest.mark.parametrize("session_s", [5.9, 1800.1])
def test_session_timeouts_are_bounded(memory: MemoryBroker, session_s: float) -> None:
    with pytest.raises(Invalid) as caught:
        join(memory, "a", session_s=session_s)
    assert code_of(caught) is ErrorCode.INVALID_SESSION_TIMEOUT
    assert memory.broker.classic.names() == []


@pytest.mark.parametrize("group", ["", "g" * 256])
def test_a_group_needs_a_valid_name(memory: MemoryBroker, group: str) -> None:
    with pytest.raises(Invalid) as caught:
        join(memory, "a", group=group)
    assert code_of(caught) is ErrorCode.INVALID_NAME


def test_groups_members_and_bytes_are_limited() -> None:
    memory = MemoryBroker(BrokerSettings(groups_max=2, members_max=2, group_bytes_max=1000))
    join(memory, "a", group="one", metadata=b"x" * 900)
    with pytest.raises(Busy):
        join(memory, "b", group="one", metadata=b"x" * 900)
    join(memory, "b", group="one")
    with pytest.raises(Busy):
        join(memory, "c", group="one")
    join(memory, "d", group="two")
    with pytest.raises(Busy):
        join(memory, "e", group="three")
    memory.broker.classic.leave("two", "d")
    memory.broker.classic.delete("two")
    join(memory, "e", group="three")


def test_the_memory_of_a_deleted_group_is_released(memory: MemoryBroker) -> None:
    usage = memory.broker._state.usage
    before = usage.bytes
    join(memory, "a", metadata=b"x" * 100, by=Caller(None, 7))
    assert usage.bytes_of(7) > 100
    memory.run()
    sync(memory, "a", 1)
    memory.broker.classic.leave("g", "a", by=Caller(None, 7))
    memory.broker.classic.delete("g", by=Caller(None, 7))
    assert (usage.bytes, usage.owners()) == (before, {})


class Writing:
    """The assignment format of these tests: the broker cannot write it."""

    def encode(self, partitions: Mapping[str, Collection[int]]) -> bytes:
        return b""

    def decode(self, assignment: bytes) -> Mapping[str, Collection[int]]:
        return {}


def restart(memory: MemoryBroker, *, snapshot: bool = False) -> None:
    if snapshot:
        memory.log.take_snapshot()
    memory.restart()
    memory.broker.classic.restore("kafka", Writing())


@pytest.mark.parametrize("snapshot", [False, True])
def test_members_keep_their_generation_over_a_restart(memory: MemoryBroker, snapshot: bool) -> None:
    joined = [join(memory, "a"), join(memory, "b", metadata=b"b says", instance="B")]
    memory.run()
    rejoined = join(memory, "", member="a")
    memory.run()
    assert [reported.joined.generation for reported in (joined[1], rejoined)] == [2, 2]
    sync(memory, "a", 2)
    before = memory.broker.classic.view("g")
    memory.run()
    usage = memory.broker._state.usage
    taken = usage.bytes
    restart(memory, snapshot=snapshot)
    classic = memory.broker.classic
    assert (classic.view("g"), memory.broker._state.usage.bytes) == (before, taken)
    classic.heartbeat("g", "a", 2)
    classic.check_commit("g", "b", 2, instance_id="B")
    reported = sync(memory, "a", 2)
    memory.run()
    assert reported.answers == [Synced("consumer", "range", b"all")]
    back = join(memory, "c", metadata=b"b says", instance="B")
    memory.run()
    assert (back.joined.generation, back.joined.member_id) == (2, "c")
    restart(memory, snapshot=snapshot)
    memory.broker.classic.heartbeat("g", "c", 2, instance_id="B")
    with pytest.raises(Conflict) as caught:
        memory.broker.classic.heartbeat("g", "b", 2, instance_id="B")
    assert code_of(caught) is ErrorCode.MEMBER_FENCED
    memory.advance(SESSION_S - 1)
    memory.broker.classic.heartbeat("g", "a", 2)
    memory.advance(2)
    with pytest.raises(Conflict) as caught:
        memory.broker.classic.heartbeat("g", "a", 2)
    assert code_of(caught) is ErrorCode.GROUP_REBALANCING, "the other member was silent for a whole session"


def test_a_group_that_has_not_settled_is_not_stored(memory: MemoryBroker) -> None:
    for act in (
        lambda: join(memory, "b"),
        lambda: memory.broker.classic.leave("g", "a"),
        lambda: memory.advance(SESSION_S + 1),
    ):
        first = join(memory, "a")
        memory.run()
        generation = first.joined.generation
        sync(memory, "a", generation)
        memory.run()
        act()
        memory.run()
        restart(memory)
        assert memory.broker.classic.view("g") is None
        with pytest.raises(Missing):
            memory.broker.classic.heartbeat("g", "a", generation)


def test_assignments_over_the_limit_are_not_stored(memory: MemoryBroker) -> None:
    join(memory, "a", metadata=bytes(KEPT_BYTES_MAX))
    memory.run()
    reported = sync(memory, "a", 1)
    memory.run()
    assert reported.answers == [Synced("consumer", "range", b"all")]
    restart(memory)
    assert memory.broker.classic.view("g") is None


def test_a_failed_store_of_assignments_is_retried(memory: MemoryBroker) -> None:
    join(memory, "a")
    memory.run()
    memory.log.disk_full = True
    sync(memory, "a", 1)
    memory.run()
    memory.advance(KEEP_AGAIN_S)
    assert not memory.broker._state.classic_groups
    memory.log.disk_full = False
    memory.advance(KEEP_AGAIN_S)
    restart(memory)
    memory.broker.classic.heartbeat("g", "a", 1)


def test_stored_assignments_end_with_sharing_or_a_newer_generation(memory: MemoryBroker) -> None:
    memory.broker.ensure_topic("t")
    for group in ("g", "h"):
        join(memory, "a", group=group)
        memory.run()
        sync(memory, "a", 1, group=group)
    memory.run()
    state = memory.broker._state
    assert sorted(state.classic_groups) == ["g", "h"]
    done = Answers()
    memory.broker.classic.commit("g", {"t": {0: Commit(5)}}, generation=2, done=done)
    memory.run()
    memory.restart()
    memory.broker.groups.join("h", "t", "flux-member", wire="flux")
    memory.broker.classic.restore("kafka", Writing())
    classic = memory.broker.classic
    views = [view for view in map(classic.view, ("g", "h")) if view is not None]
    assert [[member.id for member in view.members] for view in views] == [[], ["flux-member"]]
    memory.run()
    assert not memory.broker._state.classic_groups


def test_a_full_disk_does_not_block_assignments(memory: MemoryBroker) -> None:
    join(memory, "a")
    memory.run()
    memory.log.disk_full = True
    reported = sync(memory, "a", 1)
    memory.run()
    assert reported.answers == [Synced("consumer", "range", b"all")]
    assert not memory.broker._state.classic_groups
    memory.log.disk_full = False
    memory.broker.classic.leave("g", "a")


def test_members_rejoin_after_a_restart_and_resume_from_their_offsets(memory: MemoryBroker) -> None:
    memory.broker.ensure_topic("t")
    join(memory, "a")
    memory.run()
    sync(memory, "a", 1)
    classic = memory.broker.classic
    classic.check_commit("g", "a", 1)
    done = Answers()
    assert classic.commit("g", {"t": {0: Commit(5, 3, "where"), 1: Commit(6)}}, generation=1, done=done) == {}
    memory.run()
    done.check()
    for snapshot in (False, True):
        if snapshot:
            memory.log.take_snapshot()
        memory.restart()
        found = memory.broker.classic.positions("g", "t")
        assert dict(found) == {0: Position(5, 1, 3, "where"), 1: Position(6, 1)}
    with pytest.raises(Missing):
        memory.broker.classic.heartbeat("g", "a", 1)
    memory.broker.classic.check_commit("g", "", -1)


def test_offsets_read_before_a_restart_can_be_committed_until_a_member_joins(memory: MemoryBroker) -> None:
    memory.broker.ensure_topic("t")
    for generation in (4, 7):
        memory.broker.classic.commit("g", {"t": {generation: Commit(5)}}, generation=generation, done=None)
    memory.run()
    memory.restart()
    classic = memory.broker.classic
    classic.check_commit("g", "a", 7)
    for name, generation in (("g", 6), ("unknown", 0)):
        with pytest.raises(Conflict) as caught:
            classic.check_commit(name, "a", generation)
        assert code_of(caught) is ErrorCode.GENERATION_STALE
    reported = join(memory, "b")
    memory.run()
    assert reported.joined.generation == 8
    with pytest.raises(Missing):
        classic.check_commit("g", "a", 7)
    classic.leave("g", "b")
    assert classic.view("g") is not None


def test_commit_metadata_is_limited_and_counted(memory: MemoryBroker) -> None:
    memory.broker.ensure_topic("t")
    classic, usage = memory.broker.classic, memory.broker._state.usage
    for metadata in ("x" * 4097, "é" * 2049, "\ud800"):
        refused = classic.commit("g", {"t": {0: Commit(1, metadata=metadata)}}, generation=-1, done=None)
        assert refused["t"].code is ErrorCode.INVALID_REQUEST
    assert usage.bytes == 0 or not classic.positions("g", "t")
    classic.commit("g", {"t": {0: Commit(1), 1: Commit(1)}}, generation=-1, done=None)
    bare = usage.bytes
    classic.commit("g", {"t": {0: Commit(1, metadata="x" * 4096)}}, generation=-1, done=None)
    assert usage.bytes == bare + 4096
    classic.commit("g", {"t": {0: Commit(2, metadata="y" * 10)}}, generation=-1, done=None)
    assert usage.bytes == bare + 10
    memory.broker.commit_position("t", 0, GROUP, "g", 3)
    assert usage.bytes == bare
    assert classic.positions("g", "t")[0] == Position(3, -1)
    classic.commit("g", {"t": {1: Commit(2, metadata="y" * 10)}}, generation=-1, done=None)
    memory.broker.delete_positions(GROUP, "g", full_name="t", partition_number=1)
    memory.broker.delete_positions(GROUP, "g")
    assert usage.bytes + 0 < bare
    assert classic.names() == []


def test_one_refused_topic_does_not_block_the_others(memory: MemoryBroker) -> None:
    commits = {"t": {0: Commit(1)}, "u": {0: Commit(1, metadata="x" * 5000)}}
    refused = memory.broker.classic.commit("g", commits, generation=-1, done=None)
    assert list(refused) == ["u"]
    assert memory.broker.classic.topics("g") == ["t"]


def test_a_topic_with_members_of_other_protocols_refuses_classic_members(memory: MemoryBroker) -> None:
    groups, classic = memory.broker.groups, memory.broker.classic
    memory.broker.groups.join("g", "t", "m", wire="flux")
    with pytest.raises(Conflict) as caught:
        join(memory, "a", topics=("s", "t"))
    assert code_of(caught) is ErrorCode.GROUP_PROTOCOL_MISMATCH
    refused = classic.commit("g", {"t": {0: Commit(1)}}, generation=-1, done=None)
    assert refused["t"].code is ErrorCode.MEMBER_MISSING
    with pytest.raises(Conflict) as caught:
        classic.delete("g")
    assert code_of(caught) is ErrorCode.GROUP_NOT_EMPTY
    join(memory, "a", topics=("s",))
    groups.leave("g", "t", "m", None, wire="flux")
    join(memory, "b", topics=("t",))


def test_topics_with_classic_members_refuse_members_of_other_protocols(memory: MemoryBroker) -> None:
    join(memory, "a")
    with pytest.raises(Conflict) as caught:
        memory.broker.groups.join("g", "t", "m", wire="flux")
    assert code_of(caught) is ErrorCode.GROUP_PROTOCOL_MISMATCH
    with pytest.raises(Conflict):
        memory.broker.commit_position("t", 0, GROUP, "g", 1)
    memory.broker.commit_position("t", 0, PositionKind.CONSUMER, "g", 1)
    memory.broker.groups.join("g", "u", "m", wire="flux")
    memory.broker.classic.leave("g", "a")
    memory.broker.groups.join("g", "t", "m", wire="flux")


def test_groups_of_all_protocols_are_listed(memory: MemoryBroker) -> None:
    memory.broker.groups.join("coordinated", "t", "m", wire="flux")
    join(memory, "a", group="classic")
    memory.broker.commit_position("t", 0, GROUP, "positions", 1)
    classic = memory.broker.classic
    assert classic.names() == ["classic", "coordinated", "positions"]
    views = [classic.view(name) for name in classic.names()]
    assert [(view.phase, len(view.members)) for view in views if view is not None] == [
        (Phase.COMPLETING, 1),
        (Phase.STABLE, 1),
        (Phase.EMPTY, 0),
    ]
    assert classic.view("other") is None


def test_a_deleted_group_and_its_positions_are_gone(memory: MemoryBroker) -> None:
    classic = memory.broker.classic
    memory.broker.ensure_topic("t")
    join(memory, "a")
    with pytest.raises(Conflict) as caught:
        classic.delete("g")
    assert code_of(caught) is ErrorCode.GROUP_NOT_EMPTY
    classic.leave("g", "a")
    classic.commit("g", {"t": {0: Commit(1)}, "later": {0: Commit(1)}}, generation=-1, done=None)
    done = Answers()
    classic.delete("g", done=done)
    memory.run()
    done.check()
    assert (classic.names(), classic.topics("g")) == ([], [])
    with pytest.raises(Missing) as missing:
        classic.delete("g")
    assert code_of(missing) is ErrorCode.GROUP_MISSING
    memory.restart()
    assert memory.broker.classic.names() == []


def test_offsets_stay_while_there_are_members_and_expire_afterwards() -> None:
    memory = MemoryBroker(BrokerSettings(positions_expiry_us=10_000_000, expiry_grace_s=0, expiry_interval_s=1))
    classic = memory.broker.classic
    memory.broker.ensure_topic("t")
    classic.commit("g", {"t": {0: Commit(1)}}, generation=-1, done=None)
    join(memory, "a", session_s=1800)
    memory.advance(50)
    assert classic.topics("g") == ["t"]
    classic.leave("g", "a")
    memory.advance(5)
    assert classic.topics("g") == ["t"]
    memory.advance(15)
    assert classic.topics("g") == []
