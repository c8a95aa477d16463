"""Damage to sealed segments under a running log: reads of damaged records fail, everything else is served."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest

from polywire.errors import Corrupt
from polywire.log.partition.partition import FilePartition
from polywire.log.segments.segment import Segment
from polywire.records.compression import Compression
from polywire.types import Level
from tests.unit.log.rig import Rig, batch_of, records_of

VALUE = b"." * 1000


def sealed_rig(directory: Path, *, batches: int = 160) -> tuple[Rig, FilePartition]:
    """Return a log with one partition, mostly sealed; record n holds ``n`` and a thousand dots."""
    rig = Rig(directory)
    partition = rig.log.open_partition(1)
    for number in range(batches):
        rig.append(partition, [b"%05d" % partition.next_offset + VALUE])
        rig.log.commit()
        if number % 20 == 0:
            rig.settle()
    rig.settle()
    return rig, partition


def segment_of(rig: Rig, partition: FilePartition, offset: int) -> Segment:
    return rig.log._state.segments.by_location[partition.runs.entry(partition.runs.find_offset(offset))[3]].segment


def place_of(rig: Rig, partition: FilePartition, offset: int) -> tuple[Path, int]:
    """Return the file that holds a record, and the position of its batch."""
    segment = segment_of(rig, partition, offset)
    start, stop = segment.locate(1, offset)
    data = segment.stored(start, stop)
    at = 0
    while int.from_bytes(data[at + 32 : at + 40], "little") < offset:
        at += int.from_bytes(data[at + 4 : at + 8], "little")
    return rig.directory / segment.name, start + at


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes((byte ^ 1,)))


def read_all(rig: Rig, partition: FilePartition, bytes_max: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Read like a client that skips damage: return the readable numbers, and the ranges of unreadable ones."""
    offset, found, damaged = 0, list[int](), list[tuple[int, int]]()
    while offset < partition.next_offset:
        try:
            read = rig.read_once(partition, offset, bytes_max)
        except Corrupt as error:
            facts = dict(fact.split("=") for fact in error.message.split() if "=" in fact)
            assert int(facts["first_offset"]) <= offset < int(facts["next_offset"])
            assert facts["segment"].strip("'").startswith("segments/")
            damaged.append((int(facts["first_offset"]), int(facts["next_offset"])))
            offset = damaged[-1][1]
            continue
        found += [int(cast(bytes, record.value)[:5]) for record in records_of(read) if record.offset >= offset]
        assert read.next_offset > offset
        offset = read.next_offset
        read.pin.release()
    return found, damaged


@pytest.mark.parametrize("bytes_max", [1, 5_000, 1 << 20])
@pytest.mark.parametrize("byte", [5, 33, 75, 100, 900])
def test_a_flipped_bit_in_a_sealed_batch_is_reported_and_the_rest_is_served(
    tmp_path: Path, byte: int, bytes_max: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rig, partition = sealed_rig(tmp_path)
    damaged = (3, 20, partition.runs.entry(1)[0])
    for path, at in [place_of(rig, partition, offset) for offset in damaged]:
        flip(path, at + byte)
    for _ in range(3):
        found, reported = read_all(rig, partition, bytes_max)
        assert set(damaged) <= {offset for first, end in reported for offset in range(first, end)}
        lost = {offset for first, end in reported for offset in range(first, end)}
        assert found == [offset for offset in range(partition.next_offset) if offset not in lost]
        if byte not in (5, 75):  # the length is damaged, so the index is needed to find what follows
            assert lost == set(damaged)
    logged = capsys.readouterr().out.count("stored records are damaged")
    assert logged == len(reported), "each is logged once"
    rig.log.close()


def test_a_truncated_segment_is_corrupt_after_its_end_only(tmp_path: Path) -> None:
    rig, partition = sealed_rig(tmp_path)
    read_all(rig, partition, 5_000)  # earlier reads may be cached, mapped or open
    path, at = place_of(rig, partition, 20)
    end = partition.runs.entry(partition.runs.find_offset(20) + 1)[0]
    os.truncate(path, at + 10)
    rig.log._state.reader.forget(partition)
    for bytes_max in (1, 5_000, 1 << 20):
        found, reported = read_all(rig, partition, bytes_max)
        assert found == [*range(20), *range(end, partition.next_offset)]
        assert reported[0][0] == 20
        assert reported[-1][1] == end
    rig.append(partition, [b"%05d" % partition.next_offset], Level.SYNCED)
    rig.settle()
    rig.log.close()


def test_batches_are_verified_again_when_read_from_the_disk_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, partition = sealed_rig(tmp_path)
    for _ in range(3):
        assert read_all(rig, partition, 5_000) == (list(range(partition.next_offset)), [])
    path, at = place_of(rig, partition, 20)
    flip(path, at + 900)
    preadv = os.preadv

    def dropped(descriptor: int, buffers: list[memoryview], position: int, flags: int = 0) -> int:
        if flags:  # simulates a page cache that has dropped its content; a real one does so at any time
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return preadv(descriptor, buffers, position, flags)

    monkeypatch.setattr(os, "preadv", dropped)
    rig.log._state.reader.forget(partition)
    assert read_all(rig, partition, 5_000)[1] == [(20, 21)]
    monkeypatch.undo()
    rig.log._state.reader.forget(partition)
    assert read_all(rig, partition, 5_000)[1] == [(20, 21)]
    rig.log.close()


def test_a_bad_block_of_the_disk_costs_its_records_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, partition = sealed_rig(tmp_path)
    path, at = place_of(rig, partition, 20)
    preadv, bad = os.preadv, (at // 4096 * 4096, at // 4096 * 4096 + 4096)
    name = str(path)

    def broken(descriptor: int, buffers: list[memoryview], position: int, flags: int = 0) -> int:
        size = sum(map(len, buffers))
        if os.readlink(f"/proc/self/fd/{descriptor}") == name and position < bad[1] and position + size > bad[0]:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, position, flags)

    monkeypatch.setattr(os, "preadv", broken)
    found, reported = read_all(rig, partition, 1 << 20)
    lost = {offset for first, end in reported for offset in range(first, end)}
    assert 20 in lost
    assert found == [offset for offset in range(partition.next_offset) if offset not in lost]
    rig.log.close()


def test_a_damaged_staged_body_is_reported_once_it_is_published(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    token = b"t" * 16
    rig.log.stage(token, partition, batch_of([b"staged" + VALUE]), expires_at_us=2**62, level=Level.WRITTEN, done=None)
    slot = rig.log._journal.current
    while rig.log._journal.current is slot:
        rig.append(partition, [b"plain" + VALUE])
        rig.log.commit()
    rig.settle()
    (path,) = (rig.directory / "segments").iterdir()
    staged = path.read_bytes().index(b"staged")
    flip(path, staged)
    first = partition.next_offset
    rig.log.publish([token], b"change", level=Level.WRITTEN, done=lambda _: None)
    rig.log.commit()
    for _ in range(2):
        with pytest.raises(Corrupt, match=f"first_offset={first} next_offset={first + 1} "):
            rig.read_once(partition, first)
    rig.append(partition, [b"after"])
    rig.log.commit()
    assert [record.value for record in records_of(rig.read_once(partition, first + 1))] == [b"after"]
    rig.log.close()


@pytest.mark.parametrize("compression", [None, Compression.LZ4])
@pytest.mark.parametrize("filling", [b"", b"." * 40_000])
def test_records_damaged_before_sealing_get_no_new_checksum(
    tmp_path: Path, compression: Compression | None, filling: bytes
) -> None:
    """Batches to be merged or compressed, and one so large that it is copied unchanged."""
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    partition.compression = compression
    slot = rig.log._journal.current
    assert slot is not None
    while rig.log._journal.current is slot:
        if partition.next_offset == 10:
            rig.append(partition, [b"%05d" % partition.next_offset + b"target" + VALUE + filling])
            rig.log.commit()
            flip(slot.path, slot.view.obj.find(b"target"))
            continue
        rig.append(partition, [b"%05d" % partition.next_offset + VALUE])
        rig.log.commit()
    rig.settle()
    assert partition.runs.entry(0)[0] == 0
    found, reported = read_all(rig, partition, 1 << 20)
    assert reported == [(10, 11)]
    assert found == [offset for offset in range(partition.next_offset) if offset != 10]
    rig.kill()
    rig.open()
    assert read_all(rig, rig.log.partition(1), 1 << 20)[1] == [(10, 11)]
    rig.log.close()
