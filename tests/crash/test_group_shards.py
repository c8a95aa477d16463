"""Members of a newer-protocol group read topics of several shards, which end at any moment or respond late.

No partition is assigned to two members, no offset goes back, and everything is read in the end (decision 0128). The
shards are brokers in memory on one loop, which is interrupted before one of its calls.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.context import KafkaSettings
from polywire.protocols.kafka.messages import Api
from polywire.types import TopicName
from tests.crash.mortal_shards import SHARDS, Cluster, interruptible
from tests.unit.protocols.kafka.consumer_members import HEARTBEAT, OWNED, Consumer
from tests.unit.protocols.kafka.test_processes import Client
from tests.unit.protocols.shards_in_memory import MemoryLink

__all__ = ["interruptible"]

pytestmark = pytest.mark.usefixtures("interruptible")

TOPICS: Final = ["a", "bb", "ccc", "aaaa"]  # of shards 1, 2, 0 and 1
GROUP: Final = "ggg"  # coordinated by shard 0
STEP_S, WAIT_S = 0.1, 3.0
ROUNDS: Final = 14  # of heartbeats until every member has its assignment
SESSION_S: Final = 46.0
STEPS: Final = 40
RUNS: Final = int(os.environ.get("POLYWIRE_GROUP_RUNS", "40"))
STRIDE: Final = 7  # calls of the loop from one interruption to the next
Place = tuple[str, int]


@dataclass
class Reader(Consumer):
    """A member that commits offsets of what it reads, and reconnects when its connection was lost."""

    says_all: bool = False
    next_offsets: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def ask(self, api: Api, version: int, **fields: Any) -> Any:
        """Return the response; None if there is none, or if the process has ended, after which it reconnects."""
        if self.is_connected:
            self.client.tell(api, version, **fields)
        for _ in range(int(WAIT_S / STEP_S)):
            body = self.client.hear(api, version) if self.is_connected else None
            if not self.is_connected:
                self.client = Client(self.processes, self.processes.shards.shard_by_hash(GROUP))
                return None
            if body is not None:
                return body
            self.processes.loop.advance(STEP_S)
        self._crash()
        return None

    @property
    def is_connected(self) -> bool:
        return self.client.session.shared is self.processes.outside[self.processes.shards.shard_by_hash(GROUP)].shared

    def _crash(self) -> None:
        """Crash silently: its connection and requests stay, and it returns as another member."""
        self.client = Client(self.processes, self.processes.shards.shard_by_hash(GROUP))
        self.id, self.epoch, self.reading, self.owned, self.next_offsets = f"{self.id}+", 0, {}, None, {}

    def give_sign(self, *, is_lost: bool = False, **fields: Any) -> bool:
        """Send a heartbeat; return whether something has changed."""
        before = self.epoch, self.reading
        if self.says_all and self.epoch:
            owned = [OWNED(topic_id=id_, partitions=held) for id_, held in self.reading.items()]
            said = {"rebalance_timeout_ms": 60_000, "subscribed_topic_names": self.topics, "topic_partitions": owned}
            fields = said | {"subscribed_topic_regex": self.pattern} | fields
        reported = self.ask(HEARTBEAT, 1, **self.fields(**fields))
        self.says_all = reported is None or is_lost
        if self.says_all:
            return True
        self.reported(reported)
        kept = {(id_, one) for id_, held in self.reading.items() for one in held}
        self.next_offsets = {place: offset for place, offset in self.next_offsets.items() if place in kept}
        return (self.epoch, self.reading) != before or reported.heartbeat_interval_ms < 3000

    def read_on(self) -> None:
        """Read a record of each partition, and commit the offsets."""
        names = {topic.id: topic.name.full for broker in self.processes.shards.brokers for topic in broker.topics()}
        for id_, held in list(self.reading.items()):
            if id_ in names and self._find(id_, names[id_], held):
                self._commit(id_, names[id_], held)

    def _find(self, id_: bytes, name: str, held: list[int]) -> bool:
        """Look up the offsets to resume at; return whether all are known."""
        if all((id_, one) in self.next_offsets for one in held):
            return True
        asked = schema.request(Api.OFFSET_FETCH).Groups
        group = asked(
            group_id=GROUP,
            member_id=self.id,
            member_epoch=self.epoch,
            topics=[asked.Topics(name=name, indexes=held)],
        )
        reported = self.ask(Api.OFFSET_FETCH, 9, groups=[group])
        if reported is None or reported.groups[0].error:
            return False
        for one in reported.groups[0].topics[0].partitions:
            self.next_offsets.setdefault((id_, one.index), max(one.offset, 0))
        return True

    def _commit(self, id_: bytes, name: str, held: list[int]) -> None:
        made = schema.request(Api.OFFSET_COMMIT).Topics
        for one in held:
            self.next_offsets[id_, one] += 1
        partitions = [made.Partitions(index=one, offset=self.next_offsets[id_, one]) for one in held]
        topics = [made(name=name, partitions=partitions)]
        self.ask(Api.OFFSET_COMMIT, 9, group_id=GROUP, member_id=self.id, generation=self.epoch, topics=topics)


class World:
    """A cluster, members of one group, and what was observed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cluster = Cluster(KafkaSettings(), *TOPICS)
        self.members: list[Reader] = []
        self.made = 0
        self.kills = 0
        self.positions: dict[tuple[bytes, int], int] = {}
        self.late: list[tuple[MemoryLink, Any]] = []

    # Faults

    def come(self) -> None:
        if len(self.members) < 4:
            self.made += 1
            topics = self.random.sample([*TOPICS, "later"], self.random.randint(1, 4))
            pattern = self.random.choice([None, None, "a.*|later"])
            self.members.append(Reader(self.cluster, GROUP, f"m{self.made:02}", sorted(topics), pattern))
            self.members[-1].give_sign()

    def beat(self) -> None:
        for member in self.random.sample(self.members, min(len(self.members), 2)):
            member.give_sign(is_lost=self.random.random() < 0.1)

    def read(self) -> None:
        for member in self.random.sample(self.members, min(len(self.members), 2)):
            member.read_on()

    def go(self) -> None:
        if self.members:
            member = self.members.pop(self.random.randrange(len(self.members)))
            if self.random.random() < 0.5:
                member.give_sign(member_epoch=-1)

    def wait(self) -> None:
        self.cluster.loop.advance(self.random.choice([0.5, 2.0, 20.0, 50.0]))

    def kill(self) -> None:
        """End a process soon."""
        loop, victim = self.cluster.loop, self.random.randrange(SHARDS)
        loop.interrupt_at = loop.calls + self.random.randint(1, 80)
        loop.interruption = lambda: self._kill(victim)

    def _kill(self, victim: int) -> None:
        self.kills += 1
        self.cluster.kill(victim, synced_only=False)

    def hold(self) -> None:
        """Deliver what arrives on one link late, or never."""
        held = [link for link, _ in self.late]
        living = [link for link in self.cluster.shards.links if link._peer is not None and link not in held]
        if living and len(self.late) < 2:
            link = self.random.choice(living)
            self.late.append((link, link._pump))
            link._pump = lambda: None  # type: ignore[method-assign]

    def let_go(self) -> None:
        for link, pump in self.late:
            link._pump = pump  # type: ignore[method-assign]
            link._pump_soon()
        self.late.clear()

    def change_topics(self) -> None:
        broker = self.cluster.shards.brokers[self.cluster.shards.shard_by_hash("later")]
        found = broker.find_topic("later")
        if found is None:
            broker.create_topic(TopicName.parse("later"), 2)
        elif len(found.partitions) < 4:
            broker.grow_topic(found, len(found.partitions) + 1)
        else:
            broker.delete_topic(found)
        self.cluster.calm()

    def step(self) -> None:
        actions = [self.come, self.beat, self.beat, self.beat, self.read, self.read, self.go, self.wait, self.kill]
        actions += [self.hold, self.let_go, self.change_topics]
        self.random.choice(actions)()
        self.check()

    # Checks

    def reading(self) -> list[tuple[bytes, int, str]]:
        """Return which partition each member reads, of the members that the coordinator knows."""
        consumers = self.cluster.shards.brokers[self.cluster.shards.shard_by_hash(GROUP)].consumers
        return [
            (id_, one, member.id)
            for member in self.members
            if consumers.topics_of(GROUP, member.id)
            for id_, held in member.reading.items()
            for one in held
        ]

    def check(self) -> None:
        places = [(id_, one) for id_, one, _ in self.reading()]
        assert len(places) == len(set(places)), sorted(self.reading())
        for broker in self.cluster.shards.brokers:
            for topic in broker.topics():
                for number, position in broker.classic.positions(GROUP, topic.name.full).items():
                    was = self.positions.get((topic.id, number), 0)
                    assert position.offset >= was, (topic.name.full, number, was, position.offset)
                    self.positions[topic.id, number] = position.offset

    def settle(self) -> None:
        """Without faults, every member gets its assignment and everything is read."""
        self.cluster.loop.interrupt_at = -1
        self.let_go()
        if not self.members:
            self.come()
        for _ in range(2):  # the session of vanished members expires
            for _ in range(ROUNDS):
                changes = [member.give_sign() for member in self.members]
                self.cluster.loop.advance(SESSION_S / ROUNDS)
                self.check()
        assert not any(changes), [vars(member) for member in self.members]
        names = {topic.id: topic for broker in self.cluster.shards.brokers for topic in broker.topics()}
        read = {(names[id_].name.full, one) for id_, one, _ in self.reading()}
        for topic in names.values():
            name = topic.name.full
            if any(
                name in member.topics or (member.pattern and name in ("a", "aaaa", "later")) for member in self.members
            ):
                assert {(name, number) for number in range(len(topic.partitions))} <= read
        for member in self.members:
            before = dict(member.next_offsets)
            member.read_on()
            held = [(id_, one) for id_, some in member.reading.items() for one in some]
            assert all(member.next_offsets[place] > before.get(place, -1) for place in held)
        self.check()


@pytest.mark.parametrize("seed", range(RUNS))
def test_two_members_never_read_the_same_partition(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    world.settle()


def handed_over(victim: int, interrupt_at: int) -> int:
    """Move partitions between members while a process ends before this call of the loop; return the number of calls."""
    world = World(0)
    loop = world.cluster.loop
    first, second = (Reader(world.cluster, GROUP, f"m{number}", [*TOPICS]) for number in range(2))
    world.members = [first]
    first.give_sign()
    first.read_on()
    loop.calls, loop.interrupt_at = 0, interrupt_at
    loop.interruption = lambda: world.cluster.kill(victim, synced_only=False)
    world.members = [first, second]
    for _ in range(4):
        for member in world.members:
            member.give_sign()
            member.read_on()
            world.check()
    calls = loop.calls
    world.settle()
    assert {len(member.reading) for member in world.members} == {len(TOPICS)}, "one partition of each topic"
    return calls


@pytest.mark.parametrize("victim", range(SHARDS))
def test_a_shard_ends_at_any_moment_of_a_handover(victim: int) -> None:
    at, calls = 1 + victim, 1
    while at <= calls:
        calls = handed_over(victim, at)
        at += STRIDE


def test_members_can_commit_before_they_rejoin_a_restarted_coordinator() -> None:
    """The coordinator was killed, and knows nothing of topics of other shards until a member rejoins."""
    world = World(0)
    member = Reader(world.cluster, GROUP, "m1", [*TOPICS])
    world.members = [member]
    member.give_sign()
    member.read_on()
    world.cluster.kill(world.cluster.shards.shard_by_hash(GROUP), synced_only=False)
    member.client = Client(world.cluster, world.cluster.shards.shard_by_hash(GROUP))
    before = dict(world.positions)
    member.read_on()
    world.check()
    assert {place: offset for place, offset in world.positions.items() if before.get(place) != offset} == dict.fromkeys(
        ((id_, one) for id_, held in member.reading.items() for one in held), 2
    )
    world.settle()
