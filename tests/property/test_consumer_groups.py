"""Consumer groups with members of another protocol: no partition has two readers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from polywire.broker.groups.consumer import AWAY, JOINING, LEAVING, Beat
from polywire.errors import BrokerError
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import TopicName

TOPICS = ("a", "b")
PARTITIONS = {"a": 3, "b": 4}
REBALANCE_S = 20.0
ROUNDS_MAX = 12  # of heartbeats until every member has its assignment
Reading = dict[bytes, frozenset[int]]


@dataclass
class Consumer:
    """A client of the newer protocol: it reads its last assignment, and reports it after changes and lost responses."""

    id: str
    topics: frozenset[str]
    instance: str | None = None
    epoch: int = JOINING
    reading: Reading = field(default_factory=dict)
    says_all: bool = True

    def beat(self, memory: MemoryBroker, *, is_lost: bool = False) -> bool:
        """Send a heartbeat; return whether something has changed."""
        beat = Beat(self.id, self.epoch, "kafka", self.instance)
        if self.says_all:
            beat = Beat(
                self.id,
                self.epoch,
                "kafka",
                self.instance,
                rebalance_timeout_s=REBALANCE_S,
                topics=self.topics,
                owned=self.reading,
            )
        try:
            reported = memory.broker.consumers.beat("g", beat)
        except BrokerError:
            self.rejoin()
            return True
        self.says_all = is_lost
        if is_lost:
            return True
        changed = reported.epoch != self.epoch
        self.epoch = reported.epoch
        if reported.assignment is not None:
            reading = {id_: frozenset(partitions) for id_, partitions in reported.assignment.items()}
            changed |= reading != self.reading
            self.reading, self.says_all = reading, reading != self.reading
        return changed or not reported.is_settled

    def rejoin(self) -> None:
        """Forget its membership and stop reading."""
        self.epoch, self.reading, self.says_all = JOINING, {}, True


class ConsumerGroupMachine(RuleBasedStateMachine):
    """A broker, consumers that learn of changes late, and members of another protocol that do so at once."""

    @initialize()
    def begin(self) -> None:
        self.memory = MemoryBroker()
        for topic in TOPICS:
            self.memory.broker.create_topic(TopicName.parse(topic), PARTITIONS[topic])
        self.memory.run()
        self.made = 0
        self.consumers: list[Consumer] = []
        self.others: set[tuple[str, str]] = set()

    def at(self, index: int) -> Consumer | None:
        return self.consumers[index % len(self.consumers)] if self.consumers else None

    @rule(topics=st.sets(st.sampled_from([*TOPICS, "none"]), min_size=1), instance=st.sampled_from([None, None, "x"]))
    def come(self, topics: set[str], instance: str | None) -> None:
        if len(self.consumers) < 4:
            self.made += 1
            is_taken = any(consumer.instance == instance for consumer in self.consumers)
            self.consumers.append(Consumer(f"m{self.made:02}", frozenset(topics), None if is_taken else instance))
            self.consumers[-1].beat(self.memory)

    @rule(index=st.integers(0, 3), is_lost=st.booleans())
    def beat(self, index: int, is_lost: bool) -> None:
        consumer = self.at(index)
        if consumer is not None:
            consumer.beat(self.memory, is_lost=is_lost)

    @rule(index=st.integers(0, 3), topics=st.sets(st.sampled_from(TOPICS), min_size=1))
    def subscribe(self, index: int, topics: set[str]) -> None:
        consumer = self.at(index)
        if consumer is not None:
            consumer.topics, consumer.says_all = frozenset(topics), True

    @rule(index=st.integers(0, 3), is_back=st.booleans())
    def go(self, index: int, is_back: bool) -> None:
        consumer = self.at(index)
        if consumer is None:
            return
        epoch = AWAY if consumer.instance is not None and is_back else LEAVING
        with suppress(BrokerError):
            self.memory.broker.consumers.beat("g", Beat(consumer.id, epoch, "kafka", consumer.instance))
        self.consumers.remove(consumer)

    @rule(index=st.integers(0, 3))
    def vanish(self, index: int) -> None:
        consumer = self.at(index)
        if consumer is not None:
            self.consumers.remove(consumer)

    @rule(topic=st.sampled_from(TOPICS), member=st.sampled_from(["05", "zz"]))
    def other_joins(self, topic: str, member: str) -> None:
        self.memory.broker.groups.join("g", topic, member, wire="flux")
        self.others.add((topic, member))

    @rule(topic=st.sampled_from(TOPICS), member=st.sampled_from(["05", "zz"]))
    def other_leaves(self, topic: str, member: str) -> None:
        if (topic, member) in self.others:
            self.others.discard((topic, member))
            with suppress(BrokerError):
                self.memory.broker.groups.leave("g", topic, member, None, wire="flux")

    @rule(seconds=st.sampled_from([1.0, 8.0, 21.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.memory.advance(seconds)

    @rule()
    def grow(self) -> None:
        topic = self.memory.broker.topic("a")
        if len(topic.partitions) < 6:
            self.memory.broker.grow_topic(topic, len(topic.partitions) + 1)

    @rule()
    def restart(self) -> None:
        self.memory.restart()
        for consumer in self.consumers:
            consumer.says_all = True

    def read_now(self) -> list[tuple[bytes, int, str]]:
        """Return the readers of each partition, of the members that the broker knows."""
        broker = self.memory.broker
        found = []
        for topic in TOPICS:
            view, id_ = broker.groups.view("g", topic), broker.topic(topic).id
            for member in () if view is None else view.members:
                if member.wire == "flux":
                    found += [(id_, partition, member.id) for partition in member.partitions]
        for consumer in self.consumers:
            if broker.consumers.topics_of("g", consumer.id):
                found += [(id_, one, consumer.id) for id_, held in consumer.reading.items() for one in held]
        return found

    @invariant()
    def no_partition_has_two_readers(self) -> None:
        places = [(topic, partition) for topic, partition, _ in self.read_now()]
        assert len(places) == len(set(places)), sorted(self.read_now())

    def teardown(self) -> None:
        """Without further changes every member gets its assignment, and everything subscribed is read."""
        memory = self.memory
        memory.advance(0.0)
        for _ in range(ROUNDS_MAX):
            changes = [consumer.beat(memory) for consumer in self.consumers]
            for topic, member in self.others:
                memory.broker.groups.join("g", topic, member, wire="flux")
            memory.advance(6.0)
        for _ in range(3):  # the session of vanished members expires
            for topic, member in self.others:
                memory.broker.groups.join("g", topic, member, wire="flux")
            for _ in range(ROUNDS_MAX):
                changes = [consumer.beat(memory) for consumer in self.consumers]
        assert not any(changes), [vars(consumer) for consumer in self.consumers]
        self.no_partition_has_two_readers()
        wanted = {topic for consumer in self.consumers for topic in consumer.topics} | {
            topic for topic, _ in self.others
        }
        read = {(topic, partition) for topic, partition, _ in self.read_now()}
        for topic in wanted & set(TOPICS):
            found = memory.broker.topic(topic)
            assert {(found.id, number) for number in range(len(found.partitions))} <= read, topic


ConsumerGroupMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestConsumerGroups = ConsumerGroupMachine.TestCase
