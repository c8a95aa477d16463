"""The log against a list, in any history of appends, stages, publishes, trims, drops, seals, kills and reopenings."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polywire.clock import SystemClock
from polywire.errors import Busy, Missing
from polywire.log.base import NO_OFFSET
from polywire.log.segments import merge
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.unit.log.rig import SMALL, Rig, batch_of

TINY = replace(SMALL, slot_bytes=48 * 1024, slot_count_max=3, sync_interval_ms=1)
NEVER = 2**62


@dataclass
class Kept:
    """The expected content of a partition: all values ever appended, and the first retained one."""

    values: list[bytes] = field(default_factory=list)
    first: int = 0


class LogMachine(RuleBasedStateMachine):
    """Applies the same operations to a log and to lists."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="polywire-log-"))
        self.kept: dict[int, Kept] = {}
        self.staged: dict[bytes, dict[int, list[bytes]]] = {}
        self.changes: list[bytes] = []
        self.producers: list[tuple[bytes, int]] = []
        self.count = 0
        self.incarnation = 0
        self.reported: list[tuple[int, list[int]]] = []

    @initialize(synced=st.booleans())
    def begin(self, synced: bool) -> None:
        self.rig = Rig(self.directory, replace(TINY, durability=Level.SYNCED if synced else Level.WRITTEN))
        self.open_partition()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.log.close()
        shutil.rmtree(self.directory)

    def value(self, size: int) -> bytes:
        self.count += 1
        return b"%d:" % self.count + b"x" * size

    def relieve(self) -> None:
        """Wait until there is capacity, so that the time of sealing does not influence the test."""
        self.rig.loop.run_until(lambda: self.rig.log._journal.free)

    # Rules

    @rule()
    @precondition(lambda self: len(self.kept) < 4)
    def open_partition(self) -> None:
        self.incarnation += 1
        self.rig.log.open_partition(self.incarnation)
        self.kept[self.incarnation] = Kept()

    @rule(
        data=st.data(),
        sizes=st.lists(st.sampled_from((0, 5, 100, 900)), min_size=1, max_size=4),
        times=st.integers(1, 12),
        level=st.sampled_from(Level),
    )
    def append(self, data: st.DataObject, sizes: list[int], times: int, level: Level) -> None:
        self.relieve()
        which = data.draw(st.sampled_from(sorted(self.kept)))
        for _ in range(times):
            values = [self.value(size) for size in sizes]
            try:
                reported = self.rig.append(self.rig.log.partition(which), values, level)
            except Busy:
                return
            self.reported.append((len(self.kept[which].values), reported))
            self.kept[which].values += values

    @rule(data=st.data(), count=st.integers(1, 3))
    def append_of_producer(self, data: st.DataObject, count: int) -> None:
        self.relieve()
        which = data.draw(st.sampled_from(sorted(self.kept)))
        values = [self.value(10) for _ in range(count)]
        batch = from_records([Record(value) for value in values], producer_id=b"me", producer_epoch=0)
        self.rig.log.append(self.rig.log.partition(which), bytes(batch), level=Level.WRITTEN, done=None)
        self.kept[which].values += values

    @rule()
    def change(self) -> None:
        self.relieve()
        change = b"%d" % len(self.changes)
        self.rig.change(change)
        self.changes.append(change)

    @rule(data=st.data(), token=st.sampled_from((b"a" * 16, b"b" * 16)), size=st.sampled_from((3, 4000)))
    def stage(self, data: st.DataObject, token: bytes, size: int) -> None:
        self.relieve()
        which = data.draw(st.sampled_from(sorted(self.kept)))
        values = [self.value(size), self.value(size)]
        try:
            self.rig.log.stage(
                token,
                self.rig.log.partition(which),
                batch_of(values),
                expires_at_us=NEVER,
                level=Level.WRITTEN,
                done=None,
            )
        except Missing:
            self.rig.log.commit()  # the token's publish is in this write batch
            return
        self.staged.setdefault(token, {}).setdefault(which, []).extend(values)

    @rule(tokens=st.sampled_from(((b"a" * 16,), (b"b" * 16, b"a" * 16))))
    def publish(self, tokens: tuple[bytes, ...]) -> None:
        self.relieve()
        change = b"%d" % len(self.changes)
        if not all(token in self.staged for token in tokens):
            with pytest.raises(Missing):
                self.rig.log.publish(tokens, change, level=Level.WRITTEN, done=lambda _: None)
            return
        self.rig.log.publish(tokens, change, level=Level.SYNCED, done=lambda _: None)
        self.rig.memory.apply(change)
        self.changes.append(change)
        for token in tokens:
            for which, values in self.staged.pop(token).items():
                if which in self.kept:
                    self.kept[which].values += values

    @rule(token=st.sampled_from((b"a" * 16, b"b" * 16)))
    def abandon(self, token: bytes) -> None:
        self.relieve()
        self.rig.log.abandon([token])
        self.staged.pop(token, None)

    @rule(data=st.data(), share=st.floats(0, 1))
    def trim(self, data: st.DataObject, share: float) -> None:
        self.relieve()
        which = data.draw(st.sampled_from(sorted(self.kept)))
        kept = self.kept[which]
        offset = kept.first + int((len(kept.values) - kept.first) * share)
        self.rig.log.trim(which, offset)
        kept.first = max(kept.first, offset)

    @rule(data=st.data())
    @precondition(lambda self: len(self.kept) > 1)
    def drop(self, data: st.DataObject) -> None:
        self.relieve()
        which = data.draw(st.sampled_from(sorted(self.kept)))
        self.rig.log.drop_partition(which)
        del self.kept[which]

    @rule()
    def commit(self) -> None:
        self.rig.log.commit()

    @rule()
    def settle(self) -> None:
        self.rig.settle()

    @rule(settled=st.booleans())
    def remove_segments(self, settled: bool) -> None:
        """Run what the log does half a second after segments became unneeded."""
        self.relieve()
        self.rig.log._sealer.remove()
        if settled:
            self.rig.settle()

    @rule(settled=st.booleans())
    def rewrite_segments(self, settled: bool) -> None:
        """Run what the log does every few seconds, with lower thresholds."""
        self.rig.settle()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merge, "LOST_US_MAX", 0)
            patch.setattr(merge, "MERGE_COUNT_MIN", 2)
            self.rig.log._sealer.tidy(SystemClock().now_us(), merging=True)
        if settled:
            sealer = self.rig.log._sealer
            self.rig.loop.run_until(lambda: not sealer._running and not sealer._replacing)

    @rule(how=st.sampled_from(("kill", "close")))
    def reopen(self, how: str) -> None:
        self.rig.log.commit()
        if how == "close":
            self.rig.log.close()
        else:
            self.rig.kill()
        self.reported.clear()
        self.rig.open()
        assert self.rig.memory.changes == self.changes
        assert set(self.rig.log._state.partitions) == set(self.kept)
        self.read_all()

    @rule()
    def read_all(self) -> None:
        self.rig.settle()
        for which, kept in self.kept.items():
            partition = self.rig.log.partition(which)
            assert partition.first_offset == kept.first
            assert partition.next_offset == partition.readable_offset == len(kept.values)
            assert self.rig.read(partition, kept.first, 3000) == kept.values[kept.first :]
        for expected, reported in self.reported:
            assert reported == [expected], "the acknowledged offset is right"

    @rule(data=st.data(), share=st.floats(0, 1), bytes_max=st.sampled_from((1, 500, 5000)))
    def look_up(self, data: st.DataObject, share: float, bytes_max: int) -> None:
        self.rig.settle()
        which = data.draw(st.sampled_from(sorted(self.kept)))
        kept, partition = self.kept[which], self.rig.log.partition(which)
        offset = kept.first + int((len(kept.values) - kept.first) * share)
        address = sum(10 + len(value) for value in kept.values[:offset])
        assert self.rig.look_up(partition.address_of_offset, offset) == address
        assert self.rig.look_up(partition.offset_of_address, address) == offset
        assert self.rig.look_up(partition.offset_of_address, address + 1) == NO_OFFSET
        if offset < len(kept.values):
            found = self.rig.read_once(partition, offset, bytes_max, offset + 3)
            assert found.next_offset > offset
            found.pin.release()
            assert partition.epoch_at(offset) <= self.rig.log.epoch
            assert self.rig.look_up(partition.offset_at, 0) == kept.first
        assert self.rig.look_up(partition.offset_at, NEVER) == len(kept.values)
        kept_offset = partition.retention_offset(age_us_max=None, bytes_max=5000, now_us=0)
        assert kept.first <= kept_offset <= len(kept.values)

    @invariant()
    def sizes_add_up(self) -> None:
        if hasattr(self, "rig"):
            self.rig.loop.run_pass()
            assert self.rig.log._writer.failure is None
            for partition in self.rig.log._state.partitions.values():
                lengths = [partition.tail.entry(number)[2] for number in range(len(partition.tail))]
                assert partition.tail_bytes == sum(lengths)


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=20, stateful_step_count=50, suppress_health_check=list(HealthCheck))
