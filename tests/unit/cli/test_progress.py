"""Commands report what they do before slow work ends. Times are not measured: the work waits for the report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from polywire.cli import progress
from polywire.cli.main import run
from polywire.cli.output import Failed
from polywire.cli.progress import counted, reported

REPORT_S_MAX: Final = 60.0

Wait = Callable[..., Any]


@pytest.fixture
def wait_for_report(monkeypatch: pytest.MonkeyPatch) -> Wait:
    """Return a function that replaces slow work: it waits for a report, and fails as a command does."""
    noted: list[str] = []
    is_noted = threading.Event()

    def note(text: str) -> None:
        noted.append(text)
        is_noted.set()

    def work(*_: object, **__: object) -> None:
        assert is_noted.wait(REPORT_S_MAX), "the command was silent during its work"
        raise Failed(noted[0])

    monkeypatch.setattr(progress, "note", note)
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    return work


def test_details_are_in_a_report(wait_for_report: Wait) -> None:
    with pytest.raises(Failed, match="copying … seconds=0 lag=7"), reported("copying", lambda: "lag=7"):
        wait_for_report()


def test_counts_are_in_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    has_count = threading.Event()
    monkeypatch.setattr(progress, "note", lambda text: has_count.set() if "1,000 records" in text else None)
    monkeypatch.setattr(progress, "QUIET_S", 0.001)
    monkeypatch.setattr(progress, "REPORTS_S", 0.001)
    with counted("copying") as show:
        show(1000, ", lag 7")
        assert has_count.wait(REPORT_S_MAX)


def test_short_activities_are_not_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "QUIET_S", threading.TIMEOUT_MAX)
    with reported("copying"):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("slow", "activity", "words"),
    [
        ("backup.take_backup", "backing up data_dir='data'", ["backup", "create", "shelf", "--data-dir", "data"]),
        ("backup.restore_backup", "restoring backup='shelf'", ["backup", "restore", "shelf", "--data-dir", "data"]),
        ("doctor.open_offline", "reading data_dir='data'", ["doctor", "--data-dir", "data"]),
        ("doctor.open_offline", "reading data_dir='data'", ["log", "verify", "--data-dir", "data"]),
        ("doctor.open_offline", "reading data_dir='data'", ["segment", "verify", "--data-dir", "data"]),
        ("log.open_offline", "reading data_dir='data'", ["log", "repair", "--data-dir", "data"]),
        ("cluster.probe", "checking the bucket", ["cluster", "check", "file:///bucket"]),
        ("cluster.probe", "checking the bucket", ["cluster", "init", "file:///bucket"]),
        (
            "link.AdminApi.request",
            "waiting for the source",
            ["link", "create", "old", "--from", "kafka://old:9092", "-t", "a"],
        ),
        ("compare._compare", "comparing", ["record", "compare", "a", "b"]),
        ("record._run_copy", "copying", ["record", "copy", "a", "b"]),
        ("sql.connect", "running the statement", ["sql", "SELECT 1"]),
    ],
)
def test_commands_report_slow_work(
    slow: str,
    activity: str,
    words: list[str],
    wait_for_report: Wait,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"polywire.cli.{slow}", wait_for_report)
    monkeypatch.setattr("polywire.cli.cluster.open_bucket", lambda url: url)
    monkeypatch.setattr("polywire.cli.backup.find_backup", lambda path: path)
    assert run(words) == 1
    assert capsys.readouterr().err.startswith(f"error: {activity} … seconds=0")
