"""Classic groups under any order of joining, assigning, leaving and silence."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import suppress

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from polywire.broker.changes import ClassicGroupStored, decode_change, encode
from polywire.broker.groups.classic import ClassicGroup, Phase, restored, stored
from polywire.broker.groups.classic_members import IdGiven, Join, Joined, Limits, Synced, WaitingCall
from polywire.errors import BrokerError

MEMBERS_MAX = 6
EXPIRIES_MAX = 200  # of an abandoned group: each removes a member or ends a phase
PROTOCOLS = st.lists(st.sampled_from(["range", "sticky", "odd"]), min_size=0, max_size=3, unique=True)


class Unread:
    """The assignment format of the members: the broker cannot read it."""

    def encode(self, partitions: Mapping[str, Collection[int]]) -> bytes:
        raise AssertionError("only where a group is shared")

    def decode(self, assignment: bytes) -> Mapping[str, Collection[int]]:
        raise AssertionError("only where a group is shared")


def decoded(group: ClassicGroupStored) -> ClassicGroupStored:
    """Return the group as decoded from the journal."""
    found = decode_change(encode(group))
    assert isinstance(found, ClassicGroupStored)
    return found


class ClassicGroupMachine(RuleBasedStateMachine):
    """A group, and members that also remember their outdated ids."""

    @initialize()
    def begin(self) -> None:
        self.group = ClassicGroup("g", Limits(MEMBERS_MAX, 5_000))
        self.now = 0.0
        self.made = 0
        self.ids = ["never given"]
        self.waiting: set[tuple[str, WaitingCall]] = set()
        self.instance_of: dict[str, str] = {}
        self.leaders: dict[int, str] = {}
        self.protocol_of: dict[int, str] = {}

    def who(self, member: str) -> str:
        """Return what identifies a member that returned under another id."""
        return self.instance_of.get(member, member)

    def assignment(self, member: str) -> bytes:
        return f"{self.group.generation} {self.who(member)}".encode()

    def take(self) -> None:
        """Deliver every response to a waiting member, and check that it belongs to the current generation."""
        for answer in self.group.take_answers():
            key = (answer.member_id, answer.call)
            assert key in self.waiting, "a response without a request"
            self.waiting.discard(key)
            reported = answer.answer
            if isinstance(reported, Joined):
                assert reported.member_id == answer.member_id
                self.check_joined(answer.member_id, reported)
            elif isinstance(reported, Synced):
                assert reported.assignment in (b"", self.assignment(answer.member_id))
                assert reported.protocol == self.protocol_of[self.group.generation]
            else:
                assert isinstance(reported, IdGiven | BrokerError)

    def check_joined(self, member: str, reported: Joined) -> None:
        assert reported.generation == self.group.generation
        leader = self.leaders.setdefault(reported.generation, self.who(reported.leader))
        assert leader == self.who(reported.leader), "one generation has one leader"
        assert self.protocol_of.setdefault(reported.generation, reported.protocol) == reported.protocol
        assert bool(reported.members) == (member == reported.leader), "only the leader gets the members"

    @rule(
        known=st.integers(0, 30),
        offered=PROTOCOLS,
        instance=st.sampled_from([None, None, "A", "B"]),
        id_first=st.booleans(),
        may_skip=st.booleans(),
        session_s=st.sampled_from([6.0, 30.0]),
        rebalance_s=st.sampled_from([0.0, 10.0, 60.0]),
        text=st.sampled_from([b"", b"x", b"y" * 900]),
    )
    def join(
        self,
        known: int,
        offered: list[str],
        instance: str | None,
        id_first: bool,
        may_skip: bool,
        session_s: float,
        rebalance_s: float,
        text: bytes,
    ) -> None:
        member = self.ids[-known] if 0 < known <= len(self.ids) else ""
        self.made += 1
        new_id = f"member-{self.made}"
        join = Join(
            member_id=member,
            session_timeout_s=session_s,
            rebalance_timeout_s=rebalance_s,
            protocol_type="consumer",
            protocols=tuple((name, text) for name in offered),
            instance_id=instance,
            id_first=id_first,
            may_skip=may_skip,
        )
        if not member and instance is not None:
            self.instance_of[new_id] = instance
        try:
            asked = self.group.join(join, new_id=new_id, now=self.now)
        except BrokerError:
            return
        assert asked == (member or new_id)
        if asked == new_id:
            self.ids.append(new_id)
        self.waiting.add((asked, WaitingCall.JOIN))
        self.take()

    @rule(known=st.integers(1, 30), stale=st.sampled_from([0, 0, 0, 1]), whole=st.booleans())
    def sync(self, known: int, stale: int, whole: bool) -> None:
        member = self.ids[-min(known, len(self.ids))]
        assignments = {view.id: self.assignment(view.id) for view in self.group.members} if whole else {}
        try:
            self.group.sync(member, self.group.generation - stale, assignments, now=self.now)
        except BrokerError:
            return
        assert not stale, "only members of this generation request it"
        self.waiting.add((member, WaitingCall.SYNC))
        self.take()

    @rule(known=st.integers(1, 30), stale=st.sampled_from([0, 0, 0, 1]))
    def heartbeat(self, known: int, stale: int) -> None:
        member = self.ids[-min(known, len(self.ids))]
        try:
            self.group.heartbeat(member, self.group.generation - stale, now=self.now)
        except BrokerError:
            return
        assert not stale
        assert member in {view.id for view in self.group.members}

    @rule(known=st.integers(1, 30))
    def leave(self, known: int) -> None:
        member = self.ids[-min(known, len(self.ids))]
        with suppress(BrokerError):
            self.group.leave(member, now=self.now)
        assert member not in {view.id for view in self.group.members} or member in self.instance_of
        self.take()

    @rule()
    def restart(self) -> None:
        """Kill the broker: a settled group continues with all members, otherwise all rejoin."""
        was, kept = self.group, stored(self.group, 0)
        assert (kept is None) == (was.phase is not Phase.STABLE)
        self.waiting.clear()
        if kept is None:
            self.group = ClassicGroup("g", Limits(MEMBERS_MAX, 5_000), was.generation + 1)
            return
        self.group = restored(decoded(kept), Limits(MEMBERS_MAX, 5_000), Unread(), self.now)
        assert (self.group.members, self.group.bytes) == (was.members, was.bytes)
        assert (self.group.generation, self.group.leader) == (was.generation, was.leader)

    @rule(seconds=st.sampled_from([0.5, 5.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(EXPIRIES_MAX):
            if self.group.deadline > end:
                break
            self.now = max(self.now, self.group.deadline)
            self.group.expire(self.now)
            self.take()
        self.now = end
        assert self.group.deadline > end, "everything due has ended"

    @invariant()
    def members_agree(self) -> None:
        group = self.group
        assert group.member_count <= MEMBERS_MAX
        assert group.has_members == bool(group.members) == (group.phase is not Phase.EMPTY)
        assert group.bytes <= 5_000
        if not group.has_members:
            assert group.bytes == 0
        instances = [view.instance_id for view in group.members if view.instance_id is not None]
        assert len(instances) == len(set(instances))
        if group.phase in (Phase.COMPLETING, Phase.STABLE):
            assert group.leader in {view.id for view in group.members}
        held = [view for view in group.members if view.assignment]
        assert all(view.assignment == self.assignment(view.id) for view in held), (
            "an assignment ends with its generation"
        )

    def teardown(self) -> None:
        """Without further requests everything expires, and no member is left waiting."""
        if not hasattr(self, "group"):
            return
        for _ in range(EXPIRIES_MAX):
            if self.group.deadline == math.inf:
                break
            self.now = max(self.now, self.group.deadline)
            self.group.expire(self.now)
            self.take()
        assert (self.group.phase, self.group.deadline) == (Phase.EMPTY, math.inf)
        assert not self.waiting
        assert (self.group.bytes, self.group.member_count) == (0, 0)
        self.group.end()


ClassicGroupMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestClassicGroups = ClassicGroupMachine.TestCase
