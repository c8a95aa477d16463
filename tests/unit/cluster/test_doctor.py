"""The doctor of a bucket reports damaged, missing and unreferenced objects, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polywire.cluster import uploader
from polywire.cluster.doctor import LITTER, BucketDoctor
from polywire.cluster.journal_floor import Floor
from polywire.cluster.journal_objects import object_name
from polywire.cluster.nodes import Node, NodeState
from polywire.log.doctor import Finding, Severity
from polywire.log.segments.segment_set import SEGMENTS, SNAPSHOTS
from polywire.store.identity import begin_import, make_identity
from polywire.store.objects import FIRST, shard_root
from polywire.testing.memory_objects import MemoryObjects
from tests.unit.cluster.test_shard_log import BucketRig

SHARD = shard_root(FIRST)

JOURNAL = f"{SHARD}journal/"


def examine(objects: MemoryObjects) -> list[Finding]:
    before = content_of(objects)
    found = BucketDoctor(objects, objects).examine()
    assert content_of(objects) == before
    return found


def content_of(objects: MemoryObjects) -> dict[str, bytes]:
    prefixes = ("", "nodes/", SHARD, JOURNAL, f"{SHARD}{SEGMENTS}/", f"{SHARD}{SNAPSHOTS}/")
    return {name: objects.read(name).content for prefix in prefixes for name in objects.list(prefix)}


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryObjects:
    """Return a bucket that had three leaders; some records are in segments, some in the journal only."""
    monkeypatch.setattr(uploader, "PUT_INTERVAL_S", 0.0)
    made = MemoryObjects()
    make_identity(made, lambda count: b"i" * count, 1)
    rig = BucketRig(made, tmp_path)
    rig.log.open_partition(1)
    for start in range(3):
        partition = rig.log.partition(1)
        for number in range(40 if start < 2 else 2):
            rig.loop.run_until(lambda: not rig.log.congested and not rig.log.sealing)
            offsets = rig.append(partition, [b"%d-%d" % (start, number) + bytes(5000)])
            rig.log.commit()
            rig.loop.run_until(lambda offsets=offsets: offsets)  # type: ignore[misc]
        rig.settle()
        # segments that are deleted in the background are gone
        rig.loop.run_until(lambda: not litter_of(BucketDoctor(made, made).examine()))
        rig.log.close()
        if start < 2:
            rig.open()
    return made


def litter_of(found: list[Finding]) -> set[str]:
    return {finding.path for finding in found if finding.message == LITTER}


def worst(found: list[Finding]) -> set[Severity]:
    return {finding.severity for finding in found}


def test_a_sound_bucket_is_reported_sound(objects: MemoryObjects) -> None:
    found = examine(objects)
    assert worst(found) == {Severity.SOUND}, found
    assert not litter_of(found)
    assert "start=3" in next(finding.message for finding in found if finding.path == f"{SHARD}journal")
    assert sum(finding.path.startswith(f"{SHARD}{SEGMENTS}/") for finding in found) > 2


def test_states_of_brokers_and_a_missing_journal_start_are_reported(objects: MemoryObjects) -> None:
    seen = [(Node("one", "x", {}, start=3), NodeState.LEADS), (Node("two", "y", {}), NodeState.STANDBY)]
    patient = BucketDoctor(objects, objects)
    assert [finding.severity for finding in patient.brokers(seen)] == [Severity.SOUND] * 2, "nothing was read yet"
    patient.examine()
    assert [finding.message for finding in patient.brokers(seen)] == ["leads start=3", "standby"]
    (gone,) = patient.brokers([(Node("one", "x", {}, start=4), NodeState.LEADS)])
    assert gone.severity is Severity.DAMAGED
    assert "journal_start=3" in gone.message


def test_litter_is_reported_as_harmless(objects: MemoryObjects) -> None:
    litter = {f"{SHARD}{SEGMENTS}/00000001-000000ff.pws", f"{SHARD}{SNAPSHOTS}/00000001-000000ff.pwt"}
    floor = Floor.unpack(objects.read(f"{SHARD}floor").content).number
    free = next(number for number in range(2, floor) if SHARD + object_name(number) not in objects.list(JOURNAL))
    litter.add(SHARD + object_name(free))
    for name in litter:
        objects.put(name, b"left")
    found = examine(objects)
    assert worst(found) == {Severity.SOUND}
    assert litter_of(found) == litter


def above_the_floor(objects: MemoryObjects) -> str:
    floor = Floor.unpack(objects.read(f"{SHARD}floor").content).number
    return next(name for name in objects.list(JOURNAL) if name > SHARD + object_name(floor))


def named(objects: MemoryObjects, directory: str) -> str:
    return objects.list(f"{SHARD}{directory}/")[-1]


@pytest.mark.parametrize(
    ("name", "path", "severity"),
    [
        (above_the_floor, lambda _: f"{SHARD}journal", Severity.BROKEN),
        (lambda objects: named(objects, SNAPSHOTS), lambda _: f"{SHARD}journal", Severity.BROKEN),
        (lambda objects: named(objects, SEGMENTS), lambda name: name, Severity.BROKEN),
        (lambda _: SHARD + object_name(1), lambda _: f"{SHARD}journal", Severity.DAMAGED),
        (lambda _: f"{SHARD}seed", lambda _: f"{SHARD}journal", Severity.BROKEN),
        (lambda _: "cluster", lambda name: name, Severity.BROKEN),
    ],
    ids=["journal", "snapshot", "segment", "start", "seed", "cluster"],
)
def test_missing_objects_are_reported(
    objects: MemoryObjects, name: Callable[[MemoryObjects], str], path: Callable[[str], str], severity: Severity
) -> None:
    missing = name(objects)
    objects.delete(missing)
    found = [finding for finding in examine(objects) if finding.severity is not Severity.SOUND]
    assert [(finding.path, finding.severity) for finding in found] == [(path(missing), severity)]


def test_a_flipped_bit_is_reported(objects: MemoryObjects) -> None:
    for name, severity in (
        (f"{SHARD}floor", Severity.BROKEN),
        (above_the_floor(objects), Severity.BROKEN),
        (named(objects, SEGMENTS), Severity.DAMAGED),
        (named(objects, SNAPSHOTS), Severity.WORN),
    ):
        sound = objects.read(name).content
        content = bytearray(sound)
        content[min(len(content) // 4, 80)] ^= 1
        objects.put(name, bytes(content))
        assert worst(examine(objects)) - {Severity.SOUND} == {severity}, name
        objects.put(name, sound)


def test_an_aborted_import_is_reported() -> None:
    objects = MemoryObjects()
    begin_import(objects, lambda count: b"i" * count, 1, "something")
    (found,) = examine(objects)
    assert found.severity is Severity.BROKEN
    assert "polywire cluster import" in found.message


def test_a_bucket_without_a_first_leader_is_sound() -> None:
    objects = MemoryObjects()
    make_identity(objects, lambda count: b"i" * count, 1)
    assert worst(examine(objects)) == {Severity.SOUND}


def test_every_shard_is_checked(objects: MemoryObjects) -> None:
    """The second shard is a copy of the first with an object of its journal missing."""
    for name, content in content_of(objects).items():
        if name.startswith(SHARD):
            objects.put(shard_root(1) + name.removeprefix(SHARD), content)
    objects.delete("cluster")
    make_identity(objects, lambda count: b"i" * count, 1, shards=3)
    found = examine(objects)
    assert worst(found) == {Severity.SOUND}
    journals = {finding.path: finding.message for finding in found if finding.path.endswith("/journal")}
    assert list(journals) == [f"{shard_root(shard)}journal" for shard in range(3)]
    assert journals[f"{shard_root(2)}journal"] == "no broker has stored anything yet"
    objects.delete(shard_root(1) + above_the_floor(objects).removeprefix(SHARD))
    (broken,) = [finding for finding in examine(objects) if finding.severity is not Severity.SOUND]
    assert (broken.path, broken.severity) == (f"{shard_root(1)}journal", Severity.BROKEN)
