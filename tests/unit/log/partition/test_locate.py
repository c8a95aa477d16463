"""Locating sealed records: spans hold exactly the requested records, also after trims and rewrites."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from polywire.errors import BrokerError, Corrupt, Missing
from polywire.log.base import Located
from polywire.log.partition import lookup
from polywire.log.partition.partition import FilePartition
from polywire.log.worker import Pending
from polywire.records.batch import read_header, walk
from polywire.store.data_directory import DataDirectory
from tests.unit.log.partition.test_lookup import delete_blobs, fill_slot
from tests.unit.log.rig import Rig


def locate(rig: Rig, partition: FilePartition, offset: int, offset_end: int | None = None) -> Located:
    return rig.answered(lambda then: partition.locate(offset, then, offset_end=offset_end))


def check_spans(rig: Rig, located: Located, offset: int, offset_end: int) -> None:
    """Assert that the runs cover the range and that their files hold it in whole batches with little else."""
    at = offset
    for run in located.runs:
        assert run.first_offset == at < run.next_offset
        content = (rig.directory / run.blob).read_bytes()[run.start : run.stop]
        places = walk(content)
        headers = [read_header(content, place) for place in places]
        assert sum(header.length for header in headers) == len(content)
        assert headers[0].base_offset <= run.first_offset < headers[0].next_offset or len(headers) > 1
        assert headers[-1].next_offset >= run.next_offset
        assert all(one.next_offset == other.base_offset for one, other in pairwise(headers))
        at = run.next_offset
    assert at == offset_end


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_every_range_is_covered(rig: Rig) -> None:
    partition = rig.log.open_partition(1)
    for _ in range(4):
        fill_slot(rig, partition)
    end = partition.tail_offset
    assert 100 < end < partition.next_offset
    everything = locate(rig, partition, 0)
    assert len(everything.runs) == 4
    assert not everything.more
    assert everything.root is not None
    assert everything.root.address == str(rig.directory.resolve())
    assert DataDirectory(everything.root.address, everything.root.mark).is_here()
    chance = random.Random(4)
    for _ in range(50):
        offset, offset_end = sorted(chance.sample(range(end + 1), 2))
        check_spans(rig, locate(rig, partition, offset, offset_end), offset, offset_end)
    rig.log.close()


def test_unsealed_records_are_not_located(rig: Rig) -> None:
    partition = rig.log.open_partition(1)
    rig.append(partition, [b"0"])
    rig.log.commit()
    assert not locate(rig, partition, 0).runs
    fill_slot(rig, partition)
    end = partition.tail_offset
    check_spans(rig, locate(rig, partition, 3), 3, end)
    assert not locate(rig, partition, end).runs
    assert not locate(rig, partition, 5, 5).runs
    with pytest.raises(Missing):
        partition.locate(partition.next_offset + 1, lambda _: None)
    rig.log.close()


def test_a_result_is_bounded_and_can_be_continued(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "LOCATED_RUNS_MAX", 2)
    partition = rig.log.open_partition(1)
    for _ in range(5):
        fill_slot(rig, partition)
    offset, sizes = 0, []
    while True:
        found = locate(rig, partition, offset)
        sizes.append(len(found.runs))
        check_spans(rig, found, offset, found.runs[-1].next_offset)
        offset = found.runs[-1].next_offset
        if not found.more:
            break
    assert sizes == [2, 2, 1]
    assert offset == partition.tail_offset
    rig.log.close()


def test_trimmed_records_are_not_located(rig: Rig) -> None:
    partition = rig.log.open_partition(1)
    for _ in range(3):
        fill_slot(rig, partition)
    second = partition.runs.entry(1)[0]
    rig.log.trim(1, second + 7)
    rig.settle()
    with pytest.raises(Missing):
        partition.locate(second + 6, lambda _: None)
    check_spans(rig, locate(rig, partition, second + 7), second + 7, partition.tail_offset)
    rig.log.close()


def test_a_segment_replaced_meanwhile_is_located_again(rig: Rig) -> None:
    partition = rig.log.open_partition(1)
    for _ in range(4):
        fill_slot(rig, partition)
    replaced = {run.blob for run in locate(rig, partition, 0).runs}
    answers: list[Located | BrokerError] = []
    worker = rig.log._state.reader._worker
    held: list[tuple[object, object]] = []
    run, worker.run = worker.run, lambda job, completed: held.append((job, completed))  # type: ignore[method-assign]
    assert isinstance(partition.locate(1, answers.append), Pending)
    worker.run = run  # type: ignore[method-assign]
    rig.log._sealer.tidy(2**61, merging=True)
    sealer = rig.log._sealer
    rig.loop.run_until(lambda: not sealer._running and not sealer._replacing and len(partition.runs) == 1)
    rig.loop.run_until(lambda: not any((rig.directory / name).exists() for name in replaced))
    ((job, reported),) = held
    run(job, reported)  # type: ignore[arg-type]
    rig.loop.run_until(lambda: answers)
    (answer,) = answers
    assert isinstance(answer, Located)
    assert len(answer.runs) == 1
    assert answer.runs[0].blob not in replaced
    check_spans(rig, answer, 1, partition.tail_offset)
    rig.log.close()


def test_a_segment_deleted_outside_the_log_is_corrupt(rig: Rig) -> None:
    partition = rig.log.open_partition(1)
    fill_slot(rig, partition)
    delete_blobs(rig)
    with pytest.raises(Corrupt):
        locate(rig, partition, 5)
    rig.log.close()
