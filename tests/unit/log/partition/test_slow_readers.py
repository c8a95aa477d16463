"""Readers that never release their buffers do not block the log."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from polywire.errors import Busy
from polywire.log.base import Read
from polywire.log.partition.partition import FilePartition
from polywire.log.segments import sealer
from polywire.log.segments.sealer import Sealer
from tests.unit.log.rig import Rig, records_of
from tests.unit.log.test_file_log import fill_slot


def stalled_read(rig: Rig, partition: FilePartition) -> tuple[int, Read]:
    """Return the newest record, read and not released."""
    offset = partition.next_offset - 1
    return offset, rig.read_once(partition, offset, bytes_max=1)


def fill_patiently(rig: Rig, partition: FilePartition) -> None:
    """Append until another slot is written, retrying while the log is busy."""
    slot = rig.log._journal.current
    while rig.log._journal.current is slot:
        try:
            rig.append(partition, [b"%d" % partition.next_offset + b"." * 2000])
            rig.log.commit()
        except Busy:
            rig.loop.run_until(lambda: rig.log._journal.free, seconds=5)


def values(found: Read) -> list[bytes | None]:
    return [record.value for record in records_of(found)]


def test_slots_pinned_by_stalled_readers_are_replaced(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    readers: list[tuple[int, Read, list[bytes | None]]] = []
    for _ in range(3 * rig.settings.slot_count_max):
        fill_patiently(rig, partition)
        offset, found = stalled_read(rig, partition)
        readers.append((offset, found, values(found)))
    rig.loop.run_until(lambda: rig.log._journal.free)
    for offset, found, value in readers:
        assert values(found) == value
        assert (value[0] or b"").startswith(b"%d." % offset)
    assert len(list((tmp_path / "journal").glob("slot-*"))) <= rig.settings.slot_count_max
    assert rig.log._sealer._lent
    for _, found, _ in readers:
        found.pin.release()
    del found, readers
    assert rig.log._sealer._lent == []
    assert [value is not None for value in rig.read(partition)] == [True] * partition.next_offset
    rig.log.close()
    rig.open()
    assert rig.log.partition(1).next_offset == partition.next_offset
    rig.log.close()


def test_the_number_of_replaced_slots_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Sealer] = []
    lend = Sealer._replace_pinned

    def look(self: Sealer) -> None:
        looks.append(self)
        lend(self)

    monkeypatch.setattr(sealer, "LENT_MAX", 1)
    monkeypatch.setattr(Sealer, "_replace_pinned", look)
    rig = Rig(tmp_path)
    partition = rig.log.open_partition(1)
    readers = []
    for _ in range(rig.settings.slot_count_max):
        fill_patiently(rig, partition)
        readers.append(stalled_read(rig, partition)[1])
    with suppress(Busy):
        fill_slot(rig, partition)
    rig.loop.run_until(lambda: len(rig.log._sealer._lent) == 1)
    before = len(looks)
    rig.loop.run_until(lambda: len(looks) > before + 3)
    assert len(rig.log._sealer._lent) == 1
    for reader in readers:
        reader.pin.release()
    rig.settle()
    rig.log.close()
