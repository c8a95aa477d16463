"""Lists in every format are complete and parseable, and never cut to the width of a terminal."""

from __future__ import annotations

import csv
import io
import json

import pytest

from polywire.cli.output import ListFormat, note, print_list

LONG = "a-topic-" + "x" * 241
ROWS: list[dict[str, object]] = [{"topic": LONG, "records": 12_345}, {"topic": "[red],\"b\"", "records": None}]  # fmt: skip


def printed(form: ListFormat, capsys: pytest.CaptureFixture[str]) -> str:
    print_list(ROWS, columns=("topic", "records"), form=form)
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_a_table_is_never_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = printed(ListFormat.TABLE, capsys).splitlines()
    assert [line.split() for line in lines] == [["topic", "records"], [LONG, "12345"], ['[red],"b"', "–"]]
    assert lines[1].endswith("12345")
    assert lines[2].endswith("    –"), "numbers are flush right"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(ListFormat.JSON, capsys)) == ROWS


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert [json.loads(line) for line in printed(ListFormat.JSONL, capsys).splitlines()] == ROWS


def test_csv(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.reader(io.StringIO(printed(ListFormat.CSV, capsys))))
    assert rows == [["topic", "records"], [LONG, "12345"], ['[red],"b"', ""]]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (ListFormat.TABLE, "topic"),
        (ListFormat.JSON, "[]"),
        (ListFormat.JSONL, ""),
        (ListFormat.CSV, "topic"),
    ],
)
def test_an_empty_list(form: ListFormat, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_list([], columns=("topic",), form=form)
    assert capsys.readouterr().out.strip() == expected


def test_a_note_stays_on_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "word " * 100 + "[bold]"
    note(text)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == text + "\n"


HOSTILE = "a\x1b]0;title\x07\x9b2J\u202eb\nc\x7f"
SAFE = r"a\x1b]0;title\x07\x9b2J\u202eb\x0ac\x7f"


def test_names_do_not_control_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"name": HOSTILE}]
    print_list(rows, columns=("name",), form=ListFormat.TABLE)
    assert capsys.readouterr().out.splitlines()[1].strip() == SAFE
    for form in (ListFormat.JSON, ListFormat.JSONL):
        print_list(rows, columns=("name",), form=form)
        printed = capsys.readouterr().out
        assert printed.isascii()
        assert printed.replace("\n", "").isprintable()
        found = json.loads(printed)
        assert (found[0] if form is ListFormat.JSON else found) == rows[0], "it has the same meaning"
    print_list(rows, columns=("name",), form=ListFormat.CSV)
    assert HOSTILE in capsys.readouterr().out, "other programs get the unescaped text"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_list(rows, columns=("name",), form=ListFormat.CSV)
    assert SAFE in capsys.readouterr().out


def test_notes_do_not_control_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    note(f"error: no such topic name={HOSTILE}")
    assert SAFE in capsys.readouterr().err
