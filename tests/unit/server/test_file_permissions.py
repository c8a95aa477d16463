"""Permissions of files and directories."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from polywire.errors import Invalid
from polywire.server.file_permissions import check_secret, close_to_others
from polywire.server.users import add_user, load_users


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_data_directory_is_created_private(tmp_path: Path) -> None:
    directory = tmp_path / "above" / "data"
    close_to_others(directory, marks=("journal",))
    assert mode_of(directory) == 0o700
    (directory / "journal").mkdir()
    seed = directory / "journal" / "seed"
    seed.touch(0o644)
    seed.chmod(0o644)
    directory.chmod(0o755)
    close_to_others(directory, marks=("journal",))
    assert (mode_of(directory), mode_of(seed)) == (0o700, 0o600)


@pytest.mark.parametrize("name", ["taken", "taken/below"])
def test_a_data_directory_that_is_a_file_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(Invalid, match="path is a file, or below one path="):
        close_to_others(tmp_path / name, marks=())


@pytest.mark.parametrize(
    ("held", "is_taken"), [(None, True), ("lost+found", True), ("journal", True), ("letters", False)]
)
def test_a_foreign_directory_is_rejected(tmp_path: Path, held: str | None, is_taken: bool) -> None:
    """Such as the system's temporary directory, or the working directory if the configured name is empty."""
    directory = tmp_path / "there"
    directory.mkdir()
    directory.chmod(0o755)
    if held is not None:
        (directory / held).mkdir()
    if is_taken:
        close_to_others(directory, marks=("journal",))
        assert mode_of(directory) == 0o700
        return
    with pytest.raises(
        Invalid, match=r"is not empty and other users can access it.* chmod 700\) path='.*there' holds='letters'"
    ):
        close_to_others(directory, marks=("journal",))
    assert mode_of(directory) == 0o755
    directory.chmod(0o700)
    close_to_others(directory, marks=("journal",))


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o604, 0o602, 0o777])
def test_a_users_file_that_others_can_access_is_rejected(tmp_path: Path, mode: int) -> None:
    users = tmp_path / "users"
    add_user(users, "alice", "secret", "all")
    assert [user.name for user in load_users(users)] == ["alice"]
    users.chmod(mode)
    with pytest.raises(Invalid, match=f"chmod 600 .* mode={mode:o}"):
        load_users(users)


def test_a_missing_users_file_is_reported_with_the_command_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(
        Invalid, match=r"the users file does not exist .run polywire user add NAME --users .*users. file="
    ):
        load_users(tmp_path / "users")


def test_the_group_may_read_a_users_file_of_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = tmp_path / "users"
    users.touch()
    users.chmod(0o640)
    owner = users.stat().st_uid
    monkeypatch.setattr("polywire.server.file_permissions.ROOT_UID", owner)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    check_secret(users)
    users.chmod(0o660)
    with pytest.raises(Invalid):
        check_secret(users)
