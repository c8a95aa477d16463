"""Compaction during writes, trims and stops at every step keeps the newest record of each key at its offset."""

from __future__ import annotations

import random
import shutil
from array import array
from functools import partial
from pathlib import Path

import pytest

from polywire.log.base import NO_OFFSET
from polywire.log.partition.partition import FilePartition
from polywire.log.segments import compaction
from polywire.records.batch import spread
from polywire.records.columns import Record
from polywire.records.compression import Compression, compress_body
from polywire.records.rows import from_records
from polywire.types import Level
from tests.crash.disk import JournalDisk
from tests.crash.test_merge import Stops, copy_at_rest, tidy
from tests.unit.log.rig import SMALL, Rig, expecting, records_of

FOREVER = 2**61
KEPT, OTHER = 1, 2


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "STEP_BYTES_MAX", 100 * 1024)
    monkeypatch.setattr(compaction, "DIRTY_BYTES_MIN", 1)


class Model:
    """The written records, and those that a reader must find."""

    def __init__(self, rig: Rig, seed: int = 1) -> None:
        self.rig = rig
        self.chance = random.Random(seed)
        self.records: list[Record] = []
        self.addresses: list[int] = []
        self.address = 0
        self.synced = 0

    @property
    def partition(self) -> FilePartition:
        return self.rig.log.partition(KEPT)

    def write(self, count: int, *, keys: int, pack: Compression | None = None, values: bool = True) -> None:
        records = []
        for _ in range(count):
            key = None if self.chance.random() < 0.05 else b"key-%d" % self.chance.randrange(keys)
            value = None if key and (not values or self.chance.random() < 0.1) else bytes(self.chance.randrange(300))
            records.append(Record(value, key))
            self.addresses.append(self.address)
            self.address += 10 + len(value or b"")
        self.records += records
        batch = from_records(records)
        if pack is not None:
            batch = bytearray(compress_body(batch, pack))
        self.rig.log.append(self.partition, batch, level=Level.WRITTEN, done=expecting([]))

    def fill_slots(self, count: int, **how: object) -> None:
        for _ in range(count):
            slot = self.rig.log._journal.current
            while self.rig.log._journal.current is slot:
                self.write(self.chance.randrange(1, 30), keys=40, **how)  # type: ignore[arg-type]
                self.rig.append(self.rig.log.partition(OTHER), [b"%d" % self.rig.log.partition(OTHER).next_offset])
                self.rig.log.commit()
            self.rig.settle()
        self.synced = len(self.records)

    def needed(self, end: int) -> set[int]:
        """Return the offsets below ``end`` that must exist: no later record below ``end`` has the key."""
        newest = {record.key: offset for offset, record in enumerate(self.records[:end])}
        return {offset for offset in range(end) if newest[self.records[offset].key] == offset} | {
            offset for offset in range(end) if self.records[offset].key is None
        }

    def check(self, rig: Rig, *, first: int = 0, tombstones: bool = True) -> int:
        """Read everything and check it; return the number of records."""
        partition = rig.log.partition(KEPT)
        assert partition.next_offset >= self.synced
        found, offset = {}, max(first, partition.first_offset)
        while True:
            read = rig.read_once(partition, offset, self.chance.choice((1000, 10_000, 100_000)))
            for record in records_of(read):
                found[record.offset] = record
            assert read.next_offset > offset or not read.chunks
            offset = read.next_offset
            read.pin.release()
            if not read.chunks:
                break
        assert offset == partition.next_offset
        for offset, record in found.items():
            assert (record.key, record.value) == (self.records[offset].key, self.records[offset].value)
        missing = {offset for offset in self.needed(partition.next_offset) - found.keys() if offset >= first}
        forgotten = {self.records[offset].key for offset in missing}
        ends = {partition.runs.entry(number)[0] - 1 for number in range(1, len(partition.runs))}
        assert not [o for o in found.keys() - ends if self.records[o].key in forgotten], "no older value came back"
        assert all(self.records[offset].value is None for offset in missing), (
            "null values may be removed after their time"
        )
        assert tombstones or not missing
        return len(found)

    def look_up(self) -> None:
        for offset in self.chance.sample(range(self.partition.next_offset), 50):
            address = self.rig.look_up(self.partition.address_of_offset, offset)
            assert address >= self.addresses[offset]
            back = self.rig.look_up(self.partition.offset_of_address, self.addresses[offset])
            assert back in (offset, NO_OFFSET)
            assert (back == offset) == (address == self.addresses[offset])
            inside = min(self.addresses[offset] + self.chance.randrange(10), self.partition.next_address)
            near = self.rig.look_up(partial(self.partition.offset_of_address, covering=True), inside)
            read = self.rig.read_once(self.partition, offset, 1)
            following = min(record.offset for record in records_of(read) if record.offset >= offset)
            read.pin.release()
            assert address == self.addresses[following]
            assert near == following

    def tidy(self) -> None:
        """Run one merge, if any segment is worth it."""
        tidy(self.rig)
        sealer = self.rig.log._sealer
        self.rig.loop.run_until(lambda: not sealer._running and not sealer._replacing)

    def compact(self, null_time_us: int = 0) -> None:
        """Run a whole pass."""
        assert compaction.is_worth_a_pass(self.partition)
        compact(self.rig, null_time_us)


def compact(rig: Rig, null_time_us: int) -> None:
    """Run a whole pass over the kept partition, even if it is not worth it."""
    sealer = rig.log._sealer
    sealer._to_compact[rig.log.partition(KEPT)] = null_time_us
    tidy(rig)
    rig.loop.run_until(lambda: not sealer._to_compact and sealer._compaction is None)


def make(tmp_path: Path) -> Model:
    rig = Rig(tmp_path / "log", SMALL)
    rig.log.open_partition(KEPT)
    rig.log.open_partition(OTHER)
    return Model(rig)


@pytest.mark.parametrize("pack", [None, Compression.LZ4, Compression.ZSTD])
def test_newest_records_stay(tmp_path: Path, pack: Compression | None) -> None:
    model = make(tmp_path)
    model.fill_slots(2, pack=pack)
    before = model.partition.stored_bytes
    assert model.check(model.rig) == len(model.records)
    model.compact()
    sealed = model.partition.tail_offset
    left = model.check(model.rig, tombstones=False)
    expected = len(model.needed(sealed)) + len(model.records) - sealed
    assert expected <= left <= expected + len(model.partition.runs), "a group keeps its last record"
    assert model.partition.stored_bytes < before / 2
    model.look_up()
    model.fill_slots(3, pack=pack)
    model.compact()
    model.check(model.rig, tombstones=False)
    model.look_up()
    for how in ("kill", "close"):
        if how == "kill":
            model.rig.kill()
        else:
            model.rig.log.close()
        model.rig.open()
        model.check(model.rig, tombstones=False)
    model.rig.log.close()


def test_batches_with_gaps_are_compacted(tmp_path: Path) -> None:
    """As links write them: offsets without a record before, between and after the records of each batch."""
    rig = Rig(tmp_path / "log", SMALL)
    partition, other = rig.log.open_partition(KEPT), rig.log.open_partition(OTHER)
    chance, newest = random.Random(3), dict[bytes, int]()

    def write(keys: int) -> None:
        records = [Record(bytes(chance.randrange(200)), b"%d" % chance.randrange(keys)) for _ in range(20)]
        deltas = array("I", sorted(chance.sample(range(60), len(records))))
        begin = partition.next_offset + 7
        newest.update({record.key or b"": begin + delta for record, delta in zip(records, deltas, strict=True)})
        batch = spread(from_records(records), deltas, lead=7, span=80)
        rig.log.append(partition, batch, level=Level.WRITTEN, done=expecting([]))
        rig.append(other, [b"x"])
        rig.log.commit()

    def check() -> None:
        found, offset = dict[int, Record](), partition.first_offset
        while offset < partition.next_offset:
            read = rig.read_once(partition, offset, 10_000)
            found |= {record.offset: record for record in records_of(read)}
            assert read.next_offset > offset
            offset = read.next_offset
            read.pin.release()
        assert {key: found[offset].key for key, offset in newest.items()} == {key: key for key in newest}

    for _ in range(3):
        for _ in range(3):
            slot = rig.log._journal.current
            while rig.log._journal.current is slot:
                write(30)
            rig.settle()
        end = partition.next_offset
        compact(rig, 0)
        check()
        rig.kill()
        rig.open()
        partition, other = rig.log.partition(KEPT), rig.log.partition(OTHER)
        assert partition.next_offset == end
        check()
    rig.log.close()


@pytest.mark.parametrize("how", ["kill", "close"])
def test_compaction_resumes_after_a_restart(tmp_path: Path, how: str) -> None:
    model = make(tmp_path)
    model.fill_slots(3)
    model.compact()
    clean = model.partition.clean_offset
    assert clean > 0
    while model.rig.log.partition(OTHER).next_offset < 300:  # until a snapshot has it
        model.rig.append(model.rig.log.partition(OTHER), [bytes(800)] * 20)
        model.rig.log.commit()
        model.rig.settle()
    for _ in range(2):
        if how == "kill":
            model.rig.kill()
        else:
            model.rig.log.close()
        model.rig.open()
        assert model.partition.clean_offset == clean
        assert not compaction.is_worth_a_pass(model.partition)
        model.check(model.rig, tombstones=False)
    model.fill_slots(4)
    model.compact()
    assert model.partition.clean_offset > clean
    model.check(model.rig, tombstones=False)
    model.rig.log.drop_partition(KEPT)
    model.rig.log.commit()
    model.rig.kill()
    model.rig.open()
    assert not model.rig.log._state.clean
    model.rig.log.close()


def test_a_damaged_partition_is_compacted_again_after_a_restart(tmp_path: Path) -> None:
    model = make(tmp_path)
    model.fill_slots(2)
    model.partition.clean_offset = compaction.NEVER
    model.fill_slots(2)
    model.rig.log.close()
    model.rig.open()
    assert model.partition.clean_offset == 0
    model.rig.log.close()


def test_null_values_are_removed_after_their_time(tmp_path: Path) -> None:
    model = make(tmp_path)
    model.fill_slots(1)
    model.fill_slots(2, values=False)
    model.compact()
    model.check(model.rig, tombstones=False)
    model.fill_slots(3, values=False)
    model.compact(null_time_us=FOREVER)
    sealed = model.partition.tail_offset
    keyless = sum(record.key is None for record in model.records[:sealed])
    expected = keyless + len(model.records) - sealed
    assert expected <= model.check(model.rig) <= expected + len(model.partition.runs)
    read = model.rig.read_once(model.partition, 0)
    keys = [record.key for record in records_of(read) if record.value is not None]
    read.pin.release()
    assert set(keys) <= {None}, "no older value came back"
    model.rig.log.close()


def test_passes_over_a_table_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "KEY_SLOTS", 128)
    model = make(tmp_path)
    model.fill_slots(3)
    for _ in range(30):
        if not compaction.is_worth_a_pass(model.partition):
            break
        before = model.partition.clean_offset
        model.compact(null_time_us=FOREVER)
        assert model.partition.clean_offset > before
        model.check(model.rig)
    monkeypatch.setattr(compaction, "KEY_SLOTS", 2)
    model.partition.clean_offset = 0
    model.compact()
    assert model.partition.clean_offset == compaction.NEVER, "a batch with more keys than the table is not compacted"
    model.check(model.rig)
    model.rig.log.close()


@pytest.mark.parametrize("before", [0, 1], ids=["first pass", "next pass"])
def test_stops_while_compacting(tmp_path: Path, disk: JournalDisk, before: int) -> None:
    model = make(tmp_path)
    rig = model.rig
    model.fill_slots(3)
    for _ in range(before):
        model.compact(null_time_us=FOREVER)
        model.fill_slots(4)

    def check_stops() -> None:
        for keep in ("all", None, random.Random(1)):
            copy = rig.directory.with_name("copy")
            copy_at_rest(rig.directory, copy)
            if not isinstance(keep, str):
                disk.lose_power(copy, keep, origin=rig.directory)
            other = Rig(copy, SMALL)
            model.check(other, first=model.partition.first_offset)
            numbers = other.read(other.log.partition(OTHER))
            assert numbers == [b"%d" % number for number in range(len(numbers))]
            assert bool(before) <= bool(other.log.partition(KEPT).clean_offset)
            if before and keep is None:  # a pass starts where the last one ended
                compact(other, FOREVER)
                model.check(other, first=model.partition.first_offset)
            other.log.close()
            shutil.rmtree(copy)

    sealer = rig.log._sealer
    sealer.compact(model.partition, FOREVER)
    tidy(rig)
    rig.loop.run_until(lambda: sealer._compaction is not None)
    steps = 0
    while sealer._compaction is not None:
        rig.loop.run_until(lambda: sealer._replacing or sealer._compaction is None)
        if sealer._replacing:
            steps += 1
            rig.hold_syncs(True)  # no sync begins
            check_stops()
            if steps == 2:
                rig.log.trim(KEPT, model.partition.runs.entry(1)[0] + 3)
                rig.log.commit()
                check_stops()
            rig.hold_syncs(False)
            rig.append(rig.log.partition(OTHER), [b"%d" % rig.log.partition(OTHER).next_offset], Level.SYNCED)
            rig.loop.run_until(lambda: not sealer._replacing)
            check_stops()
    assert steps >= (1 if before else 2), "before the next pass, small neighbours were merged"
    first = model.partition.first_offset
    model.fill_slots(2)
    model.tidy()  # segments that compaction left half empty
    model.check(rig, first=first)
    check_stops()
    rig.kill()
    rig.open()
    model.check(rig, first=first)
    rig.log.close()


def test_a_damaged_partition_is_not_compacted(tmp_path: Path) -> None:
    model = make(tmp_path)
    model.fill_slots(2)
    path = sorted((tmp_path / "log" / "segments").iterdir())[0]
    with path.open("r+b") as file:
        file.seek(200)
        file.write(b"\xff\xff")
    model.rig.log._sealer.compact(model.partition, 0)
    tidy(model.rig)
    model.rig.loop.run_until(lambda: model.rig.log._sealer._compaction is None)
    assert model.partition.clean_offset == compaction.NEVER
    assert not compaction.is_worth_a_pass(model.partition)
    model.fill_slots(1)
    model.rig.log.close()


def test_compaction_and_merging_together(tmp_path: Path, disk: JournalDisk) -> None:
    """Compaction leaves shared segments half empty; merging them must not bring removed records back."""
    model = make(tmp_path)
    stops = Stops(model.rig, disk)
    for _ in range(2):
        model.fill_slots(2)
        model.compact()
        for _ in range(4):
            model.tidy()
        model.check(model.rig, tombstones=False)
        before = model.check(model.rig)
        model.rig.kill()
        model.rig.open()
        assert model.check(model.rig) == before
        model.partition.clean_offset = 0
    assert stops.synced == {}
    model.rig.log.close()
