"""``polywire backup``: create, list, verify and restore, with and without damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.cli.backup import find_backup, list_backups
from polywire.cli.doctor import EXIT_BROKEN, EXIT_DAMAGED
from polywire.cli.main import run
from polywire.clock import SystemClock
from polywire.log.doctor import OfflineLog
from polywire.log.opening import lock_directory
from tests.unit.cli.test_doctor import SIZES, TOPIC, flip, write_records
from tests.unit.log.rig import RigLoop


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_records(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def shelf(tmp_path: Path, directory: Path) -> Path:
    assert run(["backup", "create", str(tmp_path / "shelf"), "--data-dir", str(directory)]) == 0
    return tmp_path / "shelf"


def contents(directory: Path) -> dict[Path, bytes]:
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_backup_changes_nothing_and_can_be_restored(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(directory)
    assert run(["backup", "create", str(tmp_path / "shelf"), "--data-dir", str(directory)]) == 0
    assert contents(directory) == before
    assert run(["backup", "restore", str(tmp_path / "shelf"), "--data-dir", str(tmp_path / "restored")]) == 0
    capsys.readouterr()
    listed = []
    for data in (directory, tmp_path / "restored"):
        assert run(["segment", "list", "--data-dir", str(data), "-o", "json"]) == 0
        listed.append([row for row in json.loads(capsys.readouterr().out) if row["state"] == "live"])
        assert run(["log", "verify", "--data-dir", str(data)]) == 0
        capsys.readouterr()
    assert listed[0] == listed[1] != []
    assert (tmp_path / "shelf").stat().st_mode & 0o077 == 0, "other users must not read it"
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "restored").rglob("*"))


@pytest.fixture
def two_logs(tmp_path: Path) -> Path:
    """The directory of a broker with two processes."""
    write_records(tmp_path / "both")
    write_records(tmp_path / "both/shards/0001", is_killed=True)
    return tmp_path / "both"


def test_a_backup_has_the_logs_of_all_processes(
    tmp_path: Path, two_logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf, restored = tmp_path / "shelf", tmp_path / "restored"
    for _ in range(2):
        assert run(["backup", "create", str(shelf), "--data-dir", str(two_logs)]) == 0
    facts = [json.loads((shelf / name / "backup.json").read_text()) for name in list_backups(shelf)]
    live = len(list(two_logs.glob("segments/*"))) + len(list(two_logs.glob("shards/0001/segments/*")))
    assert [(fact["segments"], fact["copied_segments"]) for fact in facts] == [(live, live), (live, 0)]
    assert run(["backup", "restore", str(shelf), "--data-dir", str(restored)]) == 0
    for part in (restored, restored / "shards/0001"):
        assert end_of(part) == 400
    segment = min(find_backup(shelf).glob("shards/0001/segments/*"))
    flip(segment, segment.stat().st_size // 4)
    capsys.readouterr()
    assert run(["backup", "verify", str(shelf), "-o", "json"]) == EXIT_DAMAGED
    (found,) = json.loads(capsys.readouterr().out)
    assert found["path"] == f"shards/0001/segments/{segment.name}"


def test_an_interrupted_backup_of_more_processes_leaves_nothing_in_the_next(
    tmp_path: Path, two_logs: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    with monkeypatch.context() as patched:
        patched.setattr("polywire.cli.backup._finish", interrupt)
        run(["backup", "create", str(shelf), "--data-dir", str(two_logs)])
    assert (shelf / ".unfinished/shards/0001/segments").is_dir()
    assert run(["backup", "create", str(shelf), "--data-dir", str(directory)]) == 0
    assert not list(find_backup(shelf).glob("shards/*"))


def interrupt(*arguments: Any) -> None:
    raise OSError("interrupted")


def end_of(directory: Path) -> int:
    broker = Broker.open(directory, BrokerSettings(), RigLoop(), SystemClock(), log_settings=SIZES)
    try:
        return broker.topic(TOPIC).partitions[0].log.next_offset
    finally:
        broker.close()


def test_the_list_reports_what_each_backup_copied(
    shelf: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["backup", "create", str(shelf), "--data-dir", str(directory)]) == 0
    capsys.readouterr()
    assert run(["backup", "list", str(shelf), "-o", "json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["copied_segments"] == first["segments"] == second["segments"] > 0
    assert (second["copied_segments"], second["copied_bytes"]) == (0, 0)
    assert first["backup"] < second["backup"]


def test_a_snapshot_that_is_deleted_during_the_backup_is_in_it(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy broker replaces snapshots faster than the copied journal is replayed."""
    original = OfflineLog

    def delete_snapshots_first(*arguments: Any) -> OfflineLog:
        for snapshot in directory.glob("snapshots/*"):
            snapshot.unlink()
        return original(*arguments)

    assert list(directory.glob("snapshots/*"))
    monkeypatch.setattr("polywire.cli.backup.OfflineLog", delete_snapshots_first)
    assert run(["backup", "create", str(tmp_path / "shelf"), "--data-dir", str(directory)]) == 0
    assert run(["backup", "verify", str(tmp_path / "shelf")]) == 0


def test_segments_of_another_log_with_the_same_names_are_copied(tmp_path: Path, shelf: Path) -> None:
    write_records(tmp_path / "other")  # its segments have the same names and sizes
    assert run(["backup", "create", str(shelf), "--data-dir", str(tmp_path / "other")]) == 0
    ours = sorted(find_backup(shelf).glob("segments/*"))
    assert [path.name for path in ours] == [path.name for path in sorted((tmp_path / "other/segments").glob("*"))]
    assert all(path.read_bytes() == (tmp_path / "other/segments" / path.name).read_bytes() for path in ours)


def test_verify_reports_damage_of_a_backup(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["backup", "verify", str(shelf)]) == 0
    segment = min(find_backup(shelf).glob("segments/*"))
    flip(segment, segment.stat().st_size // 4)
    capsys.readouterr()
    assert run(["backup", "verify", str(shelf), "-o", "json"]) == EXIT_DAMAGED
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["path"], found["topic"]) == (f"segments/{segment.name}", TOPIC)
    segment.unlink()
    assert run(["backup", "verify", str(shelf)]) == EXIT_BROKEN


def test_a_damaged_segment_is_reported_and_not_linked_by_later_backups(tmp_path: Path, directory: Path) -> None:
    segment = min(directory.glob("segments/*"))
    sound = segment.read_bytes()
    flip(segment, len(sound) // 4)
    words = ["backup", "create", str(tmp_path / "shelf"), "--data-dir", str(directory)]
    assert run(words) == EXIT_DAMAGED
    segment.write_bytes(sound)
    assert run(words) == 0
    assert run(["backup", "verify", str(tmp_path / "shelf")]) == 0


def test_a_broken_backup_is_not_restored(tmp_path: Path, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(find_backup(shelf) / "segments")
    assert run(["backup", "restore", str(shelf), "--data-dir", str(tmp_path / "restored")]) == 1
    assert "code=corrupt" in capsys.readouterr().err.replace("\n", " ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "shelf"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["create", "{}/new", "--data-dir", "{}/nothing"], "the directory is not a broker's data directory"),
        (["restore", "{}/shelf", "--data-dir", "{}/data"], "data directory is not empty"),
        (["restore", "{}/data", "--data-dir", "{}/new"], "no backup found"),
        (["verify", "{}/nothing"], "no backup found"),
    ],
)
def test_invalid_arguments_are_rejected(
    words: list[str], message: str, tmp_path: Path, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["backup", *(word.format(tmp_path) for word in words)]) == 1
    assert message in capsys.readouterr().err


def test_only_one_backup_at_a_time(shelf: Path, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unlock = lock_directory(shelf)
    try:
        assert run(["backup", "create", str(shelf), "--data-dir", str(directory)]) == 1
    finally:
        unlock()
    assert "another backup is in progress" in capsys.readouterr().err
