"""The command that runs two versions in one cluster. Its runs take minutes, and need the history of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.histories.upgrades import tree_of


def test_a_commit_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="fetch the whole history"):
        tree_of("no-such-commit", tmp_path)
