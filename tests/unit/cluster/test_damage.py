"""Damage to any object of a bucket never makes another object look unneeded, so that it is deleted.

Kafka-compatible brokers and others have lost intact data this way: a damaged list of files made the files look like
orphans (Jepsen's report on NATS 2.12.1, nats-server issue 7556).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from polywire.cluster.fencing import Pause
from polywire.cluster.garbage_collection import sweep
from polywire.cluster.journal_objects import JournalObjects
from polywire.errors import BrokerError
from polywire.store.objects import FIRST, of_shard
from polywire.testing.memory_objects import MemoryObjects
from tests.crash.test_flips import HARMS as WHOLE_FILE_HARMS
from tests.crash.test_flips import Harm
from tests.unit.cluster.test_shard_log import SHARD, BucketRig, reach


def _flipped(at: int) -> Harm:
    def harm(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[at % len(changed)] ^= 1
        return bytes(changed)

    return harm


HARMS: Mapping[str, Harm] = {
    **WHOLE_FILE_HARMS,
    "without its last byte": lambda content: content[:-1],
    **{f"bit in byte {at}": _flipped(at) for at in (0, 5, 9, 17, 33, 64, 70, 100, -1, -9, -33)},
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Return the objects of a log that was led three times, with segments, snapshots and a journal."""
    objects = MemoryObjects()
    rig = BucketRig(objects, tmp_path_factory.mktemp("stored"))
    rig.log.open_partition(1)
    for start in range(3):
        reported = []
        for number in range(40):
            rig.loop.run_until(lambda: not rig.log.congested)
            values = [b"%d-%d-%d" % (start, number, row) + bytes(700) for row in range(5)]
            reported.append(rig.append(rig.log.partition(1), values))
            rig.log.commit()
        reach(rig, reported)
        rig.settle()
        rig.kill()
        rig.open()
    rig.log.close()
    return {name: bytes(objects.read(name).content) for name in objects.list("")}


def put(contents: Mapping[str, bytes]) -> MemoryObjects:
    objects = MemoryObjects()
    for name, content in contents.items():
        objects.put(name, content)
    return objects


def sweep_as_leader(objects: MemoryObjects, directory: Path) -> set[str] | None:
    """Lead the shard and delete what is not needed. Return the names that the log needs, or None if it did not open."""
    try:
        rig = BucketRig(objects, directory)
    except BrokerError:
        return None
    needed, epoch, bucket = (
        set(rig.log._state.segments.names()),
        rig.log.epoch,
        JournalObjects(of_shard(objects, FIRST)),
    )
    steps, result = sweep(rig.log._journal.seed, epoch, needed, 0.0), None
    while True:
        try:
            request = steps.send(result)
        except StopIteration:
            break
        result = None if isinstance(request, Pause) else bucket._perform(request)
    bucket.close()
    rig.kill()
    return needed


def every_object(stored: Mapping[str, bytes]) -> Iterator[str]:
    return (name for name in sorted(stored) if name.startswith(SHARD))


@pytest.mark.parametrize("harm", HARMS)
def test_no_other_object_is_deleted(stored: Mapping[str, bytes], tmp_path: Path, harm: str) -> None:
    intact = put(stored)
    needed = sweep_as_leader(intact, tmp_path / "intact")
    assert needed
    assert {SHARD + name for name in needed} <= set(stored)
    survivors = set(intact.list(""))
    for number, name in enumerate(every_object(stored)):
        changed = HARMS[harm](stored[name])
        contents = {**stored, name: changed or b""}
        if changed is None:
            del contents[name]
        objects = put(contents)
        sweep_as_leader(objects, tmp_path / str(number))
        lost = (survivors & set(contents)) - set(objects.list("")) - {name}
        assert not lost, f"{name} was harmed"
