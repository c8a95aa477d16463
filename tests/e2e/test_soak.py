"""A small soak test: real records over several protocols, a real cluster, and kills of executor, broker and driver.

The large one is ``python -m benchmarks.soak``. This one runs on request (POLYWIRE_SOAK=1): it starts a cluster and
three drivers.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.soak import KILLED, Soak, soak_once
from polywire.client.connect import SCHEMES

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.environ.get("POLYWIRE_SOAK") != "1", reason="the soak was NOT run: it takes minutes; set POLYWIRE_SOAK=1"
    ),
]


def test_shares_add_up() -> None:
    for wires in (("flux", "polywire"), ("cursus", "flux", "polywire"), ("flux",), ("cursus", "flux"), ("polywire",)):
        soak = Soak(Path(), wires, 1_000_001, 0.0, 1, 0.0, 1, 1, "1g")
        assert sum(soak.shares().values()) == 1_000_001
        assert set(soak.shares()) == set(wires)


def test_after_kills_each_record_exists_once(tmp_path: Path) -> None:
    soak = Soak(
        tmp_path, tuple(SCHEMES), records=150_000, seconds=20.0, kills=1, pause_s=3.0, batch_records_max=30_000, workers=2, memory="1g"
    )  # fmt: skip
    summary = soak_once(soak)
    assert summary["killed"] == list(KILLED)
    assert summary["exactly_once"], summary
