"""Exceptions in callbacks: the log's own callbacks stop the log; a client's affects only that client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polywire.errors import BrokerError, ErrorCode, Unavailable
from polywire.log.partition.partition import FilePartition
from polywire.types import Level
from tests.unit.log.rig import SMALL, Rig, batch_of
from tests.unit.log.schedule import ManualRig


class Broken(Exception):
    """An exception that no code expects."""


def broken(*_: object, **__: object) -> None:
    raise Broken


class Answers:
    """The results of several clients."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.errors: list[BrokerError] = []

    def __call__(self, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            self.errors.append(result)
        else:
            self.offsets.append(result)


def append(rig: Rig, partition: FilePartition, answers: Answers, level: Level = Level.WRITTEN) -> None:
    rig.log.append(partition, batch_of([b"value"]), level=level, done=answers)


@pytest.mark.parametrize(
    "name",
    [
        "polywire.log.journal.steps.Entered.enter",
        "polywire.log.journal.slots.FileJournal.write",
        "polywire.log.journal.syncer.Flusher.wrote",
    ],
)
def test_a_failing_write_batch_stops_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    rig.append(partition, [b"before"])
    rig.settle()
    answers, failures = Answers(), list[BrokerError]()
    rig.log.on_failure(failures.append)
    append(rig, partition, answers)
    append(rig, partition, answers, Level.SYNCED)
    rig.log.change(b"change", level=Level.WRITTEN, done=answers)
    with monkeypatch.context() as patch:
        patch.setattr(name, broken)
        with pytest.raises(Broken):
            rig.log.commit()
    with pytest.raises(Unavailable):
        append(rig, partition, answers)
    rig.loop.run_pass()
    assert answers.offsets == []
    assert [error.code for error in answers.errors] == [ErrorCode.STORAGE_FAILED] * 3, "each client gets one result"
    assert len(failures) == 1
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1))[0] == b"before"
    rig.log.close()


@pytest.mark.parametrize(
    ("worker", "name"),
    [
        ("seal", "polywire.log.segments.sealer.install"),
        ("seal", "polywire.log.segments.sealer.Sealer._written"),
        ("seal", "polywire.log.log.FileLog.name_slot"),
        ("sync", "polywire.log.journal.syncer.Flusher._reached"),
    ],
)
def test_a_failing_callback_of_the_log_stops_it_before_anything_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, name: str
) -> None:
    rig = ManualRig(tmp_path, monkeypatch, replace(SMALL, sync_interval_ms=10_000))
    partition, failures = rig.log.open_partition(1), list[BrokerError]()
    rig.log.on_failure(failures.append)
    with monkeypatch.context() as patch:
        patch.setattr(name, broken)
        slot = rig.log._journal.current
        while rig.log._journal.current is slot:
            rig.append(partition, [b"." * 2000])
            rig.log.commit()
        answers = Answers()
        rig.passes()
        if name.endswith("install"):
            rig.step("seal")  # the failing flush starts before a client requests one
        append(rig, partition, answers, Level.SYNCED)
        rig.log.commit()
        with pytest.raises(Broken):
            run_all(rig, worker)
    rig.passes()
    assert answers.offsets == []
    assert len(answers.errors) == 1
    assert [error.code for error in failures] == [ErrorCode.STORAGE_FAILED]
    rig.kill()
    rig.open()
    assert len(rig.read(rig.log.partition(1))) == partition.next_offset
    rig.kill()


def run_all(rig: ManualRig, first: str) -> None:
    """Run all jobs of the threads, beginning with ``first``."""
    while any(each.jobs for each in rig.workers.values()):
        rig.step(first if rig.workers[first].jobs else "sync")


def test_a_failing_client_callback_does_not_affect_other_clients(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    answers, woken = Answers(), list[int]()
    rig.log.wait(partition, 0, broken)
    rig.log.wait(partition, 0, lambda: woken.append(0))
    rig.log.append(partition, batch_of([b"a"]), level=Level.WRITTEN, done=broken)
    append(rig, partition, answers)
    rig.log.append(partition, batch_of([b"a"]), level=Level.SYNCED, done=broken)
    append(rig, partition, answers, Level.SYNCED)
    rig.log.commit()  # the client whose request commits is not to blame
    assert answers.offsets == [1]
    assert woken == [0]
    for _ in range(3):  # each exception is reported through the loop
        with pytest.raises(Broken):
            rig.loop.run_until(lambda: False)
    rig.loop.run_until(lambda: len(answers.offsets) == 2)
    assert answers.offsets == [1, 3]
    rig.append(partition, [b"and on"])
    rig.settle()
    rig.log.close()
