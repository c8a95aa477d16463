"""Limits that follow from each other."""

from __future__ import annotations

import pytest

from polywire.log.log import NAMING_BYTES
from polywire.log.settings import PAGE_BYTES, SLOT_BYTES_MIN, LogSettings


@pytest.mark.parametrize("pages", [SLOT_BYTES_MIN // PAGE_BYTES, 12, 16, 64, 16_384])
def test_capacity_for_removals_leaves_enough_to_name_segments(pages: int) -> None:
    data, changes, removals = LogSettings(slot_bytes=pages * PAGE_BYTES).kept_bytes
    assert data > changes > removals > NAMING_BYTES, "otherwise a full journal could never be sealed"
