"""Lookups that need a disk run in the reader's thread; a segment deleted outside the log is reported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from polywire.errors import Corrupt
from polywire.log.base import NO_OFFSET
from polywire.log.partition.partition import FilePartition
from polywire.log.worker import Pending
from polywire.records.compression import Compression, compress_body
from polywire.store.file import FileBlob
from polywire.types import Level
from tests.unit.log.rig import Rig, batch_of

TOKEN = b"t" * 16
NEVER = 2**62


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the caches and make disk access from the loop's thread fail."""
    home = threading.current_thread()
    for verb in ("pread_into", "read_direct"):
        plain = getattr(FileBlob, verb)

        def guarded(blob: FileBlob, *args: object, plain: Callable[..., object] = plain, verb: str = verb) -> object:
            assert threading.current_thread() is not home, f"{verb} blocks the loop on the disk"
            return plain(blob, *args)

        monkeypatch.setattr(FileBlob, verb, guarded)
    monkeypatch.setattr(FileBlob, "read_now", lambda *_: False)


def fill_slot(rig: Rig, partition: FilePartition) -> None:
    slot = rig.log._journal.current
    while rig.log._journal.current is slot:
        rig.append(partition, [b"%04d" % partition.next_offset + b"." * 1000])
        rig.log.commit()
    rig.settle()


def delete_blobs(rig: Rig) -> None:
    """Delete segments as an operator might to free space, and close the log's open files."""
    for path in (rig.directory / "segments").iterdir():
        path.unlink()
        rig.log._disk.store._open.drop(f"segments/{path.name}")  # type: ignore[attr-defined]


@pytest.mark.usefixtures("cold")
def test_lookups_in_segments_do_not_block_the_loop(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    fill_slot(rig, partition)
    sealed = partition.tail_offset
    assert sealed > 10
    located: list[object] = []
    assert isinstance(partition.locate(2, located.append), Pending), "the index must be read"
    rig.loop.run_until(lambda: located)
    assert partition.locate(2, located.append) == located.pop(), "the index is cached"
    for offset in (0, 1, sealed - 1, sealed, partition.next_offset):
        address = offset * 1014
        assert rig.look_up(partition.address_of_offset, offset) == address
        assert rig.look_up(partition.offset_of_address, address) == offset
    assert rig.look_up(partition.offset_of_address, 1015) == NO_OFFSET
    assert rig.look_up(partition.offset_of_address, partition.next_address + 1) == NO_OFFSET
    assert rig.look_up(partition.offset_at, 0) == 0
    assert rig.look_up(partition.offset_at, partition.last_append_time_us + 1) == partition.next_offset
    first_time = partition.runs.entry(0)[5]
    assert 0 < rig.look_up(partition.offset_at, first_time + 1) <= partition.next_offset
    requested: list[object] = []
    assert isinstance(partition.offset_of_address(1014, requested.append), Pending)
    rig.log.trim(1, 5)
    rig.log.commit()
    rig.loop.run_until(lambda: requested)
    assert requested == [NO_OFFSET], "trimmed meanwhile"
    rig.log.close()


@pytest.mark.usefixtures("cold")
def test_reading_sealed_bodies_of_published_batches_does_not_block_the_loop(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition, filler = rig.log.open_partition(1), rig.log.open_partition(2)
    for number in range(3):
        batch = batch_of([b"%d" % number * 50])
        rig.log.stage(TOKEN, partition, batch, expires_at_us=NEVER, level=Level.SYNCED, done=None)
    fill_slot(rig, filler)
    rig.append(partition, [b"before"])
    rig.log.publish([TOKEN], b"", level=Level.WRITTEN, done=lambda _: None)
    rig.append(partition, [b"after"])
    rig.log.commit()
    assert partition.published
    assert rig.look_up(partition.address_of_offset, 2) == 16 + 60
    assert rig.look_up(partition.offset_of_address, 16 + 60) == 2
    assert rig.read(partition) == [b"before", b"0" * 50, b"1" * 50, b"2" * 50, b"after"]
    rig.kill()  # a clean stop may block the loop


def test_lookups_search_compressed_batches(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    for kind in Compression:
        packed = bytearray(compress_body(batch_of([b"x" * 90] * 10), kind))
        rig.log.append(partition, packed, level=Level.WRITTEN, done=None)
    rig.log.commit()
    for _ in range(2):
        assert [rig.look_up(partition.address_of_offset, offset) for offset in (0, 3, 10, 13)] == [0, 300, 1000, 1300]
        assert [rig.look_up(partition.offset_of_address, at) for at in (0, 300, 1000, 1300, 5)] == [0, 3, 10, 13, -1]
        fill_slot(rig, partition)
    assert not any(slot.pins for slot in rig.log._journal.slots.values())
    rig.log.close()


def test_a_deleted_segment_is_corrupt(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition, other = rig.log.open_partition(1), rig.log.open_partition(2)
    rig.log.stage(TOKEN, other, batch_of([b"staged"]), expires_at_us=NEVER, level=Level.SYNCED, done=None)
    fill_slot(rig, partition)
    rig.log.publish([TOKEN], b"", level=Level.WRITTEN, done=lambda _: None)
    rig.log.commit()
    delete_blobs(rig)
    for request in (
        lambda: rig.read(partition),
        lambda: rig.read(other),
        lambda: rig.look_up(partition.offset_of_address, 1014),
        lambda: rig.look_up(partition.address_of_offset, 1),
        lambda: rig.look_up(partition.offset_at, partition.runs.entry(0)[5] + 1),
        lambda: rig.look_up(other.address_of_offset, 0),
    ):
        with pytest.raises(Corrupt):
            request()
    assert rig.read(partition, partition.tail_offset), "records in the journal can still be read"
    rig.append(partition, [b"on"], Level.SYNCED)
    rig.settle()
    rig.log.close()
