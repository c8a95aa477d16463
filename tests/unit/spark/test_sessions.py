"""Settings that a session gets. These tests do not start Spark."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

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
    ("chosen", "run"), [("python3", sys.executable), ("/opt/other/bin/python", "/opt/other/bin/python")]
)
def test_a_session_from_elsewhere_uses_this_python(chosen: str, run: str) -> None:
    context = cast(SparkContext, SimpleNamespace(pythonExec=chosen))
    module._run_this_python(context)
    assert context.pythonExec == run


def test_only_sessions_on_this_machine_are_local() -> None:
    def local(spark: SimpleNamespace) -> bool:
        return module._local_context(cast(SparkSession, spark)) is not None

    assert local(SimpleNamespace(sparkContext=SimpleNamespace(master="local[*]")))
    assert not local(SimpleNamespace(sparkContext=SimpleNamespace(master="spark://host:7077")))
    assert not local(SimpleNamespace())  # Spark Connect


@pytest.mark.parametrize(
    ("at_start", "now", "expected"),
    [
        ({}, {module.PARTITIONS: "200"}, {module.PARTITIONS: "8", module.BATCH_PARTITIONS: "200"}),
        (
            {},
            {module.PARTITIONS: "200", module.BATCH_PARTITIONS: "50"},
            {module.PARTITIONS: "8", module.BATCH_PARTITIONS: "50"},
        ),
        ({}, {module.PARTITIONS: "20"}, {module.PARTITIONS: "20"}),
        ({module.PARTITIONS: "200"}, {module.PARTITIONS: "200"}, {module.PARTITIONS: "200"}),
    ],
    ids=["Spark's numbers", "batches set", "set now", "set at the start"],
)
def test_streams_have_a_partition_per_core_unless_set(
    at_start: dict[str, str], now: dict[str, str], expected: dict[str, str]
) -> None:
    def get(key: str, default: str | None = None) -> str | None:
        return now.get(key, default)

    context = SimpleNamespace(defaultParallelism=8, getConf=lambda: SimpleNamespace(contains=at_start.__contains__))
    spark = SimpleNamespace(conf=SimpleNamespace(get=get, set=now.__setitem__))
    for _ in range(2):  # each call of session sets them again
        module._partition_by_cores(cast(SparkSession, spark), cast(SparkContext, context))
        assert now == expected


@pytest.fixture
def this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    for name in ("SPARK_HOME", "SPARK_REMOTE", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("this_python")
def test_workers_import_the_installed_pyspark() -> None:
    with module._home(local=True):
        home = Path(os.environ["SPARK_HOME"])
        assert (home / "bin" / "spark-submit").exists()
        assert any((home / "jars").glob("spark-core*.jar"))
        assert not (home / "python").exists()
    assert "SPARK_HOME" not in os.environ
    with module._home(local=True):
        assert os.environ["SPARK_HOME"] == str(home), "it is made once"


@pytest.mark.usefixtures("this_python")
@pytest.mark.parametrize(
    ("name", "value"),
    [("SPARK_HOME", "/opt/spark"), ("PYSPARK_PYTHON", "/opt/other/bin/python"), ("SPARK_REMOTE", "sc://host")],
)
def test_a_home_or_python_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    before = os.environ.get("SPARK_HOME")
    with module._home(local=True):
        assert os.environ.get("SPARK_HOME") == before


@pytest.mark.usefixtures("this_python")
def test_clusters_use_their_own_home() -> None:
    with module._home(local=False):
        assert "SPARK_HOME" not in os.environ


def test_there_is_no_such_home_for_a_pyspark_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pyspark.__path__", [str(tmp_path / "pyspark")])
    assert module.make_home(tmp_path) is None


def test_there_is_no_such_home_if_links_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert module.make_home(tmp_path / "file") is None
