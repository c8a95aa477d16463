"""``serve --detach`` and ``stop`` with existing files: locks of other starts, links, and invalid process ids."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from polywire.cli.detached import beside, running, serve_detached
from polywire.cli.output import Failed
from polywire.server.config import ServeConfig


def _serve(config: ServeConfig) -> int:
    """Report that the broker is ready, then wait for a signal."""
    assert config.ready_file is not None
    config.ready_file.touch()
    signal.pause()
    return 0


def _never(_: ServeConfig) -> int:
    raise AssertionError("the broker was started")


@pytest.mark.parametrize("content", ["", "not a number", "-1", "0", "9" * 10, "9" * 400])
def test_a_second_start_does_not_touch_the_files_of_the_first(tmp_path: Path, content: str) -> None:
    data_dir = tmp_path / "data"
    ready = beside(data_dir, ".ready")
    ready.touch()
    beside(data_dir, ".pid").write_text(content, "ascii")
    with beside(data_dir, ".pid").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Failed, match="already running"):
            serve_detached(ServeConfig(data_dir=data_dir), _never)
        assert running(data_dir) is None, "the process id is unknown"
    assert ready.exists(), "the other broker still accepts connections"
    assert beside(data_dir, ".pid").read_text("ascii") == content


def test_a_pid_file_that_is_a_symbolic_link_is_rejected(tmp_path: Path) -> None:
    data_dir, other = tmp_path / "data", tmp_path / "other"
    other.write_text("precious", "ascii")
    beside(data_dir, ".pid").symlink_to(other)
    with pytest.raises(Failed, match="symbolic link"):
        serve_detached(ServeConfig(data_dir=data_dir), _never)
    with pytest.raises(Failed, match="symbolic link"):
        running(data_dir)
    assert other.read_text("ascii") == "precious"


def test_the_root_directory_is_rejected() -> None:
    with pytest.raises(Failed, match="root directory"):
        running(Path("/"))


@pytest.mark.parametrize(
    ("spelled", "expected"), [(".", "here.pid"), ("below/..", "here.pid"), ("data", "here/data.pid")]
)
def test_the_files_are_named_after_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str, expected: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert beside(Path(spelled), ".pid").absolute() == tmp_path / expected


def test_a_killed_broker_releases_the_lock(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    beside(data_dir, ".pid").write_text("left over by a broker that was killed", "ascii")
    for _ in range(2):
        assert serve_detached(ServeConfig(data_dir=data_dir), _serve) == 0
        pid = running(data_dir)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert running(data_dir) is None


def test_a_full_disk_is_reported_and_no_broker_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = tmp_path / "data"

    def full(_: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Failed, match=r"No space left on device path=.*data\.pid"):
        serve_detached(ServeConfig(data_dir=data_dir), _serve)
    assert running(data_dir) is None


def test_a_broker_that_is_starting_can_be_stopped(tmp_path: Path) -> None:
    """The process id is written to the file before the broker does anything."""
    data_dir = tmp_path / "data"

    def starting(_: ServeConfig) -> int:
        while running(data_dir) != os.getpid():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
        return 0

    with pytest.raises(Failed, match="did not start"):
        serve_detached(ServeConfig(data_dir=data_dir), starting)
    assert running(data_dir) is None


def test_a_slow_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker is ready only after its start was reported."""
    reported = tmp_path / "reported"

    def serve_late(config: ServeConfig) -> int:
        while not reported.exists():
            time.sleep(0.01)
        return _serve(config)

    monkeypatch.setattr("polywire.cli.progress.QUIET_S", 0.0)
    monkeypatch.setattr("polywire.cli.progress.note", lambda text: reported.write_text(text, "utf-8"))
    serve_detached(ServeConfig(data_dir=tmp_path / "data"), serve_late)
    pid = running(tmp_path / "data")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert reported.read_text("utf-8") == "starting … seconds=0"
