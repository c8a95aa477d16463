"""Journal slots: concurrent creation, and the writes that fill them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from polywire.log.journal import slots
from polywire.log.journal.slots import FILL_BYTES, FileJournal, make_slot
from polywire.log.settings import PAGE_BYTES
from polywire.store.files import File, write_parts
from polywire.types import Buffer


def test_slots_created_concurrently_are_different_files(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "journal", slot_bytes=8 * PAGE_BYTES, slot_count_max=8)
    journal.open_all()
    plans = [journal.plan_slot() for _ in range(3)]
    made = [plan() for plan in plans]
    for slot in made:
        journal.add(slot)
    journal.add(journal.plan_slot()())
    assert len({slot.path for slot in journal.free}) == 4
    assert all(slot.path.exists() for slot in journal.free)
    journal.close()


def test_a_new_slot_is_filled_in_small_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def write(file: File, parts: Sequence[Buffer], position: int) -> int:
        sizes.append(sum(map(len, parts)))
        return write_parts(file, parts, position)

    monkeypatch.setattr(slots, "write_parts", write)
    size = 3 * FILL_BYTES + PAGE_BYTES
    slot = make_slot(tmp_path / "slot-0000.pwj", 0, size, 0)
    assert sizes == [FILL_BYTES] * 3 + [PAGE_BYTES]
    assert bytes(slot.view) == bytes(size)
    slot.close()
