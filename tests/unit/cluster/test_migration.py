"""Import of a data directory into a bucket: complete, resumable after a kill at any step, and it overwrites nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from polywire.clock import SystemClock
from polywire.cluster import bucket_store, migration
from polywire.cluster.migration import Imported, Progress, Step, import_directory
from polywire.errors import Corrupt, Invalid
from polywire.log.doctor import open_offline
from polywire.store.identity import find_identity, make_identity
from polywire.store.objects import FIRST, Stored, shard_root
from polywire.testing.memory_objects import MemoryObjects
from polywire.types import Buffer, Level
from tests.unit.cluster.test_shard_log import BucketRig
from tests.unit.log.rig import Memory, Rig, RigLoop

SHARD = shard_root(FIRST)

TOKENS = [bytes([number]) * 16 for number in range(3)]
_T = TypeVar("_T")


class Killed(BaseException):
    """The process was killed."""


class Deadly(MemoryObjects):
    """Ends the process at its n-th write request, before or after the request takes effect."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        self.after = False
        self._counting = threading.Lock()

    def _deadly(self, write: Callable[[], None]) -> None:
        with self._counting:
            self.left -= 1
            dies = self.left == 0
            if self.left < 0 or not dies or self.after:
                write()
        if dies:
            raise Killed

    def create(self, name: str, parts: Sequence[Buffer]) -> None:
        self._deadly(lambda: MemoryObjects.create(self, name, parts))

    def replace(self, name: str, content: Buffer, tag: str) -> None:
        self._deadly(lambda: MemoryObjects.replace(self, name, content, tag))

    def delete(self, name: str) -> None:
        self._deadly(lambda: MemoryObjects.delete(self, name))


def run(directory: Path, objects: MemoryObjects, reported: list[Progress] | None = None) -> Imported:
    with open_offline(directory, Memory, RigLoop()) as offline:
        return import_directory(
            offline, objects, objects, SystemClock(), (reported if reported is not None else []).append
        )


def filled(directory: Path, *, starts: int = 3) -> tuple[list[bytes], list[bytes]]:
    """Return the values and changes in a directory of a broker that was started and killed several times."""
    rig = Rig(directory)
    rig.log.open_partition(1)
    values, changes = [], []
    for start in range(starts):
        partition = rig.log.partition(1)
        for number in range(5 if start == 1 else 40):  # records that no segment holds yet, and records that some do
            some = [b"%d-%d-%d" % (start, number, one) + bytes(700) for one in range(5)]
            rig.loop.run_until(lambda: not rig.log.congested)
            rig.append(partition, some)
            change = b"change-%d-%d" % (start, number)
            rig.change(change)
            rig.log.commit()
            values += some
            changes.append(change)
        rig.settle()
        rig.append(partition, [b"last of %d" % start])
        rig.log.commit()
        values.append(b"last of %d" % start)
        rig.loop.run_until(lambda: not rig.log.sealing)
        rig.kill()
        if start < starts - 1:
            rig.open()
    return values, changes


def content_of(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def check(objects: MemoryObjects, tmp_path: Path, values: list[bytes], changes: list[bytes], *, epoch: int) -> None:
    rig = BucketRig(objects, tmp_path)
    partition = rig.log.partition(1)
    assert rig.read(partition) == values
    assert rig.memory.changes == changes
    assert rig.log.epoch == epoch
    more = rig.append(partition, [b"more"], Level.STORED)
    rig.log.commit()
    rig.loop.run_until(lambda: more)
    assert more == [len(values)]
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1)) == [*values, b"more"]
    assert rig.log.epoch == epoch + 1
    rig.log.close()


def test_everything_is_imported_and_the_directory_is_unchanged(tmp_path: Path) -> None:
    source, objects, reported = tmp_path / "source", MemoryObjects(), list[Progress]()
    values, changes = filled(source)
    before = content_of(source)
    done = run(source, objects, reported)
    assert content_of(source) == before
    copied = [progress for progress in reported if progress.step is Step.COPIED]
    assert done.segments == copied[-1].segments == copied[-1].segments_all > 3
    assert done.bytes == copied[-1].bytes > 200_000
    assert find_identity(objects) == done.identity
    assert not done.identity.importing
    check(objects, tmp_path / "cache", values, changes, epoch=5)


@pytest.mark.parametrize("after", [False, True])
def test_an_import_killed_anywhere_can_be_repeated(tmp_path: Path, after: bool) -> None:
    source = tmp_path / "source"
    values, changes = filled(source, starts=2)
    kills = 0
    while True:
        objects = Deadly()
        objects.left, objects.after = kills + 1, after
        try:
            done = run(source, objects)
        except Killed:
            kills += 1
        else:
            assert not done.again
            break
        objects.left = kills + 1 if kills % 3 == 0 else -1  # perhaps killed again
        try:
            run(source, objects)
        except Killed:
            objects.left = -1
            assert run(source, objects).again
        objects.left = -1
        if kills % 4 == 0:
            check(objects, tmp_path / f"cache-{kills}", values, changes, epoch=4)
    assert kills > 8


def test_a_bucket_with_a_log_is_refused(tmp_path: Path) -> None:
    source, objects = tmp_path / "source", MemoryObjects()
    filled(source, starts=1)
    rig = BucketRig(objects, tmp_path)
    rig.log.close()
    with pytest.raises(Invalid, match="has a log"):
        run(source, objects)
    rig.open()
    rig.log.close()
    identity = find_identity(objects)
    assert identity is None or not identity.importing
    assert identity is None or not identity.source


@pytest.mark.parametrize("kill", range(1, 8))
def test_an_existing_log_is_not_changed_wherever_an_import_into_it_is_killed(tmp_path: Path, kill: int) -> None:
    """The first of two attempts is killed; the log stays usable after both."""
    source, objects = tmp_path / "source", Deadly()
    filled(source, starts=1)
    make_identity(objects, lambda count: b"i" * count, 1)
    rig = BucketRig(objects, tmp_path)
    reported = rig.append(rig.log.open_partition(1), [b"kept"], Level.STORED)
    rig.log.commit()
    rig.loop.run_until(lambda: reported)
    rig.kill()
    journal = {name: objects.read(name).content for name in objects.list(SHARD)}
    objects.left = kill
    for _ in range(2):
        with pytest.raises((Invalid, Killed)):
            run(source, objects)
        objects.left = -1
    with pytest.raises(Invalid, match="has a log"):
        run(source, objects)
    identity = find_identity(objects)
    assert identity is not None
    assert not identity.importing
    assert {name: objects.read(name).content for name in objects.list(SHARD)} == journal
    rig.open()
    assert rig.read(rig.log.partition(1)) == [b"kept"]
    rig.log.close()


def test_a_log_created_during_the_import_is_not_changed(tmp_path: Path) -> None:
    """A broker that checked the bucket before the import becomes its leader while segments are copied."""
    source, objects = tmp_path / "source", MemoryObjects()
    filled(source, starts=1)
    rigs: list[BucketRig] = []

    def lead(progress: Progress) -> None:
        if progress.step is Step.COPIED and not rigs:
            rig = BucketRig(objects, tmp_path)
            rigs.append(rig)
            reported = rig.append(rig.log.open_partition(1), [b"kept"], Level.STORED)
            rig.log.commit()
            rig.loop.run_until(lambda: reported)
            rig.kill()

    with open_offline(source, Memory, RigLoop()) as offline, pytest.raises(Invalid, match="has a log"):
        import_directory(offline, objects, objects, SystemClock(), lead)
    identity = find_identity(objects)
    assert identity is not None
    assert not identity.importing
    (rig,) = rigs
    rig.open()
    assert rig.read(rig.log.partition(1)) == [b"kept"]
    rig.log.close()


def test_a_directory_that_has_changed_since_an_aborted_import_is_refused(tmp_path: Path) -> None:
    source, objects = tmp_path / "source", Deadly()
    filled(source, starts=1)
    objects.left = 4
    with pytest.raises(Killed):
        run(source, objects)
    rig = Rig(source)
    rig.append(rig.log.partition(1), [b"more"])
    rig.log.commit()
    rig.log.close()
    with pytest.raises(Invalid, match="or this directory has changed since"):
        run(source, objects)


def test_segments_deleted_after_an_aborted_import_are_copied_again(tmp_path: Path) -> None:
    source, objects = tmp_path / "source", Deadly()
    values, changes = filled(source, starts=1)
    objects.left = 5
    with pytest.raises(Killed):
        run(source, objects)
    for name in objects.list(f"{SHARD}segments/"):
        objects.delete(name)
    objects.left = -1
    assert run(source, objects).again
    check(objects, tmp_path / "cache", values, changes, epoch=3)


def test_progress_is_reported_and_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "READ_BACK_BYTES", 10_000)
    longest: list[int] = []

    class Watched(MemoryObjects):
        def read(self, name: str) -> Stored:
            assert not name.startswith(f"{SHARD}segments/"), "the segment was read back whole"
            return super().read(name)

        def read_range(self, name: str, start: int, stop: int) -> bytes:
            longest.append(stop - start)
            return super().read_range(name, start, stop)

    source, objects, reported = tmp_path / "source", Watched(), list[Progress]()
    values, changes = filled(source)
    done = run(source, objects, reported)
    assert 0 < max(longest) <= bucket_store.CHUNK_BYTES
    steps = {step: [progress for progress in reported if progress.step is step] for step in Step}
    for step in (Step.VERIFIED, Step.COPIED):
        assert [progress.segments for progress in steps[step]] == list(range(1, done.segments + 1))
        assert steps[step][-1].bytes == done.bytes
    assert [progress.step for progress in reported][-1] is Step.SEALED
    check(objects, tmp_path / "cache", values, changes, epoch=5)


def test_a_finished_import_can_be_repeated(tmp_path: Path) -> None:
    source, objects = tmp_path / "source", MemoryObjects()
    values, changes = filled(source, starts=1)
    run(source, objects)
    check(objects, tmp_path / "cache", values, changes, epoch=3)
    before = objects.list(f"{SHARD}journal/")
    assert run(source, objects).again
    assert objects.list(f"{SHARD}journal/") == before


def test_an_import_into_a_prepared_bucket(tmp_path: Path) -> None:
    source, objects = tmp_path / "source", MemoryObjects()
    values, changes = filled(source, starts=1)
    made, _ = make_identity(objects, lambda count: b"i" * count, 1)
    assert run(source, objects).identity.id == made.id
    check(objects, tmp_path / "cache", values, changes, epoch=3)


def test_another_directory_cannot_continue_an_aborted_import(tmp_path: Path) -> None:
    objects = Deadly()
    for name in ("one", "other"):
        filled(tmp_path / name, starts=1)
    objects.left = 4
    with pytest.raises(Killed):
        run(tmp_path / "one", objects)
    before = {name: objects.read(name).content for name in objects.list(f"{SHARD}segments/")}
    with pytest.raises(Invalid, match="import of another directory"):
        run(tmp_path / "other", objects)
    assert {name: objects.read(name).content for name in objects.list(f"{SHARD}segments/")} == before
    assert run(tmp_path / "one", objects).again


def test_damage_is_not_imported(tmp_path: Path) -> None:
    source, objects = tmp_path / "source", MemoryObjects()
    filled(source, starts=1)
    path = sorted((source / "segments").iterdir())[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    with pytest.raises(Corrupt, match="a segment is damaged"):
        run(source, objects)
    assert find_identity(objects) is None


def test_different_bytes_under_a_name_are_detected(tmp_path: Path) -> None:
    source, objects = tmp_path / "source", Deadly()
    filled(source, starts=1)
    objects.left = 4
    with pytest.raises(Killed):
        run(source, objects)
    name = objects.list(f"{SHARD}segments/")[0]
    objects.put(name, b"x" * objects.size(name))
    with pytest.raises(Corrupt, match="differs from what was written"):
        run(source, objects)


def test_a_directory_without_an_import_record(tmp_path: Path) -> None:
    objects = MemoryObjects()
    rig = Rig(tmp_path / "source")
    rig.log.close()
    done = run(tmp_path / "source", objects)
    assert done.segments == 0
    fresh = BucketRig(objects, tmp_path / "cache")
    assert fresh.log.epoch == 3
    fresh.log.close()


def test_a_bucket_of_several_shards_is_refused(tmp_path: Path) -> None:
    objects = MemoryObjects()
    filled(tmp_path / "source", starts=1)
    make_identity(objects, lambda count: b"i" * count, 1, shards=2)
    with pytest.raises(Invalid, match="a bucket with several shards"):
        run(tmp_path / "source", objects)
    assert objects.list("shards/") == []
