"""The log in a directory needs neither the library for buckets nor any module about buckets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest

from polywire.client.sync import SyncClient
from polywire.records.columns import Record
from tests.broker_process import WIRES, BrokerProcess, child_environment
from tests.e2e.without_bucket import LOADED

ROOT = Path(__file__).parents[2]
MODULE = "tests.e2e.without_bucket"


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv(LOADED, str(tmp_path / "loaded"))
    return tmp_path / "loaded"


def test_a_broker_on_a_directory_needs_no_bucket_library(tmp_path: Path, loaded: Path) -> None:
    with BrokerProcess(tmp_path / "data", wires=(*WIRES, "http"), module=MODULE) as broker:
        with SyncClient(broker.url()) as client:
            client.create_topic("orders", 1)
            client.produce("orders", [Record(b"one")], partition=0)
            assert [record.value for record in client.fetch("orders", 0, 0)] == [b"one"]
        for path in ("/metrics", "/api/v1/overview"):
            http = HTTPConnection(*broker.addresses["http"], timeout=20)
            http.request("GET", path)
            answer = http.getresponse()
            content = answer.read()
            assert answer.status == 200
            http.close()
        assert json.loads(content)["bucket"] is None
        assert broker.stop() == 0, broker.log_text()
    names = loaded.read_text().splitlines()
    assert "polywire.server.lifecycle" in names
    assert [name for name in names if name.startswith(("obstore", "polywire.cluster"))] == []


def test_a_bucket_without_the_library_is_refused_with_an_explanation(tmp_path: Path, loaded: Path) -> None:
    words = ["serve", "--data-dir", str(tmp_path / "data"), "--bucket", "s3://bucket/log", "--http", "off"]
    done = subprocess.run(
        [sys.executable, "-m", MODULE, *words], env=child_environment(), capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 1
    assert "pip install 'polywire[bucket]'" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
