"""Clients that produce and read, and retry unacknowledged batches. The model predicts the result of every batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from polywire.broker.topics import Partition
from polywire.errors import BrokerError, Missing
from polywire.log.base import Read
from polywire.records.columns import Record
from polywire.records.rows import from_records
from tests.sim.broker.asking import Asking
from tests.sim.broker.history import Key
from tests.sim.broker.model import OFFSET_FORGOTTEN, Producer, Repeat, Sent
from tests.sim.broker.part import Part
from tests.sim.chance import Chance
from tests.sim.log.client import READS_MAX, records_of
from tests.sim.log.model import KeptPartition
from tests.sim.promises import require


class RecordPart(Part):
    """A base of ``Client``. may_fail_reads: whether the disk has failed since the start. reading: number of outstanding
    reads.
    """

    def __init__(self, asking: Asking, chance: Chance) -> None:
        super().__init__(asking, chance)
        self.may_fail_reads = False
        self.reading = 0

    def produce(self) -> None:
        """Send a producer's next batch, or first the one to repeat."""
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
        """Send an earlier batch once more, whatever its result was."""
        producer = self.chance.one_of(self.model.producers)
        known = [*producer.old, *(sent for waiting in producer.unanswered.values() for sent in waiting)]
        living = {partition.incarnation: partition for topic in self.topics() for partition in topic.partitions}
        there = [sent for sent in known if sent.incarnation in living]
        if there:
            sent = self.chance.one_of(there)
            self._send(producer, living[sent.incarnation], sent)

    def begin_epoch(self) -> None:
        """Begin a new epoch of a producer; late batches of earlier epochs must be refused."""
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
            applied=lambda _: self.append(partition, contents),
            completed=partial(self._check_offset, first),
        )

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
            return self.append(partition, sent.contents)

        def completed(found: int) -> None:
            forgotten = isinstance(outcome, Repeat) and not outcome.moment and found == OFFSET_FORGOTTEN
            if not forgotten:  # a start may know a batch without its offset
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
            ):  # stored data is lost, or another producer has its id
                known = self.model.known(sent.incarnation, producer.id)
                producer.begin_epoch(1 + max(sent.epoch, 0 if known is None else known.epoch))
            return
        require(outcome is None or repeated, "what must be refused is refused", expected=outcome)

    # Readers

    def read(self) -> None:
        partition = self.partition()
        if partition is None or self.reading >= READS_MAX or self.broker.uncommitted:
            return
        kept, log = self.model.partitions[partition.incarnation], partition.log
        offset = log.first_offset + self.chance.below(log.next_offset - log.first_offset + 1)
        size = self.chance.one_of((1, 2000, 1 << 20))
        then = partial(self._judge, kept, partition, offset)
        self.asking.story.tell("read", f"p{partition.incarnation} from {offset} size={size}")
        self.reading += 1
        try:
            found = self.broker.fetch(partition, offset, bytes_max=size, then=then)
        except BrokerError as error:
            then(error)
        else:
            if isinstance(found, Read):
                then(found)

    def _judge(self, kept: KeptPartition, partition: Partition, offset: int, found: Read | BrokerError) -> None:
        self.reading -= 1
        if self.asking.recovered is not None:
            self._judge_late(kept, offset, found)
            return
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

    @staticmethod
    def _judge_late(kept: KeptPartition, offset: int, found: Read | BrokerError) -> None:
        """Check what a former leader shows: it may be old, but it was stored."""
        if isinstance(found, BrokerError):
            return
        records = [record for record in records_of(found.chunks) if offset <= record.offset < found.next_offset]
        known = {record.offset: kept.records[record.offset : record.offset + 1] for record in records}
        lost = [at.offset for at in records if known[at.offset] != [(at.key, at.value)]]
        require(not lost, "a former leader shows what was stored", partition=kept.incarnation, offsets=lost)
        found.pin.release()
