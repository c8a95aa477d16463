"""Hostile write batches: failing merges, merges that grow, and partitions purged within the same batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.log.journal.group import GROUP_HEADER_BYTES
from polywire.log.partition.partition import FilePartition
from polywire.records.batch import stamp
from polywire.records.columns import Header, Record, RecordFlags
from polywire.records.rows import from_records
from polywire.types import Buffer, Level
from tests.unit.log.rig import SMALL, Rig, batch_of

NEVER = 2**62
TOKEN = b"t" * 16


def fetched(values: list[bytes], *, partition: int, epoch: int, offset: int) -> bytearray:
    """Return a batch as a client fetched it: with offsets in its header."""
    batch = batch_of(values)
    stamp(batch, 0, partition, epoch, offset, 100 * offset, 12345)
    return batch


@pytest.mark.parametrize(
    "numbers",
    [
        [(7, 1, 3), (7, 1, 3)],
        [(7, 1, 3), (7, 1, 4)],
        [(7, 1, 3), (8, 1, 3)],
        [(7, 1, 3), (0, 0, 0)],
        [(0, 0, 0), (7, 1, 3)],
        [(0, 1, 0), (0, 2, 0)],
        [(0, 0, 9), (0, 0, 9)],
    ],
)
def test_fetched_batches_can_be_appended_again(tmp_path: Path, numbers: list[tuple[int, int, int]]) -> None:
    rig = Rig(tmp_path)
    one, other = rig.log.open_partition(1), rig.log.open_partition(2)
    reported = [rig.append(other, [b"before"])]
    for number, (partition, epoch, offset) in enumerate(numbers):
        batch = fetched([b"%d" % number], partition=partition, epoch=epoch, offset=offset)
        found: list[int] = []
        rig.log.append(one, batch, level=Level.WRITTEN, done=partial(_note, found))
        reported.append(found)
    reported.append(rig.append(other, [b"after"]))
    reported.append(rig.change(b"change"))
    rig.log.commit()
    assert reported == [[0], [0], [1], [1], [-1]]
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1)) == [b"0", b"1"]
    assert rig.read(rig.log.partition(2)) == [b"before", b"after"]
    rig.log.close()


@pytest.mark.parametrize("error", [ValueError("of no batch"), Invalid(ErrorCode.INVALID_BATCH, "of no batch")])
def test_batches_that_fail_to_merge_are_written_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """No offsets are assigned before merging, so a failed merge affects no producer."""

    def refuse(_: object) -> bytearray:
        raise error

    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    reported = [rig.append(partition, [b"%d" % number]) for number in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr("polywire.log.journal.merging.merge", refuse)
        rig.log.commit()
    assert reported == [[0], [1], [2]]
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1)) == [b"0", b"1", b"2"]
    rig.log.close()


def test_merging_never_exceeds_the_admitted_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, replace(SMALL, slot_bytes=512 * 1024))
    partition = rig.log.open_partition(1)
    rig.log.commit()
    admitted: list[int] = []
    sizes: list[int] = []
    write = rig.log._journal.write

    def note(parts: Sequence[Buffer], size: int, sequence: int) -> int:
        sizes.append(size)
        return write(parts, size, sequence)

    monkeypatch.setattr(rig.log._journal, "write", note)
    append_pairs_of_two_shapes(rig, partition, admitted)
    rig.log.commit()
    assert len(sizes) == 1
    assert sizes[0] <= admitted[-1] + GROUP_HEADER_BYTES
    rig.settle()
    rig.log.close()


def append_pairs_of_two_shapes(rig: Rig, partition: FilePartition, admitted: list[int]) -> None:
    """Append pairs that merge into batches over 4 KiB, which have a wider column alignment."""
    for number in range(60):
        keyed = number // 2 % 2 == 0
        headers = (Header(b"a" * 9, b"b" * 9),)
        key = b"k" if keyed else None
        record = Record(
            b"v" * 1864, key=key, id=b"i" * 16, origin_time_us=5, flags=RecordFlags.LINE_VALUE, headers=headers
        )
        rig.log.append(partition, from_records([record]), level=Level.WRITTEN, done=None)
        admitted.append(rig.log._writer.write_batch.size)


def _note(reported: list[int], offset: int | BrokerError) -> None:
    assert not isinstance(offset, BrokerError), offset
    reported.append(offset)


def test_records_after_a_purge_of_published_records_survive(tmp_path: Path) -> None:
    """Purge and produce in one write batch after a staged publish: the tail must not start with purged entries."""
    rig = Rig(tmp_path, replace(SMALL, slot_bytes=48 * 1024))
    partition = rig.log.open_partition(1)
    rig.log.stage(TOKEN, partition, batch_of([b"staged"]), expires_at_us=NEVER, level=Level.WRITTEN, done=None)
    rig.log.publish([TOKEN], b"", level=Level.WRITTEN, done=lambda _: None)
    rig.log.commit()
    rig.log.trim(1, partition.next_offset)
    rig.append(partition, [b"kept"])
    rig.log.commit()
    assert len(partition.tail) == 1
    values = [b"kept"]
    for number in range(60):
        rig.loop.run_until(lambda: rig.log._journal.free)
        values.append(b"%d" % number + b"." * 4000)
        rig.append(partition, values[-1:])
        rig.log.commit()
    rig.settle()
    assert rig.read(partition, 1) == values
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1), 1) == values
    rig.log.close()


def test_a_purge_releases_sealed_runs_whatever_follows_in_its_write_batch(tmp_path: Path) -> None:
    rig = Rig(tmp_path, replace(SMALL, slot_bytes=48 * 1024))
    partition, other = rig.log.open_partition(1), rig.log.open_partition(2)
    rig.append(partition, [b"sealed"])
    while not len(partition.runs):
        rig.loop.run_until(lambda: rig.log._journal.free or len(partition.runs))
        rig.append(other, [b"." * 4000])
        rig.log.commit()
    rig.log.trim(1, partition.next_offset)
    rig.append(partition, [b"kept"])
    rig.log.commit()
    assert len(partition.runs) == 0
    assert rig.read(partition, 1) == [b"kept"]
    rig.log.close()
