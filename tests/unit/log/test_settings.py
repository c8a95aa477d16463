"""Limits that follow from each other."""

from __future__ import annotations

import pytest

from polywire.log.log import NAMING_BYTES
from polywire.log.settings import PAGE_BYTES, SLOT_BYTES_MIN, LogSettings


@pytest.mark.parametrize("pages", [SLOT_BYTES_MIN // PAGE_BYTES, 12, 16, 64, 16_384])
def test_removals_leave_what_naming_segments_takes(pages: int) -> None:
    data, changes, removals = LogSettings(slot_bytes=pages * PAGE_BYTES).kept_bytes
    assert data > changes > removals > NAMING_BYTES, "or a full journal could never be sealed"
