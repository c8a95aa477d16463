"""A few rounds of topics, groups and producers that come and go; ``python -m tests.histories.churn`` runs many."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.histories.churn import SETTLE_ROUNDS, Churn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the use of memory and descriptors from /proc")


@pytest.mark.slow
def test_what_was_deleted_uses_nothing(tmp_path: Path) -> None:
    churn = Churn(tmp_path, rounds=SETTLE_ROUNDS + 6, restart_rounds=5)
    churn.run()
    assert churn.wrong == []
