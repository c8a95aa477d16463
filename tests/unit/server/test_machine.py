"""The memory limit is the smallest of the machine's and the control groups'."""

from __future__ import annotations

from pathlib import Path

from polywire.server.resources import RESERVED_BYTES, memory_bytes, memory_shares

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


def test_limits_of_control_groups_version_1_apply(tmp_path: Path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    (groups / "memory" / "outer" / "inner").mkdir(parents=True)
    own.write_text("9:cpu,cpuacct:/other\n4:memory:/outer/inner\n0::/\n")
    whole = memory_bytes(groups, own)
    (groups / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")  # no limit
    assert memory_bytes(groups, own) == whole
    (groups / "memory" / "outer" / "memory.limit_in_bytes").write_text(f"{6 * MEBI}\n")
    assert memory_bytes(groups, own) == 6 * MEBI


def test_all_parts_fit_the_memory() -> None:
    for total, cache in ((1024, 88), (512, 32)):
        shares = memory_shares(total * MEBI, processes=2)
        assert shares.cache == cache * MEBI
        in_process = shares.cache + 4 * shares.journal_file + shares.state + shares.requests + shares.responses
        assert in_process + min(RESERVED_BYTES, total * MEBI // 4) <= total * MEBI // 2
