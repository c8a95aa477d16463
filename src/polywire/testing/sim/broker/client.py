"""Clients of a broker that make topics, produce and read, and send again what was not answered.

Promises: whatever a client is told is judged by what the clients know together. Must not know: the disk, when a process is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

from polywire.broker.settings import TopicSettings
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, Missing
from polywire.log.base import Completion, Read
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.sim.broker.asking import Asking
from polywire.testing.sim.broker.history import Key
from polywire.testing.sim.broker.model import OFFSET_FORGOTTEN, Producer, Repeat, Sent
from polywire.testing.sim.chance import Chance
from polywire.testing.sim.log.client import KEYS, READS_MAX, VALUE_SIZES, records_of
from polywire.testing.sim.log.model import Content, KeptPartition
from polywire.testing.sim.promises import require
from polywire.types import Level, TopicName

TOPICS: Final = ("a", "b", "c")
PARTITIONS_MAX: Final = 3  # of a topic
RETENTION_BYTES: Final = 20_000
LEVELS: Final = (
    (Level.MEMORY, Level.WRITTEN, Level.WRITTEN, Level.SYNCED),
    (Level.WRITTEN,),
    (Level.SYNCED,),
)
"""What is asked for, in one mood and in others."""


class Client:
    """Guards: what is under way with one process."""

    def __init__(self, asking: Asking, chance: Chance) -> None:
        self.asking: Final = asking
        self.broker: Final = asking.broker
        self.model: Final = asking.model
        self.chance: Final = chance
        self.levels: Sequence[Level] = LEVELS[0]
        self.may_fail_reads = False
        self._reading = 0

    def act(self, weights: Sequence[float], without: Collection[str] = ()) -> None:
        """Ask for something, unless it is among what is not asked for."""
        story = self.asking.story
        before, story.actor = story.actor, "client"
        chosen = self.chance.weighted(list(ACTS), weights)
        if chosen.__name__ not in without:
            chosen(self)
        story.actor = before

    def level(self) -> Level:
        """One of this mood's."""
        return self.chance.one_of(self.levels)

    def ask(self, event: str, text: str, verb: Callable[[Completion[Any]], Any], *, level: Level, **named: Any) -> Any:
        """Ask for what nothing but a full disk, or one that failed, may refuse; what the verb returns, None where it was refused."""
        found = self.asking.ask(event, f"{text} {level.name}", verb, level=level, **named)
        if isinstance(found, BrokerError):
            require(self.asking.is_excused(found), "refused for no reason", what=event, error=str(found))
            return None
        return found

    def topic(self) -> Topic | None:
        """One of those that are there."""
        topics = self.broker.topics()
        return self.chance.one_of(topics) if topics else None

    def partition(self) -> Partition | None:
        """One of those that are there."""
        topic = self.topic()
        return None if topic is None else self.chance.one_of(topic.partitions)

    # Topics

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
            return {key: None for key in self.model.history.latest if key[1] == name}

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

    # Producers

    def contents(self, keyed: bool) -> list[Content]:
        """Some records that nobody sent before."""
        found: list[Content] = []
        for _ in range(1 + self.chance.below(3)):
            value: bytes | None = b"%d:" % self.model.number() + b"." * self.chance.one_of(VALUE_SIZES)
            key = b"k%d" % self.chance.below(KEYS) if keyed else None
            if keyed and self.chance.happens(0.15):
                value = None
            found.append((key, value))
        return found

    def produce(self) -> None:
        """A producer sends its next batch, or again what it has to send first."""
        partition = self.partition()
        if partition is None:
            return
        producer, incarnation = self.chance.one_of(self.model.producers), partition.incarnation
        sent = producer.due(incarnation)
        if sent is None:
            base = producer.next.get(incarnation, 0)
            sent = Sent(incarnation, producer.epoch, base, self.contents(partition.topic.settings.compaction))
            producer.next[incarnation] = sent.last + 1
            producer.unanswered.setdefault(incarnation, []).append(sent)
        self._send(producer, partition, sent)

    def produce_again(self) -> None:
        """Something that was sent before arrives once more, whatever came of it."""
        producer = self.chance.one_of(self.model.producers)
        known = [*producer.old, *(sent for waiting in producer.unanswered.values() for sent in waiting)]
        living = {partition.incarnation: partition for topic in self.broker.topics() for partition in topic.partitions}
        there = [sent for sent in known if sent.incarnation in living]
        if there:
            sent = self.chance.one_of(there)
            self._send(producer, living[sent.incarnation], sent)

    def begin_epoch(self) -> None:
        """A producer starts anew: whatever of its past arrives late is not stored any more."""
        producer = self.chance.one_of(self.model.producers)
        producer.begin_epoch(producer.epoch + 1)

    def produce_plainly(self) -> None:
        partition = self.partition()
        if partition is None:
            return
        contents, level = self.contents(partition.topic.settings.compaction), self.level()
        batch = from_records([Record(value, key) for key, value in contents])
        kept = self.model.partitions[partition.incarnation]
        first = len(kept.records)
        self.ask(
            "plain",
            f"p{partition.incarnation} [{first}, {first + len(contents)})",
            lambda done: self.broker.produce(partition, batch, level=level, done=done),
            level=level,
            applied=lambda _: self._append(partition, contents),
            completed=partial(self._check_offset, first),
        )

    def _append(self, partition: Partition, contents: list[Content]) -> Mapping[Key, object]:
        kept = self.model.partitions[partition.incarnation]
        kept.records += contents
        return {("end", partition.topic.name.full, partition.incarnation): len(kept.records)}

    @staticmethod
    def _check_offset(expected: int, found: int) -> None:
        require(found == expected, "a record has the offset it was given", expected=expected, found=found)

    def _send(self, producer: Producer, partition: Partition, sent: Sent) -> None:
        level, outcome = self.level(), self.model.outcome(producer, sent)
        records = [Record(value, key) for key, value in sent.contents]
        batch = from_records(records, producer_id=producer.id, producer_epoch=sent.epoch, base_sequence=sent.base)
        kept = self.model.partitions[sent.incarnation]
        repeated = isinstance(outcome, Repeat)
        first = outcome.offset if isinstance(outcome, Repeat) else len(kept.records)

        def applied(_: None) -> Mapping[Key, object]:
            sent.taken = True
            if repeated:
                return {}
            self.model.store(producer, sent, first)
            return self._append(partition, sent.contents)

        def completed(found: int) -> None:
            forgotten = isinstance(outcome, Repeat) and not outcome.moment and found == OFFSET_FORGOTTEN
            if not forgotten:  # a start may know that it has a batch, and not where
                self._check_offset(first, found)
            producer.answered(sent)

        found = self.asking.ask(
            "again" if repeated else "produce",
            f"{producer.id.decode()} epoch={sent.epoch} sequence={sent.base} p{sent.incarnation} at={first} {level.name}",
            lambda done: self.broker.produce(partition, batch, level=level, done=done),
            level=level,
            applied=applied,
            completed=completed,
            moment=outcome.moment if isinstance(outcome, Repeat) else None,
        )
        if isinstance(found, BrokerError):
            expected = self.asking.is_excused(found) or found.code is outcome
            require(expected, "a batch is refused for a reason", error=str(found), expected=outcome)
            if (
                found.code is outcome and sent.epoch == producer.epoch
            ):  # something stored is gone, or somebody has its id
                known = self.model.known(sent.incarnation, producer.id)
                producer.begin_epoch(1 + max(sent.epoch, 0 if known is None else known.epoch))
            return
        require(outcome is None or repeated, "what must be refused is refused", expected=outcome)

    # Readers

    def read(self) -> None:
        partition = self.partition()
        if partition is None or self._reading >= READS_MAX or self.broker.uncommitted:
            return
        kept, log = self.model.partitions[partition.incarnation], partition.log
        offset = log.first_offset + self.chance.below(log.next_offset - log.first_offset + 1)
        size = self.chance.one_of((1, 2000, 1 << 20))
        then = partial(self._judge, kept, partition, offset)
        self.asking.story.tell("read", f"p{partition.incarnation} from {offset} size={size}")
        self._reading += 1
        found = self.broker.fetch(partition, offset, bytes_max=size, then=then)
        if isinstance(found, Read):
            then(found)

    def _judge(self, kept: KeptPartition, partition: Partition, offset: int, found: Read | BrokerError) -> None:
        self._reading -= 1
        if isinstance(found, Missing):
            require(partition.ended or offset < partition.log.first_offset, "a record is there", offset=offset)
            return
        if isinstance(found, BrokerError):
            excused = self.asking.failure or self.may_fail_reads
            require(excused, "a record can be read", offset=offset, error=str(found))
            return
        if offset >= partition.log.first_offset:
            records = [record for record in records_of(found.chunks) if offset <= record.offset < found.next_offset]
            kept.check_records(records, offset, found.next_offset)
            if records:
                kept.shown = max(kept.shown, found.next_offset)
        self.asking.story.tell("given", f"p{partition.incarnation} [{offset}, {found.next_offset})")
        found.pin.release()

    def commit(self) -> None:
        """The process has read from all its peers: what they asked for is written."""
        self.asking.story.tell("commit")
        self.broker.commit()

    def check_rest(self) -> None:
        """Nothing is under way any more."""
        require(not self.asking.unanswered, "everybody is answered once", unanswered=self.asking.unanswered)
        require(not self._reading, "every read is answered", reading=self._reading)


ACTS: Final[Mapping[Callable[[Client], None], float]] = {
    Client.create: 1,
    Client.grow: 0.3,
    Client.delete: 0.3,
    Client.purge: 0.4,
    Client.trim: 0.6,
    Client.produce: 10,
    Client.produce_again: 4,
    Client.produce_plainly: 3,
    Client.begin_epoch: 0.3,
    Client.read: 4,
    Client.commit: 6,
}
"""What may be asked for, and how often."""
