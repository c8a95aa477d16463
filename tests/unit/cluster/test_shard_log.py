"""The log over a bucket: acknowledged records survive the leader and its local directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event

import pytest

from polywire.clock import SystemClock
from polywire.cluster.journal_chain import JournalChain
from polywire.cluster.journal_floor import Floor
from polywire.cluster.journal_objects import object_name
from polywire.cluster.opening import ShardConfig, ShardOpening, open_shard
from polywire.errors import BrokerError, Corrupt, ErrorCode, Invalid
from polywire.log.log import FileLog
from polywire.log.segments.format import read_footer
from polywire.log.settings import LogSettings
from polywire.store.objects import FIRST, Objects, shard_root
from polywire.testing.loop import SimulatedClock
from polywire.testing.memory_objects import MemoryObjects, ObjectFault
from polywire.types import Level
from tests.unit.log.rig import SMALL, Memory, Rig, RigLoop, batch_of, expecting

SHARD = shard_root(FIRST)

STORED = LogSettings(
    slot_bytes=SMALL.slot_bytes, disk_reserve_bytes=0, staged_bytes_max=SMALL.staged_bytes_max, durability=Level.STORED
)


class BucketRig(Rig):
    """A log over one bucket, reopened in an empty directory."""

    def __init__(self, objects: Objects, directory: Path, node: str = "one", settings: LogSettings = STORED) -> None:
        self.objects = objects
        self.node = node
        self._directories = (directory / f"{node}-{number}" for number in count())
        super().__init__(directory, settings)

    def open(self) -> FileLog:
        self.loop, self.memory = RigLoop(), Memory()
        place = ShardConfig(self.objects, self.objects, next(self._directories), self.node, cache_bytes=1 << 20)
        clock = SystemClock()
        self.log = open_shard(place, settings=self.settings, loop=self.loop, clock=clock, replay=self.memory)
        return self.log


def wait_for(event: Event) -> None:
    event.wait(20)


def reach(rig: Rig, reported: Sequence[Sequence[int]]) -> None:
    """Run until every append is acknowledged."""
    rig.loop.run_until(lambda: all(reported))


def stored_chain(objects: Objects) -> JournalChain:
    """Return what a reader finds from the floor on."""
    seed = int.from_bytes(objects.read(f"{SHARD}seed").content, "little")
    floor = Floor()
    if f"{SHARD}floor" in objects.list(SHARD):
        floor = Floor.unpack(objects.read(f"{SHARD}floor").content)
    chain = JournalChain(seed, floor)
    while SHARD + object_name(chain.next_number) in objects.list(f"{SHARD}journal/"):
        chain.add(objects.read(SHARD + object_name(chain.next_number)).content)
    return chain


def test_everything_is_recovered_without_the_directory(tmp_path: Path) -> None:
    objects, wanted = MemoryObjects(), []
    rig = BucketRig(objects, tmp_path)
    rig.log.open_partition(1)
    for start in range(4):
        partition = rig.log.partition(1)
        reported: list[list[int]] = []
        for number in range(40):  # several slots of 64 KiB
            values = [b"%d-%d-%d" % (start, number, one) + bytes(700) for one in range(5)]
            rig.loop.run_until(lambda: not rig.log.congested)
            reported += [rig.append(partition, values), rig.change(b"change-%d-%d" % (start, number))]
            rig.log.commit()
            wanted += values
            if number % 4 == 3:
                reach(rig, reported)
        assert rig.read(partition) == wanted
        if start % 2:
            rig.settle()
        rig.kill()
        shutil.rmtree(tmp_path)
        rig.open()
        assert rig.read(rig.log.partition(1)) == wanted
        assert rig.memory.changes == [b"change-%d-%d" % (s, n) for s in range(start + 1) for n in range(40)]
        assert rig.log.epoch == start + 2
    rig.log.close()


def test_bit_rot_in_the_cache_does_not_damage_the_log(tmp_path: Path) -> None:
    """Every cached segment has flipped bits.

    Reads return the bucket's bytes; only data missing in the bucket is damaged.
    """
    objects, wanted = MemoryObjects(), []
    rig = BucketRig(objects, tmp_path)
    partition = rig.log.open_partition(1)
    for number in range(60):
        rig.loop.run_until(lambda: not rig.log.congested and not rig.log.sealing)
        wanted.append(b"%d" % number + bytes(5000))
        rig.append(partition, wanted[-1:])
        rig.log.commit()
    rig.settle()
    rig.loop.run_until(lambda: partition.tail_offset > 30)
    flip_all(sorted(tmp_path.rglob("*.pws")))
    assert rig.read(partition) == wanted
    assert not any(sealed.segment.notes.found for sealed in rig.log._state.segments.by_location.values())
    name = objects.list(f"{SHARD}segments/")[0]
    content = bytearray(objects.read(name).content)
    content[3000] ^= 1
    objects.put(name, bytes(content))
    rig.log.close()
    rig.open()  # with an empty cache
    with pytest.raises(Corrupt):
        rig.read(rig.log.partition(1))
    rig.log.close()


@pytest.mark.parametrize("size", [100, 700_000], ids=["little", "much"])
def test_bit_rot_of_staged_bodies_in_the_cache_does_not_damage_the_log(tmp_path: Path, size: int) -> None:
    """A staged batch is in a cached segment when it is published; neither reads nor sealing use the flipped bits."""
    rig = BucketRig(MemoryObjects(), tmp_path, settings=replace(STORED, slot_bytes=1 << 20))
    partition, token, wanted = rig.log.open_partition(1), bytes(15) + b"7", [bytes(size)]
    reported: list[int] = []
    rig.log.stage(
        token,
        partition,
        batch_of(wanted),
        expires_at_us=2**60,
        level=Level.STORED,
        done=expecting(reported),
    )
    rig.loop.run_until(lambda: reported)
    rig.kill()
    rig.open()
    rig.settle()
    rig.loop.run_until(lambda: list(tmp_path.rglob("*.pws")))
    published: list[object] = []
    rig.log.publish([token], b"published", level=Level.STORED, done=published.append)
    rig.loop.run_until(lambda: published)
    for path in tmp_path.rglob("*.pws"):
        flip(path, range(120, 120 + size // 2, 10))
    assert rig.read(rig.log.partition(1)) == wanted
    rig.log.close()


def test_bit_rot_of_footers_in_the_cache_does_not_damage_the_log(tmp_path: Path) -> None:
    rig = BucketRig(MemoryObjects(), tmp_path)
    rig.append(rig.log.open_partition(1), [b"kept"])
    rig.settle()
    rig.kill()
    rig.open()
    rig.settle()
    rig.loop.run_until(lambda: list(tmp_path.rglob("*.pws")))
    (path,) = tmp_path.rglob("*.pws")
    sealed = next(iter(rig.log._state.segments.by_location.values())).segment
    flip(path, range(path.stat().st_size))
    assert read_footer(rig.log._disk.store, sealed.name)[0].name == sealed.name
    assert not path.exists()
    rig.log.close()


def flip(path: Path, positions: Iterable[int]) -> None:
    content = bytearray(path.read_bytes())
    for at in positions:
        content[at] ^= 1
    path.write_bytes(content)


def flip_all(paths: Sequence[Path]) -> None:
    for path in paths:
        content = bytearray(path.read_bytes())
        for at in range(3000, len(content) - 8192, 9000):
            content[at] ^= 1
        path.write_bytes(content)


def test_the_floor_advances_and_starts_are_kept(tmp_path: Path) -> None:
    objects = MemoryObjects()
    rig = BucketRig(objects, tmp_path)
    partition = rig.log.open_partition(1)
    for number in range(60):
        offsets = rig.append(partition, [b"%d" % number + bytes(5000)])
        rig.log.commit()
        if number % 5 == 4:
            reach(rig, [offsets])
    rig.settle()
    rig.loop.run_until(lambda: f"{SHARD}floor" in objects.list(SHARD))
    rig.log.close()
    floor = Floor.unpack(objects.read(f"{SHARD}floor").content)
    names = objects.list(f"{SHARD}journal/")
    assert floor.number > 5
    assert names[0] == SHARD + object_name(1), "the start below the floor is kept"
    assert names[1] >= SHARD + object_name(floor.number)
    assert len(objects.list(f"{SHARD}snapshots/")) == 1


@pytest.mark.parametrize("fault", [ObjectFault.LOST_REPLY, ObjectFault.BUSY, ObjectFault.REFUSED, ObjectFault.LATE])
def test_failed_puts_are_resolved(tmp_path: Path, fault: ObjectFault) -> None:
    objects = MemoryObjects()
    rig = BucketRig(objects, tmp_path)
    partition = rig.log.open_partition(1)
    for number in range(8):
        objects.fail("create", fault)
        offsets = rig.append(partition, [b"%d" % number])
        reach(rig, [offsets])
        assert offsets == [number]
    rig.kill()
    objects.deliver()
    rig.open()
    assert rig.read(rig.log.partition(1)) == [b"%d" % number for number in range(8)]
    rig.log.close()


def test_unstored_records_are_not_readable(tmp_path: Path) -> None:
    stored = Event()
    objects = MemoryObjects(wait=lambda: wait_for(stored))
    rig = BucketRig(objects, tmp_path)
    partition = rig.log.open_partition(1)
    rig.settle()
    woken: list[int] = []
    rig.log.wait(partition, 0, lambda: woken.append(1))
    objects.fail("create", ObjectFault.DELAY)
    offsets = rig.append(partition, [b"one"], Level.MEMORY)
    for _ in range(200):
        rig.loop.run_pass(0.001)
    assert (offsets, partition.readable_offset, partition.next_offset, woken) == ([], 0, 1, [])
    stored.set()
    rig.loop.run_until(lambda: offsets)
    assert (partition.readable_offset, woken) == (1, [1])
    rig.log.close()


def test_unstored_records_are_reported_in_bytes_and_seconds(tmp_path: Path) -> None:
    held, clock = Event(), SimulatedClock()
    objects = MemoryObjects(wait=lambda: wait_for(held))
    opening = ShardOpening(
        ShardConfig(objects, objects, tmp_path / "cache", "one", cache_bytes=1 << 20),
        settings=STORED,
        loop=(loop := RigLoop()),
        clock=clock,
        replay=Memory(),
    )
    opening.recover()
    log = opening.begin()
    partition = log.open_partition(1)
    loop.run_until(lambda: opening.state().unstored_bytes == 0)
    before = opening.state()
    assert (before.shard, before.start, before.unstored_s) == ("0000", 1, 0.0)
    objects.fail("create", ObjectFault.DELAY)
    reported: list[int] = []
    for _ in range(2):
        log.append(partition, batch_of([bytes(100)]), level=Level.STORED, done=expecting(reported))
        log.commit()
        clock.advance(1.5)
    now = opening.state()
    assert now.unstored_bytes > 200
    assert now.unstored_s == pytest.approx(3.0)
    held.set()
    loop.run_until(lambda: len(reported) == 2)
    after = opening.state()
    assert (after.unstored_bytes, after.unstored_s) == (0, 0.0)
    assert after.objects > before.objects
    log.close()


def test_a_deposed_leader_acknowledges_nothing(tmp_path: Path) -> None:
    objects = MemoryObjects()
    old = BucketRig(objects, tmp_path, "old")
    partition = old.log.open_partition(1)
    offsets = old.append(partition, [b"before"])
    old.loop.run_until(lambda: offsets)
    new = BucketRig(objects, tmp_path, "new")
    answers: list[int | BrokerError] = []
    failures: list[BrokerError] = []
    old.log.on_failure(failures.append)
    old.log.append(partition, batch_of([b"after"]), level=Level.WRITTEN, done=answers.append)
    old.loop.run_until(lambda: answers and failures)
    assert [error.code for error in (*answers, *failures) if isinstance(error, BrokerError)] == [
        ErrorCode.NOT_OWNER
    ] * 2
    assert new.read(new.log.partition(1)) == [b"before"]
    offsets = new.append(new.log.partition(1), [b"its own"])
    new.loop.run_until(lambda: offsets)
    old.kill()
    new.log.close()
    assert [group.start for group in stored_chain(objects).groups][-1] == 2


def test_staged_batches_are_published_by_the_next_leader(tmp_path: Path) -> None:
    rig = BucketRig(MemoryObjects(), tmp_path)
    partition, token, reported = rig.log.open_partition(1), bytes(15) + b"\1", list[int]()
    rig.log.stage(
        token, partition, batch_of([b"staged"]), expires_at_us=2**60, level=Level.STORED, done=expecting(reported)
    )
    rig.loop.run_until(lambda: reported)
    for _ in range(2):
        rig.settle()
        rig.kill()
        rig.open()
    published: list[object] = []
    rig.log.publish([token], b"published", level=Level.STORED, done=published.append)
    rig.loop.run_until(lambda: published)
    assert published == [[(1, 0, 1)]]
    assert rig.read(rig.log.partition(1)) == [b"staged"]
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1)) == [b"staged"]
    rig.log.close()


@pytest.mark.parametrize("change", ["missing", "damaged", "floor", "seed lost", "seed truncated"])
def test_a_damaged_journal_gets_no_leader(tmp_path: Path, change: str) -> None:
    objects = MemoryObjects()
    rig = BucketRig(objects, tmp_path)
    partition = rig.log.open_partition(1)
    for _ in range(4):
        offsets = rig.append(partition, [b"x"])
        reach(rig, [offsets])
    rig.log.close()
    name = SHARD + object_name(3)
    if change == "missing":
        objects.delete(name)
    elif change == "damaged":
        content = bytearray(objects.read(name).content)
        content[70] ^= 1
        objects.put(name, content)
    elif change == "seed lost":
        objects.delete(f"{SHARD}seed")
    elif change == "seed truncated":
        objects.put(f"{SHARD}seed", objects.read(f"{SHARD}seed").content[:-1])
    else:
        objects.put(f"{SHARD}floor", Floor(number=3, base=3, sealed=2).pack())
    before = objects.list("")
    with pytest.raises(Corrupt):
        rig.open()
    assert objects.list("") == before, "no name was claimed"


def test_a_directory_that_has_its_own_log_is_refused(tmp_path: Path) -> None:
    Rig(tmp_path / "one-0").log.close()
    with pytest.raises(Invalid, match="log of its own"):
        BucketRig(MemoryObjects(), tmp_path)
