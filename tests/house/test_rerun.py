"""``make test`` runs few failed tests once more, and says which of them are flaky."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rerun import FLAKY_MAX

TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_fails(number):
    seen = pathlib.Path(f"seen{{number}}")
    was_there, _ = seen.exists(), seen.touch()
    assert was_there and not {always}
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", *arguments]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return found.returncode, found.stdout


@pytest.mark.parametrize(
    ("count", "always", "code", "line"),
    [
        (1, False, 0, "FLAKY: failed with other tests, and passed alone: test_it.py::test_fails[0]"),
        (FLAKY_MAX, True, 1, "FAILED, also alone: test_it.py::test_fails[0]"),
        (FLAKY_MAX + 1, False, 1, ""),
    ],
)
def test_a_second_run_forgives_few_flaky_tests_only(
    tmp_path: Path, count: int, always: bool, code: int, line: str
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.format(count=count, always=always))
    assert run(tmp_path, "pytest", "-q", "test_it.py")[0] == 1
    found, output = run(tmp_path, "tests.rerun")
    assert found == code
    assert line in output
    assert ("test_fails" in output) == bool(line)


def test_each_test_has_its_own_verdict(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.format(count=2, always="number"))
    assert run(tmp_path, "pytest", "-q", "test_it.py")[0] == 1
    code, output = run(tmp_path, "tests.rerun")
    assert code == 1
    assert output.splitlines()[-2:] == [
        "FLAKY: failed with other tests, and passed alone: test_it.py::test_fails[0]",
        "FAILED, also alone: test_it.py::test_fails[1]",
    ]


@pytest.mark.parametrize(
    ("source", "code", "outcome"),
    [
        ("def test_fails(): pass", 0, "FLAKY: failed with other tests, and passed alone"),
        ("import nothing_of_this_name", 2, "FAILED, and could not be run alone"),
    ],
)
def test_a_module_that_could_not_be_imported_has_one_verdict(
    tmp_path: Path, source: str, code: int, outcome: str
) -> None:
    (tmp_path / "test_it.py").write_text("import nothing_of_this_name")
    assert run(tmp_path, "pytest", "-q", "test_it.py")[0] == 2
    (tmp_path / "test_it.py").write_text(source)
    found, output = run(tmp_path, "tests.rerun")
    assert (found, output.splitlines()[-1]) == (code, f"{outcome}: test_it.py")


def test_a_second_run_without_failures_is_a_failure(tmp_path: Path) -> None:
    assert run(tmp_path, "tests.rerun") == (1, "")
