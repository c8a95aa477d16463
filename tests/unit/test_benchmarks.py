"""What the benchmarks choose and how they judge; that they run is seen when they are run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import instructions
from benchmarks.__main__ import beginning
from benchmarks.instructions import Comparison, workloads


def test_parts_are_chosen_by_how_they_begin() -> None:
    parts = ("flux", "spark-read", "spark-write")
    assert beginning(parts, "spark") == ["spark-read", "spark-write"]
    assert beginning(parts, "spark-write") == ["spark-write"]
    assert beginning(parts, "") == list(parts)
    with pytest.raises(ValueError, match="no such part"):
        beginning(parts, "storm")


def test_each_load_has_a_name_of_its_own_and_some_are_quick() -> None:
    names = [one.name for one in workloads()]
    assert len(names) == len(set(names))
    assert any(one.quick for one in workloads())


def test_more_instructions_are_noticed_and_a_spread_is_not() -> None:
    assert Comparison("a", [100, 101, 102], [110, 111, 112]).is_worse(1.05)
    assert not Comparison("a", [100, 101, 108], [110, 111, 112]).is_worse(1.05)
    assert not Comparison("a", [100, 101, 102], [50, 51, 120]).is_worse(1.05)
    assert Comparison("a", [100, 100, 100], [110, 120, 130]).ratio == 1.2


def test_nothing_is_counted_without_valgrind_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["instructions", "--quick"])
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert instructions.main() == 0
    assert "NOTHING WAS COUNTED" in capsys.readouterr().err


def test_nothing_is_counted_without_a_commit_to_compare_with_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["instructions", "--quick"])
    monkeypatch.setattr("shutil.which", str)
    monkeypatch.setattr(instructions, "commit_kept", str)  # as in a clone without history
    assert instructions.main() == 0
    assert "NOTHING WAS COUNTED" in capsys.readouterr().err


def test_a_result_is_kept_where_the_next_comparison_looks_for_it(tmp_path: Path) -> None:
    kept = tmp_path / f"today{instructions.RESULT}"
    instructions.show("f00", [Comparison("a", [2000, 2000], [1000, 1000])], kept)
    assert "| a | 2.0 | 1.0 | 0.500 | 0.0% |" in kept.read_text().splitlines()
    assert instructions.commit_kept() or not (instructions.HERE / ".git").exists()


def test_modules_are_taken_over_from_the_same_sources_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for tree in (here, there):
        (tree / "src").mkdir(parents=True)
        (tree / "setup.py").write_text("")
        (tree / "src" / "same.py").write_text("same")
        (tree / "src" / "other.py").write_text(str(tree))
    for name in ("same", "other"):
        (here / "src" / f"{name}.c").write_text("")
        (here / "src" / f"{name}.cpython-311.so").write_text("")
    monkeypatch.setattr(instructions, "HERE", here)
    instructions._take_over_modules(there)
    made = sorted(str(path.relative_to(there)) for path in there.rglob("*.[cs]*") if path.suffix in (".c", ".so"))
    assert made == ["build/lib/same.cpython-311.so", "src/same.c"]
    (here / "src" / "same.pxd").write_text("declared")
    (there / "src" / "same.c").unlink()
    instructions._take_over_modules(there)
    assert not (there / "src" / "same.c").exists()
