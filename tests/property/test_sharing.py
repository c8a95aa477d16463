"""Groups of all kinds of members at once: no partition has two readers."""

from __future__ import annotations

from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, rule

from polywire.broker import sliced
from polywire.errors import BrokerError
from polywire.testing.loop import ManualLoop
from tests.property.test_consumer_groups import TOPICS, ConsumerGroupMachine
from tests.unit.broker.test_memberships import Classic

CLASSIC_MAX = 3
ROUNDS = 40  # of heartbeats, three seconds apart, until every member has its assignment


class SharingMachine(ConsumerGroupMachine):
    """Classic members come and go as well; some continue to read while they join.

    Memberships are added one step per pass.
    """

    @initialize()
    def begin(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(sliced, "SLICE_S", -1.0)
        super().begin()
        self.classic: list[Classic] = []

    def of(self, index: int) -> Classic | None:
        return self.classic[index % len(self.classic)] if self.classic else None

    @rule(topics=st.sets(st.sampled_from(TOPICS), min_size=1), keeps=st.booleans())
    def classic_comes(self, topics: set[str], keeps: bool) -> None:
        if len(self.classic) < CLASSIC_MAX:
            self.made += 1
            member = Classic(self.memory, f"c{self.made:02}", *topics, keeps=keeps)
            member.join()
            self.classic.append(member)

    @rule(index=st.integers(0, 2))
    def classic_beats(self, index: int) -> None:
        member = self.of(index)
        if member is not None:
            member.beat()

    @rule(index=st.integers(0, 2))
    def classic_goes(self, index: int) -> None:
        member = self.of(index)
        if member is not None:
            with suppress(BrokerError):
                self.memory.broker.classic.leave("g", member.id)
            self.classic.remove(member)

    @rule(index=st.integers(0, 2))
    def classic_vanishes(self, index: int) -> None:
        member = self.of(index)
        if member is not None:
            self.classic.remove(member)

    @rule()
    def answers_arrive(self) -> None:
        self.memory.run()

    @rule(passes=st.integers(1, 4))
    def some_passes(self, passes: int) -> None:
        assert isinstance(self.memory.loop, ManualLoop)
        for _ in range(passes):
            self.memory.loop.run_pass()

    def read_now(self) -> list[tuple[bytes, int, str]]:
        """Return readers that the broker knows; others learn at their next commit that they were removed."""
        broker = self.memory.broker
        found = super().read_now()
        view = broker.classic.view("g")
        members = () if view is None else view.members
        # members that left are identified by their protocol
        known = {member.id for member in members if not member.client_id}
        for member in self.classic:
            if member.id in known:
                ids = {topic: broker.topic(topic).id for topic in member.reading}
                found += [(ids[topic], one, member.id) for topic, held in member.reading.items() for one in held]
        return found

    def teardown(self) -> None:
        """Without further changes, everything subscribed is read by one member."""
        self.patch.undo()
        memory = self.memory
        for _ in range(ROUNDS):
            for member in self.classic:
                member.beat()
            for consumer in self.consumers:
                consumer.beat(memory)
            for topic, other in self.others:
                memory.broker.groups.join("g", topic, other, wire="flux")
            memory.advance(3.0)
        self.no_partition_has_two_readers()
        reported = {topic for one in self.consumers for topic in one.topics} | {topic for topic, _ in self.others}
        shared = {topic for member in self.classic for topic in member.topics}
        read = {(topic, partition) for topic, partition, _ in self.read_now()}
        for topic in (reported | shared if reported & shared else reported) & set(
            TOPICS
        ):  # without other protocols, members assign themselves
            found = memory.broker.topic(topic)
            assert {(found.id, number) for number in range(len(found.partitions))} <= read, topic


SharingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSharing = SharingMachine.TestCase
