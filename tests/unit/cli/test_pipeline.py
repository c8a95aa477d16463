"""``polywire pipeline`` without Spark."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from polywire.cli import main
from polywire.cli.pipeline import _is_not_of_py4j, cause
from polywire.cli.usage import EXIT_FAILED
from polywire.errors import ErrorCode, Invalid, Unavailable
from polywire.spark.functions import imported
from polywire.testing.thread import BrokerThread


def test_list_and_describe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["pipeline", "list", "--output", "json"]) == 0
    listed = [row["pipeline"] for row in json.loads(capsys.readouterr().out)]
    assert listed == ["land", "refine", "windows", "state", "bridge", "replay", "compact", "quality"]
    assert main.run(["pipeline", "describe", "land", "--output", "json"]) == 0
    rows = {row["setting"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["topic"]["default"] == "(required)"
    assert rows["address"]["default"] == "POLYWIRE_ADDRESS, or 127.0.0.1:9555"
    assert rows["table_format"]["takes"] == "parquet|delta|iceberg"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["run", "lnd"], "did you mean 'land'"),
        (["run", "land", "--set", "topic"], "value is not NAME=VALUE option=--set"),
        (["run", "land", "--set", "topic=t"], "settings are missing"),
        (["run", "land", "--set", "tpic=t"], "did you mean 'topic'"),
    ],
)
def test_wrong_settings_are_reported_before_spark_starts(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["pipeline", *words]) == EXIT_FAILED
    assert reason in capsys.readouterr().err


def test_a_missing_topic_is_reported_before_spark_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polywire.spark.sessions.session", lambda *_, **__: pytest.fail("Spark was started"))
    with BrokerThread(wires=["polywire"]) as broker:
        monkeypatch.setenv("POLYWIRE_ADDRESS", broker.url())
        words = ["pipeline", "run", "land", "-s", "topic=a, b", "-s", "path=p", "-s", "checkpoint=c"]
        assert main.run(words) == EXIT_FAILED
    shown = capsys.readouterr().err
    assert shown.startswith("error: no such topic topic='a' address=127.0.0.1:")
    assert shown.count("\n") == 1


def test_missing_java_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise Unavailable(ErrorCode.STORAGE_FAILED, "spark needs Java 17")

    monkeypatch.setattr("polywire.spark.sessions.session", start)
    assert main.run(["pipeline", "run", "quality", "-s", "path=p"]) == EXIT_FAILED
    assert capsys.readouterr().err == "error: spark needs Java 17\n"


def test_functions_of_the_current_folder_can_be_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local_parser_of_a_test.py").write_text("def clean(records): return records\n")
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    found: list[str] = []

    def start(*_: object, **__: object) -> None:
        found.append(imported("local_parser_of_a_test:clean").__name__)
        raise Unavailable(ErrorCode.STORAGE_FAILED, "enough")

    with pytest.raises(
        Invalid, match=r"searches installed packages, PYTHONPATH and the current folder\) reason=No mod"
    ):
        imported("local_parser_of_a_test:clean")
    monkeypatch.setattr("polywire.spark.sessions.session", start)
    assert main.run(["pipeline", "run", "quality", "-s", "path=p"]) == EXIT_FAILED
    assert found == ["clean"]


def test_the_cause_of_a_traceback_is_the_last_polywire_error() -> None:
    trace = """[STREAM_FAILED] Query failed: Traceback (most recent call last):
  File "reader_stream.py", line 69, in prepare
polywire.errors.Unavailable: cannot connect
polywire.errors.Missing: no such topic name='a'
 SQLSTATE: 38000"""
    assert cause(trace) == "no such topic name='a'"
    assert cause("[AMBIGUOUS] this is it\nmore") == "[AMBIGUOUS] this is it"
    assert cause("") == "Spark gave no reason"


def test_init_creates_a_project_only_in_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "orders-project"
    assert main.run(["pipeline", "init", str(folder), "--topic", "orders"]) == 0
    assert {path.name for path in folder.iterdir()} == {"README.md", "conf", "spark-pipeline.yml", "transformations"}
    assert 'polywire.topic: "orders"' in (folder / "spark-pipeline.yml").read_text(encoding="utf-8")
    assert main.run(["pipeline", "init", str(folder)]) == EXIT_FAILED
    assert "not empty" in capsys.readouterr().err


def test_tracebacks_that_py4j_logs_after_ctrl_c_are_hidden() -> None:
    import py4j.java_gateway

    by_py4j = logging.makeLogRecord({"module": Path(py4j.java_gateway.__file__).stem})
    assert not _is_not_of_py4j(by_py4j)
    assert _is_not_of_py4j(logging.makeLogRecord({"module": "jobs"}))
