"""Topic settings applied to stored bytes: compression, and compaction to the newest record of each key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings, Compression, TopicSettings
from polywire.broker.topics import Partition, Topic
from polywire.clock import SystemClock
from polywire.errors import BrokerError, Invalid
from polywire.log.base import Read
from polywire.log.log import FileLog
from polywire.log.segments import compaction
from polywire.records.batch import read_header
from polywire.records.columns import BatchFlags, Record
from polywire.records.rows import from_records
from polywire.types import Level, TopicName
from tests.unit.log.rig import SMALL, RigLoop, records_of


class Stored:
    """A broker with small files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.start()

    def start(self) -> None:
        self.loop = RigLoop()
        self.broker = Broker.open(
            self.directory, BrokerSettings(), self.loop, SystemClock(), log_settings=replace(SMALL, sync_interval_ms=1)
        )

    @property
    def log(self) -> FileLog:
        assert isinstance(self.broker._log, FileLog)
        return self.broker._log

    def make(self, settings: TopicSettings) -> Topic:
        return self.broker.create_topic(TopicName("s", "t"), 1, settings)

    def fill_slot(self, partition: Partition) -> None:
        slot = self.log._journal.current
        while self.log._journal.current is slot:
            number = partition.log.next_offset
            records = [Record(b"%d" % number + b"x" * 200, b"k%d" % (number % 5)) for _ in range(10)]
            self.broker.produce(partition, from_records(records), level=Level.WRITTEN, done=None)
            self.broker.commit()
        self.loop.run_until(lambda: not self.log.sealing)

    def flags(self, partition: Partition) -> set[int]:
        """Return the flags of the first stored batch."""
        answers: list[Read | BrokerError] = []
        read = partition.log.read(0, bytes_max=1, then=answers.append)
        if not isinstance(read, Read):
            self.loop.run_until(lambda: answers)
            (answer,) = answers
            assert isinstance(answer, Read), answer
            read = answer
        assert len(records_of(read)) > 0
        return {read_header(read.chunks[0]).flags}


@pytest.mark.parametrize(
    ("kind", "flag"), [(Compression.NONE, 0), (Compression.LZ4, BatchFlags.LZ4), (Compression.ZSTD, BatchFlags.ZSTD)]
)
def test_bodies_are_compressed_when_sealed(tmp_path: Path, kind: Compression, flag: int) -> None:
    stored = Stored(tmp_path)
    partition = stored.make(TopicSettings(compression=kind)).partitions[0]
    stored.fill_slot(partition)
    (flags,) = stored.flags(partition)
    assert flags & (BatchFlags.LZ4 | BatchFlags.ZSTD) == flag
    sizes = [path.stat().st_size for path in (tmp_path / "segments").iterdir()]
    assert (sum(sizes) < 32 * 1024) == bool(flag)
    stored.broker.close()
    stored.start()
    topic = stored.broker.topic("s.t")
    assert topic.partitions[0].log.compression is topic.settings.stored_compression
    stored.broker.configure_topic(topic, TopicSettings(compression=Compression.ZSTD))
    assert topic.partitions[0].log.compression is topic.settings.stored_compression
    assert topic.settings.stored_compression is not None
    stored.broker.close()


def test_topics_with_compaction_are_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "DIRTY_BYTES_MIN", 1)
    stored = Stored(tmp_path)
    topic = stored.make(TopicSettings())
    stored.fill_slot(topic.partitions[0])
    stored.broker._retention.run_pass()
    assert not stored.log._sealer._to_compact
    stored.broker.configure_topic(topic, TopicSettings(compaction=True))
    stored.broker._retention.run_pass()
    before = topic.partitions[0].log.stored_bytes
    stored.log._expire()
    stored.loop.run_until(lambda: topic.partitions[0].log.stored_bytes < before / 2)
    stored.broker.close()


def test_small_journal_files_lower_the_limits_of_records_and_batches(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    partition, settings = stored.make(TopicSettings()).partitions[0], stored.broker.settings
    assert settings.batch_bytes_max == SMALL.batch_bytes_max < BrokerSettings().batch_bytes_max
    longest = from_records([Record(bytes(settings.record_bytes_max))])
    for batch in (from_records([Record(b"before")]), longest, longest):
        stored.broker.produce(partition, bytearray(batch), level=Level.WRITTEN, done=None)
    stored.loop.run_until(lambda: partition.log.next_offset == 3)
    with pytest.raises(Invalid, match="record is too large"):
        stored.broker.produce(
            partition, from_records([Record(bytes(settings.record_bytes_max + 1))]), level=Level.WRITTEN, done=None
        )
    many = from_records([Record(bytes(1000))] * (settings.batch_bytes_max // 1000))
    with pytest.raises(Invalid, match="batch is too large"):
        stored.broker.produce(partition, many, level=Level.WRITTEN, done=None)
