"""Run ``make demo-cluster`` with fewer flights: three brokers on a bucket, the leader is killed, and each flight arrives once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from polywire.testing.process import child_environment
from tests.e2e.java import EVERY_JAVA, short_lived

ROOT = Path(__file__).parents[2]
FLIGHTS = 20_000
EVENTS = (
    r"broker-1 leads, broker-2 and broker-3 are standbys",
    r"broker-1 is killed \(kill -9\), [\d,]+ flights are acknowledged",
    r"broker-[23] leads, [\d.]+ s after the kill",
    r"all 20,000 flights are acknowledged, over cursus, flux, iggy, kafka, kafka07, polywire",
    r"broker-[123] leads after a requested takeover",
    r"a read of all flights is planned \(\d+ tasks\), and all brokers are killed",
    r"20,000 flights read from the bucket while no broker runs",
    r"flights 20,000 produced, 20,000 landed, 20,000 in the bucket: each exactly once",
)


@pytest.mark.spark
@pytest.mark.slow
def test_each_flight_arrives_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.flights_cluster", "--flights", str(FLIGHTS), "--output", str(tmp_path)]
    environment = {**child_environment(), "COLUMNS": "200", EVERY_JAVA: short_lived()}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    at = 0
    for pattern in EVENTS:
        found = re.compile(pattern).search(ended.stdout, at)
        assert found is not None, f"{pattern} is missing or out of order\n{ended.stdout}"
        at = found.start()
    assert (tmp_path / "quality.html").exists()
