"""The memory limit is the smallest of the machine's and the control groups'."""

from __future__ import annotations

from pathlib import Path

from polywire.server.resources import memory_bytes

MEBI = 1024 * 1024


def test_the_smallest_limit_of_all_control_groups_applies(tmp_path: Path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    (groups / "outer" / "inner").mkdir(parents=True)
    own.write_text("0::/outer/inner\n")
    whole = memory_bytes(groups, own)
    assert whole > 0
    (groups / "outer" / "inner" / "memory.max").write_text("max\n")
    assert memory_bytes(groups, own) == whole
    (groups / "outer" / "memory.max").write_text(f"{7 * MEBI}\n")
    assert memory_bytes(groups, own) == 7 * MEBI
    (groups / "outer" / "inner" / "memory.max").write_text(f"{5 * MEBI}\n")
    assert memory_bytes(groups, own) == 5 * MEBI


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path / "none", tmp_path / "none") > 0
