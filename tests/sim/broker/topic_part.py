"""Clients that create, grow, purge and delete topics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from polywire.broker.settings import TopicSettings
from polywire.broker.topics import Partition, Topic
from polywire.types import TopicName
from tests.sim.broker.history import Key
from tests.sim.broker.part import Part
from tests.sim.log.model import KeptPartition

TOPICS: Final = ("a", "b", "c")
PARTITIONS_MAX: Final = 3  # per topic
RETENTION_BYTES: Final = 20_000


class TopicPart(Part):
    """A base of ``Client``."""

    def create(self) -> None:
        free = [name for name in TOPICS if self.broker.find_topic(name) is None]
        if not free:
            return
        name, count = self.chance.one_of(free), 1 + self.chance.below(PARTITIONS_MAX)
        keyed = self.chance.happens(0.3)
        limit = RETENTION_BYTES if self.chance.happens(0.2) else None
        settings, level = TopicSettings(compaction=keyed, retention_bytes=limit), self.level()
        parsed = TopicName.parse(name)

        def applied(topic: Topic) -> Mapping[Key, object]:
            return {("topic", name): (topic.id.hex(), count), **self._begin(topic.partitions, name, keyed)}

        verb = partial(self.broker.create_topic, parsed, count, settings, level=level)
        self.ask("create", f"{name} {count}", lambda done: verb(done=done), level=level, applied=applied)

    def _begin(self, partitions: Sequence[Partition], name: str, keyed: bool) -> dict[Key, object]:
        made: dict[Key, object] = {}
        for partition in partitions:
            self.model.partitions[partition.incarnation] = KeptPartition(partition.incarnation, keyed)
            made["end", name, partition.incarnation] = 0
            if partition.topic.settings.retention_bytes is None:
                made["first", name, partition.incarnation] = 0
        return made

    def grow(self) -> None:
        topic = self.topic()
        if topic is None or len(topic.partitions) >= PARTITIONS_MAX:
            return
        name, count, level = topic.name.full, len(topic.partitions) + 1, self.level()

        def applied(_: bool) -> Mapping[Key, object]:
            made = self._begin(topic.partitions[-1:], name, topic.settings.compaction)
            return {("topic", name): (topic.id.hex(), count), **made}

        verb = partial(self.broker.grow_topic, topic, count, level=level)
        self.ask("grow", f"{name} to {count}", lambda done: verb(done=done), level=level, applied=applied)

    def delete(self) -> None:
        topic = self.topic()
        if topic is None:
            return
        name, level = topic.name.full, self.level()

        def applied(_: None) -> Mapping[Key, object]:
            gone = {key for key in self.model.history.latest if key[1] == name}
            incarnations = {key[2] for key in gone if key[0] == "end"}
            for token, known in self.model.tokens.items():
                if known.incarnation in incarnations and not known.is_gone:
                    known.is_gone = True
                    gone.add(("staged", "", token.hex()))
            return dict.fromkeys(gone)

        verb = partial(self.broker.delete_topic, topic, level=level)
        self.ask("delete", name, lambda done: verb(done=done), level=level, applied=applied)

    def purge(self) -> None:
        topic = self.topic()
        if topic is None:
            return
        name, level = topic.name.full, self.level()

        def applied(_: bool) -> Mapping[Key, object]:
            kept = [self.model.partitions[partition.incarnation] for partition in topic.partitions]
            return self._trimmed(topic, [(one, len(one.records)) for one in kept])

        verb = partial(self.broker.purge_topic, topic, level=level)
        self.ask("purge", name, lambda done: verb(done=done), level=level, applied=applied)

    def trim(self) -> None:
        partition = self.partition()
        if partition is None:
            return
        end = len(self.model.partitions[partition.incarnation].records)
        first, level = self.chance.below(end + 1), self.level()

        def applied(_: None) -> Mapping[Key, object]:
            return self._trimmed(partition.topic, [(self.model.partitions[partition.incarnation], first)])

        verb = partial(self.broker.trim_partition, partition, first, level=level)
        text = f"p{partition.incarnation} to {first}"
        self.ask("trim", text, lambda done: verb(done=done), level=level, applied=applied)

    @staticmethod
    def _trimmed(topic: Topic, trimmed: Sequence[tuple[KeptPartition, int]]) -> Mapping[Key, object]:
        for kept, first in trimmed:
            kept.first = max(kept.first, first)
        if topic.settings.retention_bytes is not None:
            return {}
        return {("first", topic.name.full, kept.incarnation): kept.first for kept, _ in trimmed}
