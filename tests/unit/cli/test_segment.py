"""``polywire segment`` and ``polywire log verify`` on an intact and a damaged directory."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from polywire.cli.doctor import EXIT_BROKEN, EXIT_DAMAGED
from polywire.cli.main import run
from tests.unit.cli.test_doctor import TOPIC, flip, write_records

RECORDS = 400
Answer = Callable[..., tuple[int, str]]


@pytest.fixture
def answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Answer:
    """Return a function that runs a command on a directory with records: exit code and standard output."""
    write_records(tmp_path, RECORDS)

    def answer(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run([*words, "--data-dir", str(tmp_path)])
        return code, capsys.readouterr().out

    return answer


def rows(reported: tuple[int, str]) -> list[dict[str, Any]]:
    assert reported[0] == 0
    return list(json.loads(reported[1]))


def test_list_and_inspect_segments(answer: Answer) -> None:
    segments = rows(answer("segment", "list", "-o", "json"))
    live = [row for row in segments if row["state"] == "live"]
    assert live
    runs = [run for row in live for run in rows(answer("segment", "inspect", row["segment"], "-o", "json"))]
    assert {run["topic"] for run in runs} == {TOPIC}
    assert sum(run["records"] for run in runs) == sum(row["records"] for row in live)
    runs.sort(key=lambda run: run["first_offset"])
    assert runs[0]["first_offset"] == 0
    assert all(one["next_offset"] == other["first_offset"] for one, other in pairwise(runs))
    assert runs[-1]["next_offset"] == sum(run["records"] for run in runs)
    for words in (["list"], ["inspect", live[0]["segment"]]):
        as_json = rows(answer("segment", *words, "-o", "json"))
        as_lines = [json.loads(line) for line in answer("segment", *words, "-o", "jsonl")[1].splitlines()]
        assert as_lines == as_json
        as_csv = list(csv.DictReader(io.StringIO(answer("segment", *words, "-o", "csv")[1])))
        assert [list(row.values()) for row in as_csv] == [
            ["" if value is None else str(value) for value in row.values()] for row in as_json
        ]
        assert len(answer("segment", *words)[1].splitlines()) == len(as_json) + 1


def test_intact_segments_verify(answer: Answer) -> None:
    for words in (["segment", "verify"], ["log", "verify"]):
        assert rows(answer(*words, "-o", "json")) == []
        assert answer(*words, "-o", "jsonl") == (0, "")


def test_damaged_records_are_reported(answer: Answer, tmp_path: Path) -> None:
    segment = next(row for row in rows(answer("segment", "list", "-o", "json")) if row["state"] == "live")
    flip(tmp_path / segment["segment"], segment["bytes"] // 4)
    for words in (["segment", "verify"], ["segment", "verify", segment["segment"]], ["log", "verify"]):
        code, text = answer(*words, "-o", "json")
        [found] = json.loads(text)
        assert code == EXIT_DAMAGED
        assert (found["path"], found["topic"], found["state"]) == (segment["segment"], TOPIC, "damaged")
        assert 0 <= found["first_offset"] < found["next_offset"] <= RECORDS


def test_a_segment_without_a_footer_is_broken(answer: Answer, tmp_path: Path) -> None:
    segment = next(row for row in rows(answer("segment", "list", "-o", "json")) if row["state"] == "live")
    path = tmp_path / segment["segment"]
    path.write_bytes(path.read_bytes()[: segment["bytes"] // 2])
    code, text = answer("log", "verify", "-o", "json")
    assert code == EXIT_BROKEN
    assert segment["segment"] in {row["path"] for row in json.loads(text)}
    state = {row["segment"]: row["state"] for row in rows(answer("segment", "list", "-o", "json"))}
    assert state[segment["segment"]] == "broken"


def test_an_unknown_segment_is_an_error(answer: Answer) -> None:
    assert answer("segment", "inspect", "segments/none") == (1, "")
    assert answer("segment", "verify", "../users") == (1, "")
