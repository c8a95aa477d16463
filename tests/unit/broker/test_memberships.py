"""Classic groups whose members share topics with members of other protocols (concepts: groups#one-group-for-all)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import pytest

from polywire.broker import sliced
from polywire.broker.groups import classic, memberships
from polywire.broker.groups.classic import BROKER, Phase
from polywire.broker.groups.classic_members import IdGiven, Join, Joined, Synced
from polywire.broker.groups.commits import Commit
from polywire.broker.groups.consumer import JOINING, Beat
from polywire.broker.groups.memberships import JOINS_AT_ONCE_MAX
from polywire.errors import BrokerError, Conflict, ErrorCode, Missing
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import TopicName
from tests.unit.broker.answers import Answers


class Writing:
    """Assignments as JSON."""

    def encode(self, partitions: Mapping[str, Collection[int]]) -> bytes:
        return json.dumps({topic: list(numbers) for topic, numbers in partitions.items()}).encode()

    def decode(self, assignment: bytes) -> Mapping[str, Collection[int]]:
        found: dict[str, list[int]] = json.loads(assignment)
        return found


WRITING = Writing()


class Classic:
    """A client that rejoins when it must; meanwhile it reads nothing, except partitions that it retains."""

    def __init__(self, memory: MemoryBroker, id_: str, *topics: str, knows: bool = True, keeps: bool = False) -> None:
        self.memory = memory
        self.id = id_
        self.topics = frozenset(topics or ("t",))
        self.writing = WRITING if knows else None
        self.keeps = keeps
        self.is_known = False
        self.generation = -1
        self.leader = ""
        self.reading: Mapping[str, Collection[int]] = {}
        self.joined: list[object] = []
        self.synced: list[object] = []

    def join(self) -> None:
        self.reading = self.reading if self.keeps else {}
        asked = Join(
            member_id=self.id if self.is_known else "",
            session_timeout_s=10.0,
            rebalance_timeout_s=30.0,
            protocol_type="consumer",
            protocols=(("range", json.dumps({t: list(held) for t, held in self.reading.items()}).encode()),),
            topics=self.topics,
            id_first=False,
            wire="kafka",
            writing=self.writing,
            kept=self.reading,
        )
        self.memory.broker.classic.join("g", asked, new_id=self.id, done=self._on_joined)
        self.is_known = True

    def _on_joined(self, answer: IdGiven | Joined | BrokerError) -> None:
        if isinstance(answer, Joined):
            self.generation, self.leader = answer.generation, answer.leader
            assigned = self._assigned(answer) if self.leads else {}
            try:
                self.memory.broker.classic.sync("g", self.id, self.generation, assigned, done=self._on_synced)
            except Conflict:
                self.join()
            except Missing:
                self.reset()
        self.joined.append(answer)

    def _assigned(self, joined: Joined) -> dict[str, bytes]:
        """Return the leader's assignment: everything for itself, except partitions that other members retain."""
        kept = {member.id: WRITING.decode(member.metadata) for member in joined.members if member.id != self.id}
        found = {id_: WRITING.encode(held) for id_, held in kept.items()}
        free: dict[str, list[int]] = {}
        for topic in self.topics:
            there = self.memory.broker.find_topic(topic)
            taken = {one for held in kept.values() for one in held.get(topic, ())}
            free[topic] = [one for one in range(0 if there is None else len(there.partitions)) if one not in taken]
        return found | {self.id: WRITING.encode(free)}

    def reset(self) -> None:
        """Forget its membership and stop reading; it returns under another id."""
        self.id, self.reading, self.is_known, self.generation = f"{self.id}+", {}, False, -1

    @property
    def leads(self) -> bool:
        """Return whether it computes the assignment, with every partition for itself."""
        return self.leader == self.id

    def _on_synced(self, answer: Synced | BrokerError) -> None:
        self.synced.append(answer)
        if isinstance(answer, Synced):
            before, self.reading = self.reading, WRITING.decode(answer.assignment) if answer.assignment else {}
            if self.keeps and any(set(held) - set(self.reading.get(topic, ())) for topic, held in before.items()):
                self.join()

    def beat(self) -> None:
        try:
            self.memory.broker.classic.heartbeat("g", self.id, self.generation)
        except Conflict:  # a rebalance is running or has finished
            self.join()
        except Missing:
            self.reset()
            self.join()

    @property
    def partitions(self) -> list[int]:
        return sorted(one for partitions in self.reading.values() for one in partitions)

    def commit(self, partition: int) -> ErrorCode | None:
        """Commit an offset as clients do; return the error code, if any."""
        classic, done = self.memory.broker.classic, Answers()
        try:
            classic.check_commit("g", self.id, self.generation)
        except BrokerError as error:
            return error.code
        made = {"t": {partition: Commit(7)}}
        refused = classic.commit("g", made, generation=self.generation, member_id=self.id, done=done)
        self.memory.run()
        return refused["t"].code if refused else None


@pytest.fixture
def memory() -> MemoryBroker:
    made = MemoryBroker()
    made.broker.create_topic(TopicName.parse("t"), 4)
    made.run()
    return made


def stable(memory: MemoryBroker, *members: Classic) -> None:
    """Send heartbeats of all members until the group is settled."""
    for _ in range(6):
        for member in members:
            member.beat()
        memory.run()


def flux(memory: MemoryBroker, member: str = "z") -> tuple[int, ...]:
    return memory.broker.groups.join("g", "t", member, wire="flux").partitions


def test_without_other_protocols_members_assign_themselves(memory: MemoryBroker) -> None:
    one = Classic(memory, "a")
    one.join()
    memory.run()
    assert (one.leads, one.partitions) == (True, [0, 1, 2, 3])
    assert memory.broker.groups.view("g", "t") is None


def test_members_of_other_protocols_join_members_that_read(memory: MemoryBroker) -> None:
    one, two = Classic(memory, "a"), Classic(memory, "b")
    one.join()
    two.join()
    memory.run()
    stable(memory, one, two)
    assert {tuple(one.partitions), tuple(two.partitions)} == {(), (0, 1, 2, 3)}
    assert flux(memory) == (), "its partitions stay assigned until their reader rejoins"
    stable(memory, one, two)
    found = [one.partitions, two.partitions, list(flux(memory))]
    assert found == [[0, 3], [1], [2]]
    assert {one.leader, two.leader} == {BROKER}
    assert one.commit(3) is None
    assert one.commit(2) is ErrorCode.PARTITION_NOT_ASSIGNED
    place = memory.broker.groups.join("g", "t", "z", wire="flux")
    memory.broker.groups.commit("g", "t", "z", place.generation, 2, 5, wire="flux")


def test_the_broker_assigns_classic_members_that_join_other_protocols(memory: MemoryBroker) -> None:
    assert flux(memory) == (0, 1, 2, 3)
    one = Classic(memory, "a")
    one.join()
    memory.run()
    assert (one.leader, one.partitions, flux(memory)) == (BROKER, [0, 2], (1, 3))
    one.beat()
    memory.broker.groups.leave("g", "t", "z", None, wire="flux")
    stable(memory, one)
    assert (one.leads, one.partitions) == (True, [0, 1, 2, 3])
    assert not memory.broker.groups.holdings
    view = memory.broker.groups.view("g", "t")
    assert view is not None
    assert view.members == ()


def test_cooperative_members_hand_over_in_two_steps(memory: MemoryBroker) -> None:
    one = Classic(memory, "a", keeps=True)
    one.join()
    memory.run()
    assert flux(memory) == ()
    one.beat()
    assert flux(memory) == (), "it rejoins and continues to read"
    stable(memory, one)
    assert (one.partitions, flux(memory)) == ([0, 2], (1, 3))
    two = Classic(memory, "b", keeps=True)
    two.join()
    stable(memory, one, two)
    assert sorted([*one.partitions, *two.partitions, *flux(memory)]) == [0, 1, 2, 3]
    assert all([one.partitions, two.partitions, flux(memory)])


def test_members_that_left_hold_nothing(memory: MemoryBroker) -> None:
    one, two = Classic(memory, "a"), Classic(memory, "b")
    one.join()
    two.join()
    memory.run()
    flux(memory)
    stable(memory, one, two)
    for _ in range(4):
        memory.advance(4.0)
        flux(memory)
        one.beat()
    stable(memory, one)
    assert (one.partitions, flux(memory)) == ([0, 2], (1, 3))
    memory.broker.classic.leave("g", "a")
    memory.run()
    assert flux(memory) == (0, 1, 2, 3)


def test_a_member_that_the_broker_cannot_assign_excludes_other_protocols(memory: MemoryBroker) -> None:
    odd = Classic(memory, "a", knows=False)
    odd.join()
    memory.run()
    with pytest.raises(Conflict) as caught:
        flux(memory)
    assert caught.value.code is ErrorCode.GROUP_PROTOCOL_MISMATCH
    memory.broker.classic.leave("g", "a")
    flux(memory)
    with pytest.raises(Conflict):
        Classic(memory, "b", knows=False).join()
    Classic(memory, "c").join()
    memory.run()
    with pytest.raises(Conflict):
        Classic(memory, "d", knows=False).join()


def test_too_many_memberships_exclude_other_protocols(memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classic, "SEATS_MAX", 3)
    one = Classic(memory, "a", "t", "u")
    one.join()
    memory.run()
    flux(memory)
    stable(memory, one)
    with pytest.raises(Conflict):
        Classic(memory, "b", "t", "u").join()
    two = Classic(memory, "c")
    two.join()
    stable(memory, one, two)
    assert sorted([*one.partitions, *two.partitions, *flux(memory)]) == [0, 1, 2, 3]
    memory.broker.classic.leave("g", "c")
    one.topics = frozenset({"t", "u", "v", "w"})
    with pytest.raises(Conflict):
        one.join()


def test_memberships_are_added_in_slices(memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced, "SLICE_S", -1.0)  # one step per pass
    assert isinstance(memory.loop, ManualLoop)
    names = [f"t{number:03}" for number in range(3 * JOINS_AT_ONCE_MAX)]
    for name in names:
        memory.broker.create_topic(TopicName.parse(name), 1)
    one = Classic(memory, "a", "t", *names)
    one.join()
    memory.run()
    flux(memory)
    assert seats(memory) == 0, "a joining member does not wait for memberships"
    one.beat()
    most, passes, before = 0, 0, seats(memory)
    while one.generation < 2 or len(one.synced) < 2:
        memory.loop.run_pass()
        now = seats(memory)
        most, before, passes = max(most, now - before), now, passes + 1
        assert passes < 10 * len(names)
    assert most <= JOINS_AT_ONCE_MAX
    assert passes > len(names) // JOINS_AT_ONCE_MAX
    assert len(one.partitions) == len(names) + 2
    memory.broker.classic.leave("g", "a")
    memory.loop.run_pass()
    assert seats(memory) > len(names) // 2, "they are removed in slices, too"
    memory.run()
    assert (seats(memory), bool(memory.broker.groups.holdings)) == (0, False)


def seats(memory: MemoryBroker) -> int:
    """Return the number of classic members' memberships in the coordinator's groups."""
    return sum(member.wire == "kafka" for view in memory.broker.groups.views() for member in view.members)


def test_a_member_that_leaves_before_its_memberships_are_added_leaves_none_behind(
    memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sliced, "SLICE_S", -1.0)
    assert isinstance(memory.loop, ManualLoop)
    flux(memory)
    one, two = Classic(memory, "a"), Classic(memory, "b")
    one.join()
    memory.loop.run_pass()
    two.join()
    memory.broker.classic.leave("g", "a")
    stable(memory, two)
    assert (two.partitions, flux(memory)) == ([0, 2], (1, 3))
    assert seats(memory) == 1


def test_a_group_of_many_topics_detects_that_other_protocols_left(
    memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memberships, "CHECKS_AT_ONCE_MAX", 2)
    for name in "uvwxy":
        memory.broker.create_topic(TopicName.parse(name), 1)
    one = Classic(memory, "a", *"tuvwxy")
    one.join()
    memory.run()
    flux(memory)
    stable(memory, one)
    assert (one.leader, len(flux(memory))) == (BROKER, 2)
    memory.broker.groups.leave("g", "t", "z", None, wire="flux")
    stable(memory, one)
    assert (one.leads, len(one.partitions)) == (True, 9)


def test_consumers_of_both_kafka_protocols_share_a_group(memory: MemoryBroker) -> None:
    one = Classic(memory, "a")
    one.join()
    memory.run()

    def beat(epoch: int, owned: Mapping[bytes, frozenset[int]]) -> tuple[int, Mapping[bytes, frozenset[int]]]:
        beat = Beat("k", epoch, "kafka", rebalance_timeout_s=20.0, topics=frozenset({"t"}), owned=owned)
        reported = memory.broker.consumers.beat("g", beat)
        assert reported.assignment is not None
        return reported.epoch, {id_: frozenset(held) for id_, held in reported.assignment.items()}

    epoch, reading = beat(JOINING, {})
    assert reading == {}
    for _ in range(4):
        stable(memory, one)
        epoch, reading = beat(epoch, reading)
    assert (one.partitions, [sorted(held) for held in reading.values()]) == ([0, 2], [[1, 3]])
    assert one.commit(0) is None
    assert one.commit(1) is ErrorCode.PARTITION_NOT_ASSIGNED


def test_members_share_several_topics_and_one_created_later(memory: MemoryBroker) -> None:
    flux(memory)
    one = Classic(memory, "a", "t", "later")
    one.join()
    memory.run()
    assert {topic: list(held) for topic, held in one.reading.items()} == {"t": [0, 2]}
    memory.broker.create_topic(TopicName.parse("later"), 2)
    stable(memory, one)
    assert {topic: list(held) for topic, held in one.reading.items()} == {"t": [0, 2], "later": [0, 1]}


def test_memory_of_a_shared_group_is_released(memory: MemoryBroker) -> None:
    flux(memory)
    before = memory.broker._state.usage.bytes
    one = Classic(memory, "a")
    one.join()
    memory.run()
    memory.broker.classic.leave("g", "a")
    memory.run()
    assert not memory.broker.groups.holdings
    view = memory.broker.classic.view("g")
    assert view is not None
    assert view.phase is Phase.STABLE, "members of the other protocol are in it"
    memory.broker.groups.leave("g", "t", "z", None, wire="flux")
    memory.broker.classic.delete("g")
    flux(memory)
    assert memory.broker._state.usage.bytes == before


def test_after_a_restart_members_return_to_a_shared_group(memory: MemoryBroker) -> None:
    flux(memory)
    one = Classic(memory, "a")
    one.join()
    memory.run()
    memory.restart()
    assert flux(memory) == (1, 3), "its membership is kept for the session"
    with pytest.raises(Missing):
        memory.broker.classic.heartbeat("g", "a", one.generation)
    again = Classic(memory, "a2")
    again.join()
    memory.run()
    for _ in range(4):
        memory.advance(4.0)
        flux(memory)
        again.beat()
        memory.run()
    assert (again.partitions, flux(memory)) == ([0, 2], (1, 3))
