"""Classic groups: joining, assignment, sessions and leaving (concepts: groups#classic-groups)."""

from __future__ import annotations

import math

import pytest

from polywire.broker.groups.classic import TRANSITIONS, ClassicGroup, Phase
from polywire.broker.groups.classic_members import (
    NEW_MEMBER_S,
    Answer,
    IdGiven,
    Join,
    Joined,
    Limits,
    Synced,
    WaitingCall,
)
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Missing

SESSION_S, REBALANCE_S = 10.0, 60.0


def protocols(*names: str, metadata: bytes = b"m") -> tuple[tuple[str, bytes], ...]:
    return tuple((name, metadata + name.encode()) for name in names)


class Crowd:
    """A group, its clock, and the latest response to each member."""

    def __init__(self, *, members_max: int = 10, bytes_max: int = 10_000) -> None:
        self.group = ClassicGroup("g", Limits(members_max, bytes_max))
        self.now = 0.0
        self.answers: list[Answer] = []

    def join(
        self,
        member: str = "",
        *,
        new_id: str = "",
        instance: str | None = None,
        id_first: bool = False,
        offered: tuple[tuple[str, bytes], ...] = protocols("range"),
        protocol_type: str = "consumer",
        session_s: float = SESSION_S,
        rebalance_s: float = REBALANCE_S,
        may_skip: bool = False,
    ) -> str:
        join = Join(
            member_id=member,
            session_timeout_s=session_s,
            rebalance_timeout_s=rebalance_s,
            protocol_type=protocol_type,
            protocols=offered,
            instance_id=instance,
            id_first=id_first,
            may_skip=may_skip,
        )
        return self.group.join(join, new_id=new_id, now=self.now)

    def phase(self) -> Phase:
        return self.group.phase

    def sync(self, member: str, stale: int = 0, /, **assigned: bytes) -> None:
        self.group.sync(member, self.group.generation - stale, assigned, now=self.now)

    def beat(self, member: str, stale: int = 0, /, *, instance: str | None = None) -> None:
        self.group.heartbeat(member, self.group.generation - stale, instance_id=instance, now=self.now)

    def leave(self, member: str, *, instance: str | None = None) -> None:
        self.group.leave(member, instance_id=instance, now=self.now)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock; deadlines on the way expire when they are due."""
        end = self.now + seconds
        while (deadline := self.group.deadline) <= end:
            self.now = max(self.now, deadline)
            self.group.expire(self.now)
        self.now = end

    def reported(self, member: str, asked: WaitingCall = WaitingCall.JOIN) -> object:
        """Return the latest response to a member and remove it; other members' responses stay."""
        self.answers += self.group.take_answers()
        mine = [answer for answer in self.answers if (answer.member_id, answer.call) == (member, asked)]
        self.answers = [answer for answer in self.answers if answer not in mine]
        return mine[-1].answer if mine else None

    def joined(self, member: str) -> Joined:
        reported = self.reported(member)
        assert isinstance(reported, Joined), reported
        return reported

    def assigned(self, member: str) -> bytes:
        reported = self.reported(member, WaitingCall.SYNC)
        assert isinstance(reported, Synced), reported
        return reported.assignment

    def refused(self, member: str, asked: WaitingCall = WaitingCall.JOIN) -> ErrorCode:
        reported = self.reported(member, asked)
        assert isinstance(reported, BrokerError), reported
        return reported.code

    def settle(self, *members: str) -> None:
        """Create a stable group of these members, led by the first; each is assigned its own name."""
        for count, member in enumerate(members):
            self.join(new_id=member)
            for earlier in members[:count]:
                self.join(earlier)
        for member in members:
            self.group.sync(member, self.group.generation, {one: one.encode() for one in members}, now=self.now)
        self.group.take_answers()
        self.answers.clear()
        assert self.group.phase is Phase.STABLE


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


def code_of(error: pytest.ExceptionInfo[BrokerError]) -> ErrorCode:
    return error.value.code


def test_one_member_leads_itself(crowd: Crowd) -> None:
    assert crowd.join(new_id="a") == "a"
    joined = crowd.joined("a")
    assert (joined.generation, joined.protocol, joined.leader) == (1, "range", "a")
    assert [(view.id, view.metadata) for view in joined.members] == [("a", b"mrange")]
    assert crowd.phase() is Phase.COMPLETING
    crowd.sync("a", a=b"everything")
    assert crowd.assigned("a") == b"everything"
    assert crowd.phase() is Phase.STABLE
    crowd.beat("a")


def test_a_member_without_an_id_gets_one_and_joins_with_it(crowd: Crowd) -> None:
    assert crowd.join(new_id="a", id_first=True) == "a"
    assert crowd.reported("a") == IdGiven("a")
    assert (crowd.phase(), crowd.group.member_count, crowd.group.has_members) == (Phase.EMPTY, 1, False)
    crowd.join("a", id_first=True)
    assert crowd.joined("a").generation == 1


def test_an_issued_id_that_is_never_used_expires(crowd: Crowd) -> None:
    crowd.join(new_id="a", id_first=True)
    assert crowd.group.deadline == SESSION_S
    crowd.pass_time(SESSION_S)
    assert (crowd.group.member_count, crowd.group.deadline) == (0, math.inf)
    with pytest.raises(Missing):
        crowd.join("a", id_first=True)


def test_a_rebalance_waits_for_a_member_that_was_issued_an_id(crowd: Crowd) -> None:
    crowd.settle("a")
    crowd.join(new_id="b", id_first=True)
    crowd.join("a")
    assert crowd.reported("a") is None
    crowd.join("b", id_first=True)
    assert crowd.joined("a").generation == crowd.joined("b").generation == 2


def test_a_second_member_has_the_first_join_again(crowd: Crowd) -> None:
    crowd.settle("a")
    crowd.join(new_id="b")
    assert crowd.reported("b") is None
    with pytest.raises(Conflict) as caught:
        crowd.beat("a")
    assert code_of(caught) is ErrorCode.GROUP_REBALANCING
    crowd.join("a")
    leader, follower = crowd.joined("a"), crowd.joined("b")
    assert [view.id for view in leader.members] == ["a", "b"]
    assert (follower.members, follower.leader, leader.leader) == ((), "a", "a")
    crowd.sync("b")
    assert crowd.reported("b", WaitingCall.SYNC) is None
    crowd.sync("a", a=b"1", b=b"2", stranger=b"3")
    assert (crowd.assigned("a"), crowd.assigned("b")) == (b"1", b"2")


def test_a_member_without_an_assignment_gets_an_empty_one(crowd: Crowd) -> None:
    crowd.settle("a", "b")
    crowd.join("a")
    crowd.join("b")
    crowd.sync("a", a=b"1")
    crowd.sync("b")
    assert (crowd.assigned("a"), crowd.assigned("b")) == (b"1", b"")


def test_repeated_syncs_return_the_same_assignment(crowd: Crowd) -> None:
    crowd.settle("a", "b")
    for _ in range(2):
        crowd.sync("b")
        assert crowd.assigned("b") == b"b"
    crowd.sync("a", b=b"changed")
    crowd.sync("b")
    assert crowd.assigned("b") == b"b"


def test_the_majority_chooses_among_protocols_all_members_support(crowd: Crowd) -> None:
    crowd.join(new_id="a", offered=protocols("sticky", "range", "odd"))
    crowd.join(new_id="b", offered=protocols("range", "sticky"))
    crowd.join(new_id="c", offered=protocols("range", "sticky"))
    crowd.join("a", offered=protocols("sticky", "range", "odd"))
    crowd.reported("a")
    assert crowd.phase() is Phase.COMPLETING
    assert crowd.joined("c").protocol == "range"
    with pytest.raises(Conflict) as caught:
        crowd.join(new_id="d", offered=protocols("odd"))
    assert code_of(caught) is ErrorCode.GROUP_PROTOCOL_MISMATCH


@pytest.mark.parametrize(
    ("protocol_type", "offered"), [("connect", protocols("range")), ("consumer", ()), ("consumer", protocols("x"))]
)
def test_members_must_have_a_protocol_in_common(
    crowd: Crowd, protocol_type: str, offered: tuple[tuple[str, bytes], ...]
) -> None:
    crowd.settle("a")
    with pytest.raises(Conflict) as caught:
        crowd.join(new_id="b", protocol_type=protocol_type, offered=offered)
    assert code_of(caught) is ErrorCode.GROUP_PROTOCOL_MISMATCH
    assert crowd.phase() is Phase.STABLE


@pytest.mark.parametrize(("protocol_type", "offered"), [("", protocols("range")), ("consumer", ())])
def test_the_first_member_must_have_a_protocol(
    crowd: Crowd, protocol_type: str, offered: tuple[tuple[str, bytes], ...]
) -> None:
    with pytest.raises(Conflict):
        crowd.join(new_id="a", protocol_type=protocol_type, offered=offered)


def test_a_follower_rejoining_unchanged_causes_no_rebalance(crowd: Crowd) -> None:
    crowd.settle("a", "b")
    crowd.join("b")
    assert crowd.joined("b") == Joined("b", crowd.group.generation, "consumer", "range", "a")
    assert crowd.phase() is Phase.STABLE
    crowd.sync("b")
    assert crowd.assigned("b") == b"b"


def test_a_follower_rejoining_with_new_metadata_causes_a_rebalance(crowd: Crowd) -> None:
    crowd.settle("a", "b")
    crowd.join("b", offered=protocols("range", metadata=b"other"))
    assert crowd.phase() is Phase.PREPARING
    crowd.join("a")
    assert [view.metadata for view in crowd.joined("a").members] == [b"mrange", b"otherrange"]


def test_a_leader_that_joins_a_stable_group_starts_a_rebalance(crowd: Crowd) -> None:
    crowd.settle("a")
    crowd.join("a")
    assert crowd.joined("a").generation == 2


def test_a_leader_that_joins_while_others_wait_for_it_gets_the_same_generation(crowd: Crowd) -> None:
    crowd.join(new_id="a")
    first = crowd.joined("a")
    crowd.join("a")
    assert crowd.joined("a") == first


def test_a_member_waiting_to_sync_must_rejoin_when_the_group_changes(crowd: Crowd) -> None:
    crowd.settle("a", "b")
    crowd.join("a")
    crowd.join("b")
    crowd.answers.clear()
    crowd.group.take_answers()
    crowd.sync("b")
    crowd.join(new_id="c")
    assert crowd.refused("b", WaitingCall.SYNC) is ErrorCode.GROUP_REBALANCING
    with pytest.raises(Conflict) as caught:
        crowd.sync("a", a=b"old")
    assert code_of(caught) is ErrorCode.GROUP_REBALANCING


@pytest.mark.parametrize("member", ["b", ""])
def test_unknown_members_are_refused(crowd: Crowd, member: str) -> None:
    crowd.settle("a")
    for verb in (crowd.beat, crowd.sync, crowd.leave):
        with pytest.raises(Missing) as caught:
            verb(member)
        assert code_of(caught) is ErrorCode.MEMBER_MISSING
    if member:
        with pytest.raises(Missing):
            crowd.join(member)


def test_an_old_generation_is_refused(crowd: Crowd) -> None:
    crowd.settle("a")
    for verb in (crowd.beat, crowd.sync):
        for stale in (1, -1):
            with pytest.raises(Conflict) as caught:
                verb("a", stale)
            assert code_of(caught) is ErrorCode.GENERATION_STALE


@pytest.mark.parametrize(("protocol_type", "protocol"), [("connect", "range"), ("consumer", "other")])
def test_an_assignment_of_another_protocol_is_refused(crowd: Crowd, protocol_type: str, protocol: str) -> None:
    crowd.join(new_id="a")
    with pytest.raises(Conflict) as caught:
        crowd.group.sync("a", 1, {}, protocol_type=protocol_type, protocol=protocol, now=0.0)
    assert code_of(caught) is ErrorCode.GROUP_PROTOCOL_MISMATCH
    crowd.group.sync("a", 1, {}, protocol_type="consumer", protocol="range", now=0.0)
    assert crowd.assigned("a") == b""


def test_silent_members_are_removed(crowd: Crowd) -> None:
    crowd.settle("a", "b")
    crowd.pass_time(SESSION_S - 1)
    crowd.beat("a")
    crowd.pass_time(1)
    assert [view.id for view in crowd.group.members] == ["a"]
    with pytest.raises(Conflict):
        crowd.beat("a")
    crowd.join("a")
    assert crowd.joined("a").generation == crowd.group.generation


@pytest.mark.parametrize("sign", ["beat", "sync", "join", "commit"])
def test_every_request_of_a_member_renews_its_session(crowd: Crowd, sign: str) -> None:
    crowd.settle("a", "b")
    crowd.pass_time(SESSION_S - 1)
    match sign:
        case "beat":
            crowd.beat("b")
        case "sync":
            crowd.sync("b")
        case "join":
            crowd.join("b")
        case _:
            crowd.group.check_commit("b", crowd.group.generation, now=crowd.now)
    crowd.pass_time(SESSION_S - 1)
    assert "b" in {view.id for view in crowd.group.members}
    crowd.pass_time(1)
    assert "b" not in {view.id for view in crowd.group.members}


def test_a_member_that_does_not_rejoin_in_time_is_removed(crowd: Crowd) -> None:
    crowd.settle("a", "b")
    crowd.join(new_id="c")
    for _ in range(int(REBALANCE_S) - 1):
        crowd.pass_time(1)
        for member in ("a", "b"):
            with pytest.raises(Conflict):
                crowd.beat(member)
    crowd.join("b")
    crowd.pass_time(1)
    joined = crowd.joined("b")
    assert (joined.leader, [view.id for view in joined.members]) == ("b", ["b", "c"])
    assert crowd.joined("c").generation == joined.generation


def test_a_leader_that_never_syncs_does_not_block_the_group(crowd: Crowd) -> None:
    crowd.settle("a", "b")
    crowd.join("a")
    crowd.join("b")
    crowd.group.take_answers()
    crowd.sync("b")
    for _ in range(int(REBALANCE_S)):
        crowd.beat("a")
        crowd.pass_time(1)
    assert crowd.refused("b", WaitingCall.SYNC) is ErrorCode.GROUP_REBALANCING
    assert [view.id for view in crowd.group.members] == ["b"], "members that asked to sync stay"


def test_a_member_that_never_syncs_is_removed(crowd: Crowd) -> None:
    crowd.settle("a", "b")
    crowd.join("a")
    crowd.join("b")
    crowd.group.take_answers()
    crowd.sync("a")
    for _ in range(int(REBALANCE_S) - 1):
        crowd.beat("a")
        crowd.beat("b")
        crowd.pass_time(1)
    assert crowd.phase() is Phase.STABLE
    crowd.pass_time(1)
    assert [view.id for view in crowd.group.members] == ["a"]


def test_a_new_member_that_disconnects_while_joining_is_removed(crowd: Crowd) -> None:
    crowd.settle("a")
    crowd.join(new_id="b", rebalance_s=10 * NEW_MEMBER_S)
    for _ in range(int(NEW_MEMBER_S)):
        with pytest.raises(Conflict):
            crowd.beat("a")
        crowd.pass_time(1)
    assert crowd.refused("b") is ErrorCode.MEMBER_MISSING
    assert [view.id for view in crowd.group.members] == ["a"]


def test_leaving_makes_the_others_rejoin(crowd: Crowd) -> None:
    crowd.settle("a", "b")
    crowd.leave("a")
    crowd.join("b")
    joined = crowd.joined("b")
    assert (joined.leader, [view.id for view in joined.members]) == ("b", ["b"])


def test_the_last_to_leave_empties_the_group(crowd: Crowd) -> None:
    crowd.settle("a")
    crowd.leave("a")
    assert (crowd.phase(), crowd.group.generation, crowd.group.protocol_type) == (Phase.EMPTY, 2, "")
    assert (crowd.group.bytes, crowd.group.member_count, crowd.group.deadline) == (0, 0, math.inf)
    crowd.join(new_id="b", protocol_type="connect")
    assert crowd.joined("b").generation == 3


def test_a_member_that_leaves_while_joining_gets_an_error(crowd: Crowd) -> None:
    crowd.settle("a")
    crowd.join(new_id="b")
    crowd.leave("b")
    assert crowd.refused("b") is ErrorCode.MEMBER_MISSING
    crowd.join("a")
    crowd.joined("a")


def test_an_issued_id_can_be_returned(crowd: Crowd) -> None:
    crowd.settle("a")
    crowd.join(new_id="b", id_first=True)
    crowd.join("a")
    crowd.leave("b")
    assert crowd.joined("a").generation == 2


def static_pair(crowd: Crowd) -> None:
    """Return a stable group of two static members, led by the first."""
    crowd.join(new_id="a", instance="A", id_first=True)
    crowd.join(new_id="b", instance="B", id_first=True)
    crowd.join("a", instance="A")
    assert [view.instance_id for view in crowd.joined("a").members] == ["A", "B"]
    crowd.joined("b")
    crowd.sync("b")
    crowd.sync("a", a=b"1", b=b"2")
    crowd.group.take_answers()


def test_a_static_member_returns_without_a_rebalance(crowd: Crowd) -> None:
    static_pair(crowd)
    assert crowd.join(new_id="b2", instance="B") == "b2"
    assert crowd.joined("b2") == Joined("b2", 2, "consumer", "range", "a")
    crowd.sync("b2")
    assert crowd.assigned("b2") == b"2"
    assert [view.id for view in crowd.group.members] == ["a", "b2"]
    crowd.beat("a")
    for verb in (crowd.beat, crowd.leave):
        with pytest.raises(Conflict) as caught:
            verb("b", instance="B")
        assert code_of(caught) is ErrorCode.MEMBER_FENCED
    with pytest.raises(Conflict):
        crowd.join("b", instance="B")
    with pytest.raises(Missing):
        crowd.join("c", instance="C")


@pytest.mark.parametrize("may_skip", [False, True])
def test_a_returning_static_leader_causes_no_new_assignment(crowd: Crowd, may_skip: bool) -> None:
    static_pair(crowd)
    crowd.join(new_id="a2", instance="A", may_skip=may_skip)
    joined = crowd.joined("a2")
    assert joined.generation == 2
    if may_skip:
        assert (joined.leader, joined.skip_assignment) == ("a2", True)
        assert [view.id for view in joined.members] == ["a2", "b"]
    else:
        assert (joined.leader, joined.skip_assignment, joined.members) == ("a", False, ())
    assert crowd.group.leader == "a2"
    crowd.sync("a2", a2=b"other")
    assert crowd.assigned("a2") == b"1"


def test_a_static_member_that_returns_with_another_protocol_causes_a_rebalance(crowd: Crowd) -> None:
    offered = protocols("range", "sticky")
    for member in ("a", "b"):
        crowd.join(new_id=member, instance=member.upper(), offered=offered)
    crowd.join("a", instance="A", offered=offered)
    crowd.sync("a")
    assert crowd.group.protocol == "range"
    preferred = protocols("sticky", "range")
    crowd.join(new_id="a2", instance="A", offered=preferred)
    crowd.group.take_answers()
    assert crowd.phase() is Phase.STABLE, "one of two votes does not change the protocol"
    crowd.join(new_id="b2", instance="B", offered=preferred)
    assert crowd.phase() is Phase.PREPARING


def test_a_join_waiting_under_the_replaced_id_is_fenced(crowd: Crowd) -> None:
    crowd.settle("a")
    crowd.join(new_id="b", instance="B")
    crowd.join(new_id="b2", instance="B")
    assert crowd.refused("b") is ErrorCode.MEMBER_FENCED
    crowd.join("a")
    assert crowd.joined("b2").generation == 2


def test_a_static_member_keeps_its_membership_until_its_session_ends(crowd: Crowd) -> None:
    static_pair(crowd)
    crowd.join(new_id="c", session_s=100.0, rebalance_s=5.0)
    crowd.join("a", instance="A", rebalance_s=5.0)
    crowd.pass_time(SESSION_S - 1)
    assert {view.id for view in crowd.group.members} == {"a", "b", "c"}
    crowd.pass_time(1)
    assert "b" not in {view.id for view in crowd.group.members}


def test_a_static_member_leaves_by_its_instance(crowd: Crowd) -> None:
    static_pair(crowd)
    crowd.leave("", instance="B")
    assert [view.id for view in crowd.group.members] == ["a"]
    with pytest.raises(Missing):
        crowd.leave("", instance="B")


def test_commits_need_the_current_member_and_generation(crowd: Crowd) -> None:
    group = crowd.group
    group.check_commit("", -1, now=0.0)
    crowd.join(new_id="a")
    with pytest.raises(Conflict) as caught:
        group.check_commit("a", 1, now=0.0)
    assert code_of(caught) is ErrorCode.GROUP_REBALANCING
    crowd.sync("a")
    group.check_commit("a", 1, now=0.0)
    with pytest.raises(Missing):
        group.check_commit("", -1, now=0.0)
    with pytest.raises(Conflict):
        group.check_commit("a", 0, now=0.0)
    crowd.join(new_id="b")
    group.check_commit("a", 1, now=0.0)


def test_members_are_limited() -> None:
    crowd = Crowd(members_max=2)
    crowd.join(new_id="a")
    crowd.join(new_id="b", id_first=True)
    for id_first in (False, True):
        with pytest.raises(Busy):
            crowd.join(new_id="c", id_first=id_first)
    crowd.join("b", id_first=True)
    crowd.join("a")
    crowd.joined("b")


def test_bytes_of_members_are_limited() -> None:
    crowd = Crowd(bytes_max=1000)
    crowd.join(new_id="a", offered=(("range", b"x" * 900),))
    with pytest.raises(Busy):
        crowd.join(new_id="b", offered=(("range", b"x" * 100),))
    crowd.join("a", offered=(("range", b"y" * 950),))
    with pytest.raises(Busy):
        crowd.sync("a", a=b"z" * 100)
    assert crowd.phase() is Phase.COMPLETING
    crowd.sync("a", a=b"z" * 10)
    assert crowd.assigned("a") == b"z" * 10
    assert crowd.group.bytes <= 1000


def test_only_a_group_without_members_can_be_deleted(crowd: Crowd) -> None:
    crowd.settle("a")
    with pytest.raises(Conflict) as caught:
        crowd.group.end()
    assert code_of(caught) is ErrorCode.GROUP_NOT_EMPTY
    crowd.leave("a")
    crowd.group.end()
    assert crowd.phase() is Phase.DEAD


def test_every_phase_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(Phase)
