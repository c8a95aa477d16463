"""Consumer groups against a model of the specification (spec: flux#groups)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polywire.broker.groups.group import Membership, assign
from polywire.errors import BrokerError, ErrorCode
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Assignor, PositionKind

TIMEOUT_S = 10.0
PARTITIONS = 3

MEMBERS = st.sampled_from(["a", "B", "c", "é", "c-9"])
TOPICS = st.sampled_from(["t", "u"])
GROUPS = st.sampled_from(["g", "h"])
ASSIGNORS = st.sampled_from([None, Assignor.RANGE, Assignor.ROUND_ROBIN])


@given(
    members=st.sets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4), min_size=1, max_size=12),
    count=st.integers(1, 40),
    assignor=st.sampled_from(Assignor),
)
def test_every_partition_has_exactly_one_owner(members: set[str], count: int, assignor: Assignor) -> None:
    owned = assign(members, count, assignor)
    assert set(owned) == members
    assert sorted(partition for partitions in owned.values() for partition in partitions) == list(range(count))
    shares = [len(partitions) for partitions in owned.values()]
    assert max(shares) - min(shares) <= 1
    assert all(list(partitions) == sorted(partitions) for partitions in owned.values())
    by_bytes = [owned[member] for member in sorted(members, key=lambda member: member.encode())]
    assert [len(partitions) for partitions in by_bytes] == sorted(shares, reverse=True)
    assert assign(sorted(members, reverse=True), count, assignor) == owned


def answer_of(verb: Callable[[], Membership | None]) -> Membership | ErrorCode | None:
    """Return a method's result, or the code of its refusal."""
    try:
        return verb()
    except BrokerError as error:
        return error.code


@dataclass
class ModelGroup:
    """One group as the specification describes it."""

    topic: str
    generation: int = 1
    assignor: Assignor = Assignor.ROUND_ROBIN
    seen: dict[str, float] = field(default_factory=dict)

    def expire(self, now: float) -> None:
        gone = [member for member, at in self.seen.items() if now - at > TIMEOUT_S]
        for member in gone:
            del self.seen[member]
        if gone:
            self.generation += 1

    def place(self, member: str) -> Membership:
        order = sorted(self.seen, key=lambda each: each.encode())
        index, count = order.index(member), len(order)
        if self.assignor is Assignor.ROUND_ROBIN:
            return Membership(self.generation, tuple(p for p in range(PARTITIONS) if p % count == index))
        dealt: list[list[int]] = [[] for _ in order]
        left = list(range(PARTITIONS))
        for owner in range(count):
            for _ in range(PARTITIONS // count + (owner < PARTITIONS % count)):
                dealt[owner].append(left.pop(0))
        return Membership(self.generation, tuple(dealt[index]))


class GroupMachine(RuleBasedStateMachine):
    """Runs coordinator and model with the same requests; every response must be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryBroker()
        self.model: dict[str, ModelGroup] = {}
        self.positions: dict[tuple[str, str, int], int] = {}

    @property
    def now(self) -> float:
        return self.memory.clock.monotonic()

    @rule(group=GROUPS, topic=TOPICS, member=MEMBERS, assignor=ASSIGNORS)
    def join(self, group: str, topic: str, member: str, assignor: Assignor | None) -> None:
        found = self.model.get(group)
        if found is None:
            found = self.model[group] = ModelGroup(topic, assignor=assignor or Assignor.ROUND_ROBIN)
        if found.topic != topic:
            found.topic = topic
            found.seen.clear()
            found.generation += 1
        if assignor is not None and assignor is not found.assignor:
            found.assignor = assignor
            found.generation += 1
        found.expire(self.now)
        if member not in found.seen:
            found.generation += 1
        found.seen[member] = self.now
        joined = self.memory.broker.groups.join(group, topic, member, wire="flux", assignor=assignor, named_alone=True)
        assert joined == found.place(member)

    def check(self, group: str, topic: str, member: str, generation: int) -> ErrorCode | None:
        """Run the group check, with the same side effects."""
        found = self.model.get(group)
        if found is None or found.topic != topic:
            return ErrorCode.GROUP_MISSING
        found.expire(self.now)
        if generation != found.generation:
            return ErrorCode.GENERATION_STALE
        return None if member in found.seen else ErrorCode.MEMBER_MISSING

    def generation(self, group: str, behind: int) -> int:
        return self.model[group].generation - behind if group in self.model else 1

    @rule(group=GROUPS, topic=TOPICS, member=MEMBERS, behind=st.sampled_from([0, 0, 0, 1]), beat=st.booleans())
    def heartbeat_or_sync(self, group: str, topic: str, member: str, behind: int, beat: bool) -> None:
        generation = self.generation(group, behind)
        expected = self.check(group, topic, member, generation)
        verb = self.memory.broker.groups.heartbeat if beat else self.memory.broker.groups.sync
        answer = answer_of(partial(verb, group, topic, member, generation, wire="flux"))
        if expected is None:
            self.model[group].seen[member] = self.now
            assert answer == self.model[group].place(member)
        else:
            assert answer is expected

    @rule(group=GROUPS, topic=TOPICS, member=MEMBERS, behind=st.sampled_from([0, 0, 0, 1]))
    def leave(self, group: str, topic: str, member: str, behind: int) -> None:
        generation = self.generation(group, behind)
        expected = self.check(group, topic, member, generation)
        verb = self.memory.broker.groups.leave
        assert answer_of(partial(verb, group, topic, member, generation, wire="flux")) is expected
        if expected is None:
            del self.model[group].seen[member]
            self.model[group].generation += 1

    @rule(
        group=GROUPS,
        topic=TOPICS,
        member=MEMBERS,
        behind=st.sampled_from([0, 0, 0, 1]),
        partition=st.integers(0, PARTITIONS),
        offset=st.integers(-2, 9),
    )
    def commit(self, group: str, topic: str, member: str, behind: int, partition: int, offset: int) -> None:
        generation = self.generation(group, behind)
        expected = self.check(group, topic, member, generation)
        if expected is None and partition not in self.model[group].place(member).partitions:
            expected = ErrorCode.PARTITION_NOT_ASSIGNED
        verb = self.memory.broker.groups.commit
        assert answer_of(partial(verb, group, topic, member, generation, partition, offset, wire="flux")) is expected
        if expected is None:
            self.positions[group, topic, partition] = offset

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0, 10.5]))
    def pass_time(self, seconds: float) -> None:
        self.memory.advance(seconds)

    @rule(topic=TOPICS)
    def make_topic(self, topic: str) -> None:
        self.memory.broker.ensure_topic(topic)

    @precondition(lambda self: self.model)
    @rule(snapshot=st.booleans())
    def restart(self, snapshot: bool) -> None:
        self.memory.run()
        if snapshot:
            self.memory.log.take_snapshot()
        self.memory.restart()
        for group in self.model.values():
            group.seen = dict.fromkeys(group.seen, self.now)

    @invariant()
    def positions_are_those_committed(self) -> None:
        for (group, topic, partition), offset in self.positions.items():
            assert self.memory.broker.position(topic, partition, PositionKind.GROUP, group) == offset


TestGroups = GroupMachine.TestCase
TestGroups.settings = settings(max_examples=120, stateful_step_count=40)
