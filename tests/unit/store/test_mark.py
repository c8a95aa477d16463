"""The mark of a data directory: found where it was made, and nowhere else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from polywire.store.mark import MARK_FILE, Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home.owned(tmp_path)
    (tmp_path / MARK_FILE).write_bytes(made.content())
    return made


def test_a_marked_directory_is_here(home: Home, tmp_path: Path) -> None:
    assert home.is_here()
    assert home.content().split(b"\n")[0] == str(os.getpid()).encode()
    assert home.directory == str(tmp_path.resolve())


def test_each_owner_has_a_mark_of_its_own(home: Home, tmp_path: Path) -> None:
    later = Home.owned(tmp_path)
    assert not later.is_here()
    (tmp_path / MARK_FILE).write_bytes(later.content())
    assert later.is_here()
    assert not home.is_here()


@pytest.mark.parametrize("content", [b"", b"17\n", b"17\n\n", b"17\nff\n", b"\xff" * 1000])
def test_other_content_is_no_mark(home: Home, tmp_path: Path, content: bytes) -> None:
    (tmp_path / MARK_FILE).write_bytes(content)
    assert not home.is_here()


@pytest.mark.parametrize("mark", [b"", b"short", bytes(17)])
def test_a_mark_of_the_wrong_size_is_nowhere(home: Home, tmp_path: Path, mark: bytes) -> None:
    told = replace(home, mark=mark)
    (tmp_path / MARK_FILE).write_bytes(told.content())
    assert not told.is_here()


@pytest.mark.parametrize("directory", ["", "/nowhere/at/all", "nul\0l"])
def test_a_directory_that_cannot_be_looked_into_is_not_here(home: Home, directory: str) -> None:
    assert not replace(home, directory=directory).is_here()


def test_a_pipe_in_its_place_keeps_nobody_waiting(home: Home, tmp_path: Path) -> None:
    (tmp_path / MARK_FILE).unlink()
    os.mkfifo(tmp_path / MARK_FILE)
    assert not home.is_here()
