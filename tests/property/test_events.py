"""Aggregates against a list of events per key, in any history: versions have no gaps."""

from __future__ import annotations

from collections import defaultdict

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from polywire.broker.settings import TopicSettings
from polywire.broker.topics import Partition
from polywire.errors import Conflict
from polywire.log.base import Read
from polywire.records.columns import Event, Record
from polywire.records.rows import from_records, to_records
from polywire.testing.memory_broker import MemoryBroker
from polywire.types import Level, TopicName

KEYS = st.sampled_from([b"a", b"b", b"c"])


class EventMachine(RuleBasedStateMachine):
    """The model: all event values by key, and the offset below which everything was removed."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryBroker()
        self.memory.broker.create_topic(TopicName("default", "ev"), 1, TopicSettings(event_sourcing=True))
        self.values: defaultdict[bytes, list[bytes]] = defaultdict(list)
        self.places: defaultdict[bytes, list[int]] = defaultdict(list)
        self.first_offset = 0
        self.number = 0

    def partition(self) -> Partition:
        return self.memory.broker.topic("ev").partitions[0]

    @rule(key=KEYS, step=st.integers(-1, 2))
    def append(self, key: bytes, step: int) -> None:
        version = len(self.values[key]) + step
        self.number += 1
        value = b"%s-%d" % (key, self.number)
        batch = from_records([Record(value=value, key=key, event=Event("T", 1, max(version, 0)))])
        try:
            offset = self.memory.broker.events.append(
                self.partition(), key, version, batch, level=Level.WRITTEN, done=None
            )
        except Conflict:
            assert step != 1
        else:
            assert step == 1
            self.values[key].append(value)
            self.places[key].append(offset)

    @rule(count=st.integers(1, 3))
    def write_plain_records(self, count: int) -> None:
        batch = from_records([Record(value=b"plain", key=b"a")] * count)
        self.memory.broker.produce(self.partition(), batch, level=Level.WRITTEN, done=None)

    @rule()
    def settle(self) -> None:
        self.memory.run()

    @rule()
    def restart(self) -> None:
        self.memory.run()
        self.memory.restart()

    @rule()
    def purge(self) -> None:
        self.memory.run()
        self.memory.broker.purge_topic(self.memory.broker.topic("ev"))
        self.memory.run()
        self.first_offset = self.partition().log.first_offset

    @invariant()
    def versions_are_those_of_the_model(self) -> None:
        for key, values in self.values.items():
            assert self.memory.broker.events.version(self.partition(), key) == len(values)

    @rule(key=KEYS, first_version=st.integers(1, 6))
    def read(self, key: bytes, first_version: int) -> None:
        self.memory.run()
        version, offsets = self.memory.broker.events.offsets(self.partition(), key, first_version)
        kept = [
            (number, place)
            for number, place in enumerate(self.places[key], 1)
            if number >= first_version and place >= self.first_offset
        ]
        assert list(offsets) == [place for _, place in kept]
        assert not kept or version == kept[0][0]
        for number, place in kept:
            assert self.record_at(place).value == self.values[key][number - 1]

    def record_at(self, offset: int) -> Record:
        read = self.memory.broker.fetch(self.partition(), offset, bytes_max=1, then=lambda _: None)
        assert isinstance(read, Read)
        found = [record for chunk in read.chunks for record in to_records(bytes(chunk)) if record.offset == offset]
        read.pin.release()
        return found[0]


TestEvents = EventMachine.TestCase
TestEvents.settings = settings(max_examples=40)
