"""Unreferenced objects of a bucket are deleted after a grace period, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polywire.clock import SystemClock
from polywire.cluster.fencing import Delete, DeleteBlobs, Pause
from polywire.cluster.garbage_collection import DELETED_PER_S, SWEPT_MAX, sweep
from polywire.cluster.journal_chain import START_BYTES_MAX, ChainEnd, start_object
from polywire.cluster.journal_floor import Floor
from polywire.cluster.journal_objects import JournalObjects, object_name
from polywire.cluster.opening import ShardConfig, open_shard
from polywire.log.journal.group import EntryKind, GroupHead
from polywire.store.objects import FIRST, of_shard, shard_root
from polywire.testing.memory_objects import MemoryObjects
from tests.unit.cluster.test_shard_log import STORED
from tests.unit.log.rig import Memory, RigLoop

SHARD = shard_root(FIRST)

SEED = 7
GRACE_S = 900.0


class Bucket:
    """Runs a sweep's requests at once and records its pauses."""

    def __init__(self, *, floor: int = 1) -> None:
        self.objects = MemoryObjects()
        self.asked: list[Any] = []
        self._bucket = JournalObjects(of_shard(self.objects, FIRST))
        self.objects.put(f"{SHARD}floor", Floor(floor).pack())

    def put(self, name: str, content: bytes = b"x") -> None:
        self.objects.put(SHARD + name, content)

    def sweep(self, start: int, needed: list[str]) -> int:
        steps, answer = sweep(SEED, start, needed, GRACE_S), None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                self._bucket.close()
                return int(end.value)
            self.asked.append(request)
            answer = None if isinstance(request, Pause) else self._bucket._perform(request)

    @property
    def names(self) -> list[str]:
        return [name.removeprefix(SHARD) for name in self.objects.list(SHARD) if not name.endswith("floor")]


def start_of(number: int) -> bytes:
    return start_object(ChainEnd(number - 1, 0, 0), SEED, nonce=bytes(16), node="n" * 100, now_us=0)


def group_of(content: bytes) -> bytes:
    head = GroupHead(SEED)
    head.entry(EntryKind.CHANGE, 0, 0, content)
    return bytes(head.finish(1, 1, 0, 0, 0)) + content


def segment(start: int, count: int) -> str:
    return f"segments/{start:08x}-{count:08x}.pws"


def snapshot(start: int, count: int) -> str:
    return f"snapshots/{start:08x}-{count:08x}.pwt"


def test_unreferenced_blobs_are_deleted() -> None:
    bucket = Bucket()
    needed = [segment(1, 1), segment(3, 5), snapshot(3, 2)]
    litter = [segment(1, 2), segment(2, 1), segment(3, 4), snapshot(2, 9), snapshot(3, 1)]
    later = [segment(3, 6), snapshot(3, 3), segment(4, 1)]  # about to be referenced, or of a later leader
    for name in needed + litter + later:
        bucket.put(name)
    assert bucket.sweep(3, needed) == len(litter)
    assert bucket.names == sorted(needed + later)


def test_blobs_that_an_earlier_leader_never_referenced_are_deleted() -> None:
    bucket = Bucket()
    bucket.put(segment(2, 7))
    bucket.put(snapshot(2, 7))
    assert bucket.sweep(3, []) == 2
    assert bucket.names == []


def test_starts_and_possible_starts_below_the_floor_are_kept() -> None:
    bucket = Bucket(floor=6)
    torn = bytearray(start_of(2))
    torn[70] ^= 1
    kept = {1: start_of(1), 3: bytes(torn), 6: group_of(bytes(8)), 7: group_of(bytes(800))}
    for number, content in {**kept, 2: group_of(bytes(8)), 4: group_of(bytes(8 * START_BYTES_MAX))}.items():
        bucket.put(object_name(number), content)
    bucket.put("journal/foreign-notes")
    assert len(start_of(1)) == START_BYTES_MAX
    assert bucket.sweep(9, []) == 2
    assert bucket.names == [*(object_name(number) for number in sorted(kept)), "journal/foreign-notes"]


def test_deletion_starts_after_the_grace_period_and_is_rate_limited() -> None:
    bucket = Bucket(floor=100)
    for number in range(50):
        bucket.put(segment(1, number))
        bucket.put(object_name(number + 1), group_of(bytes(8)))
    assert bucket.sweep(2, []) == 100
    first = next(at for at, asked in enumerate(bucket.asked) if isinstance(asked, (Delete, DeleteBlobs)))
    assert bucket.asked[first - 1] == Pause(GRACE_S)
    for deleted, pause in zip(bucket.asked[first::2], bucket.asked[first + 1 :: 2], strict=True):
        count = len(deleted.numbers if isinstance(deleted, Delete) else deleted.names)
        assert count <= DELETED_PER_S
        assert pause == Pause(1)


def test_a_sweep_deletes_no_more_than_its_limit() -> None:
    bucket = Bucket()
    for number in range(SWEPT_MAX + 5):
        bucket.put(segment(1, number))
    assert bucket.sweep(2, []) == SWEPT_MAX
    assert len(bucket.names) == 5


def test_a_leader_sweeps_after_the_grace_period(tmp_path: Path) -> None:
    objects = MemoryObjects()
    names = [f"{SHARD}{segment(0, 1)}", f"{SHARD}{snapshot(0, 1)}"]
    for name in names:
        objects.put(name, b"x")
    loop = RigLoop()
    place = ShardConfig(objects, objects, tmp_path, "one", cache_bytes=1 << 20, delete_grace_s=0.2)
    log = open_shard(place, settings=STORED, loop=loop, clock=SystemClock(), replay=Memory())
    assert objects.list(f"{SHARD}segments/"), "not at once"
    loop.run_until(lambda: not objects.list(f"{SHARD}segments/") and not objects.list(f"{SHARD}snapshots/"))
    log.close()


def test_a_stopping_broker_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    objects = MemoryObjects()
    objects.put(f"{SHARD}{segment(0, 1)}", b"x")
    place = ShardConfig(objects, objects, tmp_path, "one", cache_bytes=1 << 20)
    loop = RigLoop()
    log = open_shard(place, settings=STORED, loop=loop, clock=SystemClock(), replay=Memory())
    loop.run_pass(0.01)
    log.close()  # otherwise the test does not end in time
    assert objects.list(f"{SHARD}segments/")
