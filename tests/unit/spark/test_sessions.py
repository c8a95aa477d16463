"""Settings that a session gets. These tests do not start Spark."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark import SparkContext

from polywire.spark import sessions as module


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_local_sessions_get_fast_checkpoint_files() -> None:
    local = module.settings(local=True, conf={})
    assert local["spark.python.unix.domain.socket.enabled"] == "true"
    assert "FileSystemBasedCheckpointFileManager" in local["spark.sql.streaming.checkpointFileManagerClass"]
    assert local["spark.sql.session.timeZone"] == "UTC"
    elsewhere = module.settings(local=False, conf={})
    assert "spark.sql.streaming.checkpointFileManagerClass" not in elsewhere
    assert "spark.driver.bindAddress" not in elsewhere


def test_explicit_settings_win() -> None:
    given = {"spark.sql.session.timeZone": "Europe/Vienna", module.JAVA_OPTIONS: "-Xss4m"}
    chosen = module.settings(local=True, conf=given)
    assert chosen["spark.sql.session.timeZone"] == "Europe/Vienna"
    assert chosen[module.JAVA_OPTIONS].endswith(" -Xss4m")
    assert "-Dlog4j2.configurationFile=file:" in chosen[module.JAVA_OPTIONS]


@pytest.mark.parametrize(
    ("master", "chosen", "run"),
    [
        ("local[*]", "python3", sys.executable),
        ("local[*]", "/opt/other/bin/python", "/opt/other/bin/python"),
        ("spark://host:7077", "python3", "python3"),
    ],
)
def test_a_local_session_from_elsewhere_uses_this_python(master: str, chosen: str, run: str) -> None:
    context = cast(SparkContext, SimpleNamespace(master=master, pythonExec=chosen))
    module._run_this_python(context)
    assert context.pythonExec == run
    module._run_this_python(None)  # a session of Spark Connect
