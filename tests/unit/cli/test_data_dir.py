"""Commands that read a data directory find the one that ``polywire serve`` would use in the same working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from polywire.cli.main import run
from tests.unit.cli.test_doctor import write_records

COMMANDS = (["doctor"], ["log", "verify"], ["segment", "list"], ["segment", "verify"], ["backup", "create", "backups"])


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("settings", "directory"), [("", "polywire-data"), ('data-dir = "other"', "other")])
def test_the_data_directory_of_the_settings_file(
    working: Path, words: list[str], settings: str, directory: str
) -> None:
    (working / "polywire.toml").write_text(f'[serve]\nflux = "off"\n{settings}\n')
    assert run(words) == 1, "the directory does not exist"
    write_records(working / directory, count=1)
    assert run(words) == 0


@pytest.mark.parametrize("words", [["doctor"], ["log", "verify"]], ids=" ".join)
def test_the_bucket_of_the_settings_file(working: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (working / "polywire.toml").write_text(f'[serve]\nbucket = "file://{working / "bucket"}"\n')
    assert run(words) == 4
    assert "there is no log in this bucket" in capsys.readouterr().out
    write_records(working / "named", count=1)
    assert run([*words, "--data-dir", "named"]) == 0, "the user's choice wins"


def test_the_broker_that_stop_looks_for(working: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (working / "polywire.toml").write_text('[serve]\ndata-dir = "other"\n')
    assert run(["stop"]) == 1
    assert repr(str(working / "other")) in capsys.readouterr().err
    assert run(["stop", "--data-dir", "named"]) == 1
    assert repr(str(working / "named")) in capsys.readouterr().err


def test_a_settings_file_that_is_not_toml(working: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (working / "polywire.toml").write_text("[serve\n")
    assert run(["doctor"]) == 2
    assert "polywire.toml" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["backup", "restore", "backups"], ["log", "repair"]], ids=" ".join)
def test_commands_that_write_need_the_name_of_the_directory(working: Path, words: list[str]) -> None:
    (working / "polywire.toml").write_text('[serve]\ndata-dir = "other"\n')
    write_records(working / "other", count=1)
    assert run(words) == 2
