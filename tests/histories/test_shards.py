"""A short run of three machines on a bucket of two shards: nothing is lost, duplicated or out of order.

``python -m tests.histories.shards --count 100 --seed 7`` makes long ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.histories.shards import run

DEEDS = 6
SEED = 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="several processes share addresses on Linux only")
def test_nothing_is_lost_whatever_is_killed(tmp_path: Path) -> None:
    done = run(tmp_path, seed=SEED, count=DEEDS)
    assert done["acknowledged"] > 0
    assert done["takeovers"] >= DEEDS / 2
