"""Journal slots that are created in the background."""

from __future__ import annotations

from pathlib import Path

from polywire.log.journal.slots import FileJournal
from polywire.log.settings import PAGE_BYTES


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
