"""Staged batches with offsets in their headers, which only stored batches have: they are sealed and recovered."""

from __future__ import annotations

from pathlib import Path

import pytest

import polywire.log.log as log_module
from polywire.records.batch import stamp
from polywire.records.columns import HEADER_BYTES
from polywire.types import Level
from tests.unit.log.rig import Rig, batch_of
from tests.unit.log.test_log import FAR, TOKEN, fill_slot, publish

NUMBERS = {
    "partition": {"partition": 7},
    "epoch": {"epoch": 9},
    "offset": {"base_offset": 2**63 + 5},
    "address": {"base_address": 2**64 - 1},
    "time": {"append_time_us": -(2**63)},
}
"""Header fields of stored data that a client may leave in a fetched batch when it stages it."""


def numbered(batch: bytearray, **numbers: int) -> bytearray:
    """Return a batch with these numbers in its header."""
    fields = ("partition", "epoch", "base_offset", "base_address", "append_time_us")
    stamp(batch, 0, *(numbers.get(field, 0) for field in fields))
    return batch


def check_staged_survives(rig: Rig) -> None:
    """Seal the slot that holds the staged batch, restart, publish it and read it after one more restart."""
    partition = rig.log.partition(1)
    fill_slot(rig, partition)
    rig.settle()
    rig.kill()
    rig.open()
    partition = rig.log.partition(1)
    before = partition.next_offset
    reported = publish(rig, [TOKEN])
    rig.log.commit()
    assert reported == [[(1, before, before + 1)]]
    fill_slot(rig, partition)
    rig.settle()
    rig.kill()
    rig.open()
    assert rig.read(rig.log.partition(1), before)[0] == b"staged"
    rig.log.close()


@pytest.mark.parametrize("field", NUMBERS)
def test_a_staged_batch_with_numbers_can_be_sealed(tmp_path: Path, field: str) -> None:
    rig = Rig(tmp_path)
    batch = numbered(batch_of([b"staged"]), **NUMBERS[field])
    rig.log.stage(TOKEN, rig.log.open_partition(1), bytes(batch), expires_at_us=FAR, level=Level.WRITTEN, done=None)
    check_staged_survives(rig)


@pytest.mark.parametrize("field", NUMBERS)
def test_a_start_recovers_staged_batches_with_numbers(
    tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    batch = numbered(batch_of([b"staged"]), **NUMBERS[field])
    with monkeypatch.context() as patch:  # as earlier versions staged it
        patch.setattr(log_module, "unnumbered_header", lambda batch: bytes(batch[:HEADER_BYTES]))
        rig.log.stage(TOKEN, rig.log.open_partition(1), bytes(batch), expires_at_us=FAR, level=Level.WRITTEN, done=None)
        rig.log.commit()
    rig.kill()
    rig.open()
    check_staged_survives(rig)
