"""The marker of a data directory is found where it was created, and nowhere else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from polywire.store.data_directory import MARK_FILE, DataDirectory


@pytest.fixture
def data_directory(tmp_path: Path) -> DataDirectory:
    made = DataDirectory.owned(tmp_path)
    (tmp_path / MARK_FILE).write_bytes(made.content(os.getpid()))
    return made


def test_the_marker_is_found(data_directory: DataDirectory, tmp_path: Path) -> None:
    assert data_directory.is_here()
    assert data_directory.content(os.getpid()).split(b"\n")[0] == str(os.getpid()).encode()
    assert data_directory.path == str(tmp_path.resolve())


def test_each_owner_has_its_own_marker(data_directory: DataDirectory, tmp_path: Path) -> None:
    later = DataDirectory.owned(tmp_path)
    assert not later.is_here()
    (tmp_path / MARK_FILE).write_bytes(later.content(os.getpid()))
    assert later.is_here()
    assert not data_directory.is_here()


@pytest.mark.parametrize("content", [b"", b"17\n", b"17\n\n", b"17\nff\n", b"\xff" * 1000])
def test_other_content_is_not_a_marker(data_directory: DataDirectory, tmp_path: Path, content: bytes) -> None:
    (tmp_path / MARK_FILE).write_bytes(content)
    assert not data_directory.is_here()


@pytest.mark.parametrize("mark", [b"", b"short", bytes(17)])
def test_a_marker_of_the_wrong_size_is_not_found(data_directory: DataDirectory, tmp_path: Path, mark: bytes) -> None:
    reported = replace(data_directory, mark=mark)
    (tmp_path / MARK_FILE).write_bytes(reported.content(os.getpid()))
    assert not reported.is_here()


@pytest.mark.parametrize("directory", ["", "/nowhere/at/all", "nul\0l"])
def test_a_marker_in_an_unreadable_directory_is_not_found(data_directory: DataDirectory, directory: str) -> None:
    assert not replace(data_directory, path=directory).is_here()


def test_a_pipe_instead_of_the_marker_does_not_block(data_directory: DataDirectory, tmp_path: Path) -> None:
    (tmp_path / MARK_FILE).unlink()
    os.mkfifo(tmp_path / MARK_FILE)
    assert not data_directory.is_here()
