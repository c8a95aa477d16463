"""``polywire pipeline`` as far as it goes without Spark running."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polywire.cli import main


def test_list_and_describe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["pipeline", "list", "--output", "json"]) == 0
    listed = [row["pipeline"] for row in json.loads(capsys.readouterr().out)]
    assert listed == ["land", "refine", "windows", "state", "bridge", "replay", "compact", "quality"]
    assert main.run(["pipeline", "describe", "land", "--output", "json"]) == 0
    rows = {row["setting"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["topic"]["default"] == "(needed)"
    assert rows["table_format"]["takes"] == "parquet|delta|iceberg"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["run", "lnd"], "did you mean 'land'"),
        (["run", "land", "--set", "topic"], "takes NAME=VALUE"),
        (["run", "land", "--set", "topic=t"], "settings are missing"),
        (["run", "land", "--set", "tpic=t"], "did you mean 'topic'"),
    ],
)
def test_wrong_runs_are_refused_before_spark_starts(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["pipeline", *words]) == main.EXIT_FAILED
    assert reason in capsys.readouterr().err


def test_a_project_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "orders-project"
    assert main.run(["pipeline", "init", str(folder), "--topic", "orders"]) == 0
    assert {path.name for path in folder.iterdir()} == {"README.md", "conf", "spark-pipeline.yml", "transformations"}
    assert 'polywire.topic: "orders"' in (folder / "spark-pipeline.yml").read_text(encoding="utf-8")
    assert main.run(["pipeline", "init", str(folder)]) == main.EXIT_FAILED
    assert "not empty" in capsys.readouterr().err
